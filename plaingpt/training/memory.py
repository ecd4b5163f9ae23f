"""Plan the memory of a training step before it runs, and choose what fits.

The real step runs on fake tensors under torch's memory tracker. In each phase, the memory of each
category (weights, gradients, …) is linear in the number of layers and in the batch size, so four
small steps, with two depths and two batch sizes, predict any other. It is at most quadratic in the
sequence length, so three short lengths predict a long one. A change of the model or the optimizer
needs no change here, as long as all layers are alike.
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
from plaingpt.core import attention
from plaingpt.core.attention import use_fast_attention
from plaingpt.core.blocks import apply_activation_checkpointing
from plaingpt.core.loss import CHUNK_SIZES, chunk_size, loss_in_chunks
from plaingpt.core.optimizers import build_optimizer
from plaingpt.system.devices import DTYPES, autocast, device_memory
from plaingpt.system.distributed import all_gather, gloo_group, launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import GIB, command_for, gib

CUDA_OVERHEAD = GIB  # an allowance for CUDA's context and fragmentation, not a measurement
DEPTHS = (2, 4)  # layers; even, to allow for two alternating kinds of layers
LENGTHS = (8, 12, 16)  # sequence lengths, in chunks of the loss; tracing more chunks takes long
CATEGORIES = {'Parameter': 'weights', 'Buffer': 'weights', 'Gradient': 'gradients',
              'Optstate': 'optimizer'}  # the tracker's names → ours; all others are activations
MIDDLE = 'backward of a middle block'  # ignored: it takes no more than the first or last block
TRACES = {}  # cached results of trace()


# -----------------------------------------------------------------------------
# tracing a step


def no_op(phase):
    pass


def one_step(gpt_config, config, dtype, device, *, accumulating, chunk=None, sharded=False,
             tracker=None, begin=no_op):
    """Run the last micro-batch of a step, and the update, of a new GPT as in training.

    accumulating: whether gradients of earlier micro-batches exist
    chunk: tokens whose logits are in memory at once
    sharded: keep blocks in autocast's dtype, as FSDP2 gathers them
    tracker: a MemTracker; begin: called with the name of each phase when it begins"""
    with device:
        gpt = GPT(gpt_config)
    gpt.loss_in_chunks = partial(loss_in_chunks, chunk=chunk)
    use_fast_attention(gpt)
    apply_activation_checkpointing(gpt, config.activation_checkpointing)
    if sharded:
        for module in gpt.transformer.h.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(p.detach().to(DTYPES[dtype])))
    optimizer = build_optimizer(gpt, config)
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()  # the first step creates the optimizer states
    if not accumulating:
        optimizer.zero_grad(set_to_none=True)
    watch_phases(gpt, begin)
    if tracker:
        tracker.track_external(gpt, optimizer)
    # The tracker cannot follow a module that is called once per chunk: hide these calls from it.
    head_class = type(gpt.lm_head)
    with tracker or nullcontext(), mock.patch.object(head_class, '__call__', head_class.forward):
        begin('forward')
        idx = torch.randint(gpt_config.vocab_size, (config.batch_size, gpt_config.block_size),
                            device=device)
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
    the last block, a middle one, the first one and the embeddings."""
    def begin_at_gradient(module, phase):
        def hook(_, inputs, output):
            if output.requires_grad:
                output.register_hook(lambda grad: begin(phase))
        module.register_forward_hook(hook)

    gpt.transformer.ln_f.register_forward_hook(lambda *_: begin('loss'))
    begin_at_gradient(gpt.transformer.drop, 'backward of the embeddings')
    blocks = gpt.transformer.h
    for block in blocks[1:-1]:
        begin_at_gradient(block, MIDDLE)
    begin_at_gradient(blocks[0], 'backward of the first block')
    begin_at_gradient(blocks[-1], 'backward of the last block')


def tracker_class():
    """torch's MemTracker, or None if this torch does not have it there. Importing it takes two
    seconds, so this is called only if memory may be short."""
    with suppress(ImportError):
        from torch.distributed._tools.mem_tracker import MemTracker
        return MemTracker
    return None


def trace(gpt_config, config, dtype, device_type, **options):
    """Trace one_step and return {phase: {category: bytes at the peak of the phase}}, cached.
    options: of one_step"""
    key = GPT, repr((gpt_config, config, dtype, device_type, options))
    if key in TRACES:
        return TRACES[key]
    MemTracker = tracker_class()
    if not MemTracker:
        raise UserError('this version of torch has no torch.distributed._tools.mem_tracker, which '
                        'memory planning needs')
    tracker = MemTracker()
    phases = {}
    current = None

    def begin(phase):
        nonlocal current
        if current:
            phases[current] = bytes_by_category(tracker.get_tracker_snapshot('peak'))
        if phase == 'between steps':
            phases[phase] = bytes_by_category(tracker.get_tracker_snapshot())
        tracker._peak_mem, tracker._peak_mem_snap = {}, {}  # reset the peak for the new phase
        current = phase

    kernels = nullcontext() if device_type == 'cpu' else gpu_kernels()
    with torch.random.fork_rng([]), torch._subclasses.fake_tensor.FakeTensorMode(), kernels:
        one_step(gpt_config, config, dtype, torch.device('cpu'), tracker=tracker, begin=begin,
                 **options)
    TRACES[key] = phases
    return phases


def bytes_by_category(snapshot):
    """Sum up a MemTracker snapshot as {category: bytes}."""
    sizes = dict.fromkeys(('weights', 'gradients', 'optimizer', 'activations'), 0)
    for device_snapshot in snapshot.values():
        for kind, size in device_snapshot.items():
            if kind != 'Total':
                category = CATEGORIES.get(getattr(kind, 'value', kind), 'activations')
                sizes[category] += size
    return sizes


@contextmanager
def gpu_kernels():
    """A context in which CPU operations take as much memory as GPU kernels: attention saves no
    probabilities, even with dropout; dropout saves a byte mask; RMSNorm is fused. Memory inside
    kernels, such as cuBLAS's workspace, is not counted."""
    sdpa = F.scaled_dot_product_attention

    def sdpa_without_dropout(*args, **kwargs):
        return sdpa(*args, **{**kwargs, 'dropout_p': 0.0})

    def native_dropout(x, p, training, inplace):
        return torch.native_dropout(x, p, True)[0] if p and training else x

    def fused_rms_norm(*args):
        return torch._fused_rms_norm(*args)[0]

    # Not a TorchFunctionMode, which would be off in the backward pass, where layers are recomputed.
    patched = mock.patch.multiple(F, scaled_dot_product_attention=sdpa_without_dropout,
                                  dropout=native_dropout, rms_norm=fused_rms_norm)
    # cpu_attention saves probabilities
    with patched, mock.patch.object(attention, 'MAX_LENGTH', 0):
        yield


# -----------------------------------------------------------------------------
# the plan


class Plan:
    """The memory of a step. phases: {phase: {category: bytes}}; overhead: bytes"""

    def __init__(self, phases, overhead):
        self.phases = phases
        self.overhead = overhead
        self.totals = {phase: sum(sizes.values()) for phase, sizes in phases.items()}
        self.peak_phase = max(self.totals, key=self.totals.get)
        self.peak = self.totals[self.peak_phase]  # compare torch.cuda.max_memory_allocated
        self.total = self.peak + overhead


def predict(gpt_config, config, dtype, device_type):
    """Predict the memory of a step on one process, as a Plan. The TrainConfig's batch_size must be
    a number. Raises UserError."""
    world_size = config.world_size()
    sharded = config.parallel == 'fsdp'
    accumulating = config.accumulation() > world_size
    chunk = chunk_size(config.batch_size * gpt_config.block_size, gpt_config.vocab_size,
                       device_type)
    # Memory is linear in each dimension, for batches of whole chunks of the loss.
    chunk_sequences = max(1, math.ceil(chunk / gpt_config.block_size))
    batch_sizes = (4 * chunk_sequences, 5 * chunk_sequences)
    depths = interpolation_weights(gpt_config.n_layer, *DEPTHS)
    lengths = interpolation_weights(gpt_config.block_size, *(chunk * n for n in LENGTHS))
    batches = interpolation_weights(config.batch_size, *batch_sizes)

    def interpolate(config, batches, **options):
        phases = {}
        for n_layer, block_size, batch_size in product(depths, lengths, batches):
            weight = depths[n_layer] * lengths[block_size] * batches[batch_size]
            # Settings that do not affect memory get a fixed value, so that plans share traces.
            traced_config = replace(config, batch_size=batch_size, gradient_accumulation_steps=1,
                                    total_batch_size=0, parallel='auto', seed=0)
            traced_gpt = replace(gpt_config, n_layer=n_layer, block_size=block_size)
            traced = trace(traced_gpt, traced_config, dtype, device_type, chunk=chunk, **options)
            for phase, sizes in traced.items():
                totals = phases.setdefault(phase, Counter())
                for category, size in sizes.items():
                    totals[category] += weight * size
        phases.pop(MIDDLE, None)
        return {phase: {category: round(size) for category, size in totals.items()}
                for phase, totals in phases.items()}

    if sharded:
        unsharded = interpolate(replace(config, activation_checkpointing='none'), {1: 1},
                                accumulating=accumulating)
        gathered = interpolate(config, batches, accumulating=False, sharded=True)
        phases = shard_phases(unsharded, gathered, gpt_config, config, dtype)
    else:
        phases = interpolate(config, batches, accumulating=accumulating)
    if world_size > 1 and not sharded:  # DDP's gradient buckets are always allocated
        gradients = phases['optimizer']['gradients']
        phases = {phase: sizes | {'gradients': gradients} for phase, sizes in phases.items()}
    return Plan(phases, CUDA_OVERHEAD if device_type == 'cuda' else 0)


def interpolation_weights(n, *points):
    """Weights to interpolate a polynomial at n from its values at some points: {point: weight}
    (Lagrange). If n is one of the points, or below them, its own value is used: {n: 1}."""
    if n <= points[0] or n in points:
        return {n: 1}
    return {p: math.prod(Fraction(n - q, p - q) for q in points if q != p) for p in points}


def shard_phases(unsharded, gathered, gpt_config, config, dtype):
    """Compute the phases of a step under FSDP2 (Zhao et al. 2023, "PyTorch FSDP").

    A process stores its shard of weights, gradients and optimizer states. Parameters outside the
    blocks stay gathered in float32 until the backward pass ends. Two blocks are gathered in
    autocast's dtype: the current one and the prefetched next one. The backward pass also has the
    current block's gradient in that dtype, and the previous block's in float32, being reduced.

    unsharded: the phases of a single process, without its activations
    gathered: the phases with blocks in autocast's dtype, for the activations"""
    with torch.device('meta'):
        gpt = GPT(replace(gpt_config, n_layer=1))
    block = 4 * sum(p.numel() for p in gpt.transformer.h.parameters())  # bytes in float32
    gathered_block = block if dtype == 'float32' else block // 2
    weights = unsharded['optimizer']['weights']
    root = weights - block * gpt_config.n_layer
    world_size = config.world_size()
    phases = {}
    for phase, sizes in unsharded.items():
        phases[phase] = {category: size // world_size for category, size in sizes.items()}
        if phase not in ('optimizer', 'between steps'):
            phases[phase]['weights'] += root + 2 * gathered_block
            phases[phase]['activations'] = gathered[phase]['activations']
        if phase.startswith('backward') and phase != 'backward of the loss':
            phases[phase]['gradients'] += root + gathered_block + block
    if config.report or config.eval_tasks:
        full_model = root + gathered_block * gpt_config.n_layer
        phases['health check or sample'] = phases['between steps'] | {
            'weights': weights // world_size + full_model, 'gradients': 0}
    return phases


def micro_batches(config):
    """The micro-batch sizes that divide a process's sequences per step, in ascending order."""
    sequences = config.total_batch_size // (config.block_size * config.world_size())
    limit = min(math.isqrt(sequences), 2**20)  # finds all divisors of up to 2**40 sequences
    divisors = [n for n in range(1, limit + 1) if sequences % n == 0]
    return sorted({*divisors, *(sequences // n for n in divisors)})


def largest_batch(gpt_config, config, dtype, device_type, available):
    """The largest micro-batch size that is planned to fit into `available` bytes; 0 if none is."""
    def total(batch_size):
        plan = predict(gpt_config, replace(config, batch_size=batch_size), dtype, device_type)
        return plan.total

    if total(1) > available:  # saves tracing larger ones
        return 0
    sizes = micro_batches(config)
    return sizes[bisect(sizes, available, key=total) - 1]


def choose_parallel(config, gpt_config, dtype, device_type, available):
    """Return 'ddp' if a step fits into `available` bytes per process, else 'fsdp'. All processes
    must pass the same number. With batch_size=auto, the step has micro-batches of 1."""
    if config.parallel != 'auto':
        return config.parallel
    if config.world_size() == 1:
        return 'ddp'
    if config.batch_size == 'auto':
        config = replace(config, batch_size=1)
    fits = predict(gpt_config, config, dtype, device_type).total <= available
    return 'ddp' if fits else 'fsdp'


# -----------------------------------------------------------------------------
# choosing what fits


def fit_to_memory(config, gpt_config, dtype, device):
    """Resolve parallel=auto and batch_size=auto in the TrainConfig of a run. Raises UserError if a
    step takes more memory than is free."""
    world = launched_world()
    if config.parallel == 'fsdp' and not world.launched:
        raise UserError('parallel=fsdp needs several processes; launch them with torchrun')
    available = min(all_gather(device_memory(device, world.local_size), gloo_group()))
    if config.batch_size != 'auto' and config.parallel != 'fsdp' \
            and 4 * rough_bytes(gpt_config, config.batch_size) < available:
        return config
    return fit_by_plan(config, gpt_config, dtype, device, available)


def rough_bytes(gpt_config, batch_size):
    """A quick estimate of the memory of a step in float32, within a factor of 4."""
    num_embeddings = 2  # the embedding and the head
    if gpt_config.value_embeddings:
        num_embeddings += gpt_config.n_layer
    rows = num_embeddings * gpt_config.padded_vocab_size + gpt_config.ngram_rows
    weights = gpt_config.n_embd * (12 * gpt_config.n_layer * gpt_config.n_embd + rows)
    tokens = batch_size * gpt_config.block_size
    # a block saves about 16 numbers per token and channel
    activations = tokens * gpt_config.n_embd * (16 * gpt_config.n_layer + 4)
    logits = min(tokens, max(CHUNK_SIZES)) * gpt_config.padded_vocab_size
    return 4 * (activations + logits) + 16 * weights  # a weight has a gradient and two states


def fit_by_plan(config, gpt_config, dtype, device, available):
    """Resolve parallel=auto and batch_size=auto in a TrainConfig. available: bytes per process.

    Raises UserError if a step does not fit. On CUDA, only weights, gradients and optimizer states
    must fit by plan, because the GPU itself reports if the rest does not."""
    if not tracker_class() and config.batch_size != 'auto':  # cannot plan
        return config
    if config.world_size() > 1:
        parallel = choose_parallel(config, gpt_config, dtype, device.type, available)
        config = replace(config, parallel=parallel)
        print0(f'parallel {config.parallel}')
    if config.batch_size == 'auto':
        config = with_largest_batch(config, gpt_config, dtype, device, available)
    plan = predict(gpt_config, config, dtype, device.type)
    static = plan.totals['optimizer'] - plan.phases['optimizer']['activations']
    required = static if device.type == 'cuda' else plan.total
    if required > available and not config.eval_only:
        raise UserError(
            f'batch_size={config.batch_size}, n_layer={gpt_config.n_layer}, '
            f'n_embd={gpt_config.n_embd}: a step needs {gib(plan.total)} ({gib(static)} of it for '
            f'weights, gradients and optimizer states), but only {gib(available)} is free; choose '
            f'smaller sizes, or run {command_for("plan")} with the same settings to see what fits')
    return config


def with_largest_batch(config, gpt_config, dtype, device, available):
    """The TrainConfig with the largest batch_size that is planned to fit, the same on all
    processes. On CUDA, a step is tried, and the size halved while it runs out of memory. Raises
    UserError."""
    planned = largest_batch(gpt_config, config, dtype, device.type, available)
    batch_size = min(all_gather(planned, gloo_group()))
    try_step = device.type == 'cuda' and config.parallel != 'fsdp'  # a trial needs the full model
    while batch_size and try_step:
        trial = replace(config, batch_size=batch_size)
        if all(all_gather(step_fits(gpt_config, trial, dtype, device), gloo_group())):
            break
        batch_size = max((n for n in micro_batches(config) if n <= batch_size // 2), default=0)
    if not batch_size:
        raise UserError(f'batch_size=auto: a micro-batch of 1 does not fit in {gib(available)} on '
                        f'{device}; choose a smaller model or --activation_checkpointing=full')
    config = replace(config, batch_size=batch_size)
    print0(f'batch_size {batch_size} (the largest that fits in {gib(available)}) | gradient '
           f'accumulation {config.accumulation()}')
    return config


def step_fits(gpt_config, config, dtype, device):
    """Whether a step runs on this CUDA device. It runs in eager mode, which takes at least as much
    memory as a compiled step."""
    with torch.random.fork_rng([device]):
        try:
            one_step(gpt_config, config, dtype, device,
                     accumulating=config.accumulation() > config.world_size())
            fits = True
        except torch.OutOfMemoryError:
            fits = False
    gc.collect()  # after an error, the graph is part of a reference cycle
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return fits
