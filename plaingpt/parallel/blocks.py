"""What is done to the blocks of a GPT from outside: activation checkpointing and torch.compile."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

CHECKPOINT_MODES = 'none', 'selective', 'full'
SAVED_OPS = [  # 'selective' saves the outputs of matmuls and attention
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]


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
