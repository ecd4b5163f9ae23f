"""How long work takes on a device, and how fast that device multiplies matrices."""

import statistics
import time
from itertools import pairwise

import torch

from plaingpt.system.devices import cpu_has_bfloat16, synchronize


def step_seconds(step, steps, warmup, device):
    """Call `step()` warmup + steps times → the seconds of each of the last `steps`.

    On CUDA the device keeps the time (events in its stream), so the host runs ahead of it as in
    training. The warm-up calls compile, choose kernels and allocate buffers.
    """
    for _ in range(warmup):
        step()
    synchronize(device)
    marks = [time_mark(device)]
    for _ in range(steps):
        step()
        marks.append(time_mark(device))
    synchronize(device)
    return [b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def time_mark(device):
    """Now: on CUDA an event in the stream, elsewhere the clock once the device is done."""
    if device.type == 'cuda':
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    synchronize(device)
    return time.perf_counter()


def step_times(seconds):
    """Seconds of each step → what a row has of them: median, fastest and slowest, in ms."""
    return {'step_ms': 1e3 * statistics.median(seconds), 'min_ms': 1e3 * min(seconds),
            'max_ms': 1e3 * max(seconds)}


def matmul_flops(dtype, device, size=None):
    """FLOP/s of a large square matmul in a torch dtype, the median of ten: what this device reaches
    today. size: rows and columns; by default 8,192 on CUDA and 2,048 elsewhere, but 512 in a
    precision that a CPU lacks in hardware, which takes a hundred times as long"""
    slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not cpu_has_bfloat16())
    size = size or (8192 if device.type == 'cuda' else 512 if slow else 2048)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = step_seconds(lambda: torch.mm(a, b, out=out), 10, 3, device)
    return 2 * size**3 / statistics.median(times)
