"""From prompts to what the model writes after them, token by token.

The keys and values of the tokens so far are kept (a cache), so a new token costs one token's
work. A context that has grown to block_size tokens is cut to its last half, which is read again
at once; then it grows again. So each token is chosen with between half of block_size and all of
it in view, and the reading costs less than one token's work for each token written.
"""

import math
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F

from plaingpt.system.devices import DTYPES, autocast, cpu_has_bfloat16


def generate(model, prompts, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None,
             min_p=None, repetition_penalty=1.0, end_of_text=None, generators=None,
             on_token=None, use_cache=True, compiled=None):
    """Let `model` go on from each of `prompts`, lists of ids of any lengths → the new ids of each.

    temperature: 0 takes the likeliest token; see `sample` for top_k, top_p, min_p
    repetition_penalty: see `penalize`
    end_of_text: the id that ends a row; it is not part of what is returned
    generators: a torch.Generator for each row, so that its text does not depend on its neighbours
    on_token: called with (row, id) for each new token; True ends the row
    use_cache: False computes everything anew for each token, which is slow and gives the same
    compiled: model.hidden through torch.compile, for the steps of one token
    """
    device = model.transformer.wte.weight.device
    block_size, vocab_size = model.config.block_size, model.config.vocab_size
    rows = [list(prompt) for prompt in prompts]
    running = set(range(len(rows)))
    new = [[] for _ in rows]
    cache = starts = None
    seen = None
    if repetition_penalty != 1:
        seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        for i, row in enumerate(rows):
            seen[i, row] = True
        seen = seen.to(device)
    with torch.inference_mode():
        for step in range(max_new_tokens):
            moved, starts = starts, [context_start(len(row), block_size) for row in rows]
            if starts != moved or not use_cache:
                contexts = [row[start:] for row, start in zip(rows, starts, strict=True)]
                longest = max(map(len, contexts))
                columns = block_size if compiled \
                    else min(block_size, longest + max_new_tokens - step - 1)
                cache = Cache(model, [longest - len(context) for context in contexts], columns,
                              device, static=compiled is not None)
                idx = torch.tensor([[0] * (longest - len(context)) + context
                                    for context in contexts], device=device)  # (B, T)
            cache.advance(idx.size(1))
            hidden = compiled if compiled and idx.size(1) == 1 else model.hidden
            logits = model.logits(hidden(idx, cache)[:, -1]).float()  # (B, V)
            if seen is not None:
                logits = penalize(logits, seen, repetition_penalty)
            noise = torch.rand(len(rows), 1, dtype=torch.double) if generators is None else \
                torch.stack([torch.rand(1, dtype=torch.double, generator=g) for g in generators])
            idx = sample(logits, temperature, top_k, top_p, min_p, noise)  # (B, 1)
            if seen is not None:
                seen.scatter_(1, idx, True)
            for i, token in enumerate(idx.flatten().tolist()):
                rows[i].append(token)
                if i not in running:
                    continue
                if token == end_of_text:
                    running.discard(i)
                    continue
                new[i].append(token)
                if on_token and on_token(i, token):
                    running.discard(i)
            if not running:
                break
    return new


def context_start(length, block_size):
    """Where the context of the next token begins in a text of `length` tokens: 0, and moved on by
    half of block_size each time that the context would be longer than block_size."""
    half = max(1, block_size // 2)
    return max(0, math.ceil((length - block_size) / half)) * half


class Cache:
    """The keys and values of the tokens so far, in each layer, for up to `columns` of them.

    All rows of a batch end at the same column; the first skip[i] columns of row i are empty, and
    no token looks there. static: shapes never change and no number decides what is computed, as
    compiled code likes it; it then looks at all columns, through a mask.
    """

    def __init__(self, model, skip, columns, device, static=False):
        c = model.config
        self.size = (len(skip), c.n_head, columns, c.n_embd // c.n_head)  # (B, H, columns, D)
        self.skip = torch.tensor(skip, device=device)[:, None] if any(skip) else None  # (B, 1)
        self.layers = [LayerCache(self) for _ in range(c.n_layer)]
        self.device, self.static = device, static
        self.end = 0

    def advance(self, T):
        """Make room for the next T tokens: their columns, their positions, and the mask of what
        they may look at, (T, columns so far) or (B, 1, T, columns so far)."""
        begin, self.end = self.end, self.end + T
        self.new = self.positions = slice(begin, self.end)
        self.filled, self.mask = slice(self.end), None
        if T == 1 and self.skip is None and not self.static:
            return
        columns = torch.arange(self.size[2] if self.static else self.end, device=self.device)
        new = columns[begin:self.end]  # (T,)
        self.mask = columns <= new[:, None]
        if self.static:
            self.new, self.positions, self.filled = new, new, slice(None)
        if self.skip is not None:
            # The empty columns see themselves: a softmax over nothing is not a number.
            self.mask = self.mask & (columns >= self.skip[:, :, None]) | (columns == new[:, None])
            self.mask = self.mask[:, None]
            self.positions = (new - self.skip).clamp(min=0)  # (B, T)


class LayerCache:
    """One layer's part of a Cache."""

    def __init__(self, cache):
        self.cache = cache
        self.keys = self.values = None

    def extend(self, k, v):
        """k, v (B, H, T, D) of the new tokens → those of all tokens, and the mask."""
        cache = self.cache
        if self.keys is None:
            self.keys, self.values = k.new_zeros(cache.size), v.new_zeros(cache.size)
        self.keys[:, :, cache.new] = k
        self.values[:, :, cache.new] = v
        return self.keys[:, :, cache.filled], self.values[:, :, cache.filled], cache.mask


# -----------------------------------------------------------------------------
# the next token


def sample(logits, temperature=1.0, top_k=None, top_p=None, min_p=None, noise=None):
    """logits (B, V) → one token each (B, 1).

    top_k: choose among this many (Fan et al. 2018); top_p: among the fewest whose probabilities
    reach this (Holtzman et al. 2019); min_p: among those at least this share as probable as the
    likeliest (Nguyen et al. 2024). noise (B, 1): float64 from [0, 1).
    """
    if temperature < torch.finfo(torch.float32).tiny:  # 0, or so low that float32 has it as 0
        return logits.argmax(dim=-1, keepdim=True)
    ids = None
    count = min(top_k or logits.size(-1), logits.size(-1))
    if count < logits.size(-1) or (top_p and top_p < 1):
        logits, ids = logits.topk(count)  # likeliest first
    # The largest becomes 0, so that no temperature, however low, makes it infinite.
    probs = F.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
    if top_p and top_p < 1:
        reached_before = probs.cumsum(dim=-1) - probs >= top_p  # not the first: one always stays
        probs = probs.masked_fill(reached_before, 0)
    if min_p:
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0)
    chosen = pick(probs, noise)
    return chosen if ids is None else ids.gather(1, chosen)


def pick(probs, noise=None):
    """probs (B, N), which need not sum to 1; noise (B, 1) from [0, 1) → where the cumulative
    probability passes the noise's share of the whole, (B, 1)."""
    if noise is None:
        noise = torch.rand(len(probs), 1, dtype=torch.double)
    double = torch.float32 if probs.device.type == 'mps' else torch.double  # which has no float64
    cumulative = probs.cumsum(dim=-1, dtype=double)
    mark = noise.to(probs.device, double) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, mark, right=True).clamp(max=probs.size(-1) - 1)


def penalize(logits, seen, penalty):
    """Make tokens that are there already less likely (more, below 1): Keskar et al. 2019, §4.1.
    logits (B, V), seen (B, V) bool."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


# -----------------------------------------------------------------------------
# tokens → text


# -----------------------------------------------------------------------------
# weights laid out for generation


def for_generation(model, device, dtype, pack=True):
    """Lay a model's matrices out in `dtype` for generation alone, in place; the rest stays float32.

    pack: on a CPU, as oneDNN likes them, which torch.compile does not understand
    → the context to generate in. After this the model cannot be trained or saved.
    """
    packed = pack and device.type == 'cpu' and torch.backends.mkldnn.is_available() \
        and hasattr(torch.ops.mkldnn, '_linear_pointwise') \
        and (dtype == 'float32' or (dtype == 'bfloat16' and cpu_has_bfloat16()))
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                # A new parameter: a tied embedding keeps the old one, and its precision.
                child.weight = nn.Parameter(child.weight.detach().to(DTYPES[dtype]),
                                            requires_grad=False)
                if packed:
                    setattr(parent, name, PackedLinear(child))
    return nullcontext() if packed else autocast(device, dtype)


class PackedLinear(nn.Module):
    """A Linear whose weight lies as oneDNN's kernels read it. For a few tokens at a time that is
    two to three times as fast on a CPU as torch's Linear, which packs the weight at each call."""

    def __init__(self, linear):
        super().__init__()
        weight, bias = linear.weight.detach(), linear.bias
        self.linear = torch.ops.mkldnn._linear_pointwise.default  # looked up once, not each time
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = None if bias is None else bias.detach().to(weight.dtype)

    def forward(self, x):
        return self.linear(x.to(self.weight.dtype), self.weight, self.bias, 'none', [], '')


def generate_batch(model, idx, max_new_tokens, **sampling):
    new = generate(model, idx.tolist(), max_new_tokens, **sampling)
    longest = max(map(len, new))
    end = sampling.get('end_of_text')
    new = [row + [end] * (longest - len(row)) for row in new]
    return torch.cat((idx, torch.tensor(new, dtype=idx.dtype, device=idx.device)), dim=1)
