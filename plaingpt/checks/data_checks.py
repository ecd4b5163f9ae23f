"""Checks of the data: batches match the token files, epochs are complete, tokens decode to text."""

from collections import Counter
from contextlib import closing, suppress
from itertools import chain, groupby

import numpy as np
import torch

from plaingpt.checks.model_checks import NotChecked
from plaingpt.core.schedules import get_lr
from plaingpt.system.distributed import all_gather, gloo_group
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of

EXCERPTS, EXCERPT_TOKENS = 8, 1024  # per corpus, to decode and encode again
VARY_EXCERPTS = 64  # per corpus, to look for a repeated id
MIN_RATE = 1e-3  # share of the peak learning rate below which nothing is learned
# Weights are an average of the updates of the last 1 / (learning rate × weight_decay) steps (Wang
# and Aitchison 2024), which should be 10 or more. AdamW and Muon keep them below 1 / weight_decay
# (Xie and Li 2024), which should be well above the 0.02 of their initialization. The recipes have a
# product of at most 0.072, and a decay of at most 12 (own_text.py).
MAX_SHRINKAGE, MAX_DECAY = 0.1, 20
EPOCH_SEQUENCES = 2**12  # sequences of an epoch to check, at most


def batches_match_the_files(run):
    """Check the first micro-batch of steps 0 and 1, as the loop gets them, and of an evaluation."""
    loader = run.train_data
    with closing(loader.train_batches(0)) as batches:
        first, *_, later = [next(batches) for _ in range(loader.micro_steps + 1)]
    for step, batch in enumerate((first, later)):
        starts = loader.sequence_starts(loader.sequence_ids(step, 0))
        problem = compare_batch(batch, loader, run.dataset.split('train'), starts)
        if problem:
            return f'the batch of step {step} does not match the training split: {problem}'
    loader = run.val_data
    starts = next(iter(loader.eval_batches(run.progress.eval_sequences)), [])
    if len(starts):
        batch = loader.eval_batch(starts)
        problem = compare_batch(batch, loader, run.dataset.split('val'), starts)
        if problem:
            return f'an evaluation batch does not match the validation split: {problem}'


def compare_batch(batch, loader, stream, starts):
    """Compare (idx, targets, …) with the files of a split → None, or how they differ."""
    idx, targets = (tensor.cpu() for tensor in batch[:2])  # (B, T) each
    for row, start in enumerate(starts.tolist()):
        for column, first, n in loader.layout(start):
            tokens = torch.from_numpy(stream.read(first, n))
            place = row, slice(column, column + n - 1)
            if not torch.equal(idx[place], tokens[:-1]):
                return 'the loader reads another file or position, or something modifies tokens'
            if ((targets[place] != tokens[1:]) & (targets[place] != -1)).any():
                return 'targets are not the inputs shifted by one'
            if stream.loss_mask is not None and not np.array_equal(
                    targets[place] != -1, stream.loss_mask.read(first, n)[1:] == 1):
                return "the targets are not those of the loss mask, which are the assistant's " \
                       'replies'


def gather_arrays(arrays):
    """[array] of this process → one array, concatenated over all processes"""
    return np.concatenate([*chain.from_iterable(all_gather(arrays, gloo_group()))])


def epoch_reads_every_sequence_once(run):
    return next(filter(None, map(check_epoch, run.train_data.components)), None)


def check_epoch(loader):
    """Check the first epoch of one corpus: if it is long, both ends and the first two steps."""
    n = loader.sequences_per_epoch
    T = loader.block_size
    steps = 1 if loader.overfit_steps else 2
    if n < steps * loader.step_size:
        return None  # too little text: it has to repeat
    ids = gather_arrays([loader.sequence_ids(step, micro)
                         for step in range(steps) for micro in range(loader.micro_steps)])
    distinct = len(np.unique(ids))
    if distinct < len(ids):
        return f'sequences repeat: only {distinct} of the {len(ids)} in the first ' \
               f'{count_of(steps, "step")} are distinct; each step, micro-batch and process ' \
               'needs its own'
    half = EPOCH_SEQUENCES // 2
    starts = loader.sequence_starts(np.unique(np.r_[:min(n, half), max(0, n - half):n]))
    distinct = len(np.unique(starts))
    if distinct < len(starts):
        return f'sequences repeat: {len(starts) - distinct} of {len(starts)} occur twice in an ' \
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
        starts = gather_arrays(loader.eval_batches(run.progress.eval_sequences))
        distinct = len(np.unique(starts))
        expected = min(run.progress.eval_sequences, loader.num_eval_sequences)
        if len(starts) != expected or distinct != expected:
            return f'an evaluation reads {count_of(len(starts), "sequence")} ({distinct} ' \
                   f'distinct) instead of {expected}; a batch is dropped or repeated'


def tokens_vary(run):
    for loader in run.train_data.components:
        stream = loader.stream
        starts = np.linspace(0, max(0, len(stream) - EXCERPT_TOKENS), VARY_EXCERPTS).astype(int)
        excerpts = [stream.read(start, EXCERPT_TOKENS) for start in starts]
        constant = [int(ids[0]) for ids in excerpts if (ids == ids[0]).all()]
        if len(constant) > VARY_EXCERPTS / 4:
            token, _ = Counter(constant).most_common(1)[0]
            folder = stream.files[0].path.parent
            return f'{folder}: {len(constant)} of {VARY_EXCERPTS} excerpts of the training ' \
                   f'split, {len(excerpts[0]):,} tokens each, repeat a single id, mostly ' \
                   f'{token}: usually a memmap that was not filled to its end, or a file read ' \
                   'with the wrong dtype'


def tokens_match_the_tokenizer(run):
    """Decode and encode excerpts: tokens of another tokenizer would change."""
    try:
        tokenizer = run.dataset.tokenizer()
    except UserError as problem:  # it would have to be downloaded, and training does not need it
        raise NotChecked(str(problem)) from None
    base = getattr(tokenizer, 'base', tokenizer)  # a chat tokenizer without its special tokens
    excerpts = [stream.read(int(start), EXCERPT_TOKENS).tolist()
                for stream in (loader.stream for loader in run.train_data.components)
                for start in np.linspace(0, max(0, len(stream) - EXCERPT_TOKENS), EXCERPTS)]

    def is_text(token):
        return token not in base.special_ids and token < base.vocab_size

    changed = total = 0
    texts = []
    for excerpt in excerpts:
        for is_text_span, span in groupby(excerpt, is_text):
            if is_text_span:
                ids = list(span)
                text = base.decode(ids).strip('\ufffd')  # stands for part of a character
                changed += (Counter(ids) - Counter(base.encode(text).tolist())).total()
                total += len(ids)
                texts.append(text)
    # An excerpt may start or end within a word or a character, where some tokens change.
    if changed > 0.02 * total + 8 * len(excerpts):
        if not run.dataset.meta:
            raise NotChecked(f'{run.dataset.folder} has no meta.json that names its tokenizer')
        if run.dataset.tokenizer_json()['kind'] == 'words':
            raise NotChecked('the dataset was not encoded by longest match, so re-encoding differs')
        return f'{run.dataset.folder} was prepared with another tokenizer than its meta.json ' \
               f'names: {changed / total:.0%} of its tokens change when they are decoded, ' \
               f'as {texts[0][:80]!r}, and encoded again'


def first_text(run):
    """The beginning of the first training sequence, if the tokenizer is available."""
    ids = run.train_data.train_batch(0, 0)[0][0].tolist()
    with suppress(UserError):
        return f'; first training sequence: {run.dataset.tokenizer().decode(ids)[:80]!r}'
    return ''


def learning_rate_lasts(run):
    config = run.config
    rates = [get_lr(int(config.max_iters * share), config, share)
             for share in np.linspace(0, 0.9, 100)]
    if rates[-1] < MIN_RATE * max(rates):
        return 'the learning rate is almost 0 before the last tenth of the run; compare ' \
               'lr_decay_iters with max_iters, or check the schedule'


def weights_outlive_their_decay(run):
    lr = run.config.learning_rate
    decay = max(group['weight_decay'] for group in run.step.optimizer.param_groups)
    limit = min(MAX_DECAY, MAX_SHRINKAGE / max(lr, 1e-9))
    if decay >= limit and not run.config.eval_only:
        return f'weight_decay={decay:g} at learning rate {lr:g}: the weights vanish, because ' \
               f'each step shrinks them by {lr * decay:.2%}; lower --weight_decay (0.1 is usual; ' \
               f'at this learning rate, it must be below {limit:.2g})'
