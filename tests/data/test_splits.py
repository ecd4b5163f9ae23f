"""Which documents are for training, for validation and for a test."""

import hashlib
import json
import shutil
from itertools import chain
from string import ascii_letters

import pytest
from corpus_files import documents_of, prepared, split_bytes, write_parquet, write_rows
from helpers import fails
from interrupted import contents, exit_code

import evaluate
import prepare
from plaingpt.data.dataset import open_dataset
from plaingpt.data.readers import Piece
from plaingpt.data.splitting import split_by_hash, split_by_place

TEXTS = [f'document {i} of the web' for i in range(1000)]


def write_hub(folder, **splits):
    for split, texts in splits.items():
        write_parquet(folder / f'{split}.parquet', texts)


# -----------------------------------------------------------------------------
# the hub's splits


@pytest.mark.parametrize(('more', 'words'), [
    (['--split=train[:50%]', '--val_split=train[:10%]'], 'Bad split: train[:50%]'),
    (['--test_split=test', '--test_fraction=0.1'], 'test_fraction and test_split cannot go'),
    (['--val_fraction=0.5', '--test_fraction=0.5'], 'test_fraction=0.5: expected')])
def test_shares_and_splits_that_cannot_be_are_refused(more, words, tmp_path, refused):
    write_hub(tmp_path / 'hub', train=TEXTS, validation=['held', 'out'])
    assert words in refused('hf', f'--path={tmp_path}/hub', *more)


@pytest.mark.parametrize(('more', 'split'), [
    ([], 'val'), (['--val_fraction=0.5', '--test_fraction=0.4999'], 'train'),
    (['--split=test', '--val_split=validation'], 'train'),
    (['--val_split=validation', '--test_split=test'], 'test'),
    (['--val_split=test', '--dedup'], 'val'), (['--val_fraction=0.3', '--max_tokens=9'], 'val')])
def test_a_split_that_stays_empty_is_refused(more, split, tmp_path, refused):
    write_hub(tmp_path / 'hub', train=['a small text'], validation=['held', 'out'],
              test=['a  small text' if '--dedup' in more else ' '])
    assert f'the {split} split would be empty: use more text' in refused(
        'hf', f'--path={tmp_path}/hub', *more)


def test_options_of_the_hub_are_refused_for_files(tmp_path, refused):
    write_rows(tmp_path / 'a.jsonl', TEXTS)
    for option in ('path', 'subset', 'split', 'val_split', 'test_split'):
        line = refused('text', f'--input={tmp_path}/a.jsonl', f'--{option}=x')
        assert f'{option}=x' in line and 'no dataset of the hub' in line


@pytest.mark.parametrize(('more', 'expected'), [
    (['--val_split=validation', '--test_split=test'], {'val': ascii_letters, 'test': '12'}),
    (['--test_split=test'], {'test': '12'}),
    (['--val_split=validation', '--test_fraction=0.1'], {'val': ascii_letters})])
def test_splits_of_a_dataset_are_taken_and_the_others_held_out(more, expected, tmp_path):
    write_hub(tmp_path / 'hub', train=TEXTS, validation=[*ascii_letters], test=['1', '2'])
    prepared(tmp_path / 'd', 'hf', f'--path={tmp_path}/hub', '--val_fraction=0.1', *more)
    found = documents_of(tmp_path / 'd')
    for split, texts in expected.items():
        assert found.pop(split) == list(texts)
    for split in {'val', 'test'} & set(found):
        assert 60 < len(found[split]) < 140
    assert sorted(chain(*found.values())) == sorted(TEXTS)  # each document in one split


# -----------------------------------------------------------------------------
# a hash of the text


def sides(texts, *fractions):
    pieces = [Piece(text, True) for text in texts]
    return [split for split, *_ in split_by_hash(pieces, *fractions)]


def test_the_side_of_a_document_is_that_of_earlier_versions_whatever_white_space_ends_it():
    # of those: a hash of all of the text, its last line break included
    hashes = [hashlib.blake2b(f'{text}\n'.encode(), digest_size=8).digest() for text in TEXTS]
    wanted = ['val' if int.from_bytes(found, 'big') < 0.3 * 2**64 else 'train' for found in hashes]
    for end in ('', '\n', '\r\n', ' ', '\n\n \t\n'):
        assert sides([text + end for text in TEXTS], 0.3) == wanted, end


def test_documents_keep_their_side_when_others_come_and_go():
    assert sides(TEXTS[::3], 0.1, 0.2) == sides(TEXTS, 0.1, 0.2)[::3]


def test_a_test_share_takes_from_training_and_leaves_validation_as_it_was():
    without, held_out = sides(TEXTS, 0.2), sides(TEXTS, 0.2, 0.3)
    assert [split == 'val' for split in without] == [split == 'val' for split in held_out]
    assert 150 < held_out.count('val') < 250 and 240 < held_out.count('test') < 360
    more = sides(TEXTS, 0.2, 0.4)  # what was for the test still is
    assert all(b == 'test' for a, b in zip(held_out, more, strict=True) if a == 'test')


def test_each_split_gets_its_share_of_a_long_document():
    for name in 'abc':
        pieces = [Piece(f'{name}{i}', i == 0) for i in range(200)]
        found, _, begins = zip(*split_by_hash(pieces, 0.1, 0.2), strict=True)
        assert abs(found.count('val') - 20) <= 2 and abs(found.count('test') - 40) <= 2
        thirds = [found[i:i + 66].count('val') for i in (0, 66, 132)]
        assert min(thirds) >= 4  # from all over it
        # what comes from two places is two documents
        assert list(begins) == [a != b for a, b in zip(('', *found), found, strict=False)]


def test_validation_has_its_share_of_the_tokens_of_a_folder_of_many_sizes(tmp_path):
    (tmp_path / 'in').mkdir()
    for name, words in ('book.txt', 150_000), ('page.xml', 20_000), ('code.py', 40_000):
        (tmp_path / 'in' / name).write_text(' '.join(f'{name}{i}' for i in range(words)))
    write_rows(tmp_path / 'in/rows.jsonl', [f'row {i}' for i in range(250)])
    train, val = map('\n'.join, prepared(tmp_path / 'd', 'text', f'--input={tmp_path}/in',
                                         '--val_fraction=0.1'))
    assert 0.07 < len(val) / len(train + val) < 0.13
    assert all(name in val for name in ('book.txt', 'code.py', 'row '))


def test_a_split_far_from_its_share_is_told(tmp_path, capsys):
    for texts, is_told in (([*map(str, range(50)), 'long ' * 10_000], True),
                           ([str(10_000 + i) for i in range(300)], False)):
        write_rows(tmp_path / 'a.jsonl', texts)
        prepared(tmp_path / f'{is_told}', 'text', f'--input={tmp_path}/a.jsonl')
        told = 'of the tokens where --val_fraction asks for 10.00%' in capsys.readouterr().err
        assert told == is_told


# -----------------------------------------------------------------------------
# a running text


def test_a_running_text_is_cut_into_its_splits_wherever_its_pieces_end():
    text = ''.join(map(chr, range(100, 200)))
    for size in (1, 7, 10, 100):
        pieces = [Piece(text[i:i + size], i == 0) for i in range(0, 100, size)]
        found = [*split_by_place(pieces, [('train', 60), ('val', 85), ('test', 1000)])]
        for split, start, end in (('train', 0, 60), ('val', 60, 85), ('test', 85, 100)):
            mine = [(part, first) for name, part, first in found if name == split]
            assert ''.join(part for part, _ in mine) == text[start:end]
            assert [first for _, first in mine] == [True] + [False] * (len(mine) - 1)


def test_the_end_of_a_running_text_is_for_the_test_and_validation_comes_before(tmp_path):
    text = ''.join(f'{i:07d}\n' for i in range(5_000))
    (tmp_path / 'a.txt').write_text(text)
    prepared(tmp_path / 'd', 'text', f'--input={tmp_path}/a.txt', '--val_fraction=0.1',
             '--test_fraction=0.05')
    found = [split_bytes(tmp_path / 'd', split).decode() for split in ('train', 'val', 'test')]
    assert ''.join(found) == text and [len(part) for part in found] == [34_000, 4_000, 2_000]


# -----------------------------------------------------------------------------
# a folder with a test split


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    """The options that prepare some rows with a test split."""
    folder = tmp_path_factory.mktemp('rows')
    write_rows(folder / 'rows.jsonl', [text * (1 + i % 9) for i, text in enumerate(TEXTS)])
    return ['text', f'--input={folder}/rows.jsonl', '--tokenizer=byte', '--val_fraction=0.1',
            '--test_fraction=0.1', '--shard_tokens=3_000']


@pytest.fixture(scope='module')
def with_test(rows, tmp_path_factory):
    """The dataset that they give."""
    folder = tmp_path_factory.mktemp('with_test') / 'd'
    prepare.main([*rows, f'--data_dir={folder}'])
    return folder


def test_inspect_and_meta_json_tell_of_the_test_split(with_test, capsys):
    entry = open_dataset(with_test).meta['splits']['test']
    assert entry['documents'] > 60 and entry['tokens'] > 3000 and 0 <= entry['in_train'] <= 1
    prepare.main(['inspect', str(with_test)])
    shown = ''.join(capsys.readouterr())
    assert f'test: {entry["tokens"]:,} tokens in {len(entry["files"])} files' in shown
    assert 'of the test text is also in the training split' in shown


def test_killed_and_started_again_it_writes_the_same_test_split(rows, with_test, tmp_path):
    argv = [*rows, f'--data_dir={tmp_path}/d']
    assert [exit_code(*argv, calls=calls) for calls in (9, 0)] == [-9, 0]
    assert contents(tmp_path / 'd') == contents(with_test)


def test_a_command_without_a_test_split_replaces_none_unasked(
        rows, with_test, tmp_path, capsys, monkeypatch):
    shutil.copytree(with_test, tmp_path / 'd')
    without = [*(arg for arg in rows if 'test_fraction' not in arg), f'--data_dir={tmp_path}/d']
    assert 'test_fraction 0.1, not none' in fails(capsys, monkeypatch, prepare.main, *without)
    assert contents(tmp_path / 'd') == contents(with_test)
    prepare.main([*without, '--overwrite'])
    assert not any('test' in name for name in contents(tmp_path / 'd'))


def test_evaluate_scores_the_test_split(trained, char_data, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(char_data, tmp_path / 'chars')
    argv = [f'--out_dir={trained}', f'--dataset={folder}', '--device=cpu']
    assert 'no test.bin there: prepare it with --test_fraction' in fails(
        capsys, monkeypatch, evaluate.main, *argv, '--split=test')
    assert 'cannot go together' in fails(capsys, monkeypatch, evaluate.main, *argv, '--split=test',
                                         '--tasks=train')
    meta, scores = open_dataset(folder).meta, {}
    (file,) = meta['splits']['val']['files']
    meta['splits']['test'] = {**meta['splits']['val'], 'files': [{**file, 'name': 'test.bin'}]}
    (folder / 'meta.json').write_text(json.dumps(meta))
    shutil.copy(folder / 'val.bin', folder / 'test.bin')
    for split in ('val', 'test'):
        evaluate.main([*argv, f'--split={split}', f'--output={tmp_path}/{split}.json'])
        scores[split] = json.loads((tmp_path / f'{split}.json').read_text())['results'][split]
    assert scores['val'] == scores['test'] and f'test of {folder}' in capsys.readouterr().out
