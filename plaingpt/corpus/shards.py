"""Tokens → shards on disk, so that a kill at any moment loses little and spoils nothing.

All is written in data/<name>/unfinished/, with a journal that says how far each file is good: what
a kill left after that place is cut off. Only complete data moves to data/<name>/, meta.json last.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plaingpt.corpus.dataset import UNFINISHED, read_meta
from plaingpt.system.errors import UserError
from plaingpt.system.files import locked, read_json, sha256_of, write_json

# What of a command its other options and the input decide, and how the tokens lie in files.
NO_CHOICE = ('identity', 'files', 'train_characters', 'tokenizer_sha256', 'shard_tokens',
             'max_shards')


@dataclass
class ShardWriter:
    """Writes a split into files of `shard_tokens` tokens, the last one shorter."""

    folder: Path
    split: str
    dtype: np.dtype
    shard_tokens: int
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    sha256: list = field(default_factory=list)  # of the full shards
    file = None  # the shard that is being written

    def path(self, shard):
        return self.folder / f'{self.split}_{shard:06d}.bin'

    def write(self, encoded):
        """Append the tokens of an Encoded → True where a shard got full."""
        full, ids = len(self.sha256), encoded.ids
        while len(ids):
            if self.file is None:
                self.file = open(self.path(len(self.sha256)), 'ab')
            room = self.shard_tokens * (len(self.sha256) + 1) - self.tokens
            self.file.write(ids[:room].tobytes())
            self.tokens += len(ids[:room])
            if len(ids) >= room:
                self.close()
                self.sha256.append(sha256_of(self.path(len(self.sha256))))
            ids = ids[room:]
        self.documents += encoded.documents
        self.bytes += encoded.bytes
        return len(self.sha256) > full

    def sync(self):
        """Make what was written so far outlast a crash of the machine."""
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self):
        if self.file:
            self.sync()
            self.file.close()
            self.file = None

    def state(self):
        return {'tokens': self.tokens, 'documents': self.documents, 'bytes': self.bytes,
                'sha256': self.sha256}

    def resume_at(self, state):
        """Go back to what `state` says, and cut off what was written after it."""
        self.tokens, self.documents, self.bytes, self.sha256 = \
            (state[key] for key in ('tokens', 'documents', 'bytes', 'sha256'))
        single = self.folder / f'{self.split}.bin'  # the name that finish() gives a single shard
        if single.exists():
            os.replace(single, self.path(0))
        partial = self.path(len(self.sha256))
        rest = self.tokens - self.shard_tokens * len(self.sha256)
        if rest:
            os.truncate(partial, rest * self.dtype.itemsize)
        for path in self.folder.glob(f'{self.split}_*.bin'):
            if path > partial or (path == partial and not rest):
                path.unlink()

    def finish(self):
        """Close → the entry of this split in meta.json. A single file is named SPLIT.bin."""
        self.close()
        sha256, counts = list(self.sha256), [self.shard_tokens] * len(self.sha256)
        if self.tokens > sum(counts):
            sha256.append(sha256_of(self.path(len(counts))))
            counts.append(self.tokens - sum(counts))
        names = [self.path(i).name for i in range(len(counts))]
        if len(names) == 1:
            os.replace(self.path(0), self.folder / f'{self.split}.bin')
            names = [f'{self.split}.bin']
        return {'tokens': self.tokens, 'documents': self.documents, 'bytes': self.bytes,
                'files': [{'name': name, 'tokens': n, 'sha256': digest}
                          for name, n, digest in zip(names, counts, sha256, strict=True)]}


def write_journal(folder, journal):
    """Write journal.json, with a checksum: shards that continue from a wrong place are junk."""
    write_json(folder / 'journal.json', {**journal, 'sha256': digest(journal)})


def digest(journal):
    return hashlib.sha256(json.dumps(journal, sort_keys=True).encode()).hexdigest()


def read_journal(folder, command):
    """The journal that the same command left, or None; then the folder is emptied."""
    try:
        journal = read_json(folder / 'journal.json')
        if journal.pop('sha256') != digest(journal):
            raise ValueError('its checksum is not what was written')
        earlier, complete = dict(journal['command']), files_are_there(folder, journal)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        earlier = None
    if earlier == command and complete:
        return journal
    if earlier == command:
        print(f'{folder}: files are missing or cut short; starting anew')
    elif earlier:
        differ = [key for key in command if earlier.get(key) != command[key]]
        print(f'{folder}: what another command left there is deleted (it differs in '
              f'{", ".join(differ)}); starting anew')
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return None


def files_are_there(folder, journal):
    """True where the files hold what the journal says, or more. Raises KeyError, TypeError."""
    for split, state in journal.get('splits', {}).items():
        width = journal['width']
        full, each = len(state['sha256']), journal['command']['shard_tokens'] * width
        rest = state['tokens'] * width - full * each
        needed = [each] * full + [rest] * (rest > 0)
        for i, size in enumerate(needed):
            path, single = folder / f'{split}_{i:06d}.bin', folder / f'{split}.bin'
            path = path if path.exists() or i else single
            if not path.exists() or path.stat().st_size < size:
                return False
    return True


def publish(folder):
    """Move complete data from folder/unfinished into `folder`, in place of what was there → meta.
    After a crash at any point it can be called again."""
    unfinished = folder / UNFINISHED
    meta = read_meta(unfinished / 'meta.json')
    names = [file['name'] for split in meta['splits'].values() for file in split['files']]
    # From here to the end the folder counts as unfinished, should the machine stop.
    (folder / 'meta.json').unlink(missing_ok=True)
    for path in folder.glob('*.bin'):
        if path.name not in names and re.fullmatch(r'(train|val)(_\d{6})?\.bin', path.name):
            path.unlink()
    for name in names:
        if os.path.lexists(unfinished / name):
            os.replace(unfinished / name, folder / name)
    (unfinished / 'journal.json').unlink(missing_ok=True)
    os.replace(unfinished / 'meta.json', folder / 'meta.json')
    shutil.rmtree(unfinished)
    return meta


def check_free_space(folder, need, advice=''):
    """Raises UserError where fewer than `need` bytes are free."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(f'{folder}: about {need / 1e9:,.1f} GB needed, {free / 1e9:,.1f} GB free: '
                        f'make room, {advice}or choose another disk with --data_dir')


def check_ours(folder):
    """Raises UserError where `folder` holds tokens that prepare.py did not write."""
    begun = any((folder / UNFINISHED / name).exists() for name in ('journal.json', 'meta.json'))
    if begun or (folder / 'meta.json').exists():
        return
    if found := next((path for path in [*folder.glob('*.bin'), folder / 'meta.pkl']
                      if path.exists()), None):
        raise UserError(f'{folder} has {found.name} and no meta.json, so prepare.py did not make '
                        'it and writes nothing there: name another folder with --data_dir')


def check_replaceable(folder, command):
    """Raises UserError where `folder` holds a dataset that another command than `command` wrote.
    The same one may replace it: its input has changed, or the files are damaged."""
    try:
        earlier = read_meta(folder / 'meta.json').get('source', {})
    except UserError:  # there is none, or it is broken
        return
    differ = [f'{key} {earlier[key] or "none"}, not {command.get(key) or "none"}'
              for key in command if key not in NO_CHOICE and key in earlier
              and earlier[key] != command[key]]
    if differ or not earlier.keys() & command.keys():
        raise UserError(f'{folder} holds another dataset ({", ".join(differ) or "of others"}): '
                        'name another folder with --data_dir, or replace it with --overwrite')


@contextmanager
def lock_dataset_dir(folder):
    """Make `folder` and keep every other prepare.py out of it → the folder for unfinished files.
    Folders that stay empty are removed at the end. An OSError becomes a UserError of one line."""
    check_ours(folder)
    unfinished = folder / UNFINISHED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, f'{folder}: another prepare.py is writing there: wait until it is '
                            'done, or choose another --data_dir'):
            try:
                unfinished.mkdir(exist_ok=True)
                yield unfinished
            finally:
                if not any((unfinished / name).exists() for name in ('journal.json', 'meta.json')):
                    shutil.rmtree(unfinished, ignore_errors=True)
                with suppress(OSError):
                    folder.rmdir()
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f'{folder}: {e.strerror}: make room, and give the same command again: '
                            'it resumes') from None
        raise UserError(f'{folder}: cannot write there: {e.strerror}') from None
