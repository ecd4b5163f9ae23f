"""Choose the precision of a run. On a CPU with bfloat16, this measures which dtype is faster."""

import math
import time
from dataclasses import replace
from functools import cache

import torch

from model import GPT, GPTConfig
from plaingpt.system.devices import autocast, choose_dtype, cpu_has_bfloat16
from plaingpt.system.distributed import all_gather, launched_world
from plaingpt.training.attention import use_fast_attention

PASS_FLOPS = 4e9  # of a forward and backward pass: 30 to 60 ms of a core
MEASURE_S = 0.3  # seconds to measure for
MIN_SPEEDUP = 1.05  # below this, float32 is preferred, because it is more precise
MAX_CHANNELS = 384  # in a wider model, a pass short enough to measure has too few tokens
MAX_LENGTH = 1024  # sequence length to measure at most, because attention is quadratic in it


def choose_training_dtype(config, gpt_config, device, resumed=None, group=None):
    """Return (dtype of a run, why), the same on all processes.

    resumed: the checkpoint to resume; 'auto' keeps its dtype, so that losses stay the same
    group: gloo_group(); its rank 0 measures"""
    can_measure = device.type == 'cpu' and cpu_has_bfloat16() and gpt_config.n_embd < MAX_CHANNELS
    if config.dtype != 'auto' or not can_measure:
        return choose_dtype(config.dtype, device, gpt_config.n_embd)
    if resumed and resumed.state['dtype'] != 'float16':  # only GPUs train in float16
        return resumed.state['dtype'], 'as in the checkpoint'
    choice = None
    if launched_world().is_main:
        choice = faster_dtype(gpt_config, config.batch_size)
    return all_gather(choice, group)[0]


def faster_dtype(gpt_config, batch_size):
    """Return (float32 or bfloat16, why), whichever is faster on this CPU."""
    seconds = block_seconds(gpt_config, batch_size, ('float32', 'bfloat16'), stop_early=True)
    ms = {dtype: 1000 * s for dtype, s in seconds.items()}
    if ms['bfloat16'] * MIN_SPEEDUP < ms['float32']:
        dtype, other = 'bfloat16', 'float32'
    else:
        dtype, other = 'float32', 'bfloat16'
    reason = 'fastest here' if ms[dtype] < ms[other] else 'about as fast, and more precise'
    return dtype, f'{reason}: {ms[dtype]:.1f} ms per block; {other}: {ms[other]:.1f} ms'


def is_clear(float32_times, bfloat16_times):
    """Whether every measurement of one dtype is faster than all of the other, by MIN_SPEEDUP."""
    return max(float32_times) * MIN_SPEEDUP < min(bfloat16_times) \
        or max(bfloat16_times) * MIN_SPEEDUP < min(float32_times)


@cache  # a config file may be read twice and must get the same answer
def core_speed(dtype):
    """FLOP/s of one CPU core in training, in this dtype or, with 'auto', in the faster one. It is
    rounded to a power of √2, so that it is the same in most runs."""
    dtypes = (dtype,)
    if dtype == 'auto':
        dtypes = ('float32', 'bfloat16') if cpu_has_bfloat16() else ('float32',)
    gpt_config = GPTConfig(n_layer=1, n_head=4, n_embd=256, block_size=64)
    seconds = block_seconds(gpt_config, 'auto', dtypes)
    return 2 ** (round(2 * math.log2(PASS_FLOPS / min(seconds.values()))) / 2)


def block_seconds(gpt_config, batch_size, dtypes, stop_early=False):
    """Measure forward and backward of one block. Returns {dtype: seconds of one core}.
    stop_early: stop before MEASURE_S once is_clear() says which of two dtypes is faster

    Sequences are as long and as many as in training, up to PASS_FLOPS and MAX_LENGTH. This runs on
    one thread and measures its CPU time, because wall time is unreliable on a busy machine."""
    length = min(gpt_config.block_size, MAX_LENGTH)
    # A block has 12·C² weights; attention as in PaLM's count (Chowdhery et al. 2022, appendix B).
    C = gpt_config.n_embd
    tokens = int(PASS_FLOPS / (6 * 12 * C**2 + 12 * C * length))
    length = min(length, tokens)
    sequences = tokens // length
    if batch_size != 'auto':
        sequences = min(batch_size, sequences)
    # with a vocabulary of one token, the head costs nothing
    gpt_config = replace(gpt_config, n_layer=1, vocab_size=1, block_size=length)
    times = {dtype: [] for dtype in dtypes}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng([]):  # keeps the run's random state unchanged
        model = GPT(gpt_config)
        use_fast_attention(model)
        idx = torch.zeros(sequences, length, dtype=torch.long)
        deadline = time.perf_counter() + MEASURE_S
        while True:
            for dtype in dtypes:
                start = time.thread_time()
                with autocast(idx.device, dtype):
                    logits, _ = model(idx)
                logits.float().sum().backward()
                times[dtype].append(time.thread_time() - start)
            measured = [times[dtype][1:] for dtype in dtypes]  # without the warmup
            if len(measured[0]) < 2:
                continue
            if time.perf_counter() > deadline or (stop_early and is_clear(*measured)):
                break
    torch.set_num_threads(num_threads)
    return dict(zip(dtypes, map(min, measured), strict=True))
