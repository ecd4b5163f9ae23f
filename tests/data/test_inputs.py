"""What --input can name: which files are read, and what is refused; and the download of a text."""

import gzip
import hashlib
import os

import pytest

import prepare
from plaingpt.core.dataset import open_dataset
from plaingpt.data.corpora import CORPORA, Corpus
from plaingpt.data.input_files import find_files
from prepare import PrepareConfig

TEXTS = ['a.txt', 'b.md', 'UPPER.TXT', 'code.Py', 'sub/c.txt', 'sub/deep/d.rst', 'with space.txt',
         'comma,name.txt', 'br[1].txt', 'new\nline.txt', 'noending', 'e.log', 'pics/x.png',
         '.hidden.txt', '.dot/h.txt', 'unknown/x.bin', 'unknown/y.csv', 'loops/l.txt',
         'lib1/json/a.py', 'lib2/json/a.py', 'lib2/json/b/c.py']
PLAYS = b'To be, or not to be. ' * 100


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
    *((name, [name]) for name in ('noending', 'e.log', 'UPPER.TXT', '.hidden.txt', 'comma,name.txt',
                                  'br[1].txt', 'new\nline.txt')),
    ('~/c.txt', ['{root}/sub/c.txt']), ('b.md, ./a.txt,a.txt', ['a.txt', 'b.md']),
    ('sub//', SUB), ('sub,sub/c.txt', SUB), ('.dot', ['.dot/h.txt']),
    ('loops', ['loops/l.txt']), ('[ab].*', ['a.txt', 'b.md']), ('unknown/*.csv', ['unknown/y.csv']),
    ('lib*/json', ['lib1/json/a.py', 'lib2/json/a.py', 'lib2/json/b/c.py']),
    ('s*/**/*.txt', ['sub/c.txt']), ('**/deep/*', ['sub/deep/d.rst'])]


@pytest.mark.parametrize(('wanted', 'names'), READ, ids=range(len(READ)))
def test_input_names_the_files_that_are_read(wanted, names, tree):
    paths, _ = find_files(PrepareConfig(input=wanted).inputs())
    assert [str(path) for path in paths] == [name.replace('{root}', str(tree)) for name in names]


def test_an_argument_is_one_path_whatever_its_name(tree, tmp_path):
    names = ['comma,name.txt', 'with space.txt', 'a.txt']
    prepare.main(['text', *names, '--tokenizer=char', '--documents=line',
                  f'--data_dir={tmp_path}/d'])
    text = ''.join(dataset_text(tmp_path / 'd', split) for split in ('train', 'val'))
    assert sorted(text.splitlines()) == sorted(20 * [f'{name!a} says this' for name in names])
    prepare.main(['text', 'c*,n*.txt', '--tokenizer=char', f'--data_dir={tmp_path}/e'])
    assert dataset_text(tmp_path / 'e', 'train').startswith("'comma,name.txt' says this\n")


def dataset_text(folder, split):
    dataset = open_dataset(folder)
    return dataset.tokenizer().decode(dataset.split(split).read(0, 10**6))


@pytest.mark.parametrize('wanted', ['a.txt,missing.txt', '*.rst', 'empty', 'unknown', 'pipe.txt'])
def test_an_input_without_text_files_is_refused_by_its_name(wanted, tree, refused):
    assert wanted.removeprefix('a.txt,') in refused('text', f'--input={wanted}')


@pytest.fixture
def plays(tmp_path, monkeypatch):
    """A corpus of the table that is downloaded, and the file that it is downloaded from."""
    source = tmp_path / 'plays.txt'
    monkeypatch.setitem(CORPORA, 'plays', Corpus(
        'plays', 'char', url=source.as_uri(), sha256=hashlib.sha256(PLAYS).hexdigest()))
    return source


def test_a_download_that_fails_offers_a_file_of_ones_own(plays, refused):
    message = refused('plays')
    assert plays.as_uri() in message
    assert '--input=FILE' in message


def test_a_download_is_prepared_only_if_it_is_the_known_text(plays, tmp_path, refused):
    plays.write_bytes(PLAYS[1:])
    assert plays.as_uri() in refused('plays')
    plays.write_bytes(PLAYS)
    prepare.main(['plays', f'--data_dir={tmp_path}/d'])
    assert len(open_dataset(tmp_path / 'd').split('train')) == 0.9 * len(PLAYS)
