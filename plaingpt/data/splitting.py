"""Which split each document belongs to."""

import hashlib
import math
from itertools import chain

VAL_CHARS = 4_000_000  # about a million tokens: enough for a loss, however large the corpus is
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: its multiples spread evenly over the circle


def put_in_splits(source, held_out, ends_with_line):
    """The pieces of a source → (split, text, new_document).

    held_out: the share of the text for validation, and how many characters it is at most
    ends_with_line: end documents with a line break, where no end of text comes before the next
    """
    pieces, (share, most) = source.pieces(), held_out
    if source.is_one_text:
        share = min(share, most / max(1, sum(source.file_chars)))
        return split_by_place(pieces, [int(n * (1 - share)) for n in source.file_chars])
    pieces = split_by_hash(pieces, share, most)
    return end_with_line_breaks(pieces) if ends_with_line else pieces


def split_by_hash(pieces, share, most=math.inf):
    """Pieces → (split, text, new_document). A hash of a document's first piece decides its split,
    so a document keeps its split when others are added or removed. When `most` characters are for
    validation, later documents are for training. A long document comes in several pieces, and each
    split gets its share of them: their hashes follow that of the first in steps of the golden
    ratio."""
    end = math.ceil(share * 2**64)
    split, held_out = None, 0
    for text, new_document, own_split in pieces:
        if new_document:
            # Texts that differ only in white space at the end get the same split. Most files end
            # with one line break, and hash as they are.
            data = (text.rstrip() + '\n').encode('utf-8', 'replace')
            place = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'big')
        else:
            place = (place + GOLDEN) % 2**64
        before = split
        if not own_split and place < end and held_out < most:
            split, held_out = 'val', held_out + len(text)
        else:
            split = own_split or 'train'
        yield split, text, new_document or split != before


def split_by_place(pieces, ends):
    """Pieces of the files of one text → (split, text, new_document). The end of each file is for
    validation, so that both splits have text of each kind.

    ends: of each file, the character where its validation text begins
    """
    ends, begun = iter(ends), set()
    train_end = '\n'  # of the training text
    for text, new_file, _ in pieces:
        if new_file:
            end, seen = next(ends), 0
        here = max(end - seen, 0)
        for split, part in ('train', text[:here]), ('val', text[here:]):
            if not part:
                continue
            if split == 'train':
                if new_file and not train_end.endswith('\n'):
                    part = '\n' + part
                train_end = part[-1]
            yield split, part, split not in begun
            begun.add(split)
        seen += len(text)


def end_with_line_breaks(pieces):
    """Let each document end with a line break."""
    held = None
    for piece in chain(pieces, [(None, '', True)]):
        if held:
            split, text, new_document = held
            ends = piece[2] and not text.endswith('\n')
            yield split, text + '\n' if ends else text, new_document
        held = piece
