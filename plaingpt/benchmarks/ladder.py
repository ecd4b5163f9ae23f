"""What each classic optimization buys: one variant of a training step after another.

Each variant adds one change to the variant before it. All start from the same weights and train on
the same sequences, so their first losses agree. The first variants do what nobody does any more and
are written out here; the last is what train.py does.
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
from plaingpt.benchmarks.result_tables import format_memory, format_times, markdown
from plaingpt.benchmarks.timing import step_seconds, step_times
from plaingpt.data.batches import BatchLoader
from plaingpt.data.corpora import find_dataset_size
from plaingpt.data.dataset import has_token_files, open_named
from plaingpt.data.token_files import TokenStream, open_tokens
from plaingpt.system.devices import autocast
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig
from plaingpt.training.training_step import forward_backward

TOKENS = 2**22  # of the dataset, from which the batches are taken


@dataclass(frozen=True)
class Variant:
    """How a step is made; the defaults are those of the first variants."""

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

    dtype, compile: of the last variant; has_text: False where there is no tokenizer
    """
    changes = [
        ('text, tokenized for each batch', {'data': 'text'}) if has_text else None,
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
    found, variant = [], Variant()
    for name, change in filter(None, changes):
        variant = replace(variant, **change)
        found.append((name, variant))
    return found


def decode_sequences(tokens, tokenizer, starts, length):
    """The text of the sequences at `starts`, {start: text}, each of at least `length` tokens."""
    # 16 tokens more: text cut out of its surroundings may take fewer tokens.
    return {int(i): tokenizer.decode(tokens[i:i + length + 16].tolist()) for i in starts}


def encode_sequences(texts, tokenizer, starts, length):
    """→ (B, length) int64: the sequences at `starts`, from the texts of decode_sequences."""
    return torch.stack([torch.from_numpy(np.resize(tokenizer.encode(texts[int(i)]), length)
                                         .astype(np.int64)) for i in starts])


def stack_slices(tokens, starts, length):
    """→ (B, length) int64: slices of an array, one at a time, as nanoGPT makes its batches."""
    return torch.stack([torch.from_numpy(tokens[i:i + length].astype(np.int64)) for i in starts])


def batches(data, loader, path, texts, tokenizer):
    """Yield (idx, targets) on the device, each (B, T) int64: the same batches whatever `data` is.

    data: as Variant.data; 'ahead' is the loader's own way
    path: the file of the tokens; texts, tokenizer: for 'text', what decode_sequences gave and took
    """
    if data == 'ahead':
        yield from loader.train_batches(0)
    stream, length, step = loader.stream, loader.block_size + 1, 0
    while True:
        starts = loader.sequence_starts(loader.sequence_ids(step, 0))
        if data == 'text':
            sequences = encode_sequences(texts, tokenizer, starts, length)
        elif data == 'mapped':
            # A new map each time, as nanoGPT does: an old one keeps the pages that it has read.
            sequences = stack_slices(np.memmap(path, stream.ram.dtype, 'r'), starts, length)
        elif data == 'memory':
            sequences = stack_slices(stream.ram, starts, length)
        else:
            sequences = torch.from_numpy(stream.sequences(starts, length))
        idx, targets = sequences[:, :-1], sequences[:, 1:]
        yield [half.contiguous().to(loader.device) for half in (idx, targets)]
        step += 1


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


def build_gpt(shape, variant, weights, device):
    """GPTConfig, Variant, a state dict → the GPT of that variant."""
    kind = GPTConfig if variant.padded_vocabulary else UnpaddedConfig
    gpt = GPT(kind(**vars(shape)))
    gpt.load_state_dict({name: weight[:len(own)] for (name, own), weight
                         in zip(gpt.state_dict().items(), weights.values(), strict=True)})
    if variant.attention == 'explicit':
        for block in gpt.transformer.h:
            block.attn.__class__ = ExplicitAttention
    gpt.loss_chunk_tokens = variant.loss_chunk_tokens
    return gpt.to(device)


def make_optimizer(gpt, variant, device):
    """train.py's AdamW, or the same as a loop over the parameters."""
    fused = build_optimizer(gpt, TrainConfig(learning_rate=1e-4), device.type)
    if variant.adamw == 'fused':
        return fused
    return torch.optim.AdamW([{**group, 'fused': False, 'foreach': False}
                              for group in fused.param_groups])


def measure_ladder(work):
    """→ (a row for each variant, their table). The model is GPT-2's: newer flags stay off."""
    config = work.config
    vocab_size, known, source = find_dataset_size(config.dataset, config.vocab_size)
    shape = GPTConfig(config.block_size, vocab_size, config.n_layer, config.n_head, config.n_embd,
                      bias=config.bias)
    tokenizer = None
    if has_token_files(config.dataset):
        dataset = open_named(config.dataset)
        tokenizer = dataset.tokenizer()
        tokens = dataset.split('train').sequences(np.array([0]), min(known, TOKENS))[0]
    else:
        source += ': random tokens, and no variant that reads text'
        tokens = np.random.default_rng(config.seed).integers(0, vocab_size, TOKENS)
    tokens = tokens.astype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    found = variants(work.device, work.dtype, work.compile, config.loss_chunk_tokens,
                     tokenizer is not None)
    rows = measure_variants(shape, found, tokens, tokenizer, batch_size=config.batch_size,
                            steps=config.steps, warmup=config.warmup_steps, rounds=config.rounds,
                            device=work.device)
    what = f'{config.batch_size} × {config.block_size} tokens a step, {config.n_layer} layers, ' \
           f'{config.n_embd} channels, vocabulary {vocab_size:,}, {source}'
    return rows, f'{what}\n\n' + markdown(
        ['variant', 'ms a step', 'fastest', 'slowest', 'tokens/s', '× before', '× first',
         'first loss', 'memory'],
        [[row['variant'], *format_times(row), f'{row["times_before"]:.2f}',
          f'{row["times_first"]:.2f}', f'{row["first_loss"]:.4f}', format_memory(row)]
         for row in rows])


def measure_variants(shape, found, tokens, tokenizer, *, batch_size, steps, warmup, rounds, device):
    """Time the variants → a row for each: its name, ms a step, ratios, its first loss.

    found: what `variants` gave; tokens: an array of ids; tokenizer: None where no variant has text
    rounds: measure all variants so many times in turn, so that a machine whose speed drifts is fair
            to all; the median is over the steps of all rounds
    """
    torch.manual_seed(1337)
    weights = GPT(shape).state_dict()
    measured = {name: ([], []) for name, _ in found}  # seconds; first loss and peak
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'tokens.bin')
        tokens.tofile(path)
        stream = TokenStream([open_tokens(path, tokens.dtype)], shape.vocab_size, in_ram=True)
        loader = BatchLoader(stream, shape.block_size, batch_size, device=device)
        starts = loader.sequence_starts(np.arange((steps + warmup) * batch_size))
        texts = tokenizer and decode_sequences(tokens, tokenizer, starts, shape.block_size + 1)
        for name, variant in tqdm(found * rounds, 'measuring', leave=False, disable=None):
            with closing(batches(variant.data, loader, path, texts, tokenizer)) as source:
                times, *same = time_variant(shape, variant, weights, source, steps, warmup, device)
            measured[name][0].extend(times)
            measured[name][1][:] = same
    return make_rows(measured, batch_size * shape.block_size)


def time_variant(shape, variant, weights, source, steps, warmup, device):
    """→ (seconds of each step, loss of the first, most memory of tensors or None off CUDA)."""
    torch.set_float32_matmul_precision('high' if variant.tf32 else 'highest')
    torch.compiler.reset()  # what other variants compiled would count against a limit
    gc.collect()  # frees compiled graphs, which refer to themselves, and their memory
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    gpt = build_gpt(shape, variant, weights, device)
    model = torch.compile(gpt) if variant.compile else gpt
    optimizer = make_optimizer(gpt, variant, device)
    scaler = torch.amp.GradScaler(device.type, enabled=variant.dtype == 'float16')
    context = autocast(device, variant.dtype)
    losses = []

    def step():
        losses.append(forward_backward(model, source, 1, scaler, context))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    times = step_seconds(step, steps, warmup, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == 'cuda' else None
    return times, losses[0].item(), peak


def make_rows(measured, step_tokens):
    """{variant: (seconds of its steps, (first loss, peak))} in their order → rows."""
    rows = []
    for name, (times, (loss, peak)) in measured.items():
        ms = step_times(times)
        rows.append({
            'variant': name, **ms, 'tokens_per_s': step_tokens / ms['step_ms'] * 1e3,
            'times_before': rows[-1]['step_ms'] / ms['step_ms'] if rows else 1.0,
            'times_first': rows[0]['step_ms'] / ms['step_ms'] if rows else 1.0,
            'first_loss': loss, 'peak_memory_bytes': peak})
    return rows
