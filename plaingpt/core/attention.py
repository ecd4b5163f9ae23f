"""The same attention as F.scaled_dot_product_attention, where another path is faster:
`use_fast_attention(model)`."""

import math

import torch
import torch.nn.functional as F

MAX_LENGTH = 512  # tokens; torch's kernel is faster for longer sequences, and takes less memory


def use_fast_attention(model):
    """Make each layer of a GPT call fast_attention, unless an edited model.py sets another sdpa."""
    for block in model.transformer.h:
        if block.attn.sdpa is F.scaled_dot_product_attention:
            block.attn.sdpa = fast_attention


def fast_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                   enable_gqa=False):
    """A drop-in for F.scaled_dot_product_attention.

    When training in bfloat16 on short sequences on a CPU, it saves the probabilities for the
    backward pass; torch's kernel recomputes them, which takes about twice as long. With a mask on a
    GPU, it repeats shared key/value heads, because no fused kernel accepts a mask and enable_gqa.
    """
    is_plain = is_causal and not dropout_p and scale is None
    is_short = q.size(2) <= MAX_LENGTH
    is_cpu_bfloat16 = q.dtype == torch.bfloat16 and q.device.type == 'cpu'
    is_training = q.requires_grad and not torch.compiler.is_compiling()
    saves_probs = is_plain and is_short and is_cpu_bfloat16 and is_training
    is_masked_on_gpu = attn_mask is not None and q.device.type != 'cpu'
    if enable_gqa and (saves_probs or is_masked_on_gpu):
        repeats = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        enable_gqa = False
    if saves_probs:
        return CausalAttention.apply(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p,
                                          is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


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
        scale = 1 / math.sqrt(q.size(2))
        grad_q = torch.baddbmm(q, grad_scores, k, beta=0, alpha=scale)  # beta=0: without adding q
        grad_k = torch.baddbmm(k, grad_scores.mT, q, beta=0, alpha=scale)
        grad_v = torch.bmm(probs.mT, grad)
        return grad_q.view(ctx.shape), grad_k.view(ctx.shape), grad_v.view(ctx.shape)
