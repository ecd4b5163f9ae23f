"""--minutes: a run that ends on time.

It measures its step, and begins with as many iterations as fit. It measures again on the way, and
changes max_iters and the learning rate's schedule. So the learning rate is at its end when the time
is over, even on a machine that becomes busy.
"""

import time
from dataclasses import replace

from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import duration, setting
from plaingpt.training.stopwatch import measure

POINTS, LINES = 10, 20  # evaluations and lines of a run of minutes, at least
FEWEST = 5  # evaluations, where more of them would have to read less
SHARE = 0.1  # share of the time that evaluations may take
WINDOW = 0.1  # share of the time left, after which a run of minutes decides again
# What a run of minutes decides; a resumed one keeps it.
DECIDED = 'max_iters', 'lr_decay_iters', 'warmup_iters', 'eval_iters', 'eval_interval', \
    'log_interval'


def refuse_two_lengths(config, given):
    """Raise UserError where the command line gives the length of a run twice. given: the settings
    that it names"""
    two = [f'--{key}' for key in ('max_iters', 'lr_decay_iters') if key in given]
    if two:
        raise UserError(f'minutes={setting(config.minutes)} decides how many iterations there are, '
                        f'and {" and ".join(two)} too: leave one of them out')


def length_of(resumed, config, given):
    """The TrainConfig of a run that goes on from a Checkpoint. Its minutes are those of the whole
    run: the ones that the command line gives come after those used with --init_from=resume, and
    include them with auto, whose command torchrun repeats. Where it gives none, and no number of
    iterations, they stay."""
    saved, left_s = resumed.settings(), resumed.state['left_s']
    if not config.minutes and (left_s is None or 'max_iters' in given):
        return config
    minutes = config.minutes or saved['minutes']
    if config.minutes and config.init_from == 'resume':
        minutes += saved['minutes'] - (left_s or 0.0) / 60
    return replace(config, minutes=minutes,
                   **{key: saved[key] for key in DECIDED if key in saved.keys() - given})


def fit_minutes(run, given, forward_backward, update):
    """Measure how many iterations a run of minutes has time for, and give it so many. A new run
    evaluates for SHARE of the time at most: less often than POINTS times if needed, but FEWEST, and
    then on fewer batches, but two. given: the settings that the command line names, which stay as
    they are. Raises UserError where no step of a new run fits."""
    config, resumed = run.config, run.start.checkpoint
    left_s = 60 * config.minutes
    if resumed:
        left_s += (resumed.state['left_s'] or 0.0) - 60 * resumed.settings()['minutes']
    run.deadline = Deadline(run.start.began + left_s)
    step_s, evaluation_s = measure(run, forward_backward, update)
    seconds = max(0.0, all_gather(run.deadline.left_s(), gloo_group())[0])
    iters = seconds / step_s
    fitted = {'log_interval': min(config.log_interval, int(iters / LINES) or 1)}
    if not resumed:
        affordable = SHARE * seconds / evaluation_s - 1  # one comes before the first step
        interval = config.eval_interval
        if 'eval_interval' not in given:
            points = min(max(POINTS, iters / interval), max(FEWEST, affordable))
            interval = int(iters / points) or 1
        fewer = max(2, int(config.eval_iters * (1 + affordable) / (1 + iters / interval)))
        fitted |= {'eval_interval': interval, 'eval_iters': min(config.eval_iters, fewer)}
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
    of = f' left of {duration(60 * config.minutes)}' if resumed else ''
    print0(f'{duration(seconds)}{of} are enough for about max_iters={end}, with warmup_iters='
           f'{config.warmup_iters}, eval_interval={config.eval_interval}, '
           f'eval_iters={config.eval_iters}')


def steps_in(seconds, step_s, evaluation_s, config):
    """How many steps fit, with an evaluation every eval_interval and one at the end."""
    return max(0, int((seconds - evaluation_s) / (step_s + evaluation_s / config.eval_interval)))


class Deadline:
    """When a run of minutes ends, and so how many iterations it has."""

    def __init__(self, ends_at):
        self.ends_at = ends_at
        self.window = None  # (iteration, seconds without pauses) where it began

    def left_s(self):
        return self.ends_at - time.perf_counter()

    def decide(self, run):
        """Decide the length of the run again, at a logged step. Rank 0 decides for all."""
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
