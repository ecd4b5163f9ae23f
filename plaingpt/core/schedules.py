"""Learning-rate schedules.

To add one, write a function here and add it to SCHEDULES.
"""

import math

MAX_WARMUP = 0.1  # in a timed run, warmup takes at most this fraction of the time


def get_lr(it, config, fraction_done=None):
    """The learning rate at iteration `it` under a TrainConfig: linear warmup to learning_rate, then
    lr_schedule, which reaches min_lr at lr_decay_iters unless it is constant. With decay_lr=False,
    learning_rate throughout.

    Why warmup: early gradients are large, and AdamW's second moments are not yet reliable (Liu et
    al. 2020, "On the Variance of the Adaptive Learning Rate and Beyond"). Why decay: large steps
    make fast progress but bounce around a minimum, and small ones settle into it.

    fraction_done: how much of the run is done, from 0 to 1. In a timed run (--minutes), the
    schedule follows it instead of iterations. Warmup replaces the beginning of the schedule, for
    warmup_iters but at most MAX_WARMUP of the time.
    """
    if not config.decay_lr:
        return config.learning_rate
    is_timed = config.minutes > 0
    warmup, end = config.warmup_iters, config.decay_iters()
    if it < warmup and not (is_timed and fraction_done >= MAX_WARMUP):
        lr = config.learning_rate * (it + 1) / (warmup + 1)
        if is_timed:
            lr = max(lr, config.learning_rate * fraction_done / MAX_WARMUP)
        return lr
    position = it
    if is_timed:
        position, warmup, end = fraction_done, 0, 1
    schedule, options = parse_schedule(config.lr_schedule)
    coeff = schedule(position, warmup, end, *options)  # from 1 to 0
    return config.final_lr() + coeff * (config.learning_rate - config.final_lr())


def parse_schedule(lr_schedule):
    """'wsd:0.1' → (the function wsd, [0.1]). Raises ValueError."""
    name, colon, option = lr_schedule.partition(':')
    if name not in SCHEDULES:
        raise ValueError(f'must be {", ".join(SCHEDULES)}')
    options = [float(option)] if colon else []
    try:
        SCHEDULES[name](0, 0, 1, *options)  # raises ValueError if the option is invalid
    except TypeError:
        raise ValueError(f'{name} has no option') from None
    return SCHEDULES[name], options


# Each schedule takes the current position and the ends of the warmup and of the schedule, and maybe
# an option: the number in NAME:NUMBER. It returns the coefficient of learning_rate: 1 gives
# learning_rate, 0 gives min_lr.


def cosine(position, warmup, end):
    """Half a cosine (Loshchilov and Hutter 2016), with nanoGPT's exact formula."""
    return 0.5 * (1 + math.cos(math.pi * decay_progress(position, warmup, end)))


def linear(position, warmup, end):
    """Linear decay (Bergsma et al. 2025)."""
    return 1 - decay_progress(position, warmup, end)


def wsd(position, warmup, end, decay_share=0.2):
    """Warmup-stable-decay (Hu et al. 2024, section 4): constant, then linear decay over the last
    fifth of the schedule, or over the last tenth with wsd:0.1; never before the end of warmup."""
    if not 0 < decay_share <= 1:
        raise ValueError('wsd:FRACTION is the decaying part of the schedule: use a number above 0 '
                         'and at most 1')
    decay_length = min(decay_share * end, end - warmup) or 1  # not longer than what follows warmup
    return max(0, min(1, (end - position) / decay_length))


def constant(position, warmup, end):
    return 1


SCHEDULES = {'cosine': cosine, 'wsd': wsd, 'linear': linear, 'constant': constant}


def decay_progress(position, warmup, end):
    """Progress of the decay: 0 at the end of warmup, 1 at the end of the schedule and after."""
    return min(1, (position - warmup) / max(1, end - warmup))
