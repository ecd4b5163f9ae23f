"""Train a GPT: on a laptop, on one GPU, or on many.

    python train.py config/shakespeare_char.py
    python train.py config/gpt2_124m.py --batch_size=8
    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py

Without a config file this trains GPT-2 124M on OpenWebText. The settings, with what they mean, are
in plaingpt/training/settings.py, or: python train.py --help
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import math
import sys
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from configurator import load_config, options_of
from model import GPT
from plaingpt.checks.preflight import preflight
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import Dataset
from plaingpt.monitoring.backends import open_backends
from plaingpt.monitoring.markdown_report import write_report
from plaingpt.monitoring.metrics import Metrics
from plaingpt.monitoring.references import find_reference
from plaingpt.monitoring.run_record import describe_run, write_run
from plaingpt.parallel.sharding import Replicated
from plaingpt.system import devices
from plaingpt.system.distributed import (
    StopRequest,
    World,
    all_gather,
    all_reduce_mean,
    check_shared,
    gloo_group,
    launched_world,
    print0,
    process_group,
)
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import lock_output_dir
from plaingpt.system.streams import status
from plaingpt.training import run_data, run_model
from plaingpt.training.averaging import averaged
from plaingpt.training.checkpoint_writer import KEPT, Saver, archive_previous_run, trim_logs
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.film import Film, open_film
from plaingpt.training.memory_fit import fit_to_memory
from plaingpt.training.memory_planner import explain_out_of_memory
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.probes import Probes
from plaingpt.training.progress import Progress, restore
from plaingpt.training.resuming import check_resumed, find_resumed, saved_settings
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import WITHOUT_EFFECT, TrainConfig
from plaingpt.training.time_budget import refuse_two_lengths, with_length, with_length_of
from plaingpt.training.training_step import (
    StepGuard,
    collect_garbage,
    forward_backward,
    garbage_at_known_steps,
    update,
)


@dataclass
class Run:
    """A training run: what the loop works with."""

    config: TrainConfig
    world: World
    device: torch.device
    dtype: str  # of the matmuls
    context: object  # autocast, in which forward passes run
    dataset: Dataset  # or Mixture
    train_data: BatchLoader  # or MixedLoader
    val_data: BatchLoader
    model: GPT  # not compiled or wrapped; the one that is saved
    parallel: Replicated  # or Sharded: the model over the processes, to evaluate and to train with
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    progress: Progress
    stop: StopRequest
    record: dict = None  # the facts of the run, as run.json has them; this and below: open_outputs
    metrics: Metrics = None
    probes: Probes = None
    film: Film = None  # where there is one
    guard: StepGuard = None
    saver: Saver = None


# -----------------------------------------------------------------------------
# setup, in the order the data flows


@status.doing('setting up')
def setup(config, world, device, device_why, given=frozenset()):
    """TrainConfig → Run: data, model, optimizer, where the run stands, where its numbers go. given:
    the settings that the command line names."""
    devices.use_fast_matmul()
    devices.use_expandable_segments(device)
    devices.seed_everything(config.seed, world.rank)
    group = gloo_group()
    config = all_gather(config, group)[0]  # each process may have measured something else
    if not config.is_read_only:
        check_shared(Path(config.out_dir), world, group)

    dataset = run_data.open_data(config, world)
    resumed = find_resumed(config, group)
    if resumed:
        config = with_length_of(resumed, config, given)
        check_resumed(resumed, config, dataset)
    shape = run_model.run_shape(config, dataset, resumed)
    dtype, dtype_why = choose_training_dtype(config, shape, device, resumed, group)
    compile, compile_why = devices.choose_compile(config.compile, device)
    print0(f'device {device} ({device_why}) | dtype {dtype} ({dtype_why}) | '
           f'compile {compile} ({compile_why}) | processes {world.size}')
    config = fit_to_memory(config, shape, dtype, device, compile, is_new=not resumed)
    start = resumed or run_model.find_start(config, dataset)
    model = run_model.build_model(config, shape, start)
    train_data, val_data = run_data.open_batches(config, dataset, world, device)

    parallel = run_model.place_model(model, config, start, device, compile, dtype, world)
    model = parallel.model
    optimizer = build_optimizer(model, config, device.type, world.size)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
    progress = restore(resumed, config, model, optimizer, scaler, train_data, world, device)
    run = Run(config, world, device, dtype, devices.autocast(device, dtype), dataset, train_data,
              val_data, model, parallel, optimizer, scaler, progress, StopRequest())
    preflight(run, resumed, mean_loss, group)
    run.config = config = with_length(run, resumed, given, mean_loss, group)
    progress.print_end(config)
    run.record = describe_run(run_model.with_shape(config, shape), dataset, train_data, model,
                              device, dtype, compile, world, resumed)
    open_outputs(run, resumed, group)
    return run


def open_outputs(run, resumed, group):
    """Archive what this run would overwrite; then open its logs, probes, guard and saver."""
    config, is_main, out_dir = run.config, run.world.is_main, Path(run.config.out_dir)
    run.record['reference'] = find_reference(run.record, WITHOUT_EFFECT)
    writing = is_main and not config.is_read_only
    saved = resumed.state if resumed else {}
    if writing:
        if archive := archive_previous_run(out_dir, run.progress.iter_num if resumed else -1):
            print0(f'{out_dir} held {"later steps" if resumed else "an earlier run"}: kept in '
                   f'{archive}')
        if resumed:
            trim_logs(out_dir, run.progress.iter_num, run.progress.evaluated)
        write_run(out_dir, run.record)
    metrics = run.metrics = Metrics(
        None if config.is_read_only else out_dir / 'metrics.jsonl', config=config, run=run.record,
        loader=run.train_data, model=run.model, device=run.device, dtype=run.record['dtype'],
        scaler=run.scaler, world_size=run.world.size, elapsed_s=saved.get('elapsed_s', 0.0),
        bytes_per_token=run_data.evaluated_bytes(run.dataset, run.val_data,
                                                 run.progress.eval_sequences) if is_main else None,
        quiet=not is_main,
        backends=open_backends(config, run.record, saved.get('wandb_id')) if writing else [])
    run.probes = Probes(config, run.dataset, run.parallel, metrics, run.val_data, run.context,
                        group, writing)
    run.film = open_film(config, run.dataset, run.parallel, run.val_data, metrics, run.context,
                         writing)
    run.guard = StepGuard(out_dir / 'anomalies.jsonl', run.train_data, run.device,
                          scaling=run.scaler.is_enabled())
    run.saver = Saver(
        out_dir, rank=run.world.rank, world_size=run.world.size, keep=KEPT,
        background=run.device.type == 'cuda')


# -----------------------------------------------------------------------------
# the loop


def train(run):
    """Evaluate, save, step, log, until the run ends → why it ended."""
    config, progress = run.config, run.progress
    micro_steps = config.accumulation() // run.world.size
    run.metrics.begin(progress.iter_num)
    with closing(run.train_data.train_batches(progress.iter_num)) as batches, \
            garbage_at_known_steps():
        while True:
            if run.film and run.film.is_due(progress.iter_num):
                with run.metrics.paused('filming'), averaged(run.optimizer):
                    run.film.take(progress.iter_num)

            # evaluate, save or stop: all processes decide alike
            if evaluating := progress.evaluation_is_due(config):
                with run.stop.until_stopped():
                    evaluate(run)
            signal = run.stop.signal_at_step()
            ending = signal or progress.ending(config)
            saving = ending or progress.save_is_due(config)
            if evaluating or saving or progress.iter_num % config.log_interval == 0:
                ending = run.guard.report(run.metrics.print) or ending
            if saving or ending:
                save(run)
            if ending:
                run.saver.wait()
                return ending

            # step
            lr = get_lr(progress.iter_num, config)
            for param_group in run.optimizer.param_groups:
                param_group['lr'] = lr * param_group['lr_scale']
            loss = forward_backward(run.parallel.train, batches, micro_steps, run.scaler,
                                    run.context)
            with run.probes.around_update(progress.iter_num + 1, run.scaler):
                grad_norm = update(run.parallel.train, run.optimizer, run.scaler,
                                   config.grad_clip, run.guard, progress.iter_num, loss)
            progress.iter_num += 1

            # log
            run.metrics.tick(progress.iter_num)
            if progress.iter_num % config.log_interval == 0:
                run.metrics.step(progress.iter_num, all_reduce_mean(loss.clone()), lr, grad_norm)
            run.probes.check_health(progress.iter_num)
            collect_garbage(progress.iter_num, evaluating)


def evaluate(run):
    """Measure what is due of the losses, benchmarks and a sample, log it, and see whether the loss
    is the best. A signal raises Stopped before any is logged: the resumed run evaluates here."""
    with run.metrics.paused('evaluating'), averaged(run.optimizer):
        losses = [] if not run.progress.loss_is_due(run.config) else [
            mean_loss(run.parallel.eval, loader, run.progress.eval_sequences,
                      run.context, run.stop)
            for loader in (run.train_data, *run.val_data.parts)]
        run.probes.evaluate(run.progress, losses, run.stop)


@torch.no_grad()
def mean_loss(model, loader, sequences, context, stop):
    """→ (mean loss in nats a token over so many fixed sequences of a split, its standard error from
    the variance between batches, None where there is one). at_beginning: the split's first ones,
    else evenly spaced ones. Each process evaluates its share. Raises Stopped."""
    model.eval()
    found = []  # of each batch: sequences of targets, loss
    for starts in loader.eval_batches(sequences):
        stop.raise_if_stopped()
        idx, targets = loader.eval_batch(starts)  # also of none: all gather a sharded model
        with context:
            _, loss = model(idx, targets)
        found.append(torch.stack(((targets != -1).sum() / targets.size(1), loss.float())))
    model.train()
    shares = all_gather(torch.stack(found).tolist(), gloo_group())
    n, losses = torch.tensor(shares, dtype=torch.float64).flatten(0, 1).T
    loss = (n * losses).sum() / n.sum()
    variance, num_batches = (n * (losses - loss)**2).sum() / n.sum(), int((n > 0).sum())
    return loss.item(), math.sqrt(variance / (num_batches - 1)) if num_batches > 1 else None


def save(run):
    """Write a checkpoint of this iteration, unless there is one, or nothing to save."""
    progress = run.progress
    if progress.iter_num == 0 or progress.is_saved() or run.config.eval_only:
        return
    state = {**progress.state(), **run.dataset.state(), 'config': asdict(run.config),
             'sequences': run.train_data.sequences_before(progress.iter_num),
             'elapsed_s': run.metrics.elapsed_s(), 'wandb_id': run.metrics.wandb_id(),
             'dtype': run.record['dtype'], 'scaler': run.scaler.state_dict(),
             'averaged_steps': getattr(run.optimizer, 'averaged_steps', 0)}
    with run.metrics.paused('saving'), averaged(run.optimizer):
        if progress.saved_at == progress.iter_num:  # a signal kept it from evaluating then
            run.saver.update(state)
        else:
            run.saver.save(run.model, run.optimizer, state, devices.rng_state(run.device))
    progress.saved_at, progress.saved_evaluated = progress.iter_num, progress.evaluated


@contextmanager
def saved_when_it_fails(run):
    """Save where training stops with a UserError, as when its data changed or memory ran out."""
    try:
        yield
    except UserError:
        if run.world.size == 1:  # a save takes all processes, and the others know nothing of it
            save(run)
            run.saver.wait()
        raise


# -----------------------------------------------------------------------------
# the end


def finish(run, ending):
    """Close the logs, write the report, and say how the run ended."""
    config, out_dir, progress = run.config, run.config.out_dir, run.progress
    signal = ending if ending in StopRequest.NAMES else None
    run.metrics.close()
    if run.world.is_main and not config.eval_only:
        write_run(out_dir, dict(run.record, ending=ending, end=run.metrics.at(progress.iter_num)))
        if config.report:
            write_report(out_dir, print0)
    if run.film:
        print0(run.film.describe())
    if run.guard.gave_up:
        raise run.guard.error()
    if run.saver.failed:
        print0(f'the last checkpoint could not be written in {out_dir}: see the warning, then '
               'start again with --init_from=auto, which resumes from the one before, if any')
        sys.exit(1)
    run.guard.report_held(print0)
    for line in progress.describe_end(config, ending, signal):
        print0(line)


def main(argv):
    config = load_config(TrainConfig, argv, __doc__, read_saved=saved_settings)
    given = options_of(TrainConfig, argv).keys()
    refuse_two_lengths(config, given)
    world = launched_world()
    device, device_why = devices.choose_device(config.device, world.local_rank)
    writing = world.is_main and not config.is_read_only
    with lock_output_dir(config.out_dir, writing) as check_folder, \
            process_group(world, device, config.backend):
        run = setup(config, world, device, device_why, given)
        run.saver.check_folder = check_folder
        if config.check is True:
            return
        with run.stop, saved_when_it_fails(run), \
                explain_out_of_memory(run.model.config, run.config, run.record['dtype'], device):
            finish(run, train(run))


if __name__ == '__main__':
    run_script(main)
