"""What a CPU does faster than torch has it: attention in bfloat16 and attention with dropout,
dropout, squared ReLU, short convolutions.

torch's flash attention for CPUs turns bfloat16 into float32, block by block, and knows no dropout.
Here a few heads at a time go through plain matmuls, so that their (T, T) weights stay in the cache
and never reach memory. The backward pass computes them again: nothing but q, k and v is kept.
"""

import torch
import torch.nn.functional as F
from numpy.random import SFC64
from torch.compiler import is_compiling

enabled = True  # the memory planner switches all but convolutions off to plan for a GPU
HEADS_AT_ONCE = 16  # whose weights are in the cache together
ROWS_AT_ONCE = 128  # of float32 weights, so that most of what comes later is never computed
LONGEST = 512  # tokens; from about 1,024 on torch's own is as fast, and needs less cache
INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes of a number → the type that has its bits


def faster_than_torch(q, dropout):
    """True where `attention` is faster than torch's own, which is mostly so for gradients."""
    return enabled and q.requires_grad and q.device.type == 'cpu' and q.size(-2) <= LONGEST \
        and (q.dtype == torch.bfloat16 or (q.dtype == torch.float32 and dropout > 0))


def faster_in_eager(x):
    """True where the kernels below are faster than torch's. torch.compile fuses plain formulas."""
    return enabled and x.device.type == 'cpu' and not is_compiling()


def attention(q, k, v, dropout=0.0):
    """Causal attention. q, k, v (B, H, T, D) → (B, H, T, D)."""
    seed = new_seed() if dropout else torch.zeros((), dtype=torch.int64)
    heads = (t.flatten(0, 1).contiguous() for t in (q, k, v))  # 3 × (B·H, T, D)
    return heads_attention(*heads, seed, dropout).view(q.shape)


def keep_bits(shape, dtype, dropout, random):
    """Which numbers dropout keeps, as integers: all bits set with probability 1 - dropout, else
    none, so that a bitwise and with numbers of as many bytes does it.

    random: numpy's SFC64, whose bits come 15 times as fast as a Bernoulli number of torch's
    """
    bits = torch.iinfo(dtype).bits
    words = torch.from_numpy(random.random_raw(-(-shape.numel() * bits // 64)).view(f'int{bits}'))
    words = words[:shape.numel()].bitwise_right_shift_(1)  # of 16: -2^14 … 2^14 - 1, which
    words += 2**(bits - 2) - round(dropout * 2**(bits - 1))  # no sum makes overflow
    # Now negative where dropped; the sign, in all bits, is the complement of what is wanted.
    return words.bitwise_right_shift_(bits - 1).bitwise_not_().view(shape)


def dropped(x, keep):
    return (x.view(keep.dtype) & keep).view(x.dtype)


def new_seed():
    """From the run's random numbers: a checkpoint that has theirs has these."""
    return torch.randint(2**63 - 1, ())


@torch.library.custom_op('plaingpt::cpu_dropout_mask', mutates_args=())
def dropout_mask(like: torch.Tensor, dropout: float, seed: torch.Tensor) -> torch.Tensor:
    return keep_bits(like.shape, torch.int16, dropout, SFC64(seed.item()))


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
        return dropped(x, keep).mul_(scale)
    return x * keep.to(x.dtype).mul_(-scale)  # all bits set are -1


class Dropout(torch.nn.Dropout):
    def forward(self, x):
        if self.training and self.p and faster_in_eager(x):
            return Dropped.apply(x, self.p)
        return super().forward(x)


# -----------------------------------------------------------------------------
# forward and backward, which torch.compile takes as they are


def causal_mask(q):
    T = q.size(1)
    return torch.full((T, T), float('-inf'), dtype=q.dtype).triu_(1)


def blocks(q):
    """Yield the parts of the weights (n, T, T) that are computed together, as slices: (heads, rows,
    columns up to the last row). The last rows, which have all columns, are the first of a head."""
    n, T, _ = q.shape
    rows = ROWS_AT_ONCE if q.dtype == torch.float32 else T
    for head in range(0, n, HEADS_AT_ONCE):
        for end in range(T, 0, -rows):
            yield slice(head, head + HEADS_AT_ONCE), slice(max(0, end - rows), end), slice(end)


def attention_weights(q, k, mask):
    """q (n, R, D), k (n, S, D), mask (R, S) → softmax of the scaled scores, (n, R, S)."""
    scores = torch.baddbmm(mask.expand(len(q), -1, -1), q, k.mT, alpha=q.size(-1) ** -0.5)
    return torch.softmax(scores, dim=-1)


@torch.library.custom_op('plaingpt::cpu_attention', mutates_args=())
def heads_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: torch.Tensor,
                    dropout: float) -> torch.Tensor:
    y, mask = torch.empty_like(q), causal_mask(q)
    random = SFC64(seed.item())
    for heads, rows, seen in blocks(q):
        p = attention_weights(q[heads, rows], k[heads, seen], mask[rows, seen])
        if dropout:
            p = dropped(p, keep_bits(p.shape, INTEGERS[p.element_size()], dropout, random))
        torch.bmm(p, v[heads, seen], out=y[heads, rows])
    return y.mul_(1 / (1 - dropout)) if dropout else y


@torch.library.custom_op('plaingpt::cpu_attention_backward', mutates_args=())
def heads_attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
                             v: torch.Tensor, seed: torch.Tensor, dropout: float
                             ) -> list[torch.Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    mask, scale = causal_mask(q), q.size(-1) ** -0.5
    random = SFC64(seed.item())
    grad = grad / (1 - dropout) if dropout else grad.contiguous()
    for heads, rows, seen in blocks(q):
        grad_i, q_i, k_i, v_i = grad[heads, rows], q[heads, rows], k[heads, seen], v[heads, seen]
        p = attention_weights(q_i, k_i, mask[rows, seen])
        dp = torch.bmm(grad_i, v_i.mT)
        kept = p
        if dropout:  # the same as in the forward pass
            keep = keep_bits(p.shape, INTEGERS[p.element_size()], dropout, random)
            kept, dp = dropped(p, keep), dropped(dp, keep)
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        more = 0 if seen.stop == q.size(1) else 1  # the first rows write, others add
        dv[heads, seen].baddbmm_(kept.mT, grad_i, beta=more)
        dk[heads, seen].baddbmm_(ds.mT, q_i, beta=more, alpha=scale)
        dq[heads, rows].baddbmm_(ds, k_i, beta=0, alpha=scale)
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
# layers whose gradient takes fewer passes over memory than autograd's


def relu2(x):
    """max(x, 0)² (So et al. 2021, "Primer")."""
    return SquaredReLU.apply(x) if faster_in_eager(x) else F.relu(x).square()


class SquaredReLU(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x):
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx, grad):
        positive, = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), positive, grad, value=2)


def rms_norm(x, weight, eps):
    """x (…, C) over its root mean square, times weight (C,) if it is not None (Zhang and Sennrich
    2019)."""
    if weight is None:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    if faster_in_eager(x) and x.dtype == weight.dtype and x.element_size() >= 4:
        return RootMeanSquareNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)  # fused kernels want one type


class RootMeanSquareNorm(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, eps):
        lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = lengths.square_().div_(len(weight)).add_(eps).rsqrt_()  # (…, 1)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, grad):
        normed, scale, weight = ctx.saved_tensors
        product = (grad * normed).flatten(0, -2)  # (N, C): both gradients are sums of it
        along = product.mv(weight).view(scale.shape).div_(-len(weight))
        return torch.addcmul(grad * weight, normed, along).mul_(scale), product.sum(0), None


# -----------------------------------------------------------------------------
# short convolutions, faster on any device than torch's depthwise ones


def short_conv(x, weight, ages=None):
    """x (B, T, C), weight (K, C) → y (B, T, C), y_t = x_t + Σ_k weight_k · x_(t-k), 0 ≤ k < K.
    ages (B, n): of the last n tokens, how many of their document are before them; no others count.
    """
    if ages is None and not is_compiling():
        return ShortConvolution.apply(x, weight)
    K, T = len(weight), x.size(1)  # torch.compile fuses this, and its backward pass
    earlier, weight = F.pad(x, (0, 0, K - 1, 0)), weight.to(x.dtype)
    shifted = [earlier[:, K - 1 - k:K - 1 - k + T] for k in range(K)]
    if ages is not None:
        ages = F.pad(ages, (T - ages.size(1), 0), value=K)[..., None]  # (B, T, 1)
        shifted = [t.masked_fill(ages < k, 0.0) for k, t in enumerate(shifted)]
    return x + sum(weight[k] * t for k, t in enumerate(shifted))


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
