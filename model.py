"""GPT-2 in one file that needs torch alone: configuration, layers, initialisation, loss, sampling.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; what the paper leaves
open follows the released code, https://github.com/openai/gpt-2. Parameter names are nanoGPT's.
Newer parts stand behind flags of GPTConfig, whose defaults are GPT-2.

B batch, T tokens in a sequence, C = n_embd, H = n_head, D channels of a head, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

VOCAB_MULTIPLE = 128  # matmuls are fast when their sizes divide by powers of two
Positive = Annotated[int, 'at least 1']  # the configurator checks such limits
Natural = Annotated[int, 'at least 0']
Above0 = Annotated[float, 'above 0']
ROW_PER_TOKEN = ('wte.weight', 'value_embedding.weight', 'lm_head.weight')


def relu2(x):
    x = F.relu(x)
    return x * x  # CUDA's autocast would compute square() in float32


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)  # one half of the hidden units gates the other (Shazeer 2020)
    return F.silu(gate) * up


ACTIVATIONS = {
    'gelu': partial(F.gelu, approximate='tanh'),  # as in GPT-2 (Hendrycks and Gimpel 2016)
    'gelu_erf': F.gelu,  # as it is defined, and as in nanoGPT; on a CPU several times as fast
    'relu2': relu2,  # max(x, 0)² (So et al. 2021, "Primer")
    'swiglu': swiglu,
}


@dataclass
class GPTConfig:
    """The shape of a GPT, by default GPT-2 124M. Fields are settings; comments are their help."""
    # model
    block_size: Positive = 1024  # tokens in a sequence
    vocab_size: Positive = 50257  # tokens in the vocabulary
    n_layer: Positive = 12  # blocks
    n_head: Positive = 12  # attention heads
    n_embd: Positive = 768  # channels
    dropout: Annotated[float, 'at least 0 and below 1'] = 0.0  # 0.1 and more for little text
    bias: bool = True  # biases in Linears and LayerNorms, as in GPT-2; False is a bit better
    # model: newer than GPT-2
    rotary: bool = False  # rotary positions instead of learned ones (Su et al. 2021)
    rmsnorm: bool = False  # RMSNorm instead of LayerNorm (Zhang and Sennrich 2019)
    qk_norm: bool = False  # normalise queries and keys (Dehghani et al. 2023, section 2)
    mlp: Literal[*ACTIVATIONS] = 'gelu'  # the MLP's activation
    conv: int = 0  # before an MLP, mix each token with the conv - 1 before it (So 2021); 0: no
    value_embeddings: bool = False  # add a learned embedding of the token to values (Zhou 2024)
    tied_head: bool = True  # the head's weight is the embedding's (Press and Wolf 2017)
    n_kv_head: Natural = 0  # heads of keys and values, which queries share; 0: n_head
    zero_init: bool = False  # output projections begin at zero: branches add nothing at first
    document_attention: bool = False  # attention and positions stay within a document
    # not listed: set by a model that is loaded, or by the dataset
    head_dim: Natural = 0  # channels of a head; 0: n_embd / n_head
    n_inner: Natural = 0  # hidden units of an MLP; 0: 4 n_embd, with swiglu 8/3 n_embd
    qkv_bias: bool = False  # with bias=False, biases of queries, keys and values alone (Qwen2)
    norm_eps: Above0 = 1e-5  # what norms add to the variance
    rotary_base: Above0 = 10000.0  # a higher one turns slower, for longer sequences
    rotary_factor: Above0 = 1.0  # slow angles are divided by it (Llama 3.1); 1: no change
    rotary_length: Positive = 8192  # with rotary_factor: the block_size before it was extended
    document_start: int = -1  # with document_attention: the token that opens a document

    @property
    def learned_positions(self):
        return not self.rotary

    @property
    def padded_vocab_size(self):
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def mlp_width(self):  # SwiGLU has three matrices instead of two, so 2/3 of 4C cost the same
        swiglu = math.ceil(8 * self.n_embd / 3 / 32) * 32
        return self.n_inner or (4 * self.n_embd if self.mlp != 'swiglu' else swiglu)

    @property
    def head_size(self):  # D
        return self.head_dim or self.n_embd // self.n_head

    @property
    def qkv_sizes(self):  # channels of all queries, of all keys, of all values
        n_kv_head = self.n_kv_head or self.n_head
        return tuple(n * self.head_size for n in (self.n_head, n_kv_head, n_kv_head))

    def problems(self):
        """Fields that contradict each other, a line each."""
        rest, head = not self.head_dim and self.n_embd % self.n_head, self.head_size
        name = 'head_dim' if self.head_dim else 'n_embd / n_head'
        contradictions = {
            f'n_embd={self.n_embd} is not a multiple of n_head={self.n_head}': rest,
            f'n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}':
                self.n_kv_head and self.n_head % self.n_kv_head,
            f'rotary=True turns pairs of channels, but {name} = {head} is odd':
                self.rotary and not rest and head % 2,
            f'conv={self.conv}: must be 0, or 2 and more': self.conv < 0 or self.conv == 1,
            'document_attention=True takes document_start, the id of the token that opens one':
                self.document_attention and self.document_start == -1}
        return [line for line, holds in contradictions.items() if holds]


class RMSNorm(nn.RMSNorm):
    def forward(self, x):  # (…, C); torch's fused kernel needs weight and x in one dtype
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def norm(config, size):
    """LayerNorm or RMSNorm over the last `size` channels."""
    if config.rmsnorm:
        return RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)


def rotary_frequencies(config):
    """→ (D/2,): the angle by which each position turns the channels (i, i + D/2). Pairs that turn
    less than 4 times within rotary_length are slowed down, those that turn less than once by
    rotary_factor ("The Llama 3 Herd of Models" 2024 gives the base; the rest is its code)."""
    n = config.head_size // 2
    frequencies = config.rotary_base ** (-torch.arange(n) / n)
    turns = config.rotary_length * frequencies / (2 * math.pi)  # within rotary_length
    fast = ((turns - 1) / (4 - 1)).clamp(0, 1)  # 1: as it is
    return frequencies * (fast + (1 - fast) / config.rotary_factor)


def rotary_table(config):
    """The angles by which positions turn pairs of channels: (cosines, sines), each (length, D)."""
    positions = torch.arange(config.block_size)
    angles = torch.outer(positions, rotary_frequencies(config))  # (block_size, D/2)
    sines = angles.sin()
    return torch.cat((angles, angles), dim=-1).cos(), torch.cat((-sines, sines), dim=-1)


def rotate(x, cos, sin):
    """x (B, H, T, D); cos, sin (…, T, D) of rotary_table → x, turned by each position's angles."""
    partners = x.roll(x.size(-1) // 2, dims=-1)
    return torch.addcmul(x * cos.to(x.dtype), partners, sin.to(x.dtype))


def attention(q, k, v, dropout=0.0, documents=None, cache=None):
    """Each token attends to itself and those before it. q (B, H, T, D), k and v (B, KV, T, D) →
    (B, H, T, D). H / KV heads of q share each head of k and v.

    documents: a Documents, if sequences hold several: attention stays within each
    cache: one layer of a KVCache, which holds the tokens before these; it takes no dropout"""
    if cache is not None:
        return cache.attention(q, k, v)
    k, v = one_for_each(q, k, v)
    if documents is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=documents.mask, dropout_p=dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def one_for_each(q, k, v):
    """Repeat the heads of k and v (B, KV, T, D), so that there are as many as q has. torch's
    enable_gqa does this too, but with it torch does not choose the GPU kernels that take a mask."""
    groups = q.size(1) // k.size(1)
    return (k, v) if groups == 1 else (t.repeat_interleave(groups, dim=1) for t in (k, v))


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.sizes = sizes = config.qkv_sizes  # of queries, of keys, of values
        self.c_attn = nn.Linear(config.n_embd, sum(sizes), bias=config.bias or config.qkv_bias)
        self.c_attn.parts = sizes  # rows of the matrices in it, for Muon
        self.c_proj = nn.Linear(sizes[0], config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.q_norm, self.k_norm = (norm(config, config.head_size) if config.qk_norm
                                    else nn.Identity() for _ in 'qk')
        self.value_embedding = nn.Embedding(config.padded_vocab_size, sizes[2]) \
            if config.value_embeddings else None

    def forward(self, x, idx, rotary=None, documents=None, cache=None):
        """x (B, T, C) of the tokens idx (B, T) → (B, T, C). rotary: the rows of rotary_table for
        these positions; documents, cache: see attention()"""
        q, k, v = self.c_attn(x).split(self.sizes, dim=2)  # (B, T, H·D), 2 × (B, T, KV·D)
        if self.value_embedding is not None:
            v = v + self.value_embedding(idx).to(v.dtype)  # autocast leaves embeddings alone
        q, k, v = (t.unflatten(2, (-1, self.head_size)) for t in (q, k, v))  # (B, T, H or KV, D)
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))  # (B, H, T, D)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under CUDA's autocast norms give float32
        y = attention(q, k, v, self.dropout if self.training else 0.0, documents, cache)
        y = y.transpose(1, 2).flatten(2)  # (B, H, T, D) → (B, T, H·D)
        return self.resid_dropout(self.c_proj(y))


class ShortConv(nn.Module):
    """Adds to each token a sum of itself and the K - 1 before it, weighted channel by channel: a
    causal, depthwise convolution (So et al. 2021, "Primer"; Allen-Zhu 2025, "Canon layers")."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.conv, config.n_embd))

    def forward(self, x, documents=None, cache=None):
        """x (B, T, C) → y (B, T, C), y_t = x_t + Σ_k weight_k · x_(t-k), 0 ≤ k < K. documents,
        cache: see attention(); tokens of other documents do not count."""
        (K, _), T = self.weight.shape, x.size(1)
        # (B, K - 1 + T, C)
        longer = F.pad(x, (0, 0, K - 1, 0)) if cache is None else cache.with_earlier(x, K - 1)
        for k, w in enumerate(self.weight.to(x.dtype)):
            earlier = longer[:, K - 1 - k:K - 1 - k + T]  # (B, T, C): k tokens before each
            if documents is not None:
                earlier = earlier.masked_fill((documents.positions < k)[..., None], 0.0)
            x = torch.addcmul(x, w, earlier)
        return x


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        into = config.mlp_width * (2 if config.mlp == 'swiglu' else 1)
        self.c_fc = nn.Linear(config.n_embd, into, bias=config.bias)
        self.c_fc.parts = into // config.mlp_width * (config.mlp_width,)
        self.activation = ACTIVATIONS[config.mlp]
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


class Documents(NamedTuple):
    """The documents in a batch of sequences. The end-of-text token opens each of them: without it,
    nothing tells where one document ends and the next begins."""

    positions: torch.Tensor  # (B, T): of each token in its document
    mask: torch.Tensor  # (B, 1, T, T): True where a token attends


def find_documents(idx, opener):
    """idx (B, T), the id of the token that opens a document → Documents."""
    columns = torch.arange(idx.size(1), device=idx.device)  # (T,)
    # the column where the document of each token begins, 0 for one that began earlier
    starts = torch.where(idx == opener, columns, 0).cummax(dim=1).values  # (B, T)
    seen = (columns <= columns[:, None]) & (columns >= starts[..., None])  # (B, T, T)
    return Documents(columns - starts, seen[:, None])


RECOMPUTED = ('none', 'selective', 'full')  # kinds of activation checkpointing
KEPT = [  # 'selective' keeps the outputs of these
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]


def recomputed(kind, block, *inputs):
    """block(*inputs). For the backward pass 'full' keeps only the inputs, and 'selective' keeps the
    outputs of matmuls and attention too. The backward pass computes the rest again (Chen et al.
    2016, "Training Deep Nets with Sublinear Memory Cost")."""
    if kind == 'none' or not torch.is_grad_enabled():
        return block(*inputs)
    if kind == 'full':
        return checkpoint(block, *inputs, use_reentrant=False)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=keep_matmuls)


def keep_matmuls():
    return create_selective_checkpoint_contexts(KEPT)


keep_matmuls.cache_hash = str(KEPT)  # torch.compile finds its earlier graph by this


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = norm(config, config.n_embd)
        self.conv = ShortConv(config) if config.conv else None
        self.mlp = MLP(config)

    def forward(self, x, idx, rotary=None, documents=None, cache=None):
        x = x + self.attn(self.ln_1(x), idx, rotary, documents, cache)
        h = self.ln_2(x).to(x.dtype)  # under CUDA's autocast norms give float32
        return x + self.mlp(h if self.conv is None else self.conv(h, documents, cache))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert not config.problems(), config.problems()
        self.config = config
        self.transformer = nn.ModuleDict({
            'wte': nn.Embedding(config.padded_vocab_size, config.n_embd),
            **({'wpe': nn.Embedding(config.block_size, config.n_embd)}
               if config.learned_positions else {}),
            'drop': nn.Dropout(config.dropout),
            'h': nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            'ln_f': norm(config, config.n_embd),
        })
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.transformer.wte.weight
        if config.rotary:
            for name, table in zip(('cos', 'sin'), rotary_table(config), strict=True):
                self.register_buffer(name, table, persistent=False)  # (block_size, D)
        # How to compute. This is not part of the architecture, and can change at any time.
        self.loss_chunk_tokens = 0  # tokens that have logits at once in the loss; 0: all; or 'auto'
        self.activation_checkpointing = 'none'  # or 'selective', 'full'
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Matrices from N(0, 0.02²), those that end a residual branch from N(0, 0.02²/2L). With
        zero_init the latter are 0, and an untied head too. Convolutions and value embeddings add to
        what is there, and begin at 0."""
        config = self.config
        zeros = ('conv.weight', 'value_embedding.weight',
                 *(['c_proj.weight', 'lm_head.weight'] if config.zero_init else []))
        for name, p in self.named_parameters():
            if p.dim() == 1:
                nn.init.constant_(p, 1.0 if name.endswith('weight') else 0.0)  # norms, biases
            elif name.endswith(zeros):
                nn.init.zeros_(p)
            elif name.endswith('c_proj.weight'):  # 2L branches add up their variance (GPT-2, §2.3)
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            else:
                nn.init.normal_(p, std=0.02)
            if name.endswith(ROW_PER_TOKEN):
                p[config.vocab_size:] = 0.0  # the padding is no token

    def forward(self, idx, targets=None):
        """idx (B, T) int64, T ≤ block_size; targets (B, T), -1 for none → logits (B, T, V), and the
        mean cross-entropy in nats or None. With targets and loss_chunk_tokens: (None, loss)."""
        x = self.hidden(idx)  # (B, T, C)
        if targets is not None and self.loss_chunk_tokens:  # as in training, by default
            return None, chunked_cross_entropy(x, self.lm_head.weight, self.config.vocab_size,
                                               targets, self.loss_chunk_tokens)
        logits = self.logits(x)  # (B, T, V)
        return logits, None if targets is None else cross_entropy(logits, targets)

    def hidden(self, idx, cache=None):
        """idx (B, T) → (B, T, C), from which the head predicts the next tokens. cache: a KVCache of
        plaingpt/inference/generation.py, which holds the tokens before these; it adds these."""
        assert idx.size(1) <= self.config.block_size, f'more than {self.config.block_size} tokens'
        positions, documents = slice(idx.size(1)), None
        layers = [None] * len(self.transformer.h)  # of the cache
        if cache is not None:
            positions, layers = cache.positions, cache.layers
        elif self.config.document_attention:
            documents = find_documents(idx, self.config.document_start)
            positions = documents.positions  # (B, T)
        x = self.transformer.wte(idx)  # (B, T, C)
        rotary = None  # or 2 × (1, T, D), or (B, 1, T, D) where a batch's positions differ
        if self.config.learned_positions:
            x = x + self.transformer.wpe.weight[positions]  # (B, T, C) + (T, C)
        if self.config.rotary:
            rotary = self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)
        x = self.transformer.drop(x)
        if torch.is_autocast_enabled(x.device.type) \
                and torch.get_autocast_dtype(x.device.type) == torch.bfloat16:
            x = x.bfloat16()  # half the bytes of each addition; in float16, a sum could overflow
        for block, layer in zip(self.transformer.h, layers, strict=True):
            x = recomputed(self.activation_checkpointing, block, x, idx, rotary, documents, layer)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """(…, C) → (…, V). The padding of the vocabulary is cut off here: no caller sees it."""
        return self.lm_head(x)[..., :self.config.vocab_size]

    def num_parameters(self):
        """Parameters of the model as published: a tied matrix once, the padding not at all."""
        return sum(p[:self.config.vocab_size].numel() if name.endswith(ROW_PER_TOKEN) else p.numel()
                   for name, p in self.named_parameters())

    def flops_per_token(self):
        """FLOPs to train on one token, forward and backward (PaLM, appendix B): 6 for each weight
        in a matmul and 12·L·H·D·T for attention. Looking up an embedding is no matmul."""
        c = self.config
        return 6 * self.matmul_parameters() + 12 * c.n_layer * c.qkv_sizes[0] * c.block_size

    def matmul_parameters(self):
        """All parameters except the embeddings that are only looked up."""
        c = self.config
        looked_up = (c.block_size * c.learned_positions + c.vocab_size * (not c.tied_head)) \
            * c.n_embd + c.value_embeddings * c.n_layer * c.vocab_size * c.qkv_sizes[2]
        return self.num_parameters() - looked_up

    def crop_block_size(self, block_size):
        """Forget the positions past `block_size`, say to fine-tune on shorter sequences."""
        assert block_size <= self.config.block_size
        self.config = replace(self.config, block_size=block_size)
        if self.config.learned_positions:
            kept = self.transformer.wpe.weight[:block_size].detach()
            self.transformer.wpe = nn.Embedding.from_pretrained(kept, freeze=False)
        if self.config.rotary:
            self.cos, self.sin = (table[:block_size].clone() for table in (self.cos, self.sin))

    @classmethod
    def from_pretrained(cls, source):
        """Pretrained weights: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl' or OWNER/NAME from the
        hub, a folder in the Hugging Face layout, a run's out_dir, or a ckpt.pt of nanoGPT → GPT, in
        eval mode. Needs plaingpt/ beside this file."""
        from plaingpt.training.open_weights import make_model, open_weights
        return make_model(open_weights(source))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Append `max_new_tokens` sampled tokens to idx (B, T) → (B, T + max_new_tokens); at
        temperature 0 the likeliest. plaingpt/inference does the same several times as fast."""
        for _ in range(max_new_tokens):
            logits = self.logits(self.hidden(idx[:, -self.config.block_size:])[:, -1])  # (B, V)
            if top_k:
                least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            if temperature:
                chances = F.softmax(logits.float() / temperature, dim=-1)
                new = torch.multinomial(chances, num_samples=1, generator=generator)  # (B, 1)
            else:
                new = logits.argmax(dim=-1, keepdim=True)
            idx = torch.cat((idx, new), dim=1)
        return idx


# -----------------------------------------------------------------------------
# the loss

CHUNKS = 2048, 4096, 8192  # tokens
CACHED_LOGITS = 2**20  # 4 MB in float32, which stay in the caches of two CPU cores
LEAST_CACHED = 128  # tokens; a smaller chunk gains less than its matmuls and sums cost
PADDING_SHARE = 16  # up to 1/16 of the vocabulary, its padding is computed too


def cross_entropy(logits, targets):
    """logits (…, V), targets (…) int64, -1 where there is none → the mean cross-entropy over the
    others, in nats; 0 where there are no others."""
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1,
                            reduction='sum')
    return total / (targets != -1).sum().clamp(min=1)


def chunk_size(chosen, tokens, vocab_size, device_type):
    """How many tokens have logits at once. 'auto' takes one of CHUNKS, at most half of the tokens:
    for each chunk a GPU reads the head's weight and adds to its gradient, which takes as long as
    some 500 tokens. On a CPU 'auto' takes as many tokens as have their logits in the cache, unless
    the vocabulary is so large that they are fewer than LEAST_CACHED.
    """
    if chosen != 'auto':
        return chosen
    cached = CACHED_LOGITS // vocab_size
    if device_type == 'cpu' and cached >= LEAST_CACHED:
        return cached
    return max(size for size in CHUNKS if 2 * size <= tokens or size == CHUNKS[0])


def chunked_cross_entropy(x, weight, vocab_size, targets, chunk):
    """cross_entropy(x @ weightᵀ, targets), without all logits at once: `chunk` rows at a time go
    from logits to loss to gradients, so nothing is computed twice.

    x (…, C); weight (V', C), whose first V = vocab_size rows count; targets (…), -1 for none;
    chunk: a number, or 'auto' → the mean in nats, float32.
    Matmuls run in autocast's dtype, softmax and sums in float32. torch's own
    F.linear_cross_entropy does the same, but only from 2.13 on, and torch.compile stops at it.
    """
    if len(weight) - vocab_size > vocab_size // PADDING_SHARE:
        weight = weight[:vocab_size]
    training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return ChunkedCrossEntropy.apply(x.flatten(0, -2), weight, vocab_size, targets.flatten(),
                                     chunk_size(chunk, targets.numel(), vocab_size, x.device.type),
                                     training)


class ChunkedCrossEntropy(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, vocab_size, targets, chunk, training):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        w = weight.to(dtype)
        loss, done = torch.zeros((), device=x.device), []
        if training:
            grad_x, grad_w = torch.empty_like(x, dtype=dtype), torch.zeros_like(weight)
        with torch.autocast(device, enabled=False):
            for i in range(0, len(x), chunk):
                x_i = x[i:i + chunk].to(dtype)  # (n, C)
                if done and is_compiling():
                    x_i = after(x_i, done)
                loss_i, grad = summed_cross_entropy(F.linear(x_i, w).float(), vocab_size,
                                                    targets[i:i + chunk], training)
                loss += loss_i
                done = [loss]
                if training:
                    grad = grad.to(dtype)
                    grad_x[i:i + chunk] = grad_x_i = grad @ w
                    grad_w += grad.t() @ x_i
                    done += [grad_x_i, grad_w]
                    del grad  # frees its memory before the next chunk needs it
        count = (targets != -1).sum().clamp(min=1)  # without targets the loss is 0
        if training:
            ctx.save_for_backward(grad_x, grad_w, count)
        return loss / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w, count = ctx.saved_tensors
        scale = (grad_loss / count).view(1)  # a vector: float32 × bfloat16 is then float32
        return grad_x * scale, grad_w * scale, None, None, None, None


@torch.library.custom_op('plaingpt::after', mutates_args=())
def after(x: torch.Tensor, done: list[torch.Tensor]) -> torch.Tensor:
    """Return x, and make all that uses it wait until `done` is computed. torch.compile may reorder
    what does not depend on each other, such as chunks: it would compute the logits of all chunks
    before the gradients of any."""
    return x.clone()


@after.register_fake
def _(x, done):
    return torch.empty_like(x)


def summed_cross_entropy(logits, vocab_size, targets, training):
    """logits (n, V') float32, whose first vocab_size columns count; targets (n,) → the sum of the
    cross-entropies, and its gradient with respect to the logits, (n, V'), or None when not
    training. Overwrites logits."""
    # The gradient is softmax − one-hot, which is within ±1 and fits float16. Divided by the count,
    # it would be rounded to 0 there.
    if is_compiling():  # all of it becomes one kernel; in eager mode this takes twice as long
        return fused_cross_entropy(logits, vocab_size, targets[:, None], training)
    known, targets = targets[:, None] != -1, targets[:, None].clamp(min=0)  # (n, 1)
    if logits.size(1) > vocab_size:
        logits[:, vocab_size:] = -math.inf  # no part in the softmax, and no gradient
    logp = F.log_softmax(logits, dim=-1)
    del logits  # large
    loss = -logp.gather(1, targets)
    if not training:
        return (loss * known).sum(), None
    one_hot = -torch.ones_like(targets, dtype=torch.float)
    return (loss * known).sum(), logp.exp_().scatter_add_(1, targets, one_hot).mul_(known)


def fused_cross_entropy(logits, vocab_size, targets, training):
    """The same, for torch.compile; targets (n, 1). It computes powers of 2 and not of e, because a
    GPU has an instruction for them: this saves a fifth of all instructions for a logit."""
    ids = torch.arange(logits.size(1), device=logits.device)
    if logits.size(1) > vocab_size:
        logits = logits.masked_fill(ids >= vocab_size, -math.inf)
    logits, known = logits * (1 / math.log(2)), targets != -1
    highest = logits.amax(-1, keepdim=True)
    lse = highest + (logits - highest).exp2().sum(-1, keepdim=True).log2()
    loss = ((lse - logits.gather(1, targets.clamp(min=0))) * known).sum() * math.log(2)
    lse = lse.masked_fill(~known, math.inf)  # then a row's softmax is 0, and so is its gradient
    return loss, (logits - lse).exp2() - (ids == targets).float() if training else None
