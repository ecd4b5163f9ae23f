"""What model.py computes with, by plain names. Each takes what is fastest for its input."""

import torch
import torch.nn.functional as F

from plaingpt.kernels.chunked_loss import chunked_cross_entropy, cross_entropy
from plaingpt.kernels.convolution import short_conv
from plaingpt.kernels.cpu_kernels import cpu_attention, faster_attention, relu2
from plaingpt.kernels.documents import find_documents
from plaingpt.kernels.recompute import recomputed

__all__ = ['attention', 'chunked_cross_entropy', 'cross_entropy', 'find_documents',
           'one_for_each', 'recomputed', 'relu2', 'residual_stream', 'short_conv']


def residual_stream(x):
    """x in the dtype in which blocks add to it: under autocast to bfloat16 that, for half the bytes
    of each addition and norm. In float16, a sum could overflow."""
    device = x.device.type
    low = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return x.bfloat16() if low else x


def attention(q, k, v, dropout=0.0, documents=None, cache=None):
    """Each token attends to itself and those before it. q (B, H, T, D), k and v (B, KV, T, D), of
    which each head is for H / KV of q's → (B, H, T, D).

    documents: a Documents, if sequences hold several: attention stays within each
    cache: one layer's part of a KVCache, with the tokens before these; no dropout with it"""
    if cache is not None:
        return cache.attention(q, k, v)
    k, v = one_for_each(q, k, v)
    if documents is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=documents.mask, dropout_p=dropout)
    if not dropout and faster_attention(q):
        return cpu_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def one_for_each(q, k, v):
    """k, v (B, KV, T, D) with as many heads as q has. torch's own enable_gqa keeps some of its
    kernels from being chosen: those that take a mask on a GPU."""
    groups = q.size(1) // k.size(1)
    return (k, v) if groups == 1 else (t.repeat_interleave(groups, dim=1) for t in (k, v))
