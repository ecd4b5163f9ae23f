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
from plaingpt.data.overlap import (
    SEQUENCE_TOKENS,
    find_overlap,
    read_sketches,
    share_trained_on,
    sketch_of,
    windows_of,
    write_sketches,
)
from plaingpt.data.token_files import TokenFile, TokenStream, open_tokens


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
# a sketch of a training text


WORDS = np.random.default_rng(3).integers(50_000, size=2**20)  # of which no 64 occur twice
LICENSE, SPACES = np.arange(400), np.full(3000, 7)


def text(tmp_path, *ids):
    """Token ids → their stream, of two files."""
    folder = tmp_path / f'text{len(list(tmp_path.iterdir()))}'
    folder.mkdir()
    return stream(folder, np.concatenate(ids), files=2)


def estimate(tmp_path, train, *val, blocks=2**16):
    """How much of a validation text a sketch of so many blocks says to be trained on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, 'SKETCH_BLOCKS', blocks)
        sketch = sketch_of(text(tmp_path, train))
    return share_trained_on(*windows_of(text(tmp_path, *val)), [sketch])


@pytest.mark.parametrize(('blocks', 'error'), [(2**16, 0.01), (2**10, 0.08)])  # all, or a tenth
def test_a_sketch_tells_how_much_of_a_text_was_trained_on(blocks, error, tmp_path):
    train, val = WORDS[:655_000], WORDS[-200_000:]
    copies = [train[i:i + 4000] for i in range(555, 600_000, 12_000)]  # 200,000 tokens
    assert estimate(tmp_path, train, val, blocks=blocks) == 0
    assert estimate(tmp_path, train, val, *copies, blocks=blocks) == pytest.approx(0.5, abs=error)
    assert estimate(tmp_path, train, *copies, blocks=blocks) == pytest.approx(1, abs=2 * error)


@pytest.mark.parametrize('blocks', [2**16, 2**10])
def test_boilerplate_counts_as_much_as_there_is_of_it(blocks, tmp_path):
    train = [part for i in range(0, 600_000, 3000) for part in (LICENSE, WORDS[i:i + 3000])]
    val = WORDS[-200_000:]
    for boilerplate in (LICENSE, SPACES):
        train.append(boilerplate)
        share = estimate(tmp_path, np.concatenate(train), val[:99_000], boilerplate, val[99_000:],
                         blocks=blocks)
        assert share == pytest.approx(len(boilerplate) / 200_000, rel=0.5)


def test_a_sample_that_holds_too_little_to_tell_says_nothing(tmp_path):
    assert estimate(tmp_path, WORDS, WORDS[:9000]) > 0.99
    assert estimate(tmp_path, WORDS, WORDS[:9000], blocks=2**12) is None
    assert estimate(tmp_path, WORDS[:50], WORDS[:9000]) is None
    assert estimate(tmp_path, WORDS, WORDS[:50]) is None
    assert share_trained_on(*windows_of(text(tmp_path, WORDS[:9000])), []) is None


def test_of_conversations_what_the_assistant_says_is_compared(tmp_path):
    train, val = text(tmp_path, WORDS[:64_000]), text(tmp_path, WORDS[:6400], WORDS[-6400:])
    for of_copies, of_others, share in ((0, 1, 0), (1, 0, 1), (1, 1, 0.5), (0, 0, None)):
        val.loss_mask = text(tmp_path, np.full(6400, of_copies), np.full(6400, of_others))
        assert share_trained_on(*windows_of(val), [sketch_of(train)]) \
            == pytest.approx(share, abs=0.02)


def test_a_sketch_of_a_huge_text_reads_a_few_mb(tmp_path, monkeypatch):
    with open(tmp_path / 'train.bin', 'wb') as file:
        file.truncate(2 * 10**9)
    huge, sizes = TokenStream([open_tokens(tmp_path / 'train.bin', np.dtype('<u2'))], 50257), []
    read_bytes = TokenFile.read_bytes
    monkeypatch.setattr(TokenFile, 'read_bytes', lambda file, place, count: (
        sizes.append(count), read_bytes(file, place, count))[1])
    sketch = sketch_of(huge)
    assert sum(sizes) == 2**16 * 64 * 2 and len(sketch.hashes) == 2**16
    assert sketch.share == pytest.approx(2**22 / 10**9, rel=1e-3)


def test_a_file_of_sketches_holds_them_and_is_read_by_later_versions(tmp_path, capsys):
    sketches = [sketch_of(text(tmp_path, WORDS[:n])) for n in (640, 64)]
    path = tmp_path / 'sketches.npz'
    write_sketches(path, sketches)
    assert [(each.hashes.tolist(), each.share) for each in read_sketches(path)] \
        == [(each.hashes.tolist(), each.share) for each in sketches]
    hashes = sketch_of(text(tmp_path, np.arange(64))).hashes
    assert hashes.tolist() == [-8562502739708298345]  # as 1.0 has it
    assert read_sketches(tmp_path / 'none.npz') == [] and not capsys.readouterr().err
    for damaged in (path.read_bytes()[:99], b'', b'{}'):
        path.write_bytes(damaged)
        assert read_sketches(path) == [] and str(path) in capsys.readouterr().err


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


@pytest.mark.parametrize(('characters', 'warned'), [(20_000, True), (4000, False)])
def test_a_validation_split_of_another_kind_of_text_is_told(characters, warned, tmp_path, capsys):
    text = 'abc ' * (9 * characters // 4) + 'äöü ' * (characters // 4)  # the end is held out
    (tmp_path / 'mixed.txt').write_text(text, encoding='utf-8')
    prepare.main(['text', f'{tmp_path}/mixed.txt', '--tokenizer=char', f'--data_dir={tmp_path}/d'])
    assert ('--documents=' in capsys.readouterr().err) == warned
