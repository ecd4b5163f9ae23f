"""Which documents are for training, for validation and for a test."""

import hashlib
import json
import shutil
from itertools import chain

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import fails
from test_parts import state_of
from test_restart import contents, stop_early

import evaluate
import prepare
from plaingpt.corpus.documents import Piece
from plaingpt.corpus.splitting import split_by_hash, split_by_place
from plaingpt.tokens.dataset import open_dataset
from plaingpt.tokens.inspection import find_overlap

TEXTS = [f'document {i} of the web' for i in range(1000)]


def write_hub(folder, **splits):
    folder.mkdir()
    for split, texts in splits.items():
        pyarrow.parquet.write_table(pyarrow.table({'text': texts}), folder / f'{split}.parquet')


def write_rows(path, texts):
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))


def documents_of(folder):
    """{split: its documents}, prepared by bytes"""
    dataset = open_dataset(folder)
    return {split: [text.decode() for text in bytes(
        (dataset.split(split, in_ram=True).ram % 256).astype('u1')).split(b'\0')[1:]]
        for split in dataset.meta['splits']}


# -----------------------------------------------------------------------------
# the hub's splits


@pytest.mark.parametrize(('more', 'words'), [
    (['--split=train', '--val_split=train'], '--val_split=train and --split=train: both read'),
    (['--val_split=train'], '--val_split=train and --split=train: both read'),
    (['--split=train+validation', '--val_split=validation'], 'both read the same rows'),
    (['--split=all', '--val_split=validation'], 'both read the same rows'),
    (['--val_split=validation', '--test_split=validation'],
     '--test_split=validation and --val_split=validation: both read'),
    (['--split=train[:50%]', '--val_split=train[:10%]'], 'by whole splits'),
    (['--test_split=test', '--test_fraction=0.1'], 'test_fraction and test_split cannot go'),
    (['--val_fraction=0.5', '--test_fraction=0.5'], 'test_fraction=0.5: expected')])
def test_rows_that_would_be_trained_on_and_held_out_are_refused(
        more, words, tmp_path, capsys, monkeypatch):
    write_hub(tmp_path / 'hub', train=TEXTS, validation=['held', 'out'])
    line = fails(capsys, monkeypatch, prepare.main, 'hf', f'--path={tmp_path}/hub',
                 '--tokenizer=byte', f'--data_dir={tmp_path}/d', *more)
    assert words in line and not (tmp_path / 'd').exists()


@pytest.mark.parametrize(('more', 'split', 'advice'), [
    ([], 'val', 'another --val_fraction'),
    (['--val_fraction=0.9999'], 'train', 'another --val_fraction'),
    (['--val_split=validation', '--test_fraction=0.89'], 'train', 'another --test_fraction'),
    (['--val_fraction=0.5', '--test_fraction=0.4999'], 'train',
     'another --val_fraction or another --test_fraction'),
    (['--split=test', '--val_split=validation'], 'train', 'another --split'),
    (['--val_split=test'], 'val', 'another --val_split'),
    (['--val_split=validation', '--test_split=test'], 'test', 'another --test_split'),
    (['--val_split=test', '--dedup'], 'val', 'another --val_split or no --dedup'),
    (['--val_fraction=0.3', '--max_tokens=9'], 'val',
     'another --val_fraction or a larger --max_tokens')])
def test_a_split_that_stays_empty_names_the_options_that_left_it_so(
        more, split, advice, tmp_path, capsys, monkeypatch):
    write_hub(tmp_path / 'hub', train=['a small text'], validation=['held', 'out'],
              test=['a  small text' if '--dedup' in more else ' '])
    argv = ['hf', f'--path={tmp_path}/hub', '--tokenizer=byte', *more, f'--data_dir={tmp_path}/d']
    line = fails(capsys, monkeypatch, prepare.main, *argv)
    assert line.endswith(f'the {split} split would be empty: use more text or {advice}')
    assert not (tmp_path / 'd').exists()


def test_files_have_no_splits_to_choose_from(tmp_path, capsys, monkeypatch):
    write_rows(tmp_path / 'a.jsonl', TEXTS)
    assert 'test_split=test: ' in fails(
        capsys, monkeypatch, prepare.main, 'text', f'--input={tmp_path}/a.jsonl',
        '--test_split=test', '--tokenizer=byte', f'--data_dir={tmp_path}/d')


@pytest.mark.parametrize(('more', 'expected'), [
    (['--val_split=validation', '--test_split=test'], {'val': 'abc', 'test': 'de'}),
    (['--test_split=test'], {'test': 'de'}),
    (['--val_split=validation', '--test_fraction=0.1'], {'val': 'abc'})])
def test_splits_of_a_dataset_are_taken_and_the_others_held_out(more, expected, tmp_path):
    write_hub(tmp_path / 'hub', train=TEXTS, validation=list('abc'), test=list('de'))
    prepare.main(['hf', f'--path={tmp_path}/hub', '--val_fraction=0.1', *more,
                  '--tokenizer=byte', f'--data_dir={tmp_path}/d'])
    found = documents_of(tmp_path / 'd')
    for split in ('val', 'test'):
        if split in expected:
            assert found[split] == list(expected[split])
        else:
            assert 60 < len(found[split]) < 140 and set(found[split]) < set(TEXTS)
    of_train = chain(*(texts for split, texts in found.items() if split not in expected))
    assert sorted(of_train) == sorted(TEXTS)


# -----------------------------------------------------------------------------
# a hash of the text


def sides(texts, *fractions):
    pieces = [Piece(text, True, 0) for text in texts]
    return [split for split, *_ in split_by_hash(pieces, *fractions)]


@pytest.mark.parametrize('end', ['', '\n', '\r\n', ' ', '\n\n \t\n'])
def test_white_space_at_its_end_does_not_move_a_document(end):
    assert sides([text + end for text in TEXTS], 0.3, 0.2) == sides(TEXTS, 0.3, 0.2)


def test_files_that_end_with_a_line_break_are_on_the_side_that_they_always_were():
    # of earlier versions: a hash of all of the text, its last line break included
    places = [0.0488, 0.0521, 0.7103]
    texts = [f'file {i}\n' for i in range(2000)]
    for place in places:
        expected = ['val' if int.from_bytes(hashlib.blake2b(
            text.encode(), digest_size=8).digest(), 'big') < place * 2**64 else 'train'
            for text in texts]
        assert sides(texts, place) == expected


def test_a_test_share_takes_from_training_and_leaves_validation_as_it_was():
    without, held_out = sides(TEXTS, 0.2), sides(TEXTS, 0.2, 0.3)
    assert [split == 'val' for split in without] == [split == 'val' for split in held_out]
    assert 240 < held_out.count('test') < 360
    more = sides(TEXTS, 0.2, 0.4)  # what was for the test still is
    assert all(b == 'test' for a, b in zip(held_out, more, strict=True) if a == 'test')


# -----------------------------------------------------------------------------
# a running text


@pytest.mark.parametrize('size', [1, 3, 7, 10, 100])
def test_a_running_text_is_cut_into_its_splits_wherever_its_pieces_end(size):
    text = ''.join(map(chr, range(100, 200)))
    pieces = [Piece(text[i:i + size], i == 0, i) for i in range(0, 100, size)]
    found = [*split_by_place(pieces, [('train', 60), ('val', 85), ('test', 1000)])]
    for split, start, end in (('train', 0, 60), ('val', 60, 85), ('test', 85, 100)):
        mine = [(text, first) for name, text, first, _ in found if name == split]
        assert ''.join(part for part, _ in mine) == text[start:end]
        assert [first for _, first in mine] == [True] + [False] * (len(mine) - 1)
    assert [name for name, *_ in found] == sorted((name for name, *_ in found),
                                                  key=['train', 'val', 'test'].index)


def test_the_end_of_a_running_text_is_for_the_test_and_validation_comes_before(tmp_path):
    text = ''.join(f'{i:07d}\n' for i in range(50_000))
    (tmp_path / 'a.txt').write_text(text)
    prepare.main(['text', f'--input={tmp_path}/a.txt', '--tokenizer=byte', '--val_fraction=0.1',
                  '--test_fraction=0.05', f'--data_dir={tmp_path}/d'])
    dataset = open_dataset(tmp_path / 'd')
    found = [bytes(dataset.split(split, in_ram=True).ram.astype('u1')).decode()
             for split in ('train', 'val', 'test')]
    assert ''.join(found) == text and [len(part) for part in found] == [340_000, 40_000, 20_000]


# -----------------------------------------------------------------------------
# a folder with a test split


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp('rows')
    write_rows(folder / 'rows.jsonl', [text * (1 + i % 9) for i, text in enumerate(TEXTS)])
    return ['text', f'--input={folder}/rows.jsonl', '--tokenizer=byte', '--val_fraction=0.1',
            '--test_fraction=0.1', '--shard_tokens=3_000']


def test_inspect_and_meta_json_tell_of_the_test_split(rows, tmp_path, capsys):
    prepare.main([*rows, f'--data_dir={tmp_path}/d'])
    entry = json.loads((tmp_path / 'd/meta.json').read_text())['splits']['test']
    assert entry['documents'] > 60 and entry['tokens'] > 3000 and 0 <= entry['in_train'] <= 1
    assert 'of the test text is also in the training split' in ''.join(capsys.readouterr())
    prepare.main(['inspect', str(tmp_path / 'd')])
    shown = ''.join(capsys.readouterr())
    assert f'test: {entry["tokens"]:,} tokens in {len(entry["files"])} files' in shown
    assert 'of the test text is also in the training split' in shown
    path = tmp_path / 'd' / entry['files'][1]['name']
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(prepare.UserError, match='another checksum'):
        prepare.main(['inspect', str(tmp_path / 'd')])


def test_text_of_the_test_split_that_is_trained_on_is_found(tmp_path):
    (tmp_path / 'd').mkdir()
    chance = np.random.default_rng(0)
    ids = chance.integers(50_000, size=(3, 4096)).astype('<u2')
    for split, tokens in zip(('train', 'val', 'test'), (ids[:2].ravel(), ids[2], ids[0]),
                             strict=True):
        tokens.tofile(tmp_path / f'd/{split}.bin')
    dataset = open_dataset(tmp_path / 'd')
    assert dataset.held_out() == ('val', 'test')
    assert [find_overlap(dataset.split('train'), dataset.split(split))
            for split in dataset.held_out()] == [0, 1]


def test_parts_with_a_test_split_are_merged_to_what_one_command_writes(rows, tmp_path):
    prepare.main([*rows, f'--data_dir={tmp_path}/whole'])
    for part in (1, 2, 3):
        prepare.main([*rows, f'--data_dir={tmp_path}/d', f'--part={part}/3'])
    prepare.main(['merge', str(tmp_path / 'd')])
    assert state_of(tmp_path / 'd') == state_of(tmp_path / 'whole')


def test_a_run_that_resumes_writes_the_same_test_split(rows, tmp_path, monkeypatch):
    prepare.main([*rows, f'--data_dir={tmp_path}/whole'])
    stop_early(monkeypatch, [*rows, f'--data_dir={tmp_path}/d'])
    prepare.main([*rows, f'--data_dir={tmp_path}/d'])
    assert contents(tmp_path / 'd') == contents(tmp_path / 'whole')


def test_a_command_without_a_test_split_replaces_none_unasked(rows, tmp_path, capsys, monkeypatch):
    argv = [*rows, f'--data_dir={tmp_path}/d']
    prepare.main(argv)
    without = [arg for arg in argv if 'test_fraction' not in arg]
    assert 'test_fraction 0.1, not none' in fails(capsys, monkeypatch, prepare.main, *without)
    prepare.main([*without, '--overwrite'])
    names = {path.name for path in (tmp_path / 'd').iterdir()}
    assert not any('test' in name for name in names)


def test_evaluate_scores_the_test_split(trained, char_data, tmp_path, capsys, monkeypatch):
    folder = tmp_path / 'chars'
    shutil.copytree(char_data, folder)
    argv = [f'--out_dir={trained}', f'--dataset={folder}', '--device=cpu']
    assert 'no test.bin there: prepare it with --test_fraction' in fails(
        capsys, monkeypatch, evaluate.main, *argv, '--split=test')
    meta = json.loads((folder / 'meta.json').read_text())
    meta['splits']['test'] = {**meta['splits']['val'], 'files': [
        {**file, 'name': 'test.bin'} for file in meta['splits']['val']['files']]}
    shutil.copy(folder / 'val.bin', folder / 'test.bin')
    (folder / 'meta.json').write_text(json.dumps(meta))
    scores = {}
    for split in ('val', 'test'):
        output = tmp_path / f'{split}.json'
        evaluate.main([*argv, f'--split={split}', f'--output={output}'])
        scores[split] = json.loads(output.read_text())['results'][split]
    assert scores['val'] == scores['test'] and f'test of {folder}' in capsys.readouterr().out
    assert 'cannot go together' in fails(capsys, monkeypatch, evaluate.main, *argv, '--split=test',
                                         '--tasks=train')


@pytest.mark.parametrize('option', ['path', 'subset', 'split', 'val_split', 'test_split'])
def test_an_option_of_the_hub_is_refused_for_files(capsys, monkeypatch, tmp_path, option):
    (tmp_path / 'a.txt').write_text('some text\n' * 9)
    line = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={tmp_path}/a.txt',
                 f'--{option}=x', f'--data_dir={tmp_path}/out')
    assert f'{option}=x' in line and 'no dataset of the hub' in line
