"""Cross-entropy of a language model's head, without all logits in memory at once."""

import torch
import torch.nn.functional as F


def chunked_cross_entropy(x, weight, targets, chunk, softcap=0.0):
    """Mean cross-entropy of x @ weightᵀ whose (N, V) logits never exist: `chunk` rows at a time
    go from logits to loss to gradients, so nothing is computed twice.

    x (N, C), weight (V, C), targets (N,) int64, -1 where there is none → scalar, float32, nats.
    softcap as in GPTConfig.logit_softcap.
    Matmuls run in autocast's dtype, softmax and sums in float32. torch's own
    F.linear_cross_entropy does the same, but only from 2.13 on, and torch.compile stops at it.
    """
    return ChunkedCrossEntropy.apply(x, weight, targets, chunk, softcap)


class ChunkedCrossEntropy(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, softcap=0.0):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        w = weight.to(dtype)
        training = ctx.needs_input_grad[0]
        count = (targets != -1).sum()
        loss = torch.zeros((), device=x.device)
        if training:
            grad_x, grad_w = torch.empty_like(x, dtype=dtype), torch.zeros_like(weight)
        with torch.autocast(device, enabled=False):
            for i in range(0, len(x), chunk):
                x_i = x[i:i + chunk].to(dtype)  # (n, C)
                loss_i, grad = summed_cross_entropy(x_i, w, targets[i:i + chunk], softcap, training)
                loss += loss_i
                if training:
                    grad_x[i:i + chunk] = grad @ w
                    grad_w += grad.t() @ x_i
                    del grad  # or it would stand beside the next chunk's
        if training:
            ctx.save_for_backward(grad_x, grad_w, count)
        return loss / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w, count = ctx.saved_tensors
        scale = (grad_loss / count).view(1)  # a vector: float32 × bfloat16 is then float32
        return grad_x * scale, grad_w * scale, None, None, None


def summed_cross_entropy(x, w, targets, softcap, training):
    """x (n, C), w (V, C), targets (n,) → the sum of cross-entropies of x @ wᵀ, float32, and its
    gradient in the logits, (n, V) in x's dtype, or None when not training."""
    known, targets = targets[:, None] != -1, targets[:, None].clamp(min=0)  # (n, 1)
    logits = soft_capped((x @ w.t()).float(), softcap)  # (n, V)
    slope = 1 - (logits / softcap).square() if softcap else None  # tanh' = 1 − tanh²
    logp = F.log_softmax(logits, dim=-1)
    del logits  # large
    loss = -(logp.gather(1, targets) * known).sum()
    if not training:
        return loss, None
    # softmax − one-hot is within ±1, which float16 holds; divided by the count it would vanish.
    grad = logp.exp_().scatter_add_(1, targets, -torch.ones_like(targets, dtype=torch.float))
    if softcap:
        grad *= slope
    return loss, grad.mul_(known).to(x.dtype)


def soft_capped(logits, cap):
    """Logits within ±cap, and as they are where they are small; cap 0 leaves them alone."""
    return cap * torch.tanh(logits / cap) if cap else logits
