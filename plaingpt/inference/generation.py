"""Prompts → the tokens that a model writes after them.

A cache keeps the keys and values of earlier tokens, so a new token costs one token's work. When a
context would outgrow block_size, its first half is dropped and the rest is read again at once. So
each token is chosen with at least half of block_size in view.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from plaingpt.system.devices import DTYPES, autocast, cpu_has_bfloat16
from plaingpt.system.errors import UserError

CHECKED_TOKENS = 2048  # of a text that a small network reads with a cache and without

# Kernels of attention, the fastest first. cuDNN is torch's first choice on a Hopper, but it plans
# anew for each length of the cache.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.inference_mode()
@sdpa_kernel(BACKENDS, set_priority=True)
def generate(model, prompts, max_new_tokens, *, repetition_penalty=1.0, generators=None,
             on_token=None, compiled=None, **sampling):
    """Continue each of `prompts`, lists of ids of any lengths → the new ids of each.

    sampling: temperature, top_k, top_p of choose_next_token
    generators: a torch.Generator for each row, so that its text does not depend on its neighbours;
    by default torch's own
    on_token: called with (row, id) for each new token; True ends the row, without this token
    compiled: a CompiledStep of the model
    """
    config, device = model.config, model.transformer.wte.weight.device
    rows, new = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    running = set(range(len(rows)))  # the rows that have not ended
    generators = generators or [None] * len(rows)
    cache = starts = idx = seen = None
    if repetition_penalty != 1:  # (B, V): which tokens are in each row
        seen = torch.zeros(len(rows), config.vocab_size, dtype=torch.bool, device=device)
        for i, prompt in enumerate(prompts):
            seen[i, prompt] = True
    for remaining in range(max_new_tokens, 0, -1):
        step, before = compiled or next_tokens, starts
        starts = [context_start(len(row), config.block_size) for row in rows]
        if starts != before:  # read whole contexts: at first, and when one has moved on
            contexts = [row[start:] for row, start in zip(rows, starts, strict=True)]
            longest = max(map(len, contexts))
            if cache is None:
                cache = compiled.cache(len(rows)) if compiled else KVCache(
                    config, min(config.block_size, longest + remaining - 1), device)
            cache.begin([longest - len(context) for context in contexts])
            step, idx = next_tokens, torch.tensor(
                [[0] * (longest - len(context)) + context for context in contexts], device=device)
        cache.advance(idx.size(1))
        noise = torch.cat([torch.rand(1, 1, dtype=torch.double, generator=g) for g in generators])
        idx = step(model, idx, cache, noise, seen, repetition_penalty, **sampling)
        if seen is not None:
            seen.scatter_(1, idx, True)
        for i, token in enumerate(idx.flatten().tolist()):  # (B, 1) → B ids
            rows[i].append(token)
            if i in running and on_token and on_token(i, token):
                running.discard(i)
            elif i in running:
                new[i].append(token)
        if not running:
            break
    return new


def context_start(length, block_size):
    """Where the context of the next token begins in a text of `length` tokens: 0, and moved on by
    half of block_size each time that the context would be longer than block_size."""
    half = max(1, block_size // 2)
    return max(0, math.ceil((length - block_size) / half)) * half


# -----------------------------------------------------------------------------
# from logits to the next token


def next_tokens(model, idx, cache, noise, seen, repetition_penalty, **sampling):
    """idx (B, T), to which the cache was advanced → the next token of each row, (B, 1).
    seen (B, V): which tokens are in each row; None without a penalty"""
    logits = model.logits(model.hidden(idx, cache)[:, -1]).float()  # (B, V)
    if seen is not None:  # less likely again (Keskar et al. 2019, section 4.1)
        penalized = torch.where(logits > 0, logits / repetition_penalty,
                                logits * repetition_penalty)
        logits = torch.where(seen, penalized, logits)
    return choose_next_token(logits, noise, **sampling)


class CompiledStep:
    """next_tokens after one token, compiled. On a GPU it is a CUDA graph: one launch, which reads
    and writes where it did when it was recorded. So each size of a batch has one cache for good."""

    def __init__(self, model):
        self.model, self.caches = model, {}  # by the number of rows
        on_gpu = model.transformer.wte.weight.device.type == 'cuda'
        self.compiled = torch.compile(next_tokens, dynamic=False,
                                      mode='reduce-overhead' if on_gpu else None)

    def cache(self, n_rows):
        if n_rows not in self.caches:
            config, device = self.model.config, self.model.transformer.wte.weight.device
            self.caches[n_rows] = KVCache(config, config.block_size, device, static=True)
        return self.caches[n_rows]

    def __call__(self, model, idx, cache, noise, *penalty, **sampling):
        noise = noise.to(idx.device) if idx.is_cuda else noise  # a CUDA graph reads no CPU memory
        idx = self.compiled(model, idx, cache, noise, *penalty, **sampling)
        return idx.clone()  # the graph overwrites its results


def choose_next_token(logits, noise, temperature=1.0, top_k=0, top_p=1.0):
    """logits (B, V), noise (B, 1) from [0, 1) → one token for each row, (B, 1).

    temperature: divides the logits; 0 takes the likeliest token
    top_k: choose among this many of the likeliest (Fan et al. 2018); 0 for all
    top_p: choose among the fewest whose probabilities reach this (Holtzman et al. 2019)
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    ids = None
    count = min(top_k or logits.size(-1), logits.size(-1))
    if count < logits.size(-1) or top_p < 1:
        logits, ids = logits.topk(count)  # likeliest first
    # Subtract the largest, so that no temperature, however low, gives infinity.
    probs = F.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
    if top_p < 1:
        reached_before = probs.cumsum(dim=-1) - probs >= top_p  # False for the first: one stays
        probs = probs.masked_fill(reached_before, 0)
    # where the cumulative probability passes the noise's share of the whole
    dtype = torch.float32 if probs.device.type == 'mps' else torch.double  # mps has no float64
    cumulative = probs.cumsum(dim=-1, dtype=dtype)  # (B, V or count)
    target = noise.to(probs.device, dtype) * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.size(-1) - 1)
    return chosen if ids is None else ids.gather(1, chosen)


# -----------------------------------------------------------------------------
# the cache


class KVCache:
    """The keys and values of the tokens so far, in each layer, for up to `n_columns` of them.

    The rows of a batch are aligned at the end: a token's column is its place in the padded row. The
    first padding[i] columns of row i are empty, and no token attends to them. A text is one
    document: nothing that is generated goes on behind its end.
    static: shapes never change, as compiled code needs it; attention goes over all columns, masked

    After advance(T), for those T tokens, which are to come:
        columns    (T,) their columns
        positions  what to index position embeddings with: a slice, or (T,) or (B, T)
        mask       True where they attend: (T, columns so far) or (B, 1, T, columns so far);
                   None: everywhere
    """

    def __init__(self, config, n_columns, device, static=False):
        self.layers = [LayerCache(self) for _ in range(config.n_layer)]
        self.tokens = LayerCache(self)  # the last tokens themselves, for n-grams
        self.n_columns, self.device, self.static = n_columns, device, static
        self.numbers = torch.arange(n_columns, device=device)

    def begin(self, padding):
        """Forget all tokens; the memory for keys and values stays where it is."""
        self.end = 0
        self.padding = torch.tensor(padding, device=self.device)[:, None] if any(padding) else None
        for layer in (self.tokens, *self.layers):
            if layer.earlier is not None:
                layer.earlier.zero_()

    def zeros(self, like, *shape):
        """A part of the cache, of the dtype and on the device of what goes into it."""
        tensor = like.new_zeros(shape)
        if self.static:
            torch._dynamo.mark_static_address(tensor, guard=False)  # CUDA graphs may write to it
        return tensor

    def advance(self, T):
        begin, self.end = self.end, self.end + T
        self.columns = self.numbers[begin:self.end]  # (T,)
        self.new = self.positions = self.columns if self.static else slice(begin, self.end)
        self.filled = slice(None) if self.static else slice(self.end)
        if self.padding is not None:
            self.positions = (self.columns - self.padding).clamp(min=0)  # (B, T)
        unmasked = T == 1 and self.padding is None and not self.static
        self.mask = None if unmasked else self.causal_mask()

    def causal_mask(self):
        keys = self.numbers[self.filled]
        queries = self.columns[:, None]  # (T, 1)
        if self.padding is None:
            return keys <= queries  # (T, columns)
        real = keys >= self.padding[:, :, None, None]  # (B, 1, 1, columns)
        # Padding attends to itself: a softmax over nothing is not a number.
        return (keys <= queries) & real | (keys == queries)  # (B, 1, T, columns)


class LayerCache:
    """One layer's part of a KVCache, as its attention and its short convolution take it."""

    def __init__(self, cache):
        self.cache = cache
        self.keys = self.values = None  # (B, KV, columns, D)
        self.earlier = None  # (B, n, C): the last inputs of a convolution or an n-gram

    @property
    def columns(self):
        """(T,): the columns of the new tokens, the queries; those of the keys are 0, 1, 2, …
        So (columns[:, None] - key columns) is how far back each key is, as for ALiBi's bias."""
        return self.cache.columns

    def extend(self, k, v):
        """k, v (B, KV, T, D) of the new tokens → those of all tokens so far, and KVCache.mask."""
        cache = self.cache
        if self.keys is None:
            self.keys, self.values = (cache.zeros(x, *x.shape[:2], cache.n_columns, x.size(3))
                                      for x in (k, v))
        self.keys[:, :, cache.new] = k
        self.values[:, :, cache.new] = v
        return self.keys[:, :, cache.filled], self.values[:, :, cache.filled], cache.mask

    def with_earlier(self, x, n):
        """x (B, T, C) of the new tokens → it behind that of the n tokens before, (B, n + T, C).
        Before the first token, and in padding, there are zeros."""
        if self.cache.padding is not None:
            x = x.masked_fill((self.columns < self.cache.padding)[..., None], 0)
        if self.earlier is None:
            self.earlier = self.cache.zeros(x, x.size(0), n, x.size(2))
        x = torch.cat((self.earlier, x), dim=1)
        self.earlier.copy_(x[:, -n:])
        return x


@torch.inference_mode()
def check_cache(model, T=32):
    """Raise UserError where a cache changes what model.py computes for T tokens, as in one that was
    changed. A small network of the same code is checked over a longer text."""
    config, device = model.config, model.lm_head.weight.device
    T = min(T, config.block_size)
    # no token among them opens a document
    idx = config.document_start + 1 + torch.arange(T, device=device) % max(1, config.vocab_size - 1)
    idx = idx[None] % config.vocab_size  # (1, T)
    whole, cache, parts = model(idx)[0], KVCache(config, T, device), []  # (1, T, V)
    cache.begin([0])
    for part in idx.tensor_split([T - 2, T - 1], dim=1):  # as a prompt, and two tokens after it
        cache.advance(part.size(1))
        parts.append(model.logits(model.hidden(part, cache)))
    errors = (torch.cat(parts, dim=1) - whole).norm(dim=-1) / whole.norm(dim=-1)
    error = errors.max()  # over positions
    if error > 0.02:  # with TF32 rounding alone gives less
        raise UserError(f'model.py: outputs with and without the KV cache differ (relative error '
                        f'{error:.2g}): attention or positions ignore the cache, or a layer needs '
                        'earlier tokens and does not keep them')
    if min(config.block_size, CHECKED_TOKENS) > T:
        check_cache(small_network(model), CHECKED_TOKENS)


def small_network(model):
    """A GPT of the same code and flags as `model`, in which each weight counts."""
    c = model.config
    small = replace(c, n_layer=min(2, c.n_layer), n_embd=16 * c.n_head, head_dim=0, n_inner=0,
                    vocab_size=64, document_start=0 if c.document_attention else -1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        gpt = type(model)(small).eval()
        for p in gpt.parameters():
            p.normal_(std=0.3)
    return gpt


# -----------------------------------------------------------------------------
# weights packed for generation


WIDE = 768  # channels; narrower float32 models are slower with packed weights


def prepare_for_generation(model, device, dtype, pack=True):
    """Convert a model's matrices to `dtype`, in place; everything else stays float32.

    pack: on a CPU, reorder them as oneDNN reads them; torch.compile cannot trace those
    → the context (autocast or none) to generate in. The model cannot be trained or saved after.
    """
    packed = pack and device.type == 'cpu' and torch.backends.mkldnn.is_available() \
        and hasattr(torch.ops.mkldnn, '_linear_pointwise') \
        and ((dtype == 'float32' and model.config.n_embd >= WIDE)
             or (dtype == 'bfloat16' and cpu_has_bfloat16()))
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
    """A Linear whose weight is stored in oneDNN's own layout. For a few tokens at a time it is
    faster on a CPU than torch's Linear, which reorders the weight at each call."""

    def __init__(self, linear):
        super().__init__()
        weight, bias = linear.weight.detach(), linear.bias
        self.linear = torch.ops.mkldnn._linear_pointwise.default  # looked up once, not each time
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = None if bias is None else bias.detach().to(weight.dtype)

    def forward(self, x):
        return self.linear(x.to(self.weight.dtype), self.weight, self.bias, 'none', [], '')
