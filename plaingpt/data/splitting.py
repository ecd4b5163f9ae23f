"""Which documents stay, and which split each belongs to."""

import hashlib
import math
import os

import numpy as np

from plaingpt.data.documents import MAX_DOCUMENT_CHARS
from plaingpt.system.errors import UserError

SPLITS = ('train', 'val', 'test')


GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: its multiples spread evenly over the circle


def split_by_hash(pieces, val_fraction, test_fraction=0):
    """Yield (split, text, new_document, position). A hash of a document's first piece decides its
    split, so a document keeps its split when others are added or removed. The validation share is
    at the low end of the hash's range and the test share at the high end, so that neither changes
    the other. Of a long document, which comes in several pieces, each split gets its share: the
    hashes of the other pieces follow that of the first in steps of the golden ratio."""
    val_end = math.ceil(val_fraction * 2**64)
    test_start = math.ceil((1 - test_fraction) * 2**64)
    split = None
    for text, new_document, position, own_split in pieces:
        if new_document:
            # Text that differs in white space at its end only, as by a last line break, is on one
            # side. Most files end with one line break: so they hash as they are.
            data = (text.rstrip() + '\n').encode('utf-8', 'replace')
            place = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'big')
        else:
            place = (place + GOLDEN) % 2**64
        before = split
        if own_split != 'val' and place >= test_start:
            split = 'test'
        else:
            split = own_split or ('val' if place < val_end else 'train')
        yield split, text, new_document or split != before, position


def split_by_place(pieces, ends):
    """Yield (split, text, new_document, position) of one text, which is cut once between splits.
    ends: (split, the place of its end in characters) of each split, in their order"""
    seen = 0
    for text, _, position, _ in pieces:
        begin = 0
        for split, end in ends:
            part = text[max(begin - seen, 0):max(end - seen, 0)]
            if part:
                yield split, part, begin >= seen, position
            begin = end
        seen += len(text)


# -----------------------------------------------------------------------------
# exact duplicates


class Duplicates:
    """Finds the documents that equal an earlier one but for white space, by hashes of 64 bits:
    among a billion documents, chance takes one for a copy in one corpus of 37. A hash takes 8 bytes
    of memory, twice that where the array grows, and 8 in a file, for a run that resumes."""

    RECENT = 2**18  # hashes in a set, about 25 MB, before they join the sorted array

    def __init__(self, path, hashes=0, dropped=0):
        """Go on in the file `path` after so many hashes and so many duplicates."""
        self.hashes, self.dropped = hashes, dropped
        self._sorted, self._recent = np.empty(0, '<i8'), set()
        self._file = open(path, 'ab')
        os.truncate(path, 8 * hashes)
        if hashes:
            self._sorted = np.sort(np.fromfile(path, '<i8'))

    def leave_out(self, pieces, whole):
        """Yield the pieces of those documents that are no duplicates. Raises UserError.
        whole: each piece is a document, and none is read before the one before it was yielded;
        otherwise a document is held in memory until its end"""
        document, characters = [], 0
        for piece in pieces:
            if piece.new_document:
                yield from self._unless_known(document)
                document, characters = [], 0
            document.append(piece)
            characters += len(piece.text)
            if characters > MAX_DOCUMENT_CHARS:
                raise UserError(f'dedup: a document exceeds {MAX_DOCUMENT_CHARS:,} characters, and '
                                'is compared as a whole: cut it into shorter ones, or leave '
                                '--dedup out')
            if whole:
                yield from self._unless_known(document)
                document = []
        yield from self._unless_known(document)

    def _unless_known(self, document):
        if document and self._is_new(hash_words(piece.text for piece in document)):
            yield from document

    def _is_new(self, number):
        place = int(self._sorted.searchsorted(number))
        if number in self._recent or (
                place < len(self._sorted) and self._sorted.item(place) == number):
            self.dropped += 1
            return False
        self._recent.add(number)
        self.hashes += 1
        self._file.write(number.to_bytes(8, 'little', signed=True))
        if len(self._recent) >= self.RECENT:
            recent = np.fromiter(self._recent, '<i8', len(self._recent))
            self._recent.clear()
            # 'stable' merges what is sorted in part, in linear time
            self._sorted = np.concatenate([self._sorted, np.sort(recent)])
            self._sorted.sort(kind='stable')
        return True

    def state(self):
        return {'hashes': self.hashes, 'dropped': self.dropped}

    def sync(self):
        """Make the hashes so far outlast a crash of the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self):
        self._file.close()


def hash_words(texts, block=2**18):
    """A document in pieces → a hash of its words, as a signed number of 64 bits: runs of white
    space count as one space, and none at both ends."""
    digest, begun, space = hashlib.blake2b(digest_size=8), False, False
    for text in texts:
        for start in range(0, len(text), block):  # so that the words of a long text are not a list
            part = text[start:start + block]
            if words := ' '.join(part.split()):
                if begun and (space or part[0].isspace()):
                    digest.update(b' ')
                digest.update(words.encode('utf-8', 'surrogatepass'))
                begun, space = True, part[-1].isspace()
            else:
                space = True
    return int.from_bytes(digest.digest(), 'little', signed=True)
