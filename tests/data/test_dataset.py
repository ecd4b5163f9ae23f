"""Token files and meta.json that are damaged, replaced, moved or cut short; others' token files."""

import json
import os
import random
import re

import numpy as np
import pytest
import torch
from corpus_files import contents
from processes import exit_code, fails, fork_job

import prepare
import train
from plaingpt.core.batches import BatchLoader
from plaingpt.core.dataset import open_dataset
from plaingpt.system.errors import UserError


def bare(folder, tokens, header=b'', name='{}.bin'):
    """A folder of token files without meta.json."""
    folder.mkdir(exist_ok=True)
    for split in ('train', 'val'):
        (folder / name.format(split)).write_bytes(header + np.asarray(tokens, '<u2').tobytes())
    return folder


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# -----------------------------------------------------------------------------
# damage


def test_a_flipped_bit_of_a_small_split_ends_a_run_before_it_begins(own_data):
    chance = random.Random(0)
    for name in ('train.bin', 'val.bin') * 5:
        path = own_data / name
        bit = chance.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(UserError, match=re.escape(str(path))):
            open_dataset(own_data).loader(path.stem, 8, 1)
        flip(path, bit)
        open_dataset(own_data).loader(path.stem, 8, 1)


@pytest.mark.parametrize('name', ['val.bin', 'meta.json'])
def test_a_truncated_file_is_named(name, own_data):
    path = own_data / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=re.escape(str(path))):
        open_dataset(own_data).split('val')


@pytest.mark.parametrize('change', [
    lambda text: text, lambda text: text[:-100], lambda text: text.replace(': 1,', ': 99,', 1)],
    ids=['whole', 'damaged', 'newer'])
def test_no_command_replaces_own_ids_whatever_their_meta_json(
        change, text_file, tmp_path, capsys, monkeypatch):
    folder = bare(tmp_path / 'ids', np.arange(9000) % 1500)
    prepare.main(['ids', str(folder), '--vocab_size=1500'])
    path = folder / 'meta.json'
    path.write_text(change(path.read_text()))
    before = contents(folder)
    for option in [], ['--overwrite']:
        fails(capsys, monkeypatch, prepare.main, 'text', f'--input={text_file}',
              f'--data_dir={folder}', *option)
        assert contents(folder) == before


@pytest.mark.parametrize('change', [{'layout': 'rows'}, {'format_version': 2}])
def test_a_meta_json_of_a_newer_version_is_refused_by_what_is_new(change, own_data):
    path = own_data / 'meta.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=rf'meta\.json.*{next(iter(change))}'):
        open_dataset(own_data)


@pytest.mark.parametrize('place', [0, 5_000, 5_999])
def test_an_id_beyond_the_vocabulary_is_named_with_its_place(place, tmp_path):
    ids = np.ones(6_000, '<u2')
    ids[place] = 60_000
    stream = open_dataset(bare(tmp_path / 'd', ids)).split('val')
    for read in stream.verify, lambda: stream.read(0, 6_000):
        with pytest.raises(UserError, match=rf'val\.bin.* {place:,} .*60000.*--dtype'):
            read()


# -----------------------------------------------------------------------------
# changes during a run


def test_a_run_keeps_reading_the_tokens_that_prepare_replaces(text_file, own_data, tmp_path):
    other = tmp_path / 'other.txt'
    other.write_text(text_file.read_text()[::-1])  # the same characters and length
    dataset = open_dataset(own_data)
    loader = BatchLoader(dataset.split('train'), 16, 4)
    before, identity = loader.train_batch(1, 0), dataset.identity('train')
    prepare.main(['text', f'--input={other}', '--tokenizer=char', f'--data_dir={own_data}',
                  '--overwrite'])
    assert open_dataset(own_data).identity('train') != identity
    assert dataset.identity('train') == identity
    assert all(map(torch.equal, loader.train_batch(1, 0), before))


def test_a_file_that_is_cut_short_under_a_run_is_named(own_data):
    loader = open_dataset(own_data).loader('train', 16, 4)
    os.truncate(own_data / 'train.bin', 200)
    with pytest.raises(UserError, match=r'train\.bin'):
        loader.train_batch(5, 0)


# -----------------------------------------------------------------------------
# token files of others


def header(*words):
    """llm.c's header: magic, version, number of tokens."""
    return np.array([*words, *[0] * (256 - len(words))], '<i4').tobytes()


IDS = np.random.default_rng(0).integers(0, 50257, 2000)


@pytest.mark.parametrize(('start', 'ids', 'vocab_size'), [
    (b'', IDS, 0), (header(20240520, 1, 2000), IDS, 0),
    (header(20240801, 7, 2000), IDS.astype('<u4').view('<u2'), 128256)],
    ids=['bare', 'llm.c', 'llm.c of 32 bits'])
def test_shards_without_meta_json_are_read(start, ids, vocab_size, tmp_path):
    folder = bare(tmp_path / 'd', ids, start, name='retrain-{}_000001.bin')
    stream = open_dataset(folder, vocab_size).split('train')
    assert np.array_equal(stream.read(0, 9999), IDS)
    assert np.array_equal(stream.read(1990, 20), IDS[1990:])


# -----------------------------------------------------------------------------
# identity


def test_a_run_on_bare_files_resumes_only_on_the_same_tokens(tiny, tmp_path, capsys, monkeypatch):
    folder = bare(tmp_path / 'bare', np.arange(3000) % 80)
    tiny = [*tiny, '--max_iters=1', '--check=False']
    train.main([*tiny, f'--dataset={folder}'])
    folder = folder.rename(tmp_path / 'moved')
    train.main([*tiny, f'--dataset={folder}', '--init_from=resume'])
    np.arange(3000, dtype='<u2').tofile(folder / 'train.bin')
    assert str(folder) in fails(capsys, monkeypatch, train.main, *tiny, f'--dataset={folder}',
                                '--init_from=resume')


@pytest.mark.slow  # the job takes seconds to end
def test_processes_that_find_different_tokens_do_not_train(tiny, tmp_path):
    for rank in range(2):
        (tmp_path / f'machine{rank}').mkdir()
        bare(tmp_path / f'machine{rank}/tokens', range(rank, rank + 3000))
    pids, logs = fork_job(train.main, 2, tmp_path, *tiny, '--dataset=./tokens',
                          before=lambda: os.chdir(tmp_path / f'machine{os.environ["RANK"]}'))
    assert [exit_code(pid) for pid in pids.values()] == [2, 2]
    for log in logs.values():
        assert 'error: ' in log.read_text()
