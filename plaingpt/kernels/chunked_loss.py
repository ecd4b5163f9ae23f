"""Cross-entropy of a language model's head, without all logits in memory at once."""

import math

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from plaingpt.kernels import cpu_kernels

CHUNKS = 2048, 4096, 8192  # tokens
CACHED_LOGITS = 2**20  # 4 MB in float32, which stay in the caches of two CPU cores
LEAST_CACHED = 128  # tokens; a smaller chunk gains less than its matmuls and sums cost
PADDING_SHARE = 16  # padding of up to this part of the vocabulary is computed along


def cross_entropy(logits, targets):
    """logits (…, V), targets (…) int64, -1 where there is none → the mean cross-entropy over the
    others, in nats; 0 where there are no others."""
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1,
                            reduction='sum')
    return total / (targets != -1).sum().clamp(min=1)


def chunk_size(chosen, tokens, vocab_size, device_type):
    """How many tokens' logits exist at once. 'auto': at most half of them, in a few sizes. For each
    chunk a GPU reads the head's weight and adds to its gradient, as long as some 500 tokens take.
    On a CPU, as many as stay in its cache, unless that takes a smaller vocabulary.
    """
    if chosen != 'auto':
        return chosen
    cached = CACHED_LOGITS // vocab_size
    if device_type == 'cpu' and cpu_kernels.enabled and cached >= LEAST_CACHED:
        return cached
    return max(size for size in CHUNKS if 2 * size <= tokens or size == CHUNKS[0])


def chunked_cross_entropy(x, weight, vocab_size, targets, chunk):
    """The same of x @ weightᵀ, which never exists as a whole: `chunk` rows at a time go from logits
    to loss to gradients, so nothing is computed twice.

    x (…, C), weight (V', C), of which the first V = vocab_size rows count, targets (…), -1 for
    none; chunk: a number, or 'auto' → mean in nats, float32.
    Matmuls run in autocast's dtype, softmax and sums in float32. torch's own
    F.linear_cross_entropy does the same, but only from 2.13 on, and torch.compile stops at it.
    """
    if len(weight) - vocab_size > vocab_size // PADDING_SHARE:
        weight = weight[:vocab_size]
    training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return ChunkedCrossEntropy.apply(x.flatten(0, -2), weight, vocab_size, targets.flatten(),
                                     chunk_size(chunk, targets.numel(), vocab_size, x.device.type),
                                     training)


class ChunkedCrossEntropy(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, vocab_size, targets, chunk, training):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        w = weight.to(dtype)
        loss, done = torch.zeros((), device=x.device), []
        if training:
            grad_x, grad_w = torch.empty_like(x, dtype=dtype), torch.zeros_like(weight)
        with torch.autocast(device, enabled=False):
            for i in range(0, len(x), chunk):
                x_i = x[i:i + chunk].to(dtype)  # (n, C)
                if done and is_compiling():
                    x_i = after(x_i, done)
                loss_i, grad = summed_cross_entropy(F.linear(x_i, w).float(), vocab_size,
                                                    targets[i:i + chunk], training)
                loss += loss_i
                done = [loss]
                if training:
                    grad = grad.to(dtype)
                    grad_x[i:i + chunk] = grad_x_i = grad @ w
                    grad_w += grad.t() @ x_i
                    done += [grad_x_i, grad_w]
                    del grad  # or it would stand beside the next chunk's
        count = (targets != -1).sum().clamp(min=1)  # of no targets the loss is 0
        if training:
            ctx.save_for_backward(grad_x, grad_w, count)
        return loss / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w, count = ctx.saved_tensors
        scale = (grad_loss / count).view(1)  # a vector: float32 × bfloat16 is then float32
        return grad_x * scale, grad_w * scale, None, None, None, None


@torch.library.custom_op('plaingpt::after', mutates_args=())
def after(x: torch.Tensor, done: list[torch.Tensor]) -> torch.Tensor:
    """x, for work that is to wait until `done` is computed. The order in which torch.compile lets a
    graph run is free but for what depends on what, and chunks do not depend on each other: it would
    compute the logits of all of them before the gradients of any."""
    return x.clone()


@after.register_fake
def _(x, done):
    return torch.empty_like(x)


def summed_cross_entropy(logits, vocab_size, targets, training):
    """logits (n, V') float32, of which the first vocab_size count, targets (n,) → the sum of
    cross-entropies, and its gradient in the logits, (n, V'), or None when not training. Overwrites
    logits."""
    # The gradient is softmax − one-hot: within ±1, which float16 holds; divided by the count it
    # would vanish.
    if is_compiling():  # all of it becomes one kernel; in eager mode this takes twice as long
        return fused_cross_entropy(logits, vocab_size, targets[:, None], training)
    known, targets = targets[:, None] != -1, targets[:, None].clamp(min=0)  # (n, 1)
    if logits.size(1) > vocab_size:
        logits[:, vocab_size:] = -math.inf  # no part in the softmax, and no gradient
    logp = F.log_softmax(logits, dim=-1)
    del logits  # large
    loss = -logp.gather(1, targets)
    if not training:
        return (loss * known).sum(), None
    one_hot = -torch.ones_like(targets, dtype=torch.float)
    return (loss * known).sum(), logp.exp_().scatter_add_(1, targets, one_hot).mul_(known)


def fused_cross_entropy(logits, vocab_size, targets, training):
    """The same; targets (n, 1). In powers of 2, for which a GPU has an instruction: a fifth of all
    that it runs for a logit is saved."""
    ids = torch.arange(logits.size(1), device=logits.device)
    if logits.size(1) > vocab_size:
        logits = logits.masked_fill(ids >= vocab_size, -math.inf)
    logits, known = logits * (1 / math.log(2)), targets != -1
    highest = logits.amax(-1, keepdim=True)
    lse = highest + (logits - highest).exp2().sum(-1, keepdim=True).log2()
    loss = ((lse - logits.gather(1, targets.clamp(min=0))) * known).sum() * math.log(2)
    lse = lse.masked_fill(~known, math.inf)  # then a row's softmax is 0, and so is its gradient
    return loss, (logits - lse).exp2() - (ids == targets).float() if training else None
