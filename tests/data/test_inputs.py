"""What --input can name: which files are read, what is told of the others, what is refused."""

import codecs
import gzip
import os
import socket
from pathlib import Path

import pytest
from corpus_files import prepared
from helpers import fails

import prepare
from plaingpt.data.dataset import open_dataset
from plaingpt.data.readers import find_fault
from plaingpt.data.sources import find_files

ODD = os.fsdecode(b'odd\xff.txt')
TEXTS = ['a.txt', 'b.md', 'UPPER.TXT', 'code.Py', 'sub/c.txt', 'sub/deep/d.rst', 'with space.txt',
         'comma,name.txt', 'br[1].txt', 'new\nline.txt', ODD, '~tilde.txt', 'noending', 'e.log',
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
    for link, to in [('loops/self', '.'), ('loops/again', '.'), ('loops/up', '..'),
                     ('loops/circle', 'circle'), ('loops/broken.txt', 'nowhere'),
                     ('links/folder', '../other'), ('links/same', '../other'),
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
JSON = ['lib1/json/a.py', 'lib2/json/a.py', 'lib2/json/b/c.py']
FILES = [  # each of which is read where --input is its name
    'a.txt', 'noending', 'e.log', 'UPPER.TXT', '.hidden.txt', 'with space.txt', 'comma,name.txt',
    'br[1].txt', 'new\nline.txt', ODD, '~tilde.txt', 'links/file.txt']
READ = [
    ('./a.txt', ['a.txt']), ('~/c.txt', ['{root}/sub/c.txt']),
    ('comma,name.txt,b.md, a.txt,with space.txt', ['a.txt', 'b.md', 'comma,name.txt',
                                                   'with space.txt']),
    ('b.md, a.txt', ['a.txt', 'b.md']), (',a.txt,,', ['a.txt']),
    (','.join(['a.txt', './a.txt', 'b.md'] * 200), ['a.txt', 'b.md']),
    ('a.txt,links/file.txt', ['links/file.txt']),
    ('sub', SUB), ('sub//', SUB), ('sub,sub/c.txt', SUB), ('~', ['{root}/' + path for path in SUB]),
    ('.dot', ['.dot/h.txt']), ('loops', ['loops/l.txt']), ('loops/self', ['loops/self/l.txt']),
    ('links/folder', ['links/folder/o.txt']), ('links', ['links/file.txt']),
    ('web', ['web/index.js']), ('conf', ['conf/main.py']),
    ('tables', ['tables/a.csv', 'tables/b.json']),
    ('conf,conf/table.csv', ['conf/main.py', 'conf/table.csv']),
    ('[ab].*', ['a.txt', 'b.md']), ('~/*.txt', ['{root}/sub/c.txt']),
    ('*/[cx].*', ['pics/x.png', 'sub/c.txt', 'unknown/x.bin']), ('lib*/json', JSON),
    ('sub/**', SUB), ('s*/**/*.txt', ['sub/c.txt']), ('loops/**/l*.txt', ['loops/l.txt']),
    ('web/**/*.js', ['web/index.js']), ('**/deep/*', ['sub/deep/d.rst']),
    ('s[ou]b/deep*', ['sub/deep/d.rst'])]


def test_files_folders_globs_and_lists_of_them_are_read_each_file_once(tree):
    for wanted, names in [*((name, [name]) for name in FILES), *READ]:
        found = [str(path) for path in find_files(wanted)]
        assert found == [name.format(root=tree) for name in names], wanted


def test_a_folder_and_its_glob_leave_out_what_is_no_text_and_say_how_to_take_it(
        tmp_path, monkeypatch, capsys, refused):
    monkeypatch.chdir(tmp_path)
    Path('mixed').mkdir()
    for name, data in (('a.txt', 'café\n'.encode()), ('b.md', b'more text\n'),
                       ('old.txt', 'déjà\n'.encode('latin-1')), ('wide.txt', 'a'.encode('utf-16')),
                       ('t.csv', b'text\nin a row\n'), ('paper.pdf', b'%PDF-1.5 \xe2')):
        Path('mixed', name).write_bytes(data * 20 if name != 't.csv' else data)

    def texts(*argv):
        """What is read, and all that is printed."""
        prepare.main(['text', *argv, '--tokenizer=char', '--data_dir=d', '--overwrite'])
        streams = open_dataset('d').split('train'), open_dataset('d').split('val')
        ids = [i for stream in streams for i in stream.read(0, len(stream)).tolist()]
        return open_dataset('d').tokenizer().decode(ids), capsys.readouterr().out

    plain, out = texts('mixed')
    assert plain == 'café\n' * 20 + 'more text\n' * 20
    for words in ('1 .pdf', "add 'mixed/**/*.csv'", 'mixed/old.txt, line 1: not UTF-8: ',
                  '--encoding=latin-1', 'mixed/wide.txt: ', '--encoding=utf-16'):
        assert words in out
    shells = sorted(map(str, Path('mixed').iterdir()))  # what a shell makes of mixed/*
    for argv in (['mixed/*'], shells):
        assert texts(*argv)[0] == plain
    assert texts('mixed', '--encoding=latin-1')[0] == plain + 'déjà\n' * 20
    text, out = texts('mixed', 'mixed/**/*.csv', '--val_fraction=0.5')
    assert 'in a row' in text and 'beside texts' not in out
    for name in ('old.txt', 'wide.txt', 'paper.pdf'):
        assert f'mixed/{name}' in refused('text', f'mixed/{name}', '--tokenizer=char')


def test_kinds_that_are_not_read_are_answered_by_what_makes_one_that_is(
        tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    Path('in').mkdir()
    for name, word in (('a.html', 'trafilatura'), ('b.HTM.gz', 'pandoc'), ('c.tsv', '.csv')):
        Path('in', name).write_text('text')
        for named in (f'in/{name}', f'in/{name[:3]}*', 'in'):
            line = refused('text', named)
            assert line.startswith(f'error: in/{name}: ') and word in line
        Path(name).write_bytes(Path('in', name).read_bytes())
        Path('in', name).unlink()
    assert 'trafilatura' in refused('text', 'a.html', '--html=text')
    Path('table.csv').write_text('text\na\n')
    Path('paper.pdf').write_bytes(b'%PDF-1.5 \xe2')
    for wanted in ('.', '*'):  # and the table is beside no text
        lines = []
        assert find_files(wanted, lines.append, find_fault) == [Path('table.csv')]
        told = '\n'.join(lines)
        assert all(words in told for words in ('a.html: ', 'b.HTM.gz: ', 'c.tsv: ', 'pdf'))


REFUSED = [
    ('a.txt,missing.txt', 'missing.txt: no such file or folder'),
    (os.fsdecode(b'\xff'), '\\udcff: no such file or folder'),
    ('x' * 300, ': no such file or folder'),
    ('loop.txt', 'Too many levels of symbolic links'),
    ('', '--input=FILES_OR_FOLDERS'),
    (' , ', "input=' , ': it names no file"),
    ('https://host/a.txt', 'https://host/a.txt: URLs are not read: download it'),
    ('empty', 'empty: nothing is read: no files'),
    ('*.rst', '*.rst: no file of that form'),
    ('unknown', 'nothing is read: 2 .dat, 1 .bin: name the files'),
    ('pipe.txt', 'pipe.txt is a pipe, a socket or a device'),
    ('sock.txt', 'sock.txt is a pipe, a socket or a device'),
    ('a.txt,/dev/zero', '/dev/zero is a pipe, a socket or a device')]


def test_what_is_no_text_file_is_refused_in_one_line(tree, refused):
    for wanted, words in REFUSED:
        assert words in refused('text', f'--input={wanted}'), wanted
    assert 'each row is a document' in refused('text', '--input=tables', '--documents=line')
    assert 'is text and has no fields' in refused('text', '--input=a.txt', '--text_field=body')


def test_text_that_comes_through_a_pipe_is_refused_and_not_waited_for(refused):
    reading, writing = os.pipe()
    os.write(writing, b'some text\n')  # and it stays open: who reads would wait
    for name in (f'/dev/fd/{reading}', f'/proc/self/fd/{reading}'):
        assert 'write it to a file' in refused('text', f'--input={name}')
    os.close(reading)
    os.close(writing)


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
    for name in ('sub/deep', 'other', 'conf/main.py'):
        Path(name).chmod(0)
    Path('pics').chmod(0o644)  # can be listed, and its files cannot be looked at
    codecs.lookup('utf-8-sig')  # Python may not read its own files as another user
    os.seteuid(65534)
    try:
        for wanted, name in (
                ('sub', 'sub/deep'), ('pics', 'pics/'),
                ('conf', 'conf/main.py'), ('sub/**', 'sub/deep'), ('sub/*', 'sub/deep')):
            line = fails(capsys, monkeypatch, prepare.main, 'text', f'--input={wanted}')
            assert name in line and 'Permission denied' in line, wanted
        for wanted in ('other/o.txt', 'other/*.txt', 'a.txt,o*/o.txt'):
            fails(capsys, monkeypatch, prepare.main, 'text', f'--input={wanted}')
    finally:
        os.seteuid(0)


def test_what_is_read_and_what_is_left_out_is_told(tree, capsys):
    def report(wanted):
        lines = []
        find_files(wanted, lines.append)
        return lines

    assert report('a.txt') == []
    line, = report('*.*')
    assert line == 'reading 11 files: 8 .txt, 1 .md, 1 .py, 1 .log; ' \
                   'left out: 3 pipe, device or broken link'
    line, = report('.')
    assert line.startswith('reading 20 files: 12 .txt, 5 .py, 1 .md, 1 .rst, 1 .js; left out: ')
    for reason in ('2 hidden', '2 .dat', '2 .csv beside texts', '2 .json beside texts'):
        assert reason in line
    assert report('loops') == ['reading 1 file: 1 .txt; left out: 3 link to a folder, '
                               '2 pipe, device or broken link']
    Path('about').mkdir()
    for name in ('README.md', 'posts.json', 'more.csv'):
        Path('about', name).write_text('{"text": "a"}')
    line, = report('about')
    assert line.startswith('reading 2 files: 1 .csv, 1 .json; left out: 1 .md beside tables (')
    prepared('../d', 'text', '--input=sub')
    assert '\nreading 3 files: 2 .txt, 1 .rst\n' in capsys.readouterr().out
