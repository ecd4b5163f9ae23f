"""An average of the weights of the last steps, which is evaluated and saved in their place.

Weights that a high learning rate keeps moving are, on average, as good as ones for which it fell:
Morales-Brotons et al. 2024, "Exponential Moving Average of Weights in Deep Learning".
"""

from contextlib import contextmanager

import torch


def keep_average(optimizer, decay):
    """Let each step of an optimizer update an exponential moving average of its parameters, which
    begins with the first step. The average is one of the optimizer's states, so memory plans,
    sharding and checkpoints include it."""
    @torch.no_grad()
    def add(optimizer, *_):
        begun = any('average' in state for state in optimizer.state.values())
        n = optimizer.averaged_steps = 1 + (optimizer.averaged_steps if begun else 0)
        now = min(decay, n / (9 + n))  # forgets the first weights soon (Abadi et al. 2016)
        for p in (p for group in optimizer.param_groups for p in group['params']):
            state = optimizer.state[p]
            if 'average' in state:
                state['average'].lerp_(p, 1 - now)
            elif p.grad is not None:  # without one, the optimizer keeps no state of p either
                state['average'] = p.detach().clone()
    optimizer.register_step_post_hook(add)


@contextmanager
def averaged(optimizer):
    """A context in which the parameters are their averages, where the optimizer keeps any."""
    exchange(optimizer)
    try:
        yield
    finally:
        exchange(optimizer)


@torch.no_grad()
def exchange(optimizer):
    """Exchange the parameters with their averages. Checkpoints are written and read in this form:
    the model holds the average, and the optimizer's state the weights to continue from."""
    for p, state in optimizer.state.items():
        if 'average' in state:
            weights = p.clone()
            p.copy_(state['average'])
            state['average'].copy_(weights)


def go_on(optimizer, decay, averaged_steps):
    """Call it after the model and the optimizer of a checkpoint were loaded. decay: 0 ends the
    average; averaged_steps: how many steps the average has seen"""
    exchange(optimizer)
    optimizer.averaged_steps = averaged_steps
    if not decay:
        for state in optimizer.state.values():
            state.pop('average', None)
