"""How much of the validation split is in the training split."""

import random

import numpy as np
import pytest
from corpus_files import prepared, write_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_batches import stream

import prepare
from plaingpt.core.dataset import open_dataset
from plaingpt.data.overlap import (
    SEQUENCE_TOKENS,
    find_overlap,
    read_sketches,
    share_trained_on,
    sketch_of,
    windows_of,
    write_sketches,
)

# -----------------------------------------------------------------------------
# the count


@given(st.integers(0, 2**32), st.integers(64, 1200), st.integers(64, 1200), st.integers(1, 9),
       st.integers(1, 300), st.integers(1, 12))
@example(0, 200, 640, 1, 50, 9)  # one sequence many times
@settings(max_examples=30)
def test_the_share_is_that_of_a_plain_search(
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
    # sequences lie across blocks and files
    assert find_overlap(*splits, sequences, block_tokens) == expected


# -----------------------------------------------------------------------------
# a sketch of a training text


WORDS = np.random.default_rng(3).integers(50_000, size=2**20)  # of which no 64 occur twice


def text(tmp_path, *ids):
    """Token ids → their stream, of two files."""
    folder = tmp_path / f'text{len(list(tmp_path.iterdir()))}'
    folder.mkdir()
    return stream(folder, np.concatenate(ids), files=2)


def estimate(tmp_path, train, *val, blocks=2**16):
    """How much of a validation text a sketch of so many blocks says to be trained on."""
    sketch = sketch_of(text(tmp_path, train), blocks)
    return share_trained_on(*windows_of(text(tmp_path, *val)), [sketch])


@pytest.mark.parametrize(('blocks', 'error'), [(2**16, 0.01), (2**10, 0.08)])  # all, or a tenth
def test_a_sketch_tells_how_much_of_a_text_was_trained_on(blocks, error, tmp_path):
    train, val = WORDS[:655_000], WORDS[-200_000:]
    copies = [train[i:i + 4000] for i in range(555, 600_000, 12_000)]  # 200,000 tokens
    assert estimate(tmp_path, train, val, blocks=blocks) == 0
    assert estimate(tmp_path, train, val, *copies, blocks=blocks) == pytest.approx(0.5, abs=error)
    assert estimate(tmp_path, train, *copies, blocks=blocks) == pytest.approx(1, abs=2 * error)


def test_a_text_in_which_a_copy_may_be_missed_as_a_whole_is_not_compared(tmp_path):
    train = WORDS[:64_000]
    for tokens, share in ((80, None), (127, None), (128, pytest.approx(0.5))):
        assert estimate(tmp_path, train, train[1:1 + tokens]) == share


def test_of_conversations_what_the_assistant_says_is_compared(tmp_path):
    train, val = text(tmp_path, WORDS[:64_000]), text(tmp_path, WORDS[:6400], WORDS[-6400:])
    for of_copies, of_others, share in ((0, 1, 0), (1, 0, 1), (1, 1, 0.5), (0, 0, None)):
        val.loss_mask = text(tmp_path, np.full(6400, of_copies), np.full(6400, of_others))
        assert share_trained_on(*windows_of(val), [sketch_of(train)]) \
            == pytest.approx(share, abs=0.02)


def test_a_file_of_sketches_holds_them(tmp_path):
    sketches = [sketch_of(text(tmp_path, WORDS[:n])) for n in (640, 64)]
    write_sketches(tmp_path / 'sketches.npz', sketches)
    for sketch, read in zip(sketches, read_sketches(tmp_path / 'sketches.npz'), strict=True):
        assert read.hashes.tolist() == sketch.hashes.tolist()
        assert read.share == sketch.share


def test_the_hash_of_a_block_is_that_of_version_1_0(tmp_path):
    assert sketch_of(text(tmp_path, np.arange(64))).hashes.tolist() == [-8562502739708298345]


# -----------------------------------------------------------------------------
# prepare.py


@pytest.mark.parametrize('copies', [1, 9])
def test_the_share_of_a_validation_split_that_is_trained_on_is_printed(copies, tmp_path, capsys):
    chance = random.Random(0)
    documents = [''.join(chance.choices('abcdefgh \n', k=2000)) for _ in range(60)]
    write_rows(tmp_path / 'in/train.jsonl', documents[:40])
    write_rows(tmp_path / 'in/validation.jsonl', documents[40 - copies:60 - copies])
    prepared(tmp_path / 'd', 'hf', tmp_path / 'in', '--val_split=validation')
    share = open_dataset(tmp_path / 'd').split_entry('val')['in_train']
    assert share == pytest.approx(copies / 20, abs=0.05)
    of_prepare = capsys.readouterr()
    prepare.main(['inspect', f'{tmp_path}/d'])
    for captured in (of_prepare, capsys.readouterr()):
        line = next(line for line in (captured.err if copies == 9 else captured.out).splitlines()
                    if f'{100 * share:.3g}%' in line)
        assert '128 tokens' in line  # from which length on copies are found


@pytest.mark.parametrize(('train', 'val', 'shares'), [
    ('word ' * 100, 'short', {}), ('short', 'word ' * 100, {}),
    ('word ' * 100, 'ends early\n' * 11, {'in_train': 0}),
    ('A line of 30 characters or so.', 'A line of 30 characters or so.', {'lines_in_train': 1})])
def test_what_is_too_short_to_compare_has_no_share(train, val, shares, tmp_path):
    write_rows(tmp_path / 'in/train.jsonl', [train])
    write_rows(tmp_path / 'in/validation.jsonl', [val])
    prepared(tmp_path / 'd', 'hf', tmp_path / 'in', '--val_split=validation')
    entry = open_dataset(tmp_path / 'd').split_entry('val')
    assert {key: entry[key] for key in entry if key.endswith('in_train')} == shares


@pytest.mark.parametrize(('text_of', 'share'), [
    (lambda n: f'Order {n} was sent to customer {7 * n}.', 1),
    (lambda n: ' '.join(random.Random(n).choices(['to', 'be', 'or', 'not', 'that'], k=15)), 0)])
def test_short_documents_that_differ_only_in_numbers_are_copies(text_of, share, tmp_path, capsys):
    write_rows(tmp_path / 'a.jsonl', map(text_of, range(400)))
    prepared(tmp_path / 'd', 'text', tmp_path / 'a.jsonl')
    entry = open_dataset(tmp_path / 'd').split_entry('val')
    assert entry['in_train'] == 0
    assert entry['lines_in_train'] == share
    assert bool(capsys.readouterr().err) == (share == 1)


@pytest.mark.parametrize(('characters', 'warned'), [(20_000, True), (4000, False)])
def test_a_validation_split_of_another_kind_of_text_is_reported(
        characters, warned, tmp_path, capsys):
    text = 'abc ' * (9 * characters // 4) + 'äöü ' * (characters // 4)  # the end is held out
    (tmp_path / 'mixed.txt').write_text(text, encoding='utf-8')
    prepare.main(['text', f'{tmp_path}/mixed.txt', '--tokenizer=char', f'--data_dir={tmp_path}/d'])
    assert ('--documents=' in capsys.readouterr().err) == warned
