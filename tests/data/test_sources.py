"""Files and datasets of the hub → documents."""

import gzip
import hashlib
import json
import os
import socket
import time
from itertools import islice

import pytest
from corpus_files import prepared, write_parquet, write_rows

import prepare
from plaingpt.data import encoding, shards
from plaingpt.data.corpora import OWN_VALIDATION
from plaingpt.data.dataset import open_dataset
from plaingpt.data.hub import HubDataset
from plaingpt.data.sources import Files, find_files

PAGES = [f'page {i} of the web' for i in range(500)]


def texts_of(source, mark=None):
    return [piece.text for piece in source.pieces(mark)]


# -----------------------------------------------------------------------------
# files


def test_progress_ends_at_the_total(tmp_path):
    write_rows(tmp_path / 'b.jsonl', PAGES)
    (tmp_path / 'a.txt').write_bytes(b'some text\n' * 90_000)
    (tmp_path / 'c.jsonl.gz').write_bytes(gzip.compress((tmp_path / 'b.jsonl').read_bytes()))
    write_parquet(tmp_path / 'd.parquet', PAGES)
    source = Files(find_files(str(tmp_path)), 'x')
    at = [source.position() for _ in source.pieces()] + [source.position()]
    assert at[-1] == source.total and len(set(at)) > 5


def test_a_few_files_are_one_text_joined_at_line_breaks_and_many_are_documents(tmp_path):
    (tmp_path / 'in').mkdir()
    for i, text in enumerate(['one', 'TWO\n', 'three\r\n', 'four', ' \n', '\n\nfive', 'six']):
        (tmp_path / f'in/{i}.txt').write_bytes(text.encode())
    whole = 'one\nTWO\nthree\r\nfour\n\n\nfive\nsix'
    prepare.main(['text', f'--input={tmp_path}/in', '--tokenizer=char', f'--data_dir={tmp_path}/d'])
    dataset = open_dataset(tmp_path / 'd')
    ids = [i for split in ('train', 'val') for i in dataset.split(split, in_ram=True).ram]
    assert dataset.tokenizer().decode(ids) == whole
    assert dataset.meta['source']['train_characters'] == int(len(whole) * 0.9)
    assert sum(split['bytes'] for split in dataset.meta['splits'].values()) == len(whole)
    for i, text in enumerate(PAGES):
        (tmp_path / f'{i:03d}.txt').write_text(text)
    assert texts_of(Files(sorted(tmp_path.glob('*.txt')), 'x')) == PAGES


def test_meta_json_has_the_checksums_of_what_was_read(tmp_path, monkeypatch):
    for name in ('b.txt', os.fsdecode(b'c\xff.txt')):
        (tmp_path / name).write_text(name * 99, errors='replace')
    lines = [f'{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n'  # as sha256sum prints
             .encode('utf-8', 'backslashreplace').decode() for path in find_files(str(tmp_path))]
    for limit in (2, 1):
        monkeypatch.setattr(shards, 'LISTED_FILES', limit)
        prepared(tmp_path / f'd{limit}', 'text', f'--input={tmp_path}/*.txt')
        found = open_dataset(tmp_path / f'd{limit}').meta['inputs']
        assert found['sha256'] == hashlib.sha256(''.join(lines).encode()).hexdigest()
        assert [f'{file["sha256"]}  {file["name"]}\n' for file in found['files']] == (
            lines if limit == 2 else [])


def test_input_that_changes_while_it_is_read_is_refused(tmp_path, refused, monkeypatch):
    make_tokenizer, path = prepare.borrow_or_train, tmp_path / 'a.txt'
    path.write_text('some text ' * 999)
    monkeypatch.setattr(prepare, 'borrow_or_train', lambda *arguments: (
        path.write_text('other text ' * 999), make_tokenizer(*arguments))[1])
    assert 'changed while it was read' in refused('text', f'--input={path}')


def test_a_huge_document_is_not_waited_for_by_many_others():
    taken = []
    batches = (taken.append(i) or encoding.TextBatch([], 100 * encoding.BATCH_CHARS, 0, 0, None)
               for i in range(20))
    for done, _ in enumerate(encoding.map_in_order(id, batches, 4), 1):
        assert len(taken) == done


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
    assert texts_of(source) == ['x'] and source.nulls == 1


def test_a_subset_is_one_of_those_that_the_readme_lists(tmp_path):
    card = '---\nconfigs:\n'
    for name in ('small', 'large'):
        write_parquet(tmp_path / f'hub/sample/{name}/000.parquet', [f'{name} {p}' for p in PAGES])
        card += f'- config_name: {name}\n  data_files: sample/{name}/*\n'
    (tmp_path / 'hub/README.md').write_text(card + '---\n')
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
        resumed = hub()
        assert texts_of(resumed, mark) == rest, rows_read
        assert len(first) == rows_read and len(first + rest) == resumed.position() == rows


def test_what_is_not_in_a_dataset_is_named(hub_folder, tmp_path, refused):
    assert "no field 'body', it has 'text'" in \
        refused('hf', f'--path={hub_folder}', '--text_field=body')
    assert 'nope' in refused('hf', f'--path={hub_folder}', '--split=nope')
    assert '--path=' in refused('hf')
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
    assert texts_of(source) == ['a page'] * 3
    assert 'Parquet copy' in capsys.readouterr().out
