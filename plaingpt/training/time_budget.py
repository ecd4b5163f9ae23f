"""How long a run takes, by steps of its own that do not count, and how many fit in --minutes."""

import bisect
import math
import statistics
import time
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch

from plaingpt.inference.generation import generate
from plaingpt.system.devices import synchronize
from plaingpt.system.distributed import all_gather, print0
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import count_of, duration, quote_epochs, setting
from plaingpt.system.streams import status
from plaingpt.training.memory_planner import explain_out_of_memory
from plaingpt.training.training_step import StepGuard, forward_backward, update

LOOK_S, LOOKS = 1.0, 10  # a part is timed for so long, and not more often
SAMPLED = 8  # tokens that are timed of a sample
SAVED_PER_S = 370e6  # bytes: GPT-2 124M on two cores, docs/checkpoints.md
LENGTH = ('max_iters', 'lr_decay_iters', 'warmup_iters')  # the settings that --minutes decides


class Times(NamedTuple):
    """Seconds that parts of a run take."""

    step: float
    evaluation: float  # of all that it measures, with its sample
    save: float

    def of_run(self, config, iters):
        """Of so many iterations. Benchmarks, health checks and the report are left out."""
        evaluations = math.ceil(iters / config.eval_interval)  # beside that before the first step
        saves = evaluations + iters // config.checkpoint_interval
        return iters * self.step + (1 + evaluations) * self.evaluation + saves * self.save


def with_length(run, resumed, mean_loss, group):
    """The TrainConfig of a run that is about to begin, whose iterations fit in config.minutes, if
    any; prints how long the run takes. One that is resumed keeps its iterations. The run is left as
    it was. mean_loss: train.mean_loss; group: of gloo_group. Raises UserError."""
    config, device = run.config, run.device
    if resumed and config.minutes:
        config = replace(config, minutes=0.0, **{
            key: resumed.state['config'].get(key, getattr(config, key)) for key in LENGTH})
        print0(f'minutes: the run goes on to the {count_of(config.max_iters, "iteration")} that it '
               'began with')
    if resumed or config.is_read_only or not (config.max_iters or config.minutes):
        return config
    cuda = [device] if device.type == 'cuda' else []
    with status.doing('timing a step'), torch.random.fork_rng(cuda), \
            explain_out_of_memory(run.model.config, config, run.dtype, device):
        times = all_gather(measure(run, mean_loss, group), group)[0]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)  # what is logged is the run's
    if config.minutes:
        return fitted(config, times, run.dataset)
    seconds = times.of_run(config, config.max_iters)
    on_cpu = device.type == 'cpu' and seconds > 3600
    print0(f'about {duration(max(1, seconds))} for {count_of(config.max_iters, "iteration")}, '
           f'evaluations included{" on this CPU" + recipes(config) if on_cpu else ""}')
    return config


def refuse_two_lengths(config, options):
    """Raise UserError where the command line's {key: value} say in two ways how long to train."""
    if config.minutes and (two := [f'--{key}' for key in LENGTH[:2] if key in options]):
        raise UserError(f'minutes={setting(config.minutes)} decides how many iterations there are, and '
                        f'{" and ".join(two)} too: leave one of them out')


def recipes(config):
    """What to do where a CPU takes hours: ': config/… is made for a CPU; --minutes=10 …'."""
    found = [path.name for path in sorted((ROOT / 'config').glob('*_cpu_fast.py'))
             if f'\ndataset = {config.dataset!r}' in path.read_text()]
    return ': ' + ''.join(f'config/{name} is made for a CPU; ' for name in found) + \
        '--minutes=10 fits any run in ten minutes'


def fitted(config, times, dataset):
    """The TrainConfig with as many iterations as fit in config.minutes. Raises UserError."""
    budget_s = 60 * config.minutes
    iters = bisect.bisect_right(range(10**9), budget_s, key=lambda n: times.of_run(config, n)) - 1
    if iters < 1:
        least_s = times.of_run(config, 1)
        raise UserError(f'minutes={setting(config.minutes)} is too short: a step takes '
                        f'{times.step:.3g} s and an evaluation {times.evaluation:.3g} s: use '
                        f'--minutes={math.ceil(least_s / 6) / 10:.3g} or more, or a smaller '
                        '--eval_iters')
    config = replace(config, minutes=0.0, max_iters=iters, lr_decay_iters=iters,
                     warmup_iters=min(config.warmup_iters, iters // 10))
    epochs = dataset.epochs(iters * config.step_tokens())
    print0(f'{duration(budget_s)}, evaluations included, are enough for max_iters={iters} with '
           f'warmup_iters={config.warmup_iters}: {quote_epochs(epochs)}')
    return config


def measure(run, mean_loss, group):
    """→ Times of a run, by its own micro-batches and updates at a learning rate of 0."""
    config, device, loader = run.config, run.device, run.val_data.parts[0]
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    guard = StepGuard(None, 1, None, device)

    def update_nothing(loss):
        for param_group in run.optimizer.param_groups:
            param_group['lr'] = 0.0  # the loop sets it
        update(run.model, run.optimizer, scaler, config.grad_clip, guard, 0, loss)

    def step():
        loss, micro_s = timed(forward_backward, run.parallel.train, batches, 1, scaler, run.context)
        return config.accumulation() // run.world.size * micro_s + timed(update_nothing, loss)[1]

    def evaluation():  # of a batch
        return timed(mean_loss, run.parallel.eval, loader, run.world.size * config.batch_size,
                     False, run.context, run.stop)[1]

    def sample():
        with run.context:
            return timed(generate, model, [[0]], SAMPLED)[1] * config.sample_tokens / SAMPLED

    def timed(function, *arguments):
        synchronize(device)
        began = time.perf_counter()
        result = function(*arguments)
        synchronize(device)
        return result, time.perf_counter() - began

    def typical(work):
        """Seconds that `work` says it takes, on all processes as often; the first call warms up."""
        seconds, began = [], time.perf_counter()
        while len(seconds) < 2 or len(seconds) < LOOKS and all_gather(
                time.perf_counter() - began < LOOK_S, group)[0]:
            seconds.append(work())
        return statistics.median(seconds[1:])

    with closing(run.train_data.train_batches(0)) as batches:
        step_s = typical(step)
    run.optimizer.state.clear()
    evaluated = sum(len(each.eval_batches(run.progress.eval_sequences, config.eval_tokens > 0))
                    for each in (run.train_data, *run.val_data.parts, *run.val_data.beside))
    evaluation_s = evaluated * typical(evaluation)
    if config.sample_tokens:
        with run.parallel.full_model() as model:
            evaluation_s += typical(sample)
    saved = 12 * sum(p.numel() for p in run.model.parameters())  # with two states of the optimizer
    return Times(step_s, evaluation_s, saved / SAVED_PER_S)
