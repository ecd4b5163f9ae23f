"""Shard a GPT over the processes with FSDP2: wrap it, initialize its shards, gather a full copy."""

import logging
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import GPT
from plaingpt.core.blocks import parameters_on_meta
from plaingpt.system.devices import DTYPES


def shard(model, device, dtype):
    """Wrap a model on the meta device in FSDP2: each process stores some rows of every weight, its
    gradient and its optimizer states, and gathers a block only to run it (ZeRO: Rajbhandari et al.
    2020). The weights are uninitialized afterwards."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Blocks are gathered in autocast's dtype, which halves communication and saves autocast's
    # copies. The embedding and the head, which may be tied, are gathered in float32.
    block_policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32,
                                        cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=block_policy)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    materialize(model, device)
    return model


def materialize(model, device):
    """After fully_shard: allocate the parameters on the device, uninitialized."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():  # e.g. rotary tables, which no checkpoint has
        buffer.copy_(buffers[name])
    warnings.filterwarnings('ignore', 'FSDP2-wrapped module .* returned a view')  # the logits
    # DTensor warns on CPUs that gloo has no all-to-all, which Muon uses: it gathers instead.
    logging.getLogger('torch.distributed.tensor._collective_utils').setLevel(logging.ERROR)

    def reshard_after_inference(*_):
        # FSDP2 keeps the root gathered for the backward pass; without one, nothing frees it.
        if not torch.is_grad_enabled():
            model.reshard()

    model.register_forward_hook(reshard_after_inference)


def scatter(weights, model):
    """Scatter rank 0's {name: full tensor}, which the other ranks ignore, to the shards."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    set_model_state_dict(model, weights, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))


@contextmanager
def gathered(model, context):
    """A context with an unsharded copy of a GPT, which a process can run on its own. All processes
    must enter it. context: autocast; as in training, matrices in blocks are gathered in its dtype
    """
    autocast_dtype = getattr(context, 'fast_dtype', torch.float32)
    full_params = {}  # {sharded parameter: full parameter}
    for name, p in model.named_parameters():
        is_matrix = name.startswith('transformer.h.') and p.dim() > 1
        full = p.detach().to(autocast_dtype if is_matrix else p.dtype).full_tensor()
        full_params[p] = nn.Parameter(full, p.requires_grad)
    with parameters_on_meta():
        gpt = GPT(model.config)
    gpt.loss_in_chunks = model.loss_in_chunks
    state = {name: full_params[p]
             for name, p in model.named_parameters(remove_duplicate=False)}  # tied ones twice
    gpt.load_state_dict(state, strict=False, assign=True)
    gpt.to(model.lm_head.weight.device)  # moves the buffers
    gpt.train(model.training)
    yield gpt
