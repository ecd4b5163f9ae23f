"""Learning-rate schedules: an iteration → its learning rate.

A new one is a function here and its entry in SCHEDULES.
"""

import math


def get_lr(it, config):
    """The learning rate of iteration `it` under a TrainConfig: linear warmup, then the schedule,
    which runs from learning_rate down to min_lr at lr_decay_iters."""
    if not config.decay_lr:
        return config.learning_rate
    if it < config.warmup_iters:
        return config.learning_rate * (it + 1) / (config.warmup_iters + 1)
    name, _, _ = config.lr_schedule.partition(':')
    return SCHEDULES[name](it, config)


def cosine(it, config):
    """Loshchilov and Hutter 2016, by nanoGPT's exact formula."""
    return rate_between(0.5 * (1 + math.cos(math.pi * progress(it, config))), config)


def linear(it, config):
    """A straight line down (Bergsma et al. 2025)."""
    return rate_between(1 - progress(it, config), config)


def wsd(it, config):
    """Warmup, stable, decay: constant, then a straight line down in the last fifth of the run, or
    in the last tenth with wsd:0.1 (Hu et al. 2024, §4)."""
    end, part = config.lr_decay_iters, float(config.lr_schedule.partition(':')[2] or 0.2)
    falling = max(1, min(part * end, end - config.warmup_iters))  # iterations
    return rate_between(max(0, min(1, (end - it) / falling)), config)


def constant(it, config):
    return config.learning_rate


SCHEDULES = {'cosine': cosine, 'wsd': wsd, 'linear': linear, 'constant': constant}


def progress(it, config):
    """0 at the end of the warmup, 1 at lr_decay_iters and after."""
    warmup, end = config.warmup_iters, config.lr_decay_iters
    return min(1, (it - warmup) / max(1, end - warmup))


def rate_between(share, config):
    """learning_rate for a share of 1, min_lr for 0."""
    return config.min_lr + share * (config.learning_rate - config.min_lr)
