"""Prompts → the tokens that a model writes after them.

A cache keeps the keys and values of earlier tokens, so a new token costs one token's work. When a
context would outgrow block_size, its first half is dropped and the rest is read again at once. So
each token is chosen with at least half of block_size in view.
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import document_starts, one_for_each
from plaingpt.inference.next_token import choose_next_token, draw_noise, penalize

# Of attention, the fastest first. Not cuDNN, which is torch's first choice on a Hopper: it plans
# anew for each length of the cache.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.inference_mode()
@sdpa_kernel(BACKENDS, set_priority=True)
def generate(model, prompts, max_new_tokens, *, repetition_penalty=1.0, end_of_text=None,
             generators=None, on_token=None, use_cache=True, compiled=None, **sampling):
    """Continue each of `prompts`, lists of ids of any lengths → the new ids of each.

    sampling: temperature, top_k, top_p, min_p of choose_next_token
    end_of_text: the id that ends a row; it is not part of what is returned
    generators: a torch.Generator for each row, so that its text does not depend on its neighbours
    on_token: called with (row, id) for each new token; True ends the row
    use_cache: False computes everything anew for each token, which is slow and gives the same
    compiled: a CompiledStep of the model
    """
    rows, new = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    running = set(range(len(rows)))  # the rows that have not ended
    context = Context(model, use_cache, compiled)
    idx = seen = None
    if repetition_penalty != 1:  # (B, V): which tokens are in each row
        seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            seen[i, prompt] = True
        seen = seen.to(context.device)
    for remaining in range(max_new_tokens, 0, -1):
        step, idx = context.prepare_step(rows, idx, remaining)
        noise = draw_noise(len(rows), generators)
        idx = step(model, idx, context.cache, noise, seen, repetition_penalty, **sampling)
        if seen is not None:
            seen.scatter_(1, idx, True)
        for i, token in enumerate(idx.flatten().tolist()):  # (B, 1) → B ids
            rows[i].append(token)
            if i in running and token != end_of_text:
                new[i].append(token)
            if token == end_of_text or (i in running and on_token and on_token(i, token)):
                running.discard(i)
        if not running:
            break
    return new


def next_logits(model, idx, cache):
    """idx (B, T), to which the cache was advanced → logits (B, V) of each row's next token."""
    return model.logits(model.hidden(idx, cache)[:, -1]).float()


def next_tokens(model, idx, cache, noise, seen, repetition_penalty, **sampling):
    """idx (B, T), to which the cache was advanced → the next token of each row, (B, 1).
    seen (B, V): which tokens are in each row, where that counts"""
    logits = next_logits(model, idx, cache)
    if seen is not None:
        logits = penalize(logits, seen, repetition_penalty)
    return choose_next_token(logits, noise=noise, **sampling)


class CompiledStep:
    """next_tokens after one token, compiled. On a GPU it is a CUDA graph: one launch, which reads
    and writes where it did when it was recorded. So each size of a batch has one cache for good."""

    def __init__(self, model):
        device = model.transformer.wte.weight.device
        self.compiled = torch.compile(next_tokens, dynamic=False, mode='reduce-overhead'
                                      if device.type == 'cuda' else None)
        self.caches = {}  # by the number of rows

    def __call__(self, model, idx, cache, noise, *penalty, **sampling):
        noise = noise.to(idx.device) if idx.is_cuda else noise  # a graph takes nothing from a CPU
        idx = self.compiled(model, idx, cache, noise, *penalty, **sampling)
        return idx.clone()  # the graph writes over its results


class Context:
    """What the model sees of each row: its last tokens, as a cache."""

    def __init__(self, model, use_cache=True, compiled=None):
        self.model, self.use_cache, self.compiled = model, use_cache, compiled
        self.device = model.transformer.wte.weight.device
        self.cache = self.starts = None

    def prepare_step(self, rows, idx, remaining):
        """Advance the cache. rows: all ids of each; idx (B, 1): the last of them; remaining: how
        many tokens are still to come at most → (next_tokens or what is faster, the idx it takes)"""
        starts = [context_start(len(row), self.model.config.block_size) for row in rows]
        step = self.compiled or next_tokens
        if starts != self.starts or not self.use_cache:
            self.starts, step = starts, next_tokens
            idx = self.start_over([row[start:] for row, start in zip(rows, starts, strict=True)],
                                  remaining)  # (B, T)
        self.cache.advance(idx)
        return step, idx

    def start_over(self, contexts, remaining):
        """Empty the cache → `contexts` as idx (B, T). Short ones are padded in front."""
        longest = max(map(len, contexts))
        if self.cache is None:
            self.cache = self.make_cache(len(contexts), longest + remaining - 1)
        padding = [longest - len(context) for context in contexts]
        self.cache.begin(padding)
        return torch.tensor([[0] * n + context for n, context in
                             zip(padding, contexts, strict=True)], device=self.device)

    def make_cache(self, n_rows, n_tokens):
        config = self.model.config
        if not self.compiled:
            return KVCache(config, min(config.block_size, n_tokens), self.device)
        if n_rows not in self.compiled.caches:
            self.compiled.caches[n_rows] = KVCache(config, config.block_size, self.device,
                                                   static=True)
        return self.compiled.caches[n_rows]


def context_start(length, block_size):
    """Where the context of the next token begins in a text of `length` tokens: 0, and moved on by
    half of block_size each time that the context would be longer than block_size."""
    half = max(1, block_size // 2)
    return max(0, math.ceil((length - block_size) / half)) * half


class KVCache:
    """The keys and values of the tokens so far, in each layer, for up to `n_columns` of them.

    The rows of a batch are aligned at the end: a token's column is its place in the padded row. The
    first padding[i] columns of row i are empty, and no token attends to them.
    static: shapes never change, as compiled code needs it; attention goes over all columns, masked

    After advance(idx), for those T tokens, which are to come:
        columns    (T,) their columns
        positions  what to index position embeddings with: a slice, or (T,) or (B, T)
        ages       (B, T): how many tokens of its document are before each; without opener, None
        mask       True where they attend: (T, columns so far) or (B, 1, T, columns so far);
                   None: everywhere
    """

    def __init__(self, config, n_columns, device, static=False):
        # the token that opens a document: no token attends to documents before its own
        self.opener = config.document_start if config.document_attention else None
        self.layers = [LayerCache(self) for _ in range(config.n_layer)]
        self.n_columns, self.device, self.static = n_columns, device, static
        self.numbers = torch.arange(n_columns, device=device)

    def begin(self, padding):
        """Forget all tokens; the memory for keys and values stays where it is."""
        self.end = 0
        starts = torch.tensor(padding, device=self.device)[:, None]
        self.padding = starts if any(padding) else None
        # (B, 1) or (B, T): before it a token sees nothing
        self.starts = self.padding if self.opener is None else starts
        for layer in self.layers:
            if layer.earlier is not None:
                layer.earlier.zero_()

    def zeros(self, like, *shape):
        """A part of the cache, of the dtype and on the device of what goes into it."""
        tensor = like.new_zeros(shape)
        if self.static:
            torch._dynamo.mark_static_address(tensor, guard=False)  # CUDA graphs may write to it
        return tensor

    def advance(self, idx):
        T = idx.size(1)
        begin, self.end = self.end, self.end + T
        self.columns = self.numbers[begin:self.end]  # (T,)
        self.new = self.positions = self.columns if self.static else slice(begin, self.end)
        self.filled = slice(None) if self.static else slice(self.end)
        if self.opener is not None:  # earlier tokens' last start, unless a document opens here
            opened = document_starts(idx, self.opener, self.columns)
            self.starts = torch.maximum(opened, self.starts[:, -1:])  # (B, T)
        if self.starts is not None:
            self.positions = (self.columns - self.starts).clamp(min=0)  # (B, T)
        self.ages = None if self.opener is None else self.positions
        unmasked = T == 1 and self.starts is None and not self.static
        self.mask = None if unmasked else self.causal_mask()

    def causal_mask(self):
        keys = self.numbers[self.filled]
        queries = self.columns[:, None]  # (T, 1)
        if self.starts is None:
            return keys <= queries  # (T, columns)
        real = keys >= self.starts[:, None, :, None]  # (B, 1, 1 or T, columns)
        # Padding attends to itself: a softmax over nothing is not a number.
        return (keys <= queries) & real | (keys == queries)  # (B, 1, T, columns)


class LayerCache:
    """One layer's part of a KVCache: what attention works with."""

    def __init__(self, cache):
        self.cache = cache
        self.keys = self.values = None  # (B, KV, columns, D)
        self.earlier = None  # (B, n, C): what a short convolution read of the last tokens

    @property
    def ages(self):
        return self.cache.ages

    @property
    def columns(self):
        """(T,): the columns of the new tokens, the queries; those of the keys are 0, 1, 2, …
        So (columns[:, None] - key columns) is how far back each key is, as for ALiBi's bias."""
        return self.cache.columns

    def extend(self, k, v):
        """k, v (B, KV, T, D) of the new tokens → those of all tokens, and KVCache.mask."""
        cache = self.cache
        if self.keys is None:
            self.keys, self.values = (cache.zeros(x, *x.shape[:2], cache.n_columns, x.size(3))
                                      for x in (k, v))
        self.keys[:, :, cache.new] = k
        self.values[:, :, cache.new] = v
        return self.keys[:, :, cache.filled], self.values[:, :, cache.filled], cache.mask

    def attention(self, q, k, v):
        """q (B, H, T, D), k and v (B, KV, T, D) of the new tokens → (B, H, T, D)."""
        k, v, mask = self.extend(k, v)
        grouped = k.size(1) < q.size(1)
        if grouped and q.size(2) > 1:
            k, v = one_for_each(q, k, v)
        # For one token, copies of all that is kept would take longer than attention itself.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                              enable_gqa=grouped and q.size(2) == 1)

    def with_earlier(self, x, n):
        """x (B, T, C) of the new tokens → it behind that of the n tokens before, (B, n + T, C).
        Before the first token, and in padding, there are zeros."""
        if self.cache.padding is not None:
            x = x.masked_fill((self.columns < self.cache.padding)[..., None], 0.0)
        if self.earlier is None:
            self.earlier = self.cache.zeros(x, x.size(0), n, x.size(2))
        x = torch.cat((self.earlier, x), dim=1)
        self.earlier.copy_(x[:, -n:])
        return x
