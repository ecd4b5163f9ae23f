"""Ids of one's own, as numpy writes them: the dtype they are read with, and prepare.py ids."""

import json

import numpy as np
import pytest
from corpus_files import contents
from processes import fails
from runs import lines

import evaluate
import prepare
import sample
import train
from plaingpt.data.dataset import open_dataset
from plaingpt.data.foreign_files import open_foreign
from plaingpt.data.token_files import SAMPLED_BLOCKS, SAMPLED_BYTES
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


@pytest.mark.parametrize('dtype', WIDTHS)
def test_ids_are_read_with_the_dtype_they_were_written_with(dtype, tmp_path):
    for vocab_size, ids in (
            (1500, MOVES), (1500, np.minimum(RANDOM.zipf(1.3, 4000), 1499)), (4, MOVES % 4),
            (2, MOVES % 2), (65, MOVES[:40] % 65), (256, MOVES % 256), (50257, MOVES),
            (50257, MOVES % 65), (100_000, RANDOM.integers(0, 30_000, 4000))):
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


def test_of_a_large_file_only_samples_decide(tmp_path):
    ids = RANDOM.integers(0, 1500, SAMPLED_BLOCKS * SAMPLED_BYTES // 4 + 1)
    for dtype in ('<i8', '>u2'):
        assert reads_back(tmp_path / 'ids.bin', ids, dtype, 1500)


@pytest.mark.parametrize('dtype', WIDTHS)
def test_an_id_beyond_the_vocabulary_or_below_0_is_named_with_its_number(dtype, tmp_path):
    wrong = {1000: 1499} if 'u' in dtype else {1000: 1499, 2000: -1}
    for place, value in wrong.items():
        ids = MOVES % 1400
        ids[place] = value
        ids.astype(dtype).tofile(tmp_path / 'ids.bin')
        with pytest.raises(UserError, match=rf'token {place:,} has id {value}, .*--vocab_size'):
            open_foreign(tmp_path / 'ids.bin', 1400).verify(1400)


def test_a_vocabulary_that_is_said_too_small_never_changes_the_width_without_an_error(tmp_path):
    for dtype in WIDTHS:
        for vocab_size in (100, 256, 257, 1000):
            MOVES.astype(dtype).tofile(tmp_path / 'ids.bin')
            with pytest.raises(UserError, match='vocabulary ends'):
                open_foreign(tmp_path / 'ids.bin', vocab_size).verify(vocab_size)


@pytest.mark.parametrize('dtype', ['<f4', '<f8'])
@pytest.mark.parametrize('vocab_size', [1500, 50257])
def test_floats_are_refused_by_name(dtype, vocab_size, tmp_path):
    for numbers in (MOVES, RANDOM.normal(size=4000)):
        numbers.astype(dtype).tofile(tmp_path / 'ids.bin')
        with pytest.raises(UserError, match=rf'ids\.bin holds float{8 * int(dtype[2])}.*uint16'):
            open_foreign(tmp_path / 'ids.bin', vocab_size)


def test_a_file_that_ends_within_an_id_is_refused(tmp_path):
    for data in (b'', b'\1', MOVES.astype('<u2').tobytes() + b'\1'):
        (tmp_path / 'ids.bin').write_bytes(data)
        with pytest.raises(UserError, match='damaged'):
            open_foreign(tmp_path / 'ids.bin', 1500)


# -----------------------------------------------------------------------------
# arrays of numpy


def test_npy_files_are_read_as_shards_and_as_single_files(tmp_path):
    shards = {'edufineweb_train_000001': MOVES[:1500], 'edufineweb_train_000002': MOVES[1500:3600],
              'edufineweb_val_000000': MOVES[3600:]}
    for dtype, names in (('<u2', shards), ('>i4', {'train': MOVES[:3600], 'val': MOVES[3600:]})):
        folder = tmp_path / dtype[1:]
        folder.mkdir()
        for name, ids in names.items():
            np.save(folder / f'{name}.npy', ids.astype(dtype))
        assert np.array_equal(open_dataset(folder, 1500).split('train').read(0, 9999), MOVES[:3600])
        assert np.array_equal(open_dataset(folder, 1500).split('val').read(0, 9999), MOVES[3600:])


@pytest.mark.parametrize('array', [
    MOVES.astype('f4'), MOVES.reshape(2, -1), MOVES > 3, np.array([{}]), np.array(3)])
def test_other_arrays_are_refused_in_one_line(array, tmp_path):
    np.save(tmp_path / 'train.npy', array)
    with pytest.raises(UserError, match=r'train\.npy') as refused:
        open_dataset(tmp_path, 1500).split('train')
    assert '\n' not in str(refused.value)


# -----------------------------------------------------------------------------
# prepare.py ids


def test_described_ids_train_resume_score_and_sample_without_vocab_size(tiny, tmp_path, capsys):
    folder = write_ids(tmp_path / 'ids', MOVES, '<i8', '>u2')
    before = contents(folder)
    train.main([*tiny, f'--dataset={folder}', '--vocab_size=1500', '--max_iters=3'])
    assert 'int64' in capsys.readouterr().out
    prepare.main(['ids', str(folder), '--vocab_size=1500'])
    assert 'next: ' in capsys.readouterr().out
    prepare.main(['inspect', str(folder)])
    assert f'ids {", ".join(map(str, MOVES[:24]))}' in capsys.readouterr().out
    train.main([*tiny, f'--dataset={folder}', '--init_from=resume'])
    assert [row['iter'] for row in lines(tmp_path / 'out', 'loss')] == [1, 2, 3, 4, 5, 6]
    evaluate.main([f'--out_dir={tmp_path}/out'])
    sample.main([f'--out_dir={tmp_path}/out', '--num_samples=1', '--max_new_tokens=5'])
    meta = json.loads((folder / 'meta.json').read_text())
    assert meta['vocab_size'] == 1500 and meta['dtype'] == 'int64'
    assert meta['splits']['val']['files'][0]['dtype'] == '>u2'
    assert {name: data for name, data in contents(folder).items() if name in before} == before


def test_a_dtype_that_is_named_is_taken(tmp_path):
    rests = np.where(np.arange(4000) % 2, 0, MOVES)  # read as uint32, half as many
    folder = write_ids(tmp_path / 'ids', rests, '<u2')
    prepare.main(['ids', str(folder), '--vocab_size=1500', '--dtype=uint16'])
    assert np.array_equal(open_dataset(folder).split('train').read(0, 9999), rests[:3600])


def test_the_vocabulary_of_described_ids_can_be_changed(tmp_path, capsys, monkeypatch):
    folder = write_ids(tmp_path / 'ids', MOVES, '<u2')
    for vocab_size in (1500, 2000):
        prepare.main(['ids', str(folder), f'--vocab_size={vocab_size}'])
        assert open_dataset(folder).vocab_size == vocab_size
    out = capsys.readouterr().out
    assert '1,500' in out and '2,000' in out
    assert 'train.bin: token' in fails(
        capsys, monkeypatch, prepare.main, 'ids', folder, '--vocab_size=1000')
    assert open_dataset(folder).vocab_size == 2000


def test_no_command_replaces_ids_of_ones_own(text_file, tmp_path, capsys, monkeypatch):
    folder = write_ids(tmp_path / 'ids', MOVES, '<u2')
    prepare.main(['ids', str(folder), '--vocab_size=1500'])
    before = contents(folder)
    for option in ([], ['--overwrite']):
        assert '--data_dir' in fails(capsys, monkeypatch, prepare.main, 'text', text_file,
                                     f'--data_dir={folder}', *option)
    assert contents(folder) == before


def test_what_cannot_be_described_is_refused_and_nothing_is_written(
        char_data, tmp_path, capsys, monkeypatch):
    folder = write_ids(tmp_path / 'ids', MOVES, '<u2')
    before = contents(folder)
    for argv, named in (
            ([folder], '--vocab_size'), ([folder, '--vocab_size=1400'], 'train.bin: token'),
            ([folder, '--vocab_size=1500', '--dtype=float32'], 'float32'),
            ([folder, '--vocab_size=1500', '--dtype=int64'], 'has id'),
            ([tmp_path / 'none', '--vocab_size=1500'], 'none'),
            ([char_data, '--vocab_size=1500'], str(char_data))):
        assert named in fails(capsys, monkeypatch, prepare.main, 'ids', *argv)
    assert contents(folder) == before


def test_a_folder_of_which_nothing_is_said_shows_its_ids_without_gpt2s_tokenizer(
        tmp_path, capsys, monkeypatch):
    import tiktoken

    def get_encoding(name):
        raise ConnectionError

    monkeypatch.setattr(tiktoken, 'get_encoding', get_encoding)
    prepare.main(['inspect', str(write_ids(tmp_path / 'ids', MOVES, '<u2'))])
    assert f'ids {MOVES[0]}, {MOVES[1]}, ' in capsys.readouterr().out


def test_numbers_that_are_written_out_are_not_ids(tmp_path):
    np.savetxt(tmp_path / 'train.bin', np.arange(900), fmt='%d')
    with pytest.raises(UserError, match='is text'):
        open_foreign(tmp_path / 'train.bin', 1500)


def test_an_array_that_np_save_wrote_is_read_whatever_its_name(tmp_path):
    with open(tmp_path / 'train.bin', 'wb') as file:
        np.save(file, np.arange(900, dtype=np.uint16))
    assert open_foreign(tmp_path / 'train.bin', 1500).read(0, 900).tolist() == list(range(900))
