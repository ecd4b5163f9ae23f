"""Score a model: log-likelihoods, and the loss of a text."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from plaingpt.data.documents import read_text
from plaingpt.data.packing import conversation_starts, cut, mask_sums
from plaingpt.system.distributed import all_gather, launched_world
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import printable

CHUNK = 1024  # positions whose logits exist at once

# -----------------------------------------------------------------------------
# log-likelihoods


def log_likelihoods(model, rows, batch_size, context, label, group=None, before_batch=None):
    """The log-likelihoods of the ends of token sequences. The processes share the work.

    rows: a sequence of (ids, scored): each of ids[scored], the first id never, is scored given
    all before it; scored is a slice or an array of bools
    context: autocast or none; group: of distributed.gloo_group
    before_batch: called by all processes equally often; what it raises ends this
    → float64 (len(rows), 2): the sum of these log-probabilities in nats, and 1 if each of these
    tokens is the likeliest in its place, else 0. The same on all processes.
    """
    world, was_training = launched_world(), model.training
    mine = range(len(rows))[world.rank::world.size]
    scores = np.zeros((len(mine), 2))
    model.eval()
    with tqdm(total=len(mine), desc=printable(label), leave=False,
              disable=None if world.is_main else True) as bar:
        for first in range(0, math.ceil(len(rows) / world.size), batch_size):
            if before_batch:
                before_batch()
            batch = [rows[i] for i in mine[first:first + batch_size]]
            if batch:  # another process may have one more
                scores[first:first + len(batch)] = score_batch(model, batch, context)
                bar.update(len(batch))
    model.train(was_training)
    out = np.zeros((len(rows), 2))
    for rank, part in enumerate(all_gather(scores, group)):
        out[rank::world.size] = part
    return out


@torch.no_grad()
def score_batch(model, rows, context):
    """[(ids, scored)] → (len(rows), 2) as log_likelihoods. Short rows are padded at the end; causal
    attention keeps the padding invisible."""
    device = model.lm_head.weight.device
    width = max(len(ids) for ids, _ in rows) - 1
    idx = torch.zeros(len(rows), width, dtype=torch.long)  # (B, T)
    targets = torch.full_like(idx, -1)
    for i, (ids, picked) in enumerate(rows):
        ids, answer = torch.as_tensor(ids), torch.full((len(ids),), -1)
        answer[picked] = ids[picked]
        idx[i, :len(ids) - 1], targets[i, :len(ids) - 1] = ids[:-1], answer[1:]
    scored = targets != -1
    with context:
        x = model.hidden(idx.to(device))[scored.to(device)]  # (N, C): scored positions only
        logp, likeliest = [], []
        for x_i, t in zip(x.split(CHUNK), targets[scored].to(device).split(CHUNK), strict=True):
            logits = model.logits(x_i)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (n, V)
            logp.append(-F.cross_entropy(logits, t, reduction='none'))
            likeliest.append(logits.argmax(-1) == t)
    row = scored.nonzero()[:, 0]  # (N,): the row of each target
    sums = torch.zeros(len(rows), dtype=torch.float64)
    sums.index_add_(0, row, torch.cat(logp).double().cpu())
    misses = torch.zeros(len(rows)).index_add_(0, row, 1.0 - torch.cat(likeliest).float().cpu())
    return np.stack([sums.numpy(), misses.numpy() == 0], axis=1)


# -----------------------------------------------------------------------------
# text


class Sequences:
    """A token stream as rows for log_likelihoods. Each token but the first is scored once."""

    def __init__(self, stream, block_size):
        self.stream = stream
        self.starts = np.arange(0, len(stream) - 1, block_size)
        self.counts = np.minimum(block_size, len(stream) - 1 - self.starts)  # tokens scored in each

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        return self.stream.sequences(self.starts[i:i + 1], self.counts[i] + 1)[0], slice(1, None)


class Answers:
    """Conversations as rows for log_likelihoods, each scored alone on the tokens of its loss mask.
    Those longer than block_size are cut as in training."""

    def __init__(self, stream, block_size):
        self.stream = stream
        starts, sizes, with_bos = cut(stream, conversation_starts(stream), block_size + 1)
        counts = mask_sums(stream, starts + sizes) - mask_sums(stream, starts + 1)
        order = np.argsort(-sizes, kind='stable')  # less padding
        order = order[counts[order] > 0]
        self.starts, self.sizes, self.with_bos, self.counts = (
            column[order] for column in (starts, sizes, with_bos, counts))

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        ids, loss_mask = (stream.read(self.starts[i], self.sizes[i])
                          for stream in (self.stream, self.stream.loss_mask))
        loss_mask[0] = 0  # no token before it predicts it
        marks = self.stream.marks
        if self.with_bos[i] and marks.keeps_bos:
            ids, loss_mask = np.append(marks.bos, ids), np.append(0, loss_mask)
        elif not self.with_bos[i] and not marks.keeps_bos:
            ids, loss_mask = ids[1:], loss_mask[1:]
        return ids, loss_mask == 1


class TextStream:
    """A text file as a token stream. If the tokenizer has an end-of-text token, it stands in front,
    so that the first token of the text is scored too."""

    loss_mask = None

    def __init__(self, path, tokenizer):
        text = read_text(path)
        start = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        try:
            self.ids = np.concatenate([start, tokenizer.encode(text)]).astype(np.int64)
        except UserError as e:
            raise UserError(f'{path}: {e}') from None

    def __len__(self):
        return len(self.ids)

    def sequences(self, starts, length):
        return np.stack([self.ids[start:start + length] for start in starts])


def score_stream(model, stream, sizes, label, batch_size, context, group=None):
    """→ {loss in nats per token, perplexity, bits_per_byte, …} of a whole stream, of conversations
    the tokens in the loss mask. The standard error takes the sequences, not the tokens, as
    independent. sizes: of tokenizers.token_bytes, or None. Raises UserError."""
    kind = Sequences if stream.loss_mask is None else Answers
    rows = kind(stream, model.config.block_size)
    if not len(rows):
        raise UserError(f'{label}: {len(stream)} tokens are too few to score any')
    sums = -log_likelihoods(model, rows, batch_size, context, label, group)[:, 0]
    tokens, n = int(rows.counts.sum()), len(sums)
    loss = sums.sum() / tokens
    squares = ((sums - loss * rows.counts) ** 2).sum()
    size = None  # in bytes, of the tokens that were scored
    if sizes is not None:
        size = sum(int(sizes[ids[scored]].sum()) for ids, scored in map(rows.__getitem__, range(n)))
    return {'loss': loss, 'perplexity': math.exp(min(loss, 700)),
            'loss_stderr': math.sqrt(squares * n / (n - 1)) / tokens if n > 1 else None,
            'bits_per_byte': loss * tokens / math.log(2) / size if size else None,
            'tokens': tokens, 'bytes': size}


def quote_text(scores, whose=''):
    """→ the scores of score_stream, as one line. whose: ' of the assistant', where not all are."""
    stderr = '' if scores['loss_stderr'] is None else f' ± {scores["loss_stderr"]:.4f}'
    bits = f', {scores["bits_per_byte"]:.4f} bits/byte' if scores['bits_per_byte'] else ''
    return f'loss {scores["loss"]:.4f}{stderr} nats a token, perplexity ' \
           f'{scores["perplexity"]:.4g}{bits} ({scores["tokens"]:,} tokens{whose})'
