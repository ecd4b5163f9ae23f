"""The speed of training's own step on a device: for bench.py, and in a few seconds for plan.py."""

import os
import statistics
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import torch

from model import GPT
from plaingpt.data.batches import fits_in_ram
from plaingpt.data.dataset import open_named
from plaingpt.experiments.tables import markdown, number
from plaingpt.system.devices import (
    DTYPES,
    autocast,
    cpu_has_bfloat16,
    device_name,
    mfu,
    peak_memory_bytes,
)
from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable
from plaingpt.system.formatting import gib, short
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.stopwatch import time_step, timed

PATIENCE_S = 3.0  # what a micro-batch may take in a plan


def new_step(shape, config, device, dtype, compile=False):
    """→ a function of (batches, micro-steps) that makes a step of a new GPT on this device → the
    seconds of its micro-batches and of the update; and the GPT."""
    from train import forward_backward, update  # the step itself, not a copy of it
    gpt = GPT(shape).to(device)
    gpt.loss_chunk_tokens = 'auto'
    gpt.activation_checkpointing = config.activation_checkpointing
    run = SimpleNamespace(
        wrapped=torch.compile(gpt) if compile else gpt, optimizer=build_optimizer(gpt, config),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == 'float16'), config=config,
        device=device, context=autocast(device, dtype))
    return partial(time_step, run, forward_backward=forward_backward, update=update), gpt


def random_batches(shape, batch_size, device):
    """Yield the same random tokens again and again: (idx, targets), each (B, T) on the device."""
    return repeat(torch.randint(shape.vocab_size, (2, batch_size, shape.block_size),
                                device=device).unbind())


def estimate_step(shape, config, device, dtype):
    """Seconds of a step on this device. One sequence is timed in place of a micro-batch
    that would take long."""
    step, _ = new_step(shape, config, device, dtype)
    one_s, _ = time_batch(step, shape, 1, device)
    sequences = config.batch_size if one_s * config.batch_size < PATIENCE_S else 1
    micro_s, update_s = time_batch(step, shape, sequences, device)
    micro_steps = config.accumulation() * config.batch_size / sequences
    return micro_steps * micro_s + update_s


def time_batch(step, shape, sequences, device):
    """→ the typical seconds of a micro-batch of so many sequences, and of the update"""
    batches = random_batches(shape, sequences, device)
    step(batches, 1)  # warms up
    return map(min, zip(*(step(batches, 1) for _ in range(3)), strict=True))


def dataset_batches(config, shape, device):
    """Batches as training reads them. Raises UserError where the model knows fewer ids."""
    dataset = open_named(config.dataset)
    if dataset.vocab_size > shape.vocab_size:
        raise UserError(f'vocab_size={shape.vocab_size}: {dataset.folder} has ids up to '
                        f'{dataset.vocab_size - 1}; leave it at 0 for those of the dataset')
    in_ram = fits_in_ram([part.dataset.folder for part in dataset.parts], 1)
    return dataset.loader('train', in_ram, config.block_size, config.batch_size,
                          micro_steps=config.accumulation(), seed=config.seed,
                          device=device).train_batches(0)


def matmul_flops(dtype, device):
    """FLOP/s of a large square matmul in a torch dtype, the median of ten: what this device reaches
    today. A precision that a CPU lacks in hardware, which takes a hundred times as long, gets a
    smaller one."""
    slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not cpu_has_bfloat16())
    size = 8192 if device.type == 'cuda' else 512 if slow else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = [timed(device, lambda: torch.mm(a, b, out=out))[1] for _ in range(13)]
    return 2 * size**3 / statistics.median(times[3:])


def measure_speed(config, shape, device, dtype, compile):
    """Time whole steps of training → ([a row], its table). config: bench.py's; with profile=True
    the table has the operators that take longest, and a trace is in out_dir."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    step, gpt = new_step(shape, config, device, dtype, compile)
    batches = dataset_batches(config, shape, device) if config.real_data else \
        random_batches(shape, config.batch_size, device)
    seconds = [sum(step(batches, config.accumulation()))
               for _ in range(config.warmup_steps + config.steps)][config.warmup_steps:]
    peak = peak_memory_bytes(device)
    profile = profile_steps(lambda: step(batches, config.accumulation()), device,
                            config.out_dir) if config.profile else ''
    if config.real_data:
        batches.close()
    median, bare_flops = statistics.median(seconds), matmul_flops(DTYPES[dtype], device)
    tokens_per_s = config.step_tokens() / median
    flops_per_token = gpt.flops_per_token()
    row = {'parameters': gpt.num_parameters(), 'dtype': dtype, 'compile': compile,
           'optimizer': config.optimizer, 'batch_size': config.batch_size,
           'block_size': config.block_size, 'micro_steps': config.accumulation(),
           'data': config.dataset if config.real_data else 'random',
           'step_ms': 1e3 * median, 'min_ms': 1e3 * min(seconds), 'max_ms': 1e3 * max(seconds),
           'tokens_per_s': tokens_per_s, 'flops_per_token': flops_per_token,
           'mfu': mfu(flops_per_token * tokens_per_s, device_name(device), dtype),
           'matmul_flops': bare_flops, 'matmul_share': flops_per_token * tokens_per_s / bare_flops,
           'peak_memory_bytes': peak}
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
    path = Path(out_dir, 'trace.json')
    prof.export_chrome_trace(str(path))
    where = 'device' if device.type == 'cuda' else 'cpu'
    table = prof.key_averages().table(sort_by=f'self_{where}_time_total', row_limit=12,
                                      max_name_column_width=50)
    return f'\n\nthree steps:\n\n```\n{table}```\n\n{path}: open it in https://ui.perfetto.dev'
