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

from plaingpt.data.dataset import (
    MASK_ENDING,
    UNFINISHED,
    mask_name,
    read_meta,
)
from plaingpt.system.errors import UserError
from plaingpt.system.files import (
    locked,
    read_json,
    sha256_of,
    write_json,
)
from plaingpt.system.formatting import amount

# What of a command its other options and the input decide, and how the tokens lie in files.
NO_CHOICE = ('identity', 'files', 'train_characters', 'tokenizer_sha256', 'shard_tokens',
             'max_shards', 'val_characters')
TOKEN_FILES = r'(train|val|test)(_\d{6})?(_mask)?\.bin'
LISTED_FILES = 1000  # more input files than this are not listed in meta.json
# These are in a command only where they are given.
IF_GIVEN = ('max_tokens', 'test_fraction', 'test_split', 'dedup')


@dataclass
class ShardWriter:
    """Writes a split into files of `shard_tokens` tokens, the last one shorter; with a `mask`, a
    writer like it, beside each of them a file of its loss mask."""

    folder: Path
    split: str
    dtype: np.dtype
    shard_tokens: int
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    sha256: list = field(default_factory=list)  # of the full shards
    ending: str = '.bin'
    mask: 'ShardWriter' = None
    learned: int = 0  # how many tokens the mask has
    file = None  # the shard that is being written

    def path(self, shard):
        return self.folder / f'{self.split}_{shard:06d}{self.ending}'

    def single(self):
        """The name that finish() gives a shard that is the only one."""
        return self.folder / f'{self.split}{self.ending}'

    def write(self, encoded):
        """Append the tokens of an Encoded → True where a shard got full."""
        full = len(self.sha256)
        self.append(encoded.ids)
        self.documents += encoded.documents
        self.bytes += encoded.bytes
        if self.mask:
            self.mask.append(encoded.loss_mask)
            self.learned += int(np.count_nonzero(encoded.loss_mask))
        return len(self.sha256) > full

    def append(self, ids):
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

    def sync(self):
        """Make what was written so far outlast a crash of the machine."""
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        if self.mask:
            self.mask.sync()

    def close(self):
        if self.file:
            self.sync()
            self.file.close()
            self.file = None

    def state(self):
        counts = {'tokens': self.tokens, 'documents': self.documents, 'bytes': self.bytes}
        masked = {'learned': self.learned, 'mask': self.mask.state()} if self.mask else {}
        return {**counts, 'sha256': self.sha256, **masked}

    def resume_at(self, state):
        """Go back to what `state` says, and cut off what was written after it."""
        self.tokens, self.documents, self.bytes, self.sha256 = \
            (state[key] for key in ('tokens', 'documents', 'bytes', 'sha256'))
        if self.mask:
            self.learned = state['learned']
            self.mask.resume_at(state['mask'])
        single = self.single()
        if single.exists():
            os.replace(single, self.path(0))
        partial = self.path(len(self.sha256))
        rest = self.tokens - self.shard_tokens * len(self.sha256)
        if rest:
            os.truncate(partial, rest * self.dtype.itemsize)
        for path in self.folder.glob(f'{self.split}_{"[0-9]" * 6}{self.ending}'):
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
            os.replace(self.path(0), self.single())
            names = [self.single().name]
        files = [{'name': name, 'tokens': n, 'sha256': digest}
                 for name, n, digest in zip(names, counts, sha256, strict=True)]
        entry = {'tokens': self.tokens, 'documents': self.documents, 'bytes': self.bytes,
                 'files': files}
        if self.mask:
            entry['learned'] = self.learned
            for file, masked in zip(files, self.mask.finish()['files'], strict=True):
                file['mask_sha256'] = masked['sha256']
        return entry


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
        differ = [key for key in {**earlier, **command} if earlier.get(key) != command.get(key)]
        print(f'{folder}: what another command left there is deleted (it differs in '
              f'{", ".join(differ)}); starting anew')
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return None


def files_are_there(folder, journal):
    """True where the files hold what the journal says, or more. Raises KeyError, TypeError."""
    for split, state in journal.get('splits', {}).items():
        full, each = len(state['sha256']), journal['command']['shard_tokens']
        rest = state['tokens'] - full * each
        endings = {'.bin': journal['width'], **({MASK_ENDING: 1} if 'mask' in state else {})}
        for ending, width in endings.items():
            for i, tokens in enumerate([each] * full + [rest] * (rest > 0)):
                path = folder / f'{split}_{i:06d}{ending}'
                path = path if path.exists() or i else folder / f'{split}{ending}'
                if not path.exists() or path.stat().st_size < tokens * width:
                    return False
    return True


def complete_meta(meta, name):
    """The content of meta.json by write_shards, with the inputs described. Raises UserError where a
    split stayed empty."""
    if not any(entry['tokens'] for entry in meta['splits'].values()):
        raise UserError(f'{name}: empty, no text to learn from')
    for split, entry in meta['splits'].items():
        if not entry['tokens']:
            raise UserError(f'{name}: the {split} split would be empty: use more text, or change '
                            '--val_fraction, --test_fraction or the names of the splits')
    return {**meta, 'inputs': describe_inputs(meta['inputs'])}


def describe_inputs(files):
    """source.inputs() → JSON: all files together and, of up to LISTED_FILES, each. The checksum of
    all is that of what `sha256sum FILES` prints."""
    if not files:
        return {}
    lines = ''.join(f'{file["sha256"]}  {file["name"]}\n' for file in files)
    return {'count': len(files), 'bytes': sum(file['bytes'] for file in files),
            'sha256': hashlib.sha256(lines.encode()).hexdigest(),
            'files': files if len(files) <= LISTED_FILES else []}


def publish(folder):
    """Move complete data from folder/unfinished into `folder`, in place of what was there → meta.
    After a crash at any point it can be called again."""
    unfinished = folder / UNFINISHED
    meta = read_meta(unfinished / 'meta.json')
    files = [file for split in meta['splits'].values() for file in split['files']]
    names = [file['name'] for file in files]
    names += [mask_name(file['name']) for file in files if 'mask_sha256' in file]
    # From here to the end the folder counts as unfinished, should the machine stop.
    (folder / 'meta.json').unlink(missing_ok=True)
    for path in folder.glob('*.bin'):
        if path.name not in names and re.fullmatch(TOKEN_FILES, path.name):
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
        raise UserError(f'{folder}: about {amount(need, "B")} needed, {amount(free, "B")} free: '
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
    differ = [f'{key} {earlier.get(key) or "none"}, not {command.get(key) or "none"}'
              for key in {**command, **earlier} if key not in NO_CHOICE
              and (key in IF_GIVEN or (key in earlier and key in command))
              and earlier.get(key) != command.get(key)]
    if differ or not earlier.keys() & command.keys():
        raise UserError(f'{folder} holds another dataset ({", ".join(differ) or "of others"}): '
                        'name another folder with --data_dir, or replace it with --overwrite')


@contextmanager
def lock_dataset_dir(folder):
    """Make `folder` and keep every other prepare.py out of it → the folder for unfinished files.
    Folders that stay empty are removed at the end. Raises UserError."""
    check_ours(folder)
    unfinished, ours = folder / UNFINISHED, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, f'{folder}: another prepare.py is writing there: wait until it is done'
                            ', or choose another --data_dir'):
            ours = True
            try:
                unfinished.mkdir(exist_ok=True)
                yield unfinished
            finally:
                if not any((unfinished / name).exists() for name in ('journal.json', 'meta.json')):
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            begun = (unfinished / 'journal.json').exists()
            raise UserError(f'{folder}: {e.strerror}: make room, and give the same command again'
                            + ': it resumes' * begun) from None
        raise UserError(f'{folder}: cannot write there: {e.strerror}') from None
    finally:
        if ours:
            with suppress(OSError):
                folder.rmdir()
