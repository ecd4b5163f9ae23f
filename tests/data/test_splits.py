"""Which documents are for training and for validation."""

import hashlib

import pytest
from corpus_files import prepared, write_parquet, write_rows

import prepare
from plaingpt.data.documents import Piece
from plaingpt.data.encoding import split_by_hash, split_by_position

TEXTS = [f'document {i} of the web' for i in range(1000)]


@pytest.mark.parametrize(('options', 'word'), [
    (['--split=train[:50%]'], 'train[:50%]'), (['--split=nope'], 'nope'),
    (['--val_fraction=1.5'], 'val_fraction'), ([], 'val'), (['--val_fraction=0.99999'], 'train')])
def test_a_split_that_would_be_empty_is_refused(options, word, tmp_path, refused):
    write_parquet(tmp_path / 'hub/train.parquet', ['a text'])
    assert word in refused('hf', f'{tmp_path}/hub', *options)


# -----------------------------------------------------------------------------
# a hash of the text


def sides(texts, share):
    return [split for split, *_ in split_by_hash([Piece(text, True) for text in texts], share)]


def test_the_side_of_a_document_stays_whatever_white_space_ends_it():
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


def test_each_split_gets_its_share_of_a_long_document():
    for name in 'abc':
        pieces = [Piece(f'{name}{i}', i == 0) for i in range(200)]
        splits = [split for split, *_ in split_by_hash(pieces, 0.1)]
        assert splits.count('val') == pytest.approx(20, abs=2)
        assert min(splits[i:i + 66].count('val') for i in (0, 66, 132)) >= 4  # from all over it


# -----------------------------------------------------------------------------
# a running text


def test_a_running_text_is_split_at_the_same_place_wherever_its_pieces_end():
    text = ''.join(map(chr, range(100, 200)))
    for size in (1, 7, 10, 100):
        pieces = [Piece(text[i:i + size], i == 0) for i in range(0, 100, size)]
        parts = [*split_by_position(pieces, [60])]
        assert ''.join(part for split, part, _ in parts if split == 'train') == text[:60]
        assert ''.join(part for split, part, _ in parts if split == 'val') == text[60:]
