"""Ids of one's own, as numpy writes them: the dtype they are read with, and prepare.py ids."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from corpus_files import contents
from processes import fails
from runs import lines

import prepare
import sample
import train
from plaingpt.core.dataset import open_data, open_dataset
from plaingpt.data.foreign_files import open_foreign
from plaingpt.data.tokenizers import IdsTokenizer
from plaingpt.system.distributed import World
from plaingpt.system.errors import UserError

WIDTHS = ['<i8', '>i8', '<u4', '>u4', '<i4', '<u2', '>u2']
RANDOM = np.random.default_rng(0)
MOVES = RANDOM.integers(0, 1500, 4000)


def write_ids(folder, ids, *dtypes):
    """train.bin and val.bin of nine tenths and a tenth of `ids`, in one dtype or two."""
    folder.mkdir(exist_ok=True)
    cut = len(ids) * 9 // 10
    ids[:cut].astype(dtypes[0]).tofile(folder / 'train.bin')
    ids[cut:].astype(dtypes[-1]).tofile(folder / 'val.bin')
    return folder


def reads_back(path, ids, dtype, vocab_size):
    ids.astype(dtype).tofile(path)
    file = open_foreign(path, vocab_size)
    return file.tokens == len(ids) and np.array_equal(file.read(0, file.tokens), ids)


# -----------------------------------------------------------------------------
# the dtype


# a vocabulary, and ids that do not use all of it
VOCABULARIES = [
    (1500, MOVES), (1500, np.minimum(RANDOM.zipf(1.3, 4000), 1499)), (4, MOVES % 4),
    (2, MOVES % 2), (65, MOVES[:40] % 65), (256, MOVES % 256), (50257, MOVES), (50257, MOVES % 65)]


@pytest.mark.parametrize('dtype', WIDTHS)
def test_ids_are_read_with_the_dtype_they_were_written_with(dtype, tmp_path):
    for vocab_size, ids in VOCABULARIES:
        assert reads_back(tmp_path / 'ids.bin', ids, dtype, vocab_size), (vocab_size, ids.max())


@pytest.mark.parametrize('dtype', ['<i8', '>i8', '<u4', '>u4'])
@pytest.mark.parametrize('largest', [30_000, 65_540, 100_000])
def test_a_vocabulary_beyond_uint16_needs_no_large_id_to_be_read_right(dtype, largest, tmp_path):
    assert reads_back(tmp_path / 'ids.bin', RANDOM.integers(0, largest, 3001), dtype, 100_000)


def test_ids_of_one_byte_are_read_as_such(tmp_path):
    for vocab_size, largest in ((256, 256), (4, 4), (65, 65), (257, 256), (1500, 128)):
        for size in (400, 4001):
            ids = RANDOM.integers(0, largest, size)
            assert reads_back(tmp_path / 'ids.bin', ids, 'u1', vocab_size)


@pytest.mark.parametrize(('dtype', 'wrong'), [
    *((dtype, 1499) for dtype in WIDTHS), *((dtype, -1) for dtype in WIDTHS if 'i' in dtype)])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(dtype, wrong, tmp_path):
    ids = MOVES % 1400
    ids[1000] = wrong
    ids.astype(dtype).tofile(tmp_path / 'ids.bin')
    with pytest.raises(UserError, match=rf'1,000.* {wrong}.*--vocab_size'):
        open_foreign(tmp_path / 'ids.bin', 1400).verify(1400)


@pytest.mark.parametrize('dtype', WIDTHS)
def test_too_small_a_vocabulary_never_changes_the_width_without_an_error(dtype, tmp_path):
    MOVES.astype(dtype).tofile(tmp_path / 'ids.bin')
    for vocab_size in (100, 256, 257, 1000):
        with pytest.raises(UserError, match='--vocab_size'):
            open_foreign(tmp_path / 'ids.bin', vocab_size).verify(vocab_size)


@pytest.mark.parametrize('dtype', ['<f4', '<f8'])
@pytest.mark.parametrize('vocab_size', [1500, 50257])
def test_floats_are_refused_by_name(dtype, vocab_size, tmp_path):
    for numbers in (MOVES, RANDOM.normal(size=4000)):
        numbers.astype(dtype).tofile(tmp_path / 'ids.bin')
        with pytest.raises(UserError, match=rf'ids\.bin.*float{8 * int(dtype[2])}'):
            open_foreign(tmp_path / 'ids.bin', vocab_size)


@pytest.mark.parametrize('data', [b'', b'\1', MOVES.astype('<u2').tobytes() + b'\1'])
def test_a_file_that_ends_within_an_id_is_refused(data, tmp_path):
    (tmp_path / 'ids.bin').write_bytes(data)
    with pytest.raises(UserError, match=r'ids\.bin'):
        open_foreign(tmp_path / 'ids.bin', 1500)


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
    folder = write_ids(tmp_path / 'ids', MOVES, '<i8', '>u2')
    before = contents(folder)
    train.main([*tiny, f'--dataset={folder}', '--vocab_size=1500', '--max_iters=3'])
    prepare.main(['ids', str(folder), '--vocab_size=1500'])
    train.main([*tiny, f'--dataset={folder}', '--init_from=resume'])
    assert [row['iter'] for row in lines(tmp_path / 'out', 'loss')] == [1, 2, 3, 4, 5, 6]
    (folder / 'meta.json').unlink()
    assert contents(folder) == before


def test_a_dtype_that_is_named_is_taken(tmp_path):
    rests = np.where(np.arange(4000) % 2, 0, MOVES)  # read as uint32, half as many
    folder = write_ids(tmp_path / 'ids', rests, '<u2')
    prepare.main(['ids', str(folder), '--vocab_size=1500', '--dtype=uint16'])
    assert np.array_equal(open_dataset(folder).split('train').read(0, 9999), rests[:3600])


@pytest.mark.parametrize(('options', 'word'), [
    ([], '--vocab_size'), (['--vocab_size=1400'], 'train.bin'),
    (['--vocab_size=1500', '--dtype=float32'], 'float32'),
    (['--vocab_size=1500', '--dtype=int64'], 'train.bin')])
def test_ids_that_do_not_fit_their_description_are_refused(
        options, word, folder, capsys, monkeypatch):
    before = contents(folder)
    assert word in fails(capsys, monkeypatch, prepare.main, 'ids', folder, *options)
    assert contents(folder) == before


@pytest.mark.parametrize('change', [
    lambda path: write_ids(path.parent, MOVES[::-1], '<u2'), lambda path: path.unlink(),
    lambda path: write_ids(path.parent, MOVES[:3000], '<u2'),
    lambda path: write_ids(path.parent, MOVES + 9, '<u2'),
    lambda path: write_ids(path.parent, MOVES, '<i8')])
def test_rewritten_ids_are_to_be_described_again(change, folder):
    prepare.main(['ids', str(folder), '--vocab_size=1500'])
    change(folder / 'train.bin')
    with pytest.raises(UserError, match=rf'prepare\.py ids {folder} --vocab_size'):
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
                          ('', '0'), ('IDS:', '0'), ('\n', '0')):
        sample.main([*command, f'--start={start}'])
        _, _, written = capsys.readouterr().out.partition('---------------\n')
        assert re.fullmatch(rf'IDS:{prompt}(,\d+){{5}}\n', written)
        assert max(map(int, re.findall(r'\d+', written))) < 1500
    for start in ('hello', 'IDS:1,1500', 'IDS:-1'):
        assert '1499' in fails(capsys, monkeypatch, sample.main, *command, f'--start={start}')


def test_ids_are_decoded_to_a_list_without_a_leading_comma():
    assert IdsTokenizer(1500).decode([750, 784, 819]) == '750,784,819'


def test_ids_of_unknown_origin_are_taken_for_gpt2s_with_a_word_about_vocab_size(folder, capsys):
    dataset = open_data(SimpleNamespace(dataset=str(folder), vocab_size=0), World())
    assert dataset.vocab_size == 50257
    assert '--vocab_size' in capsys.readouterr().out


def test_an_id_beyond_the_vocabulary_ends_a_run_before_anything_is_written(
        folder, tiny, tmp_path, capsys, monkeypatch):
    assert f'{folder}/train.bin' in fails(capsys, monkeypatch, train.main, *tiny,
                                          f'--dataset={folder}', '--vocab_size=1449')
    assert not list(tmp_path.glob('out/*'))
