"""Which split each document belongs to."""

import hashlib
import math
import sys
from dataclasses import dataclass
from itertools import chain

from plaingpt.data.tokenizer_choice import count_characters

SPLITS = ('train', 'val', 'test')
VAL_CHARS = 4_000_000  # about a million tokens: enough for a loss, however large the corpus is
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: its multiples spread evenly over the circle


@dataclass
class Shares:
    """How much of the text is held out."""

    val: float
    test: float = 0.0
    val_chars: float = math.inf  # of validation text at most; later documents are for training


def put_in_splits(source, shares, ends_with_line):
    """The pieces of a source → (split, text, new_document).
    ends_with_line: end documents with a line break, where no end of text comes before the next"""
    pieces = source.pieces()
    if source.is_one_text:
        characters = count_characters(source)
        val = min(shares.val, shares.val_chars / max(1, characters))
        ends = [int(characters * (1 - (val + shares.test))), int(characters * (1 - shares.test))]
        return split_by_place(pieces, ends if shares.test else ends[:1])
    pieces = split_by_hash(pieces, shares)
    return end_with_line_breaks(pieces) if ends_with_line else pieces


def split_by_hash(pieces, shares):
    """Pieces → (split, text, new_document). A hash of a document's first piece decides its split,
    so a document keeps its split when others are added or removed. The validation share is at the
    low end of the hash's range and the test share at the high end, so that neither changes the
    other. A long document comes in several pieces, and each split gets its share of them: their
    hashes follow that of the first in steps of the golden ratio."""
    val_end = math.ceil(shares.val * 2**64)
    test_start = math.ceil((1 - shares.test) * 2**64)
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
        if own_split != 'val' and place >= test_start:
            split = 'test'
        elif not own_split and place < val_end and held_out < shares.val_chars:
            split, held_out = 'val', held_out + len(text)
        else:
            split = own_split or 'train'
        yield split, text, new_document or split != before


def split_by_place(pieces, ends):
    """Pieces of one text, which is cut once between splits → (split, text, new_document).
    ends: the characters where training text ends, and where validation text does"""
    seen = 0
    for text, *_ in pieces:
        begin = 0
        for split, end in zip(SPLITS, [*ends, sys.maxsize], strict=False):
            part = text[max(begin - seen, 0):max(end - seen, 0)]
            if part:
                yield split, part, begin >= seen
            begin = end
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
