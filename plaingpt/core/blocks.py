"""Transformations of a GPT: meta-device parameters, activation checkpointing, compiled blocks."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

CHECKPOINT_MODES = 'none', 'selective', 'full'
SAVED_OPS = [  # 'selective' saves the outputs of matmuls and attention
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]


@contextmanager
def parameters_on_meta():
    """A context in which new modules have parameters on the meta device, but real buffers. Under
    torch.device('meta'), buffers would be on meta too, and nothing would compute them later."""
    register, normal_ = nn.Module.register_parameter, nn.init.normal_

    def register_on_meta(module, name, p):
        if p is not None and not p.is_meta:  # a tied parameter is on meta already
            p = nn.Parameter(p.to('meta'), p.requires_grad)
        register(module, name, p)

    def normal_unless_meta(tensor, *args, **kwargs):
        if tensor.is_meta:  # a no-op on meta, but it would import torch._dynamo, which takes 0.8 s
            return tensor
        return normal_(tensor, *args, **kwargs)

    with mock.patch.object(nn.Module, 'register_parameter', register_on_meta), \
            mock.patch.object(nn.init, 'normal_', normal_unless_meta):
        yield


def apply_activation_checkpointing(model, mode):
    """Make the backward pass recompute the activations of each block from its input; 'selective'
    also saves the outputs of SAVED_OPS (Chen et al. 2016, "Training Deep Nets with Sublinear Memory
    Cost"). Call it before the model is compiled or wrapped in DDP or FSDP."""
    if mode == 'none':
        return
    for block in model.transformer.h:
        block.forward = partial(checkpointed, block.forward, mode)


def checkpointed(forward, mode, *inputs):
    if not torch.is_grad_enabled():
        return forward(*inputs)
    if mode == 'full':
        return checkpoint(forward, *inputs, use_reentrant=False)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=saved_ops_contexts)


def saved_ops_contexts():
    return create_selective_checkpoint_contexts(SAVED_OPS)


saved_ops_contexts.cache_hash = str(SAVED_OPS)  # torch.compile's cache needs it as a key


def compile_blocks(model):
    """torch.compile each block separately; the rest runs eagerly. The blocks share a graph, so a
    deep model compiles about as fast as a shallow one. Call it after
    apply_activation_checkpointing and before the model is wrapped."""
    for block in model.transformer.h:
        block.compile()
