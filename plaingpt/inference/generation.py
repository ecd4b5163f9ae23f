"""Token generation with a KV cache: prompts → new tokens.

The cache keeps the keys and values of earlier tokens, so a step runs the model on one token only.
When the context would exceed block_size, its first half is dropped and the remainder is prefilled
again, so at least half of block_size stays in context. GPT.generate() slides by one token instead.
Up to block_size tokens, both decode greedily to the same tokens.
"""

import functools
import math
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from plaingpt.system.devices import DTYPES, autocast, cpu_has_bfloat16
from plaingpt.system.errors import UserError

CHECKED_TOKENS = 2048  # tokens for which check_cache() compares a small model
MIN_PACKED_WIDTH = 768  # n_embd; narrower float32 models are slower with packed weights

# Attention kernels, fastest first. torch prefers cuDNN on Hopper GPUs, but cuDNN builds a new plan
# for each length of the cache.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.inference_mode()
@sdpa_kernel(BACKENDS, set_priority=True)
def generate(model, prompts, max_new_tokens, *, repetition_penalty=1.0, generators=None,
             on_token=None, compiled=None, **sampling):
    """Continue each of `prompts` (lists of token ids of any lengths) → the new token ids of each.

    sampling: temperature, top_k and top_p of sample_next_token; on_logits of next_tokens
    generators: a torch.Generator per row, so that no row depends on the others; None: torch's own
    on_token: called with (row, token) for each new token; returning True ends the row and discards
    the token
    compiled: a CompiledStep of the model
    """
    config = model.config
    device = model.transformer.wte.weight.device
    rows = [list(prompt) for prompt in prompts]
    new_tokens = [[] for _ in prompts]
    unfinished = set(range(len(rows)))
    generators = generators or [None] * len(rows)
    cache = starts = idx = present = None
    if repetition_penalty != 1:
        # (B, V): True for tokens that the row contains
        present = torch.zeros(len(rows), config.vocab_size, dtype=torch.bool, device=device)
        for i, prompt in enumerate(prompts):
            present[i, prompt] = True
    for remaining in range(max_new_tokens, 0, -1):
        previous_starts = starts
        starts = [context_start(len(row), config.block_size) for row in rows]
        if starts == previous_starts:  # decode: one new token per row
            step = compiled or next_tokens
        else:  # prefill: at first, and whenever the start of a context has moved
            step = next_tokens
            contexts = [row[start:] for row, start in zip(rows, starts, strict=True)]
            longest = max(map(len, contexts))
            if cache is None and compiled:
                cache = compiled.cache(len(rows))
            elif cache is None:
                n_columns = min(config.block_size, longest + remaining - 1)
                cache = KVCache(config, n_columns, device)
            padding = [longest - len(context) for context in contexts]
            cache.reset(padding)
            padded = [[0] * n + context for n, context in zip(padding, contexts, strict=True)]
            idx = torch.tensor(padded, device=device)  # (B, T)
        cache.advance(idx.size(1))
        uniform = torch.cat([torch.rand(1, 1, dtype=torch.double, generator=g) for g in generators])
        idx = step(model, idx, cache, uniform, present, repetition_penalty, **sampling)  # (B, 1)
        if present is not None:
            present.scatter_(1, idx, True)
        for i, token in enumerate(idx.flatten().tolist()):
            rows[i].append(token)
            if i not in unfinished:
                continue
            if on_token and on_token(i, token):
                unfinished.discard(i)
            else:
                new_tokens[i].append(token)
        if not unfinished:
            break
    return new_tokens


def context_start(length, block_size):
    """Index of the first context token for predicting the next one after `length` tokens: 0, then
    advanced by block_size / 2 each time the context would exceed block_size."""
    half = max(1, block_size // 2)
    return max(0, math.ceil((length - block_size) / half)) * half


# -----------------------------------------------------------------------------
# from logits to the next token


def next_tokens(model, idx, cache, uniform, present, repetition_penalty, on_logits=None,
                **sampling):
    """idx (B, T), after cache.advance(T) → the next token of each row, (B, 1).
    present (B, V): True for tokens that the row contains; None without a repetition penalty
    on_logits: called with the model's logits (B, V)"""
    logits = model.logits(model.hidden(idx, cache)[:, -1]).float()  # (B, V)
    if on_logits:
        on_logits(logits)
    if present is not None:  # Keskar et al. 2019, section 4.1
        penalized = torch.where(logits > 0, logits / repetition_penalty,
                                logits * repetition_penalty)
        logits = torch.where(present, penalized, logits)
    return sample_next_token(logits, uniform, **sampling)


class CompiledStep:
    """next_tokens for one new token per row, compiled. On a GPU it is a CUDA graph, which always
    uses the memory that it was recorded with. So each batch size keeps one cache."""

    def __init__(self, model):
        config, device = model.config, model.transformer.wte.weight.device
        self.cache = functools.cache(  # one per batch size
            lambda batch_size: KVCache(config, config.block_size, device, static=True))
        mode = 'reduce-overhead' if device.type == 'cuda' else None
        self.compiled = torch.compile(next_tokens, dynamic=False, mode=mode)

    def __call__(self, model, idx, cache, uniform, *penalty, **sampling):
        if idx.is_cuda:
            uniform = uniform.to(idx.device)  # a CUDA graph cannot read CPU memory
        idx = self.compiled(model, idx, cache, uniform, *penalty, **sampling)
        return idx.clone()  # the next replay of the graph overwrites its outputs


def sample_next_token(logits, uniform, temperature=1.0, top_k=0, top_p=1.0):
    """logits (B, V), uniform (B, 1) in [0, 1) → a sampled token per row, (B, 1).

    temperature: divides the logits; 0 is greedy
    top_k: sample from the k most likely tokens (Fan et al. 2018); 0: from all
    top_p: sample from the smallest set of most likely tokens whose probabilities sum to at least
    this (nucleus sampling, Holtzman et al. 2019)
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    vocab_size = logits.size(-1)
    k = min(top_k or vocab_size, vocab_size)
    sorted_ids = None
    if k < vocab_size or top_p < 1:
        logits, sorted_ids = logits.topk(k)  # in descending order
    # Subtract the maximum first: dividing by a tiny temperature could overflow.
    probs = F.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
    if top_p < 1:
        outside_nucleus = probs.cumsum(dim=-1) - probs >= top_p  # never the first token
        probs = probs.masked_fill(outside_nucleus, 0)
    # Inverse transform sampling: invert the cumulative distribution.
    dtype = torch.float32 if probs.device.type == 'mps' else torch.double  # mps has no float64
    cdf = probs.cumsum(dim=-1, dtype=dtype)  # (B, V or k)
    target = uniform.to(probs.device, dtype) * cdf[:, -1:]
    choice = torch.searchsorted(cdf, target, right=True).clamp(max=probs.size(-1) - 1)  # (B, 1)
    if sorted_ids is None:
        return choice
    return sorted_ids.gather(1, choice)


# -----------------------------------------------------------------------------
# the KV cache


class KVCache:
    """Keys and values of up to `n_columns` tokens per row, for each layer.

    Rows are left-padded: the first padding[i] columns of row i are padding, which no token attends
    to. Each row is a single document: generation never continues past an end-of-text token.
    static: fixed shapes, for compiled code; attention covers all columns and masks the unused ones

    advance(T) sets, for the T tokens that follow:
        columns    (T,) their columns
        positions  (T,) or (B, T): their positions in the text
        mask       True where they attend: (T, columns so far) or (B, 1, T, columns so far);
                   None: everywhere
    """

    def __init__(self, config, n_columns, device, static=False):
        self.layers = [LayerCache(self) for _ in range(config.n_layer)]
        self.tokens = LayerCache(self)  # the latest token ids, for the n-gram embedding
        self.n_columns = n_columns
        self.device = device
        self.static = static
        self.all_columns = torch.arange(n_columns, device=device)

    def reset(self, padding):
        """Empty the cache but keep its memory. padding: columns to leave free, per row"""
        self.end = 0
        self.padding = None
        if any(padding):
            self.padding = torch.tensor(padding, device=self.device)[:, None]  # (B, 1)
        for layer in (self.tokens, *self.layers):
            if layer.earlier is not None:
                layer.earlier.zero_()

    def zeros(self, like, *shape):
        """A cache tensor with the dtype and device of `like`."""
        tensor = like.new_zeros(shape)
        if self.static:
            torch._dynamo.mark_static_address(tensor, guard=False)  # CUDA graphs may write to it
        return tensor

    def advance(self, T):
        begin, self.end = self.end, self.end + T
        self.columns = self.all_columns[begin:self.end]  # (T,)
        if self.static:
            self.new = self.columns
            self.filled = slice(None)
        else:
            self.new = slice(begin, self.end)
            self.filled = slice(self.end)
        self.positions = self.columns  # (T,)
        if self.padding is not None:
            self.positions = (self.columns - self.padding).clamp(min=0)  # (B, T)
        self.mask = None
        if T > 1 or self.padding is not None or self.static:
            self.mask = self.causal_mask()

    def causal_mask(self):
        keys = self.all_columns[self.filled]
        queries = self.columns[:, None]  # (T, 1)
        if self.padding is None:
            return keys <= queries  # (T, columns)
        not_padding = keys >= self.padding[:, :, None, None]  # (B, 1, 1, columns)
        # Padding attends to itself, because a softmax over no keys is NaN.
        return (keys <= queries) & not_padding | (keys == queries)  # (B, 1, T, columns)


class LayerCache:
    """One layer of a KVCache, for its attention and its short convolution."""

    def __init__(self, cache):
        self.cache = cache
        self.keys = self.values = None  # (B, KV, columns, D)
        self.earlier = None  # (B, n, C): the last n inputs of a convolution or n-gram embedding

    @property
    def columns(self):
        """(T,): the columns of the new tokens, which are the queries; the keys' are 0, 1, 2, …
        columns[:, None] - key_columns is the distance of each key, for example for ALiBi."""
        return self.cache.columns

    def extend(self, k, v):
        """k, v (B, KV, T, D) of the new tokens → keys and values of all tokens so far, and the
        mask."""
        cache = self.cache
        if self.keys is None:
            self.keys = cache.zeros(k, *k.shape[:2], cache.n_columns, k.size(3))
            self.values = cache.zeros(v, *v.shape[:2], cache.n_columns, v.size(3))
        self.keys[:, :, cache.new] = k
        self.values[:, :, cache.new] = v
        return self.keys[:, :, cache.filled], self.values[:, :, cache.filled], cache.mask

    def prepend_earlier(self, x, n):
        """x (B, T, C) of the new tokens → (B, n + T, C), with the x of the n tokens before them in
        front. Zeros stand for padding and for tokens before the first one."""
        if self.cache.padding is not None:
            x = x.masked_fill((self.columns < self.cache.padding)[..., None], 0)
        if self.earlier is None:
            self.earlier = self.cache.zeros(x, x.size(0), n, x.size(2))
        x = torch.cat((self.earlier, x), dim=1)
        self.earlier.copy_(x[:, -n:])
        return x


@torch.inference_mode()
def check_cache(model, T=32):
    """Raise UserError if outputs with and without the KV cache differ, as they may after an edit to
    model.py. T tokens are compared, then more of them in a small model of the same code."""
    config = model.config
    device = model.lm_head.weight.device
    T = min(T, config.block_size)
    ids = torch.arange(T, device=device) // 2 % max(1, config.vocab_size - 1)  # 0 0 1 1 2 2 …
    idx = config.document_start + 1 + ids  # does not contain document_start
    idx = idx[None] % config.vocab_size  # (1, T)
    expected, _ = model(idx)  # (1, T, V)
    error = relative_error(cached_logits(model, idx, T - 2), expected)
    if error > 0.02:  # rounding gives less, even with TF32
        raise UserError(f'model.py: outputs with and without the KV cache differ (relative error '
                        f'{error:.2g}); look for attention or positions that ignore the cache, or '
                        'a layer that reads earlier tokens without caching them')
    if min(config.block_size, CHECKED_TOKENS) > T:
        check_cache(small_copy(model), CHECKED_TOKENS)


def cached_logits(model, idx, prompt_length):
    """The logits (1, T, V) for idx (1, T) with a KV cache: of a prompt, then token by token."""
    T = idx.size(1)
    cache = KVCache(model.config, T, idx.device)
    cache.reset([0])
    logits = []
    for chunk in idx.tensor_split(tuple(range(prompt_length, T)), dim=1):
        cache.advance(chunk.size(1))
        logits.append(model.logits(model.hidden(chunk, cache)))
    return torch.cat(logits, dim=1)


def relative_error(logits, expected):
    """The largest relative error of logits (…, V); infinity if one is NaN."""
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    return errors.nan_to_num(math.inf).max().item()


def small_copy(model):
    """A small GPT with the code and flags of `model`, and random weights that are all nonzero."""
    config = replace(model.config, n_layer=min(2, model.config.n_layer),
                     n_embd=16 * model.config.n_head, head_dim=0, n_inner=0, vocab_size=64)
    if config.document_attention:
        config.document_start = 0
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        gpt = type(model)(config).eval()
        for p in gpt.parameters():
            p.normal_(std=0.3)
    return gpt


# -----------------------------------------------------------------------------
# weights packed for generation


def prepare_for_generation(model, device, dtype, pack=True):
    """Convert a model's Linear weights to `dtype`, in place → the context (autocast or none) to
    generate in. Everything else stays float32. The model cannot be trained or saved afterwards.

    pack: on a CPU, store the weights in oneDNN's layout, which torch.compile cannot trace
    """
    pack = pack and device.type == 'cpu' and packing_is_faster(model, dtype)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                # A new parameter, because a tied embedding keeps the old one in float32.
                child.weight = nn.Parameter(child.weight.detach().to(DTYPES[dtype]),
                                            requires_grad=False)
                if pack:
                    setattr(parent, name, PackedLinear(child))
    return nullcontext() if pack else autocast(device, dtype)


def packing_is_faster(model, dtype):
    if not torch.backends.mkldnn.is_available() \
            or not hasattr(torch.ops.mkldnn, '_linear_pointwise'):
        return False
    if dtype == 'bfloat16':
        return cpu_has_bfloat16()
    return dtype == 'float32' and model.config.n_embd >= MIN_PACKED_WIDTH


class PackedLinear(nn.Module):
    """A Linear whose weight is stored in oneDNN's layout. On a CPU it is faster for a few tokens
    than torch's Linear, which reorders the weight at each call."""

    def __init__(self, linear):
        super().__init__()
        weight, bias = linear.weight.detach(), linear.bias
        self.linear = torch.ops.mkldnn._linear_pointwise.default  # looked up once, not per call
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = None if bias is None else bias.detach().to(weight.dtype)

    def forward(self, x):
        return self.linear(x.to(self.weight.dtype), self.weight, self.bias, 'none', [], '')
