"""Checks of the data: do batches match the token files, once each, and does it decode to text?"""

from collections import Counter
from contextlib import closing, suppress
from itertools import groupby

import numpy as np
import torch

from plaingpt.checks.model_checks import NotChecked
from plaingpt.system.distributed import all_gather, gloo_group
from plaingpt.system.errors import UserError

EXCERPTS, EXCERPT_TOKENS = 8, 1024  # of each corpus, which are decoded and encoded again
VARY_EXCERPTS = 64  # of each corpus, which may not hold one id alone
MIN_RATE = 1e-3  # share of the peak learning rate that is too little to learn with
EPOCH_SEQUENCES = 2**12  # sequences of an epoch that are checked, at most


def batches_match_the_files(run):
    """The first micro-batch of steps 0 and 1, as the loop gets them, and of an evaluation."""
    loader = run.train_data
    with closing(loader.train_batches(0)) as batches:
        first, *_, later = [next(batches) for _ in range(loader.micro_steps + 1)]
    for step, batch in enumerate((first, later)):
        starts = loader.sequence_starts(loader.sequence_ids(step, 0))
        if problem := compare_batch(batch, loader, run.dataset.split('train'), starts):
            return f'the batch of step {step} does not match the training split: {problem}'
    loader = run.val_data
    starts = next(iter(loader.eval_batches(run.progress.eval_sequences)), [])
    if len(starts) and (problem := compare_batch(loader.eval_batch(starts), loader,
                                                 run.dataset.split('val'), starts)):
        return f'an evaluation batch does not match the validation split: {problem}'


def compare_batch(batch, loader, stream, starts):
    """(idx, targets, …) beside the files of a split → None, or what differs."""
    idx, targets = (tensor.cpu() for tensor in batch[:2])  # (B, T) each
    for row, start in enumerate(starts.tolist()):
        for column, first, n in loader.layout(start):
            tokens = torch.from_numpy(stream.read(first, n))
            here = row, slice(column, column + n - 1)
            if not torch.equal(idx[here], tokens[:-1]):
                return 'the loader reads another file or position, or something modifies tokens'
            if ((targets[here] != tokens[1:]) & (targets[here] != -1)).any():
                return 'the targets are not the next tokens, which are the inputs shifted by one'
            if stream.loss_mask is not None and not np.array_equal(
                    targets[here] != -1, stream.loss_mask.read(first, n)[1:] == 1):
                return 'the targets are not those that the mask marks: what the assistant says'


def of_all(mine):
    """[array] of this process → one array, with those of all processes"""
    shares = all_gather(mine, gloo_group())
    return np.concatenate([array for share in shares for array in share])


def epoch_reads_every_sequence_once(run):
    return next(filter(None, map(epoch_reads_part, run.train_data.components)), None)


def epoch_reads_part(loader):
    """The first epoch of a corpus; of a long one its ends and the first two steps."""
    n, T = loader.sequences_per_epoch, loader.block_size
    steps = 1 if loader.overfit_steps else 2
    if n < steps * loader.step_size:
        return None  # so little text has to repeat
    ids = of_all([loader.sequence_ids(step, micro)
                  for step in range(steps) for micro in range(loader.micro_steps)])
    if (found := len(np.unique(ids))) < len(ids):
        return f'sequences repeat: only {found} of the {len(ids)} in the first {steps} steps ' \
               'are distinct; each step, micro-batch and process needs its own'
    half = EPOCH_SEQUENCES // 2
    starts = loader.sequence_starts(np.unique(np.r_[:min(n, half), max(0, n - half):n]))
    if (found := len(np.unique(starts))) < len(starts):
        return f'sequences repeat: {len(starts) - found} of {len(starts)} occur twice in an ' \
               'epoch; their order is not a permutation'
    read = n * (T + 1) if n <= EPOCH_SEQUENCES else int(np.ptp(starts)) + T
    tokens = len(loader.stream) - loader.dropped_tokens
    if read < 0.9 * tokens - 2 * T:
        return f'an epoch reads only {read:,} of {tokens:,} tokens'


def sequences_are_shuffled(run):
    for loader in run.train_data.components:
        n = min(EPOCH_SEQUENCES, loader.sequences_per_epoch)
        if n > 100 and (np.diff(loader.sequence_starts(np.arange(n))) > 0).all():
            return 'sequences are not shuffled: an epoch reads the text from start to end'


def evaluation_reads_every_sequence_once(run):
    for loader in run.val_data.components:
        starts = of_all(loader.eval_batches(run.progress.eval_sequences))
        wanted, found = min(run.progress.eval_sequences, loader.num_eval_sequences), len(starts)
        if found != wanted or len(np.unique(starts)) != wanted:
            return f'an evaluation reads {found} sequences, {len(np.unique(starts))} of them ' \
                   f'distinct, instead of {wanted}; a batch is dropped or repeated'


def tokens_vary(run):
    for loader in run.train_data.components:
        stream = loader.stream
        starts = np.linspace(0, max(0, len(stream) - EXCERPT_TOKENS), VARY_EXCERPTS).astype(int)
        excerpts = [stream.read(start, EXCERPT_TOKENS) for start in starts]
        constant = [int(ids[0]) for ids in excerpts if (ids == ids[0]).all()]
        if len(constant) > VARY_EXCERPTS / 4:
            token, _ = Counter(constant).most_common(1)[0]
            path = stream.files[0].path
            return f'{path.parent}: {len(constant)} of {VARY_EXCERPTS} excerpts of the training ' \
                   f'split, {len(excerpts[0]):,} tokens each, repeat a single id, mostly ' \
                   f'{token}: usually a memmap that was not filled to its end, or ids of another ' \
                   'dtype than they are read with'


def tokens_match_the_tokenizer(run):
    """Tokens → text → tokens: those of another tokenizer do not come back."""
    try:
        tokenizer = run.dataset.tokenizer()
    except UserError as problem:  # it needs a download, and nothing else of the run does
        raise NotChecked(str(problem)) from None
    words = getattr(tokenizer, 'base', tokenizer)  # without the tokens that open and end turns
    excerpts = [stream.read(int(start), EXCERPT_TOKENS).tolist()
                for stream in (loader.stream for loader in run.train_data.components)
                for start in np.linspace(0, max(0, len(stream) - EXCERPT_TOKENS), EXCERPTS)]
    rows = [list(part) for excerpt in excerpts for is_text, part in groupby(
        excerpt, lambda i: i not in words.control_ids and i < words.vocab_size) if is_text]
    texts = [words.decode(row).strip('\ufffd') for row in rows]  # it stands for half a character
    changed = sum((Counter(row) - Counter(words.encode(text).tolist())).total()
                  for row, text in zip(rows, texts, strict=True))
    total = sum(map(len, rows))
    # An excerpt may begin and end within a word or a character, where some tokens change.
    if changed > 0.02 * total + 8 * len(excerpts):
        if not run.dataset.meta:
            raise NotChecked(f'{run.dataset.folder} does not say which tokenizer it has')
        if run.dataset.tokenizer_json()['kind'] == 'words':
            raise NotChecked('the tokens were not made by the longest match')
        return f'{run.dataset.folder} was prepared with another tokenizer than its meta.json ' \
               f'has: {changed / total:.0%} of its tokens change when they are decoded, as ' \
               f'{texts[0][:80]!r}, and encoded again'


def first_text(run):
    """The beginning of what the model will read, where the tokenizer is at hand."""
    ids = run.train_data.train_batch(0, 0)[0][0].tolist()
    with suppress(UserError):
        return f'; the model will read {run.dataset.tokenizer().decode(ids)[:80]!r}'
    return ''


def learning_rate_lasts(run):
    config = run.config
    rates = [run.clock.get_lr(int(config.max_iters * share), share)
             for share in np.linspace(0, 0.9, 100)]
    if rates[-1] < MIN_RATE * max(rates):
        return 'the learning rate is almost 0 before the last tenth of the run; compare ' \
               'lr_decay_iters with max_iters, or look at the schedule'
