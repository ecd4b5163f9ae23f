"""Checks of the batches: are they what the files hold, once each, and is it text?

Each is a function Subject → None, or in a line what it found and what that usually means. All
processes make them together.
"""

import hashlib
from collections import Counter
from contextlib import closing
from itertools import groupby

import numpy as np
import torch

from plaingpt.checks.subject import NotChecked
from plaingpt.system.distributed import all_gather
from plaingpt.system.errors import UserError
from plaingpt.training.schedules import get_lr

ROUND_TRIP = 0.95  # of the ids of a text that are those it was decoded from; the rest are cut
LOOKED_AT = 16  # sequences whose text is
GONE = 1e-3  # of the highest learning rate: too little to learn with
REST = 0.1  # of a run
LOOKS = 100  # at the learning rate of a run
EPOCH_LOOKS = 2**12  # at the sequences of an epoch


def first_batches(loader):
    """[(idx, targets) of the first micro-batch of step 0, of step 1], as the loop gets them."""
    waited_s = loader.waited_s
    with closing(loader.train_batches(0)) as batches:
        found = [[tensor.cpu() for tensor in next(batches)[:2]]
                 for _ in range(loader.micro_steps + 1)]
    loader.waited_s = waited_s
    return found[0], found[-1]


def batches_are_of_the_files(subject):
    loader = subject.train_data
    for step, batch in enumerate(first_batches(loader)):
        starts = loader.sequence_starts(loader.sequence_ids(step, 0))
        if problem := compare_batch(batch, loader, subject.dataset.split('train'), starts):
            return f'the batch of step {step} is not that of the training split: {problem}'
    loader = subject.val_data
    starts = next(iter(loader.eval_batches(subject.evaluated)), [])
    if len(starts):
        batch = [tensor[:len(starts)].cpu() for tensor in loader.eval_batch(starts)]
        if problem := compare_batch(batch, loader, subject.dataset.split('val'), starts):
            return f'what an evaluation reads is not of the validation split: {problem}'


def compare_batch(batch, loader, stream, starts):
    """(idx, targets) beside the files of a split → None, or what differs."""
    idx, targets = batch  # (B, T) each
    tokens = torch.full((len(idx), idx.size(1) + 1), -1)  # where no token of the text is
    in_loss = torch.zeros_like(tokens, dtype=torch.bool)
    for row, start in enumerate(starts.tolist()):
        for column, first, n in loader.layout(start):
            tokens[row, column:column + n] = torch.from_numpy(stream.read(first, n))
            in_loss[row, column + 1:column + n] = True if stream.loss_mask is None \
                else torch.from_numpy(stream.loss_mask.read(first, n)[1:] == 1)
    known = targets != -1
    wrong = known & (targets != tokens[:, 1:])
    of_text = tokens[:, :-1] != -1
    if not torch.equal(idx[of_text], tokens[:, :-1][of_text]):
        return 'the loader reads another file or another place, or something changes what it reads'
    if not known.any() and in_loss.any():
        return 'all targets are -1, so there is nothing to learn'
    if torch.equal(targets, idx) and wrong.any():
        return 'the targets are the inputs, and should be the inputs shifted by one'
    if wrong.any():
        return f'{wrong.sum() / known.sum():.0%} of the targets are not the next token: they are ' \
               'shifted by another number, shuffled, or noise'
    if stream.loss_mask is not None and not torch.equal(known, in_loss[:, 1:]):
        return 'the targets are not those that the mask marks: the user would be learned too, or ' \
               'a part of the assistant would not'


def batches_differ(subject):
    loader = subject.train_data
    (idx, _), (later, _) = first_batches(loader)
    mine = [loader.sequence_ids(0, micro) for micro in range(loader.micro_steps)]
    ids = np.concatenate([np.concatenate(share) for share in all_gather(mine, subject.group)])
    digests = all_gather(hashlib.sha256(idx.numpy().tobytes()).hexdigest(), subject.group)
    if not torch.equal(idx, loader.train_batch(0, 0)[0]):
        return 'the same step gives another batch when it is read again: resuming would not ' \
               'continue with the data that comes next; seed what chooses the sequences'
    if loader.sequences_per_epoch < 2 * loader.step_size:
        return None  # so little text has to come again
    if len(set(digests)) < len(digests):
        return f'{len(digests)} processes train on {len(set(digests))} batches: each needs its ' \
               'own, by its rank'
    if (different := len(np.unique(ids))) < loader.step_size:
        return f'of the {loader.step_size} sequences of a step {different} are different: each ' \
               'micro-batch needs its own'
    if loader.only_first != 1 and torch.equal(idx, later):
        return 'steps 0 and 1 get the same batch: the loader does not move on'


def epoch_reads_all(subject):
    """Of a long epoch, so many of its sequences stand for all."""
    return next(filter(None, map(epoch_reads_part, subject.train_data.parts)), None)


def epoch_reads_part(loader):
    n, T = loader.sequences_per_epoch, loader.block_size
    tokens = len(loader.stream) - loader.tokens_left_out
    ids = np.unique(np.linspace(0, n - 1, min(n, EPOCH_LOOKS)).astype(np.int64))
    starts = loader.sequence_starts(ids)
    if len(np.unique(starts)) < len(starts):
        return f'{len(starts) - len(np.unique(starts))} of {len(starts)} sequences of an epoch ' \
               'are there twice: their order is no permutation'
    if n * (T + 1) < tokens - 2 * T or (
            n > EPOCH_LOOKS and starts.max() - starts.min() < 0.9 * tokens):
        return f'an epoch reads {min(n * T, int(starts.max() - starts.min()) + T):,} of ' \
               f'{tokens:,} tokens'
    if n > 100 and (np.diff(starts) > 0).all():
        return 'an epoch reads the text from its beginning to its end, and should read it in a ' \
               'random order'


def evaluation_reads_all(subject):
    for loader in subject.val_data.parts:
        mine = loader.eval_batches(subject.evaluated)
        starts = np.concatenate([np.concatenate([*share, []])
                                 for share in all_gather(mine, subject.group)])
        wanted, found = min(subject.evaluated, loader.num_eval_sequences), len(starts)
        if found != wanted or len(np.unique(starts)) != wanted:
            return f'an evaluation reads {found} sequences, {len(np.unique(starts))} different ' \
                   f'ones, and should read {wanted}: a batch is dropped, or comes twice'


def data_is_text(subject):
    """Tokens → text → tokens: those of another tokenizer do not come back."""
    try:
        tokenizer = subject.dataset.tokenizer()
    except UserError as problem:  # it takes a download, and nothing of the run needs it
        raise NotChecked(str(problem)) from None
    words = getattr(tokenizer, 'base', tokenizer)  # what opens and ends a turn is no text
    controls = {words.end_of_text, *getattr(words, 'controls', ())}
    batch = subject.train_data.train_batch(0, 0)[0][:LOOKED_AT].tolist()
    rows = [list(part) for row in batch for is_text, part in groupby(
        row, lambda i: i not in controls and i < words.vocab_size) if is_text]
    texts = [words.decode(row) for row in rows]
    # A sequence may begin and end within a character, which is then U+FFFD.
    again = [words.encode(text.strip('\ufffd')).tolist() for text in texts]
    same = sum((Counter(ids) & Counter(row)).total()
               for ids, row in zip(again, rows, strict=True)) / max(1, sum(map(len, again)))
    if same < ROUND_TRIP and not subject.dataset.meta:
        raise NotChecked(f'{subject.dataset.folder} does not say which tokenizer it has')
    subject.text = (texts[0] if words is tokenizer and texts else tokenizer.decode(batch[0]))[:80]
    if same < ROUND_TRIP:
        return (f'{subject.text!r} is what the tokens say, and {same:.0%} of them come back when '
                f'it is encoded again: {subject.dataset.folder} was made with another tokenizer '
                'than its meta.json has')


def rate_lasts(subject):
    config = subject.config
    looks = sorted({round(config.max_iters * i / LOOKS) for i in range(LOOKS)})
    rates = [get_lr(it, config) for it in looks]
    end = max(it for it, rate in zip(looks, rates, strict=True) if rate >= GONE * max(rates))
    if (config.max_iters - end) > max(REST * config.max_iters, 2):
        return (f'the learning rate is gone from iteration {end + 1} of {config.max_iters} on: '
                'lr_decay_iters, warmup_iters and max_iters do not fit each other, or the '
                'schedule is wrong')
