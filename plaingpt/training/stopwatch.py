"""How long the real step takes, and so a run; and how many iterations fit in --minutes.

A run of minutes measures its step, and begins with as many iterations as fit. It measures again on
the way, and changes max_iters and the learning rate's schedule. So it ends on time with the
learning rate at its end, even on a machine that becomes busy.
"""

import statistics
import time
from contextlib import closing
from dataclasses import replace

import torch

from plaingpt.system.devices import synchronize
from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of, duration, setting
from plaingpt.training.evaluation import mean_loss
from plaingpt.training.step_guard import StepGuard

FAST_S = 0.25  # what takes less is timed five times, and else once
POINTS, LINES = 10, 20  # evaluations and lines of a run of minutes, at least
SHARE = 0.1  # share of the time that evaluations may take
WINDOW = 0.1  # share of the time left, after which a run of minutes decides again
# What a run of minutes decides; a resumed one keeps it.
DECIDED = 'max_iters', 'lr_decay_iters', 'warmup_iters', 'eval_iters', 'eval_interval', \
    'log_interval'


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


# -----------------------------------------------------------------------------
# --minutes


def refuse_two_lengths(config, given):
    """Raise UserError where the command line gives the length of a run twice. given: the settings
    that it names"""
    two = [f'--{key}' for key in ('max_iters', 'lr_decay_iters') if key in given]
    if config.minutes and two:
        raise UserError(f'minutes={setting(config.minutes)} decides how many iterations there are, '
                        f'and {" and ".join(two)} too: leave one of them out')


def length_of(resumed, config, given):
    """The TrainConfig of a run that goes on from a Checkpoint. --init_from=resume --minutes=10
    trains for ten minutes more. Otherwise a run of minutes has the time that is left of it, unless
    the command line says how many iterations."""
    saved, left_s = resumed.state['config'], resumed.state['left_s']
    if not config.minutes and (left_s is None or 'max_iters' in given):
        return config
    if config.minutes and config.init_from == 'resume':
        left_s = 60 * config.minutes
    return replace(config, minutes=max(0.0, left_s or 0.0) / 60,
                   **{key: saved[key] for key in DECIDED if key in saved.keys() - given})


def fit_minutes(run, given, forward_backward, update):
    """Measure how many iterations a run of minutes has time for, and give it so many. A new run
    evaluates POINTS times and for SHARE of the time at most, so it may read fewer batches. given:
    the settings that the command line names, which stay as they are. Raises UserError where no step
    of a new run fits."""
    config, resumed = run.config, run.start.checkpoint
    step_s, evaluation_s = measure(run, forward_backward, update)
    seconds = max(0.0, all_gather(run.deadline.left_s(), gloo_group())[0])
    iters = seconds / step_s
    fitted = {'log_interval': min(config.log_interval, int(iters / LINES) or 1)}
    if not resumed:
        interval = min(config.eval_interval, int(iters / POINTS) or 1)
        affordable = SHARE * seconds / evaluation_s / (1 + iters / interval)
        fewer = max(1, int(config.eval_iters * min(1, affordable)))
        fitted |= {'eval_interval': interval, 'eval_iters': fewer}
    config = replace(config, **{key: fitted[key] for key in fitted.keys() - given})
    evaluation_s *= config.eval_iters / run.config.eval_iters
    before = 0 if resumed else evaluation_s  # one comes before the first step
    iters = steps_in(seconds - before, step_s, evaluation_s, config)
    if resumed:
        end = resumed.iter_num + iters
    elif iters < 1:
        raise UserError(f'minutes={setting(config.minutes)} is too short: {duration(seconds)} are '
                        f'left, a step takes {step_s:.2g} s, and each of two evaluations '
                        f'{evaluation_s:.2g} s: take more, or a smaller --eval_iters')
    else:
        end, config = iters, replace(config, warmup_iters=min(config.warmup_iters, iters // 10))
        run.progress.eval_sequences = config.eval_sequences()
    run.config = replace(config, max_iters=end, lr_decay_iters=end)
    print0(f'{duration(seconds)} are enough for about max_iters={end}, with warmup_iters='
           f'{config.warmup_iters}, eval_interval={config.eval_interval}, '
           f'eval_iters={config.eval_iters}')


def steps_in(seconds, step_s, evaluation_s, config):
    """How many steps fit, with an evaluation every eval_interval and one at the end."""
    return max(0, int((seconds - evaluation_s) / (step_s + evaluation_s / config.eval_interval)))


class Deadline:
    """When a run of minutes ends, and so how many iterations it has. Without minutes there is no
    deadline. began: when the command did"""

    def __init__(self, config, began):
        self.ends_at = began + 60 * config.minutes if config.minutes else None
        self.window = None  # (iteration, seconds without pauses) where it began

    def left_s(self):
        return None if self.ends_at is None else self.ends_at - time.perf_counter()

    def decide(self, run):
        """Decide the length of the run again, at a logged step. Rank 0 decides for all."""
        if self.ends_at is None:
            return
        iter_num, metrics, config = run.progress.iter_num, run.metrics, run.config
        now = iter_num, time.perf_counter() - metrics.paused_s
        began = self.window = self.window or now
        end, steps, seconds = config.max_iters, iter_num - began[0], now[1] - began[1]
        if steps and seconds >= WINDOW * self.left_s():
            evaluation_s = metrics.paused_s / max(1, metrics.evaluations)
            end = iter_num + steps_in(self.left_s(), seconds / steps, evaluation_s, config)
            self.window = now
        end = all_gather(end, gloo_group())[0]
        run.config = replace(config, max_iters=end, lr_decay_iters=end)
