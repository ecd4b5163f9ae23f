"""The measured speed of a CPU: of a core in training, for recipes that choose a model's size by the
time, and of matmuls, for the MFU of bench.py."""

import math
import time
from functools import cache

import torch

from model import GPT, GPTConfig
from plaingpt.core.attention import use_fast_attention
from plaingpt.system.devices import DTYPES, autocast, cpu_has_bfloat16

GPT_CONFIG = GPTConfig(n_layer=1, n_head=4, n_embd=256, block_size=64, vocab_size=1)
PASS_FLOPS = 4e9  # of a forward and backward pass: 30 to 60 ms of a core
MATMUL_SIZE = 2048  # rows and columns of the matrices that matmul_speed() multiplies
MEASURE_S = 0.3  # seconds to measure for


@cache  # a config file may be read twice and must get the same answer
def core_speed(dtype):
    """FLOP/s of one CPU core in training, in this dtype or, with 'auto', in the faster one. It is
    rounded to a power of √2, so that it is the same in most runs."""
    dtypes = [dtype]
    if dtype == 'auto':
        dtypes = ['float32', 'bfloat16'] if cpu_has_bfloat16() else ['float32']
    return 2 ** (round(2 * math.log2(PASS_FLOPS / min(map(block_seconds, dtypes)))) / 2)


def block_seconds(dtype):
    """Seconds of one core for a forward and backward pass of a block with PASS_FLOPS.

    This runs on one thread and measures its CPU time, because wall time is unreliable on a busy
    machine. With a vocabulary of one token, the head costs nothing."""
    T = GPT_CONFIG.block_size
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng([]):  # keeps the run's random state unchanged
        model = GPT(GPT_CONFIG)
        use_fast_attention(model)
        idx = torch.zeros(int(PASS_FLOPS / model.flops_per_token()) // T, T, dtype=torch.long)

        def forward_backward():
            with autocast(idx.device, dtype):
                logits, _ = model(idx)
            logits.float().sum().backward()

        seconds = fastest(forward_backward, time.thread_time)
    torch.set_num_threads(num_threads)
    return seconds


def matmul_speed(dtype):
    """FLOP/s of a large matmul on all threads of torch."""
    matrix = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=DTYPES[dtype])
    return 2 * MATMUL_SIZE**3 / fastest(lambda: matrix @ matrix, time.perf_counter)


def fastest(call, clock):
    """Call a function repeatedly for MEASURE_S → the fewest seconds of a call, by this clock."""
    deadline = time.perf_counter() + MEASURE_S
    times = []
    while len(times) < 3 or time.perf_counter() < deadline:
        start = clock()
        call()
        times.append(clock() - start)
    return min(times[1:])  # without the warmup
