"""GPT-2 in one file, with PyTorch as its only dependency: configuration, layers, forward, generate.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; what the paper leaves
open follows the released code, https://github.com/openai/gpt-2. Parameter names are nanoGPT's.
Flags of GPTConfig enable newer components; their defaults give GPT-2.

Shapes: B sequences in a batch, T tokens in each, C = n_embd channels, H = n_head query heads, KV
key/value heads (KV = H unless n_kv_head is set), D channels per head, V tokens in the vocabulary.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB_MULTIPLE = 128  # of rows in embedding and head: matmuls are fastest with such sizes
ROW_PER_TOKEN = ('wte.weight', 'value_embedding.weight', 'lm_head.weight')  # padded too


def relu2(x):
    x = F.relu(x)
    return x * x  # CUDA's autocast would compute square() in float32


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)  # (B, T, 2W) → 2 × (B, T, W)
    return F.silu(gate) * up


ACTIVATIONS = {
    'gelu': partial(F.gelu, approximate='tanh'),  # as in GPT-2 (Hendrycks and Gimpel 2016)
    'gelu_erf': F.gelu,  # the exact GELU, as in nanoGPT; several times as fast on a CPU
    'relu2': relu2,  # max(x, 0)² (So et al. 2021, "Primer")
    'swiglu': swiglu,  # Shazeer 2020
}


@dataclass
class GPTConfig:
    """The shape of a GPT; the defaults are GPT-2 124M. Each field is a setting, its comment the
    help text."""
    # model
    block_size: int = 1024  # tokens in a sequence
    vocab_size: int = 50257  # tokens in the vocabulary
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads
    n_embd: int = 768  # channels
    dropout: float = 0.0  # 0.1 or more for a small dataset
    bias: bool = True  # biases in Linears and LayerNorms, as in GPT-2; False is slightly better
    # model: newer than GPT-2
    rotary: bool = False  # rotary position embeddings instead of learned ones (Su et al. 2021)
    rmsnorm: bool = False  # RMSNorm instead of LayerNorm (Zhang and Sennrich 2019)
    qk_norm: bool = False  # normalize queries and keys (Dehghani et al. 2023, section 2)
    mlp: Literal[*ACTIVATIONS] = 'gelu'  # activation of the MLP
    conv: int = 0  # causal convolution of this width before each MLP (So et al. 2021); 0: none
    ngram_rows: int = 0  # rows of a hashed n-gram embedding (Svenstrup et al. 2017); 0: none
    ngram: int = 2  # with ngram_rows: tokens per n-gram
    value_embeddings: bool = False  # add a token embedding to each layer's values (Zhou 2024)
    tied_head: bool = True  # the head shares the embedding's weight (Press and Wolf 2017)
    n_kv_head: int = 0  # key/value heads (grouped-query attention); 0: n_head
    zero_init: bool = False  # zero-init output projections: each residual branch starts as a no-op
    document_attention: bool = False  # attention and positions stay within a document
    # not listed: set by a pretrained model or by the dataset
    head_dim: int = 0  # channels per head; 0: n_embd / n_head
    n_inner: int = 0  # hidden units of an MLP; 0: 4 n_embd, with swiglu 8/3 n_embd
    qkv_bias: bool = False  # with bias=False, biases of queries, keys and values only (Qwen2)
    norm_eps: float = 1e-5  # epsilon of the norms
    rotary_base: float = 10000.0  # larger: longer wavelengths, for longer contexts
    rotary_factor: float = 1.0  # divides low frequencies (Llama 3.1); 1: off
    rotary_length: int = 8192  # with rotary_factor: the block_size before it was extended
    document_start: int = -1  # with document_attention: id of the token that begins a document

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
        if self.mlp == 'swiglu':  # three matrices, not two: 2/3 of 4C has as many weights
            return math.ceil(8 * self.n_embd / 3 / 32) * 32
        return 4 * self.n_embd

    @property
    def head_size(self):  # D
        return self.head_dim or self.n_embd // self.n_head

    @property
    def qkv_sizes(self):  # channels of all queries, of all keys, of all values
        n_kv_head = self.n_kv_head or self.n_head
        return tuple(n * self.head_size for n in (self.n_head, n_kv_head, n_kv_head))

    def conflicts(self):
        """Fields that contradict each other, one message each."""
        found = []
        remainder = 0 if self.head_dim else self.n_embd % self.n_head
        if remainder:
            found.append(f'n_embd={self.n_embd} is not a multiple of n_head={self.n_head}')
        if self.n_kv_head and self.n_head % self.n_kv_head:
            found.append(f'n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}')
        if self.rotary and not remainder and self.head_size % 2:
            head_dim = 'head_dim' if self.head_dim else 'n_embd / n_head'
            found.append(f'rotary=True needs an even {head_dim}, not {self.head_size}')
        if self.ngram_rows and not 2 <= self.ngram <= self.block_size:
            found.append(f'ngram={self.ngram}: must be from 2 to block_size={self.block_size}')
        if self.conv == 1:
            found.append('conv=1: must be 0, or 2 or more')
        if self.document_attention and self.document_start == -1:
            found.append('document_attention=True needs document_start')
        return found


class RMSNorm(nn.RMSNorm):
    def forward(self, x):  # (…, C); torch's fused kernel needs weight and x in one dtype
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def norm(config, size):
    """LayerNorm or RMSNorm over the last `size` channels."""
    if config.rmsnorm:
        return RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)


def rotary_table(config):
    """cos and sin of the angle by which each position rotates each pair of channels (i, i + D/2):
    2 × (block_size, D). The sines of the first half are negative, as rotate() needs them."""
    n = config.head_size // 2
    frequencies = config.rotary_base ** (-torch.arange(n) / n)  # (D/2,), radians per position
    if config.rotary_factor != 1:
        frequencies = frequencies * slowdown(frequencies, config)
    angles = torch.outer(torch.arange(config.block_size), frequencies)  # (block_size, D/2)
    sines = angles.sin()
    return torch.cat((angles, angles), dim=-1).cos(), torch.cat((-sines, sines), dim=-1)


def slowdown(frequencies, config):
    """(D/2,) → (D/2,): Llama 3.1's factors on the frequencies. Pairs that turn less than
    once within rotary_length are slowed down by rotary_factor, those that turn 4 times are not."""
    turns = config.rotary_length * frequencies / (2 * math.pi)  # within rotary_length
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return kept + (1 - kept) / config.rotary_factor


def rotate(x, cos, sin):
    """x (B, H, T, D); cos, sin (…, T, D) of rotary_table → (B, H, T, D). A pair of channels (a, b)
    becomes (a·cos − b·sin, b·cos + a·sin)."""
    partners = x.roll(x.size(-1) // 2, dims=-1)  # (a, b) → (b, a)
    return torch.addcmul(x * cos.to(x.dtype), partners, sin.to(x.dtype))


def repeat_kv(x, n_head):
    """Repeat each key/value head for the query heads that share it: (B, KV, T, D) → (B, H, T, D).
    torch's enable_gqa does so too, but then no fused GPU kernel takes a mask."""
    repeats = n_head // x.size(1)
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


class Documents(NamedTuple):
    """Several documents in each sequence, as find_documents() finds them."""

    positions: torch.Tensor  # (B, T): of each token in its document
    mask: torch.Tensor  # (B, 1, T, T): True where a token (row) attends to another (column)


def find_documents(idx, bos_id):
    """idx (B, T), the id of the token that begins each document → Documents."""
    columns = torch.arange(idx.size(1), device=idx.device)  # (T,)
    # the column where each token's document begins; 0 if it began in an earlier sequence
    starts = torch.where(idx == bos_id, columns, 0).cummax(dim=1).values  # (B, T)
    visible = (columns <= columns[:, None]) & (columns >= starts[..., None])  # (B, T, T)
    return Documents(columns - starts, visible[:, None])


class NgramEmbedding(nn.Module):
    """An embedding of each token together with the n - 1 before it. Where the table is too small
    for all n-grams, those with the same hash share a row (Svenstrup et al. 2017, "Hash
    Embeddings")."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.ngram_rows, config.n_embd))
        self.n = config.ngram
        # a polynomial hash: factor^(n-1)·first + … + last, modulo `modulus`
        self.factor = config.vocab_size
        self.modulus = config.ngram_rows
        if config.vocab_size**self.n > config.ngram_rows:
            # modulo a power of two an odd factor loses nothing of any token
            self.factor = 1_000_003
            self.modulus = 2**math.ceil(math.log2(config.ngram_rows))

    def forward(self, idx, documents=None, cache=None):
        """idx (B, T) → (B, T, C). documents, cache: as in attention; tokens before the first one,
        and of other documents, count as 0."""
        n, T = self.n, idx.size(1)
        if cache is None:
            padded = F.pad(idx, (n - 1, 0))  # (B, n - 1 + T)
        else:
            padded = cache.tokens.with_earlier(idx[..., None], n - 1)[..., 0]
        hashes = torch.zeros_like(idx)
        for k in reversed(range(n)):
            earlier = padded[:, n - 1 - k:n - 1 - k + T]  # (B, T): k tokens before each
            if documents is not None:
                earlier = earlier.masked_fill(documents.positions < k, 0)
            hashes = (hashes * self.factor + earlier) % self.modulus
        return F.embedding(hashes * len(self.weight) // self.modulus, self.weight)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.qkv_sizes = config.qkv_sizes
        self.c_attn = nn.Linear(config.n_embd, sum(self.qkv_sizes),
                                bias=config.bias or config.qkv_bias)
        self.c_attn.matrix_rows = self.qkv_sizes  # Muon updates each of the three separately
        self.c_proj = nn.Linear(self.qkv_sizes[0], config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.q_norm = norm(config, config.head_size) if config.qk_norm else nn.Identity()
        self.k_norm = norm(config, config.head_size) if config.qk_norm else nn.Identity()
        self.attention = None  # set by train.py: a faster kernel for CPUs
        self.value_embedding = None
        if config.value_embeddings:
            self.value_embedding = nn.Embedding(config.padded_vocab_size, self.qkv_sizes[2])

    def forward(self, x, idx, rotary=None, documents=None, cache=None):
        """x (B, T, C), computed from the tokens idx (B, T) → (B, T, C).

        rotary: cos and sin for the positions of these tokens; documents: attend within each of them
        cache: one layer of a KVCache, which holds the keys and values of the tokens before these"""
        B, T = idx.shape
        D = self.head_size
        q, k, v = self.c_attn(x).split(self.qkv_sizes, dim=2)  # (B, T, H·D), 2 × (B, T, KV·D)
        if self.value_embedding is not None:
            v = v + self.value_embedding(idx).to(v.dtype)  # autocast leaves embeddings alone
        q = self.q_norm(q.view(B, T, -1, D)).transpose(1, 2)  # (B, H, T, D)
        k = self.k_norm(k.view(B, T, -1, D)).transpose(1, 2)  # (B, KV, T, D)
        v = v.view(B, T, -1, D).transpose(1, 2)  # (B, KV, T, D)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under CUDA's autocast norms return float32

        mask = None if documents is None else documents.mask
        if cache is not None:
            k, v, mask = cache.extend(k, v)  # keys and values of all tokens so far
        if T > 1:  # for one token, repeating the whole cache would take longer than attention
            k, v = repeat_kv(k, self.n_head), repeat_kv(v, self.n_head)
        attention = self.attention or F.scaled_dot_product_attention
        y = attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and cache is None,  # with a cache, None lets a token see all
            enable_gqa=k.size(1) < self.n_head)  # (B, H, T, D)
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
        cache: as in attention; tokens of other documents are masked."""
        K = len(self.weight)
        T = x.size(1)
        # (B, T, C) → (B, K - 1 + T, C)
        padded = F.pad(x, (0, 0, K - 1, 0)) if cache is None else cache.with_earlier(x, K - 1)
        y = x
        for k, w in enumerate(self.weight.to(x.dtype)):
            earlier = padded[:, K - 1 - k:K - 1 - k + T]  # (B, T, C): k tokens before each
            if documents is not None:
                earlier = earlier.masked_fill((documents.positions < k)[..., None], 0.0)
            y = torch.addcmul(y, w, earlier)
        return y


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        n_matrices = 2 if config.mlp == 'swiglu' else 1  # SwiGLU: gate and up projection
        width_in = n_matrices * config.mlp_width
        self.c_fc = nn.Linear(config.n_embd, width_in, bias=config.bias)
        self.c_fc.matrix_rows = n_matrices * (config.mlp_width,)  # Muon updates each separately
        self.activation = ACTIVATIONS[config.mlp]
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):  # (B, T, C) → (B, T, C)
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
        x = x + self.attn(self.ln_1(x), idx, rotary, documents, cache)  # (B, T, C)
        h = self.ln_2(x).to(x.dtype)  # under CUDA's autocast norms return float32
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
        self.loss_function = None  # set by train.py: the loss without all logits at once
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draw matrices from N(0, 0.02²), as GPT-2 does. Norms start as 1, biases as 0."""
        # added to what is there: no-ops at first
        zeros = ('conv.weight', 'value_embedding.weight', 'ngram.weight')
        if self.config.zero_init:
            zeros += ('c_proj.weight', 'lm_head.weight')
        for name, p in self.named_parameters():
            if p.dim() == 1:
                nn.init.constant_(p, 1.0 if name.endswith('weight') else 0.0)
            elif name.endswith(zeros):
                nn.init.zeros_(p)
            elif name.endswith('c_proj.weight'):  # 2L branches add up their variance (GPT-2, §2.3)
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))
            else:
                nn.init.normal_(p, std=0.02)
            if name.endswith(ROW_PER_TOKEN):
                p[self.config.vocab_size:] = 0.0  # the padding

    def forward(self, idx, targets=None):
        """idx (B, T) int64, T ≤ block_size → (logits (B, T, V), None). With targets (B, T), -1
        to ignore one: (logits, mean cross-entropy in nats), 0 if all are ignored. If loss_function
        is set, it computes the same loss from the hidden states: (None, loss)."""
        x = self.hidden(idx)  # (B, T, C)
        if targets is not None and self.loss_function is not None:  # as in train.py
            return None, self.loss_function(x, self.lm_head.weight, self.config.vocab_size, targets)
        logits = self.logits(x)  # (B, T, V)
        if targets is None:
            return logits, None
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(),  # (B·T, V), (B·T,)
                                ignore_index=-1, reduction='sum')
        return logits, total / (targets != -1).sum().clamp(min=1)

    def hidden(self, idx, cache=None):
        """idx (B, T) → (B, T, C), from which the head predicts each next token. cache: a KVCache of
        plaingpt/inference/generation.py with the tokens before these; these are appended to it."""
        assert idx.size(1) <= self.config.block_size, f'more than {self.config.block_size} tokens'
        positions = slice(idx.size(1))  # or (T,), or (B, T): indices of position embeddings
        documents = None
        layer_caches = [None] * len(self.transformer.h)
        if cache is not None:
            positions = cache.positions
            layer_caches = cache.layers
        elif self.config.document_attention:
            documents = find_documents(idx, self.config.document_start)
            positions = documents.positions
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.ngram_rows:
            x = x + self.transformer.ngram(idx, documents, cache)  # (B, T, C)
        rotary = None
        if self.config.learned_positions:
            x = x + self.transformer.wpe.weight[positions]  # (B, T, C) + (T, C) or (B, T, C)
        if self.config.rotary:  # 2 × (1, T, D), or (B, 1, T, D) where the rows' positions differ
            rotary = self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)
        x = self.transformer.drop(x)
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream in half the memory; float16 could overflow
        for block, layer_cache in zip(self.transformer.h, layer_caches, strict=True):
            x = block(x, idx, rotary, documents, layer_cache)  # (B, T, C)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """(…, C) → (…, V). The padding of the vocabulary is sliced off: no caller sees it."""
        return self.lm_head(x)[..., :self.config.vocab_size]

    def num_parameters(self, without=()):
        """Parameters of the model as published: tied weights count once, padding does not.
        without: the ends of names that do not count"""
        return sum(p[:self.config.vocab_size].numel() if name.endswith(ROW_PER_TOKEN) else p.numel()
                   for name, p in self.named_parameters() if not name.endswith(without))

    def flops_per_token(self):
        """FLOPs to train on one token, forward and backward (PaLM, appendix B): 6 for each weight
        in a matmul and 12·L·H·D·T for attention. Looking up an embedding is not a matmul."""
        c = self.config
        embeddings = ('wpe.weight', 'value_embedding.weight', 'ngram.weight')
        if not c.tied_head:
            embeddings += ('wte.weight',)
        return 6 * self.num_parameters(embeddings) + 12 * c.n_layer * c.qkv_sizes[0] * c.block_size

    def crop_block_size(self, block_size):
        """Drop the positions beyond `block_size`, e.g. to fine-tune on shorter sequences."""
        assert block_size <= self.config.block_size
        self.config = replace(self.config, block_size=block_size)
        if self.config.learned_positions:
            kept = self.transformer.wpe.weight[:block_size].detach()
            self.transformer.wpe = nn.Embedding.from_pretrained(kept, freeze=False)
        if self.config.rotary:
            self.cos, self.sin = self.cos[:block_size].clone(), self.sin[:block_size].clone()

    @classmethod
    def from_pretrained(cls, source):
        """Pretrained weights → GPT, in eval mode. source: 'gpt2', 'gpt2-medium', 'gpt2-large',
        'gpt2-xl', OWNER/NAME on the hub, a folder in the Hugging Face layout, a run's out_dir, or
        a ckpt.pt of nanoGPT. Needs plaingpt/ beside this file."""
        from plaingpt.training.open_weights import make_model, open_weights
        return make_model(open_weights(source))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Append `max_new_tokens` sampled tokens to idx (B, T) → (B, T + max_new_tokens); at
        temperature 0 the most likely ones. plaingpt/inference does so several times as fast."""
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
