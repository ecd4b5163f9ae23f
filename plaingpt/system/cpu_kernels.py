"""What a CPU does faster than torch has it: attention in bfloat16, dropout, short convolutions.

torch's flash attention for CPUs turns bfloat16 into float32, block by block. Here a few heads at a
time go through plain bfloat16 matmuls, so that their (T, T) weights stay in the cache and never
reach memory. The backward pass computes them again: nothing but q, k and v is kept.
"""

import torch
from numpy.random import SFC64
from torch.compiler import is_compiling

enabled = True  # the memory planner switches these off to plan for a GPU
HEADS_AT_ONCE = 16  # whose weights are in the cache together
LONGEST = 512  # tokens; from about 1,024 on torch's own is as fast, and needs less cache


def faster_than_torch(q):
    """True where `attention` is faster than torch's own, which is mostly so for gradients."""
    return enabled and q.requires_grad and q.device.type == 'cpu' and q.dtype == torch.bfloat16 \
        and q.size(-2) <= LONGEST


def attention(q, k, v, dropout=0.0):
    """Causal attention. q, k, v (B, H, T, D) → (B, H, T, D)."""
    seed = new_seed() if dropout else torch.zeros((), dtype=torch.int64)
    heads = (t.flatten(0, 1).contiguous() for t in (q, k, v))  # 3 × (B·H, T, D)
    return heads_attention(*heads, seed, dropout).view(q.shape)


def keep_bits(like, dropout, random):
    """Which numbers of `like` dropout keeps, as int16: all bits set with probability 1 - dropout,
    else none, so that for numbers of 2 bytes a bitwise and does it.

    random: numpy's SFC64, whose 16 bits for each number come 15 times as fast as a Bernoulli
    number of torch's
    """
    words = torch.from_numpy(random.random_raw(-(-like.numel() // 4)).view('int16'))
    words = words[:like.numel()].bitwise_right_shift_(1)  # -2^14 … 2^14 - 1: no sum overflows
    words += 2**14 - round(dropout * 2**15)
    # Now negative where dropped; the sign, in all bits, is the complement of what is wanted.
    return words.bitwise_right_shift_(15).bitwise_not_().view(like.shape)


def new_seed():
    """From the run's random numbers: a checkpoint that has theirs has these."""
    return torch.randint(2**63 - 1, ())


@torch.library.custom_op('plaingpt::cpu_dropout_mask', mutates_args=())
def dropout_mask(like: torch.Tensor, dropout: float, seed: torch.Tensor) -> torch.Tensor:
    return keep_bits(like, dropout, SFC64(seed.item()))


@dropout_mask.register_fake
def _(like, dropout, seed):
    return torch.empty_like(like, dtype=torch.int16)


class Dropped(torch.autograd.Function):
    """x with its numbers set to 0 with probability `dropout`, the others scaled up to keep the
    mean (Srivastava et al. 2014)."""

    @staticmethod
    def forward(ctx, x, dropout):
        keep = dropout_mask(x, dropout, new_seed())
        ctx.scale = 1 / (1 - dropout)
        ctx.save_for_backward(keep)
        return scaled(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx, grad):
        return scaled(grad, *ctx.saved_tensors, ctx.scale), None


def scaled(x, keep, scale):
    if x.element_size() == 2:
        return (x.view(torch.int16) & keep).view(x.dtype).mul_(scale)
    return x * keep.to(x.dtype).mul_(-scale)  # all bits set are -1


class Dropout(torch.nn.Dropout):
    def forward(self, x):
        # torch.compile makes a fast one of torch's.
        if enabled and self.training and self.p and x.device.type == 'cpu' and not is_compiling():
            return Dropped.apply(x, self.p)
        return super().forward(x)


# -----------------------------------------------------------------------------
# forward and backward, which torch.compile takes as they are


def causal_mask(q):
    T = q.size(1)
    return torch.full((T, T), float('-inf'), dtype=q.dtype).triu_(1)


def attention_weights(q, k, mask):
    """q, k (n, T, D), mask (T, T) → softmax of the scaled scores, (n, T, T)."""
    scores = torch.baddbmm(mask.expand(len(q), -1, -1), q, k.mT, alpha=q.size(-1) ** -0.5)
    return torch.softmax(scores, dim=-1)


@torch.library.custom_op('plaingpt::cpu_attention', mutates_args=())
def heads_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: torch.Tensor,
                    dropout: float) -> torch.Tensor:
    y, mask = torch.empty_like(q), causal_mask(q)
    random = SFC64(seed.item())
    parts = (t.split(HEADS_AT_ONCE) for t in (q, k, v, y))
    for q_i, k_i, v_i, y_i in zip(*parts, strict=True):
        p = attention_weights(q_i, k_i, mask)
        if dropout:
            p.view(torch.int16).bitwise_and_(keep_bits(p, dropout, random))
        torch.bmm(p, v_i, out=y_i)
    return y.mul_(1 / (1 - dropout)) if dropout else y


@torch.library.custom_op('plaingpt::cpu_attention_backward', mutates_args=())
def heads_attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
                             v: torch.Tensor, seed: torch.Tensor, dropout: float
                             ) -> list[torch.Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    mask, scale = causal_mask(q), q.size(-1) ** -0.5
    random = SFC64(seed.item())
    grad = grad / (1 - dropout) if dropout else grad.contiguous()
    parts = (t.split(HEADS_AT_ONCE) for t in (grad, q, k, v, dq, dk, dv))
    for grad_i, q_i, k_i, v_i, dq_i, dk_i, dv_i in zip(*parts, strict=True):
        p = attention_weights(q_i, k_i, mask)
        dp = torch.bmm(grad_i, v_i.mT)
        dropped = p
        if dropout:
            keep = keep_bits(p, dropout, random)  # the same as in the forward pass
            dropped = (p.view(torch.int16) & keep).view(p.dtype)
            dp.view(torch.int16).bitwise_and_(keep)
        torch.bmm(dropped.mT, grad_i, out=dv_i)
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        torch.baddbmm(dq_i, ds, k_i, beta=0, alpha=scale, out=dq_i)
        torch.baddbmm(dk_i, ds.mT, q_i, beta=0, alpha=scale, out=dk_i)
    return [dq, dk, dv]


@heads_attention.register_fake
def _(q, k, v, seed, dropout):
    return torch.empty_like(q)


@heads_attention_backward.register_fake
def _(grad, q, k, v, seed, dropout):
    return [torch.empty_like(t) for t in (q, k, v)]


def keep_inputs(ctx, inputs, output):
    *tensors, ctx.dropout = inputs
    ctx.save_for_backward(*tensors)


def backward(ctx, grad):
    return *heads_attention_backward(grad, *ctx.saved_tensors, ctx.dropout), None, None


heads_attention.register_autograd(backward, setup_context=keep_inputs)


# -----------------------------------------------------------------------------
# short convolutions, faster on any device than torch's depthwise ones


def short_conv(x, weight):
    """x (B, T, C), weight (K, C) → y (B, T, C), y_t = x_t + Σ_k weight_k · x_(t-k), 0 ≤ k < K."""
    if is_compiling():  # which fuses the plain formula, and its backward pass
        K, T = len(weight), x.size(1)
        earlier = torch.nn.functional.pad(x, (0, 0, K - 1, 0))
        weight = weight.to(x.dtype)
        return x + sum(weight[k] * earlier[:, K - 1 - k:K - 1 - k + T] for k in range(K))
    return ShortConvolution.apply(x, weight)


class ShortConvolution(torch.autograd.Function):
    """short_conv that keeps nothing but x, and makes no tensor a shift."""

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
