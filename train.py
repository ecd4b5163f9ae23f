"""Train a GPT on a laptop, on one GPU, or on many.

    python train.py config/shakespeare_char.py
    python train.py config/gpt2_124m.py --batch_size=8
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py

Without a config file, this trains GPT-2 124M on OpenWebText. Settings are documented in
plaingpt/training/settings.py and by: python train.py --help
"""

import gc
import math
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from configurator import load_config, options_of
from model import GPT
from plaingpt.checks.preflight import preflight
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import Dataset, Mixture, describe_batches, open_data
from plaingpt.data.mixtures import MixedLoader
from plaingpt.parallel.blocks import apply_activation_checkpointing, compile_blocks
from plaingpt.system import devices
from plaingpt.system.distributed import (
    Stopped,
    StopRequest,
    World,
    all_gather,
    check_shared,
    full_tensor,
    gloo_group,
    launched_world,
    print0,
    process_group,
)
from plaingpt.system.errors import phase, run_script
from plaingpt.system.files import lock_output_dir
from plaingpt.system.formatting import command_for, count_of, quoted
from plaingpt.training.attention import use_fast_attention
from plaingpt.training.bad_steps import BadSteps
from plaingpt.training.checkpoint import KEEP_NEWEST, Saver
from plaingpt.training.evaluation import check_tasks, evaluate
from plaingpt.training.loss import compute_loss_in_chunks
from plaingpt.training.memory import fit_to_memory
from plaingpt.training.monitor import Monitor
from plaingpt.training.optimizers import build_optimizer, ema_weights, resume_ema
from plaingpt.training.progress import (
    FINISHED,
    TIME_UP,
    IterationClock,
    MinuteClock,
    Progress,
    make_clock,
)
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import (
    StartingPoint,
    check_resumable,
    resolve_gpt_config,
    resolve_minutes,
    resumed_eval_sequences,
    with_gpt_config,
)

# -----------------------------------------------------------------------------
# the step


@dataclass
class Step:
    """A training step: the gradients of micro-batches, then an update of the weights. A step whose
    loss or gradient is not finite changes nothing (BadSteps)."""

    model: torch.nn.Module  # a GPT, perhaps compiled, and in DDP or FSDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: object  # context of the forward pass
    grad_clip: float  # maximum gradient norm; 0: no clipping
    micro_steps: int = 1  # micro-batches per step on this process

    def __post_init__(self):
        self.loss = None  # of the last forward_backward
        self.bad_steps = BadSteps(self.scaler, next(self.model.parameters()).device)

    def forward_backward(self, batches):
        """Accumulate the gradients of the micro-batches. Return this process's mean loss, on the
        device.

        batches: yields (idx, targets), and each micro-batch then counts 1 / micro_steps. If some
        tokens are masked, it yields (idx, targets, weight): weight is the micro-batch's share of
        the step's unmasked tokens on all processes, times the number of processes, which cancels
        the average over processes."""
        self.loss = 0.0
        for micro_step in range(self.micro_steps):
            idx, targets, *weight = next(batches)
            is_last = micro_step == self.micro_steps - 1
            # DDP averages gradients only after the last micro-batch. FSDP must do it after each
            # one, because a process stores only its shard of the gradient.
            skip_sync = isinstance(self.model, DistributedDataParallel) and not is_last
            with self.model.no_sync() if skip_sync else nullcontext():
                with self.autocast:
                    _, loss = self.model(idx, targets)
                    loss = loss * weight[0] if weight else loss / self.micro_steps
                self.scaler.scale(loss).backward()
            self.loss += loss.detach()
        return self.loss

    def update(self, lr):
        """Clip the gradient and update the weights, unless the step must be skipped. Return the
        gradient norm before clipping. lr: from the schedule; each parameter group scales it."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group['lr'] = lr * group['lr_scale']  # lr_scale: set by parameter_groups()
        self.scaler.unscale_(optimizer)
        max_norm = self.grad_clip or math.inf  # infinity: only measure the norm
        grad_norm = full_tensor(clip_grad_norm_(self.model.parameters(), max_norm))
        skip_step = self.bad_steps.must_skip(self.loss, grad_norm)  # 1.0 or 0.0, on the device
        # Not scaler.step(): it checks only gradients, and would update the weights after a bad
        # loss. The flag is torch's, for optimizers that skip the step themselves if found_inf is 1.
        if getattr(optimizer, '_step_supports_amp_scaling', False):
            optimizer.found_inf = skip_step
            optimizer.step()
        elif not skip_step:  # for other optimizers, the host waits for the device
            optimizer.step()
        else:
            self.bad_steps.uncalled += 1
        self.scaler.update()
        # DDP's gradients are views of its buckets; setting them to None would reallocate them.
        is_ddp = isinstance(self.model, DistributedDataParallel)
        optimizer.zero_grad(set_to_none=not is_ddp)
        return grad_norm


def build(gpt_config, config, device, dtype, compile=False, weights=None):
    """Make a GPT that is ready to train, with its step → (GPT, Step).

    dtype: of autocast; compile: True, False or 'blocks'; weights: see open_weights(), or None for
    initial ones. Checkpoints save the GPT; Step.model is the same, compiled and in DDP or FSDP."""
    world = launched_world()
    use_fsdp = config.parallel == 'fsdp'
    if use_fsdp:
        from plaingpt.parallel import sharding
    with sharding.parameters_on_meta() if use_fsdp else nullcontext():
        model = GPT(gpt_config)
    use_fast_attention(model)  # the same attention, faster on a CPU
    compute_loss_in_chunks(model, compile)  # the same loss in less memory
    apply_activation_checkpointing(model, config.activation_checkpointing)
    compile_by_block = compile and (use_fsdp or compile == 'blocks')
    if compile_by_block:
        compile_blocks(model)
    if use_fsdp:
        sharding.shard(model, device, dtype)  # fully_shard; each rank allocates only its shard
    if weights:
        weights.load_into(model)
    elif use_fsdp:  # rank 0 initializes
        initial = GPT(gpt_config).state_dict() if world.is_main else {}
        sharding.scatter(initial, model)
    model.to(device)

    # The loop calls the compiled model, wrapped in DDP if there are several processes.
    wrapped_model = torch.compile(model) if compile and not compile_by_block else model
    if world.size > 1 and not use_fsdp:
        wrapped_model = replicate(wrapped_model, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
    step = Step(wrapped_model, build_optimizer(model, config), scaler,
                devices.autocast(device, dtype), config.grad_clip,
                micro_steps=config.accumulation() // config.world_size())
    return model, step


def replicate(model, device):
    """Wrap the model in DDP: each process has a copy, which starts with rank 0's weights, and
    gradients are averaged over processes."""
    device_ids = [device.index] if device.type == 'cuda' else None
    ddp = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False  # the rotary tables are constants, equal on all ranks
    return ddp


# -----------------------------------------------------------------------------
# setup


@dataclass
class Run:
    """A training run: everything the loop needs."""

    config: TrainConfig
    start: StartingPoint  # scratch, pretrained weights, or the checkpoint to resume
    world: World
    device: torch.device
    dtype: str  # autocast's precision
    compile: bool | str  # True, False or 'blocks'
    dataset: Dataset | Mixture
    train_data: BatchLoader | MixedLoader
    val_data: BatchLoader | MixedLoader
    model: GPT  # what checkpoints save; step.model is the same model, compiled and in DDP
    step: Step
    clock: IterationClock | MinuteClock
    progress: Progress
    saver: Saver
    stop: StopRequest

    @property
    def is_new(self):
        """Whether the weights are still the initial ones."""
        return self.start.from_scratch and self.progress.iter_num == 0


@phase('setup')
def setup(config, start, world, device, device_why):
    """Build a Run from the settings and the starting point. Raises UserError."""
    # Every rank uses rank 0's settings and checkpoint, because a config file may benchmark the
    # machine. Each rank has its own seed, so that dropout masks differ.
    devices.prepare_device(device)
    group = gloo_group()
    config = all_gather(config, group)[0]
    start.share_checkpoint(group)
    torch.manual_seed(config.seed + world.rank)
    if world.size > 1 and not config.is_read_only:
        check_shared(Path(config.out_dir), world, group)
    check_tasks(config)  # fail early if a benchmark cannot be loaded

    # The architecture comes from the checkpoint, the pretrained weights or the settings.
    dataset = open_data(config, world)
    if start.resumed:
        check_resumable(start.weights, config, dataset)
    gpt_config = resolve_gpt_config(config, dataset, start)

    # Precision and torch.compile; then, if auto, DDP or FSDP and batch_size from the free memory.
    dtype, dtype_why = devices.choose_dtype(config.dtype, device, gpt_config.n_embd, training=True)
    compile, compile_why = devices.choose_compile(config.compile, device)
    print0(f'device {device} ({device_why}) | dtype {dtype} ({dtype_why}) | '
           f'compile {compile} ({compile_why}) | processes {world.size}')
    config = fit_to_memory(build, with_gpt_config(config, gpt_config), gpt_config, dtype, device)

    # A batch is a function of the seed and the step; each process reads its share.
    train_data, val_data = open_batches(config, dataset, world, device, start.checkpoint)

    model, step = build(gpt_config, config, device, dtype, compile, start.weights)
    print0(f'GPT with {model.num_parameters():,} parameters: '
           f'{count_of(gpt_config.n_layer, "layer")}, {count_of(gpt_config.n_head, "head")}, '
           f'{count_of(gpt_config.n_embd, "channel")}')
    print0(describe_batches(config, dataset, train_data, val_data))

    progress = Progress(eval_sequences=config.eval_sequences())
    if start.resumed:
        progress = resume(config, start.checkpoint, step, model)
    saver = Saver(config.out_dir, rank=world.rank, world_size=world.size, keep=KEEP_NEWEST,
                  background=device.type == 'cuda')
    return Run(config=config, start=start, world=world, device=device, dtype=dtype,
               compile=compile, dataset=dataset, train_data=train_data, val_data=val_data,
               model=model, step=step, clock=make_clock(config, start), progress=progress,
               saver=saver, stop=StopRequest())


def open_batches(config, dataset, world, device, checkpoint=None):
    """Return the loaders of the training and the validation split. checkpoint: where to resume"""
    options = dict(rank=world.rank, world_size=world.size, device=device, seed=config.seed,
                   micro_steps=config.accumulation() // world.size)
    overfit_steps = 1 if config.check == 'overfit' else 0  # the first step's sequences only
    train_data = dataset.loader('train', config.block_size, config.batch_size,
                                overfit_steps=overfit_steps, **options)
    val_data = dataset.loader('val', config.block_size, config.batch_size, **options)
    if checkpoint:
        train_data.resume_at(checkpoint.iter_num, checkpoint.state['sequences'])
    return train_data, val_data


def resume(config, checkpoint, step, model):
    """Restore everything except the weights and the position in the data from a checkpoint, and
    return the Progress."""
    state = checkpoint.state
    iter_num = checkpoint.iter_num
    checkpoint.load_optimizer(step.optimizer, model)
    resume_ema(step.optimizer, config.average_decay, state['averaged_steps'])
    if state['scaler']:  # empty unless the checkpoint was trained in float16
        step.scaler.load_state_dict(state['scaler'])
    devices.set_rng_state(state['rng'], launched_world().rank, model.lm_head.weight.device)
    evaluated = state['evaluated'] and not config.eval_only  # eval_only evaluates again
    best_val_loss = state['best_val_loss']
    if best_val_loss is None:
        best_val_loss = math.inf
    return Progress(
        iter_num=iter_num, best_val_loss=best_val_loss,
        evals_since_best=state['evals_since_best'], evaluated_at=iter_num if evaluated else None,
        val_loss=state['val_loss'], val_stderr=state['val_loss_stderr'],
        saved_at=iter_num, saved_evaluated=evaluated,
        eval_sequences=resumed_eval_sequences(checkpoint, config))


# -----------------------------------------------------------------------------
# the loop


def train(run, monitor):
    """Evaluate, save, step and log until the run ends. Return the reason why it ended."""
    config, step, clock, progress = run.config, run.step, run.clock, run.progress
    monitor.metrics.begin(progress.iter_num)
    freeze_existing_objects()
    with closing(run.train_data.train_batches(progress.iter_num)) as batches:
        while True:
            # evaluate, save or stop; all ranks make the same decision
            fraction_done = clock.read(progress.iter_num)  # from 0 to 1
            is_last = config.eval_only or fraction_done == 1
            eval_is_due = is_last or clock.evaluation_is_due(progress.iter_num, fraction_done)
            if eval_is_due and not progress.evaluated:
                with suppress(Stopped), clock.timed_evaluation(), \
                        monitor.metrics.paused('evaluation'):
                    evaluate(run, monitor, is_last)
            reason = run.stop.agreed_signal() or reason_to_stop(run, monitor, is_last)
            if reason or save_is_due(config, progress):
                save(run, monitor)
                reason = reason or monitor.skipped.gave_up  # save() updates it
            if reason:
                run.saver.wait()
                return reason

            # step
            lr = clock.get_lr(progress.iter_num, fraction_done)  # training/schedules.py
            loss = step.forward_backward(batches)
            progress.updating = True
            with monitor.around_update(progress.iter_num + 1):
                grad_norm = step.update(lr)  # clip the gradient, then optimizer.step()
            progress.iter_num += 1
            progress.updating = False
            monitor.after_update(progress.iter_num, fraction_done, loss, lr, grad_norm)


def freeze_existing_objects():
    """Exempt what exists now from garbage collection: a full collection takes 0.1 s and stalls all
    ranks."""
    gc.unfreeze()  # undo the freeze of an earlier run in this process
    gc.collect()
    gc.freeze()


def reason_to_stop(run, monitor, is_last):
    """Why the run stops at this iteration, or None if it continues."""
    patience = run.config.patience
    progress = run.progress
    if monitor.skipped.gave_up:
        return monitor.skipped.gave_up
    if is_last:
        return TIME_UP if run.config.minutes else FINISHED
    if 0 < patience <= progress.evals_since_best:
        evaluations = count_of(progress.evals_since_best, 'evaluation')
        return f'patience={patience}: validation loss did not improve on ' \
               f'{progress.best_val_loss:.4f} in the last {evaluations}'
    return None


def save_is_due(config, progress):
    if progress.evaluated and (config.always_save_checkpoint or progress.evals_since_best == 0):
        return True
    if config.checkpoint_interval == 'auto':  # only after evaluations
        return False
    return progress.iter_num % config.checkpoint_interval == 0


def save(run, monitor):
    """Save a checkpoint of this iteration, unless it exists or nothing has been trained yet."""
    step, progress = run.step, run.progress
    monitor.skipped.report(progress.iter_num, monitor.metrics.print)
    is_saved = progress.saved_at == progress.iter_num \
        and (progress.saved_evaluated or not progress.evaluated)
    if progress.iter_num == 0 or is_saved or run.config.eval_only:
        return
    # counters, tokenizer and data fingerprint, and logging state; see STATE_KEYS in checkpoint.py
    state = {**progress.state(), **run.dataset.state(), **monitor.state(),
             'config': asdict(run.config), 'left_s': run.clock.left_s(),
             'evaluations': run.clock.evaluations,
             'sequences': run.train_data.sequences_before(progress.iter_num),
             'dtype': run.dtype, 'scaler': step.scaler.state_dict(),
             'averaged_steps': getattr(step.optimizer, 'averaged_steps', 0)}
    with monitor.metrics.paused('save'), ema_weights(step.optimizer):
        run.saver.save(run.model, step.optimizer, state, devices.rng_state(run.device))
    progress.saved_at = progress.iter_num
    progress.saved_evaluated = progress.evaluated


@contextmanager
def save_on_error(run, monitor):
    """If training fails, save the last complete step and tell the user how to resume. Only a single
    process can: with several, the others would wait for one that has failed."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the original error matters more
            if run.world.size == 1 and not run.progress.updating:
                save(run, monitor)
                run.saver.wait()
                if run.progress.saved_at and not run.saver.failed:
                    error.add_note(f'saved iteration {run.progress.saved_at}; to resume: '
                                   f'{command_for("train")} --out_dir={quoted(run.config.out_dir)} '
                                   '--init_from=resume')
        raise


def main(argv):
    start = StartingPoint()
    config = load_config(TrainConfig, argv, __doc__, read_saved=start.read)
    config = resolve_minutes(config, start, options_of(TrainConfig, argv).keys())
    world = launched_world()
    device, device_why = devices.choose_device(config.device, world.local_rank)
    devices.choose_compile(config.compile, device)  # fail early if torch.compile is unavailable
    job = nullcontext()
    if world.launched:
        job = process_group(world, device, config.backend)
    writes_files = world.is_main and not config.is_read_only
    with lock_output_dir(config.out_dir) if writes_files else nullcontext(), job:
        run = setup(config, start, world, device, device_why)
        preflight(run)
        if config.check is True:  # --check runs the preflight only
            return
        monitor = Monitor(run)
        with run.stop, save_on_error(run, monitor), phase('training step'):
            reason = train(run, monitor)
            monitor.close(reason)


if __name__ == '__main__':
    run_script(main)
