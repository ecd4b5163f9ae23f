"""How long a run takes, measured before it begins, and how many iterations fit in --minutes."""

import gc
import math
import statistics
import time
from bisect import bisect_right
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from plaingpt.inference.generation import generate
from plaingpt.parallel.sharding import full_model
from plaingpt.system.devices import synchronize
from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import count_of, duration, setting
from plaingpt.system.streams import status
from plaingpt.training.evaluation import SAMPLE_TOKENS, mean_loss
from plaingpt.training.memory_planner import explain_out_of_memory
from plaingpt.training.schedules import get_lr
from plaingpt.training.step_guard import StepGuard

LOOK_S, LOOKS = 1.0, 6  # each part of a run is timed for so long, and not more often
SAMPLED = 8  # tokens of a sample that are timed
SAVED_PER_S = 370e6  # bytes: GPT-2 124M on two cores, docs/checkpoints.md
# What --minutes decides: how long a run is, and, where the command line does not say it, how often
# it evaluates and prints, and on how much
LENGTH = ('max_iters', 'lr_decay_iters', 'warmup_iters')
FITTED = (*LENGTH, 'eval_iters', 'eval_interval', 'log_interval')
POINTS, LINES = 10, 20  # evaluations and lines of a run at least; 8 where time turns out shorter
SHARE = 0.1  # of the time, that evaluations take at most


def refuse_two_lengths(config, options):
    """Raise UserError where the command line's {key: value} say in two ways how long to train."""
    two = [f'--{key}' for key in LENGTH[:2] if key in options]
    if config.minutes and two:
        raise UserError(f'minutes={setting(config.minutes)} decides how many iterations there are, '
                        f'and {" and ".join(two)} too: leave one of them out')


def length_of(resumed, config, given):
    """The TrainConfig of a run that goes on from a Checkpoint, where it has minutes: as long as it
    was, whatever a config file says. With init_from=auto it stays so: the same command is given
    again after a stop. given: the settings that the command line names"""
    if not config.minutes:
        return config
    kept = {key: value for key, value in resumed.state['config'].items()
            if key in LENGTH or (key in FITTED and key not in given)}
    config = replace(config, **kept)
    if config.init_from == 'resume':
        return config
    print0(f'the run goes on to max_iters={config.max_iters}, as it began; --init_from=resume '
           f'--minutes={setting(config.minutes)} trains for so much longer')
    return replace(config, minutes=0.0)


class Times(NamedTuple):
    """Seconds that parts of a run take."""

    step: float
    evaluation: float
    save: float
    sample: float = 0.0  # of an evaluation

    def of_run(self, config, iters):
        """Of so many iterations. Benchmarks, health checks and the report are left out."""
        evaluations = math.ceil(iters / config.eval_interval)  # beside that before the first step
        saves = evaluations
        if config.checkpoint_interval != 'auto':
            saves += iters // config.checkpoint_interval
        return iters * self.step + (1 + evaluations) * (self.evaluation + self.sample) \
            + saves * self.save


@contextmanager
def apart(device, shape, config, dtype):
    """A context to measure in: the run has the same random numbers after it, and its memory. What
    runs out of memory in here is a UserError."""
    on_gpu = [device] if device.type == 'cuda' else []
    with torch.random.fork_rng(on_gpu), explain_out_of_memory(shape, config, dtype, device):
        yield
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # what is logged is the run's


def fit_minutes(trial, start, given, forward_backward, update):
    """The TrainConfig of a run with as many iterations as fit in its minutes, measured with a Run
    of its shape. start: a Start; given: the settings that the command line names. Raises UserError.
    """
    times = measure(trial, forward_backward, update)
    if start.resumed:  # evaluations stay as they were, so that losses compare
        return fitted(trial.config, times, {*given, 'eval_iters'}, trial.dataset,
                      start.weights.iter_num)
    return fitted(trial.config, times, given, trial.dataset)


def print_length(run, forward_backward, update):
    """Say how long a new run takes. It is left as it was."""
    config = run.config
    if config.is_read_only or not config.max_iters:
        return
    with apart(run.device, run.model.config, config, run.dtype):
        times = measure(run, forward_backward, update)
    seconds = times.of_run(config, config.max_iters)
    advice = recipes(config) if run.device.type == 'cpu' and seconds > 3600 else ''
    print0(f'about {duration(max(1, seconds))} for {count_of(config.max_iters, "iteration")}, '
           f'evaluations included{advice}')


def recipes(config):
    """What to do where a CPU takes hours."""
    names = [path.name for path in sorted((ROOT / 'config').glob('*_cpu_fast.py'))
             if f'\ndataset = {config.dataset!r}' in path.read_text()]
    return '; on this CPU ' + ''.join(f'take config/{name}, or ' for name in names) + \
        '--minutes=10, which fits any run into ten minutes'


def fitted(config, times, given, dataset, begun=0):
    """The TrainConfig with as many iterations as fit in its minutes, after those that were made
    already. given: the settings that stay as they are. Raises UserError."""
    budget_s = 60 * config.minutes
    config, times = with_points(config, times, given)
    iters = bisect_right(range(10**9), budget_s, key=lambda n: times.of_run(config, n)) - 1
    if iters < 1:
        least = math.ceil(times.of_run(config, 1) / 6) / 10
        raise UserError(f'minutes={setting(config.minutes)} is too short for a step, of '
                        f'{times.step:.2g} s, and two evaluations, of '
                        f'{times.evaluation + times.sample:.2g} s '
                        f'each: take --minutes={least:.3g} or more, or a smaller --eval_iters')
    end = begun + iters
    config = replace(config, minutes=0.0, max_iters=end, lr_decay_iters=end,
                     warmup_iters=min(config.warmup_iters, end // 10))
    what = f'max_iters={end}, with warmup_iters={config.warmup_iters}' if not begun else \
        f'{count_of(iters, "iteration")} more, to max_iters={end}; the learning rate is that of ' \
        f'a run of this length, {get_lr(begun, config):.2e} now'
    print0(f'{duration(budget_s)}, evaluations included, are enough for {what}, '
           f'eval_interval={config.eval_interval}, eval_iters={config.eval_iters}')
    return config


def with_points(config, times, given):
    """→ (TrainConfig, Times) of a run of minutes that evaluates and prints often enough for a
    picture, in SHARE of the time: rather on fewer batches than less often. given: the settings
    that stay as they are"""
    seconds, iters = SHARE * 60 * config.minutes, 60 * config.minutes / times.step
    fixed = 'eval_iters' in given
    if 'log_interval' not in given:
        config = replace(config, log_interval=min(config.log_interval, int(iters / LINES) or 1))
    if 'eval_interval' not in given:
        # as many as the config asks for where there is time; POINTS with as little as one batch
        least = times.save + times.sample + times.evaluation * fixed
        most = times.save + times.sample + times.evaluation
        points = max(seconds / most, min(POINTS, seconds / least)) - 1
        points = min(points, max(POINTS, iters / config.eval_interval))
        config = replace(config, eval_interval=max(1, int(iters / max(1, points))))
    share = (seconds / (1 + iters / config.eval_interval) - times.sample) / times.evaluation
    if fixed or share >= 1:
        return config, times
    eval_iters = max(1, int(config.eval_iters * share))
    evaluation = times.evaluation * max(share, eval_iters / config.eval_iters)
    return replace(config, eval_iters=eval_iters), times._replace(evaluation=evaluation)


# -----------------------------------------------------------------------------
# measured by the run's own parts


@status.doing('timing a step')
def measure(run, forward_backward, update):
    """→ Times of a train.Run, as rank 0 has them. The two functions make a step: train.py's."""
    config, loaders = run.config, (run.train_data, *run.val_data.parts)
    optimizer, group = run.optimizer, gloo_group()
    attributes = dict(vars(optimizer))
    with closing(run.train_data.train_batches(0)) as batches:
        step_s = typical(lambda: time_step(run, batches, forward_backward, update), group)
    optimizer.state.clear()
    vars(optimizer).update(attributes)
    batches = sum(len(loader.eval_batches(run.progress.eval_sequences)) for loader in loaders)
    evaluation_s = batches * typical(lambda: time_evaluated_batch(run), group)
    sample_s = 0.0
    if config.report:
        with full_model(run.model, run.context) as model, run.context:
            sampled_s = typical(lambda: timed(run, generate, model, [[0]], SAMPLED)[1], group)
        sample_s = SAMPLE_TOKENS / SAMPLED * sampled_s
    saved = 12 * sum(p.numel() for p in run.model.parameters())  # with two states of the optimizer
    return all_gather(Times(step_s, evaluation_s, saved / SAVED_PER_S, sample_s), group)[0]


def typical(work, group):
    """The median of the seconds that `work()` says it took, after a call that warms up. All
    processes call it as often."""
    seconds, began = [work()], time.perf_counter()
    while len(seconds) < 2 or (len(seconds) < LOOKS and all_gather(
            time.perf_counter() < began + LOOK_S, group)[0]):
        seconds.append(work())
    return statistics.median(seconds[1:])


def timed(run, function, *arguments):
    """→ (what the function returns, the seconds it took)"""
    synchronize(run.device)
    began = time.perf_counter()
    result = function(*arguments)
    synchronize(run.device)
    return result, time.perf_counter() - began


def time_step(run, batches, forward_backward, update):
    """Seconds of a step, of which one micro-batch is computed and the update moves no weight."""
    scaler = torch.amp.GradScaler(run.device.type, enabled=False)
    guard = StepGuard(None, None, run.device)
    for param_group in run.optimizer.param_groups:
        param_group['lr'] = 0.0  # the loop sets it
    loss, micro_s = timed(run, forward_backward, run.wrapped, batches, 1, scaler, run.context)
    _, update_s = timed(run, update, run.wrapped, run.optimizer, scaler, run.config.grad_clip,
                        guard, 0, loss)
    return run.config.accumulation() // run.world.size * micro_s + update_s


def time_evaluated_batch(run):
    return timed(run, mean_loss, run.wrapped, run.val_data.parts[0],
                 run.world.size * run.config.batch_size, run.context)[1]
