"""How long the real step takes, and so a run."""

import statistics
import time
from contextlib import closing

import torch

from plaingpt.system.devices import synchronize
from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.formatting import count_of, duration
from plaingpt.training.evaluation import mean_loss
from plaingpt.training.step_guard import StepGuard

FAST_S = 0.25  # what takes less is timed five times, and else once


def timed(device, function, *arguments):
    """→ (what the function returns, the seconds it took)"""
    synchronize(device)
    began = time.perf_counter()
    result = function(*arguments)
    synchronize(device)
    return result, time.perf_counter() - began


def time_step(run, batches, micro_steps, forward_backward, update):
    """Make a step → (seconds of its micro-batches, seconds of the update). run: a train.Run, or
    what has its model, optimizer and device. The two functions are train.py's."""
    guard = StepGuard(None, None, run.device, scaling=run.scaler.is_enabled())
    loss, micro_s = timed(run.device, forward_backward, run.wrapped, batches, micro_steps,
                          run.scaler, run.context)
    _, update_s = timed(run.device, update, run.wrapped, run.optimizer, run.scaler,
                        run.config.grad_clip, guard, 0, loss)
    return micro_s, update_s


def typical(work, group=None):
    """The median of the seconds that `work()` returns, after a call that warms up. All processes
    make the same number of calls."""
    _, *seconds = work(), work()
    if all_gather(seconds[0], group)[0] < FAST_S:
        seconds += [work() for _ in range(4)]
    return statistics.median(seconds)


def measure(run, forward_backward, update):
    """→ (seconds of a step, seconds of the losses of an evaluation) of a train.Run that has not
    begun; those of rank 0. The run stays the same, bit for bit."""
    config, optimizer, group = run.config, run.optimizer, gloo_group()
    on_gpu = [run.device] if run.device.type == 'cuda' else []

    def one_micro_batch():
        for param_group in optimizer.param_groups:
            param_group['lr'] = 0.0  # the loop sets it
        micro_s, update_s = time_step(run, batches, 1, forward_backward, update)
        return run.micro_steps * micro_s + update_s

    with torch.random.fork_rng(on_gpu):
        attributes, scale = dict(vars(optimizer)), run.scaler.state_dict()
        with closing(run.train_data.train_batches(0)) as batches:
            step_s = typical(one_micro_batch, group)
        optimizer.state.clear()
        vars(optimizer).update(attributes)
        run.scaler.load_state_dict(scale)
        batch_s = typical(lambda: timed(run.device, mean_loss, run.wrapped, run.val_data.parts[0],
                                        run.world.size * config.batch_size, run.context)[1], group)
        evaluated = sum(len(loader.eval_batches(run.progress.eval_sequences))
                        for loader in (run.train_data, *run.val_data.parts))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(run.device)  # what is logged is the run's
    return all_gather((step_s, evaluated * batch_s), group)[0]


def print_length(run, forward_backward, update):
    """Say how long a new run takes."""
    config = run.config
    if config.is_read_only or not config.max_iters:
        return
    step_s, evaluation_s = measure(run, forward_backward, update)
    evaluations = 1 + -(-config.max_iters // config.eval_interval)
    seconds = max(1, config.max_iters * step_s + evaluations * evaluation_s)
    print0(f'about {duration(seconds)} for {count_of(config.max_iters, "iteration")}, '
           'evaluations included')
