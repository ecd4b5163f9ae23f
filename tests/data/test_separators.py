"""End-of-text tokens that are spelled out, lines and blank lines separate documents."""

import io
from itertools import pairwise
from pathlib import Path

import pytest
from corpus_files import documents_of, prepared, write_rows

import prepare
from plaingpt.core.dataset import open_dataset
from plaingpt.data.text_files import Separators, read_documents

EOT, START = '<|endoftext|>', '<|startoftext|>'
STORIES = ['One day.\nIt rained.', '"Hi!" he said.', 'The end.']
SEPARATED = [  # text → its documents
    (f'\n{EOT}\n'.join(STORIES), STORIES),
    (f'{EOT}\n{STORIES[0]}{EOT}\n\n{STORIES[1]} \n {EOT}\n', STORIES[:2]),
    (f'{STORIES[0]}  {EOT} \r\n\r\n{STORIES[1]}', STORIES[:2]),
    (EOT.join(['One.', 'Two!', '"Hi!"', 'Four.', '']), ['One.', 'Two!', '"Hi!"', 'Four.']),
    (f'One.{EOT}\nTwo.{EOT}{EOT}\n \n{EOT}', ['One.', 'Two.']),
    (f'the token {EOT} ends a text\n', ['the token', 'ends a text\n']),
    (f'{START} one {EOT}\n{START}two{EOT}', ['one', 'two']),
    (f'{START}\none\n\n{START}\ntwo', ['one', 'two'])]
PARAGRAPHS = [
    ('one\n two\n\n\n  three\n', ['one\n two', '  three']),
    ('one\r\n \t\r\n\r\n\ttwo', ['one', '\ttwo']),
    (f'\n\none{EOT} \n\n two\n\n', ['one', 'two'])]


class Slow(io.StringIO):
    """A text that gives a few characters at a time."""

    def read(self, size):
        return super().read(7)


@pytest.mark.parametrize('open_text', [io.StringIO, Slow])
@pytest.mark.parametrize(('text', 'documents', 'paragraphs'), [
    *((*pair, False) for pair in SEPARATED), *((*pair, True) for pair in PARAGRAPHS)])
def test_the_separators_of_a_text_and_the_white_space_around_them_are_in_no_document(
        text, documents, paragraphs, open_text):
    separators = Separators(paragraphs=paragraphs)
    pieces = [*read_documents(open_text(text, newline=''), separators)]
    begins = [i for i, (_, new_document) in enumerate(pieces) if new_document]
    assert [''.join(piece for piece, _ in pieces[i:j])
            for i, j in pairwise([*begins, len(pieces)])] == documents
    assert separators.counts == {token: text.count(token) for token in (EOT, START)}


def all_documents(folder):
    train, val = documents_of(folder).values()
    return sorted(train + val)


@pytest.mark.parametrize('argv', [['a.txt'], ['a.jsonl'], ['a.txt', '--documents=line']])
def test_the_token_separates_documents_in_every_kind_of_file(argv, tmp_path, capsys):
    stories = [f'Story {i} is not long.' for i in range(300)]
    Path('a.txt').write_text(''.join(f'{START} {story} {EOT}\n' for story in stories))
    write_rows(tmp_path / 'a.jsonl', [f'{EOT}\n'.join(stories[i:i + 10])
                                      for i in range(0, 300, 10)])
    prepared(tmp_path / 'd', 'text', *argv)
    assert all_documents(tmp_path / 'd') == sorted(stories)
    assert '--separators=False' in capsys.readouterr().out


def test_kept_as_text_the_token_separates_nothing(tmp_path):
    lines = [f'Story {i}. {EOT} {START}' for i in range(30)]
    Path('a.txt').write_text('\n'.join(lines))
    prepared(tmp_path / 'd', 'text', 'a.txt', '--documents=line', '--separators=False')
    assert all_documents(tmp_path / 'd') == sorted(lines)


def test_a_carriage_return_alone_ends_no_line(tmp_path):
    Path('a.txt').write_bytes(b'one\rtwo\r\nthree\n' + b'four\n' * 20)
    prepared(tmp_path / 'd', 'text', 'a.txt', '--documents=line')
    assert all_documents(tmp_path / 'd') == [*20 * ['four'], 'one\rtwo', 'three']


@pytest.mark.parametrize('tokenizer', ['byte', 'char'])
def test_paragraphs_are_documents(tokenizer, tmp_path):
    tunes = [f'X:{i}\nK:C\nCDEF {i % 7}|' for i in range(40)]
    Path('tunes.abc').write_text('\n\n'.join(tunes))
    prepare.main(['text', 'tunes.abc', '--documents=paragraph', f'--tokenizer={tokenizer}',
                  f'--data_dir={tmp_path}/d'])
    if tokenizer == 'byte':
        assert all_documents(tmp_path / 'd') == sorted(tunes)
        return
    dataset = open_dataset(tmp_path / 'd')
    train, val = (dataset.tokenizer().decode(dataset.split(split).read(0, 10**6))
                  for split in ('train', 'val'))
    assert sorted((train + val).removesuffix('\n\n').split('\n\n')) == sorted(tunes)
