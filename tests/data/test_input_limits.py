"""Input files that expand, that are one endless line, or that were damaged: time and memory are
bounded, and what was read is on record."""

import gzip
import hashlib
import os
import random
import resource
import zlib

import pyarrow
import pytest
import zstandard
from corpus_files import prepared, texts_of, write_parquet, write_rows
from helpers import exit_code, fork

import prepare
from plaingpt.data import encoding, readers, shards
from plaingpt.system.errors import UserError
from plaingpt.data.dataset import open_dataset

# -----------------------------------------------------------------------------
# expansion


def write_bombs(folder):
    """Small files of each kind that hold 30 MB to 500 MB of text, or a million nulls."""
    folder.mkdir()
    megabyte = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500, pyarrow.int32()),
                                                   pyarrow.array(['a' * 10**6]))
    for name, stream, head, megabytes in (
            ('a.txt.zst', zstandard.ZstdCompressor().compressobj(), b'a', 200),
            ('b.jsonl.zst', zstandard.ZstdCompressor().compressobj(), b'{"text": "', 200),
            ('c.txt.gz', zlib.compressobj(9, wbits=31), b'a', 30)):
        (folder / name).write_bytes(stream.compress(head) + b''.join(
            stream.compress(b'a' * 10**6) for _ in range(megabytes)) + stream.flush())
    write_parquet(folder / 'd.parquet', megabyte, compression='zstd')
    write_parquet(folder / 'e.parquet', ['a' * 30_000_000], compression='zstd',
                  use_dictionary=False, write_statistics=False)
    write_parquet(folder / 'f.parquet', pyarrow.nulls(10**6, pyarrow.string()), compression='zstd')
    return sorted(folder.iterdir())


def test_files_that_expand_without_end_are_refused_within_bounded_memory(tmp_path, monkeypatch):
    bombs = write_bombs(tmp_path / 'bombs')
    monkeypatch.setattr(documents, 'EXPANDED_BYTES', 10**7)

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


# -----------------------------------------------------------------------------
# lines, rows and paragraphs without end


@pytest.mark.parametrize(('name', 'form', 'begin', 'more', 'place'), [
    ('a.json', 'file', '[{"text": [', '1, ', ', row 1'),
    ('a.json', 'file', '{"text": "', 'word ', ', row 1'),
    ('a.jsonl', 'file', '{"text": "a"}\n{"text": "', 'word ', ', line 2'),
    ('a.csv', 'file', 'text\n', 'word ', ', line 2'),
    ('a.csv', 'file', 'text\n"', 'word\n', ', the row from line 2 on'),
    ('a.txt', 'file', '', ' \n', ': the white space at its beginning'),
    ('a.txt', 'line', 'a\nb\n', 'word ', ', line 3'),
    ('a.txt', 'paragraph', 'a\n\n', 'word\n', ': a paragraph'),
    ('a.txt', 'title', ' = One = \n', 'word\n', ': an article')])
def test_what_is_held_in_memory_whole_has_a_limit_and_is_refused_there(
        name, form, begin, more, place, tmp_path, monkeypatch):
    reading, read = documents.read_bytes, 0

    def count(*arguments):
        nonlocal read
        for data, position in reading(*arguments):
            read += len(data)
            yield data, position

    monkeypatch.setattr(documents, 'MAX_DOCUMENT_CHARS', 10_000)
    monkeypatch.setattr(documents, 'BLOCK_BYTES', 1000)
    monkeypatch.setattr(documents, 'read_bytes', count)
    (tmp_path / name).write_text(begin + more * 20_000)
    with pytest.raises(UserError, match=f'{tmp_path / name}{place} exceeds 10,000 characters'):
        texts_of(tmp_path / name, form)
    assert read < 40_000


def test_a_row_of_parquet_has_that_limit_too(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, 'MAX_DOCUMENT_CHARS', 10_000)
    write_parquet(tmp_path / 'a.parquet', ['b' * 10_000, 'b' * 10_001])
    with pytest.raises(UserError, match=r'a\.parquet, row 2 exceeds 10,000 characters'):
        texts_of(tmp_path / 'a.parquet')


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


@pytest.mark.parametrize('name', ['a.txt.gz', 'a.txt.zst', 'a.parquet'])
def test_a_flipped_bit_never_changes_the_text_where_the_file_has_checksums(name, tmp_path):
    path, text = tmp_path / name, '\n'.join(PAGES).encode()
    if name == 'a.parquet':
        write_parquet(path, PAGES, row_group_size=64, write_page_checksum=True)
    else:
        path.write_bytes(gzip.compress(text, mtime=0) if name == 'a.txt.gz' else
                         zstandard.ZstdCompressor(write_checksum=True).compress(text))
    chance, good, found = random.Random(0), path.read_bytes(), 0
    for _ in range(40):
        data = bytearray(good)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            assert texts_of(path, 'file' if name == 'a.parquet' else 'line') == PAGES
        except UserError as problem:
            assert str(path) in str(problem)
            found += 1
    assert found > 20  # the others hit what says nothing of the text, such as its creation time


def test_meta_json_has_the_checksums_of_what_was_read(tmp_path, monkeypatch):
    folder = tmp_path / 'in'
    write_rows(folder / 'a.jsonl', ['ä'])
    write_parquet(folder / 'b.parquet', PAGES)
    (folder / os.fsdecode(b'c\xff.txt')).write_text('text')
    (folder / 'd.txt.gz').write_bytes(gzip.compress(b'text'))

    def inputs(data_dir):
        prepared(data_dir, 'text', f'--input={folder}')
        return open_dataset(data_dir).meta['inputs']

    paths, found = sorted(folder.iterdir()), inputs(tmp_path / 'd')
    sha256sum_prints = [f'{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n'
                        .encode('utf-8', 'backslashreplace').decode() for path in paths]
    assert [f'{file["sha256"]}  {file["name"]}\n' for file in found['files']] == sha256sum_prints
    assert [file['bytes'] for file in found['files']] == [path.stat().st_size for path in paths]
    assert found['count'] == 4 and found['bytes'] == sum(path.stat().st_size for path in paths)
    assert found['sha256'] == hashlib.sha256(''.join(sha256sum_prints).encode()).hexdigest()
    monkeypatch.setattr(shards, 'LISTED_FILES', 3)
    assert inputs(tmp_path / 'many') == {**found, 'files': []}


def test_input_that_changes_while_it_is_read_is_refused(tmp_path, refused, monkeypatch):
    make_tokenizer, path = prepare.make_tokenizer, tmp_path / 'a.txt'

    def edit_meanwhile(*arguments):
        path.write_text(path.read_text() + 'more')
        return make_tokenizer(*arguments)

    path.write_text('some text ' * 999)
    monkeypatch.setattr(prepare, 'make_tokenizer', edit_meanwhile)
    assert 'changed while it was read' in refused('text', f'--input={path}')
