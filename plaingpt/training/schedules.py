"""Learning-rate schedules: how far a run is → its learning rate.

A new one is a function here and its entry in SCHEDULES.
"""

import math

WARMUP_SHARE = 0.1  # of a run of minutes, at most


def get_lr(it, config, fraction_done=None):
    """The learning rate of iteration `it` under a TrainConfig: linear warmup, then the schedule,
    which runs from learning_rate down to min_lr at lr_decay_iters. fraction_done: of the time of
    --minutes, which takes the place of iterations; the warmup then ends by WARMUP_SHARE of it."""
    if not config.decay_lr:
        return config.learning_rate
    is_timed = fraction_done is not None
    warmup, end = config.warmup_iters, config.lr_decay_iters
    if it < warmup and not (is_timed and fraction_done >= WARMUP_SHARE):
        rate = config.learning_rate * (it + 1) / (warmup + 1)
        return max(rate, config.learning_rate * fraction_done / WARMUP_SHARE) if is_timed else rate
    at = it
    if is_timed:
        at, warmup, end = fraction_done, 0, 1
    name, _, part = config.lr_schedule.partition(':')
    share = SCHEDULES[name](at, warmup, end, *[float(part)] if part else [])
    return config.min_lr + share * (config.learning_rate - config.min_lr)


# Each function: where the run is, where the warmup and the schedule end → 1 for learning_rate, 0
# for min_lr, and what is between.


def cosine(at, warmup, end):
    """Loshchilov and Hutter 2016, by nanoGPT's exact formula."""
    return 0.5 * (1 + math.cos(math.pi * decay_fraction(at, warmup, end)))


def linear(at, warmup, end):
    """A straight line down (Bergsma et al. 2025)."""
    return 1 - decay_fraction(at, warmup, end)


def wsd(at, warmup, end, part=0.2):
    """Warmup, stable, decay: constant, then a straight line down in the last fifth of the run, or
    in the last tenth with wsd:0.1 (Hu et al. 2024, §4)."""
    falling = min(part * end, end - warmup) or 1
    return max(0, min(1, (end - at) / falling))


def constant(at, warmup, end):
    return 1


SCHEDULES = {'cosine': cosine, 'wsd': wsd, 'linear': linear, 'constant': constant}


def decay_fraction(at, warmup, end):
    """0 at the end of the warmup, 1 at the end of the schedule and after."""
    return min(1, (at - warmup) / max(1, end - warmup))
