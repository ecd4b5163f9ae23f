"""The kinds of input that prepare.py reads: their documents, also after kills, and their errors."""

import csv
import gzip
import io
import json
import random
from itertools import chain
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from corpus_files import (
    contents,
    documents_of,
    killed,
    prepared,
    split_bytes,
    write_rows,
)

import prepare
from plaingpt.core.dataset import SPLITS, open_dataset
from plaingpt.system.formatting import shown

chance = random.Random(0)
WORDS = ['to', 'be', 'ör', '"not"', 'that, is', 'the;', 'question', '[1]', '日本', '😀']
TEXTS = [' '.join([f'{i}', *chance.choices(WORDS, k=chance.randrange(200))]) for i in range(300)]


def jsonl(texts):
    return ''.join(json.dumps({'id': 1, 'text': text}) + '\n' for text in texts).encode()


def table(texts, delimiter=','):
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows([('id', 'text'), *((1, t) for t in texts)])
    return file.getvalue().encode()


def parquet(**columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def arrow(new_file, **columns):
    file, table = io.BytesIO(), pyarrow.table(columns)
    with new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return file.getvalue()


ARRAY = json.dumps([{'text': text} for text in TEXTS], indent=1, ensure_ascii=False)
OBJECT = {'version': 1, 'languages': ['en'], 'data': [{'id': 1, 'text': text} for text in TEXTS]}
ROWS = {'a.jsonl': jsonl(TEXTS), 'lines.json': jsonl(TEXTS),
        'array.json': ARRAY.encode(), 'bom.json': b'\xef\xbb\xbf' + ARRAY.encode(),
        'utf-16.json': ARRAY.encode('utf-16'), 'utf-16.csv': table(TEXTS).decode().encode('utf-16'),
        'object.json': json.dumps(OBJECT).encode(),
        'indented.json': json.dumps(OBJECT, indent=2).encode(),
        'stream.arrow': arrow(pyarrow.ipc.new_stream, text=TEXTS, id=TEXTS),
        'file.arrow': arrow(pyarrow.ipc.new_file, text=TEXTS, id=TEXTS),
        'a.csv': table(TEXTS), 'a.tsv': table(TEXTS, '\t'),
        'a.parquet': parquet(text=TEXTS), 'bom.jsonl': b'\xef\xbb\xbf' + jsonl(TEXTS)}
LINES = '\n'.join(TEXTS)
LATIN = [f'{n} é' * 50 for n in range(300)]
# name → (files, what prepare.py is told of them, the documents that come out)
KINDS = {
    **{name: ({name: data}, [name], TEXTS) for name, data in ROWS.items()},
    'packed': ({'a.jsonl.GZ': gzip.compress(jsonl(TEXTS[:9])) + gzip.compress(jsonl(TEXTS[9:]))},
               ['a.jsonl.GZ'], TEXTS),
    'no header': ({'a.csv': table(TEXTS).split(b'\n', 1)[1]}, ['a.csv', '--text_field=2'], TEXTS),
    'paragraphs': ({'a.txt': '\n\n'.join(TEXTS).encode()}, ['a.txt', '--documents=paragraph'],
                   [text for text in TEXTS if text.strip()]),
    'latin-1': ({'a.csv': table(LATIN).decode().encode('latin-1')},
                ['a.csv', '--encoding=latin-1'], LATIN),
    'folder': ({f'in/{n:03}.md': text.encode() for n, text in enumerate(TEXTS)}, ['in'], TEXTS),
    'lines': ({'a.txt.gz': gzip.compress(LINES.encode())}, ['a.txt.gz', '--documents=line'], TEXTS),
    'hub': ({f'hub/train-{n:05}-of-00003.parquet': parquet(body=TEXTS[100 * n:100 * n + 100])
             for n in range(3)}, ['hub', '--text_field=body'], TEXTS),
    'chat': ({'a.jsonl': ''.join(json.dumps({'asked': text, 'said': text}) + '\n'
                                 for text in TEXTS).encode()},
             ['a.jsonl', '--prompt=asked', '--completion=said'], None)}
CORPORA = {'hub': 'hf', 'chat': 'chat'}


def command(kind):
    """Write the files of a kind → the command that prepares them."""
    files, argv, _ = KINDS[kind]
    for name, data in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)
    return [CORPORA.get(kind, 'text'), *argv, '--tokenizer=byte', '--val_fraction=0.2',
            '--shard_tokens=5_000']


@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind != 'chat'])
def test_each_kind_of_input_gives_its_documents(kind):
    prepare.main([*command(kind), '--data_dir=d'])
    documents = documents_of('d')
    assert sorted(chain(*documents.values())) == sorted(KINDS[kind][2])
    assert min(map(len, documents.values())) > 10


@pytest.mark.parametrize(('kind', 'options'), [
    ('a.jsonl', ['--max_tokens=40_000']), ('chat', []),
    pytest.param('folder', [], marks=pytest.mark.slow),
    pytest.param('hub', [], marks=pytest.mark.slow)])
def test_threads_that_are_killed_write_the_same_bytes(kind, options, small_batches, capsys):
    argv = [*command(kind), *options]
    prepare.main([*argv, '--data_dir=whole', '--num_proc=1'])
    argv += ['--data_dir=killed', '--num_proc=3']
    for n in (25, 20):
        assert killed(n, argv, 'killed') == 9
    capsys.readouterr()
    prepare.main(argv)
    assert 'resuming' in capsys.readouterr().out
    assert contents(Path('whole')) == contents(Path('killed'))


@pytest.mark.parametrize('corpus', ['text', 'hf', 'chat'])
def test_a_folder_that_datasets_saved_gives_the_rows_of_its_splits(corpus):
    import datasets
    rows = [{'text': text, 'question': f'{i}?', 'answer': text} for i, text in enumerate(TEXTS)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk('one', num_shards=2)
    datasets.DatasetDict(train=dataset.select(range(200)), test=dataset.select(range(200, 300)),
                         ).save_to_disk('two')
    argv = [corpus, 'one', '--tokenizer=byte', '--data_dir=d']
    prepare.main(argv)
    assert sum(open_dataset('d').split_entry(split)['documents'] for split in SPLITS) == 300
    if corpus != 'text':
        prepare.main([corpus, 'two', '--val_split=test', '--tokenizer=byte', '--data_dir=e'])
        assert [open_dataset('e').split_entry(split)['documents'] for split in SPLITS] == [200, 100]


# -----------------------------------------------------------------------------
# --max_tokens


def test_max_tokens_trains_on_exactly_the_first_ones(tmp_path):
    limit = 9_876
    write_rows(tmp_path / 'a.jsonl', TEXTS)
    argv = ['text', tmp_path / 'a.jsonl', '--val_fraction=0.2', '--shard_tokens=4_000']
    _, all_val = prepared(tmp_path / 'all', *argv)
    _, val = prepared(tmp_path / 'd', *argv, f'--max_tokens={limit}')
    train = split_bytes(tmp_path / 'd', 'train')
    assert len(train) == limit
    assert train == split_bytes(tmp_path / 'all', 'train')[:limit]
    assert val == all_val[:len(val)]
    assert 0 < len(val) < len(all_val)
    entry = open_dataset(tmp_path / 'd').split_entry('train')
    assert entry['documents'] == train.count(0)
    assert entry['bytes'] == limit - train.count(0)


def test_few_training_tokens_leave_validation_text(tmp_path):
    write_rows(tmp_path / 'a.jsonl', TEXTS)
    _, [text] = prepared(tmp_path / 'd', 'text', tmp_path / 'a.jsonl', '--max_tokens=1')
    assert text in TEXTS


def test_numbers_are_read_as_people_write_them():
    for text, number in (
            ('100M', 10**8), ('1.1b', 1_100_000_000), ('1e8', 10**8), ('100_000_000', 10**8),
            (10**8, 10**8), ('3k', 3000), ('0', 0), ('M', None), ('-1', None), ('1T', None)):
        assert prepare.parse_count(text) == number, text


# -----------------------------------------------------------------------------
# faults

DAMAGED = gzip.compress(random.Random(0).randbytes(50_000).hex().encode())[:-9]
REFUSED = [  # a file, its bytes, and what the line has beside its name
    ('a.jsonl', b'\n{"text": "one', ['line 2']),
    ('a.json', b'[{"text": "one"},\n{"text": }]', ['line 2 column 10']),
    ('a.csv', b'id,text\n\n1,"a\nb"\n2,c,d\n', ['line 5']),
    ('a.csv', b'id,text\n1,"a" b\n', ['line 2']), ('mac.csv', b'id,text\r1,a\r', ['line 1']),
    ('a.csv', b'id,body\n1,one\n', ['line 2', "'body'", '--text_field']),
    ('faq.csv', b'Question,Answer\nhi,yo\n', ['line 2', "'Question'", 'prepare.py chat']),
    ('a.jsonl', b'{"messages": [{"role": "user", "content": "hi"}]}', ['prepare.py chat']),
    ('a.parquet', b'x', []),
    ('a.json', b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', ["'train', 'test'"]),
    ('a.arrow', b'x', []),
    ('a.txt', 'one'.encode('utf-16-le'), ['--encoding']),
    ('a.txt', b'one\ntwo\ncaf\xe9', ['--encoding']),
    ('a.txt.gz', DAMAGED, [])]


@pytest.mark.parametrize(('name', 'data', 'words'), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_cannot_be_read_is_one_line_with_the_place(
        name, data, words, tmp_path, refused):
    (tmp_path / name).write_bytes(data)
    line = refused('text', f'--input={tmp_path}/{name}', '--tokenizer=char')
    for word in (shown(tmp_path / name), *words):
        assert word in line
    assert ('--encoding' in line) == ('--encoding' in words)
