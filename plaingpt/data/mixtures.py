"""Several corpora that are trained on as one: dataset='code:0.3,prose:0.7'.

Of every thousand sequences each corpus has exactly its share, at places that a keyed permutation
of the thousand decides. It gives its own sequences in its own order, all once before any again.
Which sequence comes where is a pure function of (seed, number), as that of one corpus is.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from plaingpt.data.batches import BatchLoader, key, permute
from plaingpt.data.dataset import (
    SHARES,
    Dataset,
    Part,
    apportion,
    dataset_folder,
    open_dataset,
    read_names,
)
from plaingpt.data.token_files import TokenStream
from plaingpt.system.errors import UserError


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
        if part.dataset.has_mask():
            raise UserError(f'dataset={text}: {part.dataset.folder} holds conversations, which no '
                            'mixture can: prepare all conversations as one dataset')
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
