"""What a training step takes of memory before it runs, and what fits.

The real step runs on tensors without data, under torch's memory tracker. In each phase, the memory
of each owner grows linearly with the number of layers and with the batch. So four small steps, of
two depths and two batches, give any other. It is at most quadratic in the length of a sequence,
so long ones follow from three shorter ones. A changed model or optimizer needs no change here, as
long as its layers are alike.
"""

import gc
import math
from bisect import bisect
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.nn.functional as F

from model import GPT
from plaingpt.parallel.blocks import apply_activation_checkpointing
from plaingpt.system.devices import DTYPES, autocast, device_memory
from plaingpt.system.distributed import all_gather, gloo_group, launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import GIB, command_for, gib
from plaingpt.training import attention
from plaingpt.training.attention import use_cpu_attention
from plaingpt.training.loss import chunk_size, chunked_cross_entropy
from plaingpt.training.optimizers import build_optimizer

CUDA_OVERHEAD = GIB  # for CUDA's context and fragmentation: an allowance, not a measurement
DEPTHS = (2, 4)  # even, so that layers of two kinds in turn are planned too
LENGTHS = (8, 12, 16)  # chunks of the loss in a sequence: a trace takes long where they are many
OWNERS = {'Parameter': 'weights', 'Buffer': 'weights', 'Gradient': 'gradients',
          'Optstate': 'optimizer'}  # as the tracker calls them; all else is activations
MIDDLE = 'backward of a middle block'  # not planned: it holds something between its neighbours
TRACES = {}  # those made in this process


# -----------------------------------------------------------------------------
# a step that is traced


def one_step(shape, config, dtype, device, *, accumulating, chunk='auto', sharded=False,
             tracker=None, begin=lambda phase: None):
    """The last micro-batch of a step of a new GPT, and its update, as training makes them.

    accumulating: whether earlier micro-batches left gradients; chunk: tokens that have logits at
    once; sharded: blocks are in autocast's dtype, as FSDP2 gathers them
    tracker: a MemTracker; begin: called with the name of each phase as it begins"""
    with device:
        gpt = GPT(shape)
    gpt.loss_function = partial(chunked_cross_entropy, chunk=chunk)
    use_cpu_attention(gpt)
    apply_activation_checkpointing(gpt, config.activation_checkpointing)
    if sharded:
        for module in gpt.transformer.h.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(p.detach().to(DTYPES[dtype])))
    optimizer = build_optimizer(gpt, config)
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()  # an optimizer makes its states in its first step
    if not accumulating:
        optimizer.zero_grad(set_to_none=True)
    watch_phases(gpt, begin)
    if tracker:
        tracker.track_external(gpt, optimizer)
    with tracker or nullcontext():
        begin('forward')
        idx = torch.randint(shape.vocab_size, (config.batch_size, shape.block_size), device=device)
        with autocast(device, dtype):
            loss = gpt(idx, idx.clone())[1]
        begin('backward of the loss')
        loss.backward()
        del loss
        begin('optimizer')
        optimizer.step()
        begin('between steps')


def watch_phases(gpt, begin):
    """Call begin(phase) when the forward pass reaches the loss, and when the backward pass reaches
    the last block, one in the middle, the first one, the embeddings."""
    def at_gradient(module, phase):
        def hook(_, inputs, output):
            if output.requires_grad:
                output.register_hook(lambda grad: begin(phase))
        module.register_forward_hook(hook)

    gpt.transformer.ln_f.register_forward_hook(lambda *_: begin('loss'))
    at_gradient(gpt.transformer.drop, 'backward of the embeddings')
    blocks = gpt.transformer.h
    for block in blocks[1:-1]:
        at_gradient(block, MIDDLE)
    at_gradient(blocks[0], 'backward of the first block')
    at_gradient(blocks[-1], 'backward of the last block')


def tracker_class():
    """torch's MemTracker, or None in a version of torch that has moved it. Importing it takes two
    seconds, so a run that is small for its device does not."""
    with suppress(ImportError):
        from torch.distributed._tools.mem_tracker import MemTracker
        return MemTracker


def trace(shape, config, dtype, device_type, **how):
    """→ {phase: {owner: bytes at the peak of the phase}} of one_step. A step is traced once."""
    key = GPT, repr((shape, config, dtype, device_type, how))
    if key in TRACES:
        return TRACES[key]
    if not (MemTracker := tracker_class()):
        raise UserError('this version of torch has no torch.distributed._tools.mem_tracker, with '
                        'which memory is planned: take torch 2.6 or newer')
    tracker, phases, began = MemTracker(), {}, []

    def begin(phase):
        if began:
            phases[began[-1]] = owners(tracker.get_tracker_snapshot('peak'))
        if phase == 'between steps':
            phases[phase] = owners(tracker.get_tracker_snapshot())
        tracker._peak_mem, tracker._peak_mem_snap = {}, {}  # the peak of each phase by itself
        began.append(phase)

    kernels = nullcontext() if device_type == 'cpu' else kernels_of_gpus()
    with torch.random.fork_rng([]), torch._subclasses.fake_tensor.FakeTensorMode(), kernels:
        one_step(shape, config, dtype, torch.device('cpu'), tracker=tracker, begin=begin, **how)
    return TRACES.setdefault(key, phases)


def owners(snapshot):
    """What a MemTracker counted → {owner: bytes}"""
    found = Counter(dict.fromkeys(('weights', 'gradients', 'optimizer', 'activations'), 0))
    for kinds in snapshot.values():
        for kind, size in kinds.items():
            if kind != 'Total':
                found[OWNERS.get(getattr(kind, 'value', kind), 'activations')] += size
    return dict(found)


@contextmanager
def kernels_of_gpus():
    """A context in which operations on a CPU take as much memory as a GPU's kernels: attention
    keeps no weights, also with dropout; dropout keeps a mask of bytes; RMSNorm is one kernel. What
    a kernel takes inside, such as cuBLAS's workspace, is not counted."""
    sdpa = F.scaled_dot_product_attention
    # Not a TorchFunctionMode: it would be off in the backward pass, which recomputes layers.
    gpu_kernels = mock.patch.multiple(
        F, rms_norm=lambda *args: torch._fused_rms_norm(*args)[0],
        scaled_dot_product_attention=lambda *args, **how: sdpa(*args, **{**how, 'dropout_p': 0.0}),
        dropout=lambda x, p, training, inplace:
            torch.native_dropout(x, p, True)[0] if p and training else x)
    with gpu_kernels, mock.patch.object(attention, 'MAX_LENGTH', 0):  # cpu_attention keeps weights
        yield


# -----------------------------------------------------------------------------
# the plan


class Plan:
    """Bytes by owner in each phase of a step; the peak is the largest phase's sum."""

    def __init__(self, phases, overhead):
        self.phases, self.overhead = phases, overhead  # phase → {owner: bytes}; bytes
        self.totals = {phase: sum(held.values()) for phase, held in phases.items()}
        self.peak_phase = max(self.totals, key=self.totals.get)
        self.peak = self.totals[self.peak_phase]  # what torch.cuda.max_memory_allocated tells
        self.total = self.peak + overhead


def predict(shape, config, dtype, device_type):
    """The Plan of one process for a step of a GPTConfig and a TrainConfig whose batch_size is a
    number, on a type of device. Raises UserError."""
    processes = config.world_size()
    sharded = config.parallel == 'fsdp'
    accumulating = config.accumulation() > processes
    # The logits grow with the batch until they fill a chunk of the loss, and then no more.
    chunk = chunk_size('auto', config.batch_size * shape.block_size, shape.vocab_size, device_type)
    full, rest = divmod(chunk, shape.block_size)
    of_chunk = max(1, full + bool(rest))
    depths = through(shape.n_layer, *DEPTHS)
    lengths = through(shape.block_size, *(chunk * n for n in LENGTHS))
    batches = through(config.batch_size, *((1, full) if config.batch_size < of_chunk else
                                           (of_chunk, of_chunk + 1)))

    def phases(config, batches, **how):
        found = {}
        for n_layer, block_size, batch_size in product(depths, lengths, batches):
            share = depths[n_layer] * lengths[block_size] * batches[batch_size]
            # What does not change memory has one value, so that one trace serves many plans.
            alike = replace(config, batch_size=batch_size, gradient_accumulation_steps=1,
                            total_batch_size=0, parallel='auto', seed=0)
            small = replace(shape, n_layer=n_layer, block_size=block_size)
            for phase, held in trace(small, alike, dtype, device_type, chunk=chunk, **how).items():
                for owner, size in held.items():
                    of_phase = found.setdefault(phase, Counter())
                    of_phase[owner] += share * size
        return {phase: {owner: round(size) for owner, size in held.items()}
                for phase, held in found.items() if phase != MIDDLE}

    if sharded:
        alone = phases(replace(config, activation_checkpointing='none'), {1: 1},
                       accumulating=accumulating)
        gathered = phases(config, batches, accumulating=False, sharded=True)
        found = shares(alone, gathered, shape, config, dtype)
    else:
        found = phases(config, batches, accumulating=accumulating)
    if processes > 1 and not sharded:  # DDP's gradients stay in buckets, which travel
        gradients = found['optimizer']['gradients']
        found = {phase: held | {'gradients': gradients} for phase, held in found.items()}
    return Plan(found, CUDA_OVERHEAD if device_type == 'cuda' else 0)


def through(n, *points):
    """The polynomial through the values at some points, at n → {point: share of its value}
    (Lagrange's formula). If n is one of the points, or smaller, its own value is used: {n: 1}."""
    if n <= points[0] or n in points:
        return {n: 1}
    return {p: math.prod(Fraction(n - q, p - q) for q in points if q != p) for p in points}


def shares(alone, gathered, shape, config, dtype):
    """Phases of a step of one process → those of a process that shares the model as FSDP2 does
    (Zhao et al. 2023, "PyTorch FSDP"): it keeps its share of weights, gradients and optimizer.
    What is outside the blocks is whole, in float32, until the backward pass ends. Two blocks are
    whole in autocast's dtype: the one at work and the next. In the backward pass the gradient of
    one is, too, and that of the one before is in float32, on its way to the processes.

    gathered: the phases with blocks in autocast's dtype; only their activations are used"""
    with torch.device('meta'):
        gpt = GPT(replace(shape, n_layer=1))
    block = 4 * sum(p.numel() for p in gpt.transformer.h.parameters())
    low = block if dtype == 'float32' else block // 2
    weights = alone['optimizer']['weights']
    root = weights - block * shape.n_layer
    found = {}
    for phase, held in alone.items():
        mine = found[phase] = {owner: size // config.world_size() for owner, size in held.items()}
        if phase not in ('optimizer', 'between steps'):
            mine['weights'] += root + 2 * low
            mine['activations'] = gathered[phase]['activations']
        if phase.startswith('backward') and phase != 'backward of the loss':
            mine['gradients'] += root + low + block
    if config.report or config.eval_tasks:
        found['health check or sample'] = found['between steps'] | {
            'weights': weights // config.world_size() + root + low * shape.n_layer, 'gradients': 0}
    return found


def micro_batches(config):
    """The sizes that divide a process's sequences of a step, the smallest first."""
    sequences = config.total_batch_size // (config.block_size * config.world_size())
    tried = min(math.isqrt(sequences), 2**20)  # finds all divisors of up to 2**40 sequences
    small = [n for n in range(1, tried + 1) if sequences % n == 0]
    return sorted({*small, *(sequences // n for n in small)})


def largest_batch(shape, config, dtype, device_type, available):
    """→ the largest of the micro_batches that fits `available` bytes by plan; 0 where none does"""
    def total(n):
        return predict(shape, replace(config, batch_size=n), dtype, device_type).total

    if total(1) > available:  # before larger ones are traced
        return 0
    sizes = micro_batches(config)
    return sizes[bisect(sizes, available, key=total) - 1]


def choose_parallel(config, shape, dtype, device_type, available):
    """→ 'ddp' or 'fsdp': how the processes share a step, so that it fits the `available` bytes of
    each. All processes must give the same. With batch_size=auto a micro-batch of 1 decides."""
    if config.parallel != 'auto':
        return config.parallel
    if config.batch_size == 'auto':
        config = replace(config, batch_size=1)
    fits = config.world_size() == 1 or \
        predict(shape, config, dtype, device_type).total <= available
    return 'ddp' if fits else 'fsdp'


# -----------------------------------------------------------------------------
# before a run, and where its memory runs out


def fit(config, shape, dtype, device, available):
    """The TrainConfig of a run, with a value for parallel=auto and batch_size=auto.
    available: bytes that each process may take. Raises UserError where a step takes more; on CUDA
    its weights, gradients and optimizer states, since a GPU refuses the rest by itself."""
    if not tracker_class() and config.batch_size != 'auto':  # no plan, no refusal
        return config
    if config.world_size() > 1:
        config = replace(config, parallel=choose_parallel(config, shape, dtype, device.type,
                                                          available))
        print0(f'parallel {config.parallel}')
    if config.batch_size == 'auto':
        config = with_planned_batch(config, shape, dtype, device, available)
    plan = predict(shape, config, dtype, device.type)
    kept = plan.totals['optimizer'] - plan.phases['optimizer']['activations']
    taken = kept if device.type == 'cuda' else plan.total
    if taken > available and not config.eval_only:
        raise UserError(
            f'batch_size={config.batch_size}, n_layer={shape.n_layer}, n_embd={shape.n_embd}: a '
            f'step takes {gib(plan.total)}, its weights, gradients and optimizer states alone '
            f'{gib(kept)}, and {gib(available)} are free: choose smaller sizes; '
            f'{command_for("plan")} with the same settings says what fits')
    return config


def with_planned_batch(config, shape, dtype, device, available):
    """The TrainConfig with the largest batch that is planned to fit and keeps its total_batch_size.
    On CUDA a step of it is tried, and of half of it where that runs out of memory. It is the same
    on all processes. Raises UserError."""
    planned = largest_batch(shape, config, dtype, device.type, available)
    batch_size = min(all_gather(planned, gloo_group()))
    trying = device.type == 'cuda' and config.parallel != 'fsdp'  # a trial holds the whole model
    while batch_size and trying:
        trial = replace(config, batch_size=batch_size)
        if all(all_gather(step_fits(shape, trial, dtype, device), gloo_group())):
            break
        batch_size = max((n for n in micro_batches(config) if n <= batch_size // 2), default=0)
    if not batch_size:
        raise UserError(f'batch_size=auto: not even 1 fits into {gib(available)} on {device}: '
                        'choose a smaller model or --activation_checkpointing=full')
    config = replace(config, batch_size=batch_size)
    print0(f'batch_size {batch_size} (as fits {gib(available)}) | accumulation '
           f'{config.accumulation()}')
    return config


def step_fits(shape, config, dtype, device):
    """True where a whole step runs on this CUDA device. It is not compiled, and so takes as much as
    a compiled one or more."""
    with torch.random.fork_rng([device]):
        try:
            one_step(shape, config, dtype, device,
                     accumulating=config.accumulation() > config.world_size())
            fits = True
        except torch.OutOfMemoryError:
            fits = False
    gc.collect()  # a graph that an error cut short holds itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return fits


# -----------------------------------------------------------------------------
# the check before a run


LOGITS = 8192  # tokens that have logits at once, at most


def fit_to_memory(config, shape, dtype, device):
    """The TrainConfig of a run of a GPTConfig, with a value for parallel=auto and
    batch_size=auto. Raises UserError where the model or a step takes more memory than is free."""
    world = launched_world()
    if config.parallel == 'fsdp' and not world.launched:
        raise UserError('parallel=fsdp shares a model among processes: start them with torchrun')
    available = min(all_gather(device_memory(device, world.local_size), gloo_group()))
    if config.batch_size != 'auto' and config.parallel != 'fsdp' \
            and 4 * rough_bytes(shape, config.batch_size) < available:
        return config
    return fit(config, shape, dtype, device, available)


def rough_bytes(shape, batch_size):
    """A quick estimate of the bytes that a step takes in float32, right within a factor of 4."""
    tables = 2 + shape.value_embeddings * shape.n_layer
    rows = tables * shape.padded_vocab_size + shape.ngram_rows
    weights = shape.n_embd * (12 * shape.n_layer * shape.n_embd + rows)
    tokens = batch_size * shape.block_size
    # a block keeps some 16 numbers for each channel of a token
    numbers = tokens * shape.n_embd * (16 * shape.n_layer + 4) \
        + min(tokens, LOGITS) * shape.padded_vocab_size
    return 4 * numbers + 16 * weights  # with a gradient and two states
