"""Checks of the batches: are they what the files hold, once each, and is it text?"""

from collections import Counter
from contextlib import closing, suppress
from itertools import groupby

import numpy as np
import torch

from plaingpt.checks.model_checks import NotChecked
from plaingpt.system.distributed import all_gather, gloo_group
from plaingpt.system.errors import UserError
from plaingpt.training.schedules import get_lr

ROUND_TRIP = 0.95  # share of the ids that must come back; those at the ends may not
LOOKED_AT = 16  # sequences that are decoded and encoded again
GONE = 1e-3  # share of the highest learning rate that is too little to learn with
EPOCH_LOOKS = 2**12  # sequences of an epoch that are checked, at most


def batches_are_of_the_files(run):
    """The first micro-batch of steps 0 and 1, as the loop gets them, and of an evaluation."""
    loader = run.train_data
    with closing(loader.train_batches(0)) as batches:
        first, *_, later = [next(batches) for _ in range(loader.micro_steps + 1)]
    for step, batch in enumerate((first, later)):
        starts = loader.sequence_starts(loader.sequence_ids(step, 0))
        if problem := compare_batch(batch, loader, run.dataset.split('train'), starts):
            return f'the batch of step {step} is not that of the training split: {problem}'
    loader = run.val_data
    starts = next(iter(loader.eval_batches(run.progress.eval_sequences)), [])
    if len(starts) and (problem := compare_batch(loader.eval_batch(starts), loader,
                                                 run.dataset.split('val'), starts)):
        return f'what an evaluation reads is not of the validation split: {problem}'


def compare_batch(batch, loader, stream, starts):
    """(idx, targets, …) beside the files of a split → None, or what differs."""
    idx, targets = (tensor.cpu() for tensor in batch[:2])  # (B, T) each
    for row, start in enumerate(starts.tolist()):
        for column, first, n in loader.layout(start):
            tokens = torch.from_numpy(stream.read(first, n))
            here = row, slice(column, column + n - 1)
            if not torch.equal(idx[here], tokens[:-1]):
                return 'the loader reads another file or another place, or something changes ' \
                       'what it reads'
            if ((targets[here] != tokens[1:]) & (targets[here] != -1)).any():
                return 'the targets are not the next tokens; they should be the inputs shifted ' \
                       'by one'
            if stream.loss_mask is not None and not np.array_equal(
                    targets[here] != -1, stream.loss_mask.read(first, n)[1:] == 1):
                return 'the targets are not those that the mask marks: the user would be ' \
                       'learned too, or a part of the assistant would not'


def of_all(mine):
    """[array] of this process → one array, with those of all processes"""
    shares = all_gather(mine, gloo_group())
    return np.concatenate([array for share in shares for array in share])


def epoch_reads_all(run):
    return next(filter(None, map(epoch_reads_part, run.train_data.parts)), None)


def epoch_reads_part(loader):
    """The first epoch of a corpus; of a long one EPOCH_LOOKS sequences and the first two steps."""
    n, T = loader.sequences_per_epoch, loader.block_size
    steps = 1 if loader.only_first else 2
    if n < steps * loader.step_size:
        return None  # so little text has to come again
    ids = of_all([loader.sequence_ids(step, micro)
                  for step in range(steps) for micro in range(loader.micro_steps)])
    if (found := len(np.unique(ids))) < len(ids):
        return f'the first {steps} steps take {len(ids)} sequences, of which {found} are ' \
               'different: each step, micro-batch and process needs its own'
    starts = loader.sequence_starts(np.arange(min(n, EPOCH_LOOKS)))
    if (found := len(np.unique(starts))) < len(starts):
        return f'{len(starts) - found} of {len(starts)} sequences of an epoch are there twice: ' \
               'their order is no permutation'
    read = n * (T + 1) if n <= EPOCH_LOOKS else int(np.ptp(starts)) + T
    tokens = len(loader.stream) - loader.tokens_left_out
    if read < 0.9 * tokens - 2 * T:
        return f'an epoch reads {read:,} of {tokens:,} tokens'
    if n > 100 and (np.diff(starts) > 0).all():
        return 'an epoch reads the text from its beginning to its end: it should read it in a ' \
               'random order'


def evaluation_reads_all(run):
    for loader in run.val_data.parts:
        starts = of_all(loader.eval_batches(run.progress.eval_sequences))
        wanted, found = min(run.progress.eval_sequences, loader.num_eval_sequences), len(starts)
        if found != wanted or len(np.unique(starts)) != wanted:
            return f'an evaluation reads {found} sequences, {len(np.unique(starts))} different ' \
                   f'ones, and should read {wanted}: a batch is dropped, or comes twice'


def data_is_text(run):
    """Tokens → text → tokens: those of another tokenizer do not come back."""
    try:
        tokenizer = run.dataset.tokenizer()
    except UserError as problem:  # it takes a download, and nothing of the run needs it
        raise NotChecked(str(problem)) from None
    words = getattr(tokenizer, 'base', tokenizer)  # without the tokens that open and end turns
    batch = run.train_data.train_batch(0, 0)[0][:LOOKED_AT].tolist()
    rows = [list(part) for row in batch for is_text, part in groupby(
        row, lambda i: i not in words.controls and i < words.vocab_size) if is_text]
    # A sequence may begin and end within a character, which is then U+FFFD.
    texts = [words.decode(row).strip('\ufffd') for row in rows]
    again = [words.encode(text).tolist() for text in texts]
    same = sum((Counter(ids) & Counter(row)).total()
               for ids, row in zip(again, rows, strict=True)) / max(1, sum(map(len, again)))
    if same < ROUND_TRIP and not run.dataset.meta:
        raise NotChecked(f'{run.dataset.folder} does not say which tokenizer it has')
    if same < ROUND_TRIP:
        return (f'the tokens decode to {texts[0][:80]!r}, and only {same:.0%} of them come back '
                f'when that is encoded again: {run.dataset.folder} was made with another tokenizer '
                'than its meta.json has')


def first_text(run):
    """The beginning of what the model will read, where the tokenizer is at hand."""
    ids = run.train_data.train_batch(0, 0)[0][0].tolist()
    with suppress(UserError):
        return f'; the model will read {run.dataset.tokenizer().decode(ids)[:80]!r}'
    return ''


def rate_lasts(run):
    """The learning rate is not gone long before the end."""
    config = run.config
    rates = [get_lr(int(config.max_iters * share), config) for share in np.linspace(0, 0.9, 100)]
    if rates[-1] < GONE * max(rates):
        return 'the learning rate is gone before the last tenth of the run: lr_decay_iters, ' \
               'warmup_iters and max_iters do not fit each other, or the schedule is wrong'
