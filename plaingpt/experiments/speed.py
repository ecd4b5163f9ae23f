"""Time training steps on a device: for bench.py, and within seconds for plan.py."""

import statistics
import time
from dataclasses import replace
from itertools import repeat

import torch

from plaingpt.core.dataset import has_token_files, open_dataset_spec
from plaingpt.data.corpora import find_dataset_size
from plaingpt.experiments.comparison import format_number, markdown
from plaingpt.experiments.core_speed import matmul_speed
from plaingpt.inference.open_weights import gpt_config_from_weights
from plaingpt.system.devices import device_name, mfu, peak_memory_bytes, synchronize
from plaingpt.system.formatting import gib, short

WARMUP_STEPS = 3  # not timed
MAX_MICRO_BATCH_S = 3.0  # in a plan, longer micro-batches are estimated from one sequence
MAX_CPU_FLOPS = 2e12  # per sequence, to be timed on a CPU: about 20 s on two cores
FAST_S = 0.25  # steps faster than this are timed five times, slower ones once


def planned_gpt_config(config, start):
    """→ (GPTConfig of a run, tokens of its dataset or None, source of that number). The dataset
    need not be prepared. Raises UserError if the run cannot start from its model."""
    vocab_size, tokens, source = find_dataset_size(config.dataset, config.vocab_size)
    if start.from_scratch:
        return config.gpt_config(vocab_size), tokens, source
    dataset = None
    if has_token_files(config.dataset):
        dataset = open_dataset_spec(config.dataset, config.vocab_size)
    gpt_config = gpt_config_from_weights(config, start.weights, dataset)
    return replace(gpt_config, block_size=config.block_size), tokens, source


def time_step(step, batches, lr):
    """Take a step → (seconds of its micro-batches, seconds of the update), including their work on
    the device"""
    times = []
    for call, argument in (step.forward_backward, batches), (step.update, lr):
        synchronize(step.device)
        start_time = time.perf_counter()
        call(argument)
        synchronize(step.device)
        times.append(time.perf_counter() - start_time)
    return times


def random_batches(gpt_config, batch_size, device):
    """Repeat one batch of random tokens forever: (idx, targets), each (B, T) on the device."""
    tokens = torch.randint(gpt_config.vocab_size, (2, batch_size, gpt_config.block_size),
                           device=device)
    return repeat(tokens.unbind())


def estimate_step(build, gpt_config, config, device, dtype):
    """Seconds of a step on this device. If a micro-batch would take long, one sequence is timed
    instead; None if even that would. build: of train.py"""
    gpt, step = build(gpt_config, replace(config, parallel='ddp'), device, dtype)
    step.micro_steps = 1
    sequence_flops = gpt.flops_per_token() * gpt_config.block_size
    if device.type == 'cpu' and sequence_flops > MAX_CPU_FLOPS:
        return None

    def time_with(batch_size):
        batches = random_batches(gpt_config, batch_size, device)
        seconds = []
        while len(seconds) < 2 or (len(seconds) < 6 and seconds[1] < FAST_S):
            micro_batch_s, update_s = time_step(step, batches, config.learning_rate)
            seconds.append(config.step_sequences() / batch_size * micro_batch_s + update_s)
        return statistics.median(seconds[1:])  # without the warmup

    seconds = time_with(1)
    if seconds > MAX_MICRO_BATCH_S * config.accumulation():
        return seconds
    return time_with(config.batch_size)


def measure_speed(build, gpt_config, config, device, dtype, compile):
    """Time training steps on random tokens → (a row of results, a Markdown table). build: of
    train.py"""
    gpt, step = build(gpt_config, replace(config, parallel='ddp'), device, dtype, compile)
    batches = random_batches(gpt_config, config.batch_size, device)
    seconds = []
    for i in range(WARMUP_STEPS + config.steps):
        step_s = sum(time_step(step, batches, config.learning_rate))
        if i >= WARMUP_STEPS:
            seconds.append(step_s)
    step_s = statistics.median(seconds)
    tokens = config.step_tokens()
    flops_per_s = gpt.flops_per_token() * tokens / step_s
    utilization = mfu(flops_per_s, device_name(device), dtype)
    if device.type == 'cpu':  # the peak depends on the cores and on how many threads torch uses
        utilization = flops_per_s / matmul_speed(dtype)
    row = {'parameters': gpt.num_parameters(), 'dtype': dtype, 'compile': compile,
           'optimizer': config.optimizer, 'micro_steps': config.accumulation(),
           'batch_size': config.batch_size, 'block_size': config.block_size,
           'step_ms': 1e3 * step_s, 'min_ms': 1e3 * min(seconds), 'max_ms': 1e3 * max(seconds),
           'tokens_per_s': tokens / step_s, 'mfu': utilization,
           'peak_memory_bytes': peak_memory_bytes(device)}
    header = (f'{row["parameters"]:,} parameters, {dtype}, {"compiled" if compile else "eager"}, '
              f'{config.optimizer}, {config.accumulation()} × {config.batch_size} × '
              f'{config.block_size} random tokens per step')
    peak_memory = gib(row['peak_memory_bytes']) if row['peak_memory_bytes'] else '–'
    table = markdown(
        ['ms per step', 'fastest', 'slowest', 'tokens/s', 'MFU', 'peak memory'],
        [[f'{row["step_ms"]:.1f}', f'{row["min_ms"]:.1f}', f'{row["max_ms"]:.1f}',
          short(row['tokens_per_s']), format_number('.1%', row['mfu']), peak_memory]])
    return row, f'{header}\n\n{table}'
