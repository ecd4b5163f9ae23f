"""A GPT over the processes of a job: a copy on each (DDP), or a share on each (FSDP2).

The loop and the step ask neither which it is nor whether there are several processes.
"""

import warnings
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT
from plaingpt.kernels import recomputed
from plaingpt.system.devices import DTYPES, compiled
from plaingpt.system.errors import UserError


@contextmanager
def parameters_on_meta():
    """Modules made in here have parameters without data (on torch's meta device). Their buffers
    have data: under torch.device('meta') they would not, and nothing would compute them later."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, p):
        if p is not None and not p.is_meta:  # one that modules share is there already
            p = nn.Parameter(p.to('meta'), p.requires_grad)
        register(module, name, p)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def copy_on_meta(model):
    """A GPT like another, with parameters_on_meta."""
    with parameters_on_meta():
        gpt = GPT(model.config)
    gpt.loss_chunk_tokens = model.loss_chunk_tokens
    gpt.activation_checkpointing = model.activation_checkpointing
    return gpt


class Replicated:
    """Each process has the whole model, be there one or many (DDP).

    model: the GPT itself, whose weights are optimized and saved
    eval, train: what to evaluate and to train with, by all processes at the same points
    """

    sharded = False

    def __init__(self, model, device, compile, world):
        self.model = model
        self.eval = self.train = compiled(model) if compile else model
        if world.size > 1:
            ids = [device.index] if device.type == 'cuda' else None
            self.train = DDP(self.eval, device_ids=ids, gradient_as_bucket_view=True)
            self.train.broadcast_buffers = False  # rotary tables: the same everywhere, constant

    @contextmanager
    def full_model(self):
        """A context with a GPT that a process can use by itself; all processes must enter."""
        yield self.model


class Sharded:
    """Each process has some rows of every weight, of its gradient and of the optimizer's states,
    and gathers a block when it computes with it (torch's FSDP2; the idea is ZeRO's: Rajbhandari et
    al. 2020).

    Has what Replicated has; the parameters of `model` are DTensors.
    """

    sharded = True

    def __init__(self, model, device, compile, dtype):
        """model: as parameters_on_meta makes it; its weights are anything until they are loaded"""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        check_groups(model)
        self.model = self.eval = self.train = model
        self.device, self.dtype = device, None if dtype == 'float32' else DTYPES[dtype]
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # Blocks are gathered in autocast's dtype: half the bytes, and autocast keeps no copies.
        # The rest is gathered whole, in float32: the embedding and the head, which may be one.
        low = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32,
                                   cast_forward_inputs=False)
        for block in model.transformer.h:
            for norm in (m for m in block.modules() if isinstance(m, nn.LayerNorm)):
                norm.__class__ = LayerNorm
            if compile:  # from outside of it, all of a compiled block would be computed again
                block.forward = partial(recomputed, model.activation_checkpointing, block.forward)
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=low)
        if compile:
            model.activation_checkpointing = 'none'
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        buffers = dict(model.named_buffers())
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():  # such as rotary tables: no checkpoint has them
            buffer.copy_(buffers[name])
        warnings.filterwarnings('ignore', 'FSDP2-wrapped module .* returned a view')  # the logits
        # FSDP2 keeps the root gathered for a backward pass; where there is none, nothing frees it.
        model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else model.reshard())

    def load(self, weights):
        """Give each process its rows of rank 0's {name: whole tensor}; that of others is unused."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
        )
        set_model_state_dict(self.model, weights, options=StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True))

    @contextmanager
    def full_model(self):
        """As Replicated's: a copy that is gathered from all processes, and lasts as long."""
        whole = {p: nn.Parameter(self.gathered(name, p), p.requires_grad)
                 for name, p in self.model.named_parameters()}
        gpt = copy_on_meta(self.model)
        gpt.load_state_dict({name: whole[p] for name, p in self.model.named_parameters(
            remove_duplicate=False)}, strict=False, assign=True)
        gpt.to(self.device)  # its buffers
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
