"""A memory-efficient loss for GPT.forward: `model.loss_function = chunked_cross_entropy`."""

import math

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

CHUNK_SIZES = 2048, 4096, 8192  # tokens
CACHED_LOGITS = 2**20  # 4 MB in float32, which fits into the caches of two CPU cores
MIN_CACHED_CHUNK = 128  # tokens; below this, overhead outweighs the gain from the cache
MAX_PADDING_SHARE = 1 / 16  # padding of up to this share of the vocabulary is computed too


def chunk_size(chunk, tokens, vocab_size, device_type):
    """The number of tokens whose logits are in memory at once. chunk: a number or 'auto'

    On a GPU, 'auto' is one of CHUNK_SIZES, at most half of the tokens: each chunk reads the head's
    weight and accumulates its gradient, which takes as long as about 500 tokens. On a CPU, 'auto'
    is the number of tokens whose logits fit into the cache, unless that is below MIN_CACHED_CHUNK.
    """
    if chunk != 'auto':
        return chunk
    cached_tokens = CACHED_LOGITS // vocab_size
    if device_type == 'cpu' and cached_tokens >= MIN_CACHED_CHUNK:
        return cached_tokens
    return max(size for size in CHUNK_SIZES if 2 * size <= tokens or size == CHUNK_SIZES[0])


def chunked_cross_entropy(x, weight, vocab_size, targets, chunk='auto'):
    """F.cross_entropy(x @ weightᵀ, targets) without all logits in memory at once. The forward pass
    computes logits, loss and gradients of one chunk at a time, so nothing is recomputed.

    x (…, C); weight (V', C), whose rows after V = vocab_size are padding; targets (…), -1 to
    ignore; chunk: rows at a time, or 'auto'. Returns the mean in nats, in float32; 0 if all targets
    are ignored. Matmuls run in autocast's dtype, softmax and sums in float32.

    torch's F.linear_cross_entropy does the same, but needs torch 2.13 and breaks compiled graphs.
    """
    if len(weight) - vocab_size > vocab_size * MAX_PADDING_SHARE:
        weight = weight[:vocab_size]
    training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chunk = chunk_size(chunk, targets.numel(), vocab_size, x.device.type)
    return ChunkedCrossEntropy.apply(x.flatten(0, -2), weight, vocab_size, targets.flatten(),
                                     chunk, training)


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, vocab_size, targets, chunk, training):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        w = weight.to(dtype)
        loss = torch.zeros((), device=x.device)
        computed = []  # results of the previous chunk
        if training:
            grad_x = torch.empty_like(x, dtype=dtype)
            grad_w = torch.zeros_like(weight)
        with torch.autocast(device, enabled=False):
            for i in range(0, len(x), chunk):
                x_i = x[i:i + chunk].to(dtype)  # (n, C)
                if computed and is_compiling():
                    x_i = depend_on(x_i, computed)
                loss_i, grad = summed_cross_entropy(F.linear(x_i, w).float(), vocab_size,
                                                    targets[i:i + chunk], training)
                loss += loss_i
                computed = [loss]
                if training:
                    grad = grad.to(dtype)
                    grad_x[i:i + chunk] = grad_x_i = grad @ w
                    grad_w += grad.t() @ x_i
                    computed += [grad_x_i, grad_w]
                    del grad  # free its memory for the next chunk
        count = (targets != -1).sum().clamp(min=1)  # at least 1, so that without targets loss is 0
        if training:
            ctx.save_for_backward(grad_x, grad_w, count)
        return loss / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w, count = ctx.saved_tensors
        scale = (grad_loss / count).view(1)  # a scalar would make float32 × bfloat16 bfloat16
        return grad_x * scale, grad_w * scale, None, None, None, None


@torch.library.custom_op('plaingpt::depend_on', mutates_args=())
def depend_on(x: torch.Tensor, computed: list[torch.Tensor]) -> torch.Tensor:
    """Identity with a fake dependency on `computed`, which keeps the chunks in order. Without it,
    torch.compile may compute the logits of all chunks before the gradients of the first."""
    return x.clone()


@depend_on.register_fake
def _(x, computed):
    return torch.empty_like(x)


def summed_cross_entropy(logits, vocab_size, targets, training):
    """Return the sum of the cross-entropies and its gradient with respect to the logits, (n, V'),
    or None for the gradient if not training. Overwrites logits.

    logits (n, V') float32, whose columns after vocab_size are padding; targets (n,)"""
    # The gradient is softmax − one-hot. It is within ±1 and fits float16. Divided by the number of
    # targets, it would underflow.
    if is_compiling():  # compiled to one kernel; in eager mode it would take twice as long
        return fused_cross_entropy(logits, vocab_size, targets[:, None], training)
    is_counted = targets[:, None] != -1  # (n, 1)
    targets = targets[:, None].clamp(min=0)  # (n, 1)
    if logits.size(1) > vocab_size:
        logits[:, vocab_size:] = -math.inf  # excluded from the softmax; their gradient is 0
    logp = F.log_softmax(logits, dim=-1)
    del logits  # large
    loss = (-logp.gather(1, targets) * is_counted).sum()
    if not training:
        return loss, None
    minus_one = -torch.ones_like(targets, dtype=torch.float)
    grad = logp.exp_().scatter_add_(1, targets, minus_one).mul_(is_counted)
    return loss, grad


def fused_cross_entropy(logits, vocab_size, targets, training):
    """The same for torch.compile; targets (n, 1). It uses powers of 2 instead of e, for which a GPU
    has an instruction: this saves a fifth of the instructions per logit."""
    ids = torch.arange(logits.size(1), device=logits.device)
    if logits.size(1) > vocab_size:
        logits = logits.masked_fill(ids >= vocab_size, -math.inf)
    logits = logits * (1 / math.log(2))
    is_counted = targets != -1
    max_logit = logits.amax(-1, keepdim=True)
    lse = max_logit + (logits - max_logit).exp2().sum(-1, keepdim=True).log2()
    loss = ((lse - logits.gather(1, targets.clamp(min=0))) * is_counted).sum() * math.log(2)
    if not training:
        return loss, None
    lse = lse.masked_fill(~is_counted, math.inf)  # makes the row's softmax and gradient 0
    return loss, (logits - lse).exp2() - (ids == targets).float()
