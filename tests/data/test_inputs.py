"""What --input can name: which files are read, what is told of the others, what is refused."""

import gzip
import os
import socket
from itertools import chain
from pathlib import Path

import pytest
from corpus_files import prepared, write_parquet, write_rows
from helpers import exit_code, fails, fork

import prepare
from plaingpt.data.input_files import find_files
from plaingpt.data.sources import Files
from plaingpt.data.dataset import open_dataset

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


def found(wanted):
    return [str(path) for path in find_files(wanted)]


SUB = ['sub/c.txt', 'sub/deep/d.rst', 'sub/z.txt.gz']
FILES = [  # each of which is read where --input is its name
    'a.txt', 'noending', 'e.log', 'UPPER.TXT', '.hidden.txt', 'with space.txt', 'comma,name.txt',
    'br[1].txt', 'new\nline.txt', ODD, '~tilde.txt', 'links/file.txt']
READ = [
    ('./a.txt', ['a.txt']), ('~/c.txt', ['{root}/sub/c.txt']),
    ('b.md, a.txt', ['a.txt', 'b.md']), (',a.txt,,', ['a.txt']),
    (','.join(['a.txt', './a.txt', 'b.md'] * 200), ['a.txt', 'b.md']),
    ('a.txt,links/file.txt', ['links/file.txt']), ('b.md,links/hard.md', ['links/hard.md']),
    ('sub', SUB), ('sub//', SUB), ('sub,sub/c.txt', SUB), ('~', ['{root}/' + path for path in SUB]),
    ('.dot', ['.dot/h.txt']), ('loops', ['loops/l.txt']), ('links/folder', ['links/folder/o.txt']),
    ('links', ['links/file.txt', 'links/folder/o.txt', 'links/hard.md']),
    ('web', ['web/index.js']), ('conf', ['conf/main.py']),
    ('conf,conf/table.csv', ['conf/main.py', 'conf/table.csv']),
    ('[ab].*', ['a.txt', 'b.md']), ('~/*.txt', ['{root}/sub/c.txt']),
    ('*/[cx].*', ['pics/x.png', 'sub/c.txt', 'unknown/x.bin']),
    ('sub/**', SUB), ('s*/**/*.txt', ['sub/c.txt']), ('loops/**/*.txt', ['loops/l.txt']),
    ('web/**/*.js', ['web/index.js'])]


def test_a_file_a_folder_a_glob_or_a_list_of_them_is_read_each_file_once(tree):
    for wanted, names in [*((name, [name]) for name in FILES), *READ]:
        assert found(wanted) == [name.format(root=tree) for name in names], wanted


REFUSED = [
    ('a.txt,missing.txt', 'missing.txt: No such file or directory'),
    (os.fsdecode(b'\xff'), '\\udcff: No such file or directory'),
    ('x' * 300, ': File name too long'),
    ('a.txt/b.txt', 'Not a directory'),
    ('loop.txt', 'Too many levels of symbolic links'),
    ('', '--input=FILES_OR_FOLDERS'),
    (' , ', "input=' , ': it names no file"),
    ('https://host/a.txt', 'https://host/a.txt: URLs are not read: download it'),
    ('empty', 'empty: it is an empty folder'),
    ('*.rst', '*.rst: no file of that form'),
    ('s[ou]b/deep*', 'nothing is read: 1 folder: sub/deep/'),
    ('unknown', 'nothing is read: 2 .dat: unknown/y.dat, unknown/z.DAT; 1 .bin: unknown/x.bin'),
    ('pipe.txt', 'pipe.txt is a pipe, a socket or a device'),
    ('sock.txt', 'sock.txt is a pipe, a socket or a device'),
    ('a.txt,/dev/zero', '/dev/zero is a pipe, a socket or a device')]


def test_what_is_no_text_file_is_refused_in_one_line(tree, refused):
    for wanted, words in REFUSED:
        assert words in refused('text', f'--input={wanted}')


def test_text_that_comes_through_a_pipe_is_refused_and_not_waited_for(refused):
    reading, writing = os.pipe()
    os.write(writing, b'some text\n')  # and it stays open: who reads would wait
    for name in (f'/dev/fd/{reading}', f'/proc/self/fd/{reading}'):
        assert 'write it to a file' in refused('text', f'--input={name}')
    os.close(reading)
    os.close(writing)


def test_what_prepare_writes_is_left_out_below_a_glob(tmp_path):
    for name in ('train.bin', 'val_000001.bin', 'test.bin', 'test_000000.bin', 'duplicates',
                 'unfinished/duplicates', 'unfinished/journal.json', 'mytest.bin'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('text')
    assert find_files(f'{tmp_path}/**') == [tmp_path / 'duplicates', tmp_path / 'mytest.bin']


@pytest.mark.skipif(not hasattr(os, 'seteuid') or os.geteuid() != 0, reason='needs root')
def test_what_may_not_be_read_is_named_and_not_left_out(tree, capsys, monkeypatch):
    tree.parent.chmod(0o755)
    for name in ('sub/deep', 'other', 'conf/main.py'):
        Path(name).chmod(0)
    Path('pics').chmod(0o644)  # can be listed, and its files cannot be looked at
    os.seteuid(65534)
    try:
        for wanted, name in (
                ('sub', 'sub/deep'), ('links', 'links/folder'), ('pics', 'pics/x.png'),
                ('conf', 'conf/main.py'), ('other/o.txt', 'other/o.txt'), ('sub/**', 'sub/deep'),
                ('other/*.txt', 'other'), ('o*/o.txt', 'other'), ('sub/*/*.rst', 'sub/deep')):
            line = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={wanted}')
            assert f'{name}: Permission denied' in line
    finally:
        os.seteuid(0)


# -----------------------------------------------------------------------------
# the report


def test_what_is_read_and_what_is_left_out_is_told(tree, capsys):
    def report(wanted):
        lines = []
        find_files(wanted, lines.append)
        return lines

    assert report('a.txt') == []
    assert report('*') == [
        'reading 12 files: 8 .txt, 1 .md, 1 .py, 1 .log, 1 without an ending; left out:',
        '  9 folder: conf/, empty/, …',
        '  3 pipe, socket, device or broken link: loop.txt, pipe.txt, …']
    lines = report('.')
    assert lines[0] == 'reading 17 files: 12 .txt, 2 .py, 1 .md, 1 .rst, 1 .js; left out:'
    for line in ('2 hidden: .dot/, .hidden.txt', '2 .dat: unknown/y.dat, unknown/z.DAT',
                 '1 .csv beside texts: conf/table.csv', '1 without an ending: noending',
                 '3 more: .bin, __pycache__, node_modules'):
        assert f'  {line}' in lines
    assert report('loops')[-1] == '  1 link to a folder above: loops/up/'
    prepared('../d', 'text', '--input=sub')
    assert '\nreading 3 files: 2 .txt, 1 .rst\n' in capsys.readouterr().out


# -----------------------------------------------------------------------------
# folders laid out like a dataset of the hub


CARD = '---\nlicense: mit\n{}\n---\n# Pages\n'
PAGES = [f'page {i} of the web' for i in range(400)]


@pytest.mark.parametrize(('name', 'card'), [
    ('README.md', CARD.format('configs:\n- config_name: default\n  data_files: data/train*')),
    ('README.md', '---\r\nlanguage: en\r\n---\r\n# Pages\r\n'), ('dataset_infos.json', '{}')],
    ids=range(3))
def test_a_folder_laid_out_like_a_dataset_of_the_hub_is_read_as_one(name, card, tmp_path, capsys):
    write_parquet(tmp_path / 'hub/data/train-00000-of-00001.parquet', PAGES)
    write_parquet(tmp_path / 'hub/data/test-00000-of-00001.parquet', ['held out'])
    (tmp_path / 'hub' / name).write_bytes(card.encode())
    as_text = prepared(tmp_path / 'a', 'text', f'--input={tmp_path}/hub/', '--val_fraction=0.1')
    assert 'hub is laid out like a dataset of the Hugging Face hub' in capsys.readouterr().out
    as_hub = prepared(tmp_path / 'b', 'hf', f'--path={tmp_path}/hub', '--val_fraction=0.1')
    assert as_text == as_hub and sorted(chain(*as_hub)) == sorted(PAGES)


def test_such_a_folder_among_others_is_refused_and_its_card_is_no_document(
        tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / 'all/hub/data/train.parquet', PAGES)
    Path('all/hub/README.md').write_text(CARD.format('configs: []'))
    Path('all/a.txt').write_text('text\n' * 99)
    for wanted in ('all', 'all/a.txt,all/hub', 'all/hub/**', '**', '*/hub/*/*.parquet'):
        assert 'python prepare.py hf --path=all/hub' in refused('text', f'--input={wanted}')
    assert found('all/hub/data/*.parquet') == found('all/hub/data') == [
        'all/hub/data/train.parquet']
    assert found('all/*') == ['all/a.txt']


def test_the_readme_of_a_project_is_a_document(tmp_path):
    for text in ('# Title\ndataset_info: none\n', '---\ntitle: A page\n---\nText\n', ''):
        (tmp_path / 'README.md').write_text(text)
        assert find_files(str(tmp_path)) == [tmp_path / 'README.md']


# -----------------------------------------------------------------------------
# names that are no UTF-8, and files that are one text


def test_files_whose_names_are_no_utf8_are_read_printed_and_recorded(tmp_path):
    folder, data_dir = tmp_path / os.fsdecode(b'in\xfe'), tmp_path / os.fsdecode(b'd\xfd')
    write_rows(folder / os.fsdecode(b'\xff.jsonl'), PAGES)
    write_parquet(tmp_path / 'a.parquet', PAGES)
    os.replace(tmp_path / 'a.parquet', folder / os.fsdecode(b'\xff.parquet'))
    (folder / os.fsdecode(b'\xff.txt.gz')).write_bytes(gzip.compress(b'text'))
    pid = fork(prepare.main, 'text', f'--input={folder}', '--tokenizer=byte',
               '--val_fraction=0.1', f'--data_dir={data_dir}', log=tmp_path / 'log')
    assert exit_code(pid) == 0
    printed = (tmp_path / 'log').read_text()
    assert 'reading 3 files: 1 .jsonl, 1 .parquet, 1 .txt\n' in printed
    assert 'd\\udcfd/meta.json: byte tokenizer' in printed
    assert [file['name'] for file in open_dataset(data_dir).meta['inputs']['files']] == [
        f'{tmp_path}/in\\udcfe/\\udcff{ending}' for ending in ('.jsonl', '.parquet', '.txt.gz')]


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
    texts = [f'document {i}' for i in range(100)]
    for i, text in enumerate(texts):
        (tmp_path / f'{i:03d}.txt').write_text(text)
    assert [piece.text for piece in Files(sorted(tmp_path.glob('*.txt')), 'x').pieces()] == texts
