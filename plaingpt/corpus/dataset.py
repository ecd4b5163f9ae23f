"""Token files on disk: data/<name>/ with meta.json, nanoGPT's bare .bin files, llm.c's shards."""

import hashlib
import io
import os
import pickle
import pickletools
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plaingpt.corpus import tokenizers
from plaingpt.system.errors import UserError
from plaingpt.system.files import is_count, is_dict, is_number, is_positive, open_regular, read_json
from plaingpt.system.formatting import quoted

FORMAT_VERSION = 1
UNFINISHED = 'unfinished'  # prepare.py's folder for files that are not complete yet
PARTS = 'parts'  # its folder for what --part=K/N wrote, until it is merged


@dataclass(frozen=True)
class Dataset:
    """A prepared folder: its token files, and what its meta.json says of them."""

    folder: Path
    meta: dict  # of a folder without meta.json: the tokenizer of its meta.pkl, or nothing
    vocab_size: int
    opened: dict = field(default_factory=dict, repr=False)  # split: (files, identity, samples)

    def tokenizer(self):
        """The tokenizer that made the files. Raises UserError where it cannot be had."""
        return tokenizers.from_json(self.tokenizer_json())

    def tokenizer_json(self):
        return self.meta.get('tokenizer', {'kind': 'gpt2'})

    def split_entry(self, split):
        """What meta.json says of a split, {} where there is none."""
        return self.meta.get('splits', {}).get(split, {})

    def is_ours(self):
        """Whether prepare.py wrote the folder, so that meta.json has its checksums."""
        return 'splits' in self.meta

    def bytes_per_token(self, split):
        """UTF-8 bytes of text per token, or None where meta.json does not say."""
        entry = self.split_entry(split)
        return entry['bytes'] / entry['tokens'] if entry.get('bytes') else None

    def identity(self, split):
        """What the tokens of a split are, wherever they lie: the checksums of its files, sampled
        ones where meta.json has none. That of the files as they were first opened."""
        return self._open(split)[1]

    def samples(self):
        """Checksums of blocks of the files of each split as they lie there, whatever meta.json
        says, for a run whose data is not read whole."""
        return {split: self._open(split)[2] for split in ('train', 'val')}

    def state(self):
        """What a checkpoint keeps of the data, so that a run goes on with the same."""
        return {'tokenizer': self.tokenizer_json(), 'data': self.identity('train'),
                'samples': self.samples()}

    def is_identity(self, split, saved):
        """True where `saved` is the identity of a split; earlier versions saved the path of a
        folder without meta.json."""
        return saved == self.identity(split) or (
            not self.is_ours() and isinstance(saved, str)
            and os.path.abspath(saved) == os.path.abspath(self.folder))

    def split(self, name, in_ram=False):
        """The token stream of 'train' or 'val'; with in_ram its checksums are verified. Raises
        UserError."""
        return TokenStream(self._open(name)[0], self.vocab_size, in_ram)

    def describe_reading(self, in_ram):
        """Where tokens are read from, and whether what is read is known to be what was written."""
        if not self.is_ours():
            return f'{"in memory" if in_ram else "on disk"}, no checksums to verify'
        if in_ram:
            return 'in memory, checksums verified'
        return 'on disk, checksums not verified (python prepare.py inspect ' \
               f'{quoted(self.folder)} does)'

    def _open(self, split):
        if split not in self.opened:
            dtype = np.dtype(self.meta.get('dtype', 'uint16')).newbyteorder('<')
            if entry := self.split_entry(split):
                files = [open_tokens(self.folder / file['name'], dtype, file['tokens'],
                                     file['sha256']) for file in entry['files']]
            else:
                files = [open_tokens(path, dtype) for path in sorted(self.folder.glob('*.bin'))
                         if split in path.stem.replace('-', '_').split('_')]
            if not files:
                raise UserError(f'{self.folder}: no {split}.bin there')
            samples = [file.sampled_sha256() for file in files]
            known = [file.sha256 or sample for file, sample in zip(files, samples, strict=True)]
            self.opened[split] = files, known, samples
        return self.opened[split]


def open_dataset(folder):
    """Open a folder that prepare.py wrote, or one with nanoGPT's .bin files or llm.c's shards; one
    without meta.json and meta.pkl is taken to hold GPT-2 tokens. Raises UserError."""
    folder = Path(folder)
    if os.path.lexists(folder / 'meta.json'):
        meta = read_meta(folder / 'meta.json')
        return Dataset(folder, meta, meta['vocab_size'])
    if (folder / UNFINISHED).exists():
        raise UserError(f'{folder} is not finished: run the prepare.py command that wrote it again')
    if (folder / PARTS).exists():
        raise UserError(f'{folder} holds parts that are not merged: run python prepare.py merge '
                        f'{quoted(folder)} once all are there')
    if not any(folder.glob('*.bin')):
        if folder.parent == Path('data'):
            raise UserError(f'{folder} is not prepared: run python prepare.py '
                            f'{quoted(folder.name)} if that is a corpus it knows; for your own '
                            'files, python prepare.py text --input=FILES '
                            f'--data_dir={quoted(folder)}')
        raise UserError(f'{folder}: no .bin files there: give the folder of a prepared dataset')
    if (folder / 'meta.pkl').exists():
        chars = read_nanogpt_chars(folder / 'meta.pkl')
        return Dataset(folder, {'tokenizer': {'kind': 'char', 'chars': chars}}, len(chars))
    return Dataset(folder, {}, tokenizers.GPT2Tokenizer.vocab_size)


def dataset_folder(name):
    """The folder of a dataset: data/<name>, or the path itself where it is one."""
    path, inside = Path(name), Path('data', name)
    if path.parts != (name.rstrip('/'),):
        return path
    # A slash that a shell completed: of a folder in data/, or of one right here.
    return path if name.endswith('/') and path.is_dir() and not inside.is_dir() else inside


def read_meta(path):
    """meta.json as a dict whose needed keys are there. Raises UserError."""
    try:
        meta = read_json(path)
        if meta['format_version'] != FORMAT_VERSION:
            raise UserError(f'{path}: format version {meta["format_version"]}, but this plainGPT '
                            f'reads version {FORMAT_VERSION}: prepare the data again')
        if meta['dtype'] not in ('uint16', 'uint32') or not is_positive(meta['vocab_size']):
            raise ValueError('dtype or vocab_size is out of range')
        if meta['vocab_size'] != tokenizers.described_vocab_size(meta['tokenizer']):
            raise ValueError('vocab_size is not that of its tokenizer')
        if not meta['splits'].keys() >= {'train', 'val'}:
            raise ValueError('a split is missing')
        for entry in meta['splits'].values():
            if 'part' in meta.get('source', {}) and entry['tokens'] == 0 and entry['files'] == []:
                continue  # a part of many may have no documents
            # The pattern also refuses a path that leads out of the folder.
            if not entry['files'] or any(not re.fullmatch(r'[\w.-]+\.bin', f['name'])
                                         or not is_positive(f['tokens']) for f in entry['files']):
                raise ValueError('a split has no files or a misnamed one')
            if entry['tokens'] != sum(file['tokens'] for file in entry['files']):
                raise ValueError('the tokens of a split are not those of its files')
            if not is_positive(entry.get('bytes', 1)) or not is_count(entry.get('documents', 0)) \
                    or not all(isinstance(file['sha256'], str) for file in entry['files']):
                raise ValueError('bytes or sha256 is of another type')
            share = entry.get('in_train', 0)
            if not is_number(share) or not 0 <= share <= 1:
                raise ValueError('in_train is no number from 0 to 1')
        if not isinstance(meta.get('source', {}), dict):
            raise ValueError('source is of another type')
        return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        what = f'{e} is missing' if isinstance(e, KeyError) else e
        raise UserError(f'{path} is broken ({what}): prepare the data again') from None


# -----------------------------------------------------------------------------
# nanoGPT's meta.pkl

MAX_PICKLE_BYTES = 2**22  # of a vocabulary with 150,000 characters, about as many as there are
# What pickles of any protocol make dicts, lists, texts and numbers of. It lacks tuples, since to
# hash some takes forever, and all that names a class or calls one.
PLAIN = {'PROTO', 'FRAME', 'STOP', 'MARK', 'MEMOIZE', 'PUT', 'BINPUT', 'LONG_BINPUT', 'GET',
         'BINGET', 'LONG_BINGET', 'EMPTY_DICT', 'DICT', 'SETITEM', 'SETITEMS', 'EMPTY_LIST', 'LIST',
         'APPEND', 'APPENDS', 'UNICODE', 'BINUNICODE', 'SHORT_BINUNICODE', 'INT', 'BININT',
         'BININT1', 'BININT2'}


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module, name):  # should it read an operation that pickletools does not
        raise pickle.UnpicklingError(f'it names {module}.{name}')


def read_nanogpt_chars(path):
    """meta.pkl of nanoGPT's data/shakespeare_char/prepare.py and of scripts like it → the
    characters, in the order of their ids. Nothing in it is run. Raises UserError."""
    try:
        meta = read_plain_pickle(path)
        itos = meta['itos']
        if not is_dict(itos) or not all(type(i) is int for i in itos):
            raise ValueError('itos is no dict from ids to characters')
        if sorted(itos) != list(range(len(itos))) or len(itos) != meta['vocab_size']:
            raise ValueError('the ids of itos are not 0, 1, 2, … up to vocab_size')
        chars = [itos[i] for i in range(len(itos))]
        if not all(isinstance(char, str) and len(char) == 1 for char in chars):
            raise ValueError('itos has tokens that are no single characters')
        if len(set(chars)) != len(chars) or not chars:
            raise ValueError('itos has a character twice, or none')
        if meta.get('stoi') not in (None, {char: i for i, char in enumerate(chars)}):
            raise ValueError('stoi is not the inverse of itos')
        return ''.join(chars)
    except Exception as e:  # a pickle can raise anything
        what = f'{e} is missing' if isinstance(e, KeyError) else str(e)
        raise UserError(f'{path} is no vocabulary of characters as nanoGPT writes it '
                        f'({" ".join(what[:160].split())}), and nothing in it was run: prepare the '
                        'text into a new folder with python prepare.py text --input=FILE '
                        '--data_dir=NEW_FOLDER') from None


def read_plain_pickle(path):
    """The dict in a pickle of dicts, lists, texts and numbers. Raises ValueError and others."""
    with open_regular(path) as f:
        data = f.read(MAX_PICKLE_BYTES + 1)
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f'it has more than {MAX_PICKLE_BYTES:,} bytes')
    for n, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if operation.name not in PLAIN:
            what = argument if isinstance(argument, str) else operation.name
            raise ValueError(f'it holds {what[:80]!r}, and only dicts, lists, texts and numbers '
                             'are read')
        # The memo takes memory up to its largest place; equal hashes of large numbers take time.
        if isinstance(argument, int) and operation.name != 'FRAME' \
                and not -2**31 <= argument <= (n if 'PUT' in operation.name else 2**31):
            raise ValueError('it has numbers that are too large')
    meta = PlainUnpickler(io.BytesIO(data)).load()
    if not is_dict(meta):
        raise ValueError('it is no dict')
    return meta


# -----------------------------------------------------------------------------
# token files

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
        with self._unchanged() as f:
            f.seek(self.offset + start * width)
            data = f.read(min(count, self.tokens - start) * width)
        return np.frombuffer(data, self.dtype)

    def load(self, out):
        """Read all tokens into `out`. Raises UserError for another checksum than meta.json's."""
        with self._unchanged() as f:
            digest = hashlib.sha256(f.read(self.offset))
            for at in range(0, self.tokens, READ_TOKENS):
                piece = np.fromfile(f, self.dtype, min(READ_TOKENS, self.tokens - at))
                out[at:at + len(piece)] = piece
                digest.update(piece)
        if self.sha256 and digest.hexdigest() != self.sha256:
            raise UserError(f'{self.path}: another checksum than meta.json has: the file was '
                            'damaged or replaced; prepare the data again')

    def sampled_sha256(self):
        """Checksum of the size and of blocks spread evenly from the first byte to the last; of
        all bytes where the file is no larger than the blocks together."""
        size = self.offset + self.tokens * self.dtype.itemsize
        digest = hashlib.sha256(f'{size}\n'.encode())
        with self._unchanged() as f:
            if size <= SAMPLED_BLOCKS * SAMPLED_BYTES:
                digest.update(f.read())
            else:
                for i in range(SAMPLED_BLOCKS):
                    f.seek((size - SAMPLED_BYTES) * i // (SAMPLED_BLOCKS - 1))
                    digest.update(f.read(SAMPLED_BYTES))
        return f'sampled:{digest.hexdigest()}'

    @contextmanager
    def _unchanged(self):
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


LLM_C_MAGIC = 20240520  # https://github.com/karpathy/llm.c, dev/data/data_common.py
LLM_C_HEADER_BYTES = 1024


def open_tokens(path, dtype, expected=None, sha256=''):
    """One .bin file, with or without llm.c's header → TokenFile.

    dtype: of the tokens where there is no header. Raises UserError for a missing file, a length
    that is no whole number of tokens, or another number of tokens than `expected`.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f'{path} is no file: prepare the data again')  # a FIFO would wait
        with open(path, 'rb') as f:
            header, seen = np.fromfile(f, '<i4', count=3), identify(os.fstat(f.fileno()))
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}: prepare the data again') from None
    offset, size = 0, seen[1]
    if len(header) == 3 and header[0] == LLM_C_MAGIC and size >= LLM_C_HEADER_BYTES:
        if header[1] != 1:
            raise UserError(f'{path}: llm.c shard of version {header[1]}, only 1 is known')
        dtype, offset, expected = np.dtype('<u2'), LLM_C_HEADER_BYTES, int(header[2])
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

    def __init__(self, files, vocab_size, in_ram=False):
        self.files = files
        self.starts = np.cumsum([0] + [file.tokens for file in files])
        self.vocab_size = vocab_size
        self.ram = None
        if in_ram:
            self.ram = np.empty(len(self), dtype=files[0].dtype)
            for file, start in zip(files, self.starts, strict=False):
                file.load(self.ram[start:start + file.tokens])
            self._check_ids(self.ram, 0)

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
            out[filled:filled + len(piece)] = piece
            filled += len(piece)
            k += 1
        self._check_ids(out, start)

    def _file_at(self, token):
        return int(np.searchsorted(self.starts, token, side='right')) - 1

    def _check_ids(self, tokens, start):
        if tokens.max() < self.vocab_size:
            return
        bad = int(np.flatnonzero(tokens >= self.vocab_size)[0])
        k = self._file_at(start + bad)
        raise UserError(f'{self.files[k].path}: token {start + bad - self.starts[k]:,} has id '
                        f'{tokens[bad]}, but the vocabulary ends at {self.vocab_size - 1}: the '
                        'file was written with another tokenizer; prepare the data again')
