"""End-of-text tokens that are spelled out in text separate documents."""

import io
from itertools import pairwise
from pathlib import Path

import pytest
from corpus_files import prepared, write_rows

from plaingpt.data.text_files import Separators, read_documents

EOT = '<|endoftext|>'
STORIES = ['One day.\nIt rained.\n', '"Hi!" he said.\n', 'The end.']
SEPARATED = [  # text → its documents
    (f'\n{EOT}\n'.join(STORIES), [f'{STORIES[0]}\n', f'{STORIES[1]}\n', STORIES[2]]),
    (f'{EOT}\n{STORIES[0]}{EOT}\n\n{STORIES[1]}{EOT}\n', STORIES[:2]),
    (f'{STORIES[0]}  {EOT} \r\n\r\n{STORIES[1]}', STORIES[:2]),
    (EOT.join(['One.', 'Two!', '"Hi!"', 'Four.', '']), ['One.', 'Two!', '"Hi!"', 'Four.']),
    (f'One.\n{EOT}Two.\n{EOT}Three.', ['One.\n', 'Two.\n', 'Three.']),
    (f'One.{EOT}\nTwo.{EOT}{EOT}\n \n{EOT}', ['One.', 'Two.'])]
MENTIONS = [f'the token {EOT} ends a text\n', f"eot = '{EOT}'\n", f'f("{EOT}", 1)\n', f'[{EOT}]\n',
            f'a `{EOT}`, too\n', f'(as `One.{EOT}Two.`)\n', f'f("One.{EOT}", 1)\n',
            f'x={EOT}\n', f'print("{EOT}")']


class Slow(io.StringIO):
    """A text that gives a few characters at a time."""

    def read(self, size):
        return super().read(7)


@pytest.mark.parametrize('open_text', [io.StringIO, Slow])
@pytest.mark.parametrize(('text', 'documents'), SEPARATED)
def test_an_end_of_text_token_between_documents_separates_them(text, documents, open_text):
    pieces = [*read_documents(open_text(text, newline=''), Separators())]
    begins = [i for i, (_, new_document) in enumerate(pieces) if new_document]
    assert [''.join(piece for piece, _ in pieces[i:j])
            for i, j in pairwise([*begins, len(pieces)])] == documents


@pytest.mark.parametrize('text', MENTIONS)
def test_text_that_mentions_the_token_stays_whole(text):
    separators = Separators()
    assert separators.split(text) == [text]
    assert separators.mentions


@pytest.mark.parametrize('argv', [['a.txt'], ['a.jsonl'], ['a.txt', '--documents=line']])
def test_the_token_separates_documents_in_every_kind_of_file(argv, tmp_path):
    stories = [f'Story {i} is not long.\n' for i in range(300)]
    Path('a.txt').write_text(f'{EOT}\n'.join(stories))
    write_rows(tmp_path / 'a.jsonl', [f'{EOT}\n'.join(stories[i:i + 10])
                                      for i in range(0, 300, 10)])
    train, val = prepared(tmp_path / 'd', 'text', *argv)
    assert sorted(story.strip() for story in train + val) == sorted(map(str.strip, stories))
