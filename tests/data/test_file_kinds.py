"""What a file holds: each kind of file gives exactly its documents, or is refused in one line."""

import gzip
import io
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from corpus_files import split_bytes, texts_of

import prepare
from plaingpt.data import documents
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import shown

BOM = b'\xef\xbb\xbf'
LINES = b'{"text": "one"}\n{"id": 2, "text": "two"}\n'
ARRAY = b'[{"text": "one"},\n {"id": 2, "text": "two"}]\n'
CSV = b'id,text\r\n1,one\r\n2,"two, ""2"",\r\nlines"\r\n'
QUOTED = 'two, "2",\r\nlines'
NESTED = b'{"a": {"b": "in"}}\n{"a.b": "key", "a": {"b": "in"}}\n{"a": null}\n'
STRUCT = {'a.b': ['key', 'key'], 'a': [{'b': 'in', 'c': [1]}, None]}
SPACES = b' ' * (2**18 + 5)


def parquet(**columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def no_utf8():
    """A column of text, of which the second is not UTF-8."""
    offsets, data = pyarrow.array([0, 2, 5], pyarrow.int32()).buffers()[1], b'okx\xffy'
    return pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(data)])


def tar():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode='w') as packed:
        packed.addfile(tarfile.TarInfo('a.txt'))
    return file.getvalue()


READ = [
    # JSON
    ('a.jsonl', LINES, ['one', 'two'], {}),
    ('a.NDJSON', LINES, ['one', 'two'], {}),
    ('a.Json', ARRAY, ['one', 'two'], {}),
    ('a.JSON.GZ', gzip.compress(ARRAY), ['one', 'two'], {}),
    ('a.ndjson.zst', zstandard.compress(LINES), ['one', 'two'], {}),
    ('a.json', b'{\n  "text": "one",\n  "id": 1\n}\n{"text": "two"}', ['one', 'two'], {}),
    ('a.json', b'[{"text": null}, {"text": " "}, {"text": "a]}, {"}]', ['a]}, {'], {}),
    ('a.json', b'[{"id": %s, "text": "one"}]' % (b'9' * 5000), ['one'], {}),
    ('a.json', b' \n', [], {}),
    ('a.json', BOM + ARRAY, ['one', 'two'], {}),
    ('a.jsonl', BOM + LINES.replace(b'\n', b'\r\n'), ['one', 'two'], {}),
    ('a.json', '[{"text": "ä\\u00e9\\ud83d\\ude00\\n"}]'.encode(), ['äé😀\n'], {}),
    ('a.jsonl', br'{"text": "\ud83d\ude00\ud83d \\udc80"}', ['😀\ufffd \\udc80'], {}),
    # U+DC80 to U+DCFF are what bytes that are no UTF-8 become; no escape is a byte
    ('a.json', br'{"text": "\udc80\ud83d' + b'\xff"}', ['\ufffd\ufffd\udcff'],
     {'errors': 'surrogateescape'}),
    ('a.jsonl', NESTED, ['in', 'key'], {'field': 'a.b'}),
    ('a.json', b'{"a.b": {"c.d": "deep"}}', ['deep'], {'field': 'a.b.c.d'}),
    # CSV and TSV
    ('a.csv', CSV, ['one', QUOTED], {}),
    ('a.csv', BOM + b'text\na\n\n"b"\n', ['a', 'b'], {}),
    ('a.tsv', b'id\ttext\n1\tone, two\n2\t"a\tb"\n', ['one, two', 'a\tb'], {}),
    ('a.csv', b'text,id\n"' + b'long ' * 40_000 + b'",1\n', ['long ' * 40_000], {}),
    # Parquet
    ('a.PARQUET', parquet(text=['one', None, 'two']), ['one', 'two'], {}),
    ('a.parquet', parquet(**STRUCT), ['key', 'key'], {'field': 'a.b'}),
    ('a.parquet', parquet(a=STRUCT['a']), ['in'], {'field': 'a.b'}),
    ('a.parquet', parquet(text=no_utf8()), ['ok', 'x\ufffdy'], {'errors': 'replace'}),
    ('a.parquet', parquet(text=no_utf8()), ['ok', 'x\udcffy'], {'errors': 'surrogateescape'}),
    # text
    ('a.TXT', LINES, [LINES.decode()], {}),
    ('a.TXT.GZ', gzip.compress(BOM + b'text'), ['text'], {}),
    ('a.txt', BOM + b'text' + BOM, ['text\ufeff'], {}),
    ('a.txt', b'GIF89a and %PDF are', ['GIF89a and %PDF are'], {}),
    ('a.txt.gz', gzip.compress(b'te') + bytes(9) + gzip.compress(b'xt') + bytes(999), ['text'], {}),
    ('a.txt', SPACES + b'text' + SPACES, [SPACES.decode() + 'text' + SPACES.decode()], {}),
    ('a.txt', SPACES, [], {}),
    ('a.txt.zst', zstandard.compress(b'one\r\n\r\ntwo') * 2, ['one', 'twoone', 'two'],
     {'form': 'line'})]


@pytest.mark.parametrize(('name', 'data', 'expected', 'options'), READ, ids=range(len(READ)))
def test_a_file_gives_exactly_its_documents_wherever_its_blocks_end(
        name, data, expected, options, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(data)
    assert texts_of(tmp_path / name, **options) == expected
    monkeypatch.setattr(documents, 'SIGNATURE_BYTES', 4)
    for block in (5, 7, 16) if len(data) < 1000 else (len(data) // 10,):
        monkeypatch.setattr(documents, 'BLOCK_BYTES', block)
        assert texts_of(tmp_path / name, **options) == expected, block


REFUSED = [
    # JSON
    ('a.json', b'[{"text": "one"},\n{"text": }]', ', line 2: not JSON'),
    ('a.json', b'[{"text": "one"}\n{"text": "two"}]', ', line 2: not JSON: the array has no comma'),
    ('a.json', b'{"data": [{"text": "one"}]}', ", row 1: no field 'text', it has 'data'"),
    ('a.json', b'{"text": "a", "text": "b"}', ", row 1: an object has the key 'text' twice"),
    ('a.json', b'[' * 200_000, ', row 1: nested too deep'),
    ('a.jsonl', b'\n{"text": "one', ', line 2: not JSON: Unterminated string at column 10'),
    ('a.jsonl', b'{"text": "one"} {}', ', line 1: not JSON: more than one value'),
    ('a.jsonl', b'{"text": 7}\n', ", line 1: field 'text' is int and not text"),
    ('a\nb.jsonl', b'{}', "a\\nb.jsonl, line 1: no field 'text'"),
    # CSV and TSV
    ('a.csv', b'id,text\n1,"a\nb"\n2\n', ', line 4: not CSV: 1 column, and 2 in'),
    ('a.tsv', b'id\ttext\n1\ta\tb\n', ', line 2: not TSV: 3 columns'),
    ('a.csv', b'id,text\n1,"one\n2,two\n', ', line 2: not CSV: unexpected end'),
    ('a.csv', b'id\ttext\n1\tone\n', 'name it .tsv'),
    ('a.csv', b'text,text\none,two\n', ", line 1: 2 columns are called 'text'"),
    # Parquet
    ('a.parquet', parquet(text=no_utf8()), ', row 2: not UTF-8 at byte 1'),
    ('a.parquet', parquet(text=[['a'], ['b', 'c']]), "field 'text' is nested and not text"),
    ('a.parquet', parquet(url=['x']), "no field 'text', it has 'url'"),
    ('a.parquet', b'PAR1 and nothing else', 'cannot be read'),
    # what has to be unpacked, by the name
    *((f'a{ending}', b'', f'{ending.lower()} files are not read: unpack it') for ending in (
        '.zip', '.tar', '.tar.gz', '.tar.ZST', '.TGZ', '.7z', '.rar', '.bz2', '.xz',
        '.parquet.gz')),
    # what is no text, by the content
    ('a.txt', b'PK\3\4', 'this is a zip archive'),
    ('a.gz', gzip.compress(tar()), 'this is a tar archive'),
    ('a.txt', gzip.compress(b'text'), 'this is gzip and no text: name it .gz'),
    ('a.jsonl', zstandard.compress(LINES), 'this is Zstandard'),
    ('a.txt', b'%PDF-1.7\n', 'this is a PDF'),
    ('a\nb.txt', b'text and\0more', 'a\\nb.txt: no text, byte 8 is NUL'),
    ('a b.txt', 'text'.encode('utf-16'), "UTF-16 text: convert it: iconv -f UTF-16 -t UTF-8 '"),
    ('a.json', '{"text": "a"}'.encode('utf-16-le'), 'UTF-16 text: convert it: iconv -f UTF-16LE'),
    ('a.txt', BOM + b'caf\xe9', 'not UTF-8 at byte 6: convert it, for example with iconv'),
    # compressed files
    ('a.txt.gz', gzip.compress(b'text' * 9999)[:-20], 'cut short after'),
    ('a.txt.zst', zstandard.compress(b'text' * 9999)[:-3], 'cut short after'),
    ('a.txt.gz', gzip.compress(b'text') + bytes(9) + b'more', 'damaged after'),
    ('a.txt.gz', b'text', 'this is plain text and not .gz: name it without .gz'),
    ('a.jsonl.zst', gzip.compress(LINES), 'this is gzip and not .zst: name it .gz'),
    ('a.txt.gz.gz', gzip.compress(gzip.compress(b'text')), 'compressed twice')]


@pytest.mark.parametrize(('name', 'data', 'words'), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_read_is_one_line_that_names_the_file_and_the_place(
        name, data, words, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as problem:
        texts_of(tmp_path / name)
    message = str(problem.value)
    assert message.startswith(shown(tmp_path / name)) and words in message
    assert '\n' not in message and len(message) < 450


@pytest.mark.parametrize(('name', 'data', 'field', 'words'), [
    ('a.json', b'{"a": {"c": 1}}', 'a.b', ", row 1: no field 'a.b', it has 'a':"),
    ('a.parquet', parquet(**STRUCT), 'a', "field 'a' is nested"),
    ('a.parquet', parquet(**STRUCT), 'a.x', "no field 'a.x', it has 'a.b', 'a'")], ids=range(3))
def test_a_nested_field_that_is_not_there_or_no_text_is_named(name, data, field, words, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as problem:
        texts_of(tmp_path / name, field=field)
    assert words in str(problem.value)


@pytest.mark.parametrize(('name', 'data', 'words'), [
    ('a.tar.gz', tar(), '.tar.gz files are not read'),
    ('a.jsonl', b'{"text": "fine"}\n{"text": ', ', line 2: not JSON'),
    ('a.csv', b'text\na\0\n', 'byte 6 is NUL: leave it out'),
    ('a.jsonl', b'\n \n', 'empty'), ('a.txt', b'  \n\t \xc2\xa0', 'empty')])
def test_a_file_that_is_refused_leaves_no_dataset_whatever_the_tokenizer(
        name, data, words, refused, tmp_path):
    (tmp_path / name).write_bytes(data)
    for tokenizer in ('byte', 'bpe:300', 'char'):
        line = refused('text', f'--input={tmp_path}/{name}', f'--tokenizer={tokenizer}')
        assert words in line and f'{tmp_path}/{name}' in line and '--tokenizer' not in line


@pytest.mark.parametrize('tokenizer', ['byte', 'borrowed'])
def test_a_file_of_any_bytes_stays_as_it_is_where_it_is_prepared_by_bytes(
        tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, 'BLOCK_BYTES', 99)
    monkeypatch.setattr(documents, 'PIECE_CHARS', 500)
    (tmp_path / 'utf8.txt').write_text('text ' * 100)
    data = tar() + np.random.default_rng(0).bytes(10_000)
    (tmp_path / 'a.dat').write_bytes(data)
    for name, chosen in (('utf8.txt', 'byte'), ('a.dat', tokenizer)):
        prepare.main(['text', f'--input={tmp_path}/{name}', f'--data_dir={tmp_path}/borrowed',
                      f'--tokenizer={chosen.replace("borrowed", f"{tmp_path}/borrowed")}',
                      '--overwrite'])
    assert b''.join(split_bytes(tmp_path / 'borrowed', split)
                    for split in ('train', 'val')) == data


def test_each_row_is_a_document_and_no_other_form_is_taken(tmp_path, refused):
    for name in ('a.json', 'a.CSV', 'a.jsonl.gz', 'a.parquet'):
        (tmp_path / name).touch()
        assert f'{tmp_path}/{name}: each row is a document, so --documents=line cannot be' in \
            refused('text', f'--input={tmp_path}/{name}', '--documents=line')


def test_text_has_no_fields_and_a_path_no_nul(tmp_path, refused):
    (tmp_path / 'a.txt').write_text('text')
    for name, words in (('a.txt', 'is text and has no fields'), ('a\0b', 'holds a NUL')):
        assert words in refused('text', f'--input={tmp_path}/{name}', '--text_field=body')
