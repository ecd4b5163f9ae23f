"""The speed of training's own step on a device: for bench.py, and in a few seconds for plan.py."""

import statistics
import time
from dataclasses import replace
from itertools import repeat

import torch

from model import GPT
from plaingpt.data.corpora import find_dataset_size
from plaingpt.data.dataset import has_token_files, open_dataset_spec
from plaingpt.experiments.runs import markdown, number
from plaingpt.parallel.blocks import apply_activation_checkpointing, compile_blocks
from plaingpt.system.devices import autocast, device_name, mfu, peak_memory_bytes, synchronize
from plaingpt.system.formatting import gib, short
from plaingpt.training.attention import use_cpu_attention
from plaingpt.training.loss import chunked_cross_entropy
from plaingpt.training.open_weights import gpt_config_from_weights
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.step import Step

WARMUP_STEPS = 3  # not counted
PATIENCE_S = 3.0  # what a micro-batch may take in a plan
MOST_FLOPS = 2e12  # of a sequence that a CPU is timed with: some 20 s on two cores
FAST_S = 0.25  # what takes less is timed five times, and else once


def planned_shape(config, start):
    """The GPTConfig of a run, before its dataset is prepared too → (it, tokens of the dataset or
    None, where they are known from). Raises UserError where the model cannot start this run."""
    vocab_size, tokens, source = find_dataset_size(config.dataset, config.vocab_size)
    if start.from_scratch:
        return config.gpt_config(vocab_size), tokens, source
    dataset = None
    if has_token_files(config.dataset):
        dataset = open_dataset_spec(config.dataset, config.vocab_size)
    shape = gpt_config_from_weights(config, start.weights, dataset)
    return replace(shape, block_size=config.block_size), tokens, source


def new_step(shape, config, device, dtype, compile=False):
    """→ a Step of a new GPT on this device, with one micro-batch; and the GPT"""
    gpt = GPT(shape).to(device)
    gpt.loss_function = chunked_cross_entropy
    use_cpu_attention(gpt)
    apply_activation_checkpointing(gpt, config.activation_checkpointing)
    if compile == 'blocks':
        compile_blocks(gpt)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
    return Step(torch.compile(gpt) if compile is True else gpt, build_optimizer(gpt, config),
                scaler, autocast(device, dtype), config.grad_clip), gpt


def time_step(step, batches, lr):
    """Make a step → (seconds of its micro-batches, seconds of the update)."""
    device = next(step.model.parameters()).device
    return timed(device, step.forward_backward, batches), timed(device, step.update, lr)


def timed(device, function, *arguments):
    """→ the seconds that a call takes"""
    synchronize(device)
    began = time.perf_counter()
    function(*arguments)
    synchronize(device)
    return time.perf_counter() - began


def typical(work):
    """The median of the seconds that `work()` returns, after a call that warms up."""
    _, *seconds = work(), work()
    if seconds[0] < FAST_S:
        seconds += [work() for _ in range(4)]
    return statistics.median(seconds)


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
        micro_steps = config.step_sequences() / sequences

        def work():
            micro_s, update_s = time_step(step, batches, config.learning_rate)
            return micro_steps * micro_s + update_s
        return typical(work)

    seconds = step_in(1)
    is_long = seconds > PATIENCE_S * config.accumulation()
    return seconds if is_long else step_in(config.batch_size)


def measure_speed(config, shape, device, dtype, compile):
    """Time whole steps of training on random tokens → (a row of numbers, its table). config:
    bench.py's"""
    step, gpt = new_step(shape, config, device, dtype, compile)
    step.micro_steps = config.accumulation()
    batches = random_batches(shape, config.batch_size, device)
    seconds = [sum(time_step(step, batches, config.learning_rate))
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
