"""Someone's own ids, a time series of numbers: they train, resume, score and sample."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import TINY, fails, lines

import evaluate
import prepare
import sample
import train
from plaingpt.data.dataset import open_data, open_dataset
from plaingpt.data.tokenizers import IdsTokenizer
from plaingpt.system.distributed import World


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = (np.sin(np.arange(4000) / 20) * 700 + 750).astype(np.uint16)
    (tmp_path / 'data/ids').mkdir(parents=True)
    ids[:3600].tofile('data/ids/train.bin')
    ids[3600:].tofile('data/ids/val.bin')
    return tmp_path / 'data/ids'


@pytest.mark.parametrize('way', ['vocab_size', 'meta.pkl'])
def test_ids_from_numpy_train_resume_score_and_sample(way, folder, capsys, monkeypatch):
    argv = [*TINY, '--dataset=ids', '--check=False']
    if way == 'meta.pkl':
        (folder / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 1500}))
    else:
        argv.append('--vocab_size=1500')
    train.main([*argv, '--max_iters=3'])
    train.main([*argv, '--init_from=resume'])
    assert [row['iter'] for row in lines(folder.parents[1] / 'out', 'loss')] == [1, 2, 3, 4, 5, 6]
    evaluate.main(['--device=cpu'])
    assert 'val of data/ids: loss' in capsys.readouterr().out
    sample.main(['--start=IDS:750,784,819', '--num_samples=1', '--max_new_tokens=5',
                 '--device=cpu'])
    *_, written = capsys.readouterr().out.strip().splitlines()
    ids = [int(i) for i in written.removeprefix('IDS:').split(',')]
    assert ids[:3] == [750, 784, 819] and len(ids) == 8 and max(ids) < 1500
    for start in ('hello', 'IDS:1,1500', 'IDS:-1'):
        assert 'is no list of ids from 0 to 1499' in fails(
            capsys, monkeypatch, sample.main, f'--start={start}', '--device=cpu')


def test_ids_of_which_nothing_is_said_are_taken_for_gpt2s(folder, capsys):
    dataset = open_data(SimpleNamespace(dataset='ids', vocab_size=0), World())
    assert dataset.vocab_size == 50257 and 'taken for GPT-2 tokens' in capsys.readouterr().out


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(folder, capsys, monkeypatch):
    line = fails(capsys, monkeypatch, train.main, *TINY, '--dataset=ids', '--vocab_size=1449')
    assert 'data/ids/train.bin: token 31 has id 1449' in line


def test_inspect_counts_and_shows_ids(folder, capsys):
    (folder / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 1500}))
    prepare.main(['inspect', 'ids'])
    out = capsys.readouterr().out
    assert 'ids tokenizer, 1,500 tokens' in out and 'train.bin: 3,600 tokens' in out
    assert "',750,784,819," in out
    assert isinstance(open_dataset(folder).tokenizer(), IdsTokenizer)
