""".bin files that no meta.json describes: others' token ids are read, all else is refused."""

import pickle

import numpy as np
import pytest
import safetensors.numpy
from helpers import fails

import prepare
import train
from plaingpt.system.errors import UserError
from plaingpt.data.dataset import open_dataset

CHANCE = np.random.default_rng(0)
N = 20_000
IDS = CHANCE.integers(0, 50257, N)  # as those of real text, no value is rare


def header(*words):
    """llm.c's header: magic, version, number of tokens."""
    return np.array([*words, *[0] * (256 - len(words))], '<i4').tobytes()


def u2(ids=IDS):
    return ids.astype('<u2').tobytes()


def u4(ids=IDS):
    return ids.astype('<u4').tobytes()


def characters(text):
    chars = sorted(set(text))  # as nanoGPT's prepare.py has them: the line break is 0
    return u2(np.array([chars.index(c) for c in text]))


TOKENS = {'bare ids': u2(), "llm.c's shard": header(20240520, 1, N) + u2(),
          'few ids': u2(IDS[:50]), 'ids of a small vocabulary': u2(IDS % 3),
          'lines after many blank ones': characters('\n' * 3000 + 'a line of text\n' * 200)}
FOREIGN = {  # bytes, and words of the message
    'an unknown header': (header(20240521, 1, N) + u2(), r'header .* \(magic 20240521'),
    'cut short': (header(20240520, 1, N) + u2()[:-1000], '19,500 tokens where 20,000 '),
    "llm.c's Llama 3": (header(20240801, 7, N) + u4(CHANCE.integers(0, 128_000, N)), 'Llama 3'),
    'ids of 32 bits': (u4(), 'ids of 32 or 64 bits'),
    'a pickle': (pickle.dumps(IDS.tolist()), 'is a pickle'),
    'safetensors': (safetensors.numpy.save({'ids': IDS}), 'is .safetensors'),
    'a text': ('Zwei Dinge erfüllen das Gemüt'.encode() * 100, 'is a text'),
    'zeros': (bytes(4000), 'has zeros')}


def folder_of(folder, data):
    folder.mkdir(exist_ok=True)
    for name in ('corpus_train_000001.bin', 'corpus_val_000000.bin'):
        (folder / name).write_bytes(data)
    return folder


def test_files_of_token_ids_are_read(tmp_path):
    for kind, data in TOKENS.items():
        dataset = open_dataset(folder_of(tmp_path / kind, data))
        assert dataset.vocab_size == 50257 and dataset.tokenizer_json() == {'kind': 'gpt2'}
        ids = np.frombuffer(data, '<u2')[512 * kind.startswith('llm.c'):]
        for split in ('train', 'val'):
            stream = dataset.split(split)
            assert np.array_equal(stream.sequences(np.array([0]), len(stream))[0], ids), kind


def test_files_of_anything_else_are_refused_in_one_line(tmp_path):
    for data, words in FOREIGN.values():
        folder = folder_of(tmp_path / 'd', data)
        with pytest.raises(UserError, match=words) as refused:
            open_dataset(folder).split('train')
        message = str(refused.value)
        assert '\n' not in message and f'{folder}/corpus_train' in message
        assert 'prepare' in message or 'copy it again' in message


def test_training_and_prepare_refuse_them_and_write_nothing(tiny, tmp_path, capsys, monkeypatch):
    folder = folder_of(tmp_path / 'd', FOREIGN['ids of 32 bits'][0])
    for main, *argv in ((train.main, *tiny, f'--dataset={folder}'),
                        (prepare.main, 'fineweb10B-gpt2', f'--input={folder}',
                         f'--data_dir={tmp_path}/linked')):
        message = fails(capsys, monkeypatch, main, *argv)
        assert 'corpus_train_000001.bin' in message and 'ids of 32 or 64 bits' in message
    assert not list(tmp_path.glob('out/*')) and not (tmp_path / 'linked').exists()
