"""A weighted mixture of corpora: dataset='code:0.3,prose:0.7'.

Each corpus has exactly its share of every thousand sequences, in an order given by a keyed
permutation. Within a corpus, sequences come in its own order, each once per epoch. Which sequence
comes when is a pure function of (seed, number), as for a single corpus.
"""

import re
from functools import lru_cache

import numpy as np

from plaingpt.core.batches import BatchLoader, key, permute
from plaingpt.core.token_files import TokenStream
from plaingpt.system.errors import UserError

SHARES = 1000  # each block of this many sequences contains every corpus in proportion
ROUNDING = 1e-3  # tolerance for the sum of the weights: three times 0.333 is not 1


def parse_mixture(spec):
    """'code:0.3,prose:0.7' → {name: weight, a multiple of 1/1000}. Raises UserError."""
    pairs = re.findall(r' *([^,]*[^, ]) *: *([0-9]*\.?[0-9]+) *(?:,|$)', spec)
    weights = {name: float(weight) for name, weight in pairs}
    if len(weights) != spec.count(',') + 1 or abs(sum(weights.values()) - 1) > ROUNDING:
        raise UserError(f'dataset={spec}: neither a folder nor a mixture; write a mixture as '
                        'code:0.3,prose:0.7, each name once, with weights that sum to 1')
    shares = apportion([*weights.values()], SHARES)
    if 0 in shares:
        raise UserError(f'dataset={spec}: a weight rounds to 0 of {SHARES:,} sequences; raise it '
                        f'to at least {1 / SHARES:g}, or remove the corpus')
    return {name: share / SHARES for name, share in zip(weights, shares, strict=True)}


def apportion(weights, n):
    """Split the integer n in proportion to `weights` → integers that sum to n, by the largest
    remainder method. Ties go to the first."""
    exact = np.array(weights) * n / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind='stable')[:n - counts.sum()]] += 1
    return counts.tolist()


def check_components(components):
    """Raises UserError if datasets cannot be mixed."""
    first = components[0].dataset
    from plaingpt.data.tokenizers import vocabulary_of
    vocabulary = vocabulary_of(first.tokenizer_json())
    for _, dataset, _ in components:
        if dataset.has_mask():
            raise UserError(f'{dataset.folder} holds conversations, which cannot be mixed; prepare '
                            'all conversations as one dataset')
        if vocabulary_of(dataset.tokenizer_json()) != vocabulary:
            raise UserError(f'{first.folder} and {dataset.folder} have different tokenizers; '
                            f'prepare the second with --tokenizer={first.folder}')


class MixedStream(TokenStream):
    """The concatenated streams of several corpora. shares: sequences of each out of SHARES"""

    def __init__(self, streams, shares, vocab_size):
        super().__init__([file for stream in streams for file in stream.files], vocab_size)
        self.streams, self.shares = streams, shares
        self.offsets = np.cumsum([0] + [len(stream) for stream in streams])


@lru_cache(2)
def arrange(seed, block, shares):
    """→ (corpus of each sequence in a block of SHARES, its index within that corpus)"""
    order = permute(np.arange(SHARES), SHARES, key(seed, block, 2))
    corpora = np.searchsorted(np.cumsum(shares), order, side='right')
    indices = np.empty(SHARES, np.int64)
    for k, share in enumerate(shares):
        indices[corpora == k] = block * share + np.arange(share)
    return corpora, indices


class MixedLoader(BatchLoader):
    """Batches of a MixedStream. `components` has a loader for each corpus."""

    components = ()

    def __init__(self, stream, block_size, batch_size, *, seed=0, **options):
        super().__init__(stream, block_size, batch_size, seed=seed, **options)
        self.components = []
        for k, corpus_stream in enumerate(stream.streams):
            corpus_seed = int(key(seed, k)[0]) if k else seed
            self.components.append(BatchLoader(corpus_stream, block_size, batch_size,
                                               seed=corpus_seed, **options))
        self.num_eval_sequences = sum(loader.num_eval_sequences for loader in self.components)
        self.sequences_per_epoch = min(  # until the first corpus starts its next epoch, about
            loader.sequences_per_epoch * SHARES // share
            for loader, share in zip(self.components, stream.shares, strict=True))

    def epoch_tokens(self):
        """How many tokens the model reads until the first corpus starts its next epoch."""
        return min(loader.epoch_tokens() * SHARES // share
                   for loader, share in zip(self.components, self.stream.shares, strict=True))

    def sequence_starts(self, ids):
        """Sequence numbers → the start token of each in the concatenated corpora."""
        corpora, indices = np.empty_like(ids), np.empty_like(ids)
        blocks, positions = np.divmod(ids, SHARES)
        for block in np.unique(blocks):
            in_block = blocks == block
            block_corpora, block_indices = arrange(self.seed, int(block), self.stream.shares)
            corpora[in_block] = block_corpora[positions[in_block]]
            indices[in_block] = block_indices[positions[in_block]]
        starts = np.empty_like(ids)
        for k, loader in enumerate(self.components):
            in_corpus = corpora == k
            starts[in_corpus] = self.stream.offsets[k] + loader.sequence_starts(indices[in_corpus])
        return starts

    def eval_starts(self, indices, n):
        counts = apportion(self.stream.shares, n)
        ends, starts = np.cumsum(counts), np.empty_like(indices)
        corpora = np.searchsorted(ends, indices, side='right')
        for k, loader in enumerate(self.components):
            in_corpus = corpora == k
            corpus_indices = indices[in_corpus] - (ends[k] - counts[k])
            starts[in_corpus] = self.stream.offsets[k] \
                + loader.eval_starts(corpus_indices, counts[k])
        return starts
