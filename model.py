"""GPT-2 in one file, with PyTorch as its only dependency: configuration, layers, forward, generate.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; details that the paper
leaves out follow the released code, https://github.com/openai/gpt-2.
Flags of GPTConfig enable newer components; the defaults give GPT-2. docs/hacking.md shows common
changes as diffs.

Shapes: B = batch size, T = sequence length, C = n_embd, H = n_head (query heads), KV = key/value
heads (H unless n_kv_head is set), D = channels per head, V = vocab_size.

Names are GPT-2's: wte and wpe are the token and position embeddings, h the blocks, ln_f the final
norm; c_attn projects to Q, K and V, c_fc into the MLP, and c_proj back from each.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB_MULTIPLE = 128  # the vocabulary is padded to a multiple of this, for faster matmuls
VOCAB_WEIGHTS = ('wte.weight', 'value_embedding.weight', 'lm_head.weight')  # one row per token


def relu2(x):
    x = F.relu(x)
    return x * x  # under CUDA's autocast, square() would run in float32


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)  # (B, T, 2W) → 2 × (B, T, W)
    return F.silu(gate) * up


ACTIVATIONS = {
    'gelu': partial(F.gelu, approximate='tanh'),  # as in GPT-2 (Hendrycks and Gimpel 2016)
    'gelu_erf': F.gelu,  # exact GELU, as in nanoGPT; faster on a CPU
    'relu2': relu2,  # max(x, 0)² (So et al. 2021, "Primer")
    'swiglu': swiglu,  # Shazeer 2020
}


@dataclass
class GPTConfig:
    """Architecture of a GPT; the defaults are GPT-2 (124M). TrainConfig inherits the fields as
    settings, with bias=False by default. The comment beside a field is its help text."""
    # model
    block_size: int = 1024  # context length in tokens
    vocab_size: int = 50257  # vocabulary size
    n_layer: int = 12  # transformer blocks
    n_head: int = 12  # attention heads per block
    n_embd: int = 768  # embedding dimension (channels)
    dropout: float = 0.0  # dropout probability; try 0.1 or more on a small dataset
    bias: bool = True  # bias in Linears and LayerNorms, as in GPT-2; False: a bit better and faster
    # model: newer than GPT-2
    rotary: bool = False  # rotary position embeddings instead of learned ones (Su et al. 2021)
    rmsnorm: bool = False  # RMSNorm instead of LayerNorm (Zhang and Sennrich 2019)
    qk_norm: bool = False  # normalize queries and keys (Dehghani et al. 2023, section 2)
    mlp: Literal[*ACTIVATIONS] = 'gelu'  # MLP activation
    conv: int = 0  # kernel size of a causal convolution before each MLP (So et al. 2021); 0: none
    ngram_rows: int = 0  # rows of a hashed n-gram embedding (Svenstrup et al. 2017); 0: none
    ngram: int = 2  # with ngram_rows: tokens per n-gram
    value_embeddings: bool = False  # add a token embedding to each layer's values (Zhou 2024)
    tied_head: bool = True  # tie lm_head to the token embedding (Press and Wolf 2017)
    n_kv_head: int = 0  # key/value heads (grouped-query attention); 0: n_head
    zero_init: Literal['head'] | bool = False  # zero-init output projections; head: only lm_head
    document_attention: bool = False  # no attention across documents; positions restart in each
    # not listed in --help: set by a pretrained model or by the dataset
    head_dim: int = 0  # channels per head; 0: n_embd / n_head
    n_inner: int = 0  # hidden size of the MLP; 0: 4 n_embd, or 8/3 n_embd with swiglu
    qkv_bias: bool = False  # with bias=False: bias in the QKV projection only (Qwen2)
    norm_eps: float = 1e-5  # epsilon of LayerNorm or RMSNorm
    rotary_base: float = 10000.0  # base of the rotary frequencies; larger for longer contexts
    rotary_factor: float = 1.0  # divide low rotary frequencies by this (Llama 3.1); 1: off
    rotary_length: int = 8192  # with rotary_factor: context length before the extension
    document_start: int = -1  # with document_attention: id of the token that starts a document

    @property
    def learned_positions(self):
        return not self.rotary

    @property
    def padded_vocab_size(self):
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def mlp_width(self):
        if self.n_inner:
            return self.n_inner
        if self.mlp == 'swiglu':  # three matrices, not two: 2/3 of 4C keeps the parameter count
            return math.ceil(8 * self.n_embd / 3 / 32) * 32
        return 4 * self.n_embd

    @property
    def head_size(self):  # D
        return self.head_dim or self.n_embd // self.n_head

    @property
    def qkv_sizes(self):  # total channels of queries, keys and values
        n_kv_head = self.n_kv_head or self.n_head
        return tuple(n * self.head_size for n in (self.n_head, n_kv_head, n_kv_head))

    def conflicts(self):
        """Fields that contradict each other, one message each."""
        conflicts = []
        if not self.head_dim and self.n_embd % self.n_head:
            conflicts.append(f'n_embd={self.n_embd} is not a multiple of n_head={self.n_head}')
        elif self.rotary and self.head_size % 2:
            head_dim = 'head_dim' if self.head_dim else 'n_embd / n_head'
            conflicts.append(f'rotary=True needs an even {head_dim}; got {self.head_size}')
        if self.n_kv_head and self.n_head % self.n_kv_head:
            conflicts.append(
                f'n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}')
        if self.ngram_rows and not 2 <= self.ngram <= self.block_size:
            conflicts.append(
                f'ngram={self.ngram}: must be between 2 and block_size={self.block_size}')
        if self.conv == 1:
            conflicts.append('conv=1: must be 0 (off) or at least 2')
        if self.document_attention and self.document_start == -1:
            conflicts.append('document_attention=True needs document_start, a token id')
        return conflicts


class LayerNorm(nn.LayerNorm):
    def forward(self, x):  # (…, C); under CUDA's autocast, layer_norm returns float32
        weight, bias = self.weight, self.bias
        if weight.dtype != torch.float32:  # FSDP gathers it in autocast's dtype
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):  # (…, C); torch's fused kernel needs the weight in the dtype of x
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(x.dtype)


def norm(config, size):
    """LayerNorm or RMSNorm over the last `size` channels; returns the dtype of its input."""
    if config.rmsnorm:
        return RMSNorm(size, eps=config.norm_eps)
    return LayerNorm(size, eps=config.norm_eps, bias=config.bias)


def rotary_table(config):
    """Position t rotates the channel pair (i, i + D/2) by t·base^(−2i/D) radians, so q·k depends on
    the distance between two tokens, not on where they are. Returns cos and sin, each
    (block_size, D). The first half of sin is negated, as rotate() expects."""
    n = config.head_size // 2
    frequencies = config.rotary_base ** (-torch.arange(n) / n)  # (D/2,), radians per position
    if config.rotary_factor != 1:
        frequencies = frequencies * llama3_scaling(frequencies, config)
    angles = torch.outer(torch.arange(config.block_size), frequencies)  # (block_size, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def llama3_scaling(frequencies, config):
    """(D/2,) → (D/2,): Llama 3.1's factor per frequency: 1 for pairs with at least 4 turns within
    rotary_length, 1 / rotary_factor for pairs with less than one, interpolated in between."""
    turns = config.rotary_length * frequencies / (2 * math.pi)
    smooth = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return smooth + (1 - smooth) / config.rotary_factor


def rotate(x, cos, sin):
    """x (B, H, T, D); cos, sin (…, T, D) from rotary_table → (B, H, T, D). A pair of channels
    (a, b) becomes (a·cos − b·sin, b·cos + a·sin)."""
    swapped = x.roll(x.size(-1) // 2, dims=-1)  # channels i and i + D/2 change places
    return torch.addcmul(x * cos.to(x.dtype), swapped, sin.to(x.dtype))


class Documents(NamedTuple):
    """The documents packed into each sequence of a batch."""

    positions: torch.Tensor  # (B, T): position of each token within its document
    mask: torch.Tensor  # (B, 1, T, T): True where a token (row) attends to another (column)


def find_documents(idx, start_id):
    """idx (B, T), id of the token that starts each document → Documents."""
    columns = torch.arange(idx.size(1), device=idx.device)  # (T,)
    # the column where each token's document starts; 0 if it started in an earlier sequence
    # S: start_id, x: another token; S x x S x → starts 0 0 0 3 3
    starts = torch.where(idx == start_id, columns, 0).cummax(dim=1).values  # (B, T)
    visible = (columns <= columns[:, None]) & (columns >= starts[..., None])  # (B, T, T)
    return Documents(columns - starts, visible[:, None])


class NgramEmbedding(nn.Module):
    """An embedding of the n-gram that ends at each token. If the table is too small for all
    n-grams, those with the same hash share a row (Svenstrup et al. 2017, "Hash Embeddings")."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.ngram_rows, config.n_embd))
        self.n = config.ngram
        # a polynomial hash: factor^(n-1)·first + … + last, modulo `modulus`
        self.factor = config.vocab_size
        self.modulus = config.ngram_rows
        if config.vocab_size**self.n > config.ngram_rows:
            # an odd factor is invertible modulo a power of two: every token affects the hash
            self.factor = 1_000_003
            self.modulus = 2**math.ceil(math.log2(config.ngram_rows))

    def forward(self, idx, documents=None, cache=None):
        """idx (B, T) → (B, T, C). cache: a KVCache; tokens before the start of the text or of the
        document count as token 0."""
        n, T = self.n, idx.size(1)
        if cache is None:
            padded = F.pad(idx, (n - 1, 0))  # (B, n - 1 + T)
        else:
            padded = cache.tokens.prepend_earlier(idx[..., None], n - 1)[..., 0]  # (B, n - 1 + T)
        hashes = torch.zeros_like(idx)
        for k in reversed(range(n)):
            earlier = padded[:, n - 1 - k:n - 1 - k + T]  # (B, T): the token k positions back
            if documents is not None:
                earlier = earlier.masked_fill(documents.positions < k, 0)
            hashes = (hashes * self.factor + earlier) % self.modulus
        rows = hashes * len(self.weight) // self.modulus  # scale [0, modulus) to [0, ngram_rows)
        return F.embedding(rows, self.weight)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.qkv_sizes = config.qkv_sizes
        self.c_attn = nn.Linear(config.n_embd, sum(self.qkv_sizes),
                                bias=config.bias or config.qkv_bias)
        self.c_proj = nn.Linear(self.qkv_sizes[0], config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.q_norm = norm(config, config.head_size) if config.qk_norm else nn.Identity()
        self.k_norm = norm(config, config.head_size) if config.qk_norm else nn.Identity()
        self.sdpa = F.scaled_dot_product_attention  # train.py may replace it (core/attention.py)
        self.value_embedding = None
        if config.value_embeddings:
            self.value_embedding = nn.Embedding(config.padded_vocab_size, self.qkv_sizes[2])

    def forward(self, x, idx, rotary=None, documents=None, cache=None):
        """x (B, T, C), hidden states of the tokens idx (B, T) → (B, T, C).

        idx: token ids, for the value embedding
        rotary: cos and sin at the positions of these tokens
        documents: each token attends within its own document only
        cache: one layer of a KVCache, with the keys and values of earlier tokens"""
        B, T = idx.shape
        D = self.head_size
        q, k, v = self.c_attn(x).split(self.qkv_sizes, dim=2)  # (B, T, H·D), 2 × (B, T, KV·D)
        if self.value_embedding is not None:
            v = v + self.value_embedding(idx).to(v.dtype)  # autocast does not cast embeddings
        q = self.q_norm(q.view(B, T, -1, D)).transpose(1, 2)  # (B, H, T, D)
        k = self.k_norm(k.view(B, T, -1, D)).transpose(1, 2)  # (B, KV, T, D)
        v = v.view(B, T, -1, D).transpose(1, 2)  # (B, KV, T, D)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)

        mask = None if documents is None else documents.mask
        if cache is not None:
            k, v, mask = cache.extend(k, v)  # keys and values of all tokens so far
        # y = softmax(q kᵀ / √D) v, where each token attends to itself and to earlier tokens. With
        # a cache, a row is one document, and a single new token needs no mask: it attends to all.
        is_causal = mask is None and cache is None
        y = self.sdpa(q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0,
                      is_causal=is_causal, enable_gqa=k.size(1) < self.n_head)  # (B, H, T, D)
        y = y.transpose(1, 2).flatten(2)  # (B, H, T, D) → (B, T, H·D)
        return self.resid_dropout(self.c_proj(y))


class ShortConv(nn.Module):
    """A causal depthwise convolution over the last K tokens, with a residual connection (So et al.
    2021, "Primer"; Allen-Zhu 2025, "Canon layers")."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.conv, config.n_embd))

    def forward(self, x, documents=None, cache=None):
        """x (B, T, C) → y (B, T, C), y_t = x_t + Σ_k weight_k · x_(t-k), 0 ≤ k < K. documents,
        cache: as in attention; tokens of other documents are masked."""
        K, T = len(self.weight), x.size(1)
        # (B, T, C) → (B, K - 1 + T, C)
        padded = F.pad(x, (0, 0, K - 1, 0)) if cache is None else cache.prepend_earlier(x, K - 1)
        y = x
        for k, w in enumerate(self.weight.to(x.dtype)):
            earlier = padded[:, K - 1 - k:K - 1 - k + T]  # (B, T, C): x from k positions back
            if documents is not None:
                earlier = earlier.masked_fill((documents.positions < k)[..., None], 0.0)
            y = torch.addcmul(y, w, earlier)
        return y


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width_in = config.mlp_width
        if config.mlp == 'swiglu':  # gate and up projections
            width_in *= 2
        self.c_fc = nn.Linear(config.n_embd, width_in, bias=config.bias)
        self.activation = ACTIVATIONS[config.mlp]
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):  # (B, T, C) → (B, T, C)
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


class Block(nn.Module):
    """Attention, then an MLP. Each reads a normalized copy of the residual stream (pre-norm: GPT-2,
    section 2.3) and adds its output to the stream, through which gradients pass unchanged."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = norm(config, config.n_embd)
        self.conv = ShortConv(config) if config.conv else None
        self.mlp = MLP(config)

    def forward(self, x, idx, rotary=None, documents=None, cache=None):
        x = x + self.attn(self.ln_1(x), idx, rotary, documents, cache)  # (B, T, C)
        h = self.ln_2(x)  # (B, T, C)
        if self.conv is not None:
            h = self.conv(h, documents, cache)
        return x + self.mlp(h)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert not config.conflicts(), config.conflicts()
        self.config = config
        modules = {'wte': nn.Embedding(config.padded_vocab_size, config.n_embd)}
        if config.learned_positions:
            modules['wpe'] = nn.Embedding(config.block_size, config.n_embd)
        if config.ngram_rows:
            modules['ngram'] = NgramEmbedding(config)
        modules['drop'] = nn.Dropout(config.dropout)
        modules['h'] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        modules['ln_f'] = norm(config, config.n_embd)
        self.transformer = nn.ModuleDict(modules)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.transformer.wte.weight
        if config.rotary:
            cos, sin = rotary_table(config)  # 2 × (block_size, D)
            self.register_buffer('cos', cos, persistent=False)
            self.register_buffer('sin', sin, persistent=False)
        self.loss_in_chunks = None  # train.py sets f(model, x, targets): loss() in less memory
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Initialize matrices from N(0, 0.02²), sufficient with so many norms (Radford et al. 2018,
        section 4.1), norms to 1 and biases to 0. Modules named conv, value_embedding or ngram start
        at zero, and c_proj has its own std. Parameters of any other module are left as created."""
        zeros = {'conv', 'value_embedding', 'ngram'}  # added to other terms: they start as no-ops
        # 1/√(2L): the variance of the sum of 2L branches does not grow with L (GPT-2, section 2.3)
        c_proj_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        if self.config.zero_init:
            zeros.add('lm_head')
        if self.config.zero_init is True:  # each residual branch starts as a no-op
            zeros.add('c_proj')
        elif self.config.zero_init == 'head':
            c_proj_std = 1 / math.sqrt(self.config.n_embd)  # large: delays memorizing a text
        for path, module in self.named_modules():
            name = path.rpartition('.')[2]  # 'transformer.h.0.mlp.c_proj' → 'c_proj'
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()  # weight 1, bias 0
            elif isinstance(module, nn.Linear | nn.Embedding | ShortConv | NgramEmbedding):
                if name == 'lm_head' and self.config.tied_head:
                    continue  # it has been initialized as wte
                if name in zeros:
                    nn.init.zeros_(module.weight)
                else:
                    nn.init.normal_(module.weight, std=c_proj_std if name == 'c_proj' else 0.02)
                if getattr(module, 'bias', None) is not None:
                    nn.init.zeros_(module.bias)
                if f'{name}.weight' in VOCAB_WEIGHTS:
                    module.weight[self.config.vocab_size:] = 0.0  # padding

    def forward(self, idx, targets=None):
        """idx (B, T) int64, T ≤ block_size → (logits (B, T, V), None).

        With targets (B, T), the next tokens → (logits, mean loss in nats per token). Targets of -1
        are ignored; if all are, the loss is 0. With loss_in_chunks → (None, the same loss)."""
        x = self.hidden(idx)  # (B, T, C)
        if targets is None:
            return self.logits(x), None
        if self.loss_in_chunks is None:
            logits = self.logits(x)  # (B, T, V)
            loss = self.loss(logits, targets)
        else:
            logits, loss = None, self.loss_in_chunks(self, x, targets)
        loss = loss / (targets != -1).sum().clamp(min=1)
        return logits, loss  # an auxiliary loss: add it only if self.training, not in evaluations

    def loss(self, logits, targets):
        """logits (…, V), targets (…) → the cross-entropy in nats, summed over the targets that are
        not -1. Training, evaluation and plan.py call this with some of the tokens at a time, so a
        term that depends on anything but these two arguments belongs in forward()."""
        logits, targets = logits.flatten(0, -2), targets.flatten()  # (N, V), (N,)
        return F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction='sum')

    def hidden(self, idx, cache=None):
        """idx (B, T) → the final hidden states (B, T, C), which are the input of the head. cache: a
        KVCache of earlier tokens, after its advance(T) (plaingpt/inference/generation.py)."""
        block_size = self.config.block_size
        assert idx.size(1) <= block_size, f'{idx.size(1)} tokens exceed block_size={block_size}'
        positions = torch.arange(idx.size(1), device=idx.device)  # (T,): rows of wpe, cos and sin
        documents = None
        layer_caches = [None] * len(self.transformer.h)
        if cache is not None:
            positions = cache.positions  # (T,) or (B, T)
            layer_caches = cache.layers
        elif self.config.document_attention:
            documents = find_documents(idx, self.config.document_start)
            positions = documents.positions  # (B, T)
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.ngram_rows:
            x = x + self.transformer.ngram(idx, documents, cache)  # (B, T, C)
        if self.config.learned_positions:
            x = x + self.transformer.wpe(positions)  # (B, T, C) + (T, C) or (B, T, C)
        rotary = None
        if self.config.rotary:  # 2 × (1, T, D), or (B, 1, T, D) if positions differ between rows
            rotary = self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)
        x = self.transformer.drop(x)
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream too: half the memory; float16 could overflow
        for block, layer_cache in zip(self.transformer.h, layer_caches, strict=True):
            x = block(x, idx, rotary, documents, layer_cache)  # (B, T, C)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """Hidden states (…, C) → logits (…, V), without the padding of the vocabulary."""
        return self.lm_head(x)[..., :self.config.vocab_size]

    def num_parameters(self, without=()):
        """Number of parameters. Tied weights count once, and the padding of the vocabulary does not
        count. without: suffixes of the names of parameters to leave out"""
        total = 0
        for name, p in self.named_parameters():
            if name.endswith(VOCAB_WEIGHTS):
                p = p[:self.config.vocab_size]
            if not name.endswith(without):
                total += p.numel()
        return total

    def flops_per_token(self):
        """FLOPs to train on one token (PaLM, appendix B): 6 per parameter (2 forward, 4 backward),
        plus 12·L·H·D·T for attention. Embeddings do not count: a lookup is not a matmul."""
        c = self.config
        embeddings = ('wpe.weight', 'value_embedding.weight', 'ngram.weight')
        if not c.tied_head:  # a tied wte is the matrix of the head
            embeddings += ('wte.weight',)
        return 6 * self.num_parameters(embeddings) + 12 * c.n_layer * c.qkv_sizes[0] * c.block_size

    def crop_block_size(self, block_size):
        """Drop the positions beyond `block_size`, e.g. to fine-tune on shorter sequences."""
        assert block_size <= self.config.block_size
        self.config = replace(self.config, block_size=block_size)
        if self.config.learned_positions:
            cropped = self.transformer.wpe.weight[:block_size].detach()
            self.transformer.wpe = nn.Embedding.from_pretrained(cropped, freeze=False)
        if self.config.rotary:
            self.cos, self.sin = self.cos[:block_size].clone(), self.sin[:block_size].clone()

    @classmethod
    def from_pretrained(cls, source):
        """A GPT with pretrained weights, in eval mode. source: 'gpt2', 'gpt2-medium', 'gpt2-large',
        'gpt2-xl', OWNER/NAME on the Hugging Face Hub, a folder in its layout, the out_dir of a run,
        or nanoGPT's ckpt.pt. Needs plaingpt/ beside this file."""
        from plaingpt.inference.open_weights import make_model, open_weights
        return make_model(open_weights(source))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Append `max_new_tokens` sampled tokens to idx (B, T) → (B, T + max_new_tokens).
        temperature 0 is greedy. Call eval() first. Once the context is full, each new token drops
        the oldest. sample.py is several times faster: it has a KV cache, and drops half at once."""
        for _ in range(max_new_tokens):
            x = self.hidden(idx[:, -self.config.block_size:])  # (B, T, C)
            logits = self.logits(x[:, -1])  # (B, V)
            if top_k:
                kth_largest = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
                logits = logits.masked_fill(logits < kth_largest, -math.inf)
            if temperature:
                probs = F.softmax(logits.float() / temperature, dim=-1)  # (B, V)
                idx_next = torch.multinomial(probs, num_samples=1, generator=generator)  # (B, 1)
            else:
                idx_next = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
            idx = torch.cat((idx, idx_next), dim=1)  # (B, T + 1)
        return idx
