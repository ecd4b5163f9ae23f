import hashlib
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare
import train
from plaingpt.data import dataset
from plaingpt.data.batches import BatchLoader, key, permute
from plaingpt.data.token_files import TokenStream, open_tokens
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
    some = permute(np.array([0, 1, 10**12 - 1]), 10**12, np.uint64(k))  # in no time and memory
    assert len(set(some.tolist())) == 3 and (some < 10**12).all()


def test_the_order_differs_between_epochs_and_between_seeds():
    orders = [permute(np.arange(1000), 1000, key(*k)).tolist() for k in [(0, 0), (0, 1), (1, 0)]]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    # of a random order, neighbours are a third of the range apart on average
    assert 280 < np.abs(np.diff(orders[0])).mean() < 390


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
            assert 0 <= phase < 15
    idx, targets = loaders[0].train_batch(3, 0)
    assert torch.equal(targets, idx + 1) and idx.dtype == targets.dtype == torch.int64


def test_every_token_but_the_first_is_a_target_within_six_epochs():
    for block_size in (1, 2, 7, 20):
        for n in range(block_size + 1, 6 * block_size + 2):
            loader = BatchLoader(NoTokens(n), block_size, 1)
            begins = loader.sequence_starts(np.arange(6 * loader.sequences_per_epoch))
            targets = begins[:, None] + np.arange(1, block_size + 1)
            assert np.array_equal(np.unique(targets), np.arange(1, n)), (n, block_size)


def test_the_order_of_the_even_epochs_stays():
    for n, block_size, seed, sha256 in ((3071, 1024, 1337, '5aaaf1b46399219f'),
                                        (5000, 16, 5, 'e52650ee8a77f65c')):
        loader = BatchLoader(NoTokens(n), block_size, 1, seed=seed)
        per_epoch = loader.sequences_per_epoch
        ids = np.concatenate([epoch * per_epoch + np.arange(per_epoch)
                              for epoch in range(0, 20, 2)])
        found = hashlib.sha256(loader.sequence_starts(ids).astype('<i8').tobytes()).hexdigest()
        assert found.startswith(sha256)


def test_a_step_asked_for_at_once_is_the_step_reached_from_zero(tmp_path):
    loader = BatchLoader(stream(tmp_path, np.arange(3000) % 256), 8, 4, micro_steps=3, seed=5)
    from_zero = loader.train_batches(0)
    for _ in range(20 * 3):
        next(from_zero)
    at_once = loader.train_batches(20)
    for _ in range(7):
        for a, b in zip(next(from_zero), next(at_once), strict=True):
            assert torch.equal(a, b)
    from_zero.close()
    at_once.close()


# -----------------------------------------------------------------------------
# evaluation


def test_evaluation_covers_the_whole_split_once(tmp_path):
    tokens = stream(tmp_path, np.arange(1001))
    for processes in (1, 2, 3):
        seen = []
        for loader in loaders_of(tokens, 10, 4, processes):
            for starts in loader.eval_batches(4000):
                idx, targets = loader.eval_batch(starts)
                assert idx.shape == targets.shape == (4, 10)  # one shape for torch.compile
                seen += targets[targets != -1].tolist()
        assert sorted(seen) == list(range(1, 1001)), processes


def test_the_sequences_of_the_first_step_alone_are_trained_on_and_evaluated(tmp_path):
    loader = BatchLoader(stream(tmp_path, np.arange(1001)), 10, 2, micro_steps=3, only_first=1)
    trained = [loader.sequence_starts(loader.sequence_ids(step, micro)).tolist()
               for step in (0, 7) for micro in range(3)]
    assert trained[:3] == trained[3:]
    assert [starts.tolist() for starts in loader.eval_batches(99)] == trained[:3]


# -----------------------------------------------------------------------------
# from the command line


def test_a_split_shorter_than_a_sequence_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r'block_size \+ 1'):
        BatchLoader(stream(tmp_path, range(100)), 100, 1)


def test_the_smallest_recipe_prepares_its_corpus_and_is_checked(tmp_path, monkeypatch, capsys):
    def prepare_here(command):
        prepare.main(command[2:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dataset, 'subprocess', SimpleNamespace(run=prepare_here))
    train.main(['config/tiny.py', '--check', '--device=cpu', '--dtype=float32'])
    assert 'checks passed' in capsys.readouterr().out


@pytest.mark.parametrize('name, words', [('openwebtext', 'run python prepare.py openwebtext'),
                                         ('novels', 'data/novels is not prepared')])
def test_only_a_small_corpus_is_prepared_unasked(name, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        train.main([f'--dataset={name}', '--device=cpu', '--out_dir=out'])
    assert exit_.value.code == 2
    assert words in capfd.readouterr().err
