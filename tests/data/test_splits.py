"""Which documents are for training and for validation."""

import hashlib

import pytest
from corpus_files import prepared, write_parquet, write_rows

import prepare
from plaingpt.data.documents import Piece
from plaingpt.data.splitting import split_by_hash, split_by_place

TEXTS = [f'document {i} of the web' for i in range(1000)]


@pytest.mark.parametrize(('more', 'words'), [
    (['--split=train[:50%]', '--val_split=train[:10%]'], 'Bad split: train[:50%]'),
    (['--split=nope'], 'nope'), (['--text_field=body'], "no field 'body', it has 'text'"),
    (['--val_fraction=1.5'], 'val_fraction=1.5: must be'),
    *((more, f'the {split} split would be empty: use more text') for more, split in (
        ([], 'val'), (['--val_fraction=0.99999'], 'train')))])
def test_shares_and_splits_that_cannot_be_are_refused(more, words, tmp_path, refused):
    write_parquet(tmp_path / 'hub/train.parquet', ['a text'])
    assert words in refused('hf', f'{tmp_path}/hub', *more)


# -----------------------------------------------------------------------------
# a hash of the text


def sides(texts, share):
    return [split for split, *_ in split_by_hash([Piece(text, True) for text in texts], share)]


def test_the_side_of_a_document_stays_whatever_white_space_ends_it():
    # a hash of all of the text, its last line break included
    hashes = [hashlib.blake2b(f'{text}\n'.encode(), digest_size=8).digest() for text in TEXTS]
    wanted = ['val' if int.from_bytes(found, 'big') < 0.3 * 2**64 else 'train' for found in hashes]
    for end in ('', '\n', '\r\n', ' ', '\n\n \t\n'):
        assert sides([text + end for text in TEXTS], 0.3) == wanted, end


def test_documents_keep_their_side_when_others_come_and_go():
    assert sides(TEXTS[::3], 0.1) == sides(TEXTS, 0.1)[::3]


@pytest.mark.parametrize('kind', ['rows', 'hub', 'hub, max_tokens', 'files'])
def test_more_of_a_corpus_has_the_same_validation_text(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'VAL_CHARS', 1000)
    vals, texts = [], [f'{text} goes on ' * (i % 9) for i, text in enumerate(TEXTS)]
    for n in (600, 800, 1000):
        folder, more = tmp_path / f'{n}', []
        if kind == 'files':
            folder.mkdir()
            for i, text in enumerate(texts[:n]):
                (folder / f'{i:04}.txt').write_text(text)
        elif kind == 'hub':
            write_parquet(folder / 'train.parquet', texts[:n])
        else:
            write_rows(folder / 'train.jsonl', texts)
            more = [f'--max_tokens={50 * n}'] if 'max' in kind else []
        _, val = prepared(tmp_path / f'd{n}', 'hf' if 'hub' in kind else 'text', folder, *more)
        assert 1000 <= sum(map(len, val)) < 1400
        vals.append(val)
    assert vals[0] == vals[1] == vals[2]


def test_each_split_gets_its_share_of_a_long_document():
    for name in 'abc':
        pieces = [Piece(f'{name}{i}', i == 0) for i in range(200)]
        found, _, begins = zip(*split_by_hash(pieces, 0.1), strict=True)
        assert abs(found.count('val') - 20) <= 2
        thirds = [found[i:i + 66].count('val') for i in (0, 66, 132)]
        assert min(thirds) >= 4  # from all over it
        # what comes from two places is two documents
        assert list(begins) == [a != b for a, b in zip(('', *found), found, strict=False)]


def test_validation_has_its_share_of_the_tokens_of_a_folder_of_many_sizes(tmp_path):
    (tmp_path / 'in').mkdir()
    for name, words in ('book.txt', 150_000), ('page.xml', 20_000), ('code.py', 40_000):
        (tmp_path / 'in' / name).write_text(' '.join(f'{name}{i}' for i in range(words)))
    write_rows(tmp_path / 'in/rows.jsonl', [f'row {i}' for i in range(250)])
    train, val = map('\n'.join, prepared(tmp_path / 'd', 'text', f'--input={tmp_path}/in',
                                         '--val_fraction=0.1'))
    assert 0.07 < len(val) / len(train + val) < 0.13
    assert all(name in val for name in ('book.txt', 'code.py', 'row '))


# -----------------------------------------------------------------------------
# a running text


def test_a_running_text_is_cut_into_its_splits_wherever_its_pieces_end():
    text = ''.join(map(chr, range(100, 200)))
    for size in (1, 7, 10, 100):
        pieces = [Piece(text[i:i + size], i == 0) for i in range(0, 100, size)]
        found = [*split_by_place(pieces, [60])]
        for split, start, end in (('train', 0, 60), ('val', 60, 100)):
            mine = [(part, first) for name, part, first in found if name == split]
            assert ''.join(part for part, _ in mine) == text[start:end]
            assert [first for _, first in mine] == [True] + [False] * (len(mine) - 1)
