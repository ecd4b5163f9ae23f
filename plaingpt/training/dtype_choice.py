"""The precision that a run computes in. Where a CPU has bfloat16, the faster one is measured."""

import math
import time
from dataclasses import replace
from functools import cache

import torch

from model import GPT, GPTConfig
from plaingpt.system.devices import autocast, choose_dtype, cpu_has_bfloat16
from plaingpt.system.distributed import all_gather, launched_world
from plaingpt.training.attention import use_cpu_attention

PASS_FLOPS = 4e9  # forward and backward: 30 ms to 60 ms of a core
MEASURED_S = 0.3
GAIN = 1.05  # bfloat16 must be this many times as fast: float32 is more exact
WIDE = 384  # channels; a wider model has too few tokens in a pass that is short enough to measure
MAX_LENGTH = 1024  # tokens of a sequence that is measured: attention is quadratic in them


def choose_training_dtype(config, shape, device, resumed=None, group=None):
    """The dtype of a run of a GPTConfig → (name, why), the same on all processes.

    resumed: the checkpoint that it continues; 'auto' keeps its dtype, so that losses stay the same
    group: gloo_group(), whose rank 0 measures"""
    measurable = device.type == 'cpu' and cpu_has_bfloat16() and shape.n_embd < WIDE
    if config.dtype != 'auto' or not measurable:
        return choose_dtype(config.dtype, device, shape.n_embd)
    if resumed and resumed.state['dtype'] != 'float16':  # which is a GPU's
        return resumed.state['dtype'], 'as before'
    found = faster_dtype(shape, config.batch_size) if launched_world().is_main else None
    return all_gather(found, group)[0]


def faster_dtype(shape, batch_size):
    """float32 or bfloat16, whichever this CPU is faster in → (name, why)."""
    seconds = block_seconds(shape, batch_size, ('float32', 'bfloat16'), until_clear=True)
    ms = {dtype: 1000 * s for dtype, s in seconds.items()}
    dtype = 'bfloat16' if ms['bfloat16'] * GAIN < ms['float32'] else 'float32'
    other = 'float32' if dtype == 'bfloat16' else 'bfloat16'
    return dtype, f'a block takes {ms[dtype]:.1f} ms of a core, in {other} {ms[other]:.1f} ms'


def is_clear(float32, bfloat16):
    """Whether all measured times in one dtype are below all in the other, by more than GAIN."""
    return max(float32) * GAIN < min(bfloat16) or max(bfloat16) * GAIN < min(float32)


@cache  # a config file may be read twice, and must say the same
def core_speed(dtype):
    """FLOP/s of a core of this CPU in training's matmuls, in the dtype of a run, or with 'auto' in
    the faster one. It is rounded to a power of √2, so that it is mostly the same each time."""
    auto = ('float32', 'bfloat16') if cpu_has_bfloat16() else ('float32',)
    shape = GPTConfig(n_layer=1, n_head=4, n_embd=256, block_size=64)
    seconds = block_seconds(shape, 'auto', auto if dtype == 'auto' else (dtype,))
    return 2 ** (round(2 * math.log2(PASS_FLOPS / min(seconds.values()))) / 2)


def block_seconds(shape, batch_size, dtypes, until_clear=False):
    """How long one block of a GPTConfig takes, forward and backward → {dtype: seconds of one core}.
    until_clear: stop before MEASURED_S if is_clear says which of two dtypes is faster

    Sequences are as long and as many as in training, as far as PASS_FLOPS and MAX_LENGTH allow. One
    thread computes, and its CPU time counts: on a busy machine the clock says nothing."""
    tokens = int(PASS_FLOPS / (6 * 12 * shape.n_embd**2))  # the block has 12·C² weights
    length = min(shape.block_size, tokens, MAX_LENGTH)
    sequences = tokens // length if batch_size == 'auto' else min(batch_size, tokens // length)
    shape = replace(shape, n_layer=1, vocab_size=1, block_size=length)
    threads, seconds = torch.get_num_threads(), {dtype: [] for dtype in dtypes}
    torch.set_num_threads(1)
    with torch.random.fork_rng([]):  # the run's random numbers stay as they are
        model, idx = GPT(shape), torch.zeros(sequences, length, dtype=torch.long)
        use_cpu_attention(model)
        ends = time.perf_counter() + MEASURED_S
        while True:
            for dtype, times in seconds.items():
                began = time.thread_time()
                with autocast(idx.device, dtype):
                    logits, _ = model(idx)  # of a vocabulary of one token, so the head is small
                logits.float().sum().backward()
                times.append(time.thread_time() - began)
            measured = [times[1:] for times in seconds.values()]  # the first one warms up
            if len(measured[0]) < 2:
                continue
            if time.perf_counter() > ends or (until_clear and is_clear(*measured)):
                break
    torch.set_num_threads(threads)
    return dict(zip(dtypes, map(min, measured), strict=True))
