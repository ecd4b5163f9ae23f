"""What --input can name: which files are read, and what is refused."""

import gzip
import os
import socket
from pathlib import Path

import pytest
from helpers import fails

import prepare
from plaingpt.data.sources import find_files

ODD = os.fsdecode(b'odd\xff.txt')
TEXTS = ['a.txt', 'b.md', 'UPPER.TXT', 'code.Py', 'sub/c.txt', 'sub/deep/d.rst', 'with space.txt',
         'comma,name.txt', 'br[1].txt', 'new\nline.txt', ODD, 'noending', 'e.log',
         'pics/x.png', '.hidden.txt', '.dot/h.txt', 'web/index.js', 'web/node_modules/lib.js',
         'web/__pycache__/x.py', 'conf/main.py', 'conf/package.json', 'conf/table.csv',
         'tables/a.csv', 'tables/b.json', 'unknown/x.bin', 'unknown/y.dat', 'unknown/z.DAT',
         'other/o.txt', 'loops/l.txt', 'lib1/json/a.py', 'lib2/json/a.py', 'lib2/json/b/c.py']


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A working directory with files of all names, links, loops and what is no file."""
    root = tmp_path / 'tree'
    for name in TEXTS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{name!a} says this\n' * 20)
    (root / 'sub/z.txt.gz').write_bytes(gzip.compress(b'packed text\n' * 20))
    for link, to in [('loops/self', '.'), ('loops/circle', 'circle'),
                     ('loops/broken.txt', 'nowhere'), ('links/folder', '../other'),
                     ('links/file.txt', '../a.txt'), ('loop.txt', 'loop.txt')]:
        (root / link).parent.mkdir(exist_ok=True)
        (root / link).symlink_to(to)
    (root / 'empty').mkdir()
    os.mkfifo(root / 'pipe.txt')
    monkeypatch.chdir(root)
    monkeypatch.setenv('HOME', str(root / 'sub'))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind('sock.txt')
        yield root


SUB = ['sub/c.txt', 'sub/deep/d.rst', 'sub/z.txt.gz']
READ = [
    *((name, [name]) for name in ('a.txt', 'noending', 'e.log', 'UPPER.TXT', '.hidden.txt', ODD,
                                  'with space.txt', 'comma,name.txt', 'br[1].txt', 'new\nline.txt',
                                  'links/file.txt')),
    ('./a.txt', ['a.txt']), ('~/c.txt', ['{root}/sub/c.txt']),
    ('b.md, a.txt', ['a.txt', 'b.md']), (',a.txt,,', ['a.txt']),
    (','.join(['a.txt', './a.txt', 'b.md'] * 200), ['a.txt', 'b.md']),
    ('a.txt,links/file.txt', ['links/file.txt']),
    ('sub', SUB), ('sub//', SUB), ('sub,sub/c.txt', SUB), ('~', ['{root}/' + path for path in SUB]),
    ('.dot', ['.dot/h.txt']), ('loops', ['loops/l.txt']), ('links', ['links/file.txt']),
    ('links/folder', ['links/folder/o.txt']),
    ('web', ['web/index.js']), ('conf', ['conf/main.py']),
    ('tables', ['tables/a.csv', 'tables/b.json']),
    ('conf,conf/table.csv', ['conf/main.py', 'conf/table.csv']),
    ('[ab].*', ['a.txt', 'b.md']), ('~/*.txt', ['{root}/sub/c.txt']),
    ('lib*/json', ['lib1/json/a.py', 'lib2/json/a.py', 'lib2/json/b/c.py']),
    ('sub/**', SUB), ('s*/**/*.txt', ['sub/c.txt']), ('**/deep/*', ['sub/deep/d.rst'])]


def test_files_folders_globs_and_lists_of_them_are_read_each_file_once(tree):
    for wanted, names in READ:
        assert [str(path) for path in find_files(wanted)] \
            == [name.replace('{root}', str(tree)) for name in names], wanted


REFUSED = [
    ('a.txt,missing.txt', 'missing.txt: no such file or folder'),
    (os.fsdecode(b'\xff'), '\\udcff: no such file or folder'),
    ('x' * 300, ': no such file or folder'),
    ('loop.txt', 'loop.txt is no file'),
    ('', '--input=FILES_OR_FOLDERS'),
    (' , ', 'no text files there'),
    ('empty', 'empty: no text files there'),
    ('*.rst', '*.rst: no such file or folder'),
    ('unknown', 'unknown: no text files there: name the files'),
    ('pipe.txt', 'pipe.txt is no file'),
    ('sock.txt', 'sock.txt is no file'),
    ('a.txt,/dev/zero', '/dev/zero is no file')]


def test_what_is_no_text_file_is_refused_in_one_line(tree, refused):
    for wanted, words in REFUSED:
        assert words in refused('text', f'--input={wanted}'), wanted
    assert 'each row is a document' in refused('text', '--input=tables', '--documents=line')
    assert 'is text and has no fields' in refused('text', '--input=a.txt', '--text_field=body')


def test_what_prepare_writes_is_left_out(tmp_path):
    for name in ('d/train.bin', 'd/val_000001.bin', 'd/test.bin', 'd/train_mask.bin', 'd/meta.json',
                 'd/unfinished/a.txt', 'd/mytest.bin', 'json/meta.json'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('text')
    assert find_files(f'{tmp_path}/d/*.*') == [tmp_path / 'd/mytest.bin']
    assert find_files(str(tmp_path)) == [tmp_path / 'json/meta.json']


@pytest.mark.skipif(not hasattr(os, 'seteuid') or os.geteuid() != 0, reason='needs root')
def test_what_may_not_be_read_is_named_and_not_left_out(tree, capsys, monkeypatch):
    tree.parent.chmod(0o755)
    Path('sub/deep').chmod(0)
    os.seteuid(65534)
    try:
        line = fails(capsys, monkeypatch, prepare.main, 'text', '--input=sub')
        assert 'sub/deep' in line and 'Permission denied' in line
    finally:
        os.seteuid(0)


def test_a_line_says_what_is_read_of_a_folder(tree, capsys):
    find_files('a.txt')
    assert not capsys.readouterr().out
    find_files('.')
    assert capsys.readouterr().out == 'reading 19 files: 11 .txt, 5 .py, 1 .md, 1 .rst, 1 .js\n'
