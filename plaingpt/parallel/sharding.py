"""A GPT over the processes of a job: a copy on each (DDP), or a share on each (FSDP2).

The loop and the step ask neither which it is nor whether there are several processes.
"""

import warnings
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT
from plaingpt.system.devices import DTYPES
from plaingpt.system.errors import UserError


class Replicated:
    """Each process has the whole model, be there one or many (DDP).

    model: the GPT itself, whose weights are optimized and saved
    eval, train: what to evaluate and to train with, by all processes at the same points
    """

    sharded = False

    def __init__(self, model, device, compile, world):
        self.model = model
        self.eval = self.train = torch.compile(model) if compile else model
        if world.size > 1:
            ids = [device.index] if device.type == 'cuda' else None
            self.train = DDP(self.eval, device_ids=ids)
            self.train.broadcast_buffers = False  # rotary tables: the same everywhere, constant

    @contextmanager
    def together(self):
        """A context with a GPT that a process can use by itself; all processes must enter."""
        yield self.model


class Sharded:
    """Each process has some rows of every weight, of its gradient and of the optimizer's states,
    and gathers a block when it computes with it (FSDP2: Zhao et al. 2023, "PyTorch FSDP").

    Has what Replicated has; the parameters of `model` are DTensors.
    """

    sharded = True

    def __init__(self, model, device, compile, dtype, weights, group=0):
        """model: of `hollow`; weights: its (name, tensor), in order. They are taken one after
        another, so that no process holds more of them than its share and a block.
        group: processes that share a copy of the model, where not all share one"""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        check_groups(model)
        self.model = self.eval = self.train = model
        self.device, self.dtype = device, None if dtype == 'float32' else DTYPES[dtype]
        group = group or dist.get_world_size()
        mesh = init_device_mesh(device.type, (dist.get_world_size() // group, group),
                                mesh_dim_names=('copies', 'shares'))
        mesh = mesh['shares'] if mesh.size(0) == 1 else mesh
        # Blocks are gathered in autocast's dtype: half the bytes, and autocast keeps no copies.
        # The rest is gathered whole, in float32: the embedding and the head, which may be one.
        low = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32,
                                   cast_forward_inputs=False)
        last = {list(block.parameters())[-1]: block for block in model.transformer.h}
        for p in fill(model, (tensor.to(device) for _, tensor in weights)):
            if p in last:
                for norm in (m for m in last[p].modules() if isinstance(m, nn.LayerNorm)):
                    norm.__class__ = LayerNorm
                if compile:
                    last[p].compile()
                fully_shard(last[p], mesh=mesh, mp_policy=low)
        model.to(device)  # its tables
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        warnings.filterwarnings('ignore', 'FSDP2-wrapped module .* returned a view')  # the logits
        # It stays whole for the backward pass, and where there is none, forever.
        model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else model.reshard())

    @contextmanager
    def together(self):
        """As Replicated's: a copy that is gathered from all processes, and lasts as long."""
        gpt = hollow_like(self.model)
        for _ in fill(gpt, (self.gathered(name, p) for name, p in self.model.named_parameters())):
            pass
        gpt.to(self.device)  # its tables
        gpt.train(self.model.training)
        yield gpt

    def gathered(self, name, p):
        """A parameter, whole: a matrix of a block in the precision that a step gathers it in."""
        low = self.dtype and name.startswith('transformer.h.') and p.dim() > 1
        return p.detach().to(self.dtype if low else p.dtype).full_tensor()


def check_groups(model):
    """Raise UserError where a weight cannot be gathered with one block, or with what is outside."""
    first = {}  # parameter → its first name, and its group
    for name, p in model.named_parameters(remove_duplicate=False):
        group = name.split('.')[2] if name.startswith('transformer.h.') else 'outside'
        other, other_group = first.setdefault(p, (name, group))
        if other_group != group:
            raise UserError(f'{name} is the same weight as {other}, and parallel=fsdp gathers each '
                            'block by itself: untie them, or use --parallel=ddp')
        if not p.dim():
            raise UserError(f'{name} has no dimension, and parallel=fsdp shares out rows: make it '
                            'one of a single number, torch.zeros(1), or use --parallel=ddp')


class LayerNorm(nn.LayerNorm):
    """Its weights may be gathered in a lower precision than x has."""

    def forward(self, x):
        weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


# -----------------------------------------------------------------------------
# models without weights


def hollow(config, kind=GPT):
    """A GPT of a GPTConfig whose parameters have no data (on torch's meta device)."""
    register = nn.Module.register_parameter

    def on_meta(module, name, p):
        if p is not None and not p.is_meta:
            p = nn.Parameter(p.to('meta'), p.requires_grad)
        register(module, name, p)

    nn.Module.register_parameter = on_meta
    try:
        return kind(config)
    finally:
        nn.Module.register_parameter = register


def hollow_like(model):
    gpt = hollow(model.config)
    gpt.loss_chunk_tokens = model.loss_chunk_tokens
    gpt.activation_checkpointing = model.activation_checkpointing
    return gpt


def fill(model, tensors):
    """Put tensors in place of a hollow model's parameters, in order, also where modules share one
    → yields each of those parameters as it is replaced."""
    places = defaultdict(list)  # parameter → [(module, key)]
    for module in model.modules():
        for key, p in module.named_parameters(recurse=False):
            places[p].append((module, key))
    for p, tensor in zip(list(model.parameters()), tensors, strict=True):
        new = nn.Parameter(tensor, p.requires_grad)
        for module, key in places[p]:
            setattr(module, key, new)
        yield p


def initial_weights(config, seed):
    """Yield (name, tensor) of all parameters that GPT(config) has after torch.manual_seed(seed), in
    order, without ever having more than one."""
    class Uninitialised(GPT):
        def init_weights(self):
            self.drawn = torch.get_rng_state()

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        with Draws():
            model = hollow(config, Uninitialised)
        torch.set_rng_state(model.drawn)
        for name, p in model.named_parameters():
            tensor = torch.empty(p.shape)
            GPT.init_weights(model, [(name, tensor)])
            yield name, tensor


def check_initial_weights(shape, seed):
    """Raise UserError where initial_weights would not have what GPT(shape) has, as a small model
    shows: where GPT.__init__ sets weights beside init_weights."""
    small = small_shape(shape)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        whole = dict(GPT(small).named_parameters())
    for name, tensor in initial_weights(small, seed):
        if not torch.equal(tensor, whole[name]):
            raise UserError(f'{name}: GPT.__init__ sets it, and parallel=fsdp makes weights by '
                            'init_weights alone: set it there, or use --parallel=ddp')


def small_shape(shape):
    """The GPTConfig of a small model that has the flags of another."""
    return replace(shape, n_layer=min(2, shape.n_layer), n_embd=8 * shape.n_head, vocab_size=257,
                   block_size=min(16, shape.block_size),
                   document_start=min(256, shape.document_start))


def unknown_weights(model):
    """Yield (name, tensor) of a hollow model's parameters, to be filled later."""
    for name, p in list(model.named_parameters()):
        yield name, torch.empty(p.shape)


class Draws(TorchDispatchMode):
    """In here, random numbers for a tensor without data are drawn and forgotten, so that those that
    come after are the same as if it had data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in RANDOM and args[0].is_meta:
            func(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:], **kwargs or {})
        return func(*args, **kwargs or {})


RANDOM = torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default
