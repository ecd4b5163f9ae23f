"""Cross-entropy of a language model's head, without all logits in memory at once."""

import torch
import torch.nn.functional as F

# Curves within ±1 that are straight where they are small: name → (the curve, its slope where its
# value is y).
SOFTCAPS = {
    'tanh': (torch.tanh, lambda y: 1 - y.square()),
    'sqrt': (lambda x: x * (1 + x.square()).rsqrt(), lambda y: (1 - y.square()).relu() ** 1.5),
}


def soft_capped(logits, cap, curve='tanh'):
    """Logits within ±cap, and as they are where they are small; cap 0 leaves them alone."""
    return cap * SOFTCAPS[curve][0](logits / cap) if cap else logits


def chunked_cross_entropy(x, head, vocab_size, targets, chunk, softcap=(0.0, 'tanh')):
    """Mean cross-entropy of head(x) whose (N, V) logits never exist: `chunk` rows at a time go from
    logits to loss to gradients, so nothing is computed twice.

    x (N, C), head a Linear of which the first vocab_size outputs count, targets (N,) int64, -1
    where there is none → scalar, float32, nats. softcap: GPTConfig's logit_softcap and softcap.
    Matmuls run in autocast's dtype, softmax and sums in float32. torch's own
    F.linear_cross_entropy does the same, but only from 2.13 on, and torch.compile stops at it.
    """
    weight, bias = (p if p is None else p[:vocab_size] for p in (head.weight, head.bias))
    return ChunkedCrossEntropy.apply(x, weight, bias, targets, chunk, softcap)


class ChunkedCrossEntropy(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, bias, targets, chunk, softcap):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        training = ctx.needs_input_grad[0]
        count = (targets != -1).sum()
        loss = torch.zeros((), device=x.device)
        if training:
            grad_x, grad_w = torch.empty_like(x, dtype=dtype), torch.zeros_like(weight)
            grad_b = None if bias is None else torch.zeros_like(bias)
        with torch.autocast(device, enabled=False):
            for i in range(0, len(x), chunk):
                x_i = x[i:i + chunk].to(dtype)  # (n, C)
                loss_i, grad = summed_cross_entropy(F.linear(x_i, w, b).float(),
                                                    targets[i:i + chunk], softcap, training)
                loss += loss_i
                if training:
                    grad = grad.to(dtype)
                    grad_x[i:i + chunk] = grad @ w
                    grad_w += grad.t() @ x_i
                    if bias is not None:
                        grad_b += grad.sum(0, dtype=grad_b.dtype)
                    del grad  # or it would stand beside the next chunk's
        if training:
            ctx.save_for_backward(grad_x, grad_w, grad_b, count)
        return loss / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w, grad_b, count = ctx.saved_tensors
        scale = (grad_loss / count).view(1)  # a vector: float32 × bfloat16 is then float32
        grad_b = None if grad_b is None else grad_b * scale
        return grad_x * scale, grad_w * scale, grad_b, None, None, None


def summed_cross_entropy(logits, targets, softcap, training):
    """logits (n, V) float32, targets (n,) → the sum of cross-entropies, and its gradient in the
    logits, (n, V), or None when not training."""
    known, targets = targets[:, None] != -1, targets[:, None].clamp(min=0)  # (n, 1)
    cap, curve = softcap
    logits = soft_capped(logits, cap, curve)
    slope = SOFTCAPS[curve][1](logits / cap) if cap else None
    logp = F.log_softmax(logits, dim=-1)
    del logits  # large
    loss = -(logp.gather(1, targets) * known).sum()
    if not training:
        return loss, None
    # softmax − one-hot is within ±1, which float16 holds; divided by the count it would vanish.
    grad = logp.exp_().scatter_add_(1, targets, -torch.ones_like(targets, dtype=torch.float))
    if cap:
        grad *= slope
    return loss, grad.mul_(known)
