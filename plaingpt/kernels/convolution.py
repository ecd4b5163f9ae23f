"""Short convolutions, faster on any device than torch's depthwise ones."""

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling


def short_conv(x, weight, documents=None, cache=None):
    """x (B, T, C), weight (K, C) → y (B, T, C), y_t = x_t + Σ_k weight_k · x_(t-k), 0 ≤ k < K.

    documents: a Documents, if sequences hold several: tokens of other documents do not count
    cache: one layer's part of a KVCache, with the tokens before these"""
    if cache is not None:
        longer = cache.with_earlier(x, len(weight) - 1)  # (B, K - 1 + T, C)
        return conv_with_ages(longer, weight, cache.ages)[:, -x.size(1):]
    if documents is not None:
        return conv_with_ages(x, weight, documents.positions)
    if is_compiling():
        return conv_with_ages(x, weight, torch.arange(x.size(1), device=x.device)[None])
    return ShortConvFunction.apply(x, weight)


def conv_with_ages(x, weight, ages):
    """ages (B, n), n ≤ T: the positions of the last n tokens within their documents. What a weight
    reads before its document is taken for 0. Of tokens without an age, the first K - 1 read the end
    of x, and are good for nothing."""
    if ages is not None:
        ages = F.pad(ages, (x.size(1) - ages.size(1), 0), value=len(weight))[..., None]  # (B, T, 1)

    def term(k, w):  # weighted before it is moved: the backward pass then needs only x, and fuses
        moved = (w * x).roll(k, dims=1)
        return moved if ages is None else moved.masked_fill(ages < k, 0.0)

    return x + sum(term(k, w) for k, w in enumerate(weight.to(x.dtype)))


class ShortConvFunction(torch.autograd.Function):
    """conv_with_ages without ages: keeps only x and the weight for the backward pass, and makes no
    shifted copies of x."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        weight = weight.to(x.dtype)
        y = torch.addcmul(x, x, weight[0])
        for k in range(1, min(len(weight), x.size(1))):
            y[:, k:].addcmul_(x[:, :-k], weight[k])
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight, w = torch.zeros_like(weight), weight.to(x.dtype)
        grad_x = torch.addcmul(grad, grad, w[0])
        for k in range(min(len(w), x.size(1))):
            later, earlier = grad[:, k:], x[:, :x.size(1) - k]
            if k:
                grad_x[:, :-k].addcmul_(later, w[k])
            grad_weight[k] = (later * earlier).sum((0, 1), dtype=weight.dtype)
        return grad_x, grad_weight
