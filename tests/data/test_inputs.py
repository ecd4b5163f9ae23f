"""What --input can name: which files are read, and what is refused; and the download of a text."""

import gzip
import hashlib
import os

import pytest

import prepare
from plaingpt.data.corpora import CORPORA, Corpus
from plaingpt.data.dataset import open_dataset
from plaingpt.data.documents import find_files

TEXTS = ['a.txt', 'b.md', 'UPPER.TXT', 'code.Py', 'sub/c.txt', 'sub/deep/d.rst', 'with space.txt',
         'comma,name.txt', 'br[1].txt', 'new\nline.txt', 'noending', 'e.log', 'pics/x.png',
         '.hidden.txt', '.dot/h.txt', 'unknown/x.bin', 'unknown/y.csv', 'loops/l.txt',
         'lib1/json/a.py', 'lib2/json/a.py', 'lib2/json/b/c.py']


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A working directory with files of all names, links, loops and what is no file."""
    root = tmp_path / 'tree'
    for name in TEXTS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{name!a} says this\n' * 20)
    (root / 'sub/z.txt.gz').write_bytes(gzip.compress(b'packed text\n' * 20))
    for link, to in ('self', '.'), ('circle', 'circle'), ('broken.txt', 'nowhere'):
        (root / 'loops' / link).symlink_to(to)
    (root / 'empty').mkdir()
    os.mkfifo(root / 'pipe.txt')
    monkeypatch.chdir(root)
    monkeypatch.setenv('HOME', str(root / 'sub'))
    return root


SUB = ['sub/c.txt', 'sub/deep/d.rst', 'sub/z.txt.gz']
READ = [
    *((name, [name]) for name in ('a.txt', 'noending', 'e.log', 'UPPER.TXT', '.hidden.txt',
                                  'with space.txt', 'comma,name.txt', 'br[1].txt',
                                  'new\nline.txt')),
    ('./a.txt', ['a.txt']), ('~/c.txt', ['{root}/sub/c.txt']), ('b.md, a.txt', ['a.txt', 'b.md']),
    (',a.txt,,', ['a.txt']), (','.join(['a.txt', './a.txt', 'b.md'] * 200), ['a.txt', 'b.md']),
    ('sub', SUB), ('sub//', SUB), ('sub,sub/c.txt', SUB), ('.dot', ['.dot/h.txt']),
    ('loops', ['loops/l.txt']), ('[ab].*', ['a.txt', 'b.md']), ('unknown/*.csv', ['unknown/y.csv']),
    ('lib*/json', ['lib1/json/a.py', 'lib2/json/a.py', 'lib2/json/b/c.py']),
    ('s*/**/*.txt', ['sub/c.txt']), ('**/deep/*', ['sub/deep/d.rst'])]


def test_files_folders_globs_and_lists_of_them_are_read_each_file_once(tree):
    for wanted, names in READ:
        paths, _ = find_files(wanted)
        assert [str(path) for path in paths] \
            == [name.replace('{root}', str(tree)) for name in names], wanted


def test_what_is_no_text_file_is_refused_in_one_line(tree, refused):
    for wanted, words in (
            ('a.txt,missing.txt', 'missing.txt: no such file or folder'),
            ('*.rst', '*.rst: no such file or folder'), ('', '--input=FILES_OR_FOLDERS'),
            ('empty', 'empty: no text files there'), ('unknown', 'unknown: no text files there'),
            ('pipe.txt', 'pipe.txt is not a file')):
        assert words in refused('text', f'--input={wanted}'), wanted
    assert 'documents=line' in refused('text', '--input=unknown/y.csv', '--documents=line')
    assert 'is text and has no fields' in refused('text', '--input=a.txt', '--text_field=body')


def test_lines_say_what_is_read_of_a_folder_and_what_is_not(tree, capsys):
    find_files('a.txt')
    assert not capsys.readouterr().out
    for name in ('b.csv', 'c.txt.zst', 'd.tar.gz', 'e.html'):
        (tree / 'unknown' / name).touch()
    find_files('.,unknown/b.csv')
    read, not_read = capsys.readouterr().out.splitlines()
    assert read == 'reading 16 files: 9 .txt, 4 .py, 1 .md, 1 .rst, 1 .csv'
    for kind in ('1 .csv', '1 .zst', '1 .tar', '1 .html', '1 .log', '1 .png', 'unpack'):
        assert kind in not_read, kind


def test_a_text_that_does_not_arrive_or_is_another_is_refused(tmp_path, refused, monkeypatch):
    text, source = b'To be, or not to be. ' * 100, tmp_path / 'plays.txt'
    monkeypatch.setitem(CORPORA, 'plays', Corpus(
        'plays', 'char', url=source.as_uri(), sha256=hashlib.sha256(text).hexdigest()))
    argv = ['plays', f'--data_dir={tmp_path}/d']
    message = refused(*argv)
    assert source.as_uri() in message and '--input=FILE' in message
    source.write_bytes(text[1:])
    assert 'checksum' in refused(*argv)
    assert not (tmp_path / 'd').exists()
    source.write_bytes(text)
    prepare.main(argv)
    assert len(open_dataset(tmp_path / 'd').split('train')) == 0.9 * len(text)
