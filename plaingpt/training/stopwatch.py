"""How long the real step takes, and so a run; and how many iterations fit in --minutes.

A run of minutes measures its step, and begins with as many iterations as fit. It measures again on
the way, and changes max_iters and the learning rate's schedule. So it ends on time with the
learning rate at its end, even on a machine that becomes busy.
"""

import statistics
import time
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch

from plaingpt.system.devices import synchronize
from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of, duration, setting
from plaingpt.training.evaluation import mean_loss
from plaingpt.training.out_of_memory import explain_out_of_memory
from plaingpt.training.step_guard import StepGuard

LOOK_S, LOOKS = 1.0, 6  # each part of a run is timed for this many seconds, or this often
POINTS, LINES = 10, 20  # evaluations and lines of a run of minutes, at least
SHARE = 0.1  # share of the time that evaluations may take
WINDOW = 0.1  # share of the time left, after which a run of minutes decides again


class Step:
    """train.py's step, to be timed. scaler: of gradients in float16, or None"""

    def __init__(self, model, optimizer, config, device, context, forward_backward, update,
                 scaler=None):
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, device
        self.context, self.forward_backward, self.update = context, forward_backward, update
        self.scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
        self.guard = StepGuard(None, None, device, scaling=self.scaler.is_enabled())

    def seconds(self, batches, micro_steps):
        """Make a step → (seconds of its micro-batches, seconds of the update)."""
        loss, micro_s = timed(self.device, self.forward_backward, self.model, batches, micro_steps,
                              self.scaler, self.context)
        _, update_s = timed(self.device, self.update, self.model, self.optimizer, self.scaler,
                            self.config.grad_clip, self.guard, 0, loss)
        return micro_s, update_s


def timed(device, function, *arguments):
    """→ (what the function returns, the seconds it took)"""
    synchronize(device)
    began = time.perf_counter()
    result = function(*arguments)
    synchronize(device)
    return result, time.perf_counter() - began


def typical(work, group=None):
    """The median of the seconds that `work()` returns, after a call that warms up. All processes
    make the same number of calls."""
    seconds, began = [work()], time.perf_counter()
    while len(seconds) < 2 or (len(seconds) < LOOKS and all_gather(
            time.perf_counter() < began + LOOK_S, group)[0]):
        seconds.append(work())
    return statistics.median(seconds[1:])


# -----------------------------------------------------------------------------
# of a run


class Times(NamedTuple):
    """Seconds that parts of a run take."""

    step: float
    evaluation: float  # of its losses

    def of_run(self, config):
        """Seconds of the steps and evaluations of a whole run."""
        evaluations = 1 + -(-config.max_iters // config.eval_interval)
        return config.max_iters * self.step + evaluations * self.evaluation


def measure(run, forward_backward, update):
    """Time the parts of a new train.Run → Times, those of rank 0. The run stays the same, bit for
    bit. The two functions are train.py's, and make a step."""
    config, optimizer, group = run.config, run.optimizer, gloo_group()
    on_gpu = [run.device] if run.device.type == 'cuda' else []
    step = Step(run.wrapped, optimizer, config, run.device, run.context, forward_backward, update)

    def one_micro_batch():
        for param_group in optimizer.param_groups:
            param_group['lr'] = 0.0  # the loop sets it
        micro_s, update_s = step.seconds(batches, 1)
        return run.micro_steps * micro_s + update_s

    with torch.random.fork_rng(on_gpu), \
            explain_out_of_memory(run.model.config, config, run.dtype, run.device):
        attributes = dict(vars(optimizer))
        with closing(run.train_data.train_batches(0)) as batches:
            step_s = typical(one_micro_batch, group)
        optimizer.state.clear()
        vars(optimizer).update(attributes)
        batch_s = typical(lambda: timed(run.device, mean_loss, run.wrapped, run.val_data.parts[0],
                                        run.world.size * config.batch_size, run.context)[1], group)
        evaluated = sum(len(loader.eval_batches(run.progress.eval_sequences))
                        for loader in (run.train_data, *run.val_data.parts))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(run.device)  # what is logged is the run's
    return all_gather(Times(step_s, evaluated * batch_s), group)[0]


def print_length(run, forward_backward, update):
    """Say how long a new run takes."""
    config = run.config
    if config.is_read_only or not config.max_iters:
        return
    seconds = measure(run, forward_backward, update).of_run(config)
    takes_hours = run.device.type == 'cpu' and seconds > 3600
    advice = '; --minutes=10 fits any run into ten minutes' if takes_hours else ''
    print0(f'about {duration(max(1, seconds))} for {count_of(config.max_iters, "iteration")}, '
           f'evaluations included{advice}')


# -----------------------------------------------------------------------------
# --minutes


def refuse_two_lengths(config, given):
    """Raise UserError where the command line gives the length of a run twice. given: the settings
    that it names"""
    two = [f'--{key}' for key in ('max_iters', 'lr_decay_iters') if key in given]
    if config.minutes and two:
        raise UserError(f'minutes={setting(config.minutes)} decides how many iterations there are, '
                        f'and {" and ".join(two)} too: leave one of them out')


def fit_minutes(run, given, forward_backward, update):
    """Measure how many iterations a new run of minutes has time for, and give it so many.
    Evaluations take SHARE of the time at most. If that is too short for POINTS of them, they read
    fewer batches. given: the settings that the command line names, which stay as they are. Raises
    UserError where no step fits."""
    config, times = run.config, measure(run, forward_backward, update)
    seconds = all_gather(run.deadline.left_s(), gloo_group())[0]
    iters = max(0.0, seconds) / times.step
    affordable = SHARE * seconds / times.evaluation
    if 'log_interval' not in given:
        config = replace(config, log_interval=min(config.log_interval, int(iters / LINES) or 1))
    if 'eval_interval' not in given:
        points = max(POINTS, min(affordable, iters / config.eval_interval))
        config = replace(config, eval_interval=int(iters / points) or 1)
    points = 1 + iters / config.eval_interval
    if 'eval_iters' not in given and points > affordable:
        fewer = max(1, int(config.eval_iters * affordable / points))
        times = Times(times.step, times.evaluation * fewer / config.eval_iters)
        config = replace(config, eval_iters=fewer)
    left = seconds - times.evaluation  # one comes before the first step
    iters = steps_in(left, times.step, times.evaluation, config)
    if iters < 1:
        raise UserError(f'minutes={setting(config.minutes)} is too short: {duration(seconds)} are '
                        f'left, a step takes {times.step:.2g} s, and each of two evaluations '
                        f'{times.evaluation:.2g} s: take more, or a smaller --eval_iters')
    run.config = config = replace(config, max_iters=iters, lr_decay_iters=iters,
                                  warmup_iters=min(config.warmup_iters, iters // 10))
    run.progress.eval_sequences = config.eval_sequences()
    print0(f'{duration(60 * config.minutes)} are enough for about max_iters={iters}, '
           f'with warmup_iters={config.warmup_iters}, eval_interval={config.eval_interval}, '
           f'eval_iters={config.eval_iters}')


def steps_in(seconds, step_s, evaluation_s, config):
    """How many steps fit, with an evaluation every eval_interval and one at the end."""
    return max(0, int((seconds - evaluation_s) / (step_s + evaluation_s / config.eval_interval)))


def length_of(resumed, config, given):
    """The TrainConfig of a run that goes on from a Checkpoint. --init_from=resume --minutes=10
    trains for ten minutes more. Otherwise a run of minutes keeps its last length until its Deadline
    decides again, even if a config file names another length."""
    saved, done = resumed.state, max(1, resumed.iter_num)
    if config.minutes and config.init_from == 'resume':
        seconds = 60 * config.minutes
        more = max(1, round(done * seconds / max(1.0, saved['elapsed_s'])))
        print0(f'{duration(seconds)} more are about {count_of(more, "iteration")}; the learning '
               'rate is that of a run of this length')
        config = replace(config, max_iters=done + more, lr_decay_iters=done + more)
        lines = {} if 'log_interval' in given else \
            {'log_interval': min(config.log_interval, more // LINES or 1)}
        return replace(config, **lines)
    if config.minutes or (saved['left_s'] is not None and 'max_iters' not in given):
        kept = ('max_iters', 'lr_decay_iters', 'warmup_iters', 'eval_iters', 'eval_interval',
                'log_interval')
        config = replace(config, minutes=0.0, **{
            key: saved['config'][key] for key in kept if key in saved['config'].keys() - given})
        print0('the run goes on to its end; --init_from=resume --minutes=10 trains for ten minutes '
               'more')
    return config


class Deadline:
    """When a run of minutes ends, and so how many iterations it has. The clock starts with the
    command. Without minutes there is no deadline."""

    def __init__(self, config, start):
        """start: a Start; a resumed run has the time that its checkpoint had left"""
        saved = start.checkpoint.state if start.resumed else {'left_s': None, 'config': {}}
        self.ends_at = None
        if config.minutes:
            self.ends_at = start.began + 60 * config.minutes
        elif saved['left_s'] is not None and config.max_iters == saved['config']['max_iters']:
            # else the command says how many iterations
            self.ends_at = start.began + saved['left_s']
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
        end, so_long = config.max_iters, now[1] - began[1]
        is_near = iter_num + config.log_interval >= end  # and perhaps too early
        if iter_num > began[0] and (so_long >= WINDOW * self.left_s() or is_near):
            evaluation_s = metrics.paused_s / max(1, metrics.evaluations)
            end = iter_num + steps_in(self.left_s(), so_long / (iter_num - began[0]), evaluation_s,
                                      config)
            self.window = now
        end = all_gather(end, gloo_group())[0]
        run.config = metrics.config = replace(config, max_iters=end, lr_decay_iters=end)
