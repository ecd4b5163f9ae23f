"""Ids of one's own: the dtype of bare files, prepare.py ids, documents, rows of ids."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from corpus_files import contents, write_parquet
from processes import fails
from runs import lines

import prepare
import sample
import train
from plaingpt.core.dataset import open_data, open_dataset
from plaingpt.data import shards
from plaingpt.data.foreign_files import open_foreign
from plaingpt.system.distributed import World
from plaingpt.system.errors import UserError

WIDTHS = ['<i8', '>i8', '<u4', '<i4', '<u2', '>u2']
MOVES = np.random.default_rng(0).integers(0, 1500, 4000)


def write_ids(folder, ids, *dtypes):
    """train.bin and val.bin of nine tenths and a tenth of `ids`, in one dtype or two."""
    folder.mkdir(exist_ok=True)
    cut = len(ids) * 9 // 10
    ids[:cut].astype(dtypes[0]).tofile(folder / 'train.bin')
    ids[cut:].astype(dtypes[-1]).tofile(folder / 'val.bin')
    return folder


# -----------------------------------------------------------------------------
# the dtype


@pytest.mark.parametrize('dtype', WIDTHS)
def test_the_dtype_of_a_bare_file_is_uint16_or_named(dtype, tmp_path, capsys, monkeypatch):
    folder = write_ids(tmp_path / 'ids', MOVES, dtype)
    if dtype != '<u2':
        line = fails(capsys, monkeypatch, prepare.main, 'ids', folder, '--vocab_size=1500')
        assert f'{folder}/train.bin' in line
        assert '--dtype' in line
        if dtype in ('<i8', '<u4'):  # the first ids, read right
            assert ', '.join(map(str, MOVES[:6])) in line
    named = [] if dtype == '<u2' else [f'--dtype={dtype}']
    prepare.main(['ids', str(folder), '--vocab_size=1500', *named])
    assert np.array_equal(open_dataset(folder).split('train').read(0, 9999), MOVES[:3600])


def as_text(ids):
    return np.frombuffer(' '.join(map(str, ids)).encode(), 'u1')


@pytest.mark.parametrize(('ids', 'vocab_size'), [
    *((MOVES.astype(dtype), size) for dtype in ('<u4', '<i8', '>u4') for size in (1500, 100_000)),
    (as_text(MOVES), 50257), *(((MOVES % 256).astype(dtype), 256) for dtype in ('<f4', 'u1')),
    *((MOVES.astype('<u2').view('u1')[:n], 1500) for n in (0, 1, 999))])
def test_what_is_not_uint16_is_never_read_as_such(ids, vocab_size, tmp_path):
    ids.tofile(tmp_path / 'ids.bin')
    with pytest.raises(UserError, match=r'ids\.bin.*--dtype'):
        open_foreign(tmp_path / 'ids.bin', vocab_size).verify(vocab_size)


@pytest.mark.parametrize('ids', [[0] * 100, [7] * 100, [1, 0, 0, 2], MOVES])
def test_ids_in_uint16_need_no_dtype(ids, tmp_path):
    np.array(ids).astype('<u2').tofile(tmp_path / 'ids.bin')
    open_foreign(tmp_path / 'ids.bin', 1500).verify(1500)


# -----------------------------------------------------------------------------
# arrays of numpy


NPY_FILES = {
    '<u2': {'edufineweb_train_000001': MOVES[:1500], 'edufineweb_train_000002': MOVES[1500:3600],
            'edufineweb_val_000000': MOVES[3600:]},
    '>i4': {'train': MOVES[:3600], 'val': MOVES[3600:]}}


@pytest.mark.parametrize('dtype', NPY_FILES)
def test_npy_files_are_read(dtype, tmp_path):
    for name, ids in NPY_FILES[dtype].items():
        np.save(tmp_path / f'{name}.npy', ids.astype(dtype))
    dataset = open_dataset(tmp_path, 1500)
    assert np.array_equal(dataset.split('train').read(0, 9999), MOVES[:3600])
    assert np.array_equal(dataset.split('val').read(0, 9999), MOVES[3600:])


@pytest.mark.parametrize('array', [
    MOVES.astype('f4'), MOVES.reshape(2, -1), MOVES > 3, np.array([{}]), np.array(3)])
def test_arrays_of_anything_but_ids_are_refused(array, tmp_path):
    np.save(tmp_path / 'train.npy', array)
    with pytest.raises(UserError, match=r'train\.npy'):
        open_dataset(tmp_path, 1500).split('train')


# -----------------------------------------------------------------------------
# prepare.py ids


@pytest.fixture
def folder(tmp_path):
    return write_ids(tmp_path / 'ids', MOVES, '<u2')


def test_described_ids_need_no_vocab_size_again(tiny, tmp_path):
    folder = write_ids(tmp_path / 'ids', MOVES, '<u2')
    before = contents(folder)
    train.main([*tiny, f'--dataset={folder}', '--vocab_size=1500', '--max_iters=3'])
    prepare.main(['ids', str(folder), '--vocab_size=1500'])
    train.main([*tiny, f'--dataset={folder}', '--init_from=resume'])
    assert [row['iter'] for row in lines(tmp_path / 'out', 'loss')] == [1, 2, 3, 4, 5, 6]
    (folder / 'meta.json').unlink()
    assert contents(folder) == before


def test_a_folder_that_cannot_be_written_stays_as_it_is(folder, capsys, monkeypatch):
    before = contents(folder)

    def refuse(path, value):
        raise OSError(30, 'Read-only file system', str(path))

    monkeypatch.setattr(shards, 'write_json', refuse)
    line = fails(capsys, monkeypatch, prepare.main, 'ids', folder, '--vocab_size=1500')
    assert str(folder / 'meta.json') in line
    assert contents(folder) == before


# -----------------------------------------------------------------------------
# documents


DOCUMENTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]] * 30


def test_an_end_of_text_id_marks_documents(tmp_path):
    ids = np.concatenate([[2, *document] for document in DOCUMENTS])
    folder = write_ids(tmp_path / 'ids', ids, '<u2')
    prepare.main(['ids', str(folder), '--vocab_size=20', '--end_of_text=2'])
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    assert (tokenizer.end_of_text, tokenizer.stop_ids) == (2, {2})
    assert sum(dataset.split_entry(split)['documents'] for split in ('train', 'val')) == 90


@pytest.mark.parametrize('ending', ['jsonl', 'json', 'parquet'])
@pytest.mark.parametrize(('options', 'separator'), [([], []), (['--end_of_text=2'], [2])])
def test_rows_of_ids_are_documents(ending, options, separator, tmp_path):
    rows = [[2, *document] if i % 3 else [*document, 2] for i, document in enumerate(DOCUMENTS)]
    path = tmp_path / f'rows.{ending}'
    if ending == 'parquet':
        write_parquet(path, rows, 'input_ids', {'labels': rows})
    elif ending == 'jsonl':
        path.write_text(''.join(json.dumps({'input_ids': row}) + '\n' for row in rows))
    else:
        path.write_text(json.dumps({'version': 1, 'rows': [{'input_ids': row} for row in rows]}))
    argv = ['ids', str(path), '--vocab_size=20', f'--data_dir={tmp_path}/d', *options]
    prepare.main(argv)
    prepare.main(argv)  # up to date
    train_ids, val_ids = (open_dataset(tmp_path / 'd').split(split).read(0, 999).tolist()
                          for split in ('train', 'val'))
    documents = DOCUMENTS if separator else rows
    assert len(train_ids + val_ids) == sum(len(separator) + len(row) for row in documents)
    assert val_ids[:len(separator)] == separator
    assert set(train_ids + val_ids) == set(range(5, 14)) | {2}
    assert 'bytes' not in open_dataset(tmp_path / 'd').split_entry('val') \
        or not open_dataset(tmp_path / 'd').bytes_per_token('val')


@pytest.mark.parametrize(('row', 'word'), [
    ({'input_ids': [1, 20]}, '--vocab_size'), ({'input_ids': [-1]}, '--vocab_size'),
    ({'tokens': [1]}, '--text_field'), ({'input_ids': '1 2'}, 'input_ids')])
def test_rows_that_are_not_ids_are_refused_with_their_place(
        row, word, tmp_path, capsys, monkeypatch):
    path = tmp_path / 'rows.jsonl'
    path.write_text(json.dumps(row) + '\n')
    line = fails(capsys, monkeypatch, prepare.main, 'ids', path, '--vocab_size=20',
                 f'--data_dir={tmp_path}/d')
    assert f'{path}, line 1' in line
    assert word in line
    assert not (tmp_path / 'd').exists()


@pytest.mark.parametrize(('options', 'word'), [
    ([], '--vocab_size'), (['--vocab_size=1400'], 'train.bin'),
    (['--vocab_size=1500', '--dtype=float32'], 'float32'),
    (['--vocab_size=1500', '--dtype=int64'], 'train.bin')])
def test_ids_that_do_not_fit_their_description_are_refused(
        options, word, folder, capsys, monkeypatch):
    before = contents(folder)
    assert word in fails(capsys, monkeypatch, prepare.main, 'ids', folder, *options)
    assert contents(folder) == before


@pytest.mark.parametrize('options', [
    '--vocab_size=1500', '--vocab_size=1600 --end_of_text=2', '--vocab_size=1500 --dtype=uint16'])
@pytest.mark.parametrize('change', [
    lambda path: write_ids(path.parent, MOVES[::-1], '<u2'), lambda path: path.unlink(),
    lambda path: write_ids(path.parent, MOVES + 900, '<u2'),
    lambda path: write_ids(path.parent, MOVES, '<i8')])
def test_rewritten_ids_are_to_be_described_by_the_same_command(change, options, folder):
    prepare.main(['ids', str(folder), *options.split()])
    change(folder / 'train.bin')
    with pytest.raises(UserError, match=rf'prepare\.py ids {folder} {options} again'):
        open_dataset(folder).loader('train', 8, 1)


def test_text_that_prepare_wrote_is_not_described_as_ids(own_data, capsys, monkeypatch):
    before = contents(own_data)
    assert str(own_data) in fails(capsys, monkeypatch, prepare.main, 'ids', own_data,
                                  '--vocab_size=1500')
    assert contents(own_data) == before


# -----------------------------------------------------------------------------
# a run


def test_a_model_of_ids_continues_ids(folder, tiny, tmp_path, capsys, monkeypatch):
    train.main([*tiny, f'--dataset={folder}', '--vocab_size=1500'])
    capsys.readouterr()
    command = [f'--out_dir={tmp_path}/out', '--num_samples=1', '--max_new_tokens=5']
    for start, prompt in (('IDS:750,784,819', '750,784,819'), ('750 784,\n819', '750,784,819'),
                          ('', '0')):
        sample.main([*command, f'--start={start}'])
        _, _, written = capsys.readouterr().out.partition('---------------\n')
        assert re.fullmatch(rf'IDS:{prompt}(,\d+){{5}}\n', written)
        assert max(map(int, re.findall(r'\d+', written))) < 1500
    for start in 'hello', 'IDS:1,1500':
        assert '1499' in fails(capsys, monkeypatch, sample.main, *command, f'--start={start}')


def test_ids_of_unknown_origin_are_read_as_gpt2_tokens_and_a_line_names_vocab_size(folder, capsys):
    dataset = open_data(SimpleNamespace(dataset=str(folder), vocab_size=0), World())
    assert dataset.vocab_size == 50257
    assert '--vocab_size' in capsys.readouterr().out


def test_an_id_beyond_the_vocabulary_ends_a_run_before_anything_is_written(
        folder, tiny, tmp_path, capsys, monkeypatch):
    assert f'{folder}/train.bin' in fails(capsys, monkeypatch, train.main, *tiny,
                                          f'--dataset={folder}', '--vocab_size=1449')
    assert not list(tmp_path.glob('out/*'))
