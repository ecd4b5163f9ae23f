"""Tokens → shards on disk, so that a kill at any moment loses little and spoils nothing.

All is written in data/<name>/unfinished/, with a journal that says how far each file is good: what
a kill left after that place is cut off. Only complete data moves to data/<name>/, meta.json last.
"""

import errno
import hashlib
import os
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plaingpt.data.dataset import (
    MASK_ENDING,
    TOKEN_FILES,
    UNFINISHED,
    mask_name,
    read_meta,
)
from plaingpt.system.errors import UserError
from plaingpt.system.files import (
    locked,
    read_json,
    sha256_of,
)

# What of a command its other options and the input decide, and how the tokens lie in files.
NO_CHOICE = ('identity', 'files', 'train_characters', 'tokenizer_sha256', 'shard_tokens',
             'max_shards', 'val_characters')
LISTED_FILES = 1000  # more input files than this are not listed in meta.json
# These are in a command only where they are given.
IF_GIVEN = ('max_tokens', 'test_fraction', 'test_split', 'dedup', 'prompt', 'completion',
            'encoding')


@dataclass
class ShardWriter:
    """Writes a split into files of `shard_tokens` tokens, the last one shorter; of conversations
    beside each of them a file of its loss mask."""

    folder: Path
    split: str
    shard_tokens: int
    columns: dict  # ending of a file → type of what it holds: of tokens, and of their loss mask
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    learned: int = 0  # tokens in the loss
    files = ()  # those that are being written

    def path(self, shard, ending='.bin'):
        return self.folder / f'{self.split}_{shard:06d}{ending}'

    def write(self, encoded):
        """Append an Encoded → True where a shard got full."""
        before, end = self.tokens // self.shard_tokens, self.tokens + len(encoded.ids)
        arrays = [encoded.ids] if encoded.loss_mask is None else [encoded.ids, encoded.loss_mask]
        while self.tokens < end:
            shard, used = divmod(self.tokens, self.shard_tokens)
            if not self.files:
                self.files = [open(self.path(shard, ending), 'ab') for ending in self.columns]
            n = min(self.shard_tokens - used, end - self.tokens)
            for file, array in zip(self.files, arrays, strict=True):
                begin = len(array) - (end - self.tokens)
                file.write(array[begin:begin + n].tobytes())
            self.tokens += n
            if used + n == self.shard_tokens:
                self.close()
        self.documents += encoded.documents
        self.bytes += encoded.bytes
        self.learned += int(np.count_nonzero(arrays[-1])) if len(arrays) == 2 else 0
        return self.tokens // self.shard_tokens > before

    def sync(self):
        """Make what was written so far outlast a crash of the machine."""
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())

    def close(self):
        self.sync()
        for file in self.files:
            file.close()
        self.files = ()

    def state(self):
        return {key: getattr(self, key) for key in ('tokens', 'documents', 'bytes', 'learned')}

    def sizes(self):
        """Tokens of each shard."""
        full, rest = divmod(self.tokens, self.shard_tokens)
        return [self.shard_tokens] * full + [rest] * (rest > 0)

    def resume_at(self, state):
        """Go back to what `state` says, and cut off what was written after it → True; False where
        files are missing or shorter."""
        for key, value in state.items():
            setattr(self, key, value)
        for ending, dtype in self.columns.items():
            single, sizes = self.folder / f'{self.split}{ending}', self.sizes()
            if single.exists():  # as finish() named it
                os.replace(single, self.path(0, ending))
            for path in self.folder.glob(f'{self.split}_{"[0-9]" * 6}{ending}'):
                if path > self.path(len(sizes) - 1, ending) or not sizes:
                    path.unlink()
            for shard, n in enumerate(sizes):
                path, size = self.path(shard, ending), n * dtype.itemsize
                if not path.exists() or path.stat().st_size < size:
                    return False
                os.truncate(path, size)
        return True

    def finish(self):
        """Close → the entry of this split in meta.json. A single file is named SPLIT.bin."""
        self.close()
        sizes, checksums = self.sizes(), {}
        for ending in self.columns:
            paths = [self.path(shard, ending) for shard in range(len(sizes))]
            if len(paths) == 1:
                paths = [paths[0].replace(self.folder / f'{self.split}{ending}')]
            checksums[ending] = [(path.name, sha256_of(path)) for path in paths]
        files = [{'name': name, 'tokens': n, 'sha256': digest}
                 for n, (name, digest) in zip(sizes, checksums['.bin'], strict=True)]
        for file, (_, digest) in zip(files, checksums.get(MASK_ENDING, ()), strict=False):
            file['mask_sha256'] = digest
        entry = {'tokens': self.tokens, 'documents': self.documents, 'bytes': self.bytes,
                 'files': files}
        return {**entry, 'learned': self.learned} if MASK_ENDING in self.columns else entry


def find_journal(folder, command):
    """The journal that the same command left, or None; then the folder is emptied."""
    try:
        journal = read_json(folder / 'journal.json')
        if journal['command'] == command:
            return journal
        differ = [key for key in {**journal['command'], **command}
                  if journal['command'].get(key) != command.get(key)]
        print(f'{folder}: what another command left there is deleted (it differs in '
              f'{", ".join(differ)}); starting anew')
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    empty(folder)
    return None


def empty(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


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
        if path.name not in names and TOKEN_FILES.fullmatch(path.name):
            path.unlink()
    for name in names:
        if os.path.lexists(unfinished / name):
            os.replace(unfinished / name, folder / name)
    (unfinished / 'journal.json').unlink(missing_ok=True)
    os.replace(unfinished / 'meta.json', folder / 'meta.json')
    shutil.rmtree(unfinished)
    return meta


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
                if (unfinished / 'meta.json').exists():  # a kill left a whole dataset to be moved
                    with suppress(UserError):  # a broken one is begun anew
                        publish(folder)
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
