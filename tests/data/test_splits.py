"""Which documents are for training and for validation."""

import hashlib
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest
from corpus_files import prepared, split_bytes, write_files, write_parquet, write_rows

import prepare
from plaingpt.data import splits
from plaingpt.data.documents import Piece, Source
from plaingpt.data.rows import TextReader

TEXTS = [f'document {i} of the web' for i in range(1000)]


def test_a_folder_of_the_hubs_layout_has_other_splits(tmp_path, capsys):
    for name in 'train', 'validation':
        write_parquet(tmp_path / f'hub/{name}.parquet', TEXTS)
    prepared(tmp_path / 'd', 'hf', tmp_path / 'hub')
    assert 'validation' in capsys.readouterr().out


@pytest.mark.parametrize(('options', 'word'), [
    (['--split=train[:50%]'], 'train[:50%]'), (['--split=nope'], 'nope'),
    (['--val_fraction=1.5'], 'val_fraction')])
def test_a_split_that_would_be_empty_is_refused(options, word, tmp_path, refused):
    write_parquet(tmp_path / 'hub/train.parquet', ['a text'])
    assert word in refused('hf', f'{tmp_path}/hub', *options)


# -----------------------------------------------------------------------------
# documents


class Pieces(Source):
    """A source of these pieces."""

    unit, total = 'B', 0

    def __init__(self, pieces, is_continuous=False):
        super().__init__('pieces', TextReader(), strict=False)
        self.given, self.is_continuous = pieces, is_continuous

    def read_pieces(self):
        yield from self.given

    def position(self):
        return 0


def assigned(pieces, fraction, is_continuous=False, cut_at_line=True):
    """[(split, text, new_document)] of a source of these pieces."""
    options = SimpleNamespace(val_fraction=fraction, max_val_chars=10**9, cut_at_line=cut_at_line)
    return [(split, text, new_document) for text, new_document, split
            in splits.assign_splits(Pieces(pieces, is_continuous), options)]


def sides(texts, fraction):
    return [split for split, *_ in assigned([Piece(text, True) for text in texts], fraction)]


def test_trailing_white_space_does_not_change_the_split_of_a_document():
    # a hash of all of the text, its last line break included
    hashes = [hashlib.blake2b(f'{text}\n'.encode(), digest_size=8).digest() for text in TEXTS]
    expected = ['val' if int.from_bytes(digest, 'big') < 0.3 * 2**64 else 'train'
                for digest in hashes]
    for end in ('', '\n', '\r\n', '\n\n \t\n'):
        assert sides([text + end for text in TEXTS], 0.3) == expected, end


@pytest.mark.parametrize('kind', ['rows', 'hub', 'max_tokens', 'files'])
def test_more_of_a_corpus_has_the_same_validation_text(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'VAL_CHARS', 1000)
    texts = [f'{text} goes on ' * (i % 9) for i, text in enumerate(TEXTS)]

    vals = []
    for n in (600, 800, 1000):
        folder, argv = tmp_path / f'{n}', ['text']
        if kind == 'files':
            folder.mkdir()
            for i, text in enumerate(texts[:n]):
                (folder / f'{i:04}.txt').write_text(text)
        elif kind == 'hub':
            write_parquet(folder / 'train.parquet', texts[:n])
            argv = ['hf']
        elif kind == 'rows':
            write_rows(folder / 'train.jsonl', texts[:n])
        else:
            write_rows(folder / 'train.jsonl', texts)
            argv += [f'--max_tokens={50 * n}']
        vals.append(prepared(tmp_path / f'd{n}', *argv, folder)[1])
    assert 1000 <= sum(map(len, vals[0])) < 1400
    assert vals[0] == vals[1] == vals[2]


def test_ten_documents_are_never_all_on_one_side():
    for seed in range(200):
        assert {*sides([f'row {i} of {seed}' for i in range(10)], 0.1)} == {'train', 'val'}
        assert {*sides([f'row {i} of {seed}' for i in range(150)], 0.001)} == {'train', 'val'}


@pytest.mark.parametrize('sizes', [[1, 900], [900, 900], [10, 500, 600, 700], [300] * 9 + [5]])
def test_of_a_few_documents_at_most_half_of_the_text_is_held_out_and_no_scrap(sizes):
    for seed in range(100):
        texts = [f'{seed} {i} '.ljust(8 * size, 'x') for i, size in enumerate(sizes)]
        held_out = sum(len(text) for text, side in zip(texts, sides(texts, 0.1), strict=True)
                       if side == 'val')
        assert 0 < held_out <= sum(map(len, texts)) / 2
        assert held_out >= 0.1 * sum(map(len, texts)) or sizes[0] == 1 or len(sizes) > 9


def test_copies_are_in_the_same_split_even_at_the_limit():
    options = SimpleNamespace(val_fraction=0.1, max_val_chars=200, cut_at_line=True)
    pieces = [Piece(text, True) for text in [*TEXTS, *TEXTS]]
    sides = {'train': set(), 'val': set()}
    for piece in splits.assign_splits(Pieces(pieces), options):
        sides[piece.split].add(piece.text)
    assert sides['val']
    assert not sides['val'] & sides['train']


def test_a_long_document_is_on_one_side():
    pieces = [Piece(f'{name}{i}', i == 0) for name in 'abcdefgh' for i in range(200)]
    for name in 'abcdefgh':
        assert len({split for split, text, _ in assigned(pieces, 0.3) if text[0] == name}) == 1


def test_few_files_are_one_text_of_which_whole_files_are_held_out(tmp_path):
    texts = [f'File {i} says this.' + '\r\n' * (i % 2) for i in range(20)]
    folder = write_files(tmp_path / 'in', *texts, ' \n')
    prepared(tmp_path / 'd', 'text', folder)
    train, val = (split_bytes(tmp_path / 'd', split).decode() for split in ('train', 'val'))
    assert '\0' not in train + val
    lines = [[line for line in text.split('\n') if line] for text in (train, val)]
    assert sorted(line.rstrip() for line in chain(*lines)) == sorted(map(str.strip, texts))
    assert 1 <= len(lines[1]) <= 10


# -----------------------------------------------------------------------------
# one long text


@pytest.mark.parametrize('is_continuous', [False, True])
@pytest.mark.parametrize('size', [1, 7, 10, 100])
def test_the_end_of_one_long_text_is_held_out(size, is_continuous):
    text = ''.join(map(chr, range(100, 200)))
    pieces = [Piece(text[i:i + size], i == 0) for i in range(0, 100, size)]
    parts = assigned(pieces, 0.4, is_continuous)
    assert ''.join(part for split, part, _ in parts if split == 'train') == text[:60]
    assert ''.join(part for split, part, _ in parts if split == 'val') == text[60:]
    assert [split for split, _, new_document in parts if new_document] == ['train', 'val']


@pytest.mark.parametrize(('text', 'val_start'), [
    ('one\ntwo\nthree\nfour\n', 8), ('a long first line\nshort', 18), ('one line', 4),
    ('one line\n', 4), ('oneline', 4)])
def test_it_is_cut_at_a_line_if_there_are_several(text, val_start):
    [(_, train, _), (_, val, _)] = assigned([Piece(text, True)], 0.3)
    assert (train, val) == (text[:val_start], text[val_start:])
    [(_, train, _), _] = assigned([Piece(text, True)], 0.3, cut_at_line=False)
    assert train == text[:int(0.7 * len(text))]


@pytest.mark.parametrize('n', [2, 5, 10])
def test_of_documents_that_are_all_the_same_the_last_are_held_out(n):
    parts = assigned([Piece('the same again', True)] * n, 0.1)
    assert [split for split, *_ in parts] == ['train'] * (n - 1) + ['val']


@pytest.mark.parametrize('sizes', [[10] * 60, [5, 10, 20, 40] * 30])
def test_a_document_that_is_held_out_stays_so_when_others_come(sizes):
    texts = [f'{i} '.ljust(size, 'x') for i, size in enumerate(sizes)]
    held_out = [{text for text, side in zip(texts[:n], sides(texts[:n], 0.1), strict=True)
                 if side == 'val'} for n in range(len(sizes) // 2, len(sizes))]
    assert sum(not fewer <= more for fewer, more in pairwise(held_out)) <= 1


def test_one_row_gives_its_end(tmp_path):
    write_rows(tmp_path / 'a.jsonl', ['one\n' * 100])
    train, val = prepared(tmp_path / 'd', 'text', tmp_path / 'a.jsonl')
    assert (train, val) == (['one\n' * 90], ['one\n' * 10])
