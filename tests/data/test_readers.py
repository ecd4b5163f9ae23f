"""What a file holds: each kind of file gives exactly its documents, or is refused in one line."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import re
import resource
from itertools import pairwise

import pyarrow
import pyarrow.parquet
import pytest
from corpus_files import prepared, split_bytes, texts_of, write_parquet, write_rows
from helpers import exit_code, fork
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prepare
from plaingpt.data import readers
from plaingpt.data.readers import DOCUMENT_FORMS, whole_file
from plaingpt.data.sources import DownloadedText, Files
from plaingpt.data.tokenizers import BPETokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import shown

BOM = b'\xef\xbb\xbf'
TEXTS = ['one', 'two, "2",\tä😀\r\nlines', '[{"three"}]', '4 ' * 200_000]


def jsonl(texts):
    return ''.join(json.dumps({'id': 1, 'text': text}) + '\n' for text in texts).encode()


def table(texts, delimiter):
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows([('id', 'text'), *((1, t) for t in texts)])
    return file.getvalue().encode()


def parquet(**columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def zstd(data):
    return pyarrow.compress(data, 'zstd', asbytes=True)


ROWS = {'a.jsonl': jsonl(TEXTS), 'a.NDJSON': jsonl(TEXTS), 'lines.json': jsonl(TEXTS),
        'array.json': json.dumps([{'text': text} for text in TEXTS], indent=1).encode(),
        'a.csv': table(TEXTS, ','), 'a2.csv': table(TEXTS, ';'), 'a.parquet': parquet(text=TEXTS)}
PACKED = {'.gz': gzip.compress, '.bz2': bz2.compress, '.XZ': lzma.compress, '.zst': zstd}


def read(folder, name, data, **options):
    (folder / name).write_bytes(data)
    return texts_of(folder / name, **options)


# -----------------------------------------------------------------------------
# rows


@pytest.mark.parametrize('name', ROWS)
def test_each_format_of_rows_gives_the_same_documents(name, tmp_path):
    assert read(tmp_path, name, ROWS[name]) == TEXTS


@pytest.mark.parametrize('ending', PACKED)
def test_a_compressed_file_gives_what_it_holds_also_in_several_streams(ending, tmp_path):
    pack = PACKED[ending]
    for name in ROWS.keys() - {'a.parquet'}:
        data = ROWS[name]
        streams = pack(data[:9]) + pack(data[9:])
        assert read(tmp_path, name + ending, streams) == TEXTS, name
    assert read(tmp_path, f'a.txt{ending}', pack(BOM + b'te') + pack(b'xt')) == ['text']


def test_a_byte_order_mark_and_other_line_ends_change_no_row(tmp_path):
    for name, data in (('a.jsonl', jsonl(['a "b"'] * 2)), ('a.csv', table(['a "b"'] * 2, ',')),
                       ('a.json', b'[{"text": "a \\"b\\""},\n{"text": "a \\"b\\""}]\n')):
        data = data.replace(b'\r\n', b'\n')
        for end in (b'\n', b'\r\n'):
            assert read(tmp_path, name, BOM + data.replace(b'\n', end)) == ['a "b"'] * 2


def test_a_field_may_be_nested_and_one_of_that_very_name_goes_first(tmp_path):
    nested = {'a': [{'b': 'in', 'c': [1]}, None]}
    lines = b'{"a": {"b": "in"}}\n{"a.b": "key", "a": {"b": "in"}}\n{"a": null}\n'
    assert read(tmp_path, 'a.jsonl', lines, field='a.b') == ['in', 'key']
    assert read(tmp_path, 'a.parquet', parquet(**nested), field='a.b') == ['in']
    both = parquet(**nested, **{'a.b': ['key', 'key']})
    assert read(tmp_path, 'a.parquet', both, field='a.b') == ['key', 'key']
    for name in ('a.jsonl', 'a.parquet'):
        with pytest.raises(UserError, match=r"no field 'text\.b', it has ('id', )?'text'"):
            read(tmp_path, name, ROWS[name], field='text.b')


def test_rows_whose_text_is_null_are_left_out_and_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages = [f'page {i}' if i % 100 else None for i in range(500)]
    write_rows(tmp_path / 'rows/a.jsonl', pages)
    write_parquet(tmp_path / 'hub/a.parquet', pages)
    for corpus, option in (('text', '--input=rows'), ('hf', '--path=hub')):
        train, val = prepared(f'd-{corpus}', corpus, option, '--val_fraction=0.1')
        assert sorted(train + val) == sorted(filter(None, pages))
        assert '\n5 rows left out: the text is null\n' in capsys.readouterr().out


# -----------------------------------------------------------------------------
# text


def test_what_a_document_is_can_be_said_whatever_the_size_of_a_block(tmp_path, monkeypatch):
    path = tmp_path / 'in.txt'
    path.write_text(' = One = \n\na\nb\n\n\n = = Part = = \nc\n = Two = \nd = \n')
    for block in (1, 7, 2**20):
        monkeypatch.setattr(readers, 'BLOCK_CHARS', block)
        assert {form: texts_of(path, form) for form in DOCUMENT_FORMS} == {
            'file': [path.read_text()],
            'line': [' = One = ', 'a', 'b', ' = = Part = = ', 'c', ' = Two = ', 'd = '],
            'paragraph': [' = One = ', 'a\nb', ' = = Part = = \nc\n = Two = \nd = '],
            'title': [' = One = \n\na\nb\n\n\n = = Part = = \nc\n', ' = Two = \nd = \n']}


def test_white_space_around_a_text_stays_and_a_blank_file_is_no_document(tmp_path):
    spaces = b' ' * (2**20 + 5)
    text = spaces + b'text' + spaces
    assert read(tmp_path, 'a.txt', text) == [text.decode()]
    assert read(tmp_path, 'a.txt', spaces) == []


BPE = BPETokenizer.train(['the cat sat on the mat, 12  the\n\n  cat!'] * 3, 290)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=st.text(alphabet=' \n\tab1.,\u00a0\u3000\x1f', min_size=1), size=st.integers(2, 9))
def test_a_long_file_in_pieces_has_the_tokens_of_the_whole(text, size, monkeypatch):
    text = 'a' + text
    monkeypatch.setattr(readers, 'BLOCK_CHARS', 20)
    pieces = [piece for piece, _ in whole_file(io.StringIO(text, newline='\n'), size)]
    assert ''.join(pieces) == text and max(map(len, pieces)) <= size
    # only a piece without a space after a word is cut elsewhere
    elsewhere = [a + b[0] for a, b in pairwise(pieces) if a[-1].isspace() or b[0] not in ' \n']
    assert not any(re.search(r'\S[ \n]', piece) for piece in elsewhere)
    if not elsewhere:
        assert [i for piece in pieces for i in BPE.encode(piece)] == BPE.encode(text).tolist()


def test_a_file_of_any_bytes_stays_as_it_is_where_it_is_prepared_by_bytes(tmp_path):
    data = bytes(9) + random.Random(0).randbytes(100_000)
    (tmp_path / 'a.dat').write_bytes(data)
    for name, tokenizer in (('a', 'byte'), ('b', tmp_path / 'a')):  # b borrows that of a
        prepare.main(['text', f'--input={tmp_path}/a.dat', f'--data_dir={tmp_path}/{name}',
                      f'--tokenizer={tokenizer}'])
        assert split_bytes(tmp_path / name, 'train') + split_bytes(tmp_path / name, 'val') == data


@pytest.mark.slow
def test_a_large_compressed_file_takes_little_memory(tmp_path):
    lines = b'{"text": "some text that goes on for a while"}\n' * 1_000_000
    (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(lines, 1))
    (tmp_path / 'b.jsonl.zst').write_bytes(zstd(lines))

    def read_all(argv):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for path in sorted(tmp_path.glob('?.*')):
            assert sum(len(piece.text) for piece in Files([path], 'x').pieces()) > 30_000_000
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert grown < 20e6

    assert exit_code(fork(read_all, log=tmp_path / 'log')) == 0, (tmp_path / 'log').read_text()


# -----------------------------------------------------------------------------
# faults


@pytest.mark.parametrize(('name', 'begin', 'end'), [
    ('a.txt', b'one\ntwo\n', b''), ('a.jsonl', b'{"text": "1"}\n\n{"text": "', b'"}'),
    ('a.json', b'[\n\n{"text": "', b'"}]'), ('a.csv', b'text\n"a\n', b'"\n')])
def test_bytes_that_are_no_utf8_name_the_file_and_the_line_or_are_replaced(
        name, begin, end, tmp_path):
    for ending, pack in {'': bytes, **PACKED}.items():
        for fault in (b'caf\xe9', b'\xe2\x82'):
            data = pack(begin + fault + end)
            with pytest.raises(UserError, match=f'{name}{ending}, line 3: not UTF-8: .*replace'):
                read(tmp_path, name + ending, data)
            assert read(tmp_path, name + ending, data, errors='replace')[-1].endswith('\ufffd')


@pytest.mark.parametrize('ending', PACKED)
def test_a_compressed_file_that_is_cut_short_or_is_not_one_is_refused(ending, tmp_path):
    whole = PACKED[ending](random.Random(0).randbytes(50_000).hex().encode())
    for data in (whole[:5], whole[:len(whole) // 2], whole[:-3], b'plain text'):
        with pytest.raises(UserError, match=r'a\.txt\S+: cannot be read \([^\n]+\)$'):
            read(tmp_path, f'a.txt{ending}', data)


@pytest.mark.parametrize('ending', PACKED)
def test_a_damaged_stream_behind_others_is_refused_and_so_is_what_is_no_stream(ending, tmp_path):
    pack = PACKED[ending]
    streams = [pack(b'some text %d\n' % n * 2000) for n in range(20)]
    damaged = bytes([streams[11][0] ^ 1]) + streams[11][1:]
    for data in ([*streams[:11], damaged, *streams[12:]], [*streams, b'x'], [*streams, b'garbage'],
                 [*streams[:-1], streams[-1][:-1]]):
        with pytest.raises(UserError, match=r'a\.txt\S+: cannot be read'):
            read(tmp_path, f'a.txt{ending}', b''.join(data))
    if ending != '.zst':  # null bytes that fill a block of a tape are no stream
        [text] = read(tmp_path, f'a.txt{ending}', b''.join([*streams, bytes(100_000)]))
        assert text.count('\n') == 40_000


REFUSED = [
    ('a.jsonl', b'\n{"text": "one', ', line 2: not JSON: Unterminated string'),
    ('a.jsonl', b'{"text": "one"} {}', ', line 1: not JSON: Extra data at column 17'),
    ('a.json', b'[{"text": "one"},\n{"text": }]', ': not JSON: Expecting value: line 2 column 10'),
    ('a.json', b'[' * 200_000, ': not JSON: maximum recursion depth'),
    ('a.json', b'[{"text": "one"}, {"text": 7}]', ", row 2: field 'text' is int and not text"),
    ('a\nb.jsonl', b'7', ", line 1: no field 'text', it has no fields"),
    ('a.csv', b'id,text\n\n1,"a\nb"\n2,c,d\n', ', line 5: the first line names'),
    ('a.csv', b'id,text\n1,one\n2,"two\n', ', line 3: unexpected end of data'),
    ('a.csv', b'id,body\n1,one\n', ", line 2: no field 'text', it has 'id', 'body': choose"),
    ('a.parquet', parquet(**{'text.b': ['x']}), ": no field 'text', it has 'text.b'"),
    ('a.parquet', parquet(text=[b'x']), ", row 1: field 'text' is bytes and not text"),
    ('a.parquet', parquet(text=pyarrow.array([b'\xff']).view('string')), ': cannot be read ('),
    ('a.txt', b'text and\0more', ': no UTF-8 text, it has NUL bytes'),
    ('a.jsonl.gz', gzip.compress('text'.encode('utf-16')), ': no UTF-8 text, it has NUL')]


@pytest.mark.parametrize(('name', 'data', 'words'), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_read_is_one_line_that_names_the_file_and_the_place(
        name, data, words, tmp_path, refused):
    (tmp_path / name).write_bytes(data)
    line = refused('text', f'--input={tmp_path}/{name}', '--tokenizer=char')
    assert f'error: {shown(tmp_path / name)}{words}' in line and len(line) < 450


def test_an_array_that_memory_may_not_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, 'JSON_CHARS', 100)
    with pytest.raises(UserError, match=r'a\.json: an array of more than 100 characters .*\.jsonl'):
        read(tmp_path, 'a.json', b'[{"text": "%s"}]' % (b'a' * 100))
    assert read(tmp_path, 'a.json', b'[{"text": "a"}]') == ['a']
    assert read(tmp_path, 'a.json', jsonl(['a'] * 100)) == ['a'] * 100


def test_a_downloaded_text_in_pieces_has_the_tokens_of_the_whole(monkeypatch):
    text = ' '.join(f'word{i}' for i in range(500))
    monkeypatch.setattr(readers, 'PIECE_CHARS', 101)
    pieces = [piece.text for piece in DownloadedText(text, 'url').pieces()]
    assert len(pieces) > 30 and ''.join(pieces) == text
    assert all(piece.startswith(' ') for piece in pieces[1:])  # no word is cut


@pytest.mark.parametrize(('name', 'content', 'what'), [
    ('a.csv', 'id,text,text\n1,a,b\n', 'the first line names 3 columns'),
    ('a.csv', 'id,text\n1\n', 'the first line names 2 columns')])
def test_no_text_of_a_row_is_lost_in_silence(name, content, what, tmp_path, refused):
    (tmp_path / name).write_text(content)
    assert what in refused('text', f'--input={tmp_path}/{name}')
