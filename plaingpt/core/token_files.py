"""Files of token ids, and streams of several files."""

import hashlib
import os
import threading
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import command_for, count_of, quoted

CONTEXT, IN_LOSS, CONVERSATION, TURN = range(4)  # marks in a loss mask: ChatTokenizer
READ_TOKENS = 2**22  # per read, for whole files
SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 2**14  # sampled_sha256 reads 64 blocks of 16 KiB
PREPARE_AGAIN = 'restore the file, or prepare the data again'


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, open for reading as long as this object exists. If another file is
    renamed over it, this object still reads the old content."""

    path: Path
    dtype: np.dtype
    file: FileIO
    offset: int  # the byte where the tokens begin
    tokens: int
    sha256: str = ''  # of the tokens, from meta.json
    advice: str = PREPARE_AGAIN  # what to do if the tokens are not as expected
    lock: object = field(default_factory=threading.Lock, repr=False)  # for the file position

    def read_bytes(self, offset, count):
        """`count` bytes from byte `offset` on. Thread-safe. Raises UserError."""
        # Not a memory map: its pages would count as memory of this process, more and more as the
        # run proceeds, and a truncated file would kill the process (SIGBUS).
        with self.lock:
            self.file.seek(offset)
            data = self.file.read(count)
        if len(data) < count:
            raise UserError(f'{self.path}: truncated since it was opened; restore the file and '
                            'resume')
        return data

    def read(self, start, count):
        """Tokens [start, start + count), fewer at the end of the file. Raises UserError."""
        width = self.dtype.itemsize
        count = min(count, self.tokens - start)
        return np.frombuffer(self.read_bytes(self.offset + start * width, count * width),
                             self.dtype)

    def chunks(self, vocab_size):
        """Yield all tokens in order, some at a time. Raises UserError for an id beyond the
        vocabulary."""
        for start in range(0, self.tokens, READ_TOKENS):
            ids = self.read(start, READ_TOKENS)
            self.check_ids(ids, start, vocab_size)
            yield ids

    def verify(self, vocab_size):
        """Read all tokens. Raises UserError for an id beyond the vocabulary or a wrong checksum."""
        digest = hashlib.sha256()
        for ids in self.chunks(vocab_size):
            digest.update(ids)
        if self.sha256 and digest.hexdigest() != self.sha256:
            raise UserError(f'{self.path}: the checksum does not match meta.json: the file is '
                            f'damaged or was replaced; {self.advice}')

    def check_ids(self, ids, start, vocab_size):
        """Raises UserError for an id beyond the vocabulary. start: the index of ids[0]"""
        unsigned = ids.view(ids.dtype.str.replace('i', 'u'))  # a negative id becomes a large one
        if unsigned.max(initial=0) < vocab_size:
            return
        i = int(np.flatnonzero(unsigned >= vocab_size)[0])
        raise UserError(f'{self.path}: token {start + i:,} has id {ids[i]}, but the largest id of '
                        f'the vocabulary is {vocab_size - 1}; {self.advice}')

    def sampled_sha256(self):
        """Checksum of the size and of evenly spaced blocks; of all bytes of a small file."""
        size = self.offset + self.tokens * self.dtype.itemsize
        offsets, length = [0], size
        if size > SAMPLED_BLOCKS * SAMPLED_BYTES:
            length = SAMPLED_BYTES
            last = size - length
            offsets = [last * i // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)]
        digest = hashlib.sha256(f'{size}\n'.encode())
        for offset in offsets:
            digest.update(self.read_bytes(offset, length))
        return f'sampled:{digest.hexdigest()}'


def advise_dtype(path):
    """What to do about a file without a header that is not uint16: its first ids in each dtype."""
    with open(path, 'rb') as file:
        head = file.read(48)
    widths = []
    for name in 'uint8', 'uint16', 'uint32', 'int64':
        ids = np.frombuffer(head, parse_dtype(name), min(6, len(head) // np.dtype(name).itemsize))
        widths.append(f'{name} {", ".join(map(str, ids))}')
    return f'choose the dtype in which its first ids are right ({"; ".join(widths)}): ' \
        f'{command_for("prepare")} ids {quoted(path.parent)} --vocab_size=N --dtype=DTYPE'


def parse_dtype(name):
    """The dtype of a name in meta.json: 'uint16' is little-endian, '>u2' big-endian."""
    return np.dtype(name) if name.startswith('>') else np.dtype(name).newbyteorder('<')


def dtype_name(dtype):
    """The inverse of parse_dtype."""
    return dtype.str if dtype.str.startswith('>') else dtype.name


def open_tokens(path, dtype, entry=None, advice=PREPARE_AGAIN):
    """One file of tokens → TokenFile.

    entry: what meta.json or a header says of the file: the number of `tokens`, their `sha256`, and
    the `offset` of the first one in bytes, where the file may contain more than these tokens;
    advice: see TokenFile. Raises UserError for a missing file or a wrong size.
    """
    entry = entry or {}
    num_tokens, offset = entry.get('tokens'), entry.get('offset')
    try:
        file = open(path, 'rb', buffering=0)
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}; {advice}') from None
    start = offset or 0
    in_file = (os.fstat(file.fileno()).st_size - start) / dtype.itemsize
    if num_tokens is None:
        num_tokens = int(in_file)
    if not num_tokens or in_file < num_tokens or (in_file > num_tokens and offset is None):
        raise UserError(f'{path}: expected {num_tokens or "some"} tokens of '
                        f'{count_of(dtype.itemsize, "byte")} and found {in_file:,.12g}: the file '
                        f'is damaged or has another dtype; {advice}')
    return TokenFile(path, dtype, file, start, num_tokens, entry.get('sha256', ''), advice)


class TokenStream:
    """The token files of a split, read as one stream."""

    loss_mask = None  # for conversations: a stream with 1 for each token that counts in the loss

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
        """`length` tokens from each of `starts`: int64 array (len(starts), length).
        Raises UserError for an id beyond the vocabulary."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts, strict=True):
            self._read_into(row, int(start))
        return out

    def read(self, start, length):
        """At most `length` tokens from `start` on: int64 array. Raises UserError."""
        return self.sequences(np.array([start]), min(length, len(self) - start))[0]

    def _read_into(self, out, start):
        k = int(np.searchsorted(self.starts, start, side='right')) - 1
        filled = 0
        while filled < len(out):  # a sequence may continue in the next file
            index = start + filled - int(self.starts[k])
            ids = self.files[k].read(index, len(out) - filled)
            self.files[k].check_ids(ids, index, self.vocab_size)
            out[filled:filled + len(ids)] = ids
            filled += len(ids)
            k += 1
