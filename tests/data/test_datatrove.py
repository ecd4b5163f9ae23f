"""Tokens that datatrove's DocumentTokenizer wrote."""

import json
import re
import sys

import numpy as np
import pytest
from processes import ROOT, run
from runs import TINY, lines

import export
import prepare
import train
from plaingpt.core.dataset import open_dataset
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
    dataset = open_dataset(folder)
    ids = np.concatenate([dataset.split(split).read(0, 10**9) for split in splits])
    end = dataset.tokenizer().end_of_text
    documents = [tuple(part[part != end].tolist())
                 for part in np.split(ids, np.flatnonzero(ids == end))]
    return [document for document in documents if document]


@pytest.mark.parametrize('dtype', ['<u2', '<u4'])
def test_each_shard_is_split_between_documents(dtype, tmp_path, shards):
    for rank, documents in enumerate(shards.values()):
        write_shard(tmp_path / 'tokens', rank, documents, dtype)
    prepare.main(['datatrove', f'--input={tmp_path}/tokens', '--tokenizer=byte',
                  '--val_fraction=0.1', f'--data_dir={tmp_path}/d'])
    dataset = open_dataset(tmp_path / 'd')
    train, val = [], []
    for documents in shards.values():
        ids = [tuple(text.encode()) for text in documents]
        train += ids[:len(ids) * 9 // 10]
        val += ids[len(ids) * 9 // 10:]
    assert documents_of(tmp_path / 'd', 'train') == train
    assert documents_of(tmp_path / 'd', 'val') == val
    assert dataset.meta['dtype'] == ('uint16' if dtype == '<u2' else 'uint32')
    assert dataset.split_entry('val')['documents'] == len(val)
    assert all(path.is_symlink() for path in (tmp_path / 'd').glob('*.bin'))  # not copied


def test_a_tokenizer_that_has_no_ids_yet_is_refused(tmp_path, shards, refused):
    assert '--tokenizer' in refused('datatrove', f'--input={tmp_path}/tokens',
                                    '--tokenizer=bpe:512')


@pytest.mark.parametrize('change', [lambda ends: ends[:-1], lambda ends: ends * 3,
                                    lambda ends: ends[:0]])
def test_an_index_that_does_not_fit_its_shard_is_refused(change, tmp_path, shards, refused):
    index = tmp_path / 'tokens/00000_00000_doc_shuffled.ds.index'
    change(np.fromfile(index, '<u8')).tofile(index)
    assert '00000_00000_doc_shuffled.ds' in refused('datatrove', f'--input={tmp_path}/tokens')


@pytest.mark.slow
def test_datatrove_makes_the_tokens_that_prepare_makes(text_file, tmp_path):
    pytest.importorskip('datatrove')
    code = text_file.read_text(encoding='utf-8').split('\n')
    texts = [f'{i}: ' + '\n'.join(code[5 * i:5 * i + 7]) for i in range(400)] \
        + ['Hello, wörld!  日本語\n\n\t 12345 ', '🎉🎉\r\n', 'aaa']
    (tmp_path / 'corpus').mkdir()
    for i in range(3):
        (tmp_path / f'corpus/{i}.jsonl').write_text(
            ''.join(json.dumps({'text': text}) + '\n' for text in texts[i::3]))
    prepare.main(['text', '--input=corpus/0.jsonl', '--tokenizer=bpe:512',
                  '--data_dir=data/sample'])
    train.main([*TINY, '--dataset=sample', '--out_dir=out', '--max_iters=1'])
    export.main(['--out_dir=out', '--dest=sample-gpt'])
    page = (ROOT / 'docs/data.md').read_text(encoding='utf-8')
    (script,) = re.findall(r'```python\n([^`]*DocumentTokenizer[^`]*)```', page)
    assert 'tasks=64' in script
    (tmp_path / 'encode.py').write_text(script.replace('tasks=64, workers=16',
                                                       'tasks=3, workers=2'))
    run(sys.executable, 'encode.py')
    assert len([*(tmp_path / 'tokens').glob('*.ds')]) == 3
    prepare.main(['datatrove', '--input=tokens', '--tokenizer=sample', '--data_dir=data/web'])
    prepare.main(['text', '--input=corpus/', '--tokenizer=sample', '--data_dir=data/ours'])
    theirs, ours = (documents_of(f'data/{name}', 'train', 'val') for name in ('web', 'ours'))
    assert sorted(theirs) == sorted(ours) and len(ours) == len(texts)
    train.main([*TINY, '--dataset=web', '--out_dir=web', '--max_iters=2'])
    assert [row['iter'] for row in lines(tmp_path / 'web', 'loss')] == [1, 2]
