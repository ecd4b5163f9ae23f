"""What each classic optimization buys: one variant after another, each on the same work.

All variants start from the same weights and see the same sequences, so their first losses agree.
Each keeps what the variants below it brought. What nobody does any more is written out here; the
top is what train.py does.
"""

import gc
import math
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from model import GPT, CausalSelfAttention, GPTConfig
from plaingpt.benchmarks.result_tables import markdown
from plaingpt.benchmarks.timing import spread, step_seconds
from plaingpt.corpus.batches import BatchLoader
from plaingpt.corpus.dataset import TokenStream, open_tokens
from plaingpt.system.devices import autocast
from plaingpt.system.formatting import gib, short
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

# -----------------------------------------------------------------------------
# the variants


@dataclass(frozen=True)
class Variant:
    """How a step is made; the defaults are the ground."""

    data: str = 'mapped'  # text, mapped, memory, gathered, ahead
    tf32: bool = False
    dtype: str = 'float32'
    compile: bool = False
    attention: str = 'explicit'  # or sdpa
    padded_vocabulary: bool = False
    adamw: str = 'for-loop'  # or fused
    loss_chunk_tokens: int = 0


def variants(device, dtype, compile, loss_chunk_tokens, has_text):
    """→ [(name, Variant)], those that apply on this device; each adds one change to the one before.

    dtype, compile: what the top takes; float32 and False leave their variants out
    has_text: False where there are only tokens, no tokenizer
    """
    steps = [('text, tokenized for each batch', {'data': 'text'}) if has_text else None,
             ('tokens, memory-mapped', {'data': 'mapped'}),
             ('tokens in memory', {'data': 'memory'}),
             ('a batch gathered at once', {'data': 'gathered'}),
             ('batches read ahead by a thread', {'data': 'ahead'}),
             ('TF32', {'tf32': True}) if device.type == 'cuda' else None,
             (dtype, {'dtype': dtype}) if dtype != 'float32' else None,
             ('torch.compile', {'compile': True}) if compile else None,
             ('fused attention', {'attention': 'sdpa'}),
             ('padded vocabulary', {'padded_vocabulary': True}),
             ('fused AdamW', {'adamw': 'fused'}),
             (f'loss in chunks of {loss_chunk_tokens:,}', {'loss_chunk_tokens': loss_chunk_tokens})
             if loss_chunk_tokens else None]
    found, ways = [], Variant()
    for name, change in filter(None, steps):
        ways = replace(ways, **change)
        found.append((name, ways))
    return found


# -----------------------------------------------------------------------------
# data: sequences of tokens from where they start, (B,) → (B, T+1) int64


class Text:
    """No tokens but a text file, and a tokenizer that is called for each sequence.

    Holds the text of the sequences at `starts`, of `length` tokens each.
    """

    def __init__(self, path, tokens, tokenizer, starts, length):
        self.path, self.tokenizer = path, tokenizer
        self.places = {}  # start of a sequence → where its text lies in the file
        with open(path, 'wb') as f:
            for start in starts:
                # A few tokens more: cut out of its surroundings text may take fewer.
                ids = tokens[start:start + length + 16].tolist()
                text = tokenizer.decode(ids).encode()
                self.places[int(start)] = (f.tell(), len(text))
                f.write(text)

    def sequences(self, starts, length):
        rows = []
        with open(self.path, 'rb') as f:
            for start in starts:
                offset, size = self.places[int(start)]
                f.seek(offset)
                text = f.read(size).decode()
                rows.append(torch.from_numpy(
                    np.resize(self.tokenizer.encode(text), length).astype(np.int64)))
        return torch.stack(rows)


def stacked(tokens, starts, length):
    """One slice of an array (or a memory map) after another, as nanoGPT makes its batches."""
    return torch.stack([torch.from_numpy(tokens[i:i + length].astype(np.int64)) for i in starts])


def batches(ways, loader, path, text):
    """Yield (idx, targets) on the device, each (B, T) int64, the same whatever the way.

    loader: tells which sequences come, and is the topmost way itself
    path: the file of the tokens; text: a Text, or None where no variant needs it
    """
    if ways.data == 'ahead':
        yield from loader.train_batches(0)
    stream, length, step = loader.stream, loader.block_size + 1, 0
    while True:
        starts = loader.sequence_starts(loader.sequence_ids(step, 0))
        if ways.data == 'text':
            sequences = text.sequences(starts, length)
        elif ways.data == 'mapped':
            # A new map each time, as nanoGPT does: an old one keeps the pages that it has read.
            sequences = stacked(np.memmap(path, stream.ram.dtype, 'r'), starts, length)
        elif ways.data == 'memory':
            sequences = stacked(stream.ram, starts, length)
        else:
            sequences = torch.from_numpy(stream.sequences(starts, length))
        idx, targets = sequences[:, :-1], sequences[:, 1:]
        yield [half.contiguous().to(loader.device) for half in (idx, targets)]
        step += 1


# -----------------------------------------------------------------------------
# model


class ExplicitAttention(CausalSelfAttention):
    """softmax(q·kᵀ/√d, the future masked) · v, all scores in memory (Vaswani et al. 2017)."""

    def forward(self, x, *_):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for t in self.c_attn(x).split(C, dim=2))  # 3 × (B, H, T, C/H)
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.n_head)  # (B, H, T, T)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = F.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v  # (B, H, T, C/H)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class UnpaddedConfig(GPTConfig):
    @property
    def padded_vocab_size(self):
        return self.vocab_size


def build(shape, ways, weights, device):
    """GPTConfig, Variant, a state dict → the GPT of that variant."""
    kind = GPTConfig if ways.padded_vocabulary else UnpaddedConfig
    gpt = GPT(kind(**vars(shape)))
    gpt.load_state_dict({name: weight[:len(own)] for (name, own), weight
                         in zip(gpt.state_dict().items(), weights.values(), strict=True)})
    if ways.attention == 'explicit':
        for block in gpt.transformer.h:
            block.attn.__class__ = ExplicitAttention
    gpt.loss_chunk_tokens = ways.loss_chunk_tokens
    return gpt.to(device)


def make_optimizer(gpt, ways, device):
    """The model's own AdamW, or the same as a loop over the parameters."""
    fused = build_optimizer(gpt, TrainConfig(learning_rate=1e-4), device.type)
    if ways.adamw == 'fused':
        return fused
    groups = [{'params': group['params'], 'weight_decay': group['weight_decay']}
              for group in fused.param_groups]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=False, foreach=False)


# -----------------------------------------------------------------------------
# climbing


def measure_variants(shape, found, tokens, tokenizer, *, batch_size, steps, warmup, rounds, device):
    """Time the variants → a row for each: its name, ms a step, ratios, its first loss.

    shape: GPTConfig; found: what `variants` gave; tokens: an array of ids, of uint16 or uint32
    tokenizer: of the tokens, or None where no variant needs text
    rounds: climb so many times, so that a machine whose speed drifts is fair to all variants; the
            median is over the steps of all rounds
    """
    shape = replace(shape, dropout=0.0)
    torch.manual_seed(1337)
    weights = GPT(shape).state_dict()
    measured = {name: ([], []) for name, _ in found}  # seconds; first losses and peaks
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'tokens.bin')
        tokens.tofile(path)
        stream = TokenStream([open_tokens(path, tokens.dtype)], shape.vocab_size, in_ram=True)
        loader = BatchLoader(stream, shape.block_size, batch_size, device=device)
        text = None
        if tokenizer:
            starts = loader.sequence_starts(np.arange((steps + warmup) * batch_size))
            text = Text(Path(folder, 'text'), tokens, tokenizer, starts, shape.block_size + 1)
        for name, ways in tqdm(found * rounds, 'climbing', leave=False, disable=None):
            times, *same = time_rung(shape, ways, weights, loader, path, text, steps, warmup,
                                     device)
            measured[name][0].extend(times)
            measured[name][1][:] = same
    return rows_of(measured, batch_size * shape.block_size)


def rows_of(measured, step_tokens):
    """{variant: (seconds of its steps, (first loss, peak))} in climbing order → rows."""
    rows = []
    for name, (times, (loss, peak)) in measured.items():
        ms = {key: 1e3 * seconds for key, seconds in spread(times).items()}
        rows.append({
            'variant': name, 'step_ms': ms['median'], 'min_ms': ms['min'], 'max_ms': ms['max'],
            'tokens_per_s': step_tokens / ms['median'] * 1e3,
            'times_before': rows[-1]['step_ms'] / ms['median'] if rows else 1.0,
            'times_first': rows[0]['step_ms'] / ms['median'] if rows else 1.0,
            'first_loss': loss, 'peak_memory_bytes': peak})
    return rows


def table(rows):
    """The rows as Markdown."""
    return markdown(
        ['variant', 'ms a step', 'fastest', 'slowest', 'tokens/s', '× before', '× first',
         'first loss', 'memory'],
        [[row['variant'], *(f'{row[key]:.1f}' for key in ('step_ms', 'min_ms', 'max_ms')),
          short(row['tokens_per_s']), f'{row["times_before"]:.2f}', f'{row["times_first"]:.2f}',
          f'{row["first_loss"]:.4f}',
          gib(row['peak_memory_bytes']) if row['peak_memory_bytes'] else 'n/a'] for row in rows])


def time_rung(shape, ways, weights, loader, path, text, steps, warmup, device):
    """→ (seconds of each step, loss of the first, most memory of tensors or None off CUDA)."""
    torch.set_float32_matmul_precision('high' if ways.tf32 else 'highest')
    torch.compiler.reset()  # what was compiled for the variant below would count against a limit
    gc.collect()  # and its graphs hold themselves, and memory
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    gpt = build(shape, ways, weights, device)
    model = torch.compile(gpt) if ways.compile else gpt
    optimizer = make_optimizer(gpt, ways, device)
    scaler = torch.amp.GradScaler(device.type, enabled=ways.dtype == 'float16')
    context = autocast(device, ways.dtype)
    first_loss = []

    with closing(batches(ways, loader, path, text)) as source:
        def step():
            idx, targets = next(source)
            with context:
                _, loss = model(idx, targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            first_loss[:] = first_loss or [loss.detach()]

        times = step_seconds(step, steps, warmup, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == 'cuda' else None
    return times, first_loss[0].item(), peak
