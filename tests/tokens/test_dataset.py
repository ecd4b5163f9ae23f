"""Token files that are damaged, replaced, moved or changed while a run reads them."""

import itertools
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import fails
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from plaingpt.system.errors import UserError
from plaingpt.tokens.batches import BatchLoader
from plaingpt.tokens.dataset import dataset_folder, open_dataset
from plaingpt.tokens.token_files import SAMPLED_BLOCKS, SAMPLED_BYTES, open_tokens


@pytest.fixture
def own_data(char_data, tmp_path):
    return shutil.copytree(char_data, tmp_path / 'data')


def bare(folder, tokens):
    """A folder of token files without meta.json."""
    folder.mkdir()
    for split in ('train', 'val'):
        np.asarray(tokens, '<u2').tofile(folder / f'{split}.bin')
        os.utime(folder / f'{split}.bin', (0, 0))  # clocks of file systems tick every few ms
    return folder


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# -----------------------------------------------------------------------------
# damage before the start


def test_each_flipped_bit_is_found_when_a_split_is_read_into_memory(own_data):
    chance = random.Random(0)
    for i in range(30):
        path = own_data / ('train.bin', 'val.bin')[i % 2]
        bit = chance.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(UserError, match=rf'{path.name}: (another checksum|token .* has id) '
                                            '.*damaged.*prepare'):
            open_dataset(own_data).split(path.stem, in_ram=True)
        flip(path, bit)
        assert len(open_dataset(own_data).split(path.stem, in_ram=True))


@pytest.mark.parametrize(('options', 'words'), [
    (['--data_in_ram=True'], 'in memory, checksums verified'),
    (['--data_in_ram=False'], 'on disk, checksums not verified (python prepare.py inspect DATA '
                              'does)')])
def test_a_run_says_whether_its_data_was_verified(tiny, own_data, capsys, options, words):
    train.main([*tiny, f'--dataset={own_data}', *options, '--max_iters=0'])
    assert words.replace('DATA', str(own_data)) in capsys.readouterr().out


# -----------------------------------------------------------------------------
# changes during a run


def overwrite(path):
    with open(path, 'r+b') as f:
        f.seek(100)
        f.write(b'\1\0')


def replace_by_one_as_old(path):
    before = path.stat()
    shutil.copyfile(path, path.with_suffix('.new'))
    flip(path.with_suffix('.new'), 800)
    os.utime(path.with_suffix('.new'), ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(path.with_suffix('.new'), path)


def append(path):
    with open(path, 'ab') as f:
        f.write(b'\1\0')


CHANGES = {'overwritten': overwrite, 'replaced': replace_by_one_as_old, 'longer': append,
           'cut short': lambda path: os.truncate(path, 200),
           'emptied': lambda path: os.truncate(path, 0), 'removed': os.unlink,
           'a folder': lambda path: (path.unlink(), path.mkdir())}


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('form', ['prepared', 'bare'])
def test_no_batch_comes_from_a_file_that_changed_under_the_run(form, change, own_data, tmp_path):
    folder = own_data if form == 'prepared' else bare(tmp_path / 'bare', range(3000))
    dataset = open_dataset(folder)
    loader = BatchLoader(dataset.split('train'), 16, 4)
    as_written, identity = loader.train_batch(1, 0), dataset.identity('train')
    batches = loader.train_batches(0)
    next(batches)
    CHANGES[change](folder / 'train.bin')
    with pytest.raises(UserError, match=r'train\.bin (has changed|cannot be read any more)'):
        for batch in itertools.islice(batches, 2):
            assert all(map(torch.equal, batch, as_written))  # the first may be read already
    with pytest.raises(UserError, match=r'train\.bin'):
        loader.eval_batch(loader.eval_batches(1)[0])
    assert dataset.identity('train') == identity  # what is saved is what was trained on


def test_a_run_whose_data_changes_stops_in_one_line(tiny, own_data, capsys, monkeypatch):
    read = BatchLoader.train_batch

    def read_and_change(self, step, micro):
        if step == 3:
            overwrite(own_data / 'train.bin')
        return read(self, step, micro)

    monkeypatch.setattr(BatchLoader, 'train_batch', read_and_change)
    assert f'{own_data}/train.bin has changed' in fails(
        capsys, monkeypatch, train.main, *tiny, f'--dataset={own_data}', '--data_in_ram=False')


def test_a_pipe_is_no_token_file(tmp_path):
    os.mkfifo(tmp_path / 'train.bin')
    with pytest.raises(UserError, match='is no file'):
        open_dataset(tmp_path).split('train')


# -----------------------------------------------------------------------------
# identity


def test_the_same_tokens_are_the_same_data_under_another_path(char_data, own_data, tmp_path):
    bare(tmp_path / 'a', range(3000))
    shutil.copytree(tmp_path / 'a', tmp_path / 'b')
    for one, other in ((char_data, own_data), (tmp_path / 'a', tmp_path / 'b')):
        assert open_dataset(one).is_identity('train', open_dataset(other).identity('train'))
    flip(tmp_path / 'b/train.bin', 9)
    assert not open_dataset(tmp_path / 'a').is_identity(
        'train', open_dataset(tmp_path / 'b').identity('train'))


def test_a_run_on_bare_files_resumes_on_the_same_tokens_only(tiny, tmp_path, capsys, monkeypatch):
    folder = bare(tmp_path / 'bare', np.arange(3000) % 80)
    tiny = [*tiny, '--max_iters=1']
    train.main([*tiny, f'--dataset={folder}'])
    folder = folder.rename(tmp_path / 'moved')
    train.main([*tiny, f'--dataset={folder}', '--init_from=resume'])
    np.arange(3000, dtype='<u2').tofile(folder / 'train.bin')
    assert 'was trained on other tokens' in fails(
        capsys, monkeypatch, train.main, *tiny, f'--dataset={folder}', '--init_from=resume')


def test_the_path_that_an_earlier_version_saved_is_an_identity(tmp_path, monkeypatch):
    folder = bare(tmp_path / 'bare', range(3000))
    monkeypatch.chdir(tmp_path)
    for name in (folder, 'bare'):
        dataset = open_dataset(name)
        assert dataset.is_identity('train', 'bare') and dataset.is_identity('train', str(folder))
        for other in ('other', None, 3, [], {}, '\0'):
            assert not dataset.is_identity('train', other)


@given(st.integers(0, SAMPLED_BLOCKS * SAMPLED_BYTES - 1))
@settings(max_examples=30)
def test_a_sample_leaves_out_no_more_than_it_reads(tmp_path_factory, start):
    path = tmp_path_factory.mktemp('sample') / 'train.bin'
    tokens = np.zeros(SAMPLED_BLOCKS * SAMPLED_BYTES, '<u2')  # twice what is read of it

    def sample():
        tokens.tofile(path)
        return open_tokens(path, np.dtype('<u2')).sampled_sha256()

    before = sample()
    tokens[start:start + SAMPLED_BYTES] += 1  # so many bytes, twice
    assert sample() != before


def test_a_slash_that_a_shell_completed_changes_nothing(own_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(own_data, 'data/notes')
    assert dataset_folder('notes/') == dataset_folder('notes') == Path('data/notes')
    shutil.copytree(own_data, 'here')
    assert dataset_folder('here/') == Path('here')


def test_only_what_prepare_can_make_is_said_to_be_unprepared(tmp_path):
    with pytest.raises(UserError, match=r'no \.bin files there') as refused:
        open_dataset(tmp_path)
    assert 'prepare.py' not in str(refused.value)
    (tmp_path / 'meta.json').symlink_to('nowhere')  # no bare folder of GPT-2 tokens
    with pytest.raises(UserError, match=r'meta\.json is broken'):
        open_dataset(tmp_path)
