"""How long work takes on a device, and how fast that device multiplies matrices."""

import statistics
import time
from itertools import pairwise

import torch


def step_seconds(step, steps, warmup, device):
    """Call `step()` warmup + steps times → the seconds of each of the last `steps`.

    On CUDA the device keeps the time (events in its stream), so that the host runs ahead of it as
    in training. The calls before are warm-up: compiling, choosing kernels, making buffers.
    """
    for _ in range(warmup):
        step()
    synchronize(device)
    marks = [mark(device)]
    for _ in range(steps):
        step()
        marks.append(mark(device))
    synchronize(device)
    return [between(a, b) for a, b in pairwise(marks)]


def synchronize(device):
    """Wait until the device has done all that it was given."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    elif device.type == 'mps':
        torch.mps.synchronize()


def mark(device):
    """Now: an event in CUDA's stream, elsewhere the clock once the device is done."""
    if device.type == 'cuda':
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    synchronize(device)
    return time.perf_counter()


def between(a, b):
    """Seconds from one mark to a later one; on CUDA the device must have passed both."""
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


def spread(seconds):
    """{'median', 'min', 'max'} of a list."""
    return {'median': statistics.median(seconds), 'min': min(seconds), 'max': max(seconds)}


def matmul_flops(dtype, device, size=None, repeats=10):
    """FLOP/s of a large square matmul in a torch dtype, the median of `repeats`: what this device
    reaches today, where a data sheet says what it might.

    size: rows and columns; by default 8,192 on CUDA and 2,048 elsewhere
    """
    size = size or (8192 if device.type == 'cuda' else 2048)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = step_seconds(lambda: torch.mm(a, b, out=out), repeats, 3, device)
    return 2 * size**3 / statistics.median(times)
