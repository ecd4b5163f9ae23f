"""The speed of training's own step on a device: for bench.py, and in a few seconds for plan.py."""

import statistics
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import SimpleNamespace

import torch

from model import GPT
from plaingpt.data.corpora import find_dataset_size
from plaingpt.data.dataset import has_token_files, open_named
from plaingpt.experiments.tables import markdown, number
from plaingpt.system.devices import autocast, device_name, peak_memory_bytes
from plaingpt.system.formatting import gib, short
from plaingpt.system.gpus import mfu
from plaingpt.training.open_weights import start_shape
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.stopwatch import time_step, typical

WARMUP_STEPS = 3  # not counted
PATIENCE_S = 3.0  # what a micro-batch may take in a plan
MOST_FLOPS = 2e12  # of a sequence that a CPU is timed with: some 20 s on two cores


def planned_shape(config, start):
    """The GPTConfig of a run, before its dataset is prepared too → (it, tokens of the dataset or
    None, where they are known from). Raises UserError where the model cannot start this run."""
    vocab_size, tokens, source = find_dataset_size(config.dataset, config.vocab_size)
    if start.from_scratch:
        return config.gpt_config(vocab_size), tokens, source
    dataset = open_named(config.dataset) if has_token_files(config.dataset) else None
    shape = start_shape(config, start.weights, dataset)
    return replace(shape, block_size=config.block_size), tokens, source


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
    """Seconds of a step on this device. One sequence is timed in place of a micro-batch that would
    take long; None where even that would."""
    step, gpt = new_step(shape, config, device, dtype)
    if device.type == 'cpu' and gpt.flops_per_token() * shape.block_size > MOST_FLOPS:
        return None

    def step_in(sequences):
        batches = random_batches(shape, sequences, device)
        micro_steps = config.accumulation() * config.batch_size / sequences

        def work():
            micro_s, update_s = step(batches, 1)
            return micro_steps * micro_s + update_s
        return typical(work)

    seconds = step_in(1)
    is_long = seconds > PATIENCE_S * config.accumulation()
    return seconds if is_long else step_in(config.batch_size)


def measure_speed(config, shape, device, dtype, compile):
    """Time whole steps of training on random tokens → (a row of numbers, its table). config:
    bench.py's"""
    step, gpt = new_step(shape, config, device, dtype, compile)
    batches = random_batches(shape, config.batch_size, device)
    seconds = [sum(step(batches, config.accumulation()))
               for _ in range(WARMUP_STEPS + config.steps)][WARMUP_STEPS:]
    step_s, tokens = statistics.median(seconds), config.step_tokens()
    flops_per_s = gpt.flops_per_token() * tokens / step_s
    row = {'parameters': gpt.num_parameters(), 'dtype': dtype, 'compile': compile,
           'optimizer': config.optimizer, 'micro_steps': config.accumulation(),
           'batch_size': config.batch_size, 'block_size': config.block_size,
           'step_ms': 1e3 * step_s, 'min_ms': 1e3 * min(seconds), 'max_ms': 1e3 * max(seconds),
           'tokens_per_s': tokens / step_s, 'mfu': mfu(flops_per_s, device_name(device), dtype),
           'peak_memory_bytes': peak_memory_bytes(device)}
    what = (f'{row["parameters"]:,} parameters, {dtype}, {"compiled" if compile else "eager"}, '
            f'{config.optimizer}, {config.accumulation()} × {config.batch_size} × '
            f'{config.block_size} random tokens a step')
    return row, what + '\n\n' + markdown(
        ['ms a step', 'fastest', 'slowest', 'tokens/s', 'MFU', 'peak memory'],
        [[*(f'{row[key]:.1f}' for key in ('step_ms', 'min_ms', 'max_ms')),
          short(row['tokens_per_s']), number('.1%', row['mfu']),
          gib(row['peak_memory_bytes']) if row['peak_memory_bytes'] else '–']])
