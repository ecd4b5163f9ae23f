"""Files of token ids, and several of them read as one stream."""

import hashlib
import os
import threading
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import command_for

READ_TOKENS = 2**22  # at a time, when a whole file is read
SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 2**14  # that sampled_sha256 reads


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, open for reading as long as this object exists. A file that is replaced
    by renaming another keeps its content for those who have it open."""

    path: Path
    dtype: np.dtype
    file: FileIO
    offset: int  # the byte where the tokens begin
    tokens: int
    sha256: str = ''  # of the tokens, from meta.json
    lock: object = field(default_factory=threading.Lock, repr=False)  # a file has one place

    def read_bytes(self, place, count):
        """`count` bytes from byte `place` on; threads can call this at once. Raises UserError."""
        # Not a memory map: its pages would count as this process's memory, more and more of the
        # corpus as the run proceeds, and a file cut short would kill the process (SIGBUS).
        with self.lock:
            self.file.seek(place)
            data = self.file.read(count)
        if len(data) < count:
            raise UserError(f'{self.path} has been cut short since it was opened: put the file '
                            'back as it was, and resume')
        return data

    def read(self, start, count):
        """Tokens [start, start + count), fewer at the end of the file. Raises UserError."""
        width = self.dtype.itemsize
        count = min(count, self.tokens - start)
        return np.frombuffer(self.read_bytes(self.offset + start * width, count * width),
                             self.dtype)

    def pieces(self):
        """Yield (number of the first token, tokens) of the whole file in order."""
        for start in range(0, self.tokens, READ_TOKENS):
            yield start, self.read(start, READ_TOKENS)

    def checksum(self, vocab_size):
        """SHA-256 of all tokens. Raises UserError for an id beyond the vocabulary."""
        digest = hashlib.sha256()
        for start, ids in self.pieces():
            check_ids(self.path, ids, start, vocab_size)
            digest.update(ids)
        return digest.hexdigest()

    def verify(self, vocab_size):
        """Read all tokens. Raises UserError for an id beyond the vocabulary, and where their
        checksum is not that of meta.json."""
        checksum = self.checksum(vocab_size)
        if self.sha256 and checksum != self.sha256:
            raise UserError(f'{self.path}: another checksum than meta.json has: the file was '
                            'damaged or replaced; prepare the data again')

    def sampled_sha256(self):
        """Checksum of the size and of blocks spread evenly from the first byte to the last; of
        all bytes where the file is no larger than the blocks together."""
        size = self.offset + self.tokens * self.dtype.itemsize
        places, length = sampled_blocks(size)
        digest = hashlib.sha256(f'{size}\n'.encode())
        for place in places:
            digest.update(self.read_bytes(place, length))
        return f'sampled:{digest.hexdigest()}'


def sampled_blocks(size):
    """→ (the bytes where blocks begin, spread evenly over a file of `size` bytes, their length); of
    a small file one block, the whole file"""
    if size <= SAMPLED_BLOCKS * SAMPLED_BYTES:
        return [0], size
    last = size - SAMPLED_BYTES
    return [last * i // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)], SAMPLED_BYTES


def check_ids(path, ids, first, vocab_size):
    """Raises UserError for an id beyond the vocabulary; `first` is the number of the first id."""
    unsigned = as_unsigned(ids)
    if unsigned.max(initial=0) >= vocab_size:
        bad = int(np.flatnonzero(unsigned >= vocab_size)[0])
        raise UserError(f'{path}: token {first + bad:,} has id {ids[bad]}, but the vocabulary ends '
                        f'at {vocab_size - 1}: the file is damaged or of another tokenizer, so '
                        'prepare the data again; or say with --vocab_size how many ids of your own '
                        f'there are (with {command_for("prepare")} ids FOLDER also their --dtype)')


def as_unsigned(ids):
    """The same bytes as unsigned integers: an id below 0 becomes larger than any vocabulary."""
    return ids.view(ids.dtype.str.replace('i', 'u'))


def dtype_named(name):
    """The dtype of ids as meta.json names it: 'uint16' is little-endian, '>u2' big-endian."""
    return np.dtype(name) if name.startswith('>') else np.dtype(name).newbyteorder('<')


def name_of(dtype):
    """The name that dtype_named reads."""
    return dtype.str if dtype.str.startswith('>') else dtype.name


def open_tokens(path, dtype, expected=None, sha256='', offset=None):
    """One file of tokens → TokenFile.

    expected: the number of tokens, where it is known; sha256: of these tokens; offset: the byte
    where they begin, in a file that may hold more. Raises UserError for a missing file, or
    another number of tokens.
    """
    try:
        file = open(path, 'rb', buffering=0)
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}') from None
    begin = offset or 0
    in_file = (os.fstat(file.fileno()).st_size - begin) / dtype.itemsize
    tokens = int(in_file) if expected is None else expected
    if not tokens or in_file < tokens or (in_file > tokens and offset is None):
        raise UserError(f'{path}: {in_file:,.12g} tokens of {dtype.itemsize} bytes where '
                        f'{tokens or "some"} should be: the file is damaged or of another type; '
                        'prepare the data again')
    return TokenFile(path, dtype, file, begin, tokens, sha256)


class TokenStream:
    """The token files of a split, read as one stream."""

    loss_mask = None  # of conversations, a stream with 1 for each token that counts in the loss

    def __init__(self, files, vocab_size):
        self.files = files
        self.starts = np.cumsum([0] + [file.tokens for file in files])
        self.vocab_size = vocab_size

    def __len__(self):
        return int(self.starts[-1])

    def verify(self):
        """Read all files. Raises UserError for one that is damaged."""
        for file in self.files:
            file.verify(self.vocab_size)

    def sequences(self, starts, length):
        """`length` tokens from each of `starts` → (len(starts), length) int64 array.
        Raises UserError for an id beyond the vocabulary."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts, strict=True):
            self._read_into(row, int(start))
        return out

    def read(self, start, length):
        """At most `length` tokens from `start` on → int64 array. Raises UserError."""
        return self.sequences(np.array([start]), min(length, len(self) - start))[0]

    def _read_into(self, out, start):
        k, filled = int(np.searchsorted(self.starts, start, side='right')) - 1, 0
        while filled < len(out):  # more than once where the sequence runs over into the next file
            at = start + filled - int(self.starts[k])
            piece = self.files[k].read(at, len(out) - filled)
            check_ids(self.files[k].path, piece, at, self.vocab_size)
            out[filled:filled + len(piece)] = piece
            filled += len(piece)
            k += 1
