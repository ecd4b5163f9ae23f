"""CPU kernels that are faster than torch's: causal attention in bfloat16, squared ReLU."""

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

enabled = True  # the memory planner switches these off to plan for a GPU
HEADS_AT_ONCE = 16  # whose weights are in the cache together
LONGEST = 256  # tokens; from 384 to 1,024 on, as the CPU may be, torch's own is faster


def faster_attention(q):
    """Whether to take `cpu_attention`: it gains most in the backward pass."""
    return enabled and q.requires_grad and q.device.type == 'cpu' \
        and q.dtype == torch.bfloat16 and q.size(-2) <= LONGEST


# -----------------------------------------------------------------------------
# Attention, forward and backward; torch.compile takes both as they are. torch's flash attention for
# CPUs turns bfloat16 into float32, block by block. Here a few heads at a time go through plain
# matmuls, so that their (T, T) weights stay in the cache and never reach memory. The backward pass
# computes them again: nothing but q, k and v is kept.


def cpu_attention(q, k, v):
    """Causal attention. q, k, v (B, H, T, D) → (B, H, T, D)."""
    return heads_attention(*(t.flatten(0, 1).contiguous() for t in (q, k, v))).view(q.shape)


def attention_weights(q, k):
    """q, k (n, T, D) → softmax of the scaled scores, (n, T, T)."""
    T, D = q.shape[1:]
    future = torch.full((T, T), float('-inf'), dtype=q.dtype).triu_(1)
    scores = torch.baddbmm(future.expand(len(q), -1, -1), q, k.mT, alpha=D ** -0.5)
    return torch.softmax(scores, dim=-1)


def head_chunks(*tensors):
    """Yield tuples of chunks of HEADS_AT_ONCE heads of tensors (B·H, T, D)."""
    return zip(*(t.split(HEADS_AT_ONCE) for t in tensors), strict=True)


@torch.library.custom_op('plaingpt::cpu_attention', mutates_args=())
def heads_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(q)
    for q_i, k_i, v_i, y_i in head_chunks(q, k, v, y):
        torch.bmm(attention_weights(q_i, k_i), v_i, out=y_i)
    return y


@torch.library.custom_op('plaingpt::cpu_attention_backward', mutates_args=())
def heads_attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
                             ) -> list[torch.Tensor]:
    gradients, scale = [torch.empty_like(t) for t in (q, k, v)], q.size(-1) ** -0.5
    for grad_i, q_i, k_i, v_i, dq, dk, dv in head_chunks(grad.contiguous(), q, k, v, *gradients):
        p = attention_weights(q_i, k_i)
        ds = torch._softmax_backward_data(torch.bmm(grad_i, v_i.mT), p, -1, p.dtype)
        dq.baddbmm_(ds, k_i, beta=0, alpha=scale)
        dk.baddbmm_(ds.mT, q_i, beta=0, alpha=scale)
        torch.bmm(p.mT, grad_i, out=dv)
    return gradients


@heads_attention.register_fake
def _(q, k, v):
    return torch.empty_like(q)


@heads_attention_backward.register_fake
def _(grad, q, k, v):
    return [torch.empty_like(t) for t in (q, k, v)]


heads_attention.register_autograd(
    lambda ctx, grad: tuple(heads_attention_backward(grad, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


# -----------------------------------------------------------------------------


def relu2(x):
    """max(x, 0)² (So et al. 2021, "Primer")."""
    if is_compiling():  # it fuses all of this, and its backward pass
        x = F.relu(x)
        return x * x  # of square() CUDA's autocast would make float32
    return SquaredReLU.apply(x)


class SquaredReLU(torch.autograd.Function):
    """Its gradient takes fewer passes over memory than autograd's."""

    @staticmethod
    def forward(ctx, x):
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad):
        positive, = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), positive, grad, value=2)
