"""Plan the memory of a training step before it runs.

The step is train.py's: its build() makes a model and a Step of fake tensors, which have sizes but
no data, and the Step runs under torch's memory tracker. So a plan follows edits of model.py, of
Step and of optimizers. Some things are approximated: operations whose GPU kernels need a different
amount of memory are replaced (gpu_kernels), the loss has at most three chunks, and the memory of
FSDP's communication and of the gradients that DDP keeps is added. Nothing is compiled; a compiled
step takes less.
"""

import math
import os
import re
import sys
from bisect import bisect
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from model import GPTConfig
from plaingpt.core import attention, loss, optimizers, sharding
from plaingpt.system.formatting import GIB

CUDA_OVERHEAD = GIB  # an allowance for CUDA's context and fragmentation, not a measurement
CATEGORIES = {'Parameter': 'weights', 'Buffer': 'weights', 'Gradient': 'gradients',
              'Optstate': 'optimizer'}  # the tracker's names → ours; all others are activations

# -----------------------------------------------------------------------------
# tracing a step


@cache
def fake_world(processes):
    """→ (torch's state of a job in which nothing is sent, the mesh of its processes)"""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    world = distributed_c10d._World()
    count = world.group_count  # names the groups of a real job, which must not change
    with mock.patch.object(distributed_c10d, '_world', world), \
            mock.patch.object(sys, 'excepthook', sys.excepthook):
        world.group_count = 10**6 + processes
        dist.init_process_group('fake', rank=0, world_size=processes, store=FakeStore())
        # A unique name, because DTensor caches its plans by mesh: a real job with as many processes
        # must not reuse those of the fake one.
        mesh = init_device_mesh('cpu', (processes,), mesh_dim_names=('planned',))
        world.group_count = count
    return world, mesh


@contextmanager
def fake_job(shards):
    """A context, also inside of a real job, in which build() and Step never wait for other
    processes. They act as one of `shards` processes of FSDP or, if 0, as a single process."""
    world, mesh = distributed_c10d._World(), None
    if shards:
        world, mesh = fake_world(shards)
    size = str(shards or 1)
    env = {'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': size, 'LOCAL_WORLD_SIZE': size}
    with mock.patch.dict(os.environ, env), mock.patch.object(distributed_c10d, '_world', world), \
            mock.patch.object(sharding, 'init_device_mesh', lambda *_: mesh), \
            mock.patch.object(sharding, 'scatter', lambda *_: None):
        yield


def token_batches(batch_size, block_size, device):
    """Yield (idx, targets), each (B, T), forever."""
    while True:
        yield torch.zeros((2, batch_size, block_size), dtype=torch.int64, device=device).unbind()


def trace(build, gpt_config, config, dtype, micro_steps):
    """Trace a step on fake tensors: {phase: {category: bytes at the peak of the phase}}.

    micro_steps: 1, or 2 for any gradient accumulation: from the second micro-batch on, gradients
    exist in the forward pass"""
    device = torch.device('cpu')
    use_fsdp = config.parallel == 'fsdp'
    job = fake_job(config.world_size() if use_fsdp else 0)
    fake = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng([]), job, fake, new_tracker() as tracker, \
            mock.patch.object(nn.Module, '_apply', convert_in_place):
        model, step = build(gpt_config, config, device, dtype)
        tracker._track_module_params_and_buffers(model)
        step.micro_steps = 1
        step.forward_backward(token_batches(1, 1, device))
        step.update(config.learning_rate)  # creates the optimizer states
        phases = Phases(tracker, model)
        step.micro_steps = micro_steps
        step.forward_backward(token_batches(config.batch_size, gpt_config.block_size, device))
        phases.begin('optimizer')
        step.update(config.learning_rate)
        phases.record('between steps')
        if use_fsdp and (config.report or config.eval_tasks):
            with sharding.gathered(model, step.autocast):
                phases.record('health check or sample')
    if use_fsdp:
        # On a GPU, collectives overlap with compute: the next block is already gathered, and the
        # gradient of the previous one is still being reduced. A CPU waits for both.
        block_bytes = max(4 * sum(p.numel() for p in block.parameters())
                          for block in model.transformer.h)
        for phase, sizes in phases.peaks.items():
            if phase == 'forward' or phase.startswith('backward of block'):
                sizes['activations'] += 2 * block_bytes
    return phases.peaks


def new_tracker():
    """torch's MemTracker, which takes two seconds to import. Its statistics of modules are off: it
    cannot follow a module that is called twice."""
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.prim.device.default:  # most calls; allocates nothing
                return func(*args)
            if func is torch.ops.aten._local_scalar_dense.default:  # item(), of no value here
                return 0
            return super().__torch_dispatch__(func, types, args, kwargs)

    tracker = Tracker()
    tracker._mod_tracker = mock.MagicMock(is_bw=False)
    return tracker


def convert_in_place(module, fn, recurse=True):
    """nn.Module._apply, such as of model.to(device), for fake tensors, which torch cannot swap."""
    for child in module.children():
        child._apply(fn)
    for name, p in module.named_parameters(recurse=False):
        if p.is_meta:
            if not hasattr(p, 'allocated'):  # else it is tied, and another module has it already
                p.allocated = nn.Parameter(fn(p.detach()), p.requires_grad)
            module.register_parameter(name, p.allocated)
        else:
            p.data = fn(p.data)
    for buffer in module.buffers(recurse=False):
        buffer.data = fn(buffer.data)
    return module


def first_chunks(*args):
    """range() for LossInChunks: a trace has three chunks, and all others would take as much memory
    as the third one."""
    return range(*args)[:3]


class Phases:
    """Records the peak of each phase of a step: peaks {phase: {category: bytes}}."""

    def __init__(self, tracker, model):
        self.tracker = tracker
        self.peaks = {}
        self.current = None
        self.watch(model)

    def begin(self, phase):
        self.add(self.tracker.get_tracker_snapshot('peak'))
        self.tracker._peak_mem, self.tracker._peak_mem_snap = {}, {}
        self.current = phase

    def record(self, phase):
        """Record what is in memory now, not a peak."""
        self.begin(phase)
        self.add(self.tracker.get_tracker_snapshot())
        self.begin(None)

    def add(self, snapshot):
        """Keep a MemTracker snapshot if it is the largest of the current phase."""
        sizes = dict.fromkeys(('weights', 'gradients', 'optimizer', 'activations'), 0)
        for device_snapshot in snapshot.values():
            for kind, size in device_snapshot.items():
                if kind != 'Total':
                    sizes[CATEGORIES.get(kind.value, 'activations')] += size
        earlier = self.peaks.get(self.current, {})
        if self.current and sum(sizes.values()) > sum(earlier.values()):
            self.peaks[self.current] = sizes

    def watch(self, model):
        """Begin phases where the passes reach the model, the loss, the blocks and the embeddings.
        """
        def begin_at_gradient(module, phase):
            def hook(_, inputs, output):
                if output.requires_grad:
                    output.register_hook(lambda grad: self.begin(phase))
            module.register_forward_hook(hook)

        model.register_forward_pre_hook(lambda *_: self.begin('forward'))
        model.transformer.ln_f.register_forward_hook(lambda *_: self.begin('loss'))
        model.register_forward_hook(lambda *_: self.begin('backward of the loss'))
        for i, block in enumerate(model.transformer.h):
            begin_at_gradient(block, f'backward of block {i}')
        begin_at_gradient(model.transformer.drop, 'backward of the embeddings')


@contextmanager
def gpu_kernels():
    """A context in which CPU operations take as much memory as GPU kernels: attention saves no
    probabilities, even with dropout; dropout saves a byte mask; RMSNorm is fused; Muon multiplies
    in bfloat16. Memory inside kernels, such as cuBLAS's workspace, is not counted."""
    sdpa = F.scaled_dot_product_attention

    def sdpa_without_dropout(*args, **kwargs):
        return sdpa(*args, **{**kwargs, 'dropout_p': 0.0})

    def native_dropout(x, p, training, inplace):
        return torch.native_dropout(x, p, True)[0] if p and training else x

    def fused_rms_norm(*args):
        return torch._fused_rms_norm(*args)[0]

    # Not a TorchFunctionMode, which would be off in the backward pass, where layers are recomputed.
    with mock.patch.multiple(F, scaled_dot_product_attention=sdpa_without_dropout,
                             dropout=native_dropout, rms_norm=fused_rms_norm), \
            mock.patch.object(attention, 'MAX_LENGTH', 0), \
            mock.patch.object(optimizers, 'cpu_has_bfloat16', lambda: True):
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

    def summary(self):
        """{phase: bytes}, with the largest block for all of them"""
        totals = {}
        for phase, total in self.totals.items():
            name = re.sub(r'block \d+', 'a block', phase)
            totals[name] = max(total, totals.get(name, 0))
        return totals


@dataclass
class Planner:
    """Plans steps of one model. Methods take a TrainConfig; `available` is in bytes per process."""

    build: object  # of train.py
    gpt_config: GPTConfig
    dtype: str  # of autocast
    device_type: str
    traces: dict = field(default_factory=dict)

    def predict(self, config):
        """The Plan of a step of one process; config.batch_size must be a number. Raises UserError.
        """
        world_size = config.world_size()
        parallel, shards = 'ddp', 1
        if config.parallel == 'fsdp':
            parallel, shards = 'fsdp', world_size
        is_ddp = world_size > shards  # DDP's gradients are never freed
        micro_steps = 2 if config.accumulation() > world_size or is_ddp else 1
        # Settings that do not affect memory get a fixed value, so that plans share traces.
        config = replace(config, parallel=parallel, gradient_accumulation_steps=shards,
                         total_batch_size=0, seed=0)
        key = repr((config, shards, micro_steps))
        if key not in self.traces:
            self.traces[key] = self.trace(config, micro_steps)
        phases = dict(self.traces[key])
        if is_ddp:
            gradients = phases['optimizer']['gradients']
            phases['between steps'] = phases['between steps'] | {'gradients': gradients}
        return Plan(phases, CUDA_OVERHEAD if self.device_type == 'cuda' else 0)

    def trace(self, config, micro_steps):
        """trace(), with the chunks of the loss and the kernels that this device has."""
        chunk = loss.chunk_size(config.batch_size * self.gpt_config.block_size,
                                self.gpt_config.vocab_size, self.device_type)
        kernels = nullcontext() if self.device_type == 'cpu' else gpu_kernels()
        with kernels, mock.patch.object(loss, 'chunk_size', lambda *_: chunk), \
                mock.patch.object(loss, 'range', first_chunks, create=True):
            return trace(self.build, self.gpt_config, config, self.dtype, micro_steps)

    def largest_batch(self, config, available):
        """The largest micro-batch size that is planned to fit; 0 if none is."""
        def total(batch_size):
            return self.predict(replace(config, batch_size=batch_size)).total

        if total(1) > available:  # saves tracing larger ones
            return 0
        sizes = micro_batches(config)
        return sizes[bisect(sizes, available, key=total) - 1]

    def resolve(self, config, available):
        """→ the config with parallel=auto and batch_size=auto resolved: 'ddp' if a step fits, else
        'fsdp', and the largest batch, or 1 if none fits. All processes must pass the same
        `available`."""
        if config.parallel == 'auto' and config.world_size() > 1:
            batch_size = 1 if config.batch_size == 'auto' else config.batch_size
            ddp = replace(config, parallel='ddp', batch_size=batch_size)
            fits = self.predict(ddp).total <= available
            config = replace(config, parallel='ddp' if fits else 'fsdp')
        if config.batch_size == 'auto':
            config = replace(config, batch_size=self.largest_batch(config, available) or 1)
        return config


def micro_batches(config):
    """The micro-batch sizes that divide a process's sequences per step, in ascending order."""
    sequences = config.total_batch_size // (config.block_size * config.world_size())
    divisors = [n for n in range(1, math.isqrt(sequences) + 1) if sequences % n == 0]
    return sorted({*divisors, *(sequences // n for n in divisors)})
