"""Token files and meta.json that are damaged, replaced, moved or cut short; others' token files."""

import json
import os
import random

import numpy as np
import pytest
import torch
from corpus_files import contents
from processes import exit_code, fails, fork_job

import prepare
import train
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import open_dataset
from plaingpt.data.token_files import SAMPLED_BLOCKS, SAMPLED_BYTES, open_tokens
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


def test_each_flipped_bit_of_a_small_split_is_found_before_a_run(own_data):
    chance = random.Random(0)
    for name in ('train.bin', 'val.bin') * 5:
        path = own_data / name
        bit = chance.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(UserError, match=rf'{name}: (another checksum|token .* has id) '
                                            '.*damaged.*prepare'):
            open_dataset(own_data).loader(path.stem, 8, 1)
        flip(path, bit)
        open_dataset(own_data).loader(path.stem, 8, 1)


def test_a_file_of_another_length_or_none_and_a_broken_meta_json_are_named(own_data):
    for name in ('val.bin', 'meta.json'):
        path = own_data / name
        whole = path.read_bytes()
        for data in (whole[:-100], whole[:-1], b'', b'[]', b'{"format_version": 99}'):
            path.write_bytes(data)
            with pytest.raises(UserError, match=name):
                open_dataset(own_data).split('val')
        path.write_bytes(whole)
    (own_data / 'val.bin').unlink()
    with pytest.raises(UserError, match=r'val\.bin'):
        open_dataset(own_data).split('val')


@pytest.mark.parametrize('change', [
    lambda text: text, lambda text: text[:-100], lambda text: text.replace(': 1,', ': 99,', 1)],
    ids=['whole', 'damaged', 'newer'])
def test_no_command_replaces_own_ids_whose_meta_json_is_whole_damaged_or_of_a_newer_version(
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


def test_a_meta_json_that_cannot_be_read_is_replaced_only_with_overwrite(
        text_file, own_data, capsys, monkeypatch):
    (own_data / 'meta.json').write_text('{')
    command = ['text', f'--input={text_file}', '--tokenizer=char', f'--data_dir={own_data}']
    before = contents(own_data)
    assert '--overwrite' in fails(capsys, monkeypatch, prepare.main, *command)
    assert contents(own_data) == before
    prepare.main([*command, '--overwrite'])
    assert open_dataset(own_data).split('train')


def test_own_ids_that_grew_are_found_by_the_size_of_their_file(tmp_path):
    folder = bare(tmp_path / 'ids', np.arange(9000) % 1500)
    prepare.main(['ids', str(folder), '--vocab_size=1500'])
    with open(folder / 'train.bin', 'ab') as file:
        file.write(b'12')
    with pytest.raises(UserError, match=r'train\.bin'):
        open_dataset(folder).split('train')


def test_an_odd_number_of_bytes_is_refused_with_the_setting_for_ids_of_a_byte(tmp_path):
    folder = bare(tmp_path / 'ids', np.arange(9000) % 1500)
    np.arange(9001).astype('u1').tofile(folder / 'train.bin')
    with pytest.raises(UserError, match=r'train\.bin.*--dtype=uint8'):
        open_dataset(folder, 1500).split('train')


def test_a_meta_json_of_a_newer_version_is_refused_by_what_is_new_and_not_called_damaged(own_data):
    path = own_data / 'meta.json'
    meta = json.loads(path.read_text())
    for change, new in (({'layout': 'rows'}, 'layout'), ({'format_version': 2}, 'version=2')):
        path.write_text(json.dumps({**meta, **change}))
        with pytest.raises(UserError, match=rf'meta\.json is from another version.*{new}') as error:
            open_dataset(own_data)
        assert 'damaged' not in str(error.value)


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path):
    for place in (0, 5_000, 5_999):
        ids = np.zeros(6_000, '<u2')
        ids[place] = 60_000
        stream = open_dataset(bare(tmp_path / 'd', ids)).split('val')
        named = pytest.raises(UserError, match=rf'val\.bin: token {place:,} has id 60000')
        with named:
            stream.verify()
        with named:
            stream.read(0, 6_000)


# -----------------------------------------------------------------------------
# changes during a run


def test_a_run_goes_on_with_the_tokens_it_began_with_when_prepare_replaces_them(
        text_file, own_data, tmp_path):
    other = tmp_path / 'other.txt'
    other.write_text(text_file.read_text()[::-1])  # the same characters and length
    dataset = open_dataset(own_data)
    loader = BatchLoader(dataset.split('train'), 16, 4)
    before, identity = loader.train_batch(1, 0), dataset.identity('train')
    prepare.main(['text', f'--input={other}', '--tokenizer=char', f'--data_dir={own_data}',
                  '--overwrite'])
    assert open_dataset(own_data).identity('train') != identity == dataset.identity('train')
    assert all(map(torch.equal, loader.train_batch(1, 0), before))


def test_a_file_that_is_cut_short_under_a_run_ends_it_in_one_line_and_keeps_its_checkpoint(
        tiny, own_data, tmp_path, capsys, monkeypatch):
    read = BatchLoader.train_batch

    def cut_and_read(self, step, micro):
        if step == 5:
            os.truncate(own_data / 'train.bin', 200)
        return read(self, step, micro)

    monkeypatch.setattr(BatchLoader, 'train_batch', cut_and_read)
    assert f'{own_data}/train.bin has been cut short' in fails(
        capsys, monkeypatch, train.main, *tiny, f'--dataset={own_data}')
    assert list(tmp_path.glob('out/checkpoints/iter-*/state.json'))


# -----------------------------------------------------------------------------
# token files of others


def header(*words):
    """llm.c's header: magic, version, number of tokens."""
    return np.array([*words, *[0] * (256 - len(words))], '<i4').tobytes()


def test_token_ids_without_meta_json_are_read_with_and_without_llm_cs_header(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50257, 2000)
    for start in (b'', header(20240520, 1, 2000)):
        folder = bare(tmp_path / f'{len(start)}', ids, start, name='retrain-{}_000001.bin')
        dataset = open_dataset(folder)
        assert dataset.vocab_size == 50257 and dataset.tokenizer_json() == {'kind': 'gpt2'}
        stream = dataset.split('train')
        assert np.array_equal(stream.read(0, 9999), ids) and len(stream) == 2000
        assert np.array_equal(stream.read(1990, 20), ids[1990:])
    wide = ids.astype('<u4')
    folder = tmp_path / 'wide'
    folder.mkdir()
    for split in ('train', 'val'):
        (folder / f'{split}.bin').write_bytes(header(20240801, 7, 2000) + wide.tobytes())
    assert np.array_equal(open_dataset(folder, 128256).split('val').read(0, 9999), ids)
    for words in ((20240801, 7, 2000), (20240520, 2, 2000), (20240520, 1, 2001)):
        with pytest.raises(UserError, match=r'train\.bin has a header of llm\.c'):
            open_dataset(bare(tmp_path / 'd', ids, header(*words))).split('train')


# -----------------------------------------------------------------------------
# identity


def test_a_run_on_bare_files_resumes_on_the_same_tokens_only(tiny, tmp_path, capsys, monkeypatch):
    folder = bare(tmp_path / 'bare', np.arange(3000) % 80)
    tiny = [*tiny, '--max_iters=1', '--check=False']
    train.main([*tiny, f'--dataset={folder}'])
    folder = folder.rename(tmp_path / 'moved')
    train.main([*tiny, f'--dataset={folder}', '--init_from=resume'])
    np.arange(3000, dtype='<u2').tofile(folder / 'train.bin')
    assert 'was trained on other tokens' in fails(
        capsys, monkeypatch, train.main, *tiny, f'--dataset={folder}', '--init_from=resume')


@pytest.mark.slow  # the job takes seconds to end
def test_processes_that_find_different_tokens_do_not_train(tiny, tmp_path):
    for rank in range(2):
        (tmp_path / f'machine{rank}').mkdir()
        bare(tmp_path / f'machine{rank}/tokens', range(rank, rank + 3000))
    pids, logs = fork_job(train.main, 2, tmp_path, *tiny, '--dataset=./tokens',
                       before=lambda: os.chdir(tmp_path / f'machine{os.environ["RANK"]}'))
    assert [exit_code(pid) for pid in pids.values()] == [2, 2]
    assert all('find different tokens' in log.read_text() for log in logs.values())


def test_a_sample_leaves_out_no_more_than_it_reads(tmp_path):
    path = tmp_path / 'train.bin'
    tokens = np.zeros(SAMPLED_BLOCKS * SAMPLED_BYTES, '<u2')  # twice what is read of it

    def sample():
        tokens.tofile(path)
        return open_tokens(path, np.dtype('<u2')).sampled_sha256()

    before = sample()
    for start in np.random.default_rng(0).integers(0, len(tokens), 15):
        tokens[:] = 0
        tokens[start:start + SAMPLED_BYTES] = 1  # so many bytes, twice
        assert sample() != before
