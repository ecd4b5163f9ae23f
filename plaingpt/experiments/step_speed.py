"""The speed of training's own step, on one device."""

import os
import statistics
import time
from contextlib import closing
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import torch

from model import GPT, GPTConfig
from plaingpt.data.batches import fits_in_ram
from plaingpt.data.opening import open_named
from plaingpt.experiments.tables import markdown, number
from plaingpt.system.devices import (
    DTYPES,
    autocast,
    cpu_has_bfloat16,
    device_name,
    mfu,
    peak_memory_bytes,
    synchronize,
)
from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable
from plaingpt.system.formatting import gib, short
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig
from plaingpt.training.step_guard import StepGuard


class Workload(NamedTuple):
    """What a measurement takes: what to train, where and how."""

    config: TrainConfig  # with the settings of the benchmark, as bench.py has them
    shape: GPTConfig
    device: torch.device
    dtype: str
    compile: bool


def make_step(work, batches):
    """→ (GPT, its optimizer, a function that makes a whole step of training on `batches`)."""
    from train import forward_backward, update  # the step itself, not a copy of it
    config, device = work.config, work.device
    gpt = GPT(work.shape)
    gpt.loss_chunk_tokens = 'auto'
    gpt.activation_checkpointing = config.activation_checkpointing
    optimizer = build_optimizer(gpt.to(device), config)
    model = torch.compile(gpt) if work.compile else gpt
    scaler = torch.amp.GradScaler(device.type, enabled=work.dtype == 'float16')
    guard = StepGuard(None, None, device, scaling=scaler.is_enabled())
    context = autocast(device, work.dtype)

    def step():
        loss = forward_backward(model, batches, config.accumulation(), scaler, context)
        update(model, optimizer, scaler, config.grad_clip, guard, 0, loss)

    return gpt, optimizer, step


def random_batches(work):
    """Yield the same random tokens again and again: (idx, targets), each (B, T) on the device."""
    idx, targets = torch.randint(0, work.shape.vocab_size, device=work.device,
                                 size=(2, work.config.batch_size, work.config.block_size))
    while True:
        yield idx, targets


def dataset_batches(work):
    """Batches as training reads them. Raises UserError where the model knows fewer ids."""
    config = work.config
    dataset = open_named(config.dataset)
    if dataset.vocab_size > work.shape.vocab_size:
        raise UserError(f'vocab_size={work.shape.vocab_size}: {dataset.folder} has ids up to '
                        f'{dataset.vocab_size - 1}; leave it at 0 for those of the dataset')
    in_ram = fits_in_ram([part.dataset.folder for part in dataset.parts], 1)
    return dataset.loader('train', in_ram, config.block_size, config.batch_size,
                          micro_steps=config.accumulation(), seed=config.seed,
                          device=work.device).train_batches(0)


# -----------------------------------------------------------------------------
# time


def step_seconds(step, steps, warmup, device):
    """Call `step()` warmup + steps times → the seconds of each of the last `steps`. The warm-up
    calls compile, choose kernels and allocate buffers."""
    times = []
    for _ in range(warmup + steps):
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times[warmup:]


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


def measure_speed(work):
    """Time whole steps of training beside a bare matmul → ([a row], its table). config.profile
    adds a table of the operators that take longest, and a trace in out_dir."""
    config, device = work.config, work.device
    bare_flops = matmul_flops(DTYPES[work.dtype], device)
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    with closing(dataset_batches(work) if config.real_data else random_batches(work)) as batches:
        gpt, _, step = make_step(work, batches)
        seconds = step_seconds(step, config.steps, config.warmup_steps, device)
        peak = peak_memory_bytes(device)
        profile = profile_steps(step, device, config.out_dir) if config.profile else ''
    median = statistics.median(seconds)
    tokens_per_s = config.step_tokens() / median
    flops_per_s = gpt.flops_per_token() * tokens_per_s
    row = {'parameters': gpt.num_parameters(), 'dtype': work.dtype, 'compile': work.compile,
           'optimizer': config.optimizer, 'batch_size': config.batch_size,
           'block_size': config.block_size, 'micro_steps': config.accumulation(),
           'data': config.dataset if config.real_data else 'random',
           'step_ms': 1e3 * median, 'min_ms': 1e3 * min(seconds), 'max_ms': 1e3 * max(seconds),
           'tokens_per_s': tokens_per_s, 'flops_per_token': gpt.flops_per_token(),
           'mfu': mfu(flops_per_s, device_name(device), work.dtype), 'matmul_flops': bare_flops,
           'matmul_share': flops_per_s / bare_flops, 'peak_memory_bytes': peak}
    return [row], format_row(row) + profile


def format_row(row):
    """Markdown, under a line that says what was measured."""
    what = (f'{row["parameters"]:,} parameters, {row["dtype"]}, '
            f'{"compiled" if row["compile"] else "eager"}, {row["optimizer"]}, '
            f'{row["micro_steps"]} × {row["batch_size"]} × {row["block_size"]} tokens a step, '
            f'{row["data"]} data')
    return what + '\n\n' + markdown(
        ['ms a step', 'fastest', 'slowest', 'tokens/s', 'MFU', 'matmul, TFLOP/s', 'share of it',
         'peak memory'],
        [[*(f'{row[key]:.1f}' for key in ('step_ms', 'min_ms', 'max_ms')),
          short(row['tokens_per_s']), number('.1%', row['mfu']),
          f'{row["matmul_flops"] / 1e12:.3g}', f'{row["matmul_share"]:.1%}',
          gib(row['peak_memory_bytes']) if row['peak_memory_bytes'] else '–']])


def profile_steps(step, device, out_dir):
    """Write a trace of three steps to out_dir/trace.json → torch's table of the operators (on a
    GPU: kernels) that take longest."""
    make_writable(out_dir)
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # no notes of the profiler between our lines
    # The first step under the profiler is slow, so it is a warm-up.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(schedule=schedule, acc_events=True) as prof:
        step()
        prof.step()
        for _ in range(3):
            step()
        synchronize(device)
    path = Path(out_dir, 'trace.json')
    prof.export_chrome_trace(str(path))
    where = 'device' if device.type == 'cuda' else 'cpu'
    table = prof.key_averages().table(sort_by=f'self_{where}_time_total', row_limit=12,
                                      max_name_column_width=50)
    return f'\n\nthree steps:\n\n```\n{table}```\n\n{path}: open it in https://ui.perfetto.dev'


# -----------------------------------------------------------------------------
# in a few seconds, for plan.py

PATIENCE_S = 3.0  # what a micro-batch may take; a longer one is timed on fewer tokens
USUAL_SHARE = 0.3  # of a bare matmul's speed, that training reaches


def estimate_speed(work):
    """Tokens a second that training reaches on this device → (tokens/s, how it was found).

    Real steps are timed, three after one that does not count. Where a micro-batch would take long
    it has fewer tokens, and its time is taken to grow with the FLOPs.
    """
    B, T = whole = work.config.batch_size, work.shape.block_size
    size = None if work.device.type == 'cuda' else 1024  # within a second
    affordable = PATIENCE_S * USUAL_SHARE * matmul_flops(DTYPES[work.dtype], work.device, size)
    while flops(work, B, T) > affordable and B * T > 32:
        B, T = (B // 2, T) if B > 1 else (1, T // 2)
    micro_s, update_s = time_parts(work, B, T)
    micro_s *= flops(work, *whole) / flops(work, B, T)
    speed = work.config.step_tokens() / (work.config.accumulation() * micro_s + update_s)
    return speed, 'measured here' if whole == (B, T) else f'estimated from {B} × {T} tokens here'


def flops(work, B, T):
    """Of a micro-batch of (B, T) tokens."""
    with torch.device('meta'):
        gpt = GPT(replace(work.shape, block_size=T))
    return B * T * gpt.flops_per_token()


def time_parts(work, B, T):
    """Time steps of one micro-batch of (B, T) tokens → (its seconds, the update's), the least."""
    idx, targets = torch.randint(work.shape.vocab_size, (2, B, T), device=work.device)
    once = replace(work.config, batch_size=B, gradient_accumulation_steps=1, total_batch_size=0)
    marks, times = [], []

    def mark(*_):
        synchronize(work.device)
        marks.append(time.perf_counter())

    _, optimizer, step = make_step(work._replace(config=once), repeat((idx, targets)))
    optimizer.register_step_pre_hook(mark)
    optimizer.register_step_post_hook(mark)
    for _ in range(4):
        marks.clear()
        mark()
        step()
        mark()
        # float16 leaves updates out while it looks for its scale.
        update_s = marks[2] - marks[1] if len(marks) == 4 else 0.0
        times.append((marks[-1] - marks[0] - update_s, update_s))
    return tuple(map(min, zip(*times[1:], strict=True)))
