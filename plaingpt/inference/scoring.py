"""Score a model: the log-likelihood of text, and of the answers to benchmark questions.

HellaSwag (Zellers et al. 2019) and LAMBADA (Paperno et al. 2016, OpenAI's version) are zero-shot.
Prompts, tokens and scores are those of EleutherAI's lm-evaluation-harness, tasks `hellaswag` and
`lambada_openai`, so the numbers compare with published ones.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from plaingpt.data.packing import conversation_starts, cut, mask_sums
from plaingpt.data.readers import read_jsonl, read_text
from plaingpt.data.sources import download
from plaingpt.system.distributed import all_gather, barrier, launched_world
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import printable

CHUNK = 1024  # positions whose logits exist at once

# -----------------------------------------------------------------------------
# log-likelihoods


def log_likelihoods(model, rows, batch_size, context, label, group=None, before_batch=None):
    """The log-likelihoods of the ends of token sequences. The processes share the work.

    rows: a sequence of (ids, scored): each of ids[scored], the first id never, is scored given
    all before it; scored is a slice or an array of bools. Those of a list go by their length.
    context: autocast or none; group: of distributed.gloo_group
    before_batch: called by all processes equally often; what it raises ends this
    → float64 (len(rows), 2): the sum of these log-probabilities in nats, and 1 if each of these
    tokens is the likeliest in its place, else 0. The same on all processes.
    """
    world, order = launched_world(), np.arange(len(rows))
    if isinstance(rows, list):  # the longest first: less padding
        order = np.argsort([-len(ids) for ids, _ in rows], kind='stable')
    mine = order[world.rank::world.size]
    scores = np.zeros((len(mine), 2))
    was_training = model.training
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
        out[order[rank::world.size]] = part
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
        starts, sizes, with_bos, *_ = cut(stream, conversation_starts(stream), block_size + 1)
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
        self.ids = np.concatenate([start, encode(tokenizer, text, path)]).astype(np.int64)
        self.bytes = len(text.encode())

    def __len__(self):
        return len(self.ids)

    def sequences(self, starts, length):
        return np.stack([self.ids[start:start + length] for start in starts])


def encode(tokenizer, text, where):
    try:
        return tokenizer.encode(text)
    except UserError as e:
        raise UserError(f'{where}: {e}') from None


def score_stream(model, stream, text_bytes, batch_size, context, label, group=None):
    """→ {loss in nats per token, perplexity, bits_per_byte, …} of a whole stream, of conversations
    the tokens in the loss mask. The standard error takes the sequences, not the tokens, as
    independent. Raises UserError."""
    kind = Sequences if stream.loss_mask is None else Answers
    sequences = kind(stream, model.config.block_size)
    if not len(sequences):
        raise UserError(f'{label}: {len(stream)} tokens are too few to score any')
    sums = -log_likelihoods(model, sequences, batch_size, context, label, group)[:, 0]
    tokens, n = int(sequences.counts.sum()), len(sums)
    loss = sums.sum() / tokens
    stderr = None
    if n > 1:
        squares = ((sums - loss * sequences.counts) ** 2).sum()
        stderr = math.sqrt(squares * n / (n - 1)) / tokens
    return {'loss': loss, 'loss_stderr': stderr, 'perplexity': math.exp(min(loss, 700)),
            'bits_per_byte': loss * tokens / math.log(2) / text_bytes if text_bytes else None,
            'tokens': tokens}


def mean_scores(scores, weights, bytes_per_token):
    """[scores of score_stream] of several corpora → those of their mixture by weights of tokens."""
    loss = sum(w * each['loss'] for w, each in zip(weights, scores, strict=True))
    errors = [each['loss_stderr'] for each in scores]
    return {'loss': loss,
            'loss_stderr': None if None in errors else math.hypot(
                *(w * error for w, error in zip(weights, errors, strict=True))),
            'perplexity': math.exp(min(loss, 700)),
            'bits_per_byte': loss / math.log(2) / bytes_per_token if bytes_per_token else None,
            'tokens': sum(each['tokens'] for each in scores)}


# -----------------------------------------------------------------------------
# questions


class Question(NamedTuple):
    context: str
    answers: list  # possible continuations
    right: int  # index of the right one
    where: str  # file and line


def hellaswag(path):
    """hellaswag_val.jsonl → Questions with four endings of a scene."""
    for where, row in read_jsonl(path):
        match row:
            case {'activity_label': str(label), 'ctx_a': str(a), 'ctx_b': str(b),
                  'endings': [str(), *_] as endings, 'label': right} \
                    if str(right) in map(str, range(len(endings))):
                yield Question(clean(f'{label}: {a} {b.capitalize()}'),
                               [' ' + clean(ending) for ending in endings], int(right), where)
            case _:
                raise UserError(f'{where}: no HellaSwag question, which has activity_label, ctx_a, '
                                'ctx_b, endings and a label that is one of them')


def clean(text):
    """Remove the markup of WikiHow, the source of half of HellaSwag."""
    text = text.strip().replace(' [title]', '. ')
    return re.sub(r'\[.*?\]', '', text).replace('  ', ' ')


def lambada(path):
    """lambada_test.jsonl → Questions for the last word of a passage."""
    for where, row in read_jsonl(path):
        if not isinstance(row, dict) or not isinstance(row.get('text'), str):
            raise UserError(f'{where}: no LAMBADA passage, which has a text')
        context, _, word = row['text'].rpartition(' ')
        yield Question(context, [' ' + word], 0, where)


def encode_answer(question, answer, tokenizer, block_size):
    """→ (ids of context and answer, the slice of them that is the answer). Raises UserError."""
    context = question.context.rstrip()
    answer = question.context[len(context):] + answer  # its space belongs to the next word
    before = len(encode(tokenizer, context, question.where))
    ids = encode(tokenizer, context + answer, question.where).astype(np.int64)
    n = len(ids) - before
    if before == 0 and tokenizer.end_of_text is not None:
        ids = np.concatenate([[tokenizer.end_of_text], ids])
    if not 0 < n < len(ids):
        raise UserError(f'{question.where}: an empty context or answer')
    if n > block_size:
        raise UserError(f'{question.where}: an answer of {n} tokens is more than the block_size of '
                        f'{block_size}')
    return ids[-(block_size + 1):], slice(-n, None)


class Benchmark:
    """The questions of a benchmark as tokens; it can score a model any number of times. The
    arguments are those of read_questions, which raises UserError."""

    def __init__(self, name, tokenizer, block_size, path='', limit=0):
        if launched_world().local_rank == 0:
            read_questions(name, path, limit)  # one process of each machine downloads the file
        barrier()
        self.name, self.questions = name, read_questions(name, path, limit)
        self.rows = [encode_answer(question, answer, tokenizer, block_size)
                     for question in self.questions for answer in question.answers]

    def score(self, model, batch_size, context, group=None, before_batch=None):
        """→ {name of a score: value}; the arguments are those of log_likelihoods."""
        scores = log_likelihoods(model, self.rows, batch_size, context, self.name, group,
                                 before_batch)
        return {**BENCHMARKS[self.name].score(scores, self.questions),
                'questions': len(self.questions)}


def lambada_scores(scores, questions):
    acc, acc_stderr = mean_and_stderr(scores[:, 1])
    loss, loss_stderr = mean_and_stderr(-scores[:, 0])
    perplexity = math.exp(min(loss, 700))
    return {'acc': acc, 'acc_stderr': acc_stderr, 'perplexity': perplexity,
            'perplexity_stderr': perplexity * loss_stderr if loss_stderr is not None else None}


def hellaswag_scores(scores, questions):
    """acc: the ending with the highest log-likelihood is right; acc_norm: the same, but divided by
    the ending's number of characters."""
    right, right_norm, first = [], [], 0
    for question in questions:
        logp = scores[first:first + len(question.answers), 0]
        first += len(logp)
        lengths = np.array([len(answer) - 1 for answer in question.answers])  # without the space
        right.append(logp.argmax() == question.right)
        right_norm.append((logp / np.maximum(lengths, 1)).argmax() == question.right)
    (acc, acc_stderr), (norm, norm_stderr) = map(mean_and_stderr, (right, right_norm))
    return {'acc': acc, 'acc_stderr': acc_stderr, 'acc_norm': norm, 'acc_norm_stderr': norm_stderr}


def mean_and_stderr(values):
    """→ (mean, its standard error, None for a single value)."""
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None


def quote_scores(scores):
    """→ the scores of a benchmark, as one line."""
    parts = []
    for key, value in scores.items():
        name, _, kind = key.partition(',')
        stderr = scores.get(f'{name}_stderr' + f',{kind}' * bool(kind))
        if key != 'questions' and not name.endswith('_stderr'):
            parts.append(f'{key} {value:.4g}' + (f' ± {stderr:.2g}' if stderr else ''))
    questions = scores['questions']
    return ', '.join(parts) + (f' ({questions:,} questions)' if questions else '')


def quote_text(scores, whose=''):
    """→ the scores of score_stream, as one line. whose: ' of the assistant', where not all are."""
    stderr = '' if scores['loss_stderr'] is None else f' ± {scores["loss_stderr"]:.4f}'
    parts = [f'loss {scores["loss"]:.4f}{stderr} nats a token',
             f'perplexity {scores["perplexity"]:.4g}']
    if scores['bits_per_byte']:
        parts.append(f'{scores["bits_per_byte"]:.4f} bits/byte')
    return f'{", ".join(parts)} ({scores["tokens"]:,} tokens{whose})'


class Source(NamedTuple):
    read: Callable  # path → Questions
    url: str
    sha256: str
    score: Callable  # result of log_likelihoods for all answers, questions → {name: value}


BENCHMARKS = {
    'hellaswag': Source(
        hellaswag,
        'https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl',
        '0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588', hellaswag_scores),
    'lambada': Source(
        lambada, 'https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl',
        '4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226', lambada_scores),
}


def read_questions(name, path='', limit=0):
    """The first `limit` questions (0: all) of a benchmark, from `path` or from the published file,
    downloaded once into data/benchmarks. Raises UserError."""
    if name not in BENCHMARKS:
        raise UserError(f'{name!r} is no benchmark: there are {", ".join(BENCHMARKS)}')
    source = BENCHMARKS[name]
    if not path:
        path = Path('data', 'benchmarks', Path(source.url).name)
        if not path.exists():
            data = download(source.url, source.sha256, f'put a copy of it at {path}')
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
    questions = list(source.read(Path(path)))[:limit or None]
    if not questions:
        raise UserError(f'{path}: no questions there')
    return questions
