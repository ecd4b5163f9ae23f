"""What a file holds: each kind of file gives exactly its documents, or is refused in one line."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from helpers import fails
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prepare
from plaingpt.corpus import documents, rows
from plaingpt.corpus.corpora import CORPORA
from plaingpt.corpus.sources import open_source
from plaingpt.corpus.text_files import Files
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import shown
from plaingpt.tokens.dataset import open_dataset

BOM = b'\xef\xbb\xbf'
LINES = b'{"text": "one"}\n{"id": 2, "text": "two"}\n'
ARRAY = b'[{"text": "one"},\n {"id": 2, "text": "two"}]\n'
CSV = b'id,text\r\n1,one\r\n2,"two, ""2"",\r\nlines"\r\n'
QUOTED = 'two, "2",\r\nlines'
NESTED = b'{"a": {"b": "in"}}\n{"a.b": "key", "a": {"b": "in"}}\n{"a": null}\n'


def parquet(**columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def parquet_of(names):
    """Columns of these names, with an object in each."""
    file = io.BytesIO()
    columns = [pyarrow.array([{'b': 'in'}] if names[0] == 'a' else ['in']) for _ in names]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names), file)
    return file.getvalue()


def no_utf8():
    """A column of text, of which the second is not UTF-8."""
    offsets, data = pyarrow.array([0, 2, 5], pyarrow.int32()).buffers()[1], b'okx\xffy'
    return pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(data)])


def archive(kind):
    file = io.BytesIO()
    if kind == 'zip':
        with zipfile.ZipFile(file, 'w') as packed:
            packed.writestr('a.txt', 'text')
    else:
        with tarfile.open(fileobj=file, mode='w') as packed:
            packed.addfile(tarfile.TarInfo('a.txt'))
    return file.getvalue()


def documents_of(path, form='file', field='text', errors='strict'):
    """The documents of a file, each in one piece again."""
    found = []
    for piece in Files([path], path.name, form, field, errors).pieces():
        if piece.new_document:
            found.append('')
        found[-1] += piece.text
    return found


LONG = b'9' * 5000
HALVES = br'{"text": "\uDC80\ud83d\ude00\udcff\udc00\uD800\\udc80\\\udc81' + b'\xff"}'
REPLACED = '\ufffd😀\ufffd\ufffd\ufffd\\udc80\\\ufffd\udcff'
SPACES = b' ' * (2**18 + 5)
RUSSIAN = 'Мороз и солнце, день чудесный.\n' * 20
STRUCT = {'a.b': ['key', 'key'], 'a': [{'b': 'in', 'c': [1]}, None],
          'l': [['x'], ['y']], 'm': [{'n': {'o.p': 'deep'}}, None]}


READ = [
    # JSON
    ('a.jsonl', LINES, ['one', 'two'], {}),
    ('a.JSONL', LINES, ['one', 'two'], {}),
    ('a.ndjson', LINES, ['one', 'two'], {}),
    ('a.json', LINES, ['one', 'two'], {}),
    ('a.Json', ARRAY, ['one', 'two'], {}),
    ('a.json.gz', gzip.compress(ARRAY), ['one', 'two'], {}),
    ('a.JSON.GZ', gzip.compress(LINES), ['one', 'two'], {}),
    ('a.ndjson.zst', zstandard.compress(LINES), ['one', 'two'], {}),
    ('a.json', b'{\n  "text": "one",\n  "id": 1\n}\n', ['one'], {}),
    ('a.json', b'{"text": "one"}{"text": "two"}', ['one', 'two'], {}),
    ('a.json', b'[{"text": null}, {"text": " "}, {"text": "a]}, {"}]', ['a]}, {'], {}),
    ('a.json', b'[{"id": %s, "text": "one"}]' % LONG, ['one'], {}),
    ('a.jsonl', b'{"id": -%s, "text": "one"}' % LONG, ['one'], {}),
    # U+DC80 to U+DCFF are what bytes that are no UTF-8 become; no escape is a byte
    ('a.jsonl', HALVES, [REPLACED], {'errors': 'surrogateescape'}),
    ('a.json', HALVES, [REPLACED], {'errors': 'surrogateescape'}),
    ('a.json', b'[]', [], {}),
    ('a.json', b' \n', [], {}),
    ('a.json', BOM + ARRAY, ['one', 'two'], {}),
    ('a.jsonl', BOM + LINES, ['one', 'two'], {}),
    ('a.jsonl', LINES.replace(b'\n', b'\r\n'), ['one', 'two'], {}),
    ('a.json', '[{"text": "ä\\u00e9\\ud83d\\ude00\\n"}]'.encode(), ['äé😀\n'], {}),
    ('a.jsonl', NESTED, ['in', 'key'], {'field': 'a.b'}),
    ('a.json', b'{"a.b": {"c.d": "deep"}}', ['deep'], {'field': 'a.b.c.d'}),
    # CSV and TSV
    ('a.csv', CSV, ['one', QUOTED], {}),
    ('a.CSV.gz', gzip.compress(CSV), ['one', QUOTED], {}),
    ('a.csv.zst', zstandard.compress(CSV), ['one', QUOTED], {}),
    ('a.csv', BOM + b'text\na\n\n"b"\n', ['a', 'b'], {}),
    ('a.tsv', b'id\ttext\n1\tone, two\n2\t"a\tb"\n', ['one, two', 'a\tb'], {}),
    ('a.csv', b'a.b,text\nkey,x\n', ['key'], {'field': 'a.b'}),
    ('a.csv', b'text,id\n"' + b'long ' * 40_000 + b'",1\n', ['long ' * 40_000], {}),
    ('a.csv', b'text\n', [], {}),
    # Parquet
    ('a.PARQUET', parquet(text=['one', None, 'two']), ['one', 'two'], {}),
    ('a.parquet', parquet(**STRUCT), ['key', 'key'], {'field': 'a.b'}),
    ('a.parquet', parquet(a=STRUCT['a']), ['in'], {'field': 'a.b'}),
    ('a.parquet', parquet(**STRUCT), ['deep'], {'field': 'm.n.o.p'}),
    ('a.parquet', parquet(text=no_utf8()), ['ok', 'x\ufffdy'], {'errors': 'replace'}),
    ('a.parquet', parquet(text=no_utf8()), ['ok', 'x\udcffy'], {'errors': 'surrogateescape'}),
    # text
    ('a.TXT', b'{"text": "one"}\n', ['{"text": "one"}\n'], {}),
    ('a.TXT.GZ', gzip.compress(b'text'), ['text'], {}),
    ('csv', CSV, [CSV.decode()], {}),
    ('a.txt', BOM + b'text', ['text'], {}),
    ('a.txt', BOM, [], {}),
    ('a.txt', b'GIF89a and %PDF are', ['GIF89a and %PDF are'], {}),
    ('a.txt.gz', gzip.compress(BOM + b'text'), ['text'], {}),
    ('a.txt', b'text' + BOM, ['text\ufeff'], {}),
    ('a.txt.gz', gzip.compress(b'text') + bytes(999), ['text'], {}),
    ('a.txt.gz', gzip.compress(b'te') + bytes(9) + gzip.compress(b'xt') + bytes(9), ['text'], {}),
    ('a.txt', SPACES + b'text', [SPACES.decode() + 'text'], {}),
    ('a.txt', SPACES, [], {}),
    ('a.txt', b'text' + SPACES, ['text' + SPACES.decode()], {}),
    ('a.txt', b' = One = \r\n a\r\n = = In = = \r\n = Two = \r\n b',
     [' = One = \r\n a\r\n = = In = = \r\n', ' = Two = \r\n b'], {'form': 'title'}),
    ('a.txt', b'one\r\n\r\ntwo\r\n', ['one', 'two'], {'form': 'paragraph'}),
    ('a.dat', b'PK\3\4\0\xff', ['PK\3\4\0\udcff'], {'errors': 'surrogateescape'})]


@pytest.mark.parametrize(('name', 'data', 'expected', 'options'), READ, ids=range(len(READ)))
def test_a_file_gives_exactly_its_documents(name, data, expected, options, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(data)
    assert documents_of(tmp_path / name, **options) == expected
    if 'gz' not in name.lower():  # of which the limits go by the size of the block
        monkeypatch.setattr(documents, 'BLOCK_BYTES', 600)
        assert documents_of(tmp_path / name, **options) == expected


REFUSED = [
    # JSON
    ('a.json', b'[{"text": "one"},\n{"text": }]', ', line 2: not JSON: Expecting value', 'text'),
    ('a.json', b'[{"text": "one"}\n{"text": "two"}]', ', line 2: not JSON: the array has no comma',
     'text'),
    ('a.json', b'[{"text": "one"},\n', ', line 2: not JSON: ', 'text'),
    ('a.json', b'[{"text": "one"}\n', ', line 2: not JSON: the array has no end', 'text'),
    ('a.json', b'[{"text": "one"}]\n[]', ', line 2: not JSON: the array has ended', 'text'),
    ('a.json', b'[{"text": "one"},]', ', line 1: not JSON: ', 'text'),
    ('a.json', b'{"text": "one"},\n{"text": "two"}', ', line 1: not JSON: ', 'text'),
    ('a.json', b'{"text": "one', ', line 1: not JSON: Unterminated string', 'text'),
    ('a.json', b'{"data": [{"text": "one"}]}', ", row 1: no field 'text', it has 'data'", 'text'),
    ('a.json', b'["one"]', ", row 1: no field 'text', it has no fields", 'text'),
    ('a.json', b'{}', ", row 1: no field 'text', it has no fields:", 'text'),
    ('a.json', b'[' * 200_000, ', row 1: nested too deep', 'text'),
    ('a.jsonl', b'[' * 200_000, ', line 1: nested too deep', 'text'),
    ('a.json', b'{"text": "one', ': Unterminated string', 'text'),
    ('a.jsonl', b'\n{"text": "one', ', line 2: not JSON: Unterminated string at column 10', 'text'),
    ('a.jsonl', b'{"text": "one"} {}', ', line 1: not JSON: more than one value', 'text'),
    ('a\nb.jsonl', b'{}', "a\\nb.jsonl, line 1: no field 'text'", 'text'),
    ('a\nb.txt', b'\0', 'a\\nb.txt: no text', 'text'),
    ('a.json', b'{"a": {"c": 1}}', ", row 1: no field 'a.b', it has 'a':", 'a.b'),
    ('a.jsonl', b'{"a": {"b": [1]}}', ", line 1: field 'a.b' is list and not text", 'a.b'),
    ('a.jsonl', b'{"x\\ny": 1, "%s": 2}' % (b'z' * 999), r"it has 'x\ny', 'zzz", 'text'),
    # CSV and TSV
    ('a.csv', b'id,text\n1,"a\nb"\n2\n', ', line 4: not CSV: 1 column, and 2 in', 'text'),
    ('a.csv', b'id,text\n1,one,two\n', ', line 2: not CSV: 3 columns', 'text'),
    ('a.tsv', b'id\ttext\n1\ta\tb\n', ', line 2: not TSV: 3 columns', 'text'),
    ('a.csv', b'id,text\n1,"one\n2,two\n', ', line 2: not CSV: unexpected end', 'text'),
    ('a.csv', b'id,text\n1,"one" two\n', ', line 2: not CSV: ', 'text'),
    ('a.csv', b'id,text\n1,one\rtwo\n', ', line 2: not CSV: a carriage return', 'text'),
    ('a.csv', b'id;text\n1;one\n', 'by semicolons and not by commas: write it with', 'text'),
    ('a.csv', b'id\ttext\n1\tone\n', 'by tabs and not by commas: name it .tsv', 'text'),
    ('a.tsv', b'id,text\n1,one\n', 'by commas and not by tabs: name it .csv', 'text'),
    ('a.csv', b'id, text\n1,one\n', "no field 'text', it has 'id', ' text'", 'text'),
    ('a.csv', b'text,text\none,two\n', ", line 1: 2 columns are called 'text'", 'text'),
    # Parquet
    ('a.parquet', parquet(text=no_utf8()), ', row 2: not UTF-8 at byte 1', 'text'),
    ('a.parquet', parquet(**STRUCT), "field 'a' is nested", 'a'),
    ('a.parquet', parquet(**STRUCT), "no field 'a.x', it has 'a.b', 'a', 'l', 'm'", 'a.x'),
    ('a.parquet', parquet(**STRUCT), "no field 'l.list.element'", 'l.list.element'),
    ('a.parquet', parquet(**STRUCT), "field 'a.c' is nested", 'a.c'),
    ('a.parquet', parquet_of(['text', 'text']), "2 columns are called 'text'", 'text'),
    ('a.parquet', parquet_of(['a', 'a']), "2 columns are called 'a'", 'a.b'),
    # what has to be unpacked, by the name
    ('a.zip', archive('zip'), '.zip files are not read: unpack it', 'text'),
    ('a.tar', archive('tar'), '.tar files are not read: unpack it', 'text'),
    ('a.tar.gz', gzip.compress(archive('tar')), '.tar.gz files are not read', 'text'),
    ('a.tar.ZST', zstandard.compress(archive('tar')), '.tar.zst files are not read', 'text'),
    ('a.TGZ', gzip.compress(archive('tar')), '.tgz files are not read', 'text'),
    ('a.7z', b'', '.7z files are not read', 'text'),
    ('a.rar', b'', '.rar files are not read', 'text'),
    ('a.txt.bz2', bz2.compress(b'text'), '.bz2 files are not read', 'text'),
    ('a.txt.xz', lzma.compress(b'text'), '.xz files are not read', 'text'),
    ('a.parquet.gz', gzip.compress(parquet(text=['a'])), '.parquet.gz files are not', 'text'),
    # what is no text, by the content
    ('a.txt', archive('zip'), 'this is a zip archive', 'text'),
    ('a.txt', archive('tar'), 'this is a tar archive', 'text'),
    ('a.gz', gzip.compress(archive('tar')), 'this is a tar archive', 'text'),
    ('a.txt', gzip.compress(b'text'), 'this is gzip and no text: name it .gz', 'text'),
    ('a.jsonl', zstandard.compress(LINES), 'this is Zstandard', 'text'),
    ('a.csv', bz2.compress(CSV), 'this is bzip2', 'text'),
    ('a.txt', lzma.compress(b'text'), 'this is xz', 'text'),
    ('a.txt', parquet(text=['one']), 'this is Parquet', 'text'),
    ('a.txt', b'%PDF-1.7\n', 'this is a PDF', 'text'),
    ('a.md', b'\x89PNG\r\n\x1a\n', 'this is a picture', 'text'),
    ('a.gif', b'GIF89a\1\0\1\0', 'no text, byte 7 is NUL', 'text'),
    ('a.txt', b'RIFF\n\0\0\0WEBP', 'this is a picture', 'text'),
    ('a.txt', b'SQLite format 3\0', 'this is an SQLite database', 'text'),
    ('a.txt', b'GGUF\3\0\0\0', 'this is GGUF and no text: leave it out', 'text'),
    ('a.txt', b'text and\0more', 'no text, byte 8 is NUL', 'text'),
    ('a b.txt', 'text'.encode('utf-16'), "UTF-16 text: convert it: iconv -f UTF-16 -t UTF-8 '",
     'text'),
    ('a.txt', 'text'.encode('utf-16-le'), 'UTF-16 text: convert it: iconv -f UTF-16LE', 'text'),
    ('a.txt', 'text'.encode('utf-16-be'), 'UTF-16 text: convert it: iconv -f UTF-16BE', 'text'),
    ('a.csv', 'text'.encode('utf-32'), 'UTF-32 text: convert it: iconv -f UTF-32 ', 'text'),
    ('a.txt', 'text'.encode('utf-32-be'), 'UTF-32 text: convert it: iconv -f UTF-32BE', 'text'),
    ('a.txt', RUSSIAN.encode('utf-16-le'), 'UTF-16 text: convert it: iconv -f UTF-16LE', 'text'),
    ('a.txt', RUSSIAN.encode('utf-16-be'), 'UTF-16 text: convert it: iconv -f UTF-16BE', 'text'),
    ('a.txt', b'a' * 2**20 + b'\0', 'byte 1048576 is NUL', 'text'),
    ('a.txt.gz', gzip.compress(b'a' * 2**22 + b'\0'), 'byte 4194304 is NUL', 'text'),
    ('a.txt.zst', zstandard.compress(b'a' * 2**19 + b'\0'), 'byte 524288 is NUL', 'text'),
    ('a.txt', b'caf\xe9', 'not UTF-8 at byte 3: convert it, for example with iconv -f latin1 -t',
     'text'),
    ('a.txt', BOM + b'caf\xe9', 'not UTF-8 at byte 6', 'text'),
    ('a.txt.gz', gzip.compress(b'text') + bytes(9) + b'more', 'damaged after', 'text'),
    ('a.txt.gz', bytes(9), 'damaged after 9 bytes', 'text'),
    ('a.txt.gz', b'\0', 'cut short after 1 byte:', 'text'),
    # what a compressed file is not
    ('a.txt.gz', b'text', 'this is plain text and not .gz: name it without .gz', 'text'),
    ('a.txt.zst', b'text and more', 'this is plain text and not .zst', 'text'),
    ('a.txt.gz', zstandard.compress(b'text'), 'this is Zstandard and not .gz: name it .zst',
     'text'),
    ('a.jsonl.zst', gzip.compress(LINES), 'this is gzip and not .zst: name it .gz', 'text'),
    ('a.txt.gz', archive('zip'), 'this is a zip archive', 'text'),
    ('a.txt.gz.gz', gzip.compress(gzip.compress(b'text')), 'compressed twice: unpack it once',
     'text')]


@pytest.mark.parametrize(('name', 'data', 'words', 'field'), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_read_is_one_line(name, data, words, field, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as problem:
        documents_of(tmp_path / name, field=field)
    message = str(problem.value)
    assert message.startswith(shown(tmp_path / name)) and words in message
    assert '\n' not in message and len(message) < 450


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe:300', 'char'])
def test_an_archive_is_refused_before_anything_is_written(tokenizer, tmp_path, capsys, monkeypatch):
    (tmp_path / 'a.tar.gz').write_bytes(gzip.compress(archive('tar')))
    message = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={tmp_path}/a.tar.gz',
                    f'--tokenizer={tokenizer}', f'--data_dir={tmp_path}/d')
    assert f'{tmp_path}/a.tar.gz: .tar.gz files are not read: unpack it' in message
    assert not (tmp_path / 'd').exists()


def test_a_binary_file_that_is_named_is_bytes_for_the_byte_tokenizer(tmp_path):
    (tmp_path / 'a.dat').write_bytes(data := archive('tar') + bytes(range(256)))
    prepare.main(['text', f'--input={tmp_path}/a.dat', '--tokenizer=byte',
                  f'--data_dir={tmp_path}/d'])
    dataset = open_dataset(tmp_path / 'd')
    assert b''.join(bytes(dataset.split(split, in_ram=True).ram.astype('u1'))
                    for split in ('train', 'val')) == data


@pytest.mark.parametrize(('name', 'data', 'words'), [
    ('a.csv', b'text\na\0\n', 'is NUL: leave it out'), ('a.jsonl', archive('zip'), 'zip archive'),
    ('a.json', '{"text": "a"}'.encode('utf-16'), 'UTF-16')])
def test_rows_are_text_for_the_byte_tokenizer_too(name, data, words, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as problem:
        documents_of(tmp_path / name, errors='surrogateescape')
    assert words in str(problem.value) and '--tokenizer' not in str(problem.value)


def test_files_that_open_with_white_space_keep_it_and_their_end_of_text(tmp_path):
    texts = [SPACES + b'one', SPACES + b'two', *(b'text %d' % n for n in range(40))]
    (tmp_path / 'in').mkdir()
    for n, text in enumerate(texts):
        (tmp_path / f'in/{n}.txt').write_bytes(text)
    prepare.main(['text', f'--input={tmp_path}/in', '--documents=file', '--tokenizer=byte',
                  f'--data_dir={tmp_path}/d'])
    dataset, found = open_dataset(tmp_path / 'd'), []
    for split in ('train', 'val'):
        ids = dataset.split(split, in_ram=True).ram
        found += [bytes(part[1:].astype('u1'))
                  for part in np.split(ids, np.flatnonzero(ids == 256))[1:]]
    assert sorted(found) == sorted(texts)


def test_only_files_whose_lines_are_rows_are_cut_into_parts(tmp_path):
    """A part of the others is whole files, since their rows may have line breaks."""
    texts = [f'line\nof "row" {n}' for n in range(200)]
    (tmp_path / 'a.ndjson').write_text(''.join(json.dumps({'text': t}) + '\n' for t in texts))
    (tmp_path / 'b.csv').write_text('text\n' + ''.join(
        '"{}"\n'.format(t.replace('"', '""')) for t in texts))
    (tmp_path / 'c.json').write_text(json.dumps([{'text': t} for t in texts]))
    for name, wholes in (('a.ndjson', 0), ('b.csv', 4), ('c.json', 4)):
        source = Files([tmp_path / name], name)
        parts = [[piece.text for piece in source.part(k, 5).pieces()] for k in range(1, 6)]
        assert [text for part in parts for text in part] == texts and parts.count([]) == wholes


def test_documents_cannot_be_lines_of_any_kind_of_rows(tmp_path):
    for name in ('a.json', 'a.CSV', 'a.tsv.gz', 'a.ndjson'):
        (tmp_path / name).touch()
        config = prepare.PrepareConfig(input=str(tmp_path / name), documents='line')
        with pytest.raises(UserError, match='each row is a document'):
            open_source('text', CORPORA['text'], config)


def test_text_has_no_fields_and_a_path_no_nul(tmp_path):
    (tmp_path / 'a.txt').write_text('text')
    for name, words in (('a.txt', 'text_field=body: .* is text and has no fields: leave it out'),
                        ('a\0b', r'a\\x00b: no path has a NUL in it')):
        config = prepare.PrepareConfig(input=f'{tmp_path}/{name}', text_field='body')
        with pytest.raises(UserError, match=words):
            open_source('text', CORPORA['text'], config)


# -----------------------------------------------------------------------------
# JSON is read a value at a time


TEXTS = st.text(max_size=20)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just([-1e9, []]) | \
    st.dictionaries(TEXTS, TEXTS, max_size=2)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.dictionaries(TEXTS, VALUES, max_size=4), max_size=4),
       block=st.integers(1, 40), indent=st.none() | st.integers(0, 2), ascii_=st.booleans(),
       form=st.sampled_from('al'))
def test_json_is_what_pythons_json_reads_wherever_the_blocks_end(
        values, block, indent, ascii_, form, tmp_path, monkeypatch):
    written = [json.dumps(value, indent=indent, ensure_ascii=ascii_) for value in values]
    text = f'[{" , ".join(written)}\n]' if form == 'a' else '\n'.join(written)
    (tmp_path / 'a.json').write_bytes(text.encode('utf-8', 'replace'))
    monkeypatch.setattr(documents, 'BLOCK_BYTES', block)
    monkeypatch.setattr(documents, 'SIGNATURE_BYTES', 1)
    found = [value for value, *_ in rows.json_values(tmp_path / 'a.json')]
    expected = [json.loads(one.encode('utf-8', 'replace')) for one in written]
    assert repr(found) == repr(expected)


def test_the_work_of_a_giant_value_grows_with_it_and_not_with_its_square(tmp_path, monkeypatch):
    decoded, decode = 0, json.JSONDecoder.raw_decode

    def count(self, text, at):
        nonlocal decoded
        decoded += len(text) - at
        return decode(self, text, at)

    monkeypatch.setattr(json.JSONDecoder, 'raw_decode', count)
    monkeypatch.setattr(documents, 'BLOCK_BYTES', 1000)
    text = 'a word and ' * 30_000
    (tmp_path / 'a.json').write_text(json.dumps([{'text': text}]))
    assert documents_of(tmp_path / 'a.json') == [text]
    assert len(text) <= decoded <= 3 * len(text)


@pytest.mark.parametrize('name', ['a.json', 'a.csv', 'quote.csv', 'columns.csv', 'quote.json',
                                  'blank.txt'])
def test_a_row_without_end_is_refused_before_it_is_read_whole(name, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, 'MAX_DOCUMENT_CHARS', 10_000)
    monkeypatch.setattr(documents, 'BLOCK_BYTES', 1000)
    begin, more = {'a.json': ('[{"text": [', '1, '), 'a.csv': ('text\n', 'word '),
                   'quote.csv': ('text\n"', 'word\n'), 'columns.csv': ('text\n', '"a\n",'),
                   'quote.json': ('{"text": "', 'word '), 'blank.txt': ('', ' \n')}[name]
    (tmp_path / name).write_text(begin + more * 200_000)
    source = Files([tmp_path / name], name)
    reading = documents.read_bytes
    read = 0

    def count(*arguments):
        nonlocal read
        for data, position in reading(*arguments):
            read += len(data)
            yield data, position

    monkeypatch.setattr(documents, 'read_bytes', count)
    with pytest.raises(UserError, match=f'{tmp_path / name}.* exceeds 10,000 characters'):
        list(source.pieces())
    assert read < 40_000
