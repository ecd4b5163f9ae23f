"""Which stretches of a text stand word for word in the training text, and where.

A suffix array (Manber and Myers 1990) holds the place of each token of the training text, in the
order of the text that begins there, so that a binary search finds the longest match. OLMoTrace (Liu
et al. 2025, arXiv 2504.07096) does the same for trillions of tokens.
It is kept beside the dataset.
"""

import hashlib
import json
import sys
from bisect import bisect_left
from contextlib import suppress
from itertools import pairwise

import numpy as np

from plaingpt.data.dataset import open_named
from plaingpt.system.errors import UserError, needs
from plaingpt.system.formatting import printable
from plaingpt.system.streams import print_styled, status

MOST_TOKENS = 200_000_000
HELD_OUT = 20  # texts of the validation split, at least, to compare with
SHORTEST = 25  # bytes of text that a stretch has at least, about five words: fewer are anybody's


def open_sources(state, source):
    """The Sources of a run. state: its state.json, {} of a model of others. Raises UserError."""
    if not state:
        raise UserError(f'sources=True: nothing says what text {source} was trained on: name a run '
                        'of train.py')
    dataset = open_named(state['config']['dataset'])
    if not dataset.is_identity('train', state['data']):
        raise UserError(f'sources=True: {source} was trained on other tokens than those of '
                        f'{dataset.folder}: prepare the text that it had')
    return Sources(dataset)


class Sources:
    """The training text of a Dataset, to search in. Raises UserError where it is too long."""

    def __init__(self, dataset):
        self.dataset, self.tokenizer = dataset, dataset.tokenizer()
        stream = dataset.split('train')
        self.files, self.starts = stream.files, stream.starts
        if len(stream) > MOST_TOKENS:
            raise UserError(f'sources=True: {dataset.folder} has {len(stream):,} training tokens, '
                            f'and {MOST_TOKENS:,} are the most')
        # With the highest byte first, bytes have the order of the ids.
        self.dtype = np.dtype('>u4' if dataset.vocab_size > 2**16 else '>u2')
        self.text = b''.join(ids.astype(self.dtype).tobytes()
                             for file in self.files for _, ids in file.pieces())
        self.suffixes = self.open_suffixes()

    def open_suffixes(self):
        """The suffix array that an earlier call has kept, or a new one."""
        identity = hashlib.sha256(json.dumps(self.dataset.identity('train')).encode()).hexdigest()
        path = self.files[0].path.with_name(f'train-{identity[:16]}.suffixes.npy')
        with suppress(OSError, ValueError):  # not there, or damaged
            suffixes = np.load(path, mmap_mode='r')
            if suffixes.shape == (self.starts[-1],) and suffixes.dtype == np.int32:
                return np.asarray(suffixes)
        suffixes = self.build()
        with suppress(OSError):  # the disk is full, or the folder another's: it lasts for this call
            np.save(path.with_suffix('.tmp.npy'), suffixes)
            path.with_suffix('.tmp.npy').replace(path)
        return suffixes

    @status.doing('building the suffix array of the training text')
    def build(self):
        """→ (tokens,) int32: of the sorted suffixes of all bytes, those that begin with a token."""
        with needs('pydivsufsort', '--sources'):
            from pydivsufsort import divsufsort
        suffixes = divsufsort(self.text)
        return suffixes[suffixes % self.dtype.itemsize == 0] // self.dtype.itemsize

    def longest_match(self, ids):
        """How many of the first of `ids` stand together in the training text → (number, the token
        where they do)."""
        query, width = ids.astype(self.dtype).tobytes(), self.dtype.itemsize

        def text_at(token):
            return self.text[int(token) * width:int(token) * width + len(query)]

        def alike(token):
            found = np.frombuffer(text_at(token), self.dtype)
            return int(np.cumprod(found == ids[:len(found)]).sum())

        # The text that begins most alike is one of the two that the query would stand between.
        i = bisect_left(self.suffixes, query, key=text_at)
        return max((alike(token), int(token)) for token in self.suffixes[max(0, i - 1):i + 1])

    def find(self, ids):
        """Token ids of a text → [(begin, end, token)], its copied stretches, the longest first,
        which do not overlap: the bytes of the text, and the token where each is from."""
        offsets = np.cumsum([0, *(len(self.tokenizer.decode_bytes([i])) for i in ids)]).tolist()
        matches = [self.longest_match(ids[i:]) for i in range(len(ids))]
        found, waiting = [], [(0, len(ids))]
        while waiting:
            begin, end = waiting.pop()  # the tokens between two stretches
            size, i, after = max(((offsets[after] - offsets[i], i, after) for i, after in (
                (i, min(i + matches[i][0], end)) for i in range(begin, end))), default=(0, 0, 0))
            if size >= SHORTEST:
                found.append((offsets[i], offsets[after], matches[i][1]))
                waiting += [(begin, i), (after, end)]
        return sorted(found, key=lambda stretch: stretch[0] - stretch[1])

    def place(self, token):
        """Where a token of the training text is: 'train.bin, token 1,234,567, document 83'."""
        k = int(np.searchsorted(self.starts, token, side='right')) - 1
        ids = np.frombuffer(self.text, self.dtype, token + 1)
        document = np.count_nonzero(ids == self.tokenizer.end_of_text)  # none where that is None
        return f'{self.files[k].path}, token {token - self.starts[k]:,}' \
            + f', document {document:,}' * bool(document)

    def show(self, text):
        """Print a text, at a terminal with copied stretches underlined, and where they are from."""
        ids = self.tokenizer.encode(text)
        data = self.tokenizer.decode_bytes(ids)
        found = [(whole(data, begin), whole(data, end), token)
                 for begin, end, token in self.find(ids)]
        edges = [0, *sorted(at for begin, end, _ in found for at in (begin, end)), len(data)]
        parts = [printable(data[a:b].decode('utf-8', 'replace')) for a, b in pairwise(edges)]
        if sys.stdout.isatty():
            parts[1::2] = (f'\x1b[4m{part}\x1b[24m' for part in parts[1::2])
        print_styled(''.join(parts))
        for begin, end, token in found:
            quote = data[begin:end].decode('utf-8', 'replace')
            ends = quote if len(quote) <= 60 else f'{quote[:40]} … {quote[-15:]}'
            print(f'  {len(quote)} characters, {self.place(token)}: {ends!r}')

    def compare(self, texts):
        """How much of texts is copied, and of held-out text as long as these, as a sentence."""
        written = [self.tokenizer.encode(text) for text in texts]
        stream, n = self.dataset.split('val'), max(HELD_OUT, len(written))
        held_out = [stream.read(i * len(stream) // n, len(written[i % len(written)]))
                    for i in range(n)]
        return f'{self.copied(written):.1%} of what it wrote stands word for word in the ' \
               f'training text, in stretches of {SHORTEST} bytes and more; of held-out text ' \
               f'{self.copied(held_out):.1%} does'

    def copied(self, texts):
        """Which share of the bytes of texts, as token ids, is copied."""
        copied = sum(end - begin for ids in texts for begin, end, _ in self.find(ids))
        return copied / max(1, sum(len(self.tokenizer.decode_bytes(ids)) for ids in texts))


def whole(data, at):
    """The first place from `at` on in UTF-8 where a character begins."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at
