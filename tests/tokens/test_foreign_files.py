"""Files that hold no tokens of ours, under the name of some that do."""

import gzip
import io
import os
import pickle
import shutil

import numpy as np
import pytest
import safetensors.numpy
import torch
import zstandard
from helpers import SHARED, fails, shared_file

import prepare
import train
from plaingpt.system.errors import UserError
from plaingpt.tokens.dataset import open_dataset
from plaingpt.tokens.token_files import SAMPLED_BLOCKS, SAMPLED_BYTES

CHANCE = np.random.default_rng(0)
IDS = CHANCE.integers(0, 50257, 20_000)  # as those of real text, no value is rare


def header(*words):
    return np.array([*words, *[0] * (256 - len(words))], '<i4').tobytes()


def u2(ids=IDS):
    return ids.astype('<u2').tobytes()


def u4(ids=IDS):
    return ids.astype('<u4').tobytes()


def characters(text):
    chars = sorted(set(text))  # as nanoGPT's prepare.py has them: the line break is 0
    return u2(np.array([chars.index(c) for c in text]))


N = len(IDS)
LLAMA3 = CHANCE.integers(0, 128_000, N)
def of_torch():
    torch.save(torch.tensor(IDS), file := io.BytesIO())
    return file.getvalue()


KNOWN = {'bare ids': u2(), "llm.c's shard": header(20240520, 1, N) + u2(),
         'few ids': u2(IDS[:50]), 'one id again and again': u2(0 * IDS + 7),
         'few zeros': u2(0 * IDS[:50]), 'ids of a small vocabulary': u2(IDS % 3),
         'names': characters('\n'.join(['Al', 'Bo', 'Eva', 'Ada'] * 300)),
         'a character a line': characters('\n'.join('3141592653' * 100)),
         'lines after many blank ones': characters('\n' * 3000 + 'a line of text\n' * 200),
         'a tenth zeros, at first too': u2(np.where(np.arange(N) < 600, 0, IDS * (IDS % 10 > 0)))}
FOREIGN = {  # bytes, and words of the message
    'magic one more': (header(20240521, 1, N) + u2(), r'header .* \(magic 20240521'),
    'magic one less': (header(20240519, 1, N) + u2(), r'header .* \(magic 20240519'),
    'magic 0': (header(0, 1, N) + u2(), 'header .* version 1, 20000 tokens'),
    'magic and count damaged': (header(7, 1, N + 9) + u2(), 'header .* not known'),
    'all of the header zeros': (header() + u2(), 'header .* not known'),
    'written by a big-endian machine': (header(20240520, 1, N)[:12][::-1] + header()[12:] + u2(),
                                        'header .* not known'),
    'version 2': (header(20240520, 2, N) + u2(), 'version 2, only 1'),
    'count one more': (header(20240520, 1, N + 1) + u2(), '20,000 tokens where 20,001 '),
    'count negative': (header(20240520, 1, -N) + u2(), '20,000 tokens where -20,000 '),
    'cut short': (header(20240520, 1, N) + u2()[:-1000], '19,500 tokens where 20,000 '),
    'cut in the header': (header(20240520, 1, N)[:600], ' 0 tokens where 20,000 '),
    'no tokens': (header(20240520, 1, 0), 'empty'),
    "llm.c's of 32 bits": (header(20240520, 1, N) + u4(), '40,000 tokens where 20,000 '),
    "llm.c's Llama 3": (header(20240801, 7, N) + u4(LLAMA3), 'Llama 3'),
    "llm.c's questions": (header(20240522, 1, 3, 99) + u2(), 'questions'),
    "another program's, of 32 bits": (header(1234567, 3, N) + u4(), r'header .* \(magic 1234567'),
    'bare ids of 32 bits': (u4(), 'ids of 32 or 64 bits'),
    'bare ids of 64 bits': (IDS.astype('<i8').tobytes(), 'ids of 32 or 64 bits'),
    'Llama 3, bare': (u4(LLAMA3), 'ids of 32 or 64 bits'),
    'numbers': (CHANCE.normal(size=N).astype('<f4').tobytes(), 'has id .* vocabulary'),
    "numpy's": (b'\x93NUMPY\1\0v\0' + b' ' * 120 + u2(), 'npy'),
    'random bytes': (CHANCE.bytes(20_000), 'has id .* vocabulary'),
    'compressed': (gzip.compress(u2()), 'is gzip'),
    'Zstandard': (zstandard.compress(u2()), 'is Zstandard'),
    'a zip archive': (of_torch(), 'is a zip'),
    'a PDF': (b'%PDF-1.7\n%\xe2\xe3\xcf\xd3\n' * 100, 'is a PDF'),
    'a pickle': (pickle.dumps(IDS.tolist()), 'is a pickle'),
    'safetensors': (safetensors.numpy.save({'ids': IDS}), 'is .safetensors'),
    'a text': ('Zwei Dinge erfüllen das Gemüt'.encode() * 100, 'is a text'),
    'a text of an odd number of bytes': (b'two things' * 100 + b'.', 'is a text'),
    'zeros': (bytes(4000), 'has zeros'),
    'few ids of 32 bits': (u4(IDS[:16]), 'ids of 32 or 64 bits'),
    'small ids of 32 bits': (u4(IDS[:80] % 3), 'ids of 32 or 64 bits'),
    "32 bits behind llm.c's header": (header(20240520, 1, 2 * N) + u4(), 'ids of 32 or 64 bits'),
    "zeros behind llm.c's header": (header(20240520, 1, N) + u2(0 * IDS), 'has zeros'),
    **{f'the first {n} bytes lost': ((header(20240520, 1, N) + u2())[n:], 'header .* not known')
       for n in (4, 12, 100, 500, 900)},
    'an odd number of bytes': (u2() + b'\0', 'no whole number'),
}


def folder_of(folder, data):
    folder.mkdir()
    for name in ('corpus_train_000001.bin', 'corpus_val_000000.bin'):
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize('kind', KNOWN)
def test_what_holds_tokens_is_read(kind, tmp_path):
    stream = open_dataset(folder_of(tmp_path / 'd', KNOWN[kind])).split('train')
    ids = np.frombuffer(KNOWN[kind], '<u2')[512 * kind.startswith('llm.c'):]
    assert np.array_equal(stream.sequences(np.array([0]), len(stream))[0], ids)


def test_characters_of_a_play_are_read_with_any_of_them_as_the_first(tmp_path):
    text = shared_file('tinyshakespeare.txt').read_text()
    for n, start in enumerate((0, 14)):
        stream = open_dataset(folder_of(tmp_path / str(n), characters(text[start:]))).split('train')
        assert len(stream) == len(text) - start


@pytest.mark.parametrize('kind', FOREIGN)
def test_what_holds_no_tokens_is_refused_in_one_line(kind, tmp_path):
    data, words = FOREIGN[kind]
    folder = folder_of(tmp_path / 'd', data)
    for split in ('train', 'val'):
        with pytest.raises(UserError, match=words) as refused:
            open_dataset(folder).split(split)
        message = str(refused.value)
        assert '\n' not in message and f'{folder}/corpus_{split}' in message
        assert any(way in message for way in ('prepare', 'copy it again'))


def test_training_and_prepare_refuse_them_and_write_nothing(tiny, tmp_path, capsys, monkeypatch):
    folder = folder_of(tmp_path / 'd', FOREIGN['bare ids of 32 bits'][0])
    message = fails(capsys, monkeypatch, train.main, *tiny, f'--dataset={folder}')
    assert 'ids of 32 or 64 bits' in message and not list(tmp_path.glob('out/*'))
    for kind, (data, _) in FOREIGN.items():
        for path in folder.iterdir():
            path.write_bytes(data)
        message = fails(capsys, monkeypatch, prepare.main, 'fineweb10B-gpt2', f'--input={folder}',
                        f'--data_dir={tmp_path}/linked')
        assert 'corpus_train_000001.bin' in message, kind
        assert not (tmp_path / 'linked').exists(), kind


@pytest.mark.skipif(not (SHARED / 'tiktoken_cache').exists(),
                    reason="tiktoken's files are not there (PLAINGPT_SHARED)")
def test_a_shard_that_is_damaged_after_it_was_linked_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))
    folder = folder_of(tmp_path / 'd', KNOWN["llm.c's shard"])
    prepare.main(['fineweb10B-gpt2', f'--input={folder}', f'--data_dir={tmp_path}/linked'])
    damaged = header(20240521, 1, N) + u2(), header(20240520, 1, 5) + u2()[:10], u4()
    for data in damaged:
        (folder / 'corpus_train_000001.bin').write_bytes(data)
        with pytest.raises(UserError, match=r'train_000001\.bin: .* (damaged|written)'):
            open_dataset(tmp_path / 'linked').split('train')


def test_ids_of_a_prepared_dataset_may_begin_as_a_header_does(char_data, tmp_path):
    folder = shutil.copytree(char_data, tmp_path / 'd')
    path = folder / 'train.bin'
    path.write_bytes((header(20240520, 1, 5) + path.read_bytes())[:path.stat().st_size])
    with pytest.raises(UserError, match='token 0 has id 55432'):  # and not: counted in its header
        open_dataset(folder).split('train')


@pytest.mark.parametrize('place', [0, 5_000, -1])
def test_an_id_beyond_the_vocabulary_is_found_when_the_file_is_opened(place, char_data, tmp_path):
    folder = shutil.copytree(char_data, tmp_path / 'd')
    ids = np.fromfile(folder / 'val.bin', '<u2')
    ids[place] = 60_000
    ids.tofile(folder / 'val.bin')
    with pytest.raises(UserError, match=rf'val\.bin: token {place % len(ids):,} has id 60000'):
        open_dataset(folder).split('val')


def test_of_a_large_file_the_blocks_that_the_checksum_reads_are_looked_at(tmp_path):
    (folder := tmp_path / 'd').mkdir()
    ids = CHANCE.integers(0, 50257, 3 * SAMPLED_BLOCKS * SAMPLED_BYTES // 2 + 1, dtype='<u2')
    ids.tofile(folder / 'val.bin')
    for beyond in (len(ids) - 1, len(ids) // 63 * 31 + 4000, len(ids) // 2):
        ids.tofile(folder / 'train.bin')
        assert open_dataset(folder).split('train')
        with open(folder / 'train.bin', 'r+b') as f:
            f.seek(2 * (beyond // 2048 * 2048))
            f.write(b'\xff\xff' * 2 * SAMPLED_BYTES)  # wider than the gaps between blocks
            f.truncate(2 * len(ids))
        with pytest.raises(UserError, match='has id 65535'):
            open_dataset(folder).split('train')
    assert os.path.getsize(folder / 'train.bin') == ids.nbytes
