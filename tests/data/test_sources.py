"""Files and datasets of the hub → documents."""

import gzip
import json
import re
import socket
import time
from itertools import chain, islice, pairwise

import pytest
from corpus_files import prepared, texts_of, write_parquet, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaingpt.data import documents
from plaingpt.data.corpora import OWN_VALIDATION
from plaingpt.data.readers import DOCUMENT_FORMS, whole_file
from plaingpt.data.hub import HubDataset
from plaingpt.data.input_files import find_files
from plaingpt.data.sources import Files
from plaingpt.system.errors import UserError
from plaingpt.data.tokenizers import BPETokenizer

PAGES = [f'page {i} of the web' for i in range(500)]


def pieces_of(source, mark=None):
    return [piece.text for piece in source.pieces(mark)]


# -----------------------------------------------------------------------------
# files


def test_rows_whose_text_is_null_are_left_out_and_counted(tmp_path, capsys):
    pages = [page if i % 100 else None for i, page in enumerate(PAGES)]
    write_rows(tmp_path / 'rows/a.jsonl', pages)
    write_parquet(tmp_path / 'hub/a.parquet', pages)
    for argv in (['text', f'--input={tmp_path}/rows'],
                 ['hf', f'--path={tmp_path}/hub', '--val_fraction=0.1']):
        found = prepared(tmp_path / argv[0], *argv)
        assert sorted(chain(*found)) == sorted(filter(None, pages))
        assert '\n5 rows left out: the text is null\n' in capsys.readouterr().out


def test_progress_ends_at_the_total(tmp_path):
    write_rows(tmp_path / 'b.jsonl', PAGES)
    (tmp_path / 'a.txt').write_bytes(b'some text\n' * 90_000)
    (tmp_path / 'c.jsonl.gz').write_bytes(gzip.compress((tmp_path / 'b.jsonl').read_bytes()))
    write_parquet(tmp_path / 'd.parquet', PAGES)
    source = Files(find_files(str(tmp_path)), 'x')
    at = [piece.position for piece in source.pieces()]
    assert at == sorted(at) and at[-1] == source.total and len(set(at)) > 10


def test_what_a_document_is_can_be_said(tmp_path):
    path = tmp_path / 'in.txt'
    path.write_text(' = One = \n\na\nb\n\n\n = = Part = = \nc\n = Two = \nd = \n')
    assert {form: texts_of(path, form) for form in DOCUMENT_FORMS} == {
        'file': [path.read_text()],
        'line': [' = One = ', 'a', 'b', ' = = Part = = ', 'c', ' = Two = ', 'd = '],
        'paragraph': [' = One = ', 'a\nb', ' = = Part = = \nc\n = Two = \nd = '],
        'title': [' = One = \n\na\nb\n\n\n = = Part = = \nc\n', ' = Two = \nd = \n']}


BPE = BPETokenizer.train(['the cat sat on the mat, 12  the\n\n  cat!'] * 3, 290)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=st.text(alphabet=' \n\tab1.,\u00a0\u3000\x1f', min_size=1), size=st.integers(2, 9))
def test_a_long_file_in_pieces_has_the_tokens_of_the_whole(text, size, monkeypatch):
    text = 'a' + text
    monkeypatch.setattr(documents, 'PIECE_CHARS', size)
    pieces = [piece for piece, *_ in whole_files([(text[:20], 0), (text[20:], 0)])]
    assert ''.join(pieces) == text and max(map(len, pieces)) <= size
    # only a piece without a space after a word is cut elsewhere
    elsewhere = [a + b[0] for a, b in pairwise(pieces) if a[-1].isspace() or b[0] not in ' \n']
    assert not any(re.search(r'\S[ \n]', piece) for piece in elsewhere)
    if not elsewhere:
        assert [i for piece in pieces for i in BPE.encode(piece)] == BPE.encode(text).tolist()


def test_bytes_that_are_no_utf8_are_named_with_their_place(tmp_path, monkeypatch):
    data = 'ä'.encode() * 1000 + b'\xff' + b'more \xe2\x82 text'
    for name, content in (('a.txt', data), ('a.txt.gz', gzip.compress(data)),
                          ('end.txt', data[:2000] + b'\xe2\x82')):
        (tmp_path / name).write_bytes(content)
        for block in (16, 1999, 2000, 2001, 2**20):
            monkeypatch.setattr(documents, 'BLOCK_BYTES', block)
            with pytest.raises(UserError, match=f'{name}: not UTF-8 at byte 2000: .*replace'):
                texts_of(tmp_path / name)
            replaced = ''.join(texts_of(tmp_path / 'a.txt', errors='replace'))
            assert replaced == data.decode('utf-8', 'replace')


# -----------------------------------------------------------------------------
# datasets of the hub, through the real library, from folders in the hub's own layout


@pytest.fixture(scope='module')
def hub_folder(tmp_path_factory):
    """Three Parquet files of train, each of two row groups, and one of validation."""
    folder = tmp_path_factory.mktemp('sources') / 'json'  # also the name of a reader of datasets
    for part in range(3):
        write_parquet(folder / f'data/train-{part:05d}-of-00003.parquet',
                      [f'{page}, part {part}' for page in PAGES[:100]], row_group_size=64)
    write_parquet(folder / 'data/validation-00000-of-00001.parquet', ['held', 'out'])
    return folder


def test_a_dataset_with_its_own_validation_keeps_it(hub_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(hub_folder.parent)
    train, val = prepared(tmp_path / 'd', 'tinystories', f'--input={hub_folder.name}')
    assert val == ['held', 'out']
    assert train == [f'{page}, part {part}' for part in range(3) for page in PAGES[:100]]


def test_any_split_and_any_field_also_a_nested_one(tmp_path):
    for split, url in (('train', 'x'), ('validation', 'y')):
        (tmp_path / f'{split}.jsonl').write_text(
            json.dumps({'text': 'text', 'page': {'url': url}}) + '\n{"text": "", "page": null}\n')
    assert prepared(tmp_path / 'd', 'hf', f'--path={tmp_path}', '--split=validation',
                    '--val_split=train', '--text_field=page.url') == [['y'], ['x']]
    source = HubDataset(str(tmp_path), '', {'train': 'train'}, 'page.url')
    assert pieces_of(source) == ['x'] and source.nulls == 1


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


def test_a_stream_goes_on_from_a_mark_after_any_row(hub_folder):
    def hub():
        return HubDataset(str(hub_folder), '', OWN_VALIDATION)

    rows = 302
    for rows_read in (1, 64, 65, 100, 101, 300, 301, rows):  # row groups, files and splits end
        source = hub()
        pieces = source.pieces()
        first = [piece.text for piece in islice(pieces, rows_read)]
        mark = json.loads(json.dumps(source.mark()))
        rest = [piece.text for piece in pieces]
        resumed = list(hub().pieces(mark))
        assert len(first) == rows_read and len(first + rest) == rows
        assert [(piece.text, piece.position) for piece in resumed] == \
            [*zip(rest, range(rows_read + 1, rows + 1), strict=True)], rows_read


def test_what_is_not_in_a_dataset_is_named(hub_folder, tmp_path, refused):
    assert "no field 'body', it has 'text'" in \
        refused('hf', f'--path={hub_folder}', '--text_field=body')
    assert 'nope' in refused('hf', f'--path={hub_folder}', '--split=nope')
    assert '--path=' in refused('hf')
    # datasets would read all such files of the working directory
    assert 'path=parquet: no such folder' in refused('hf', '--path=parquet')
    (tmp_path / 'empty').mkdir()
    assert f'{tmp_path}/empty cannot be read' in refused('hf', f'--path={tmp_path}/empty')


def test_without_a_network_the_hub_is_one_line(refused, monkeypatch):
    def no_network(*_, **__):
        raise socket.gaierror('no network here')

    monkeypatch.setattr(socket, 'getaddrinfo', no_network)
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)  # between the library's attempts
    assert '--input=FOLDER' in refused('openwebtext')


def test_a_dataset_that_is_a_script_is_read_from_the_hubs_parquet_copy(
        tmp_path, monkeypatch, capsys):
    import datasets
    write_rows(tmp_path / 'train.jsonl', ['a page'] * 3)
    original = datasets.load_dataset_builder

    def hub(path, subset, revision=None):
        if revision != 'refs/convert/parquet':
            raise RuntimeError('Dataset scripts are no longer supported, but found openwebtext.py')
        return original(str(tmp_path))

    monkeypatch.setattr(datasets, 'load_dataset_builder', hub)
    source = HubDataset('Skylion007/openwebtext', '', {'train': 'train'})
    assert pieces_of(source) == ['a page'] * 3
    assert 'Parquet copy' in capsys.readouterr().out
