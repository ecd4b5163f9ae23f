"""What --input can name: which files are read, what is told of the others, what is refused."""

import gzip
import json
import os
import socket
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers import ROOT, fails, run

import prepare
from plaingpt.corpus.text_files import Files, find_files
from plaingpt.tokens.dataset import open_dataset

ODD = os.fsdecode(b'odd\xff.txt')
TEXTS = ['a.txt', 'b.md', 'UPPER.TXT', 'code.Py', 'sub/c.txt', 'sub/deep/d.rst', 'with space.txt',
         'comma,name.txt', 'br[1].txt', 'new\nline.txt', ODD, '~tilde.txt', 'noending', 'e.log',
         'pics/x.png', '.hidden.txt', '.dot/h.txt', 'web/index.js', 'web/node_modules/lib.js',
         'web/__pycache__/x.py', 'conf/main.py', 'conf/package.json', 'conf/table.csv',
         'unknown/x.bin', 'unknown/y.dat', 'unknown/z.DAT', 'other/o.txt', 'loops/l.txt']


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A working directory with files of all names, links, loops and what is no file."""
    root = tmp_path / 'tree'
    for name in TEXTS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{name!a} says this\n' * 20)
    (root / 'sub/z.txt.gz').write_bytes(gzip.compress(b'packed text\n' * 20))
    for link, to in [('loops/self', '.'), ('loops/again', '.'), ('loops/up', '..'),
                     ('loops/circle', 'circle'), ('loops/broken.txt', 'nowhere'),
                     ('links/folder', '../other'), ('links/same', '../other'),
                     ('links/file.txt', '../a.txt'), ('loop.txt', 'loop.txt')]:
        (root / link).parent.mkdir(exist_ok=True)
        (root / link).symlink_to(to)
    os.link(root / 'b.md', root / 'links/hard.md')
    (root / 'empty').mkdir()
    os.mkfifo(root / 'pipe.txt')
    monkeypatch.chdir(root)
    monkeypatch.setenv('HOME', str(root / 'sub'))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind('sock.txt')
        yield root


def inputs(options):
    """Prepare → names of the files that were read, as meta.json has them."""
    prepare.main(['text', *options, '--tokenizer=byte', '--data_dir=../d', '--val_fraction=0.1',
                  '--overwrite'])
    meta = json.loads(Path('../d/meta.json').read_text())
    return [file['name'] for file in meta['inputs']['files']]


SUB = ['sub/c.txt', 'sub/deep/d.rst', 'sub/z.txt.gz']


@pytest.mark.parametrize(('wanted', 'names'), [
    ('a.txt', ['a.txt']),
    ('./a.txt', ['a.txt']),
    ('a.txt/', ['a.txt']),
    ('noending', ['noending']),
    ('e.log', ['e.log']),
    ('UPPER.TXT', ['UPPER.TXT']),
    ('.hidden.txt', ['.hidden.txt']),
    ('with space.txt', ['with space.txt']),
    ('comma,name.txt', ['comma,name.txt']),
    ('br[1].txt', ['br[1].txt']),
    ('new\nline.txt', ['new\nline.txt']),
    (ODD, ['odd\\udcff.txt']),
    ('~tilde.txt', ['~tilde.txt']),
    ('~/c.txt', ['{root}/sub/c.txt']),
    ('~', ['{root}/sub/c.txt', '{root}/sub/deep/d.rst', '{root}/sub/z.txt.gz']),
    ('a.txt,b.md', ['a.txt', 'b.md']),
    ('b.md, a.txt', ['a.txt', 'b.md']),
    (',a.txt,,', ['a.txt']),
    ('a.txt,a.txt,./a.txt', ['a.txt']),
    ('a.txt,links/file.txt', ['links/file.txt']),
    ('b.md,links/hard.md', ['links/hard.md']),
    ('links/file.txt', ['links/file.txt']),
    ('sub', SUB), ('sub/', SUB), ('sub//', SUB), ('sub,sub/c.txt', SUB),
    ('.dot', ['.dot/h.txt']),
    ('links', ['links/file.txt', 'links/folder/o.txt', 'links/hard.md']),
    ('links/folder', ['links/folder/o.txt']),
    ('loops', ['loops/l.txt']),
    ('web', ['web/index.js']),
    ('conf', ['conf/main.py']),
    ('conf,conf/table.csv', ['conf/main.py', 'conf/table.csv']),
    ('[ab].*', ['a.txt', 'b.md']),
    ('*/[cx].*', ['pics/x.png', 'sub/c.txt', 'unknown/x.bin']),
    ('sub/**', SUB), ('sub/**/*', SUB), ('s*/**/*.txt', ['sub/c.txt']),
    ('loops/**/*.txt', ['loops/l.txt']),
    ('web/**/*.js', ['web/index.js']),
    ('~/*.txt', ['{root}/sub/c.txt'])])
def test_each_of_these_is_read(wanted, names, tree, monkeypatch):
    if 'csv' in wanted:
        Path('conf/table.csv').write_text('text\n' + ''.join(f'row {i}\n' for i in range(99)))
    assert inputs([f'--input={wanted}']) == [name.format(root=tree) for name in names]


@pytest.mark.parametrize(('wanted', 'words'), [
    ('missing.txt', 'missing.txt: No such file or directory'),
    ('a.txt,missing.txt', 'missing.txt: No such file or directory'),
    ('new\nmissing.txt', 'new\\nmissing.txt: No such file or directory'),
    (os.fsdecode(b'\xff'), '\\udcff: No such file or directory'),
    ('~nobody-of-that-name/a.txt', 'a.txt: No such file or directory'),
    ('x' * 300, ': File name too long'),
    ('a.txt/b.txt', 'Not a directory'),
    ('loop.txt', 'Too many levels of symbolic links'),
    ('', '--input=FILES_OR_FOLDERS'),
    ('https://host/a.txt', 'https://host/a.txt: URLs are not read: download it'),
    (',', "input=',': it names no file"),
    (' , ', "input=' , ': it names no file"),
    ('empty', 'empty: it is an empty folder'),
    ('*.rst', '*.rst: no file of that form'),
    ('nowhere/**', 'nowhere/**: no file of that form'),
    ('a.txt/**', 'a.txt/**: no file of that form'),
    ('s[ou]b/deep*', 'nothing is read: 1 folder: sub/deep/'),
    ('pics', 'nothing is read: 1 .png: pics/x.png'),
    ('unknown', 'nothing is read: 2 .dat: unknown/y.dat, unknown/z.DAT; 1 .bin: unknown/x.bin'),
    ('web/node_modules/../__pycache__/*.txt', 'no file of that form'),
    ('pipe.txt', 'pipe.txt is a pipe, a socket or a device'),
    ('sock.txt', 'sock.txt is a pipe, a socket or a device'),
    ('a.txt,/dev/zero', '/dev/zero is a pipe, a socket or a device'),
    ('/dev/null', '/dev/null is a pipe, a socket or a device')])
def test_each_of_these_is_refused_in_one_line(wanted, words, tree, capsys, monkeypatch):
    started = time.monotonic()
    assert words in fails(capsys, monkeypatch, inputs, f'--input={wanted}')
    assert not Path('../d').exists() and time.monotonic() - started < 5


def test_what_prepare_writes_is_left_out_below_a_glob(tmp_path):
    for name in ('train.bin', 'val_000001.bin', 'test.bin', 'test_000000.bin', 'duplicates',
                 'unfinished/duplicates', 'unfinished/journal.json', 'mytest.bin'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('text')
    assert find_files(f'{tmp_path}/**') == [tmp_path / 'duplicates', tmp_path / 'mytest.bin']


def test_many_names_with_commas_may_be_longer_than_a_name_can_be(tree):
    assert len(inputs(['--input=' + ','.join(['a.txt', 'b.md'] * 200)])) == 2


def test_text_that_comes_through_a_pipe_is_refused(tree, capsys, monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b'some text\n')  # and it stays open: who reads would wait
    try:
        for name in (f'/dev/fd/{reading}', f'/proc/self/fd/{reading}'):
            assert 'text is read more than once: write it to a file' in \
                fails(capsys, monkeypatch, inputs, f'--input={name}')
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(not hasattr(os, 'seteuid') or os.geteuid() != 0, reason='needs root')
def test_what_may_not_be_read_is_named_and_not_left_out(tree, capsys, monkeypatch):
    tree.parent.chmod(0o755)
    for name in ('sub/deep', 'other', 'conf/main.py'):
        Path(name).chmod(0)
    Path('pics').chmod(0o644)  # can be listed, and its files cannot be looked at
    os.seteuid(65534)
    try:
        for wanted, name in [('sub', 'sub/deep'), ('links', 'links/folder'), ('pics', 'pics/x.png'),
                             ('conf', 'conf/main.py'), ('conf/*.py', 'conf/main.py'),
                             ('other/o.txt', 'other/o.txt'), ('sub/**', 'sub/deep'),
                             ('other/*.txt', 'other'), ('o*/o.txt', 'other'),
                             ('sub/*/*.rst', 'sub/deep'), ('o*/**', 'other')]:
            assert f'{name}: Permission denied' in \
                fails(capsys, monkeypatch, inputs, f'--input={wanted}')
    finally:
        os.seteuid(0)


# -----------------------------------------------------------------------------
# the report


def report(capsys, argument):
    """The lines that prepare.py prints of what it reads."""
    capsys.readouterr()
    inputs([argument])
    lines = capsys.readouterr().out.splitlines()[1:]
    first = next((i for i, line in enumerate(lines) if not line.startswith(('reading', '  '))))
    return lines[:first]


def test_what_is_read_and_what_is_left_out_is_told(tree, capsys):
    assert report(capsys, '--input=a.txt') == []
    assert report(capsys, '--input=sub') == ['reading 3 files: 2 .txt, 1 .rst']
    assert report(capsys, '--input=*') == [
        'reading 12 files: 8 .txt, 1 .md, 1 .py, 1 .log, 1 without an ending; left out:',
        '  9 folder: conf/, empty/, …',
        '  3 pipe, socket, device or broken link: loop.txt, pipe.txt, …']
    assert report(capsys, '--input=.') == [
        'reading 17 files: 12 .txt, 2 .py, 1 .md, 1 .rst, 1 .js; left out:',
        '  5 pipe, socket, device or broken link: loop.txt, loops/broken.txt, …',
        '  2 hidden: .dot/, .hidden.txt',
        '  2 .dat: unknown/y.dat, unknown/z.DAT',
        '  1 .json beside texts: conf/package.json',
        '  1 .csv beside texts: conf/table.csv',
        '  1 .log: e.log',
        '  1 without an ending: noending',
        '  1 .png: pics/x.png',
        '  3 more: .bin, __pycache__, node_modules']


def test_a_link_to_a_folder_above_is_left_out_and_told(tree, capsys):
    assert report(capsys, '--input=loops') == [
        'reading 1 file: 1 .txt; left out:',
        '  2 pipe, socket, device or broken link: loops/broken.txt, loops/circle',
        '  1 link to a folder above: loops/up/']


# -----------------------------------------------------------------------------
# folders laid out like a dataset of the hub


CARD = '---\nlicense: mit\n{}\n---\n# Pages\n'


def write_pages(path, count=400):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.table({'text': [f'page {i} of the web' for i in range(count)]}), path)


@pytest.mark.parametrize(('name', 'card'), [
    ('README.md', CARD.format('configs:\n- config_name: default\n  data_files: data/train*')),
    ('README.md', CARD.format('size_categories: [n<1K]')),
    ('README.md', '---\r\nlanguage: en\r\n---\r\n# Pages\r\n'), ('dataset_infos.json', '{}')])
def test_a_folder_laid_out_like_a_dataset_of_the_hub_is_read_as_one(
        name, card, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pages(tmp_path / 'hub/data/train-00000-of-00001.parquet')
    write_pages(tmp_path / 'hub/data/test-00000-of-00001.parquet', 9)
    (tmp_path / 'hub' / name).write_bytes(card.encode())
    options = ['--tokenizer=byte', '--val_fraction=0.1']
    prepare.main(['text', '--input=hub/', *options, '--data_dir=a'])
    assert 'hub is laid out like a dataset of the Hugging Face hub' in capsys.readouterr().out
    prepare.main(['hf', '--path=hub', *options, '--data_dir=b'])
    as_text, as_hub = (open_dataset(Path(folder)).meta['splits'] for folder in 'ab')
    assert as_text == as_hub
    assert as_hub['train']['documents'] + as_hub['val']['documents'] == 400


def test_such_a_folder_among_others_is_refused_and_its_card_is_no_document(
        tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pages(tmp_path / 'all/hub/data/train-00000-of-00001.parquet')
    Path('all/hub/README.md').write_text(CARD.format('configs: []'))
    Path('all/a.txt').write_text('text\n' * 99)
    for wanted in ('all', 'all/a.txt,all/hub', 'all/hub/**', '**', '*/hub/*/*.parquet'):
        assert 'python prepare.py hf --path=all/hub' in \
            fails(capsys, monkeypatch, inputs, f'--input={wanted}')
    for wanted in ('all/hub/data/*.parquet', 'all/hub/data'):
        assert inputs([f'--input={wanted}']) == ['all/hub/data/train-00000-of-00001.parquet']
    assert inputs(['--input=all/*']) == ['all/a.txt']


@pytest.mark.parametrize('name', ['json', 'text', '.'])
def test_a_folder_may_have_the_name_of_a_reader_of_datasets(name, tmp_path, monkeypatch, capsys):
    folder = tmp_path / 'in' / name
    write_pages(folder / 'data/train-00000-of-00001.parquet')
    (folder / 'README.md').write_text(CARD.format('configs: []'))
    monkeypatch.chdir(tmp_path / 'in')
    if name != '.':
        write_pages(tmp_path / 'in/other.parquet')
        Path('other.jsonl').write_text('{"text": "other"}\n' * 99)
    for options in (['text', f'--input={name}'], ['hf', f'--path={name}']):
        prepare.main([*options, '--tokenizer=byte', '--val_fraction=0.1', '--data_dir=../d',
                      '--overwrite'])
        splits = json.loads(Path('../d/meta.json').read_text())['splits']
        assert sum(split['documents'] for split in splits.values()) == 400
    message = fails(capsys, monkeypatch, prepare.main, 'hf', '--path=parquet', '--tokenizer=byte',
                    '--data_dir=../e')
    assert 'path=parquet: no such folder' in message


def test_the_readme_of_a_project_is_a_document(tmp_path):
    for text in ('# Title\ndataset_info: none\n', '---\ntitle: A page\n---\nText\n', ''):
        (tmp_path / 'README.md').write_text(text)
        assert find_files(str(tmp_path)) == [tmp_path / 'README.md']


# -----------------------------------------------------------------------------
# names that are no UTF-8, and files that are one text


def test_files_whose_names_are_no_utf8_are_read_printed_and_recorded(tmp_path):
    folder, data_dir = tmp_path / os.fsdecode(b'in\xfe'), tmp_path / os.fsdecode(b'd\xfd')
    folder.mkdir()
    rows = ''.join(json.dumps({'text': f'row {i}'}) + '\n' for i in range(400)).encode()
    for ending in ('.txt', '.txt.gz', '.jsonl', '.parquet'):
        path = folder / os.fsdecode(b'\xff' + ending.encode())
        if ending == '.parquet':
            write_pages(tmp_path / 'a.parquet')
            os.replace(tmp_path / 'a.parquet', path)
        else:
            path.write_bytes(gzip.compress(rows) if ending == '.txt.gz' else rows)
    argv = [ROOT / 'prepare.py', 'text', f'--input={folder}', '--tokenizer=byte']
    printed = run(*argv, '--val_fraction=0.1', f'--data_dir={data_dir}')
    assert 'reading 4 files: 2 .txt, 1 .jsonl, 1 .parquet\n' in printed
    assert 'd\\udcfd/meta.json: byte tokenizer' in printed
    names = [file['name'] for file in
             json.loads((data_dir / 'meta.json').read_text())['inputs']['files']]
    assert names == [f'{tmp_path}/in\\udcfe/\\udcff{ending}'
                     for ending in ('.jsonl', '.parquet', '.txt', '.txt.gz')]


def test_files_that_are_one_text_are_joined_at_line_breaks(tmp_path):
    texts = ['no newline', 'TWO\n', 'three\r\n', 'four', ' \n', '\n\nfive', 'six']
    for i, text in enumerate(texts):
        (tmp_path / f'{i}.txt').write_bytes(text.encode())
    source = Files(find_files(str(tmp_path)), 'x')
    pieces = list(source.pieces())
    assert [piece.text for piece in pieces] == \
        ['no newline', '\n', 'TWO\n', 'three\r\n', 'four', '\n', '\n\nfive', '\n', 'six']
    whole = ''.join(piece.text for piece in pieces)
    prepare.main(['text', f'--input={tmp_path}', '--tokenizer=char', f'--data_dir={tmp_path}/d'])
    dataset = open_dataset(tmp_path / 'd')
    ids = [i for split in ('train', 'val') for i in dataset.split(split, in_ram=True).ram]
    assert dataset.tokenizer().decode(ids) == whole
    meta = dataset.meta
    assert meta['source']['train_characters'] == int(len(whole) * 0.9)
    assert sum(split['bytes'] for split in meta['splits'].values()) == len(whole)


def test_files_that_are_documents_are_not_joined(tmp_path):
    for i in range(100):
        (tmp_path / f'{i:03d}.txt').write_text(f'document {i}')
    assert [piece.text for piece in Files(find_files(str(tmp_path)), 'x').pieces()] == \
        [f'document {i}' for i in range(100)]
