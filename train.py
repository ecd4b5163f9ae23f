"""Train a GPT: on a laptop, on one GPU, or on many.

    python train.py config/shakespeare_char.py
    python train.py config/gpt2_124m.py --batch_size=8
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py

Without a config file this trains GPT-2 124M on OpenWebText. The settings, with what they mean, are
in plaingpt/training/settings.py, or: python train.py --help
"""

import gc
import math
import sys
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from configurator import load_config, options_of
from model import GPT
from plaingpt.checks.preflight import preflight
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import Dataset, describe_batches, open_data
from plaingpt.monitoring.metrics import Metrics
from plaingpt.monitoring.references import find_reference
from plaingpt.monitoring.run_record import describe_run
from plaingpt.monitoring.run_report import write_report
from plaingpt.system import devices
from plaingpt.system.distributed import (
    Stopped,
    StopRequest,
    World,
    all_gather,
    all_reduce_mean,
    full_tensor,
    gloo_group,
    launched_world,
    print0,
)
from plaingpt.system.errors import phase, run_script
from plaingpt.system.files import lock_output_dir, make_writable, write_json
from plaingpt.system.formatting import command_for, quoted
from plaingpt.training import stopwatch
from plaingpt.training.averaging import averaged, go_on
from plaingpt.training.checkpoint import KEPT, Saver
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.evaluation import Watching, check_tasks, evaluated_bytes, mean_loss
from plaingpt.training.memory_check import fit_to_memory
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import WITHOUT_EFFECT, TrainConfig
from plaingpt.training.start import (
    Progress,
    Start,
    archive_previous_run,
    check_resumed,
    eval_sequences_of,
    run_shape,
    trim_logs,
    with_shape,
)
from plaingpt.training.step_guard import StepGuard, saved_when_it_fails


@dataclass
class Run:
    """A training run: what the loop works with."""

    config: TrainConfig  # resolved; with --minutes, max_iters changes during the run
    start: Start  # the weights that it begins with, or the checkpoint that it continues
    world: World
    device: torch.device
    dtype: str  # of the matmuls
    dataset: Dataset  # or Mixture
    train_data: BatchLoader  # or MixedLoader
    val_data: BatchLoader
    model: GPT  # the one that is saved
    wrapped: torch.nn.Module  # the same, compiled and in DDP or FSDP: what the loop calls
    optimizer: torch.optim.Optimizer
    context: object  # autocast, in which forward passes run
    scaler: torch.amp.GradScaler
    progress: Progress
    stop: StopRequest
    deadline: object = None  # of a run of minutes
    # what open_outputs adds
    record: dict = None  # the facts of the run, as run.json has them
    metrics: Metrics = None
    watching: Watching = None  # health, film, samples, benchmarks
    guard: StepGuard = None
    saver: Saver = None

    @property
    def micro_steps(self):
        """Micro-batches of this process in a step."""
        return self.config.accumulation() // self.world.size


# -----------------------------------------------------------------------------
# setup: settings → device and dtype → data → model → compile, DDP or FSDP → optimizer


@phase('setup')
def setup(config, start, world, device, device_why, given=frozenset()):
    """TrainConfig, Start → Run. given: settings set on the command line. Raises UserError."""
    devices.prepare_device(device)
    torch.manual_seed(config.seed + world.rank)  # processes must not share dropout masks
    group = gloo_group()
    config = all_gather(config, group)[0]  # rank 0's, as a config file may measure the machine
    start.agree(group)
    if world.size > 1 and not config.is_read_only:
        from plaingpt.parallel.job import check_shared
        check_shared(Path(config.out_dir), world, group)
    check_tasks(config)  # fails now where a benchmark cannot be loaded
    dataset = open_data(config, world)
    config, shape, dtype, compile = resolve(config, start, dataset, world, device, device_why,
                                            given)

    run = assemble(config, shape, start, dataset, world, device, dtype, compile)
    if config.minutes and not config.is_read_only:
        from plaingpt.training.deadline import fit_minutes
        fit_minutes(run, given, forward_backward, update)
    config, model, train_data, val_data = run.config, run.model, run.train_data, run.val_data
    print0(f'GPT of {model.num_parameters():,} parameters: {shape.n_layer} layers, '
           f'{shape.n_head} heads, {shape.n_embd} channels')
    print0(describe_batches(config, dataset, train_data, val_data))
    if start.resumed:
        resume(run, start.weights)
    preflight(run, forward_backward, update)
    if not config.minutes and not start.resumed:
        stopwatch.print_length(run, forward_backward, update)
    run.record = describe_run(config, dataset, train_data, device, dtype, compile, world,
                              start.resumed)
    open_outputs(run, group)
    if run.progress.evaluated and (ending := ending_of(run)):
        print0(f'iteration {run.progress.iter_num} is the end already, {ending}: a larger '
               '--max_iters, --minutes, or --patience=0, makes it longer')
    return run


def resolve(config, start, dataset, world, device, device_why, given):
    """Decide what a TrainConfig leaves open, once for the whole run: the shape of the model, dtype,
    compile, ddp or fsdp, the batch size, the length → (TrainConfig, GPTConfig, dtype, compile).
    Raises UserError."""
    if start.resumed:
        from plaingpt.training.deadline import length_of
        config = length_of(start.weights, config, given)
        check_resumed(start.weights, config, dataset)
    shape = run_shape(config, dataset, start)
    dtype, dtype_why = choose_training_dtype(config, shape, device, start.checkpoint, gloo_group())
    compile, compile_why = devices.choose_compile(config.compile, device)
    print0(f'device {device} ({device_why}) | dtype {dtype} ({dtype_why}) | '
           f'compile {compile} ({compile_why}) | processes {world.size}')
    config = fit_to_memory(with_shape(config, shape), shape, dtype, device)
    return config, shape, dtype, compile


def assemble(config, shape, start, dataset, world, device, dtype, compile):
    """Data, model, compile, DDP or FSDP, optimizer → Run, without its outputs."""
    train_data, val_data = open_batches(config, dataset, world, device)

    is_sharded = config.parallel == 'fsdp'
    if is_sharded:
        from plaingpt.parallel import sharding
    with sharding.parameters_on_meta() if is_sharded else nullcontext():
        model = GPT(shape)
    model.loss_chunk_tokens = 'auto'
    model.activation_checkpointing = config.activation_checkpointing
    if is_sharded:
        wrapped = shard(model, device, dtype, compile)
        if start.weights:
            start.weights.load_into(model)  # each process reads its rows
        else:
            sharding.scatter(GPT(shape).state_dict() if world.is_main else {}, model)
    else:
        if start.weights:
            start.weights.load_into(model)
        wrapped = model.to(device)
        if compile:
            devices.keep_compiled_graphs()
            wrapped = torch.compile(model)
        if world.size > 1:
            wrapped = replicate(wrapped, device)

    optimizer = build_optimizer(model, config, world.size)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
    autocast = nullcontext()
    if dtype != 'float32':
        autocast = torch.autocast(device.type, devices.DTYPES[dtype])
    return Run(config, start, world, device, dtype, dataset, train_data, val_data, model, wrapped,
               optimizer, autocast, scaler, Progress(eval_sequences=config.eval_sequences()),
               StopRequest())


def open_batches(config, dataset, world, device):
    """→ (loader of the training split, loader of the validation split)."""
    overfit = config.check == 'overfit'  # on the first step's sequences
    return tuple(
        dataset.loader(split, config.block_size, config.batch_size,
                       rank=world.rank, world_size=world.size, device=device, seed=config.seed,
                       micro_steps=config.accumulation() // world.size,
                       only_first=1 if overfit and split == 'train' else 0)
        for split in ('train', 'val'))


def replicate(model, device):
    """Wrap the model in DDP: each process has a copy, and all average their gradients."""
    ids = [device.index] if device.type == 'cuda' else None
    ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False  # rotary tables are constant, and the same everywhere
    return ddp


def shard(model, device, dtype, compile):
    """Wrap the model in FSDP2: each process keeps some rows of every weight, of its gradient and of
    its optimizer states, and gathers a block only to compute with it (ZeRO: Rajbhandari et al.
    2020). model: with parameters on meta → the same model, with arbitrary values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from plaingpt.parallel import sharding
    sharding.prepare(model, compile)
    mesh = init_device_mesh(device.type, (launched_world().size,))
    # Blocks are gathered in autocast's dtype: half the bytes, and autocast keeps no copies. The
    # embedding and the head, which may be one weight, are gathered whole in float32.
    low = MixedPrecisionPolicy(param_dtype=devices.DTYPES[dtype], reduce_dtype=torch.float32,
                               cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=low)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    sharding.materialize(model, device)
    return model


def resume(run, checkpoint):
    """Restore what a checkpoint holds beside the weights."""
    config, state, iter_num = run.config, checkpoint.state, checkpoint.iter_num
    checkpoint.load_optimizer(run.optimizer, run.model)
    go_on(run.optimizer, config.average_decay,
          iter_num if state['averaged_steps'] is None else state['averaged_steps'])
    if state['scaler']:  # empty if the run was not in float16 before
        run.scaler.load_state_dict(state['scaler'])
    run.train_data.resume_at(iter_num, state['sequences'])
    devices.set_rng_state(state['rng'], run.world.rank, run.device)
    # val_loss is None where an earlier version made a sample alone
    evaluated = state['evaluated'] and state['val_loss'] is not None and not config.eval_only
    best = state['best_val_loss']
    run.progress = Progress(
        iter_num, math.inf if best is None else best, state['evals_since_best'],
        evaluated_at=iter_num if evaluated else None, val_loss=state['val_loss'],
        saved_at=iter_num, saved_evaluated=evaluated,
        eval_sequences=eval_sequences_of(checkpoint, config))


def open_outputs(run, group):
    """Archive what this run would overwrite; then open its logs, probes, guard and saver."""
    config, start, progress = run.config, run.start, run.progress
    is_main, out_dir = run.world.is_main, Path(config.out_dir)
    run.record['reference'] = find_reference(run.record, WITHOUT_EFFECT)
    writing = is_main and not config.is_read_only
    saved = start.checkpoint.state if start.resumed else {}
    if writing:
        make_writable(out_dir / 'checkpoints')
        if archive := archive_previous_run(out_dir, progress.iter_num if start.resumed else -1):
            held = 'later steps' if start.resumed else 'an earlier run'
            print0(f'{out_dir} held {held}: kept in {archive}')
            run.record['went_back_to'] = progress.iter_num if start.resumed else None
        if start.resumed:
            trim_logs(out_dir, progress.iter_num, progress.evaluated)
        write_json(out_dir / 'run.json', run.record)
    backends = []
    if writing and (config.log_to or config.wandb_log):
        from plaingpt.monitoring.backends import open_backends
        backends = open_backends(config, run.record, saved.get('wandb_id'))
    run.metrics = Metrics(run, evaluated_bytes(run) if is_main else None,
                          saved.get('elapsed_s', 0.0), backends)
    run.watching = Watching(run, group, writing)
    run.guard = StepGuard(out_dir / 'anomalies.jsonl', run.train_data, run.device,
                          scaling=run.scaler.is_enabled())
    run.saver = Saver(
        out_dir, rank=run.world.rank, world_size=run.world.size, keep=KEPT,
        background=run.device.type == 'cuda')


# -----------------------------------------------------------------------------
# the loop


def train(run):
    """Evaluate, save, step, log, until the run ends → why it ended."""
    config, progress, metrics = run.config, run.progress, run.metrics  # iter_num: steps done
    metrics.begin(progress.iter_num)
    gc.unfreeze()  # what an earlier run of this process froze
    gc.collect()
    gc.freeze()  # no later collection looks at it: that would take 0.1 s and hold up all processes
    with closing(run.train_data.train_batches(progress.iter_num)) as batches:
        while True:
            # evaluate, save or stop: all processes decide the same
            if not progress.evaluated and evaluation_is_due(run):
                with suppress(Stopped):  # a signal ends it, and then nothing of it is logged
                    evaluate(run)
            ending = run.stop.agreed_signal() or ending_of(run)
            if ending or save_is_due(run):
                save(run)
                ending = ending or run.guard.gave_up  # save() may have set it
            if ending:
                run.saver.wait()
                return ending

            # step
            lr = get_lr(progress.iter_num, run.config)  # not `config`: --minutes changes max_iters
            for param_group in run.optimizer.param_groups:
                param_group['lr'] = lr * param_group['lr_scale']
            loss = forward_backward(run.wrapped, batches, run.micro_steps, run.scaler, run.context)
            progress.updating = True
            with run.watching.around_update(progress.iter_num + 1, run.scaler):
                grad_norm = update(run.wrapped, run.optimizer, run.scaler, config.grad_clip,
                                   run.guard, progress.iter_num, loss)
            progress.iter_num += 1
            progress.updating = False

            # log
            metrics.bar.update()
            if progress.iter_num % config.log_interval == 0:
                metrics.step(progress.iter_num, all_reduce_mean(loss.clone()), lr, grad_norm)
                if run.deadline:
                    run.deadline.decide(run)
                run.guard.report(metrics.print)  # here the host waits for the device anyway
            run.watching.look_inside(progress.iter_num)


def evaluation_is_due(run):
    last = run.config.eval_only or run.progress.iter_num >= run.config.max_iters
    return last or run.progress.iter_num % run.config.eval_interval == 0


def save_is_due(run):
    config, progress = run.config, run.progress
    if progress.evaluated and (
            config.always_save_checkpoint or progress.evals_since_best == 0):
        return True
    # 'auto' saves with the evaluations alone
    return config.checkpoint_interval != 'auto' \
        and progress.iter_num % config.checkpoint_interval == 0


def ending_of(run):
    """Why the run ends at this iteration, or None."""
    config, progress = run.config, run.progress
    if run.guard.gave_up:
        return run.guard.gave_up
    if config.eval_only or progress.iter_num >= config.max_iters:
        return 'all iterations are done'
    if 0 < config.patience <= progress.evals_since_best:
        return f'patience={config.patience}: {progress.evals_since_best} evaluations brought no ' \
               f'validation loss below {progress.best_val_loss:.4f}'
    return None


def forward_backward(model, batches, micro_steps, scaler, autocast):
    """Add up the gradients of a step's micro-batches → this process's mean loss, on the device.

    batches yields (idx, targets), or (idx, targets, weight) where not all tokens count. weight:
    tokens of the micro-batch that count / those of the step on all processes × processes, since
    gradients and losses are averaged over the processes"""
    step_loss = 0.0
    for micro_step in range(micro_steps):
        idx, targets, *weight = next(batches)
        is_last = micro_step == micro_steps - 1
        # DDP exchanges gradients after the last micro-batch only. FSDP does so after each one,
        # because a process keeps only its own rows of them.
        skips_sync = isinstance(model, DistributedDataParallel) and not is_last
        with model.no_sync() if skips_sync else nullcontext():
            with autocast:
                _, loss = model(idx, targets)
                loss = loss * weight[0] if weight else loss / micro_steps
            scaler.scale(loss).backward()
        step_loss += loss.detach()
    return step_loss


def update(model, optimizer, scaler, grad_clip, guard, iter_num, loss):
    """Clip the gradient and move the weights, unless something is not finite → gradient norm."""
    scaler.unscale_(optimizer)
    grad_norm = full_tensor(clip_grad_norm_(model.parameters(), grad_clip or math.inf))
    hold = guard.check_finite(iter_num, loss, grad_norm)  # a tensor: 1 where one is NaN or inf
    # Not scaler.step: it looks at gradients only, and would move the weights after a bad loss.
    if getattr(optimizer, '_step_supports_amp_scaling', False):
        optimizer.found_inf = hold  # torch's fused optimizers and ours skip the step if it is 1
        optimizer.step()
    elif not hold:  # others cannot skip by themselves, so the host waits for the device here
        optimizer.step()
    scaler.update()
    # DDP's gradients are views of its buckets; set to None, they would be allocated again.
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    return grad_norm


def evaluate(run):
    """Measure and log the losses of both splits, benchmarks and a sample, and note whether the loss
    is the best. A signal raises Stopped before anything is logged: the resumed run does it all."""
    progress = run.progress
    # averaged: with average_decay the weights are those of the average in here
    with run.metrics.paused('evaluation'), averaged(run.optimizer):
        losses = [mean_loss(run.wrapped, loader, progress.eval_sequences, run.context, run.stop)
                  for loader in (run.train_data, *run.val_data.parts)]
        scores, text = run.watching.look(losses)
    run.stop.raise_if_stopped()
    val_loss = run.dataset.mean(loss for loss, _ in losses[1:])
    is_best = progress.record_evaluation(val_loss)
    run.watching.log(losses, val_loss, is_best, scores, text)


def save(run):
    """Write a checkpoint of this iteration, unless it is saved already or nothing was trained."""
    progress = run.progress
    run.guard.report(run.metrics.print)
    is_saved = progress.saved_at == progress.iter_num \
        and (progress.saved_evaluated or not progress.evaluated)
    if progress.iter_num == 0 or is_saved or run.config.eval_only:
        return
    state = {**progress.state(), **run.dataset.state(), 'config': asdict(run.config),
             'left_s': run.deadline.left_s() if run.deadline else None,
             'sequences': run.train_data.sequences_before(progress.iter_num),
             'elapsed_s': run.metrics.elapsed_s(), 'wandb_id': run.metrics.wandb_id(),
             'dtype': run.dtype, 'scaler': run.scaler.state_dict(),
             'averaged_steps': getattr(run.optimizer, 'averaged_steps', 0)}
    with run.metrics.paused('save'), averaged(run.optimizer):
        run.saver.save(run.model, run.optimizer, state, devices.rng_state(run.device))
    progress.saved_at, progress.saved_evaluated = progress.iter_num, progress.evaluated


# -----------------------------------------------------------------------------
# the end


def finish(run, ending):
    """Close the logs, write the report, and say how the run ended."""
    config, out_dir, progress = run.config, run.config.out_dir, run.progress
    run.metrics.close()
    if run.world.is_main and not config.eval_only:
        record = dict(run.record, config=asdict(config), ending=ending,
                      end=run.metrics.at(progress.iter_num))
        write_json(Path(out_dir, 'run.json'), record)
        if config.report:
            write_report(out_dir, record, print0)
    if run.watching.film:
        print0(f'{command_for("plot")} --film {quoted(out_dir)} shows how it learned')
    if run.guard.gave_up:
        raise run.guard.error()
    if run.saver.failed:
        print0(f'the last checkpoint could not be written in {out_dir}: see the warning, then '
               'start again with --init_from=auto, which resumes from the one before, if any')
        sys.exit(1)
    if config.eval_only:
        return
    command = f'--out_dir={quoted(out_dir)}'
    if ending in StopRequest.NAMES and not progress.iter_num:
        print0(f'{ending}: stopped before the first iteration, so there is nothing to continue')
        return
    if ending in StopRequest.NAMES:
        print0(f'{ending}: stopped after iteration {progress.iter_num}; {command_for("train")} '
               f'{command} --init_from=resume continues from the last checkpoint')
        return
    if progress.iter_num < config.max_iters:
        print0(f'stopped after iteration {progress.iter_num}, {ending}')
    if progress.iter_num:
        print0(f'done: {out_dir}/checkpoints has the weights; {command_for("sample")} {command}')
    if progress.evals_since_best:
        print0('sample.py takes the best weights, of validation loss '
               f'{progress.best_val_loss:.4f}; --checkpoint=latest takes the last')


def main(argv):
    start = Start()
    config = load_config(TrainConfig, argv, __doc__, read_saved=start.read)
    given = options_of(TrainConfig, argv).keys()
    if config.minutes:
        from plaingpt.training.deadline import refuse_two_lengths
        refuse_two_lengths(config, given)
    world = launched_world()
    device, device_why = devices.choose_device(config.device, world.local_rank)
    devices.choose_compile(config.compile, device)  # refuses now what cannot work
    job = nullcontext()
    if world.launched:
        from plaingpt.parallel.job import process_group
        job = process_group(world, device, config.backend)
    writing = world.is_main and not config.is_read_only
    with lock_output_dir(config.out_dir) if writing else nullcontext(), job:
        run = setup(config, start, world, device, device_why, given)
        if config.check is True:
            return
        with run.stop, saved_when_it_fails(run, save), phase('training step'):
            finish(run, train(run))


if __name__ == '__main__':
    run_script(main)
