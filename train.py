"""Train a GPT: on a laptop, on one GPU, or on many.

    python train.py config/shakespeare_char.py
    python train.py config/gpt2_124m.py --batch_size=8
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py

Without a config file this trains GPT-2 124M on OpenWebText. The settings, with what they mean, are
in plaingpt/training/settings.py, or: python train.py --help
"""

import gc
import math
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from configurator import load_config, options_of
from model import GPT
from plaingpt.checks.preflight import preflight
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import Dataset, describe_batches, open_data
from plaingpt.parallel.blocks import apply_activation_checkpointing, compile_blocks
from plaingpt.system import devices
from plaingpt.system.distributed import (
    Stopped,
    StopRequest,
    World,
    all_gather,
    gloo_group,
    launched_world,
    print0,
)
from plaingpt.system.errors import phase, run_script
from plaingpt.system.files import lock_output_dir
from plaingpt.training.averaging import averaged, go_on
from plaingpt.training.checkpoint import KEPT, Saver
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.evaluation import check_tasks, mean_loss, mixture_error
from plaingpt.training.loss import chunked_cross_entropy
from plaingpt.training.memory_check import fit_to_memory
from plaingpt.training.monitor import Monitor
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.progress import IterationClock, Progress, make_clock, saved_when_it_fails
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import (
    Start,
    check_resumed,
    eval_sequences_of,
    run_shape,
    with_minutes,
    with_shape,
)
from plaingpt.training.step import Step


@dataclass
class Run:
    """A training run: what the loop works with."""

    config: TrainConfig
    start: Start  # the weights that it begins with, or the checkpoint that it continues
    world: World
    device: torch.device
    dtype: str  # precision of matrix multiplications
    compile: bool | str  # or 'blocks'
    dataset: Dataset  # or Mixture
    train_data: BatchLoader  # or MixedLoader
    val_data: BatchLoader
    model: GPT  # the one that is saved
    step: Step
    clock: IterationClock  # or MinuteClock
    progress: Progress
    saver: Saver
    stop: StopRequest


# -----------------------------------------------------------------------------
# setup


@phase('setup')
def setup(config, start, world, device, device_why):
    """TrainConfig, what the run starts from, this process and its device → Run. Raises UserError.
    """
    # All processes take the settings of rank 0, whose config file may have measured the machine,
    # and its checkpoint. Each draws dropout masks of its own.
    devices.prepare_device(device)
    torch.manual_seed(config.seed + world.rank)
    group = gloo_group()
    config = all_gather(config, group)[0]
    start.agree(group)
    if world.size > 1 and not config.is_read_only:
        from plaingpt.parallel.job import check_shared
        check_shared(Path(config.out_dir), world, group)
    check_tasks(config)  # fails now where a benchmark cannot be loaded

    # The architecture: that of the checkpoint, of pretrained weights, or a new one.
    dataset = open_data(config, world)
    if start.resumed:
        check_resumed(start.weights, config, dataset)
    gpt_config = run_shape(config, dataset, start)

    # Precision and torch.compile; then what has to follow from the free memory.
    dtype, dtype_why = choose_training_dtype(config, gpt_config, device, start.checkpoint, group)
    compile, compile_why = devices.choose_compile(config.compile, device)
    print0(f'device {device} ({device_why}) | dtype {dtype} ({dtype_why}) | '
           f'compile {compile} ({compile_why}) | processes {world.size}')
    config = fit_to_memory(with_shape(config, gpt_config), gpt_config, dtype, device)

    # Batches are a function of the seed and the step; each process reads its share.
    train_data, val_data = open_batches(config, dataset, world, device)

    # The model. With FSDP2 a process makes parameters without data, and gets its rows of them.
    is_sharded = config.parallel == 'fsdp'
    if is_sharded:
        from plaingpt.parallel import sharding
    with sharding.parameters_on_meta() if is_sharded else nullcontext():
        model = GPT(gpt_config)
    model.loss_function = chunked_cross_entropy
    apply_activation_checkpointing(model, config.activation_checkpointing)
    by_block = compile and (is_sharded or compile == 'blocks')
    if compile:
        devices.keep_compiled_graphs()
    if by_block:
        compile_blocks(model)
    if is_sharded:
        sharding.shard(model, device, dtype)  # calls fully_shard
    if start.weights:
        start.weights.load_into(model)
    elif is_sharded:
        sharding.scatter(GPT(gpt_config).state_dict() if world.is_main else {}, model)
    model.to(device)
    print0(f'GPT of {model.num_parameters():,} parameters: {gpt_config.n_layer} layers, '
           f'{gpt_config.n_head} heads, {gpt_config.n_embd} channels')
    print0(describe_batches(config, dataset, train_data, val_data))

    # What the loop calls: the model, compiled, and with DDP a copy in each process.
    called = torch.compile(model) if compile and not by_block else model
    if world.size > 1 and not is_sharded:
        called = replicate(called, device)

    # A step: gradients in autocast's precision, of losses that GradScaler scales for float16.
    optimizer = build_optimizer(model, config, world.size)
    autocast = nullcontext() if dtype == 'float32' else \
        torch.autocast(device.type, devices.DTYPES[dtype])
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
    step = Step(called, optimizer, scaler, autocast, config.grad_clip,
                micro_steps=config.accumulation() // world.size)

    saver = Saver(config.out_dir, rank=world.rank, world_size=world.size, keep=KEPT,
                  background=device.type == 'cuda')
    progress = Progress(eval_sequences=config.eval_sequences())
    if start.resumed:
        progress = resume(config, start.weights, step, model, train_data)
    return Run(config, start, world, device, dtype, compile, dataset, train_data, val_data, model,
               step, make_clock(config, start), progress, saver, StopRequest())


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


def resume(config, checkpoint, step, model, train_data):
    """Restore what a checkpoint holds beside the weights → Progress."""
    state, iter_num = checkpoint.state, checkpoint.iter_num
    checkpoint.load_optimizer(step.optimizer, model)
    go_on(step.optimizer, config.average_decay, state['averaged_steps'])
    if state['scaler']:  # empty if the run was not in float16 before
        step.scaler.load_state_dict(state['scaler'])
    train_data.resume_at(iter_num, state['sequences'])
    devices.set_rng_state(state['rng'], launched_world().rank, model.lm_head.weight.device)
    evaluated = state['evaluated'] and not config.eval_only
    best = state['best_val_loss']
    return Progress(
        iter_num, math.inf if best is None else best, state['evals_since_best'],
        evaluated_at=iter_num if evaluated else None, val_loss=state['val_loss'],
        saved_at=iter_num, saved_evaluated=evaluated,
        eval_sequences=eval_sequences_of(checkpoint, config))


# -----------------------------------------------------------------------------
# the loop


def train(run, monitor):
    """Evaluate, save, step, log, until the run ends → why it ended."""
    config, step, clock, progress = run.config, run.step, run.clock, run.progress
    monitor.metrics.begin(progress.iter_num)
    gc.unfreeze()  # what an earlier run of this process froze
    gc.collect()
    gc.freeze()  # no later collection looks at it: that would take 0.1 s and hold up all processes
    with closing(run.train_data.train_batches(progress.iter_num)) as batches:
        while True:
            # evaluate, save or stop: all processes decide the same
            done = clock.read(progress.iter_num)  # from 0 to 1; iter_num: updates made
            is_last = config.eval_only or done == 1
            if not progress.evaluated and (is_last or clock.evaluation_is_due(progress.iter_num,
                                                                              done)):
                with suppress(Stopped), clock.stopped():  # a signal: then nothing of it is logged
                    evaluate(run, monitor)
            ending = run.stop.agreed_signal() or ending_of(run, monitor, is_last)
            if ending or save_is_due(config, progress):
                save(run, monitor)
                ending = ending or monitor.skipped.gave_up  # save() may have set it
            if ending:
                run.saver.wait()
                return ending

            # step
            lr = clock.get_lr(progress.iter_num, done)
            loss = step.forward_backward(batches)
            progress.updating = True
            with monitor.around_update(progress.iter_num + 1):
                grad_norm = step.update(lr)
            progress.iter_num += 1
            progress.updating = False
            monitor.after_update(progress.iter_num, done, loss, lr, grad_norm)


def save_is_due(config, progress):
    if progress.evaluated and (config.always_save_checkpoint or progress.evals_since_best == 0):
        return True
    # 'auto' saves with the evaluations alone
    return config.checkpoint_interval != 'auto' \
        and progress.iter_num % config.checkpoint_interval == 0


def ending_of(run, monitor, is_last):
    """Why the run ends at this iteration, or None."""
    patience, progress = run.config.patience, run.progress
    if monitor.skipped.gave_up:
        return monitor.skipped.gave_up
    if is_last:
        return 'the time is over' if run.config.minutes else 'all iterations are done'
    if 0 < patience <= progress.evals_since_best:
        return f'patience={patience}: {progress.evals_since_best} evaluations brought no ' \
               f'validation loss below {progress.best_val_loss:.4f}'
    return None


def evaluate(run, monitor):
    """Measure and log the losses of both splits, benchmarks and a sample, and note whether the loss
    is the best. A signal raises Stopped before anything is logged: the resumed run does it all."""
    step, progress = run.step, run.progress
    # averaged: with average_decay the weights are those of the average in here
    with monitor.metrics.paused('evaluation'), averaged(step.optimizer):
        losses = [mean_loss(step.model, loader, progress.eval_sequences, step.autocast, run.stop)
                  for loader in (run.train_data, *run.val_data.parts)]
        scores, text = monitor.look(losses)
    run.stop.raise_if_stopped()
    val_losses, val_errors = zip(*losses[1:], strict=True)  # of each corpus of a mixture
    val_loss = run.dataset.mean(val_losses), mixture_error(run.dataset, val_errors)
    is_best = progress.record_evaluation(*val_loss)
    monitor.log_evaluation(losses, val_loss, is_best, scores, text)


def save(run, monitor):
    """Write a checkpoint of this iteration, unless it is saved already or nothing was trained."""
    step, progress = run.step, run.progress
    monitor.skipped.report(progress.iter_num, monitor.metrics.print)
    is_saved = progress.saved_at == progress.iter_num \
        and (progress.saved_evaluated or not progress.evaluated)
    if progress.iter_num == 0 or is_saved or run.config.eval_only:
        return
    state = {**progress.state(), **run.dataset.state(), **monitor.state(),
             'config': asdict(run.config), 'left_s': run.clock.left_s(),
             'sequences': run.train_data.sequences_before(progress.iter_num),
             'dtype': run.dtype, 'scaler': step.scaler.state_dict(),
             'averaged_steps': getattr(step.optimizer, 'averaged_steps', 0)}
    with monitor.metrics.paused('save'), averaged(step.optimizer):
        run.saver.save(run.model, step.optimizer, state, devices.rng_state(run.device))
    progress.saved_at, progress.saved_evaluated = progress.iter_num, progress.evaluated


def main(argv):
    start = Start()
    config = load_config(TrainConfig, argv, __doc__, read_saved=start.read)
    config = with_minutes(config, start, options_of(TrainConfig, argv).keys())
    world = launched_world()
    device, device_why = devices.choose_device(config.device, world.local_rank)
    devices.choose_compile(config.compile, device)  # refuses now what cannot work
    job = nullcontext()
    if world.launched:
        from plaingpt.parallel.job import process_group
        job = process_group(world, device, config.backend)
    writing = world.is_main and not config.is_read_only
    with lock_output_dir(config.out_dir) if writing else nullcontext(), job:
        run = setup(config, start, world, device, device_why)
        preflight(run)
        if config.check is True:
            return
        monitor = Monitor(run)
        with run.stop, saved_when_it_fails(run, monitor, save), phase('training step'):
            monitor.close(train(run, monitor))


if __name__ == '__main__':
    run_script(main)
