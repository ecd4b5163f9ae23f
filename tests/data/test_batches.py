import hashlib
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from plaingpt.core.batches import BatchLoader, key, permute
from plaingpt.core.token_files import TokenStream, open_tokens
from plaingpt.system.errors import UserError


def stream(tmp_path, tokens, vocab_size=50257, files=1):
    paths = []
    for i, piece in enumerate(np.array_split(np.asarray(tokens), files)):
        paths.append(tmp_path / f'train_{i:06d}.bin')
        piece.astype('<u2').tofile(paths[-1])
    return TokenStream([open_tokens(p, np.dtype('<u2')) for p in paths], vocab_size)


class NoTokens:
    """A stream of so many tokens, to ask where sequences begin."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n


def loaders_of(tokens, block_size, batch_size, processes, micro_steps=1):
    """The loader of each process of a job that takes `micro_steps` micro-batches in all."""
    each = max(1, micro_steps // processes)
    return [BatchLoader(tokens, block_size, batch_size, micro_steps=each, rank=rank,
                        world_size=processes) for rank in range(processes)]


# -----------------------------------------------------------------------------
# the order


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_the_keyed_permutation_visits_each_index_once(n, k):
    assert sorted(permute(np.arange(n), n, np.uint64(k)).tolist()) == list(range(n))


def test_each_epoch_of_each_seed_has_its_own_random_order():
    keys = (0, 0), (0, 1), (1, 0)  # seed, epoch
    orders = [permute(np.arange(1000), 1000, key(*k)) for k in keys]
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:  # neighbors are a third of the range apart on average
        assert np.abs(np.diff(order)).mean() == pytest.approx(1000 / 3, rel=0.15)


def test_each_epoch_visits_each_sequence_once_on_any_number_of_processes(tmp_path):
    tokens = stream(tmp_path, np.arange(255))
    for processes in (1, 2, 3, 8):
        loaders = loaders_of(tokens, 10, 1, processes, micro_steps=24)
        assert loaders[0].sequences_per_epoch == 24
        for epoch in range(3):
            firsts = [int(loader.train_batch(epoch, micro)[0][0, 0])
                      for loader in loaders for micro in range(24 // processes)]
            phase = min(firsts)
            assert sorted(firsts) == [phase + 10 * i for i in range(24)], (processes, epoch)


def test_targets_are_the_tokens_one_position_later(tmp_path):
    idx, targets = BatchLoader(stream(tmp_path, np.arange(255)), 10, 4).train_batch(3, 0)
    assert torch.equal(targets, idx + 1)


def test_every_token_but_the_first_is_a_target_within_six_epochs():
    for block_size in (1, 2, 7, 20):
        for n in range(block_size + 1, 6 * block_size + 2):
            loader = BatchLoader(NoTokens(n), block_size, 1)
            begins = loader.sequence_starts(np.arange(6 * loader.sequences_per_epoch))
            targets = begins[:, None] + np.arange(1, block_size + 1)
            assert np.array_equal(np.unique(targets), np.arange(1, n)), (n, block_size)


def test_the_order_is_that_of_version_1_0():
    loader = BatchLoader(NoTokens(5000), 16, 1, seed=5)
    starts = loader.sequence_starts(np.arange(20 * loader.sequences_per_epoch)).astype('<i8')
    assert hashlib.sha256(starts.tobytes()).hexdigest().startswith('4b3653970b89bf8b')


def test_a_step_asked_for_directly_is_the_step_reached_from_zero(tmp_path):
    loader = BatchLoader(stream(tmp_path, np.arange(3000) % 256), 8, 4, micro_steps=3, seed=5)
    with closing(loader.train_batches(0)) as from_zero, closing(loader.train_batches(20)) as direct:
        for expected, batch in zip(islice(from_zero, 20 * 3, 20 * 3 + 7), direct, strict=False):
            assert all(map(torch.equal, batch, expected))


# -----------------------------------------------------------------------------
# evaluation


def test_evaluation_covers_the_whole_split_once(tmp_path):
    tokens = stream(tmp_path, np.arange(1001))
    for processes in (1, 2, 3):
        evaluated = []
        for loader in loaders_of(tokens, 10, 4, processes):
            for starts in loader.eval_batches(4000):
                _, targets = loader.eval_batch(starts)
                assert targets.shape == (4, 10)  # one shape for torch.compile
                evaluated += targets[targets != -1].tolist()
        assert sorted(evaluated) == list(range(1, 1001)), processes


def test_overfit_steps_evaluates_the_sequences_that_it_trains_on(tmp_path):
    loader = BatchLoader(stream(tmp_path, np.arange(1001)), 10, 2, micro_steps=3, overfit_steps=1)
    evaluated = [starts.tolist() for starts in loader.eval_batches(99)]
    for step in (0, 7):
        assert evaluated == [loader.sequence_starts(loader.sequence_ids(step, micro)).tolist()
                             for micro in range(3)]


# -----------------------------------------------------------------------------
# from the command line


def test_a_split_shorter_than_a_sequence_is_an_error(tmp_path):
    with pytest.raises(UserError, match='--block_size'):
        BatchLoader(stream(tmp_path, range(100)), 100, 1)


def test_the_smallest_recipe_prepares_its_corpus():
    train.main(['config/tiny.py', '--check', '--device=cpu', '--dtype=float32'])
    assert Path('data/readme/meta.json').exists()


def test_a_large_corpus_is_not_prepared_unasked(capfd):
    with pytest.raises(SystemExit) as exit_:
        train.main(['--dataset=openwebtext', '--device=cpu', '--out_dir=out'])
    assert exit_.value.code == 2
    assert 'prepare.py openwebtext' in capfd.readouterr().err
