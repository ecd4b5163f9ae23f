"""Input files that expand, that are one endless line, or that were damaged: time and memory are
bounded, and what was read is on record."""

import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import zlib

import pyarrow
import pytest
import zstandard
from corpus_files import texts_of, write_parquet, write_rows
from helpers import exit_code, fails, fork

import prepare
from plaingpt.corpus import documents, encoding, text_files
from plaingpt.corpus.documents import DOCUMENT_FORMS, split_lines
from plaingpt.corpus.text_files import Files
from plaingpt.system.errors import UserError

# -----------------------------------------------------------------------------
# expansion


def compressed(stream, head, megabytes):
    return b''.join([stream.compress(head), *(stream.compress(b'a' * 10**6)
                                              for _ in range(megabytes)), stream.flush()])


def write_bombs(folder):
    """Small files of each kind that hold 30 MB to 500 MB of text, or a million nulls."""
    folder.mkdir()
    for name, head in (('a.txt.zst', b'a'), ('b.jsonl.zst', b'{"text": "')):
        (folder / name).write_bytes(compressed(zstandard.ZstdCompressor().compressobj(), head, 200))
    (folder / 'c.txt.gz').write_bytes(compressed(zlib.compressobj(9, wbits=31), b'a', 30))
    one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500, pyarrow.int32()),
                                              pyarrow.array(['a' * 10**6]))
    for name, texts, options in (
            ('d', one, {}),
            ('e', ['a' * 10**6 + str(i) for i in range(30)],
             {'column_encoding': {'text': 'DELTA_BYTE_ARRAY'}, 'use_dictionary': False}),
            ('f', ['a' * 30_000_000], {'use_dictionary': False, 'write_statistics': False}),
            ('g', pyarrow.nulls(10**6, pyarrow.string()), {})):
        write_parquet(folder / f'{name}.parquet', texts, compression='zstd', **options)
    return sorted(folder.iterdir())


def test_files_that_expand_without_end_are_refused_within_bounded_memory(tmp_path, monkeypatch):
    bombs = write_bombs(tmp_path / 'bombs')
    monkeypatch.setattr(documents, 'EXPANDED_BYTES', 10**6)

    def read_all(argv=None):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for bomb in bombs:
            with pytest.raises(UserError) as refused:
                prepare.main(['text', f'--input={bomb}', '--tokenizer=byte',
                              f'--data_dir={tmp_path}/d'])
            expected = f'{bomb}: {bomb.stat().st_size:,} bytes that expand to'
            assert expected in str(refused.value) and 'unpack' in str(refused.value)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert grown < 100e6  # unbounded, the largest take hundreds of MB

    assert exit_code(fork(read_all, log=tmp_path / 'log')) == 0, (tmp_path / 'log').read_text()
    assert not (tmp_path / 'd').exists()


def test_text_as_repetitive_as_logs_is_read_at_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, 'EXPANDED_BYTES', 0)
    chance = random.Random(0)
    lines = [f'2024-01-01T00:{i // 60 % 60:02}:{i % 60:02} INFO request {chance.randrange(100)} '
             'was served without an error' for i in range(10_000)]
    for name, pack in (('a.txt.zst', zstandard.compress), ('b.txt.gz', gzip.compress)):
        (tmp_path / name).write_bytes(pack('\n'.join(lines).encode()))
        assert texts_of(tmp_path / name, 'line') == lines


def test_a_window_larger_than_memory_allows_is_not_called_damage(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / 'a.txt.zst').write_bytes(packer.compress(b'text') + packer.flush())
    with pytest.raises(UserError, match=r'a\.txt\.zst.*unpack it'):
        texts_of(tmp_path / 'a.txt.zst')


# -----------------------------------------------------------------------------
# lines, rows and paragraphs without end


class CountedText(str):
    """A text that counts the characters that are copied when it is joined, cut or split."""

    copied = 0

    def count(self, text):
        CountedText.copied += len(text)
        return CountedText(text)

    def __add__(self, other):
        return self.count(str(self) + str(other))

    def __radd__(self, other):
        return self.count(str(other) + str(self))

    def __getitem__(self, place):
        return self.count(str(self)[place])

    def split(self, separator):
        return [self.count(part) for part in str(self).split(separator)]


@pytest.mark.parametrize('form', DOCUMENT_FORMS)
def test_the_work_grows_with_the_text_and_not_with_its_square(form, monkeypatch):
    monkeypatch.setattr(documents, 'PIECE_CHARS', 100)
    monkeypatch.setattr(CountedText, 'copied', 0)
    text = 'word ' * 20_000
    if form == 'file':  # one block of many pieces
        found = list(DOCUMENT_FORMS[form]([(CountedText(text), 0)]))
    else:  # many blocks of one line
        blocks = [(CountedText(text[i:i + 100]), i) for i in range(0, len(text), 100)]
        found = list(DOCUMENT_FORMS[form](split_lines(blocks)))
    assert ''.join(piece for piece, *_ in found) == text
    assert len(text) <= CountedText.copied <= 4 * len(text)


def test_the_work_of_a_giant_json_value_grows_with_it_and_not_with_its_square(
        tmp_path, monkeypatch):
    decoded, decode = 0, json.JSONDecoder.raw_decode

    def count(self, text, at):
        nonlocal decoded
        decoded += len(text) - at
        return decode(self, text, at)

    monkeypatch.setattr(json.JSONDecoder, 'raw_decode', count)
    monkeypatch.setattr(documents, 'BLOCK_BYTES', 1000)
    text = 'a word and ' * 30_000
    (tmp_path / 'a.json').write_text(json.dumps([{'text': text}]))
    assert texts_of(tmp_path / 'a.json') == [text]
    assert len(text) <= decoded <= 3 * len(text)


@pytest.mark.parametrize(('name', 'form', 'text', 'place'), [
    ('a.jsonl', 'file', '{"text": "a"}\n{"text": "%s"}\n', ', line 2'),
    ('a.txt', 'line', 'a\nb\n%s\n', ', line 3'),
    ('a.txt', 'paragraph', 'a\n\nword\n%s\nword', ': a paragraph'),
    ('a.txt', 'title', ' = One = \nword\n%s\n', ': an article'),
    ('a.parquet', 'file', '%s', ', row 2')])
def test_what_is_held_in_memory_whole_has_a_limit(name, form, text, place, tmp_path, monkeypatch):
    def read(characters):
        words = 'word\n' * (characters // 5) if form in ('paragraph', 'title') else 'b' * characters
        if name == 'a.parquet':
            write_parquet(tmp_path / name, ['a', words])
        else:
            (tmp_path / name).write_text(text % words)
        return texts_of(tmp_path / name, form)

    monkeypatch.setattr(documents, 'MAX_DOCUMENT_CHARS', 1000)
    monkeypatch.setattr(documents, 'BLOCK_BYTES', 100)
    assert sum(map(len, read(900))) >= 900
    with pytest.raises(UserError, match=f'{tmp_path / name}{place} exceeds 1,000 char'):
        read(1100)


@pytest.mark.parametrize(('name', 'begin', 'more'), [
    ('a.json', '[{"text": [', '1, '), ('quote.json', '{"text": "', 'word '),
    ('a.csv', 'text\n', 'word '), ('quote.csv', 'text\n"', 'word\n'),
    ('columns.csv', 'text\n', '"a\n",'), ('blank.txt', '', ' \n')])
def test_a_row_without_end_is_refused_before_it_is_read_whole(
        name, begin, more, tmp_path, monkeypatch):
    reading, read = documents.read_bytes, 0

    def count(*arguments):
        nonlocal read
        for data, position in reading(*arguments):
            read += len(data)
            yield data, position

    monkeypatch.setattr(documents, 'MAX_DOCUMENT_CHARS', 10_000)
    monkeypatch.setattr(documents, 'BLOCK_BYTES', 1000)
    monkeypatch.setattr(documents, 'read_bytes', count)
    (tmp_path / name).write_text(begin + more * 200_000)
    with pytest.raises(UserError, match=f'{tmp_path / name}.* exceeds 10,000 characters'):
        list(Files([tmp_path / name], name).pieces())
    assert read < 40_000


def test_a_huge_document_is_not_waited_for_by_many_others():
    taken = 0

    def batches():
        nonlocal taken
        for _ in range(20):
            taken += 1
            yield encoding.Batch([], 100 * encoding.BATCH_CHARS, 0, 0, None)

    results = encoding.map_in_order(id, batches(), 4)
    assert [taken - i for i, _ in enumerate(results)] == [1] * 20


# -----------------------------------------------------------------------------
# damage, and the record of what was read


PAGES = [f'page {i} of the web, {i * i}' for i in range(300)]


def pack(name):
    """PAGES as a file with checksums."""
    text = '\n'.join(PAGES).encode()
    if name == 'a.parquet':
        table, file = pyarrow.table({'text': PAGES}), io.BytesIO()
        pyarrow.parquet.write_table(table, file, row_group_size=64, write_page_checksum=True)
        return file.getvalue()
    return gzip.compress(text, mtime=0) if name == 'a.txt.gz' else \
        zstandard.ZstdCompressor(write_checksum=True).compress(text)


@pytest.mark.parametrize('name', ['a.txt.gz', 'a.txt.zst', 'a.parquet'])
def test_a_flipped_bit_never_changes_the_text_where_the_file_has_checksums(name, tmp_path):
    chance, good, found = random.Random(0), pack(name), 0
    for _ in range(40):
        data = bytearray(good)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / name).write_bytes(data)
        try:
            assert texts_of(tmp_path / name, 'file' if name == 'a.parquet' else 'line') == PAGES
        except UserError as problem:
            assert str(tmp_path / name) in str(problem)
            found += 1
    assert found > 20  # the others hit what says nothing of the text, such as its creation time


def test_each_encoding_of_parquet_gives_the_rows(tmp_path):
    texts = [None if i % 7 == 0 else PAGES[i * i % 300] for i in range(1000)]
    small_pages = {'use_dictionary': True, 'dictionary_pagesize_limit': 1000, 'data_page_size': 500}
    for options in (
            small_pages, {**small_pages, 'version': '2.6', 'data_page_version': '2.0'},
            {'use_dictionary': False, 'column_encoding': {'text': 'DELTA_BYTE_ARRAY'}},
            {'use_dictionary': False, 'column_encoding': {'text': 'DELTA_LENGTH_BYTE_ARRAY'}}):
        write_parquet(tmp_path / 'a.parquet', texts, row_group_size=400, **options)
        assert texts_of(tmp_path / 'a.parquet') == [*filter(None, texts)], options


def test_meta_json_has_the_checksums_of_what_was_read(tmp_path, monkeypatch):
    folder = tmp_path / 'in'
    write_rows(folder / 'b.jsonl', ['ä'])
    for name in ('a.txt.gz', 'a.txt.zst', 'a.parquet'):
        (folder / name).write_bytes(pack(name))
    (folder / os.fsdecode(b'c\xff.txt')).write_text('text')

    def inputs():
        prepare.main(['text', f'--input={folder}', '--tokenizer=byte', f'--data_dir={tmp_path}/d'])
        return json.loads((tmp_path / 'd/meta.json').read_text())['inputs']

    paths = sorted(folder.iterdir())
    sha256sum_prints = [f'{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n'
                        .encode('utf-8', 'backslashreplace').decode() for path in paths]
    found = inputs()
    assert [f'{file["sha256"]}  {file["name"]}\n' for file in found['files']] == sha256sum_prints
    assert [file['bytes'] for file in found['files']] == [path.stat().st_size for path in paths]
    assert found['count'] == 5 and found['bytes'] == sum(path.stat().st_size for path in paths)
    assert found['sha256'] == hashlib.sha256(''.join(sha256sum_prints).encode()).hexdigest()
    monkeypatch.setattr(text_files, 'LISTED_FILES', 4)
    shutil.rmtree(tmp_path / 'd')
    assert inputs() == {**found, 'files': []}


def test_input_that_changes_while_it_is_read_is_refused(text_file, tmp_path, capsys, monkeypatch):
    make_tokenizer, path = prepare.make_tokenizer, tmp_path / 'a.txt'

    def edit_meanwhile(*arguments):
        path.write_text(path.read_text() + 'more')
        return make_tokenizer(*arguments)

    path.write_bytes(text_file.read_bytes())
    monkeypatch.setattr(prepare, 'make_tokenizer', edit_meanwhile)
    argv = ['text', f'--input={path}', '--tokenizer=byte', f'--data_dir={tmp_path}/d']
    assert 'changed while it was read' in fails(capsys, monkeypatch, prepare.main, *argv)
    assert not (tmp_path / 'd').exists()
