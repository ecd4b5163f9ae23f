"""A GPT whose weights the processes share (torch's FSDP2): made without data, filled, gathered."""

import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import GPT
from plaingpt.parallel.blocks import parameters_on_meta
from plaingpt.system.devices import DTYPES


def shard(model, device, dtype):
    """Wrap the model in FSDP2: each process keeps some rows of every weight, of its gradient and of
    its optimizer states, and gathers a block only to compute with it (ZeRO: Rajbhandari et al.
    2020). model: with parameters on meta → the same model, with arbitrary values."""
    prepare(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Blocks are gathered in autocast's dtype: half the bytes, and autocast keeps no copies. The
    # embedding and the head, which may be one weight, are gathered whole in float32.
    low = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32,
                               cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=low)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    materialize(model, device)
    return model


def prepare(model):
    """Before fully_shard: let norms take gathered weights."""
    for norm in (m for m in model.transformer.h.modules() if isinstance(m, nn.LayerNorm)):
        norm.__class__ = LayerNorm


def materialize(model, device):
    """After fully_shard: give the parameters memory on the device. Their values are anything."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():  # such as rotary tables: no checkpoint has them
        buffer.copy_(buffers[name])
    warnings.filterwarnings('ignore', 'FSDP2-wrapped module .* returned a view')  # the logits
    # FSDP2 keeps the root gathered for a backward pass; where there is none, nothing frees it.
    model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else model.reshard())


def scatter(weights, model):
    """Give each process its rows of rank 0's {name: whole tensor}; that of others is unused."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    set_model_state_dict(model, weights, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))


@contextmanager
def gathered(model, context):
    """A context with a whole copy of a sharded GPT, which a process can use by itself. All
    processes must enter it. context: autocast, in whose dtype the matrices of blocks are gathered,
    as in a step"""
    low = getattr(context, 'fast_dtype', torch.float32)
    whole = {p: nn.Parameter(p.detach().to(low if is_matrix(name, p) else p.dtype).full_tensor(),
                             p.requires_grad) for name, p in model.named_parameters()}
    with parameters_on_meta():
        gpt = GPT(model.config)
    gpt.loss_function = model.loss_function
    gpt.load_state_dict({name: whole[p] for name, p in model.named_parameters(
        remove_duplicate=False)}, strict=False, assign=True)
    gpt.to(model.lm_head.weight.device)  # its buffers
    gpt.train(model.training)
    yield gpt


def is_matrix(name, p):
    return name.startswith('transformer.h.') and p.dim() > 1


class LayerNorm(nn.LayerNorm):
    """Its weights may be gathered in a lower precision than x has."""

    def forward(self, x):
        weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
