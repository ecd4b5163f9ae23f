"""What is done to a GPT from outside: parameters without data, activation checkpointing and
torch.compile of its blocks."""

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
    """Modules made in here have parameters without data (on torch's meta device), and buffers with
    data. Under torch.device('meta') buffers would have none, and nothing would compute them later.
    """
    register, normal_ = nn.Module.register_parameter, nn.init.normal_

    def register_on_meta(module, name, p):
        if p is not None and not p.is_meta:  # one that modules share is there already
            p = nn.Parameter(p.to('meta'), p.requires_grad)
        register(module, name, p)

    def normal_unless_meta(tensor, *args, **kwargs):
        # on meta it draws nothing, but imports torch._dynamo, which takes 0.8 s
        return tensor if tensor.is_meta else normal_(tensor, *args, **kwargs)

    with mock.patch.object(nn.Module, 'register_parameter', register_on_meta), \
            mock.patch.object(nn.init, 'normal_', normal_unless_meta):
        yield


def apply_activation_checkpointing(model, mode):
    """Let the backward pass recompute what happens in the blocks of a GPT, except for their inputs
    and with 'selective' the outputs of SAVED_OPS (Chen et al. 2016, "Training Deep Nets with
    Sublinear Memory Cost"). Call it before compiling the model, or wrapping it in DDP or FSDP."""
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
    """torch.compile each block by itself, and the loss; the rest runs eagerly. Blocks are alike, so
    one graph serves all of them, and a deep model takes no longer to compile than a shallow one.
    Call it after apply_activation_checkpointing, and before the model is wrapped."""
    for block in model.transformer.h:
        block.compile()
    if model.loss_function is not None:
        model.loss_function = torch.compile(model.loss_function)
