"""Which stretches of a text stand word for word in the training text, and where.

A suffix array (Manber and Myers 1990) holds the place of each token of the training text, in the
order of the text that begins there, so that a binary search finds the longest match. OLMoTrace (Liu
et al. 2025, arXiv 2504.07096) does the same for trillions of tokens.

To build it takes about 14 bytes of memory for each token of 2 bytes. It is kept in the folder of
the dataset with 4 bytes a token, and mapped from there.
"""

import hashlib
import json
import sys
from bisect import bisect_left
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import naming
from plaingpt.system.formatting import printable
from plaingpt.system.streams import print_styled, status, warn

MOST_TOKENS = 200_000_000
SHORTEST = 25  # bytes of text that a stretch has at least, about five words: fewer are anybody's
CHUNK = 2**24  # entries of the suffix array that are looked at at once


class Stretch(NamedTuple):
    begin: int  # in the bytes of the text
    end: int
    place: str  # 'train.bin, token 1,234,567, document 83'


class TrainingText:
    """The training split of a Dataset, to search in. Raises UserError where it is too long."""

    def __init__(self, dataset):
        self.dataset, stream = dataset, dataset.split('train')
        if len(stream) > MOST_TOKENS:
            raise UserError(f'{dataset.folder} has {len(stream):,} training tokens, and --sources '
                            f'searches at most {MOST_TOKENS:,}: leave it out')
        self.files, self.starts = stream.files, stream.starts
        self.width = 1 if dataset.vocab_size <= 2**8 else 2 if dataset.vocab_size <= 2**16 else 4
        self.text = b''.join(self.as_bytes(ids) for file in self.files for _, ids in file.pieces())
        self.suffixes = self.open_suffixes()

    def as_bytes(self, ids):
        """Token ids as bytes that have the order of the ids: the highest comes first."""
        return ids.astype(f'>u{self.width}').tobytes()

    def open_suffixes(self):
        """The suffix array: that in the folder, or a new one, which is kept there."""
        identity = json.dumps(self.dataset.identity('train')).encode()
        name = f'train-{hashlib.sha256(identity).hexdigest()[:16]}.suffixes.npy'
        path = self.dataset.folder / name
        with suppress(OSError, ValueError):  # not there, or damaged
            suffixes = np.load(path, mmap_mode='r')
            if suffixes.shape == (self.starts[-1],) and suffixes.dtype == np.int32:
                return np.asarray(suffixes)  # whose items are read faster
        suffixes = self.build()
        try:
            with naming(path):
                for old in self.dataset.folder.glob('train-*.suffixes.npy'):
                    old.unlink()
                temporary = path.with_suffix('.tmp.npy')
                np.save(temporary, suffixes)
                temporary.replace(path)
        except OSError as e:
            warn(f'the suffix array is not kept in {path} ({e.strerror}): each time it is built')
        return suffixes

    @status.doing('building the suffix array of the training text')
    def build(self):
        """→ (tokens,) int32. The suffixes of all bytes are sorted, and those between tokens left
        out."""
        with needs('pydivsufsort', '--sources'):
            from pydivsufsort import divsufsort
        of_bytes, n = divsufsort(self.text), 0
        suffixes = np.empty(self.starts[-1], np.int32)
        for begin in range(0, len(of_bytes), CHUNK):
            chunk = of_bytes[begin:begin + CHUNK]
            chunk = chunk[chunk % self.width == 0] // self.width
            suffixes[n:n + len(chunk)] = chunk
            n += len(chunk)
        return suffixes

    def longest_match(self, ids):
        """How many of the first of `ids` stand together in the training text → (number, the token
        where they begin there)."""
        query, text, width = self.as_bytes(ids), self.text, self.width

        def text_at(suffix):
            return text[int(suffix) * width:int(suffix) * width + len(query)]
        # The text with the most in common is one of the two between which the query would stand.
        i = bisect_left(self.suffixes, query, key=text_at)
        return max((common_bytes(query, text_at(suffix)) // width, int(suffix))
                   for suffix in self.suffixes[max(0, i - 1):i + 1])

    def place(self, token, end_of_text):
        """Where a token of the training text is, in words."""
        k = int(np.searchsorted(self.starts, token, side='right')) - 1
        found = f'{self.files[k].path}, token {token - self.starts[k]:,}'
        before = np.frombuffer(self.text, f'>u{self.width}', token + 1)
        if document := np.count_nonzero(before == end_of_text) if end_of_text is not None else 0:
            found += f', document {document:,}'
        inputs = self.dataset.meta.get('inputs', {}).get('files', ())
        return found + (f' (of {inputs[0]["name"]})' if len(inputs) == 1 else '')


def common_bytes(a, b):
    """How many bytes a and b begin with alike."""
    n = min(len(a), len(b))
    differ = np.frombuffer(a, np.uint8, n) != np.frombuffer(b, np.uint8, n)
    return int(differ.argmax()) if differ.any() else n


class Sources:
    """What of a text stands in the training text of a run. dataset: of the run"""

    def __init__(self, dataset):
        self.dataset, self.tokenizer = dataset, dataset.tokenizer()
        self.texts = [TrainingText(part.dataset) for part in dataset.parts]

    def find(self, ids):
        """Token ids of a text → [Stretch], the longest first, none of which overlap."""
        sizes = [len(self.tokenizer.decode_bytes([i])) for i in ids]
        offsets = np.cumsum([0, *sizes]).tolist()  # of tokens in the bytes of the text
        matches = [max((*text.longest_match(ids[i:]), k) for k, text in enumerate(self.texts))
                   for i in range(len(ids))]

        def size(i, end):
            """Bytes of the match at token i, before the token `end`."""
            return offsets[min(i + matches[i][0], end)] - offsets[i]

        found, waiting = [], [(0, len(ids))]
        while waiting:
            begin, end = waiting.pop()
            best = max(range(begin, end), key=lambda i: size(i, end), default=begin)
            if begin == end or size(best, end) < SHORTEST:
                continue
            length, token, k = matches[best]
            after = min(best + length, end)
            place = self.texts[k].place(token, self.tokenizer.end_of_text)
            found.append(Stretch(offsets[best], offsets[after], place))
            waiting += [(begin, best), (after, end)]
        return sorted(found, key=lambda stretch: stretch.begin - stretch.end)

    def show(self, text):
        """Print a text, at a terminal with its stretches underlined, and where each is from."""
        data = text.encode('utf-8', 'replace')
        found = self.find(self.tokenizer.encode(text))
        shown, end = '', 0
        for stretch in sorted(found):
            begin, before = whole(data, stretch.begin), end
            end = whole(data, stretch.end)
            shown += printable(data[before:begin].decode()) \
                + f'\x1b[4m{printable(data[begin:end].decode())}\x1b[24m'
        if sys.stdout.isatty():
            print_styled(shown + printable(data[end:].decode()))
        else:
            print(text)
        for stretch in found:
            quote = data[whole(data, stretch.begin):whole(data, stretch.end)].decode()
            print(f'  {len(quote)} characters, {stretch.place}: {shorten(quote)}')

    def compare(self, texts):
        """How much of texts is copied, and of as much text of the validation split → (shares)"""
        written = [self.tokenizer.encode(text) for text in texts]
        stream = self.dataset.split('val')
        held_out = [stream.read(i * max(0, len(stream) - len(ids)) // len(written), len(ids))
                    for i, ids in enumerate(written)]
        return self.copied(written), self.copied(held_out)

    def copied(self, texts):
        """Which share of the bytes of texts, each as token ids, stands in the training text."""
        copied = sum(found.end - found.begin for ids in texts for found in self.find(ids))
        return copied / max(1, sum(len(self.tokenizer.decode_bytes(ids)) for ids in texts))


def whole(data, at):
    """The first place from `at` on in UTF-8 where a character begins."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def shorten(text):
    """A text in a line, of a long one its ends."""
    return repr(text if len(text) <= 60 else f'{text[:40]} … {text[-15:]}')
