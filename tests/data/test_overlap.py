"""How much of the validation split is in the training split."""

import random
import tracemalloc

import numpy as np
import pytest
from corpus_files import prepared, write_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_batches import stream

import prepare
from plaingpt.data import overlap
from plaingpt.data.dataset import open_dataset
from plaingpt.data.overlap import SEQUENCE_TOKENS, find_overlap


def shown_share(captured):
    """What the one line of that kind says, on stderr where it is a warning."""
    line, = [line for line in (captured.out + captured.err).splitlines()
             if 'is also in the training split' in line]
    return float(line.removeprefix('warning: ').split('%')[0]) / 100


# -----------------------------------------------------------------------------
# the count


@given(st.integers(0, 2**32), st.integers(2, 1200), st.integers(64, 1200), st.integers(1, 9),
       st.integers(1, 300), st.integers(1, 12))
@example(0, 200, 640, 1, 50, 9)  # one sequence many times
@settings(max_examples=30)
def test_it_is_the_share_of_sequences_that_a_plain_search_finds(
        tmp_path_factory, seed, train_tokens, val_tokens, vocab_size, block_tokens,
        sequences):
    chance = np.random.default_rng(seed)
    train, val = (chance.integers(vocab_size, size=n) for n in (train_tokens, val_tokens))
    for _ in range(chance.integers(8)):  # passages that both have, and each has twice
        to, source = [(train, val), (val, train), (train, train)][chance.integers(3)]
        n = min(chance.integers(200), len(to), len(source))
        at, start = chance.integers(len(to) - n + 1), chance.integers(len(source) - n + 1)
        to[at:at + n] = source[start:start + n].copy()
    count = min(sequences, val_tokens // SEQUENCE_TOKENS)
    starts = [i * (val_tokens - SEQUENCE_TOKENS) // max(count - 1, 1) for i in range(count)]
    present = {train[i:i + SEQUENCE_TOKENS].tobytes() for i in range(train_tokens - 63)}
    expected = sum(val[i:i + SEQUENCE_TOKENS].tobytes() in present for i in starts) / count
    splits = [stream(tmp_path_factory.mktemp('split'), ids, files=2) for ids in (train, val)]
    with pytest.MonkeyPatch.context() as patch:  # sequences lie across blocks and files
        patch.setattr(overlap, 'BLOCK_TOKENS', block_tokens)
        patch.setattr(overlap, 'SEQUENCES', sequences)
        assert find_overlap(*splits) == expected


def test_memory_is_that_of_a_few_pieces_and_not_of_the_splits(tmp_path, monkeypatch):
    monkeypatch.setattr(overlap, 'BLOCK_TOKENS', 2**13)
    monkeypatch.setattr(overlap, 'SEQUENCES', 2**8)
    ids = np.random.default_rng(2).integers(2**16, size=2**21)
    split = stream(tmp_path, ids, vocab_size=2**16)
    tracemalloc.start()
    assert find_overlap(split, split) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 8 * 2**16 < 2 * len(ids)  # bytes of the file


# -----------------------------------------------------------------------------
# prepare.py


@pytest.mark.parametrize('copies', [1, 9])
def test_prepare_and_inspect_say_how_much_of_an_own_validation_split_is_trained_on(
        copies, tmp_path, capsys):
    chance = random.Random(0)
    documents = [''.join(chance.choices('abcdefgh \n', k=2000)) for _ in range(60)]
    write_rows(tmp_path / 'in/train.jsonl', documents[:40])
    write_rows(tmp_path / 'in/validation.jsonl', documents[40 - copies:60 - copies])
    prepared(tmp_path / 'd', 'hf', tmp_path / 'in', '--val_split=validation')
    entry = open_dataset(tmp_path / 'd').split_entry('val')
    assert (share := entry['in_train']) == pytest.approx(copies / 20, abs=0.05)
    assert 'lines_in_train' not in entry  # these documents are long
    said_by_prepare = capsys.readouterr()
    prepare.main(['inspect', f'{tmp_path}/d'])
    for said in (said_by_prepare, capsys.readouterr()):
        assert shown_share(said) == pytest.approx(share, abs=5e-4)
        assert ('says little' in said.err) == (copies == 9)


def test_short_documents_that_differ_in_their_numbers_are_copies(tmp_path, capsys):
    chance = random.Random(0)
    write_rows(tmp_path / 'copies.jsonl', [f'Order {n} was sent to customer {7 * n}.'
                                           for n in range(400)])
    words = ['to', 'be', 'or', 'not', 'that']
    write_rows(tmp_path / 'own.jsonl', [' '.join(chance.choices(words, k=15)) for _ in range(400)])
    for name, share in (('copies', 1.0), ('own', 0.0)):
        prepared(tmp_path / name, 'text', tmp_path / f'{name}.jsonl')
        entry = open_dataset(tmp_path / name).split_entry('val')
        assert entry['in_train'] == 0 and entry['lines_in_train'] == share
        assert ('whatever their numbers' in capsys.readouterr().err) == (name == 'copies')
