"""Learning-rate schedules: iteration → learning rate."""

import math


def get_lr(it, config):
    """TrainConfig → learning rate of iteration `it`: linear warmup, then from learning_rate to
    min_lr at lr_decay_iters, and min_lr from then on.

    cosine: Loshchilov and Hutter 2016, by nanoGPT's exact formula; wsd (warmup, stable, decay):
    Hu et al. 2024, §4; linear: Bergsma et al. 2025.
    """
    high, low, warmup, end = (config.learning_rate, config.min_lr, config.warmup_iters,
                              config.lr_decay_iters)
    if not config.decay_lr:
        return high
    if it < warmup:
        return high * (it + 1) / (warmup + 1)
    if config.lr_schedule == 'constant':
        return high
    if it > end:
        return low
    progress = (it - warmup) / max(1, end - warmup)
    share = {'cosine': 0.5 * (1 + math.cos(math.pi * progress)),
             'linear': 1 - progress,
             'wsd': min(1, (end - it) / max(1, min(config.wsd_decay * end, end - warmup))),
             }[config.lr_schedule]
    return low + share * (high - low)
