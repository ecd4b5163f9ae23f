"""Several corpora that are trained on as one: dataset='code:0.3,prose:0.7'.

Each corpus has exactly its share of every thousand sequences; a keyed permutation decides their
places. A corpus gives its sequences in its own order, each once before any comes again. Which
sequence has which place is a pure function of (seed, number), as it is for one corpus.
"""

import re
from functools import lru_cache

import numpy as np

from plaingpt.data import tokenizers
from plaingpt.data.batches import BatchLoader, key, permute
from plaingpt.data.token_files import TokenStream
from plaingpt.system.errors import UserError

SHARES = 1000  # sequences: in each block of this many, the corpora have their shares
ROUNDING = 1e-3  # the sum of the weights may miss 1 by this, as three times 0.333 does


def read_mixture(text):
    """'code:0.3,prose:0.7' → {name: weight in thousandths}. Raises UserError."""
    pieces = re.findall(r' *([^,]*[^, ]) *: *([0-9]*\.?[0-9]+) *(?:,|$)', text)
    weights = {name: float(weight) for name, weight in pieces}
    if len(weights) != text.count(',') + 1 or abs(sum(weights.values()) - 1) > ROUNDING:
        raise UserError(f'dataset={text}: no such folder is there, and no mixture: write one as '
                        'code:0.3,prose:0.7, each name once, with weights that come to 1')
    shares = apportion([*weights.values()], SHARES)
    if 0 in shares:
        raise UserError(f'dataset={text}: a corpus would have none of every {SHARES:,} sequences: '
                        f'give it a weight of at least {1 / SHARES:g}, or leave it out')
    return {name: share / SHARES for name, share in zip(weights, shares, strict=True)}


def apportion(weights, n):
    """Split the integer n in proportion to `weights` → integers that add up to n: those of the
    largest remainders are rounded up, the first of equal ones."""
    exact = np.array(weights) * n / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind='stable')[:n - counts.sum()]] += 1
    return counts.tolist()


def check_parts(parts):
    """Raises UserError where datasets do not go together."""
    first = parts[0].dataset
    for _, dataset, _ in parts:
        if dataset.has_mask():
            raise UserError(f'{dataset.folder} holds conversations, which no mixture can: prepare '
                            'all conversations as one dataset')
        if tokenizers.words_of(dataset.tokenizer_json()) \
                != tokenizers.words_of(first.tokenizer_json()):
            raise UserError(f'{first.folder} and {dataset.folder} were prepared with different '
                            f'tokenizers: prepare the second with --tokenizer={first.folder}')


class MixedStream(TokenStream):
    """The streams of several corpora, one after another. shares: in SHARES sequences."""

    def __init__(self, streams, shares, vocab_size):
        super().__init__([file for stream in streams for file in stream.files], vocab_size)
        self.streams, self.shares = streams, shares
        self.begins = np.cumsum([0] + [len(stream) for stream in streams])


@lru_cache(2)
def arrange(seed, block, shares):
    """Corpus and index within that corpus of each sequence in a block of a thousand → two arrays"""
    order = permute(np.arange(SHARES), SHARES, key(seed, block, 2))
    corpora = np.searchsorted(np.cumsum(shares), order, side='right')
    indices = np.empty(SHARES, np.int64)
    for k, share in enumerate(shares):
        indices[corpora == k] = block * share + np.arange(share)
    return corpora, indices


class MixedLoader(BatchLoader):
    """Batches of a MixedStream. Its `parts` are loaders of one corpus each."""

    parts = ()

    def __init__(self, stream, block_size, batch_size, *, seed=0, **settings):
        super().__init__(stream, block_size, batch_size, seed=seed, **settings)
        self.parts = [BatchLoader(each, block_size, batch_size, **settings,
                                  seed=int(key(seed, k)[0]) if k else seed)
                      for k, each in enumerate(stream.streams)]
        self.num_eval_sequences = sum(part.num_eval_sequences for part in self.parts)
        self.sequences_per_epoch = min(  # about this many until a corpus begins again
            part.sequences_per_epoch * SHARES // share
            for part, share in zip(self.parts, stream.shares, strict=True))

    def sequence_starts(self, ids):
        """Numbers of sequences → the token where each begins, of all corpora one after another."""
        corpora, indices = np.empty_like(ids), np.empty_like(ids)
        blocks, places = np.divmod(ids, SHARES)
        for block in np.unique(blocks):
            here = blocks == block
            arranged = arrange(self.seed, int(block), self.stream.shares)
            corpora[here], indices[here] = (each[places[here]] for each in arranged)
        starts = np.empty_like(ids)
        for k, part in enumerate(self.parts):
            here = corpora == k
            starts[here] = self.stream.begins[k] + part.sequence_starts(indices[here])
        return starts

    def eval_starts(self, places, n):
        counts = apportion(self.stream.shares, n)
        ends, starts = np.cumsum(counts), np.empty_like(places)
        corpora = np.searchsorted(ends, places, side='right')
        for k, part in enumerate(self.parts):
            here = corpora == k
            within = places[here] - (ends[k] - counts[k])
            starts[here] = self.stream.begins[k] + part.eval_starts(within, counts[k])
        return starts
