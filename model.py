"""GPT-2 in one file: configuration, layers, initialisation, forward pass, loss.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; what the paper leaves
open follows the released code, https://github.com/openai/gpt-2. Parameter names are nanoGPT's.
Newer parts stand behind flags of GPTConfig, whose defaults are GPT-2.

B batch, T tokens in a sequence, C = n_embd, H = n_head, D channels of a head, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from plaingpt.kernels import (
    attention,
    chunked_cross_entropy,
    cross_entropy,
    find_documents,
    recomputed,
    relu2,
    residual_stream,
    short_conv,
)

VOCAB_MULTIPLE = 128  # matmuls are fast when their sizes divide by powers of two
Size = Annotated[int, f'at least 1 and at most {2**40}']  # the configurator checks such limits
Count = Annotated[int, f'at least 0 and at most {2**40}']
Above0 = Annotated[float, 'above 0']
ROW_PER_TOKEN = ('wte.weight', 'value_embedding.weight', 'lm_head.weight')


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
    block_size: Size = 1024  # tokens in a sequence
    vocab_size: Size = 50257  # tokens that there are
    n_layer: Annotated[int, 'at least 1 and at most 10_000'] = 12  # blocks
    n_head: Size = 12  # attention heads
    n_embd: Size = 768  # channels
    dropout: Annotated[float, 'at least 0 and below 1'] = 0.0  # 0.1 and more for little text
    bias: bool = True  # biases in Linears and LayerNorms, as in GPT-2; without is a bit better
    # model: newer than GPT-2
    rotary: bool = False  # rotary positions instead of learned ones (Su et al. 2021)
    rmsnorm: bool = False  # RMSNorm instead of LayerNorm (Zhang and Sennrich 2019)
    qk_norm: bool = False  # normalise queries and keys (Dehghani et al. 2023, section 2)
    mlp: Literal[*ACTIVATIONS] = 'gelu'  # the MLP's activation
    conv: int = 0  # before an MLP, mix each token with the conv - 1 before it (So 2021); 0: no
    value_embeddings: bool = False  # add a learned embedding of the token to values (Zhou 2024)
    tied_head: bool = True  # the head's weight is the embedding's (Press and Wolf 2017)
    n_kv_head: Count = 0  # heads of keys and values, each for several of queries; 0: n_head
    zero_init: bool = False  # output projections begin at zero: branches add nothing at first
    document_attention: bool = False  # attention and positions stay within a document
    # not listed: of models that are loaded, or of a dataset
    head_dim: Count = 0  # channels of a head; 0: n_embd / n_head
    n_inner: Count = 0  # hidden units of an MLP; 0: 4 n_embd, with swiglu 8/3 n_embd
    qkv_bias: bool = False  # with bias=False, biases of queries, keys and values alone (Qwen2)
    norm_eps: Above0 = 1e-5  # what norms add to the variance
    rotary_base: Above0 = 10000.0  # a higher one turns slower, for longer sequences
    rotary_factor: Above0 = 1.0  # slow angles are divided by it (Llama 3.1); 1: none
    rotary_length: Size = 8192  # for that, the tokens that the model read at first
    document_start: int = -1  # for that, the token that opens each document

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
    """→ (D/2,): by how much a position turns each pair of channels, (i, i + D/2). Pairs that turn
    less than 4 times within rotary_length turn slower, down to 1/rotary_factor for those that turn
    less than once ("The Llama 3 Herd of Models" 2024 gives the base; the rest is its code)."""
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
        """x (B, T, C), of the tokens idx (B, T) → (B, T, C). rotary: rows of rotary_table, of the
        positions; documents, cache: as of attention()"""
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
        return short_conv(x, self.weight, documents, cache)


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
        # How to compute: no part of the architecture, and may change at any time.
        self.loss_chunk_tokens = 0  # with targets, so many have logits at once; 0: all; or 'auto'
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
        """idx (B, T) → what the head reads the next token from, (B, T, C). cache: a KVCache of
        plaingpt/inference/generation.py, with the tokens before these; these are added."""
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
        x = residual_stream(self.transformer.drop(x))
        for block, layer in zip(self.transformer.h, layers, strict=True):
            x = recomputed(self.activation_checkpointing, block, x, idx, rotary, documents, layer)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """(…, C) → (…, V). The padding of the vocabulary is cut off here and shows nowhere."""
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
        """Parameters but the embeddings that are only looked up."""
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
    def from_pretrained(cls, source, dropout=0.0):
        """The weights of others: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl' from the hub, a
        folder in the Hugging Face layout, or a ckpt.pt of nanoGPT or build-nanogpt. UserError."""
        from plaingpt.inference.pretrained import load_pretrained
        return load_pretrained(source, dropout)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, **sampling):
        """Append `max_new_tokens` sampled tokens to idx (B, T) → (B, T + max_new_tokens).
        sampling: top_p, min_p, repetition_penalty, end_of_text … of generation.generate"""
        from plaingpt.inference.generation import generate_batch
        return generate_batch(self, idx, max_new_tokens, temperature, top_k, **sampling)
