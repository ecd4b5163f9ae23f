"""Train a GPT on a laptop, on one GPU, or on many.

    python train.py config/shakespeare_char.py
    python train.py config/gpt2_124m.py --batch_size=8
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py

Without a config file, this trains GPT-2 124M without biases on OpenWebText. Settings are documented
in plaingpt/core/settings.py and by: python train.py --help. docs/hacking.md shows common changes.
"""

import math
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from configurator import load_config, options_of
from model import GPT
from plaingpt.checks.preflight import preflight
from plaingpt.core.attention import use_fast_attention
from plaingpt.core.bad_steps import BadSteps
from plaingpt.core.blocks import apply_activation_checkpointing, compile_blocks, parameters_on_meta
from plaingpt.core.checkpoint import KEEP_NEWEST, Saver
from plaingpt.core.dataset import describe_batches, open_data
from plaingpt.core.evaluation import evaluate, val_bytes_per_token
from plaingpt.core.loss import use_chunked_loss
from plaingpt.core.optimizers import build_optimizer, ema_weights, resume_ema
from plaingpt.core.progress import Progress, make_clock
from plaingpt.core.schedules import get_lr
from plaingpt.core.settings import TrainConfig
from plaingpt.core.start import StartingPoint, check_resumable, resolve_gpt_config, resolve_minutes
from plaingpt.core.training_run import Run
from plaingpt.experiments.fitting import fit_to_memory
from plaingpt.monitoring.metrics import Metrics
from plaingpt.monitoring.observers import Observers
from plaingpt.monitoring.run_folder import close_run_folder, open_run_folder
from plaingpt.monitoring.sampling import check_tasks
from plaingpt.system import devices, distributed, machine
from plaingpt.system.distributed import launched_world, print0
from plaingpt.system.errors import phase, run_script
from plaingpt.system.files import lock_output_dir
from plaingpt.system.formatting import count_of

# -----------------------------------------------------------------------------
# the step


@dataclass
class Step:
    """Takes training steps: the gradients of micro-batches, the parts of a batch that fit into
    memory, then an update of the weights. A step whose loss or gradient is not finite changes
    neither weights nor optimizer state (BadSteps). plan.py runs it on tensors without data."""

    model: torch.nn.Module  # a GPT, perhaps compiled, and in DDP or FSDP
    optimizer: torch.optim.Optimizer
    device: torch.device
    dtype: str  # of autocast
    compile: bool | str  # of the model: True, False or 'blocks'
    grad_clip: float  # maximum gradient norm; 0: no clipping
    micro_steps: int  # micro-batches per step on this process

    def __post_init__(self):
        self.autocast = devices.autocast(self.device, self.dtype)
        # In float16, small gradients would underflow to 0, so the scaler scales up the loss.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == 'float16')
        self.bad_steps = BadSteps(self.scaler, self.device)
        self.loss = None  # of the last forward_backward

    def forward_backward(self, batches):
        """Accumulate the gradients of the micro-batches. Return the loss, on the device; its mean
        over the processes is the mean over the step's targets.

        batches: yields (idx, targets), and each micro-batch counts 1 / micro_steps. If some targets
        are -1 (ignored), micro-batches differ in their number of targets, so it yields (idx,
        targets, weight): weight = targets here / targets in the whole step × processes. The last
        factor undoes the average over processes that DDP and FSDP take."""
        self.loss = 0.0
        for micro_step in range(self.micro_steps):
            idx, targets, *weight = next(batches)
            is_last_micro_step = micro_step == self.micro_steps - 1
            # DDP averages gradients only after the last micro-batch. FSDP must do it after each
            # one, because a process stores only its shard of the gradient.
            skip_sync = isinstance(self.model, DistributedDataParallel) \
                and not is_last_micro_step
            with self.model.no_sync() if skip_sync else nullcontext():
                with self.autocast:
                    _, loss = self.model(idx, targets)
                    loss = loss * weight[0] if weight else loss / self.micro_steps
                self.scaler.scale(loss).backward()
            self.loss += loss.detach()
        return self.loss

    def update(self, lr):
        """Clip the gradient and update the weights, unless the step must be skipped. Return the
        gradient norm before clipping. lr: from the schedule; each parameter group scales it. If you
        add random numbers here, draw the same ones on all ranks, whose seeds differ."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group['lr'] = lr * group['lr_scale']  # lr_scale: set by parameter_groups()
        self.scaler.unscale_(optimizer)
        max_norm = self.grad_clip or math.inf  # infinity: only measure the norm
        grad_norm = distributed.full_tensor(clip_grad_norm_(self.model.parameters(), max_norm))
        skip_step = self.bad_steps.must_skip(self.loss, grad_norm)  # 1.0 or 0.0, on the device
        # Not scaler.step(), which checks the gradients but not the loss. A fused optimizer skips
        # the step if found_inf is 1. For others, the host reads skip_step, and waits for it.
        if getattr(optimizer, '_step_supports_amp_scaling', False):
            optimizer.found_inf = skip_step
            optimizer.step()
        elif not skip_step:
            optimizer.step()
        else:
            self.bad_steps.updates_without_step += 1  # so that StepCounter reports no missed step
        self.scaler.update()
        # DDP's gradients are views of its buckets; setting them to None would reallocate them.
        is_ddp = isinstance(self.model, DistributedDataParallel)
        optimizer.zero_grad(set_to_none=not is_ddp)
        return grad_norm

    def state_dict(self):
        """The step's keys in state.json; see Run.parts(). Saver.save() writes the tensors."""
        return {'dtype': self.dtype, 'scaler': self.scaler.state_dict(),
                'averaged_steps': self.optimizer.averaged_steps}

    def load_state_dict(self, state):
        resume_ema(self.optimizer, state['averaged_steps'])  # load_optimizer() must come first
        if state['scaler']:  # empty unless the checkpoint was trained in float16
            self.scaler.load_state_dict(state['scaler'])


def build(gpt_config, config, device, dtype, compile=False, weights=None):
    """Make a GPT that is ready to train, with its step → (GPT, Step).

    dtype: of autocast; compile: True, False or 'blocks'; weights: a Checkpoint, a pretrained model,
    or None to initialize them. Checkpoints save the GPT; Step.model is the same GPT, compiled and
    in DDP or FSDP."""
    world = launched_world()
    use_fsdp = config.parallel == 'fsdp'
    if use_fsdp:
        from plaingpt.core import sharding
    # on meta, parameters have shapes but no memory, so no GPU ever holds the whole model
    with parameters_on_meta() if use_fsdp else nullcontext():
        model = GPT(gpt_config)
    use_fast_attention(model)  # the same attention, faster on a CPU or with a mask
    use_chunked_loss(model, compile)  # the same loss in less memory
    apply_activation_checkpointing(model, config.activation_checkpointing)
    compile_by_block = compile and (use_fsdp or compile == 'blocks')
    if compile_by_block:
        compile_blocks(model)
    if use_fsdp:
        sharding.shard(model, device, dtype)  # fully_shard; each rank allocates only its shard
    if weights:
        weights.load_into(model)
    elif use_fsdp:  # rank 0 initializes a full copy on its CPU
        initial = GPT(gpt_config).state_dict() if world.is_main else {}
        sharding.scatter(initial, model)
    model.to(device)

    # The loop calls the compiled model, wrapped in DDP if there are several processes.
    wrapped_model = torch.compile(model) if compile and not compile_by_block else model
    if world.size > 1 and not use_fsdp:
        wrapped_model = replicate(wrapped_model, device)
    step = Step(wrapped_model, build_optimizer(model, config), device, dtype, compile,
                config.grad_clip, config.micro_steps())
    return model, step


def replicate(model, device):
    """Wrap the model in DDP: each process has a copy, which starts with rank 0's weights, and
    gradients are averaged over processes."""
    device_ids = [device.index] if device.type == 'cuda' else None
    ddp = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    # DDP has synced the buffers once, and they are constants (rotary tables). A buffer that changes
    # would be neither synced nor saved.
    ddp.broadcast_buffers = False
    return ddp


# -----------------------------------------------------------------------------
# setup


@phase('setup')
def setup(config, start, world, device, device_reason):
    """Build a Run from the settings and the starting point. Raises UserError."""
    devices.prepare_device(device)
    # Every rank uses rank 0's settings and checkpoint: a config file may time this machine to
    # choose sizes (own_text.py does), and the ranks could disagree.
    group = distributed.gloo_group()
    config = distributed.all_gather(config, group)[0]
    start.share_checkpoint(group)
    torch.manual_seed(config.seed + world.rank)  # different dropout masks on each rank
    if world.size > 1 and not config.is_read_only:
        distributed.check_shared(Path(config.out_dir), world, group)
    check_tasks(config)  # fail early if a benchmark cannot be loaded

    # The architecture comes from the checkpoint, the pretrained weights or the settings.
    dataset = open_data(config, world)
    if start.resumed:
        check_resumable(start.weights, config, dataset)
    config, gpt_config = resolve_gpt_config(config, dataset, start)

    # Choose the precision, torch.compile, and, by planning a step, DDP or FSDP and batch_size.
    dtype, dtype_reason = devices.choose_dtype(config.dtype, device, gpt_config.n_embd,
                                               training=True)
    compile, compile_reason = devices.choose_compile(config.compile, device)
    print0(f'device {device} ({device_reason}) | dtype {dtype} ({dtype_reason}) | '
           f'compile {compile} ({compile_reason}) | processes {world.size}')
    config = fit_to_memory(build, config, gpt_config, dtype, device)

    # A batch is a function of the seed and the step; each process reads its share.
    train_data, val_data = open_batches(config, dataset, world, device)

    model, step = build(gpt_config, config, device, dtype, compile, start.weights)
    print0(f'GPT with {model.num_parameters():,} parameters: '
           f'{count_of(gpt_config.n_layer, "layer")}, {count_of(gpt_config.n_head, "head")}, '
           f'{count_of(gpt_config.n_embd, "channel")}')

    clock = make_clock(config, start.started_at)
    run = Run(config, start, dataset, train_data, val_data, model, step, clock,
              progress=Progress(eval_sequences=config.eval_sequences()),
              log=Metrics(config, model, step, clock, train_data),
              saver=Saver(config.out_dir, rank=world.rank, world_size=world.size,
                          keep=KEEP_NEWEST, background=device.type == 'cuda'),
              stop=distributed.StopRequest())
    if start.resumed:
        run.resume(start.checkpoint)
    print0(describe_batches(config, dataset, train_data, val_data))
    return run


def open_batches(config, dataset, world, device):
    """Return the training and the validation loader."""
    options = dict(rank=world.rank, world_size=world.size, device=device, seed=config.seed,
                   micro_steps=config.micro_steps(), pack=config.pack)
    overfit_steps = 1 if config.check == 'overfit' else 0  # the first step's sequences only
    train_data = dataset.loader('train', config.block_size, config.batch_size,
                                overfit_steps=overfit_steps, **options)
    val_data = dataset.loader('val', config.block_size, config.batch_size, **options)
    return train_data, val_data


# -----------------------------------------------------------------------------
# the loop


def train(run, observers):
    """Evaluate, save, step and log until the run ends. Return the reason why it ended."""
    config, step, clock, progress, log = run.config, run.step, run.clock, run.progress, run.log
    log.begin(progress.iter_num)
    machine.freeze_existing_objects()  # exempt from garbage collection, which stalls all ranks
    with closing(run.train_data.train_batches(progress.iter_num)) as batches:
        while True:
            # evaluate, save or stop; all ranks make the same decision
            fraction_done = clock.read(progress.iter_num)  # from 0 to 1
            is_last = config.eval_only or fraction_done == 1
            eval_is_due = is_last or clock.evaluation_is_due(progress.iter_num, fraction_done)
            if eval_is_due and not progress.evaluated:
                with clock.timed_evaluation(), log.paused('evaluation'):
                    evaluate_and_log(run, observers, is_last)
            reason = run.reason_to_stop(is_last)
            if reason or run.save_is_due():
                # report skipped steps before saving: after too many, the run gives up
                reason = step.bad_steps.report(run) or reason
                run.save()
            if reason:
                run.saver.wait()
                return reason

            # step
            lr = get_lr(progress.iter_num, config, fraction_done)  # core/schedules.py
            loss = step.forward_backward(batches)
            progress.updating = True  # save_on_error() must not save half-updated weights
            with observers.around_update(progress.iter_num + 1):  # a health check may be due
                grad_norm = step.update(lr)  # clip the gradient, then optimizer.step()
            progress.iter_num += 1
            progress.updating = False
            # log your own metrics: a number or 0-dim tensor under any name (monitoring/metrics.py)
            log(progress.iter_num, loss=loss, lr=lr, grad_norm=grad_norm)
            if progress.iter_num % config.log_interval == 0:
                step.bad_steps.report(run)  # log() has just waited for the device
            observers.on_step(progress.iter_num, fraction_done)


def evaluate_and_log(run, observers, is_last):
    """Measure and log the losses of both splits, the benchmarks and a sample, and record whether
    the validation loss is below all earlier ones. After a signal, nothing is logged, and the
    resumed run evaluates again."""
    progress = run.progress
    # The first evaluation of a new run reads one step's sequences only: enough to see that the loss
    # is about ln(vocab_size). A timed run evaluates in full, to measure how long that takes.
    sequences = progress.eval_sequences
    if run.is_new and not is_last and not run.config.minutes:
        sequences = min(sequences, run.config.step_sequences())
    try:
        with ema_weights(run.step.optimizer):  # with ema_decay, evaluate the EMA of the weights
            losses = evaluate(run, sequences)  # core/evaluation.py
            scores, sample = observers.on_evaluation(losses['train_loss'], losses['val_loss'])
        run.stop.raise_if_stopped()
    except distributed.Stopped:
        return
    is_best = progress.record_evaluation(losses['val_loss'], losses['val_stderr'])
    # iteration 0 sets best_val_loss, but is never called the best: it has no checkpoint
    run.log.evaluation(progress.iter_num, **losses, best=is_best and progress.iter_num > 0,
                       sample=sample)
    run.log.benchmarks(progress.iter_num, scores)


def main(argv):
    start = StartingPoint()
    # start.read opens what init_from names (resume, gpt2, a folder, …) and returns its settings
    config = load_config(TrainConfig, argv, __doc__, read_saved=start.read)
    config = resolve_minutes(config, start, options_of(TrainConfig, argv).keys())
    world = launched_world()
    device, device_reason = devices.choose_device(config.device, world.local_rank)
    devices.choose_compile(config.compile, device)  # fail early if torch.compile is unavailable
    job = nullcontext()
    if world.launched:
        job = distributed.process_group(world, device, config.backend)
    lock = nullcontext()
    if world.is_main and not config.is_read_only:
        lock = lock_output_dir(config.out_dir)
    with lock, job:
        run = setup(config, start, world, device, device_reason)
        preflight(run)
        if config.check is True:  # --check runs the preflight only
            return
        record = open_run_folder(run)  # moves a previous run away, writes run.json
        run.log.open(record, val_bytes_per_token(run) if world.is_main else None)
        with run.stop, run.save_on_error(), phase('training step'):
            observers = Observers(run)
            reason = train(run, observers)
            observers.on_end()
            run.log.close()
            close_run_folder(run, record, reason)  # run.json, report.md, what to do next


if __name__ == '__main__':
    run_script(main)
