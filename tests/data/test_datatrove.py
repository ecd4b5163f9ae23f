"""Tokens that datatrove's DocumentTokenizer wrote."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from processes import ROOT, fails
from runs import TINY

import export
import prepare
import train
from plaingpt.data.dataset import open_dataset
from plaingpt.data.tokenizers import ByteTokenizer

END = ByteTokenizer.end_of_text


def write_shard(folder, rank, documents, dtype='<u2'):
    """As DocumentTokenizer writes: documents by bytes, each with the end-of-text token behind."""
    folder.mkdir(exist_ok=True)
    path = folder / f'{rank:05d}_00000_doc_shuffled.ds'
    ids = [np.append(np.frombuffer(text.encode(), 'u1').astype(dtype), END).astype(dtype)
           for text in documents]
    path.write_bytes(b''.join(document.tobytes() for document in ids))
    ends = np.cumsum([len(document) for document in ids]).astype('<u8')
    (folder / f'{path.name}.index').write_bytes(ends.tobytes())
    return path


@pytest.fixture
def shards(tmp_path):
    """{path of a shard: its documents}, three of them and an empty one."""
    texts = [[f'{rank} {i} ' + 'word ' * (i % 7) for i in range(count)]
             for rank, count in enumerate((40, 30, 0, 50))]
    return {write_shard(tmp_path / 'tokens', rank, documents): documents
            for rank, documents in enumerate(texts)}


def documents_of(folder, *splits):
    """The token ids of each document, without ends of text."""
    dataset, found = open_dataset(folder), []
    end = dataset.tokenizer().end_of_text
    for split in splits:
        ids = dataset.split(split).read(0, 10**9)
        found += [tuple(part[part != end].tolist())
                  for part in np.split(ids, np.flatnonzero(ids == end))]
    return [document for document in found if document]


@pytest.mark.parametrize('dtype', ['<u2', '<u4'])
def test_each_shard_is_cut_between_documents_and_not_copied(dtype, tmp_path, shards, capsys):
    for rank, documents in enumerate(shards.values()):
        write_shard(tmp_path / 'tokens', rank, documents, dtype)
    argv = ['datatrove', f'--input={tmp_path}/tokens', '--tokenizer=byte', '--val_fraction=0.1',
            f'--data_dir={tmp_path}/d']
    prepare.main(argv)
    given = [[tuple(text.encode()) for text in documents] for documents in shards.values()]
    assert documents_of(tmp_path / 'd', 'train') == [
        text for documents in given for text in documents[:len(documents) * 9 // 10]]
    assert documents_of(tmp_path / 'd', 'val') == [
        text for documents in given for text in documents[len(documents) * 9 // 10:]]
    dataset = open_dataset(tmp_path / 'd')
    assert all(path.is_symlink() for path in (tmp_path / 'd').glob('*.bin'))
    assert dataset.meta['dtype'] == ('uint16' if dtype == '<u2' else 'uint32')
    assert dataset.split_entry('val')['documents'] == 12
    prepare.main(['inspect', f'{tmp_path}/d'])
    capsys.readouterr()
    prepare.main(argv)
    assert 'already prepared' in capsys.readouterr().out


def test_few_documents_in_each_shard_have_their_share_together(tmp_path):
    for rank in range(20):
        write_shard(tmp_path / 'tokens', rank, ['a few words'] * 10)
    prepare.main(['datatrove', f'--input={tmp_path}/tokens', '--tokenizer=byte',
                  f'--data_dir={tmp_path}/d'])
    assert len(documents_of(tmp_path / 'd', 'val')) == 2


def test_bad_input_is_one_line(tmp_path, shards, capsys, monkeypatch):
    first = next(iter(shards))
    index = first.with_name(f'{first.name}.index')
    ends = np.fromfile(index, '<u8')

    def refused(words, *argv, folder=tmp_path / 'tokens'):
        assert words in fails(capsys, monkeypatch, prepare.main, 'datatrove', f'--input={folder}',
                              f'--data_dir={tmp_path}/d', '--tokenizer=byte', *argv)
        assert not (tmp_path / 'd').exists()

    refused('datatrove needs --tokenizer', '--tokenizer=bpe:512')
    refused('train split would be empty', '--val_fraction=0.9999')
    for wrong in (ends[:-1], ends * 3, ends[:0]):
        wrong.tofile(index)
        refused('does not fit')
    index.unlink()
    refused('No such file')
    write_shard(tmp_path / 'tokens', 0, ['a'] * 9)
    with open(first, 'r+b') as f:
        f.write(b'\xff\xff')
    refused('token 0 has id 65535')


@pytest.mark.slow
def test_datatrove_makes_the_tokens_that_prepare_makes(text_file, tmp_path, monkeypatch, capsys):
    pytest.importorskip('datatrove')
    lines = text_file.read_text(encoding='utf-8').split('\n')
    texts = [f'{i}: ' + '\n'.join(lines[5 * i:5 * i + 7]) for i in range(400)] \
        + ['Hello, wörld!  日本語\n\n\t 12345 ', '🎉🎉\r\n', 'aaa']
    (tmp_path / 'corpus').mkdir()
    for i in range(3):
        (tmp_path / f'corpus/{i}.jsonl').write_text(
            ''.join(json.dumps({'text': text}) + '\n' for text in texts[i::3]))
    monkeypatch.chdir(tmp_path)
    prepare.main(['text', '--input=corpus/0.jsonl', '--tokenizer=bpe:512',
                  '--data_dir=data/sample'])
    train.main([*TINY, '--dataset=sample', '--out_dir=out', '--max_iters=1'])
    export.main(['--out_dir=out', '--dest=sample-gpt'])
    page = (ROOT / 'docs/data.md').read_text(encoding='utf-8')
    (script,) = re.findall(r'```python\n([^`]*DocumentTokenizer[^`]*)```', page)
    assert 'tasks=64' in script
    (tmp_path / 'encode.py').write_text(script.replace('tasks=64, workers=16',
                                                       'tasks=3, workers=2'))
    done = subprocess.run([sys.executable, 'encode.py'], capture_output=True, text=True,
                          timeout=300, env={**os.environ, 'HF_HUB_OFFLINE': '1'})
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / 'tokens').glob('*.ds')]) == 3
    prepare.main(['datatrove', '--input=tokens', '--tokenizer=sample', '--data_dir=data/web'])
    prepare.main(['text', '--input=corpus/', '--tokenizer=sample', '--data_dir=data/ours'])
    theirs, ours = (documents_of(f'data/{name}', 'train', 'val') for name in ('web', 'ours'))
    assert sorted(theirs) == sorted(ours) and len(ours) == len(texts)
    prepare.main(['inspect', 'data/web'])
    assert 'no damage found' in capsys.readouterr().out
    train.main([*TINY, '--dataset=web', '--out_dir=web', '--max_iters=2', '--eval_interval=2'])
    assert 'iter 2 | train loss' in capsys.readouterr().out
