"""Which documents stay, and which split each belongs to."""

import hashlib
import math

SPLITS = ('train', 'val', 'test')
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: its multiples spread evenly over the circle


def split_by_hash(pieces, val_fraction, test_fraction=0):
    """Pieces → (split, text, new_document). A hash of a document's first piece decides its split,
    so a document keeps its split when others are added or removed. The validation share is at the
    low end of the hash's range and the test share at the high end, so that neither changes the
    other. Of a long document, which comes in several pieces, each split gets its share: the hashes
    of the other pieces follow that of the first in steps of the golden ratio."""
    val_end = math.ceil(val_fraction * 2**64)
    test_start = math.ceil((1 - test_fraction) * 2**64)
    split = None
    for text, new_document, own_split in pieces:
        if new_document:
            # Text that differs in white space at its end only, as by a last line break, is on one
            # side. Most files end with one line break: so they hash as they are.
            place = int.from_bytes(hash_of(text.rstrip() + '\n'), 'big')
        else:
            place = (place + GOLDEN) % 2**64
        before = split
        if own_split != 'val' and place >= test_start:
            split = 'test'
        else:
            split = own_split or ('val' if place < val_end else 'train')
        yield split, text, new_document or split != before


def split_by_place(pieces, ends):
    """Pieces of one text, which is cut once between splits → (split, text, new_document).
    ends: (split, the place of its end in characters) of each split, in their order"""
    seen = 0
    for text, *_ in pieces:
        begin = 0
        for split, end in ends:
            part = text[max(begin - seen, 0):max(end - seen, 0)]
            if part:
                yield split, part, begin >= seen
            begin = end
        seen += len(text)


def hash_of(text, errors='replace'):
    """A hash of 64 bits, as bytes; `errors` as in str.encode."""
    return hashlib.blake2b(text.encode('utf-8', errors), digest_size=8).digest()


class Duplicates:
    """Leaves out documents that equal an earlier one but for white space, by hashes of 64 bits:
    among a billion documents, chance takes one for a copy in one corpus of 37. A million documents
    take about 100 MB of memory."""

    def __init__(self):
        self.seen, self.dropped = set(), 0

    def leave_out(self, pieces):
        """Yield the pieces of those documents that are no duplicates."""
        document = []
        for piece in pieces:
            if piece.new_document and document:
                yield from self.if_new(document)
            document = [piece] if piece.new_document else [*document, piece]
        if document:
            yield from self.if_new(document)

    def if_new(self, document):
        """The pieces of a document, none where it is a duplicate."""
        words = ' '.join(''.join(piece.text for piece in document).split())
        # Bytes that are no UTF-8 are lone surrogates in the text, and differ.
        number = hash_of(words, 'surrogatepass')
        if number in self.seen:
            self.dropped += 1
            return []
        self.seen.add(number)
        return document
