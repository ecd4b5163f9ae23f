"""The model's own loss with less memory: `model.loss_in_chunks = loss_in_chunks`."""

import torch
from torch.compiler import is_compiling
from torch.func import grad_and_value

MIN_LOGITS = 2**23  # fewer logits are computed at once: they take 32 MiB in float32
CPU_CHUNK = 256  # tokens
CHUNK_SIZES = 2048, 4096, 8192  # tokens, on other devices


def chunk_size(tokens, vocab_size, device_type):
    """The number of tokens whose logits are in memory at once.

    On a GPU, it is one of CHUNK_SIZES, at most half of the tokens: each chunk reads the head's
    weight and accumulates its gradient, which takes as long as about 500 tokens. On a CPU, it is
    small, so that the logits stay in the cache."""
    if tokens * vocab_size <= MIN_LOGITS:
        return tokens
    if device_type == 'cpu':
        return CPU_CHUNK
    return max(size for size in CHUNK_SIZES if 2 * size <= tokens or size == CHUNK_SIZES[0])


def loss_in_chunks(model, x, targets, chunk=None):
    """model.loss(model.logits(x), targets), without all logits in memory at once. The forward pass
    computes logits, loss and gradients of one chunk of tokens at a time, so nothing is recomputed.

    x (…, C); targets (…); chunk: tokens at a time, or None for chunk_size(). model.loss must be a
    sum over the tokens. Matmuls run in autocast's dtype."""
    x, targets = x.flatten(0, -2), targets.flatten()  # (N, C), (N,)
    weight = model.lm_head.weight
    chunk = chunk or chunk_size(len(x), model.config.vocab_size, x.device.type)
    if chunk >= len(x):
        return model.loss(model.logits(x), targets)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

    def loss_of(x_i, w, targets_i):
        return model.loss(model.logits(x_i, w), targets_i)

    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        w = weight.to(dtype)
        losses = [loss_of(x_i.to(dtype), w, targets_i)
                  for x_i, targets_i in zip(x.split(chunk), targets.split(chunk), strict=True)]
        return torch.stack(losses).sum()
    return LossInChunks.apply(loss_of, chunk, dtype, targets, x, weight)


class LossInChunks(torch.autograd.Function):
    """Σ loss_of(x_i, weight, targets_i) over chunks. Backward multiplies gradients that forward has
    computed."""

    @staticmethod
    def forward(ctx, loss_of, chunk, dtype, targets, x, weight):
        w = weight.to(dtype)
        loss = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(x, dtype=dtype)
        grad_w = torch.zeros_like(weight)
        computed = []  # results of the previous chunk
        for i in range(0, len(x), chunk):
            x_i = x[i:i + chunk].to(dtype)  # (n, C)
            if computed and is_compiling():
                x_i = depend_on(x_i, computed)
            (grad_x_i, grad_w_i), loss_i = gradients_and_loss(
                loss_of, x_i, w, targets[i:i + chunk])
            loss += loss_i
            grad_x[i:i + chunk] = grad_x_i
            grad_w += grad_w_i
            computed = [loss, grad_x_i, grad_w]
        ctx.save_for_backward(grad_x, grad_w)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w = ctx.saved_tensors
        grad_loss = grad_loss.view(1)  # a scalar would make float32 × bfloat16 bfloat16
        return None, None, None, None, grad_x * grad_loss, grad_w * grad_loss


def gradients_and_loss(loss_of, x, weight, targets):
    """→ ((gradient of x, gradient of the weight), loss)"""
    if is_compiling():  # torch.compile does not trace torch.autograd.grad, which is a bit faster
        return grad_and_value(loss_of, argnums=(0, 1))(x, weight, targets)
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = loss_of(x, weight, targets)
        return torch.autograd.grad(loss, (x, weight)), loss.detach()


@torch.library.custom_op('plaingpt::depend_on', mutates_args=())
def depend_on(x: torch.Tensor, computed: list[torch.Tensor]) -> torch.Tensor:
    """Identity with a fake dependency on `computed`, which keeps the chunks in order. Without it,
    torch.compile may compute the logits of all chunks before the gradients of the first."""
    return x.clone()


@depend_on.register_fake
def _(x, computed):
    return torch.empty_like(x)
