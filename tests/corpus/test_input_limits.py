"""Input files that expand, that are one endless line, or that were damaged: time and memory are
bounded, and what was read is on record."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import zlib

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from helpers import ROOT, fails

import prepare
from plaingpt.corpus import documents, encoding, text_files
from plaingpt.corpus.documents import DOCUMENT_FORMS, split_lines
from plaingpt.corpus.text_files import Files
from plaingpt.system.errors import UserError


def write_parquet(path, texts, **options):
    pyarrow.parquet.write_table(pyarrow.table({'text': texts}), path, **options)


def texts_of(path, form='file'):
    return [piece.text for piece in Files([path], path.name, form).pieces()]


# -----------------------------------------------------------------------------
# expansion


def compressed(stream, head, megabytes):
    return b''.join([stream.compress(head), *(stream.compress(b'a' * 10**6)
                                              for _ in range(megabytes)), stream.flush()])


def write_bombs(folder):
    folder.mkdir()
    for name, head in (('a.txt.zst', b'a'), ('b.jsonl.zst', b'{"text": "')):
        (folder / name).write_bytes(compressed(zstandard.ZstdCompressor().compressobj(), head, 200))
    (folder / 'c.txt.gz').write_bytes(compressed(zlib.compressobj(9, wbits=31), b'a', 50))
    one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500, pyarrow.int32()),
                                              pyarrow.array(['a' * 10**6]))
    write_parquet(folder / 'd.parquet', one, compression='zstd')
    write_parquet(folder / 'e.parquet', ['a' * 500_000 + str(i) for i in range(200)],
                  compression='zstd', use_dictionary=False,
                  column_encoding={'text': 'DELTA_BYTE_ARRAY'})
    write_parquet(folder / 'f.parquet', ['a' * 50_000_000], compression='zstd',
                  use_dictionary=False, write_statistics=False)
    write_parquet(folder / 'g.parquet', pyarrow.nulls(10**6, pyarrow.string()), compression='zstd')
    return sorted(folder.iterdir())


def test_files_that_expand_without_end_are_refused_within_bounded_memory(tmp_path):
    bombs = write_bombs(tmp_path / 'bombs')
    code = ('import prepare, pyarrow.parquet, resource, sys, zstandard\n'
            'from plaingpt.corpus import documents\n'
            'from plaingpt.system.errors import UserError\n'
            'documents.EXPANDED_BYTES = 10**7\n'
            'peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n'
            'before = peak()\n'
            'for bomb in sys.argv[2:]:\n'
            '    try:\n'
            '        prepare.main(["text", f"--input={bomb}", "--tokenizer=byte",\n'
            '                      f"--data_dir={sys.argv[1]}"])\n'
            '    except UserError as e:\n'
            '        print(f"refused {e}")\n'
            'print("grew by", peak() - before)\n')
    done = subprocess.run([sys.executable, '-c', code, tmp_path / 'd', *bombs], cwd=ROOT, text=True,
                          capture_output=True)
    refused = [line for line in done.stdout.splitlines() if line.startswith('refused')]
    assert len(refused) == len(bombs), done.stdout + done.stderr
    for bomb, line in zip(bombs, refused, strict=True):
        assert f'{bomb}: {bomb.stat().st_size:,} bytes that expand to' in line and 'unpack' in line
    assert int(done.stdout.split()[-1]) < 150e6  # unbounded, each takes hundreds of MB
    assert not (tmp_path / 'd').exists()


def test_text_as_repetitive_as_logs_is_read_at_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, 'EXPANDED_BYTES', 0)
    chance = random.Random(0)
    lines = [f'2024-01-01T00:{i // 60 % 60:02}:{i % 60:02} INFO request {chance.randrange(100)} '
             'was served without an error' for i in range(50_000)]
    for name, pack in (('a.txt.zst', zstandard.compress), ('b.txt.gz', gzip.compress)):
        (tmp_path / name).write_bytes(pack('\n'.join(lines).encode()))
        assert texts_of(tmp_path / name, 'line') == lines


def test_a_window_larger_than_memory_allows_is_no_damage(tmp_path):
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


@pytest.mark.parametrize(('name', 'form', 'text', 'place'), [
    ('a.jsonl', 'file', '{"text": "a"}\n{"text": "%s"}\n', ', line 2'),
    ('a.txt', 'line', 'a\nb\n%s\n', ', line 3'),
    ('a.txt', 'paragraph', 'a\n\nword\n%s\nword', ': a paragraph'),
    ('a.txt', 'title', ' = One = \nword\n%s\n', ': an article'),
    ('a.parquet', 'file', '%s', ', row 2')])
def test_what_is_held_in_memory_whole_has_a_limit(name, form, text, place, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, 'MAX_DOCUMENT_CHARS', 1000)
    monkeypatch.setattr(documents, 'BLOCK_BYTES', 100)
    for characters in (900, 1100):
        if name == 'a.parquet':
            write_parquet(tmp_path / name, ['a', 'b' * characters])
        else:
            (tmp_path / name).write_text(text % ('word\n' * (characters // 5) if form in (
                'paragraph', 'title') else 'b' * characters))
        if characters < 1000:
            assert sum(map(len, texts_of(tmp_path / name, form))) >= characters
        else:
            with pytest.raises(UserError, match=f'{tmp_path / name}{place} exceeds 1,000 char'):
                texts_of(tmp_path / name, form)


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
        file = io.BytesIO()
        write_parquet(file, PAGES, row_group_size=64, write_page_checksum=True)
        return file.getvalue()
    return gzip.compress(text, mtime=0) if name == 'a.txt.gz' else \
        zstandard.ZstdCompressor(write_checksum=True).compress(text)


@pytest.mark.parametrize('name', ['a.txt.gz', 'a.txt.zst', 'a.parquet'])
def test_a_flipped_bit_never_changes_the_text_where_the_file_has_checksums(name, tmp_path):
    chance, good, found = random.Random(0), pack(name), 0
    for _ in range(80):
        data = bytearray(good)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / name).write_bytes(data)
        try:
            assert texts_of(tmp_path / name, 'file' if name == 'a.parquet' else 'line') == PAGES
        except UserError as problem:
            assert str(tmp_path / name) in str(problem)
            found += 1
    assert found > 50  # the others hit what says nothing of the text, such as its creation time


@pytest.mark.parametrize('options', [
    {'use_dictionary': True, 'dictionary_pagesize_limit': 1000, 'data_page_size': 500},
    {'use_dictionary': True, 'dictionary_pagesize_limit': 1000, 'data_page_size': 500,
     'version': '2.6', 'data_page_version': '2.0'},
    {'use_dictionary': False},
    {'use_dictionary': False, 'column_encoding': {'text': 'DELTA_BYTE_ARRAY'}},
    {'use_dictionary': False, 'column_encoding': {'text': 'DELTA_LENGTH_BYTE_ARRAY'}}])
def test_each_encoding_of_parquet_gives_the_rows(options, tmp_path):
    texts = [None if i % 7 == 0 else PAGES[i * i % 300] for i in range(1000)]
    write_parquet(tmp_path / 'a.parquet', texts, row_group_size=400, **options)
    assert texts_of(tmp_path / 'a.parquet') == [text for text in texts if text is not None]


def test_a_nested_field_is_no_text(tmp_path):
    write_parquet(tmp_path / 'a.parquet', [['a'], ['b', 'c']])
    with pytest.raises(UserError, match="field 'text' is nested and not text"):
        texts_of(tmp_path / 'a.parquet')


def test_meta_json_has_the_checksums_of_what_was_read(tmp_path, monkeypatch):
    folder = tmp_path / 'in'
    folder.mkdir()
    for name in ('a.txt.gz', 'a.txt.zst', 'a.parquet'):
        (folder / name).write_bytes(pack(name))
    (folder / 'b.jsonl').write_text(json.dumps({'text': 'ä'}))
    (folder / os.fsdecode(b'c\xff.txt')).write_text('text')

    def inputs():
        prepare.main(['text', f'--input={folder}', '--tokenizer=byte', f'--data_dir={tmp_path}/d'])
        return json.loads((tmp_path / 'd/meta.json').read_text())['inputs']

    # what `sha256sum FILES` prints
    paths = sorted(folder.iterdir())
    printed = [f'{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n'
               .encode('utf-8', 'backslashreplace').decode() for path in paths]
    found = inputs()
    assert [f'{file["sha256"]}  {file["name"]}\n' for file in found['files']] == printed
    assert [file['bytes'] for file in found['files']] == [path.stat().st_size for path in paths]
    assert found['count'] == 5 and found['bytes'] == sum(path.stat().st_size for path in paths)
    assert found['sha256'] == hashlib.sha256(''.join(printed).encode()).hexdigest()
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
