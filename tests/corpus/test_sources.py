import gzip
import itertools
import json
import random
import socket
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from helpers import fails, shared_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prepare
from plaingpt.corpus import documents
from plaingpt.corpus.corpora import OWN_VALIDATION
from plaingpt.corpus.documents import (
    DOCUMENT_FORMS,
    PIECE_CHARS,
    read_bytes,
    read_text,
    split_lines,
    whole_files,
)
from plaingpt.corpus.hub import HubDataset
from plaingpt.corpus.text_files import Files, find_files
from plaingpt.system.errors import UserError
from plaingpt.tokens.dataset import open_dataset
from plaingpt.tokens.tokenizers import BPETokenizer, ByteTokenizer

PAGES = [f'page {i} of the web' for i in range(500)]


def texts_of(source, mark=None):
    return [piece.text for piece in source.pieces(mark)]


def prepared(folder, *argv):
    """Prepare by bytes → [documents of train, documents of val]."""
    prepare.main([*argv, '--tokenizer=byte', f'--data_dir={folder}'])
    dataset = open_dataset(folder)
    found = []
    for split in ('train', 'val'):
        stream = dataset.split(split, in_ram=True)
        texts = bytes((stream.ram % 256).astype('u1')).split(b'\0')[1:]
        found.append([text.decode() for text in texts])
    return found


# -----------------------------------------------------------------------------
# files


def as_jsonl(field='text'):
    return ''.join(json.dumps({'id': i, field: page}) + '\n' for i, page in enumerate(PAGES))


def write_parquet(path, pages=PAGES, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({'text': pages, **columns}), path, row_group_size=64)


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.parquet', 'lines.txt',
                                  'lines.txt.gz', 'lines.txt.zst'])
def test_each_format_gives_the_same_documents(name, tmp_path):
    path = tmp_path / name
    text = '\n'.join(PAGES) if 'lines' in name else as_jsonl()
    if name.endswith('.parquet'):
        write_parquet(path)
    else:
        pack = {'.gz': gzip.compress, '.zst': zstandard.compress}.get(path.suffix, bytes)
        # two compressed streams in a row are one file, as with cat a.gz b.gz
        half = text.index('\n', len(text) // 2) + 1
        path.write_bytes(pack(text[:half].encode()) + pack(text[half:].encode()))
    form = ['--documents=line'] if 'lines' in name else []
    train, val = prepared(tmp_path / 'd', 'text', f'--input={path}', *form)
    assert sorted(train + val) == sorted(PAGES) and 20 < len(val) < 90


@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
def test_rows_whose_text_is_null_are_left_out_and_counted(name, tmp_path, capsys):
    pages = [page if i % 100 else None for i, page in enumerate(PAGES)]
    (tmp_path / 'hub').mkdir()
    if name == 'a.parquet':
        write_parquet(tmp_path / 'hub' / name, pages)
    else:
        (tmp_path / 'hub' / name).write_text(''.join(json.dumps({'text': page}) + '\n'
                                                     for page in pages))
    for argv in (['text', f'--input={tmp_path}/hub'],
                 ['hf', f'--path={tmp_path}/hub', '--val_fraction=0.1']):
        capsys.readouterr()
        train, val = prepared(tmp_path / argv[0], *argv)
        assert sorted(train + val) == sorted(filter(None, pages))
        assert '\n5 rows left out: the text is null\n' in capsys.readouterr().out


def test_progress_ends_at_the_total(tmp_path):
    for name, data in [('a.txt', b'some text\n' * 90_000), ('b.jsonl', as_jsonl().encode()),
                       ('c.jsonl.gz', gzip.compress(as_jsonl().encode()))]:
        (tmp_path / name).write_bytes(data)
    write_parquet(tmp_path / 'd.parquet')
    source = Files(find_files(str(tmp_path)), 'x')
    at = [piece.position for piece in source.pieces()]
    assert at == sorted(at) and at[-1] == source.total and len(set(at)) > 10


def test_what_a_document_is_can_be_said(tmp_path):
    path = tmp_path / 'in.txt'
    path.write_text(' = One = \n\na\nb\n\n\n = = Part = = \nc\n = Two = \nd = \n')
    found = {form: texts_of(Files([path], 'in', form)) for form in DOCUMENT_FORMS}
    assert found == {
        'file': [path.read_text()],
        'line': [' = One = ', 'a', 'b', ' = = Part = = ', 'c', ' = Two = ', 'd = '],
        'paragraph': [' = One = ', 'a\nb', ' = = Part = = \nc\n = Two = \nd = '],
        'title': [' = One = \n\na\nb\n\n\n = = Part = = \nc\n', ' = Two = \nd = \n']}


def test_wikitext_is_cut_into_its_articles():
    path = shared_file('wikitext2_valid.txt')
    articles = texts_of(Files([path], 'w', 'title'))
    assert len(articles) == 60 and ''.join(articles) == path.read_text()
    assert articles[0].lstrip().startswith('= Homarus gammarus = \n')
    assert all(article.startswith(' = ') for article in articles[1:])


def test_files_folders_and_globs_are_found_once_and_in_order(tmp_path):
    for name in ('b/x.py', 'b/deep/y.md.gz', 'b/.git/z.txt', 'b/image.png', 'a.txt', 'c1.log'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b'')
    found = find_files(f'{tmp_path}/b,{tmp_path}/*.txt,{tmp_path}/a.txt,{tmp_path}/c1.log')
    assert [str(path.relative_to(tmp_path)) for path in found] == \
        ['a.txt', 'b/deep/y.md.gz', 'b/x.py', 'c1.log']
    with pytest.raises(UserError, match='no file of that form'):
        find_files(f'{tmp_path}/*.rst')


def test_a_comma_too_many_does_not_name_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('a.txt', 'other.txt'):
        Path(name).write_text('text')
    assert find_files('a.txt,') == find_files(',a.txt') == [Path('a.txt')]


BPE = BPETokenizer.train(['the cat sat on the mat, 12  the\n\n  cat!'] * 3, 290)


@given(st.text(alphabet=' \n\tab1.,\u00a0\u3000\x1f', min_size=1), st.integers(2, 9))
def test_a_long_file_in_pieces_has_the_tokens_of_the_whole(text, size):
    text = 'a' + text
    old, documents.PIECE_CHARS = documents.PIECE_CHARS, size
    try:
        pieces = [piece for piece, *_ in whole_files([(text[:20], 0), (text[20:], 0)])]
    finally:
        documents.PIECE_CHARS = old
    assert ''.join(pieces) == text
    # only a piece without any place to cut is cut at random
    if all(b[0] in ' \n' and not a[-1].isspace() for a, b in itertools.pairwise(pieces)):
        assert [i for piece in pieces for i in BPE.encode(piece)] == BPE.encode(text).tolist()


def test_long_files_come_in_pieces(tmp_path):
    (tmp_path / 'a.txt').write_text('ä word ' * PIECE_CHARS)
    pieces = list(Files([tmp_path / 'a.txt'], 'a').pieces())
    assert len(pieces) > 6 and [piece.new_document for piece in pieces[:3]] == [True, False, False]
    assert max(len(piece.text) for piece in pieces) <= PIECE_CHARS


@given(st.text())
def test_lines_are_those_of_the_text_wherever_the_blocks_end(text):
    blocks = [(text[i:i + 3], i) for i in range(0, len(text), 3)]
    expected = [line + '\n' for line in text.split('\n')]
    expected[-1] = expected[-1][:-1]
    assert [line for line, _ in split_lines(blocks)] == [line for line in expected if line]


def test_bytes_that_are_no_utf8_are_named_with_their_place(tmp_path, monkeypatch):
    data = 'ä'.encode() * 1000 + b'\xff' + b'more \xe2\x82 text'
    (tmp_path / 'a.txt').write_bytes(data)
    (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(data))
    (tmp_path / 'end.txt').write_bytes(data[:2000] + b'\xe2\x82')
    for block in (16, 64, 1999, 2000, 2001, 2**20):
        monkeypatch.setattr(documents, 'BLOCK_BYTES', block)
        for name in ('a.txt', 'a.txt.gz', 'end.txt'):
            with pytest.raises(UserError, match=f'{name}: not UTF-8 at byte 2000: .*replace'):
                list(read_text(tmp_path / name, 'strict'))
        replaced = ''.join(text for text, _ in read_text(tmp_path / 'a.txt', 'replace'))
        assert replaced == data.decode('utf-8', 'replace')


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.binary(max_size=30) | st.just(b' \n') | st.text().map(str.encode)),
       block=st.integers(1, 9), piece=st.integers(2, 9))
def test_any_bytes_of_a_file_are_tokens_of_the_byte_tokenizer(data, block, piece, tmp_path,
                                                              monkeypatch):
    data = b'x' + b''.join(data)
    (tmp_path / 'a.txt').write_bytes(data)
    monkeypatch.setattr(documents, 'BLOCK_BYTES', block)
    monkeypatch.setattr(documents, 'PIECE_CHARS', piece)
    source = Files([tmp_path / 'a.txt'], 'a', errors='surrogateescape')
    assert b''.join(bytes(ByteTokenizer().encode(text)) for text in texts_of(source)) == data


@pytest.mark.parametrize('tokenizer', ['byte', 'borrowed'])
def test_prepared_by_bytes_a_file_that_is_no_utf8_stays_as_it_is(tokenizer, tmp_path):
    (tmp_path / 'utf8.txt').write_text('text ' * 100)
    (tmp_path / 'a.txt').write_bytes(data := random.Random(0).randbytes(100_000))
    prepared(tmp_path / 'borrowed', 'text', f'--input={tmp_path}/utf8.txt')
    chosen = tmp_path / 'borrowed' if tokenizer == 'borrowed' else tokenizer
    prepare.main(['text', f'--input={tmp_path}/a.txt', f'--tokenizer={chosen}',
                  f'--data_dir={tmp_path}/a'])
    dataset = open_dataset(tmp_path / 'a')
    ids = [dataset.split(split, in_ram=True).ram for split in ('train', 'val')]
    assert bytes(np.concatenate(ids).astype('u1')) == data
    splits = dataset.meta['splits'].values()
    assert sum(split['bytes'] for split in splits) == len(data)


# -----------------------------------------------------------------------------
# datasets of the hub, through the real library, from folders in the hub's own layout


@pytest.fixture
def hub_folder(tmp_path):
    """Three parquet files of train, one of validation, and columns besides the text."""
    for part in range(3):
        write_parquet(tmp_path / f'hub/data/train-{part:05d}-of-00003.parquet',
                      [f'{page}, part {part}' for page in PAGES], url=['x'] * len(PAGES))
    write_parquet(tmp_path / 'hub/data/validation-00000-of-00001.parquet', ['held', 'out'],
                  url=['x'] * 2)
    return tmp_path / 'hub'


def test_a_dataset_with_its_own_validation_keeps_it(hub_folder, tmp_path):
    train, val = prepared(tmp_path / 'd', 'tinystories', f'--input={hub_folder}')
    assert val == ['held', 'out']
    assert train == [f'{page}, part {part}' for part in range(3) for page in PAGES]


def test_any_dataset_any_split_and_any_field(hub_folder, tmp_path):
    train, val = prepared(tmp_path / 'd', 'hf', f'--path={hub_folder}', '--split=validation',
                          '--val_split=train', '--text_field=url')
    assert train == ['x'] * 2 and val == ['x'] * 1500


def test_a_nested_field_of_the_hub_is_named_with_dots(tmp_path):
    (tmp_path / 'train.jsonl').write_text('{"a": {"b": "one"}, "c": 1}\n{"a": {"b": null}}\n')
    source = HubDataset(str(tmp_path), '', {'train': 'train'}, 'a.b')
    assert texts_of(source) == ['one'] and source.nulls == 1


def test_a_subset_is_one_of_those_that_the_readme_lists(tmp_path):
    for name in ('small', 'large'):
        write_parquet(tmp_path / f'hub/sample/{name}/000.parquet', [f'{name} {p}' for p in PAGES])
    (tmp_path / 'hub/README.md').write_text(
        '---\nconfigs:\n' + ''.join(
            f'- config_name: {name}\n  data_files:\n  - split: train\n'
            f'    path: sample/{name}/*\n' for name in ('small', 'large')) + '---\n')
    train, val = prepared(tmp_path / 'd', 'fineweb-edu', f'--input={tmp_path}/hub',
                          '--subset=large', '--val_fraction=0.1')
    assert sorted(train + val) == sorted(f'large {page}' for page in PAGES)


def test_wikitext_rows_are_lines_and_become_articles(tmp_path):
    rows = ['', ' = One = \n', '', ' text \n', ' = = Part = = \n', ' = Two = \n', ' more \n']
    write_parquet(tmp_path / 'hub/train-0.parquet', rows)
    write_parquet(tmp_path / 'hub/validation-0.parquet', [' = Three = \n', ' end \n'])
    train, val = prepared(tmp_path / 'd', 'wikitext-2', f'--input={tmp_path}/hub')
    assert train == ['\n = One = \n\n text \n = = Part = = \n', ' = Two = \n more \n']
    assert val == [' = Three = \n end \n']


@pytest.mark.parametrize('rows_read', [1, 63, 64, 65, 499, 500, 501, 1400, 1500, 1501])
def test_a_stream_goes_on_from_a_mark_after_any_row(hub_folder, rows_read):
    def hub():
        return HubDataset(str(hub_folder), '', OWN_VALIDATION)

    source = hub()
    pieces = source.pieces()
    first = [piece.text for piece in itertools.islice(pieces, rows_read)]
    mark = json.loads(json.dumps(source.mark()))
    rest = [piece.text for piece in pieces]
    assert texts_of(hub(), mark) == rest and len(first) == rows_read
    assert [piece.position for piece in hub().pieces(mark)][:1] in ([rows_read + 1], [])


def test_what_is_not_in_a_dataset_is_named(hub_folder, tmp_path, capsys, monkeypatch):
    def message(*argv):
        return fails(capsys, monkeypatch, prepare.main, *argv, f'--data_dir={tmp_path}/d')

    assert 'no field \'body\', it has \'text\', \'url\'' in \
        message('hf', f'--path={hub_folder}', '--text_field=body')
    assert 'nope' in message('hf', f'--path={hub_folder}', '--split=nope')
    assert '--path=' in message('hf')
    (tmp_path / 'empty').mkdir()
    assert f'{tmp_path}/empty cannot be read' in message('hf', f'--path={tmp_path}/empty')
    assert not (tmp_path / 'd').exists()


def test_without_a_network_the_hub_is_one_line(tmp_path, capsys, monkeypatch):
    def no_network(*_, **__):
        raise socket.gaierror('no network here')

    monkeypatch.setattr(socket, 'getaddrinfo', no_network)
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)  # between the library's attempts
    assert '--input=FOLDER' in fails(capsys, monkeypatch, prepare.main, 'openwebtext',
                                     f'--data_dir={tmp_path}/d')
    assert not (tmp_path / 'd').exists()


# -----------------------------------------------------------------------------
# damage


def broken_gzip(data):
    packed = bytearray(gzip.compress(data, mtime=0))
    packed[len(packed) // 2] ^= 0xFF
    return bytes(packed)


@pytest.mark.parametrize(('name', 'data', 'words'), [
    ('a.txt.gz', gzip.compress(b'text ' * 9999, mtime=0)[:-20], 'cut short after'),
    ('a.txt.gz', broken_gzip(bytes(range(256)) * 9), 'damaged after'),
    ('a.txt.gz', b'no gzip at all', 'plain text'),
    ('a.txt.zst', zstandard.compress(b'text ' * 9999)[:-3], 'cut short after'),
    ('a.txt.zst', b'no zstd at all', 'plain text'),
    ('a.jsonl', b'{"text": "fine"}\n{"text": ', 'line 2: not JSON'),
    ('a.jsonl', b'{"body": "fine", "id": 1}\n', "no field 'text', it has 'body', 'id'"),
    ('a.jsonl', b'{"text": 7}\n', 'is int and not text'),
    ('a.jsonl', b'["text"]\n', 'no fields'),
    ('a.jsonl', b'\n \n', 'empty'),
    ('a.parquet', b'PAR1 and nothing else', 'cannot be read'),
    ('a.txt', b'  \n\t \xc2\xa0', 'empty')])
def test_files_that_cannot_be_used_are_one_line(name, data, words, tmp_path, capsys, monkeypatch):
    (tmp_path / name).write_bytes(data)
    message = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={tmp_path}/{name}',
                    '--tokenizer=byte', f'--data_dir={tmp_path}/d')
    assert words in message and str(tmp_path / name) in message
    assert not (tmp_path / 'd').exists()


@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet', 'b.jsonl.gz'])
def test_rows_are_documents_and_no_other_form_is_taken(name, tmp_path, capsys, monkeypatch):
    (tmp_path / name).touch()
    (tmp_path / 'z.txt').touch()
    assert fails(capsys, monkeypatch, prepare.main, 'text', f'--input={tmp_path}',
                 '--documents=line', f'--data_dir={tmp_path}/d').startswith(
        f'error: {tmp_path}/{name}: each row is a document, so --documents=line cannot be')


def test_a_parquet_file_without_the_field_names_those_it_has(tmp_path, capsys, monkeypatch):
    write_parquet(tmp_path / 'a.parquet', url=['x'] * len(PAGES))
    message = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={tmp_path}/a.parquet',
                    '--text_field=body', f'--data_dir={tmp_path}/d', '--tokenizer=byte')
    assert "no field 'body', it has 'text', 'url'" in message


@given(st.binary(max_size=300))
def test_compressed_files_never_lose_bytes_silently(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp('z')
    for name, packed in (('a.gz', gzip.compress(data)), ('a.zst', zstandard.compress(data))):
        (folder / name).write_bytes(packed)
        assert b''.join(part for part, _ in read_bytes(folder / name)) == data
        (folder / name).write_bytes(packed[:-1])
        with pytest.raises(UserError, match='cut short'):
            list(read_bytes(folder / name))


def test_a_dataset_that_is_a_script_is_read_from_the_hubs_parquet_copy(
        tmp_path, monkeypatch, capsys):
    import datasets
    (tmp_path / 'train.jsonl').write_text('{"text": "a page"}\n' * 3)
    original = datasets.load_dataset_builder

    def hub(path, subset, revision=None):
        if revision != 'refs/convert/parquet':
            raise RuntimeError('Dataset scripts are no longer supported, but found openwebtext.py')
        return original(str(tmp_path))

    monkeypatch.setattr(datasets, 'load_dataset_builder', hub)
    source = HubDataset('Skylion007/openwebtext', '', {'train': 'train'})
    assert [piece.text for piece in source.pieces()] == ['a page'] * 3
    assert 'Parquet copy' in capsys.readouterr().out
