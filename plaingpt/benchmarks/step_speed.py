"""The speed of training's own step, on one device."""

import os
import time
from contextlib import closing
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from model import GPT, GPTConfig
from plaingpt.benchmarks.result_tables import format_memory, format_times, markdown
from plaingpt.benchmarks.timing import matmul_flops, step_seconds, step_times, synchronize
from plaingpt.corpus.batches import BatchLoader, fits_in_ram
from plaingpt.corpus.dataset import dataset_folder, open_dataset
from plaingpt.system.devices import DTYPES, autocast, device_name, mfu, peak_memory_bytes
from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig
from plaingpt.training.training_step import StepGuard, forward_backward, update


class Workload(NamedTuple):
    """What every benchmark takes: what to train, where and how."""

    config: TrainConfig  # with the settings of the benchmark, as bench.py has them
    shape: GPTConfig
    device: torch.device
    dtype: str
    compile: bool


def make_step(work, batches):
    """→ (GPT, its optimizer, a function that makes a whole step of training on `batches`)."""
    config, device = work.config, work.device
    gpt = GPT(work.shape)
    gpt.loss_chunk_tokens = config.loss_chunk_tokens
    gpt.activation_checkpointing = config.activation_checkpointing
    optimizer = build_optimizer(gpt.to(device), config, device.type)
    model = torch.compile(gpt) if work.compile else gpt
    scaler = torch.amp.GradScaler(device.type, enabled=work.dtype == 'float16')
    guard = StepGuard(None, config.max_bad_steps, None, device, scaling=scaler.is_enabled())
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
    dataset = open_dataset(dataset_folder(config.dataset))
    if dataset.vocab_size > work.shape.vocab_size:
        raise UserError(f'vocab_size={work.shape.vocab_size}: {dataset.folder} has ids up to '
                        f'{dataset.vocab_size - 1}; leave it at 0 for those of the dataset')
    in_ram = fits_in_ram(dataset.folder, 1) if config.data_in_ram == 'auto' else config.data_in_ram
    return BatchLoader(dataset.split('train', in_ram), config.block_size, config.batch_size,
                       micro_steps=config.accumulation(), seed=config.seed,
                       device=work.device).train_batches(0)


def measure_speed(work):
    """Time whole steps of training beside a bare matmul → ([a row], its table). config.profile
    adds a table of the operators that take longest, and a trace in out_dir."""
    config, device = work.config, work.device
    bare_flops = matmul_flops(DTYPES[work.dtype], device)
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    with closing(dataset_batches(work) if config.real_data else random_batches(work)) as batches:
        gpt, _, step = make_step(work, batches)
        times = step_times(step_seconds(step, config.steps, config.warmup_steps, device))
        peak = peak_memory_bytes(device)
        profile = profile_steps(step, device, config.out_dir) if config.profile else ''
    tokens_per_s = config.step_tokens() / times['step_ms'] * 1e3
    flops_per_s = gpt.flops_per_token() * tokens_per_s
    row = {'parameters': gpt.num_parameters(), 'dtype': work.dtype, 'compile': work.compile,
           'optimizer': config.optimizer, 'batch_size': config.batch_size,
           'block_size': config.block_size, 'micro_steps': config.accumulation(),
           'data': config.dataset if config.real_data else 'random',
           **times, 'tokens_per_s': tokens_per_s, 'flops_per_token': gpt.flops_per_token(),
           'mfu': mfu(flops_per_s, device_name(device), work.dtype), 'matmul_flops': bare_flops,
           'matmul_share': flops_per_s / bare_flops, 'peak_memory_bytes': peak}
    return [row], format_row(row) + profile


# -----------------------------------------------------------------------------
# in a few seconds, for plan.py

LONG_S = 0.3  # a micro-batch that takes about so long is measured well enough


def estimate_speed(work):
    """Tokens a second that training reaches on this device → (tokens/s, how it was found).

    What takes no longer than LONG_S is measured as it is. Else the times of a micro-batch and of
    the update are affine in the number of layers, and a micro-batch's in the FLOPs of its tokens,
    so one layer and three, and two sizes of a small micro-batch, give the rest.
    """
    layers, whole = work.shape.n_layer, (work.config.batch_size, work.shape.block_size)
    one = time_parts(work, 1)
    sizes = list(one)
    several = layers if layers * one[sizes[-1]][0] < LONG_S else min(layers, 3)
    more = one if several == 1 else time_parts(work, several, sizes)
    deep = {}
    for size in sizes:  # noise does not make layers free
        deep[size] = [max(a, a + (layers - 1) / max(1, several - 1) * (b - a))
                      for a, b in zip(one[size], more[size], strict=True)]
    (micro_s, update_s), larger = deep[sizes[-1]], flops(work, whole) / flops(work, sizes[-1])
    if larger > 1:
        halved = flops(work, sizes[0]) / flops(work, sizes[-1])
        fixed_s = (deep[sizes[0]][0] - halved * micro_s) / (1 - halved)  # whatever the tokens
        micro_s = larger * micro_s - (larger - 1) * min(max(0.0, fixed_s), micro_s / 2)
    speed = work.config.step_tokens() / (work.config.accumulation() * micro_s + update_s)
    if larger == 1 and several == layers:
        return speed, 'measured here'
    return speed, f'estimated from 1 and {several} of the {layers} layers on ' \
                  f'{sizes[-1][0]} × {sizes[-1][1]} tokens here'


def flops(work, size):
    """Of a micro-batch of (B, T) tokens."""
    with torch.device('meta'):
        gpt = GPT(replace(work.shape, block_size=size[1]))
    return size[0] * size[1] * gpt.flops_per_token()


def time_parts(work, n_layer, sizes=None):
    """Time steps of the model with so many layers, a few for each size of a micro-batch → {(B, T):
    (seconds of the micro-batch, seconds of the update)}, the least of each.

    sizes: or None for what takes LONG_S at most, and half of it; just the whole where that does
    """
    marks, tokens = [], [1, 1]

    def batches():
        while True:
            yield torch.randint(work.shape.vocab_size, (2, *tokens), device=work.device)

    def mark(*_):
        synchronize(work.device)
        marks.append(time.perf_counter())

    def parts(size):
        tokens[:] = size
        marks.clear()
        mark()
        step()
        mark()
        # float16 leaves updates out while it looks for its scale.
        update_s = marks[2] - marks[1] if len(marks) == 4 else 0.0
        return marks[-1] - marks[0] - update_s, update_s

    once = replace(work.config, batch_size=1, gradient_accumulation_steps=1, total_batch_size=0)
    _, optimizer, step = make_step(
        work._replace(config=once, shape=replace(work.shape, n_layer=n_layer)), batches())
    optimizer.register_step_pre_hook(mark)
    optimizer.register_step_post_hook(mark)
    most = work.config.batch_size, work.shape.block_size
    parts((1, min(32, most[1])))  # the first call prepares what the others use
    if not sizes:
        sizes = [(1, min(32, most[1]))]
        while sizes[-1] != most and (len(sizes) == 1 or parts(sizes[-1])[0] < LONG_S / 2):
            B, T = sizes[-1]  # longer sequences first, then more of them
            sizes.append((min(2 * B, most[0]), T) if most[1] == T else (B, min(2 * T, most[1])))
        sizes = sizes[-1:] if sizes[-1] == most else sizes[-2:]
    timed = {}
    for size in sizes:
        times = [parts(size)]
        while len(times) < 4 and sum(map(sum, times)) < LONG_S:
            times.append(parts(size))
        timed[size] = tuple(map(min, zip(*times, strict=True)))
    return timed


def format_row(row):
    """Markdown, under a line that says what was measured."""
    what = (f'{row["parameters"]:,} parameters, {row["dtype"]}, '
            f'{"compiled" if row["compile"] else "eager"}, {row["optimizer"]}, '
            f'{row["micro_steps"]} × {row["batch_size"]} × {row["block_size"]} tokens a step, '
            f'{row["data"]} data')
    share = 'n/a' if row['mfu'] is None else f'{row["mfu"]:.1%}'
    return what + '\n\n' + markdown(
        ['ms a step', 'fastest', 'slowest', 'tokens/s', 'MFU', 'matmul, TFLOP/s', 'share of it',
         'peak memory'],
        [[*format_times(row), share, f'{row["matmul_flops"] / 1e12:.3g}',
          f'{row["matmul_share"]:.1%}', format_memory(row)]])


def profile_steps(step, device, out_dir):
    """Write a trace of three steps to out_dir/trace.json → a table of the slowest operators."""
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
    own_us = attrgetter(f'self_{"device" if device.type == "cuda" else "cpu"}_time_total')
    events = sorted(prof.key_averages(), key=own_us, reverse=True)
    total = sum(map(own_us, events))
    table = markdown(
        ['operator', 'calls a step', 'ms a step', 'share'],
        [[event.key[:60], f'{event.count / 3:.0f}', f'{own_us(event) / 3e3:.2f}',
          f'{own_us(event) / total:.1%}'] for event in events[:12]])
    return f'\n\n{table}\n\n{path}: open it in https://ui.perfetto.dev'
