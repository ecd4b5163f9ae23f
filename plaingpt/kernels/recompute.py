"""Activation checkpointing: keep less for the backward pass and compute it again there.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from plaingpt.kernels import cpu_kernels  # noqa: F401  (registers an operator of torch.ops)

KINDS = ('none', 'selective', 'full')
KEPT = [  # by 'selective'
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.plaingpt.cpu_attention.default,
]


def recomputed(kind, block, *inputs):
    """block(*inputs). 'full' keeps only the inputs for the backward pass, 'selective' also the
    outputs of matmuls and attention: what it needs beside them is computed again."""
    if kind == 'none' or not torch.is_grad_enabled():
        return block(*inputs)
    if kind == 'full':
        return checkpoint(block, *inputs, use_reentrant=False)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=keep_matmuls)


def keep_matmuls():
    return create_selective_checkpoint_contexts(KEPT)


keep_matmuls.cache_hash = str(KEPT)  # by which torch.compile finds a graph that it made before
