"""What a training step takes of memory before it runs, what fits, and what would save most.

memory_trace.py follows the real step on tensors without data. At each stage of a step, what each
owner holds is affine in the number of layers and in the batch, so traces of two small depths and
two small batches give every other. A changed model or optimizer needs no change here, as long as
its layers are alike.
"""

import gc
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch

from plaingpt.system.devices import free_memory, peak_memory_bytes
from plaingpt.system.distributed import all_reduce_min, launched_world
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import GIB, gib
from plaingpt.training.memory_trace import one_step, step_settings, trace_step

CUDA_OVERHEAD = GIB  # for CUDA's context and fragmentation: an allowance, not a measurement
DEPTHS = (2, 4)  # even, so that layers of two kinds in turn are planned too


# -----------------------------------------------------------------------------
# from small traces to any size


class Prediction:
    """Bytes by owner at each stage of a step; the peak is the largest stage's sum."""

    def __init__(self, stages, overhead):
        self.stages, self.overhead = stages, overhead  # stage → {owner: bytes}; bytes
        self.totals = {stage: sum(items.values()) for stage, items in stages.items()}
        self.peak_stage = max(self.totals, key=self.totals.get)
        self.items = stages[self.peak_stage]
        self.peak = self.totals[self.peak_stage]  # what torch.cuda.max_memory_allocated tells
        self.total = self.peak + overhead


def predict(shape, step):
    """GPTConfig, StepSettings → Prediction."""
    depths = weights(shape.n_layer, *DEPTHS)
    # Up to a chunk of the loss its logits grow with the batch; from there on they do not.
    full, rest = divmod(step.config.loss_chunk_tokens, shape.block_size)
    chunk = max(1, full + bool(rest))
    batches = weights(step.batch_size, *((1, full) if step.batch_size < chunk else
                                         (chunk, chunk + 1)))
    traces = [(depths[n_layer] * batches[batch_size],
               trace_step(replace(shape, n_layer=n_layer),
                          replace(step, batch_size=batch_size, processes=1,
                                  micro_steps=min(2, step.micro_steps))))
              for n_layer, batch_size in product(depths, batches)]
    stages = {}
    for stage in traces[0][1]:  # of the shallower; more layers only have more stages
        owners = dict.fromkeys(owner for _, trace in traces for owner in trace[stage])
        stages[stage] = {owner: round(sum(weight * trace[stage].get(owner, 0)
                                          for weight, trace in traces)) for owner in owners}
    if step.processes > 1:  # DDP copies gradients into buckets, which travel
        buckets = stages['after backward']['gradients']
        stages = {stage: {**items, 'gradient buckets': buckets} for stage, items in stages.items()}
    return Prediction(stages, CUDA_OVERHEAD if step.device == 'cuda' else 0)


def weights(n, low, high):
    """What to multiply values at `low` and `high` by, so that their sum lies at `n` on a line
    through both: {where: weight}. An n below them, or one of them, is taken as it is."""
    if n <= low or n == high:
        return {n: 1}
    return {low: (high - n) / (high - low), high: (n - low) / (high - low)}


# -----------------------------------------------------------------------------
# what fits


def largest_batch(shape, step, available):
    """The most sequences in a micro-batch whose prediction fits `available` bytes; 0 if none do."""
    return bisect_right(range(1, 2**20), available, key=lambda batch_size: predict(
        shape, replace(step, batch_size=batch_size)).total)


def batch_that_divides(shape, step, available, sequences):
    """→ (batch_size, micro_steps) of one process that takes `sequences` in a step: the largest
    batch that fits `available` bytes and divides them, or (0, 0) where not even 1 fits."""
    divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
    # More and smaller micro-batches take less, but for the gradients that a second one meets.
    found = bisect_left(divisors, True, key=lambda n: predict(
        shape, replace(step, batch_size=sequences // n, micro_steps=n)).total <= available)
    return (sequences // divisors[found], divisors[found]) if found < len(divisors) else (0, 0)


def savings(shape, step):
    """What would save memory, the best first, but what changes the model last: [(words, bytes)]."""
    half = step.batch_size // 2
    changes = [(f'--batch_size={half}', shape,
                replace(step, batch_size=half, micro_steps=2 * step.micro_steps)),
               ('--activation_checkpointing=full', shape,
                step.change(activation_checkpointing='full')),
               ('--loss_chunk_tokens=2048', shape, step.change(loss_chunk_tokens=2048)),
               ('--dtype=bfloat16', shape, replace(step, dtype='bfloat16'))]
    for key in ('block_size', 'n_layer'):
        smaller = getattr(shape, key) // 2
        changes.append((f'--{key}={smaller}', replace(shape, **{key: smaller}), step))
    now = predict(shape, step).peak
    saved = [(other is not shape, predict(other, changed).peak - now, words)
             for words, other, changed in changes if not words.endswith('=0')]
    return [(words, -more) for _, more, words in sorted(saved) if more < 0]


def advice(shape, step):
    """The three best changes, in words."""
    return ', '.join(f'{words} saves {gib(size)}' for words, size in savings(shape, step)[:3])


def available_memory(device):
    """Bytes that this process may take now: what is free on its GPU, or its share of what is free
    on the machine."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    free = free_memory()
    if free is None:
        raise UserError('batch_size=auto: this system does not tell how much memory is free: say a '
                        'number')
    return free // launched_world().local_size


# -----------------------------------------------------------------------------
# on the device itself


def fits(shape, step, device):
    """True where a whole step runs on this CUDA device."""
    with torch.random.fork_rng([device]):
        try:
            for _ in one_step(shape, step, device):
                pass
            fit = True
        except torch.OutOfMemoryError:
            fit = False
    gc.collect()  # a graph that an error cut short holds itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return fit


def choose_batch_size(shape, config, dtype, device):
    """→ (batch_size, why) that keeps the TrainConfig's total_batch_size: the plan's answer, tried
    on CUDA and stepped down until it fits, the same on all processes. Raises UserError."""
    sequences = config.total_batch_size // config.block_size // config.world_size()
    step = step_settings(replace(config, batch_size=1), dtype, device.type)
    available = available_memory(device)
    planned, _ = batch_that_divides(shape, step, available, sequences)
    batch_size = planned = all_reduce_min(planned, device)
    while batch_size and device.type == 'cuda':
        trial = replace(step, batch_size=batch_size, micro_steps=sequences // batch_size)
        if all_reduce_min(int(fits(shape, trial, device)), device):
            break
        batch_size = next((b for b in range(batch_size - 1, 0, -1) if sequences % b == 0), 0)
    if not batch_size:
        need = predict(shape, step).total
        raise UserError(f'batch_size=auto: not even 1 fits: it takes {gib(need)}, {gib(available)} '
                        f'are free on {device}; {advice(shape, step)}')
    tried = ', tried for a step' if device.type == 'cuda' else ''
    stepped = f', {planned} did not fit' if batch_size < planned else ''
    return batch_size, f'of {gib(available)} free{tried}{stepped}'


@contextmanager
def explain_out_of_memory(shape, config, dtype, device):
    """Turn the device's running out of memory in here into one UserError: what was planned, what
    was measured, what would save most."""
    try:
        yield
    except RuntimeError as e:
        if not (isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e)):
            raise
        step = step_settings(config, dtype, device.type)
        plan = predict(shape, step)
        raise UserError(
            f'out of memory on {device} with batch_size={step.batch_size}: planned '
            f'{gib(plan.total)}, highest in "{plan.peak_stage}"; held at most '
            f'{gib(peak_memory_bytes(device))}; {advice(shape, step)}') from None
