import hashlib
import re

import numpy as np
import pytest
from sample_data import prepare_corpora
from test_batches import NoTokens

import prepare
from plaingpt.core.dataset import open_dataset_spec
from plaingpt.core.mixtures import MixedLoader, apportion
from plaingpt.system.errors import UserError


class Mixed(NoTokens):
    """A MixedStream of so many tokens of each corpus, for who asks where sequences begin."""

    def __init__(self, sizes, shares):
        super().__init__(sum(sizes))
        self.streams, self.shares = [NoTokens(n) for n in sizes], tuple(shares)
        self.offsets = np.cumsum([0, *sizes])


@pytest.fixture
def three(tmp_path):
    """data/code, data/prose and data/small, of the same tokenizer; the working directory."""
    return prepare_corpora(tmp_path, {
        'code': 'def f(x): return x + 1\n' * 300,
        'prose': 'It was a dark and stormy night. ' * 500,
        'small': 'A little more text of another kind, 0123456789.\n' * 60})


# -----------------------------------------------------------------------------
# the order


def test_weights_become_shares_by_the_largest_remainders():
    for weights, shares in (([0.3, 0.7], [300, 700]), ([1, 1, 1], [334, 333, 333]),
                            ([0.29, 0.57, 0.14], [290, 570, 140]), ([0.9995, 0.0005], [1000, 0])):
        assert apportion(weights, 1000) == shares


SIZES, SHARES, T = (5_000, 900, 40_000), (334, 333, 333), 16


@pytest.fixture
def mixed():
    """A loader of three corpora; where its first 10,000 sequences begin; the corpus of each."""
    loader = MixedLoader(Mixed(SIZES, SHARES), T, 4, seed=7)
    starts = loader.sequence_starts(np.arange(10_000))
    return loader, starts, np.searchsorted(loader.stream.offsets, starts, side='right') - 1


def test_every_thousand_sequences_have_exact_shares(mixed):
    for thousand in mixed[2].reshape(-1, 1000):
        assert tuple(np.bincount(thousand)) == SHARES


def test_each_corpus_is_read_once_before_it_repeats(mixed):
    loader, starts, corpora = mixed
    for k, part in enumerate(loader.components):
        mine, n = starts[corpora == k] - loader.stream.offsets[k], part.sequences_per_epoch
        assert mine.min() >= 0
        assert mine.max() + T + 1 <= SIZES[k]
        for epoch in range(len(mine) // n):
            assert len(np.unique(mine[epoch * n:(epoch + 1) * n])) == n


def test_the_order_of_a_mixture_is_that_of_version_1_0(mixed):
    order = hashlib.sha256(mixed[1].astype('<i8').tobytes()).hexdigest()
    assert order.startswith('9319b9f75bf33a77')


def test_the_loss_of_the_mixture_is_estimated_from_sequences_by_its_shares():
    stream = Mixed((400, 90_000), (300, 700))  # the first has 24 sequences: they repeat
    for processes in (1, 3):
        loaders = [MixedLoader(stream, 16, 10, rank=rank, world_size=processes)
                   for rank in range(processes)]
        starts = np.concatenate([
            starts for loader in loaders for starts in loader.eval_batches(2000)])
        assert len(starts) == 2000
        assert (starts < 400).sum() == 600
        assert len(np.unique(starts)) == 24 + 1400
        assert starts.max() == 400 + 1399 * 5624 // 1400 * 16  # spread over the split


# -----------------------------------------------------------------------------
# files


def test_batches_hold_the_text_of_each_corpus_by_its_share(three):
    dataset = open_dataset_spec('code:0.3,prose:0.5,data/small:0.2')
    assert [part.name for part in dataset.components] == ['code', 'prose', 'data/small']
    idx, targets = dataset.loader('train', 16, 1000).train_batch(0, 0)
    assert np.array_equal(idx[:, 1:], targets[:, :-1])
    texts = [bytes(row.tolist()).decode() for row in idx]
    for name, share in (('code', 300), ('prose', 500), ('small', 200)):
        text = (three / f'{name}.txt').read_text()
        assert sum(row in text for row in texts) == share


def test_other_weights_are_other_data(three):
    dataset = open_dataset_spec('code:0.25,prose:0.75')
    assert dataset.identity('train') != open_dataset_spec('code:0.2,prose:0.8').identity('train')
    assert open_dataset_spec('code:1').state() == open_dataset_spec('code').state()


@pytest.mark.parametrize('text', [
    'code:0.3,prose:0.6', 'code:3,prose:7', 'code:0.3,prose', 'code:-0.3,prose:1.3',
    'code:nan,prose:1', 'code:30%,prose:70%', 'code:0.5,code:0.5'])
def test_weights_that_make_no_mixture_are_refused(text, three):
    with pytest.raises(UserError, match=re.escape(f'dataset={text}')):
        open_dataset_spec(text)


def test_a_corpus_of_a_mixture_that_is_not_prepared_is_named(three):
    with pytest.raises(UserError, match='data/gone'):
        open_dataset_spec('code:0.5,gone:0.5')


def test_corpora_of_different_tokenizers_are_refused_by_name(three):
    prepare.main(['text', '--input=small.txt', '--tokenizer=char', '--data_dir=data/char'])
    with pytest.raises(UserError, match=r'data/code.*data/char'):
        open_dataset_spec('code:0.5,char:0.5')
