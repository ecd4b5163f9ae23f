"""Each kind of input that prepare.py reads: its documents, the same after kills, and its errors."""

import csv
import gzip
import io
import json
import random
from itertools import chain

import pyarrow
import pyarrow.parquet
import pytest
from corpus_files import (
    contents,
    documents_of,
    killed,
    prepared,
    split_bytes,
    write_files,
    write_parquet,
    write_rows,
)
from processes import fails

import prepare
from plaingpt.data import encoding, text_files
from plaingpt.data.dataset import open_dataset
from plaingpt.data.documents import Files
from plaingpt.data.rows import TextReader
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


ROWS = {'a.jsonl': jsonl(TEXTS), 'a.NDJSON': jsonl(TEXTS), 'lines.json': jsonl(TEXTS),
        'array.json': json.dumps([{'text': text} for text in TEXTS], indent=1).encode(),
        'content.jsonl': jsonl(TEXTS).replace(b'"text"', b'"content"'),
        'a.csv': table(TEXTS), 'a.tsv': table(TEXTS, '\t'),
        'a.parquet': parquet(text=TEXTS),
        'bom.jsonl': b'\xef\xbb\xbf' + jsonl(TEXTS), 'crlf.csv': table(TEXTS)}
LINES = '\n'.join(TEXTS)
LATIN = [f'{n} é' * 50 for n in range(300)]
# name → (files, what prepare.py is told of them, the documents that come out)
KINDS = {
    **{name: ({name: data}, [name], TEXTS) for name, data in ROWS.items()},
    'packed': ({'a.jsonl.GZ': gzip.compress(jsonl(TEXTS[:9])) + gzip.compress(jsonl(TEXTS[9:]))},
               ['a.jsonl.GZ'], TEXTS),
    'null': ({'a.jsonl': jsonl([None, *TEXTS, None, ' ']).replace(b'"text"', b'"body"')},
             ['a.jsonl', '--text_field=body'], TEXTS),
    'latin-1': ({'a.csv': table(LATIN).decode().encode('latin-1')},
                ['a.csv', '--encoding=latin-1'], LATIN),
    'utf-16': ({'a.txt': LINES.encode('utf-16')},
               ['a.txt', '--encoding=utf-16', '--documents=line'], TEXTS),
    'folder': ({f'in/{n:03}.md': text.encode() for n, text in enumerate(TEXTS)}, ['in'], TEXTS),
    'folders and globs': (
        {'in/a.jsonl': jsonl(TEXTS[:50]), 'in/b/c.jsonl': jsonl(TEXTS[50:60]), 'in/x.bin': b'\xff',
         'in/.hidden.txt': b'no', 'd.csv': table(TEXTS[60:])}, ['in/', '*.csv', 'in/a.jsonl'],
        TEXTS),
    'lines': ({'a.txt.gz': gzip.compress(LINES.encode())}, ['a.txt.gz', '--documents=line'], TEXTS),
    'hub': ({f'hub/train-{n:05}-of-00003.parquet': parquet(body=TEXTS[100 * n:100 * n + 100])
             for n in range(3)}, ['hub', '--text_field=body'], TEXTS),
    'chat': ({'a.jsonl': ''.join(json.dumps({'asked': text, 'said': text}) + '\n'
                                 for text in TEXTS).encode()},
             ['a.jsonl', '--prompt=asked', '--completion=said'], None)}


@pytest.mark.parametrize('kind', KINDS)
def test_a_kind_gives_its_documents_and_the_same_bytes_after_kills(
        kind, tmp_path, monkeypatch, capsys):
    files, argv, wanted = KINDS[kind]
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    corpus = {'hub': 'hf', 'chat': 'chat'}.get(kind.split(',')[0], 'text')
    argv = [corpus, *argv, '--tokenizer=byte', '--val_fraction=0.2', '--shard_tokens=5_000']
    prepare.main([*argv, '--data_dir=whole'])
    if wanted:
        found = documents_of(tmp_path / 'whole')
        assert sorted(chain(*found.values())) == sorted(wanted)
        assert min(map(len, found.values())) > 10
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 2**12)
    monkeypatch.setattr(text_files, 'BLOCK_CHARS', 1001)
    prepare.main([*argv, '--data_dir=threads', '--num_proc=3'])
    argv += ['--data_dir=killed', '--num_proc=2']
    for n in (25, 20):
        assert killed(n, argv, 'killed') == 9
    capsys.readouterr()
    prepare.main(argv)
    assert 'resuming after' in capsys.readouterr().out
    assert contents(tmp_path / 'whole') == contents(tmp_path / 'threads') \
        == contents(tmp_path / 'killed')
    prepare.main(argv)
    assert 'is already prepared by this command' in capsys.readouterr().out
    line = fails(capsys, monkeypatch, prepare.main, *argv, '--val_fraction=0.3')
    assert 'holds another dataset (val_fraction 0.2, not 0.3)' in line
    assert '--overwrite' in line and '--data_dir' in line
    assert contents(tmp_path / 'whole') == contents(tmp_path / 'killed')


# -----------------------------------------------------------------------------
# text


def test_a_few_files_are_one_text_joined_at_line_breaks(tmp_path):
    spaces = ' ' * (2**20 + 5)
    folder = write_files(tmp_path / 'in', 'one', 'TWO\n', 'three\r\n', 'four', ' \n',
                         f'{spaces}five', 'six')
    source = Files(sorted(folder.iterdir()), 'in', TextReader())
    assert ''.join(piece.text for piece in source.pieces()) \
        == f'one\nTWO\nthree\r\nfour\n{spaces}five\nsix'
    assert source.file_chars == [3, 4, 7, 4, len(spaces) + 4, 3]


def test_each_of_a_few_files_gives_its_end_for_validation(tmp_path):
    folder = write_files(tmp_path / 'in', 'a' * 1000, 'b' * 500 + '\n', 'c' * 10)
    prepare.main(['text', f'--input={folder}', '--tokenizer=byte', f'--data_dir={tmp_path}/d'])
    train, val = (split_bytes(tmp_path / 'd', split).decode() for split in ('train', 'val'))
    assert train == '\n'.join(['a' * 900, 'b' * 450, 'c' * 9])
    assert val == '\n'.join(['a' * 100, 'b' * 50, 'c'])


# -----------------------------------------------------------------------------
# --max_tokens


@pytest.mark.parametrize('limit', [9_876, 20_000])
def test_max_tokens_trains_on_exactly_the_first_ones(limit, tmp_path, monkeypatch):
    write_rows(tmp_path / 'a.jsonl', TEXTS)
    argv = ['text', tmp_path / 'a.jsonl', '--val_fraction=0.2', '--shard_tokens=4_000']
    _, val = prepared(tmp_path / 'all', *argv)
    argv += [f'--max_tokens={limit}']
    _, first = prepared(tmp_path / 'd', *argv)
    train = split_bytes(tmp_path / 'd', 'train')
    assert train == split_bytes(tmp_path / 'all', 'train')[:limit] and len(train) == limit
    assert first == val[:len(first)] and 0 < len(first) < len(val)
    entry = open_dataset(tmp_path / 'd').split_entry('train')
    assert entry['documents'] == train.count(0) and entry['bytes'] == limit - train.count(0)
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 2**13)
    argv = [*argv, '--tokenizer=byte', f'--data_dir={tmp_path}/killed', '--num_proc=3']
    assert killed(9, argv, tmp_path / 'killed') == 9
    prepare.main([*map(str, argv)])
    assert contents(tmp_path / 'killed') == contents(tmp_path / 'd')


def test_numbers_are_read_as_people_write_them():
    for text, number in (
            ('100M', 10**8), ('1.5B', 1_500_000_000), ('1.1b', 1_100_000_000), ('1e8', 10**8),
            ('100_000_000', 10**8), (10**8, 10**8), ('3k', 3000), ('2G', 2 * 10**9), ('0', 0),
            ('M', None), ('-1', None), ('1T', None)):
        assert prepare.parse_count(text) == number, text


# -----------------------------------------------------------------------------
# the hub


def test_splits_of_a_dataset_of_the_hub_are_taken_as_they_are(tmp_path):
    for split, texts in (('train', TEXTS), ('validation', ['held', 'out']), ('test', ['1', '2'])):
        write_parquet(tmp_path / f'hub/{split}.parquet', texts)
    for argv, found in (
            (['hf', tmp_path / 'hub', '--val_split=validation'], [TEXTS, ['held', 'out']]),
            (['tinystories', f'--input={tmp_path}/hub'], [TEXTS, ['held', 'out']]),
            (['hf', f'--input={tmp_path}/hub', '--split=validation', '--val_split=test'],
             [['held', 'out'], ['1', '2']])):
        assert prepared(tmp_path / 'd', *argv, '--overwrite') == found
    prepare.main(['hf', f'{tmp_path}/hub', '--val_split=test', '--max_tokens=100',
                  '--tokenizer=byte', f'--data_dir={tmp_path}/few'])
    assert split_bytes(tmp_path / 'few', 'val') == b'\x001\x002'
    assert len(split_bytes(tmp_path / 'few', 'train')) == 100


# -----------------------------------------------------------------------------
# faults

REFUSED = [
    ('a.jsonl', b'\n{"text": "one', ', line 2: not JSON: '),
    ('a.json', b'[{"text": "one"},\n{"text": }]', ': not JSON: Expecting value: line 2 column 10'),
    ('a.json', b'[{"text": "one"}, {"text": 7}]', ", row 2: field 'text' is int and not text"),
    ('a\nb.jsonl', b'7', ", line 1: no field 'text', it has no columns"),
    ('a.csv', b'id,text\n\n1,"a\nb"\n2,c,d\n', ', line 5: another number of columns'),
    ('a.csv', b'id,text\n1,one\n2,"two\n', ', line 3: a quote that is not closed'),
    ('a.csv', b'id,text,text\n1,one,two\n', ", line 1: two columns are called 'text'"),
    ('a.txt', 'one'.encode('utf-16-le'), ': not UTF-8 text'),
    ('a.csv', b'id,body\n1,one\n', ", line 2: no field 'text', it has 'id', 'body': choose"),
    ('a.parquet', parquet(body=['x']), ", row 1: no field 'text', it has 'body'"),
    ('a.parquet', b'x', ': cannot be read ('),
    ('a.txt', b'one\ntwo\ncaf\xe9', ': not UTF-8 ('),
    ('a.txt.gz', gzip.compress(random.Random(0).randbytes(50_000).hex().encode())[:-9],
     ': cannot be read (')]


@pytest.mark.parametrize(('name', 'data', 'words'), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_read_is_one_line_that_names_the_file_and_the_place(
        name, data, words, tmp_path, refused):
    (tmp_path / name).write_bytes(data)
    line = refused('text', f'--input={tmp_path}/{name}', '--tokenizer=char')
    assert f'error: {shown(tmp_path / name)}{words}' in line
    assert ('UTF-8' in words) == ('--encoding' in line)
