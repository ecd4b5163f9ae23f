"""Faster causal attention for short sequences in bfloat16 on a CPU: `use_cpu_attention(model)`."""

import math

import torch
import torch.nn.functional as F

MAX_LENGTH = 512  # tokens; torch's kernel is faster for longer sequences, and takes less memory


def use_cpu_attention(model):
    """Make each layer of a GPT compute attention with cpu_attention."""
    for block in model.transformer.h:
        block.attn.attention = cpu_attention


def cpu_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
    """A drop-in for F.scaled_dot_product_attention. When training in bfloat16 on short sequences on
    a CPU, it saves the probabilities for the backward pass. torch's kernel recomputes them, which
    takes about twice as long."""
    is_plain = is_causal and not dropout_p and not any(others.values())
    is_short = q.size(2) <= MAX_LENGTH
    is_cpu_bfloat16 = q.dtype == torch.bfloat16 and q.device.type == 'cpu'
    is_training = q.requires_grad and not torch.compiler.is_compiling()
    if is_plain and is_short and is_cpu_bfloat16 and is_training:
        return CausalAttention.apply(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p,
                                          is_causal=is_causal, **others)


class CausalAttention(torch.autograd.Function):
    """softmax(q kᵀ / √D) v of bfloat16 tensors (B, H, T, D)."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.shape = q.shape
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B·H, T, D)
        T, D = q.shape[1:]
        mask = q.new_full((T, T), -math.inf).triu(1)
        probs = torch.baddbmm(mask, q, k.mT, alpha=1 / math.sqrt(D)).softmax(-1)  # (B·H, T, T)
        ctx.save_for_backward(q, k, v, probs)
        return torch.bmm(probs, v).view(ctx.shape)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, probs = ctx.saved_tensors
        grad = grad.flatten(0, 1)  # (B·H, T, D)
        grad_probs = torch.bmm(grad, v.mT)
        grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        grad_scores *= 1 / math.sqrt(q.size(2))
        grad_q = torch.bmm(grad_scores, k)
        grad_k = torch.bmm(grad_scores.mT, q)
        grad_v = torch.bmm(probs.mT, grad)
        return grad_q.view(ctx.shape), grad_k.view(ctx.shape), grad_v.view(ctx.shape)
