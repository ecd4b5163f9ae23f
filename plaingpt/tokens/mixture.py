"""Several corpora that are trained on as one: dataset='code:0.3,prose:0.7'.

Of every thousand sequences each corpus has exactly its share, at places that a keyed permutation
of the thousand decides. It gives its own sequences in its own order, all once before any again.
Which sequence comes where is a pure function of (seed, number), as that of one corpus is.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.tokens.batches import BatchLoader, key, permute
from plaingpt.tokens.dataset import SHARES, Dataset, Part, dataset_folder, open_dataset
from plaingpt.tokens.token_files import TokenStream

ROUNDING = 1e-3  # by which the weights of a mixture may miss 1, as three times 0.333 does


def read_names(text):
    """What `dataset` says, a name or 'code:0.3,prose:0.7' → {name: its share of every thousand
    sequences}. Raises UserError."""
    pieces = {piece.strip(): split_weight(piece.strip()) for piece in text.split(',')}
    is_mixture = all(weight is not None for _, weight in pieces.values())
    if os.path.exists(dataset_folder(text)):
        if is_mixture:
            raise UserError(f'dataset={text} is a mixture and also the name of '
                            f'{dataset_folder(text)}: end it with / to mean that folder')
        return {text: SHARES}
    if not is_mixture:
        if ',' not in text:
            return {text: SHARES}
        name = next(piece for piece, (_, weight) in pieces.items() if weight is None)
        raise UserError(f'dataset={text}: {name!r} has no weight: write a mixture as '
                        'code:0.3,prose:0.7')
    names, weights = zip(*pieces.values(), strict=True)
    if len({dataset_folder(name).resolve() for name in names}) < text.count(',') + 1:
        raise UserError(f'dataset={text} names a corpus twice: give it one weight')
    if abs(sum(weights) - 1) > ROUNDING:
        raise UserError(f'dataset={text}: the weights come to {sum(weights):.6g}, and must come '
                        'to 1')
    shares = dict(zip(names, apportion(weights, SHARES), strict=True))
    for name, share in shares.items():
        if not share:
            raise UserError(f'dataset={text}: {name} would have none of every {SHARES:,} '
                            f'sequences: give it a weight of at least {1 / SHARES:g}, or leave it '
                            'out')
    return shares


def split_weight(piece):
    """'code:0.3' → ('code', 0.3); the weight is None where there is none."""
    name, _, weight = piece.rpartition(':')
    try:
        weight = float(weight)
    except ValueError:
        return piece, None
    return (name, weight) if name and 0 <= weight < float('inf') else (piece, None)


def apportion(weights, n):
    """n in whole numbers that are as the weights: what is left by rounding down goes to the
    largest remainders, the first of equal ones."""
    exact = np.array(weights) * n / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind='stable')[:n - counts.sum()]] += 1
    return counts.tolist()


def is_prepared(text):
    """Whether there are token files of all that `dataset` says."""
    return all(any(dataset_folder(name).glob('*.bin')) for name in read_names(text))


def open_named(text):
    """What `dataset` says → Dataset, a Mixture where it names several. Raises UserError."""
    shares = read_names(text)
    if len(shares) == 1:
        return open_dataset(dataset_folder(*shares))
    last = [Path(name).name for name in shares]
    short = last if len(set(last)) == len(last) else shares
    parts = [Part(name, open_dataset(dataset_folder(path)), share)
             for name, (path, share) in zip(short, shares.items(), strict=True)]
    first = parts[0].dataset
    for part in parts:
        if part.dataset.tokenizer_json() != first.tokenizer_json():
            raise UserError(f'{first.folder} and {part.dataset.folder} were prepared with '
                            'different tokenizers: prepare one with --tokenizer=THE_OTHER')
    known = all(part.dataset.meta for part in parts)  # else GPT-2's tokens, of all
    meta = {'tokenizer': first.tokenizer_json()} if known else {}
    return Mixture(text, meta, first.vocab_size, parts=parts)


@dataclass(frozen=True)
class Mixture(Dataset):
    """Datasets of one tokenizer, read by their shares. `folder` is what the setting says."""

    parts: list = None  # Part

    def split_entry(self, split):
        entries = [part.dataset.split_entry(split) for part in self.parts]
        if any(entry.get('in_train') is None for entry in entries):
            return {}
        return {'in_train': self.mean(entry['in_train'] for entry in entries)}

    def bytes_per_token(self, split):
        sizes = [part.dataset.bytes_per_token(split) for part in self.parts]
        return None if None in sizes else self.mean(sizes)

    def identity(self, split):
        return [[part.share, part.dataset.identity(split)] for part in self.parts]

    def samples(self):
        each = [part.dataset.samples() for part in self.parts]
        return {split: [samples[split] for samples in each] for split in each[0]}

    def is_identity(self, split, saved):
        return saved == self.identity(split)

    def split(self, name, in_ram=False):
        return MixedStream([part.dataset.split(name) for part in self.parts],
                           tuple(part.share for part in self.parts), self.vocab_size, in_ram)

    def loader(self, split, in_ram, *shape, **settings):
        return MixedLoader(self.split(split, in_ram), *shape, **settings)

    def describe_reading(self, in_ram):
        return '; '.join(dict.fromkeys(part.dataset.describe_reading(in_ram)
                                       for part in self.parts))


class MixedStream(TokenStream):
    """The streams of several corpora, one after another, and the share of each."""

    def __init__(self, streams, shares, vocab_size, in_ram=False):
        super().__init__([file for stream in streams for file in stream.files], vocab_size, in_ram)
        # Those that were given keep prepare.py from their folders, which memory does not need.
        self.streams = [TokenStream(stream.files, vocab_size) for stream in streams] if in_ram \
            else streams
        self.shares = shares
        self.begins = np.cumsum([0] + [len(stream) for stream in streams])
        for stream, begin in zip(self.streams, self.begins, strict=False):
            stream.ram = self.ram[begin:begin + len(stream)] if in_ram else None


@lru_cache(2)
def thousand(seed, block, shares):
    """Of each sequence of a block of a thousand: its corpus, and its number within that."""
    order = permute(np.arange(SHARES), SHARES, key(seed, block, 2))
    corpora = np.searchsorted(np.cumsum(shares), order, side='right')
    numbers = np.empty(SHARES, np.int64)
    for k, share in enumerate(shares):
        numbers[corpora == k] = block * share + np.arange(share)
    return corpora, numbers


class MixedLoader(BatchLoader):
    """Batches of a MixedStream. Its `parts` are loaders of one corpus each."""

    parts = ()

    def __init__(self, stream, block_size, batch_size, *, seed=0, **settings):
        super().__init__(stream, block_size, batch_size, seed=seed, **settings)
        self.parts = [BatchLoader(each, block_size, batch_size, **settings,
                                  seed=int(key(seed, k)[0]) if k else seed)
                      for k, each in enumerate(stream.streams)]
        self.eval_sequences = sum(part.eval_sequences for part in self.parts)
        self.sequences_per_epoch = min(  # about as many, before one of the corpora begins again
            part.sequences_per_epoch * SHARES // share
            for part, share in zip(self.parts, stream.shares, strict=True))

    def sequence_starts(self, ids):
        """Numbers of sequences → the token where each begins, of all corpora one after another."""
        corpora, numbers = np.empty_like(ids), np.empty_like(ids)
        blocks, places = np.divmod(ids, SHARES)
        for block in np.unique(blocks):
            here = blocks == block
            of = thousand(self.seed, int(block), self.stream.shares)
            corpora[here], numbers[here] = (each[places[here]] for each in of)
        starts = np.empty_like(ids)
        for k, part in enumerate(self.parts):
            here = corpora == k
            starts[here] = self.stream.begins[k] + part.sequence_starts(numbers[here])
        return starts

    def eval_starts(self, places, n, first):
        counts = apportion(self.stream.shares, n)
        ends, starts = np.cumsum(counts), np.empty_like(places)
        corpora = np.searchsorted(ends, places, side='right')
        for k, part in enumerate(self.parts):
            here = corpora == k
            within = places[here] - (ends[k] - counts[k])
            starts[here] = self.stream.begins[k] + part.eval_starts(within, counts[k], first)
        return starts
