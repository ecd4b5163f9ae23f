"""The loss of GPT.forward in less memory: `model.loss_function = chunked_cross_entropy`."""

import math

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

CHUNKS = 2048, 4096, 8192  # tokens
CACHED_LOGITS = 2**20  # 4 MB in float32, which stay in the caches of two CPU cores
LEAST_CACHED = 128  # tokens; a smaller chunk gains less than its matmuls and sums cost
PADDING_SHARE = 16  # up to 1/16 of the vocabulary, its padding is computed too


def chunk_size(chosen, tokens, vocab_size, device_type):
    """How many tokens have logits at once. 'auto' takes one of CHUNKS, at most half of the tokens:
    for each chunk a GPU reads the head's weight and adds to its gradient, which takes as long as
    some 500 tokens. On a CPU 'auto' takes as many tokens as have their logits in the cache, unless
    the vocabulary is so large that they are fewer than LEAST_CACHED."""
    if chosen != 'auto':
        return chosen
    cached = CACHED_LOGITS // vocab_size
    if device_type == 'cpu' and cached >= LEAST_CACHED:
        return cached
    return max(size for size in CHUNKS if 2 * size <= tokens or size == CHUNKS[0])


def chunked_cross_entropy(x, weight, vocab_size, targets, chunk='auto'):
    """F.cross_entropy(x @ weightᵀ, targets) without all logits at once: `chunk` rows at a time go
    from logits to loss to gradients, so nothing is computed twice.

    x (…, C); weight (V', C), whose first V = vocab_size rows count; targets (…), -1 for those that
    do not count; chunk: a number, or 'auto' → the mean in nats, float32; 0 if no target counts.
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
                    del grad  # frees its memory before the next chunk needs it
        count = (targets != -1).sum().clamp(min=1)  # without targets the loss is 0
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
    """Return x, and make all that uses it wait until `done` is computed. torch.compile may reorder
    what does not depend on each other, such as chunks: it would compute the logits of all chunks
    before the gradients of any."""
    return x.clone()


@after.register_fake
def _(x, done):
    return torch.empty_like(x)


def summed_cross_entropy(logits, vocab_size, targets, training):
    """logits (n, V') float32, whose first vocab_size columns count; targets (n,) → the sum of the
    cross-entropies, and its gradient with respect to the logits, (n, V'), or None when not
    training. Overwrites logits."""
    # The gradient is softmax − one-hot, which is within ±1 and fits float16. Divided by the count,
    # it would be rounded to 0 there.
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
    """The same, for torch.compile; targets (n, 1). It computes powers of 2 and not of e, because a
    GPU has an instruction for them: this saves a fifth of all instructions for a logit."""
    ids = torch.arange(logits.size(1), device=logits.device)
    if logits.size(1) > vocab_size:
        logits = logits.masked_fill(ids >= vocab_size, -math.inf)
    logits, known = logits * (1 / math.log(2)), targets != -1
    highest = logits.amax(-1, keepdim=True)
    lse = highest + (logits - highest).exp2().sum(-1, keepdim=True).log2()
    loss = ((lse - logits.gather(1, targets.clamp(min=0))) * known).sum() * math.log(2)
    lse = lse.masked_fill(~known, math.inf)  # then a row's softmax is 0, and so is its gradient
    return loss, (logits - lse).exp2() - (ids == targets).float() if training else None
