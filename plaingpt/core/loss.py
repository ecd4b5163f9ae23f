"""GPT.loss without all logits in memory at once: `use_chunked_loss(model)`."""

from functools import partial

import torch

CACHED_LOGITS = 2**20  # 4 MiB in float32, which fits into the caches of two CPU cores
MIN_CPU_CHUNK = 256  # tokens; below this, overhead outweighs the gain from the cache
MIN_LOGITS = 2**23  # a GPU computes up to this many logits at once: 32 MiB in float32
CHUNK_SIZES = 2048, 4096, 8192  # tokens, on a GPU


def use_chunked_loss(model, compile=False):
    """Make GPT.forward compute its loss with loss_in_chunks; compile: with torch.compile."""
    model.loss_in_chunks = loss_in_chunks
    if compile:  # torch.autograd.grad is not traced: chunks are compiled instead
        model.loss_in_chunks = partial(loss_in_chunks, loss_of=torch.compile(loss_of_chunk),
                                       sum_of=torch.compiler.disable(sum_of_chunks))


def chunk_size(tokens, vocab_size, device_type):
    """The number of tokens whose logits are in memory at once.

    On a CPU, as many as fit into the cache. On a GPU, all tokens if their logits are few, else the
    largest of CHUNK_SIZES that makes two chunks or more (the smallest if none does): each chunk
    reads the head's weight and accumulates its gradient, which takes as long as about 500 tokens.
    """
    if device_type == 'cpu':
        return min(tokens, max(MIN_CPU_CHUNK, CACHED_LOGITS // vocab_size))
    if tokens * vocab_size <= MIN_LOGITS:
        return tokens
    return max(size for size in CHUNK_SIZES if 2 * size <= tokens or size == CHUNK_SIZES[0])


def loss_of_chunk(model, x, targets):
    """x (n, C), targets (n,) → the sum of the losses of n tokens."""
    return model.loss(model.logits(x), targets)


def token_losses(model, logits, targets):
    """GPT.loss of each token: logits (T, V), targets (T,) → (T,) in nats."""
    return torch.stack([model.loss(logits[i:i + 1], targets[i:i + 1]) for i in range(len(targets))])


def sum_of_chunks(model, x, targets, chunk, loss_of):
    if torch.is_grad_enabled():
        parameters = [p for name, p in model.named_parameters()
                      if p.requires_grad and not name.startswith('transformer.h.')]
        return LossInChunks.apply(partial(loss_of, model), chunk, targets, x, *parameters)
    losses = [loss_of(model, x_i, targets_i)
              for x_i, targets_i in zip(x.split(chunk), targets.split(chunk), strict=True)]
    return torch.stack(losses).sum()


def loss_in_chunks(model, x, targets, chunk=None, loss_of=loss_of_chunk, sum_of=sum_of_chunks):
    """model.loss(model.logits(x), targets), computed for one chunk of tokens at a time. In
    training, the forward pass also computes the gradients of a chunk, so that the backward pass
    recomputes nothing.

    x (B, T, C); targets (B, T); chunk: number of tokens, or None for chunk_size()"""
    x, targets = x.flatten(0, -2), targets.flatten()  # (N, C), (N,)
    chunk = chunk or chunk_size(len(x), model.config.vocab_size, x.device.type)
    if chunk >= len(x):
        return loss_of(model, x, targets)
    return sum_of(model, x, targets, chunk, loss_of)


class LossInChunks(torch.autograd.Function):
    """Σ loss_of(x_i, targets_i) over chunks. The backward pass scales gradients with respect to x
    and the parameters, which the forward pass has computed."""

    @staticmethod
    def forward(ctx, loss_of, chunk, targets, x, *parameters):
        loss = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(x)
        gradients = [None] * len(parameters)  # None: the loss does not depend on it
        for i in range(0, len(x), chunk):
            with torch.enable_grad():
                x_i = x[i:i + chunk].detach().requires_grad_()  # (n, C)
                loss_i = loss_of(x_i, targets[i:i + chunk])
                try:
                    grad_x[i:i + chunk], *grads = torch.autograd.grad(
                        loss_i, (x_i, *parameters), allow_unused=True)
                except RuntimeError as error:
                    error.add_note('GPT.loss may depend on its arguments and the head alone; add '
                                   'other terms to the loss in GPT.forward')
                    raise
            loss += loss_i.detach()
            for k, grad in enumerate(grads):
                if gradients[k] is None:
                    gradients[k] = grad
                elif grad is not None:
                    gradients[k] += grad
        ctx.save_for_backward(grad_x, *gradients)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_loss = grad_loss.view(1)  # a scalar would make float32 × bfloat16 bfloat16
        gradients = [None if grad is None else grad * grad_loss for grad in ctx.saved_tensors]
        return None, None, None, *gradients
