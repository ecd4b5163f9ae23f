"""Files of token ids, with or without llm.c's header, and several of them read as one stream."""

import hashlib
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plaingpt.data.foreign_files import (
    HEADER_BYTES,
    check_format,
    check_ids_of_16_bits,
    header_size,
)
from plaingpt.system.errors import UserError

READ_TOKENS = 2**22  # at a time, when a file is read into memory
SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 2**14  # that sampled_sha256 reads


@dataclass(frozen=True)
class TokenFile:
    """One .bin file: token ids from byte `offset` to its end.

    All reading raises UserError where the file is no longer the one that was opened."""

    path: Path
    dtype: np.dtype
    offset: int
    tokens: int
    seen: tuple  # what identify() said when it was opened
    sha256: str = ''  # that meta.json has

    def read(self, start, count):
        """Tokens [start, start + count), fewer at the end of the file."""
        # Not a memory map: its pages would count as this process's memory, more and more of the
        # corpus as the run proceeds, and a file cut short would kill the process (SIGBUS).
        width = self.dtype.itemsize
        with self.unchanged() as f:
            f.seek(self.offset + start * width)
            data = f.read(min(count, self.tokens - start) * width)
        return np.frombuffer(data, self.dtype)

    def load(self, out):
        """Read all tokens into `out`. Raises UserError for another checksum than meta.json's."""
        with self.unchanged() as f:
            digest = hashlib.sha256(f.read(self.offset))
            for at in range(0, self.tokens, READ_TOKENS):
                piece = np.fromfile(f, self.dtype, min(READ_TOKENS, self.tokens - at))
                out[at:at + len(piece)] = piece
                digest.update(piece)
        if self.sha256 and digest.hexdigest() != self.sha256:
            raise UserError(f'{self.path}: another checksum than meta.json has: the file was '
                            'damaged or replaced; prepare the data again')

    def sampled_sha256(self, vocab_size=None):
        """Checksum of the size and of blocks spread evenly from the first byte to the last; of
        all bytes where the file is no larger than the blocks together. With `vocab_size`, raises
        UserError where these blocks do not hold ids below it."""
        size = self.offset + self.tokens * self.dtype.itemsize
        blocks = {}  # place: bytes
        with self.unchanged() as f:
            if size <= SAMPLED_BLOCKS * SAMPLED_BYTES:
                blocks[0] = f.read()
            else:
                for i in range(SAMPLED_BLOCKS):
                    place = (size - SAMPLED_BYTES) * i // (SAMPLED_BLOCKS - 1)
                    f.seek(place)
                    blocks[place] = f.read(SAMPLED_BYTES)
        if vocab_size is not None:
            self._check_sample(blocks, size, vocab_size)
        digest = hashlib.sha256(f'{size}\n'.encode())
        for block in blocks.values():
            digest.update(block)
        return f'sampled:{digest.hexdigest()}'

    def _check_sample(self, blocks, size, vocab_size):
        width, pieces = self.dtype.itemsize, {}  # first token: ids
        for place, block in blocks.items():
            # From an even token on, so that the halves of wider ids are at the same places in all.
            skip = self.offset if place == 0 else -(place - self.offset) % (2 * width)
            pieces[(place + skip - self.offset) // width] = np.frombuffer(
                block, self.dtype, (len(block) - skip) // width, skip)
        if not self.sha256:
            even = [piece[:len(piece) // 2 * 2] for piece in pieces.values()]
            check_ids_of_16_bits(self.path, blocks[0][:HEADER_BYTES], size, self.offset,
                                 np.concatenate(even), vocab_size)
        for first, ids in pieces.items():
            check_ids(self.path, ids, first, vocab_size)

    @contextmanager
    def unchanged(self):
        """The open file, which must be as it was when reading is done."""
        try:
            with open(self.path, 'rb') as f:
                yield f
                # After the reading, so that what is written meanwhile is seen too.
                now = identify(os.fstat(f.fileno()))
        except OSError as e:
            what = f'cannot be read any more ({e.strerror})'
        else:
            if now == self.seen:
                return
            what = f'has changed ({self.seen[1]:,} bytes before, {now[1]:,} now)'
        raise UserError(f'{self.path} {what} since it was opened, so reading it stops: put the '
                        'file back as it was and resume, or start a run on the new one')


def identify(status):
    """os.stat_result → what a file that is replaced or written to does not keep."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_ids(path, ids, first, vocab_size):
    """Raises UserError for an id beyond the vocabulary; `first` is the number of the first id."""
    if ids.max(initial=0) >= vocab_size:
        bad = int(np.flatnonzero(ids >= vocab_size)[0])
        raise UserError(f'{path}: token {first + bad:,} has id {ids[bad]}, but the vocabulary ends '
                        f'at {vocab_size - 1}: the file is damaged or was written with '
                        'another tokenizer; prepare the data again')


def open_tokens(path, dtype, expected=None, sha256=''):
    """One .bin file, with or without llm.c's header → TokenFile.

    dtype: of the tokens where there is no header; expected: their number, where meta.json says it.
    Raises UserError for a missing file, a length that is no whole number of tokens, or another
    number of tokens.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f'{path} is no file: prepare the data again')  # a FIFO would wait
        with open(path, 'rb') as f:
            head, seen = f.read(HEADER_BYTES), identify(os.fstat(f.fileno()))
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}: prepare the data again') from None
    size = seen[1]
    # Bare ids can begin as a header does; meta.json tells which of them the file has.
    is_bare = expected is not None and size == expected * dtype.itemsize
    offset = 0 if is_bare else header_size(path, head, size)
    dtype = np.dtype('<u2') if offset else dtype
    if expected is None and not offset:
        check_format(path, head)  # before the length, which says less
    tokens, rest = divmod(size - offset, dtype.itemsize)
    if rest:
        raise UserError(f'{path}: {size:,} bytes are no whole number of {dtype.name} tokens: '
                        'the file is cut short or of another type; prepare the data again')
    if expected is not None and tokens != expected:
        raise UserError(f'{path}: {tokens:,} tokens where {expected:,} were written: '
                        'the file is damaged; prepare the data again')
    if tokens == 0:
        raise UserError(f'{path} is empty: prepare the data again')
    return TokenFile(path, dtype, offset, tokens, seen, sha256)


class TokenStream:
    """The token files of a split, read as one stream; from memory with `in_ram`."""

    learned = None  # of conversations, a stream that tells which of the tokens are

    def __init__(self, files, vocab_size, in_ram=False):
        self.files = files
        self.starts = np.cumsum([0] + [file.tokens for file in files])
        self.vocab_size = vocab_size
        self.ram = None
        if in_ram:
            self.ram = np.empty(len(self), np.result_type(*{file.dtype for file in files}))
            for file, start in zip(files, self.starts, strict=False):
                file.load(self.ram[start:start + file.tokens])
                check_ids(file.path, self.ram[start:start + file.tokens], 0, vocab_size)

    def __len__(self):
        return int(self.starts[-1])

    def sequences(self, starts, length):
        """`length` tokens from each of `starts` → (len(starts), length) int64 array.
        Raises UserError for an id beyond the vocabulary."""
        if self.ram is not None:
            return self.ram[starts[:, None] + np.arange(length)].astype(np.int64)
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts, strict=True):
            self._read_into(row, int(start))
        return out

    def _read_into(self, out, start):
        length = len(out)
        k, filled = self._file_at(start), 0
        while filled < length:  # more than once where the sequence runs over into the next file
            at = start + filled - int(self.starts[k])
            piece = self.files[k].read(at, length - filled)
            check_ids(self.files[k].path, piece, at, self.vocab_size)
            out[filled:filled + len(piece)] = piece
            filled += len(piece)
            k += 1

    def _file_at(self, token):
        return int(np.searchsorted(self.starts, token, side='right')) - 1
