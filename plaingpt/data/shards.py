"""Tokens → shards on disk. Files are written to data/<name>/unfinished/ and moved to data/<name>/
when all are complete, meta.json last, so an interruption never leaves a broken dataset.
progress.json has the length of each split when the last shard was full: the same command resumes
from there.
"""

import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plaingpt.core.dataset import (
    FORMAT_VERSION,
    MASK_SUFFIX,
    TOKEN_FILES,
    UNFINISHED,
    Dataset,
    describes_own_files,
    holds_tokens,
    mask_name,
    open_dataset,
    read_meta,
)
from plaingpt.core.token_files import IN_LOSS, dtype_name
from plaingpt.data.inspection import find_damage, print_report
from plaingpt.data.overlap import compare_splits
from plaingpt.system.errors import UserError
from plaingpt.system.files import locked, read_json, sha256_of, sync, write_json

# Fingerprints of the input in a command. If they differ, the same command starts over.
FINGERPRINTS = {'identity', 'tokenizer_sha256'}
PROGRESS_VERSION = 2  # 1.0 divided text into other pieces


class Job(NamedTuple):
    """A dataset that is being written."""

    folder: Path  # for unfinished files
    command: dict  # everything that determines the tokens; `source` in meta.json
    progress: dict  # from an interrupted run, or {}: see read_progress


@dataclass
class ShardWriter:
    """Writes a split into files of `shard_tokens` tokens, the last one shorter. For conversations
    each has a file with the loss mask beside it."""

    folder: Path
    split: str
    shard_tokens: int
    columns: dict  # file name ending → dtype: token ids, and the loss mask
    counts: Counter = field(default_factory=Counter)  # tokens, documents, bytes, learned
    unsynced: set = field(default_factory=set)  # paths

    @property
    def tokens(self):
        return self.counts['tokens']

    def path(self, shard, ending='.bin'):
        return self.folder / f'{self.split}_{shard:06d}{ending}'

    def write(self, encoded):
        """Append an Encoded → whether a shard became full."""
        full_shards, start = self.tokens // self.shard_tokens, 0
        while start < len(encoded.ids):
            shard, used = divmod(self.tokens + start, self.shard_tokens)
            end = start + self.shard_tokens - used
            for ending in self.columns:
                array = encoded.ids if ending == '.bin' else encoded.marks
                with open(self.path(shard, ending), 'ab' if used else 'wb') as file:
                    file.write(array[start:end].tobytes())
                self.unsynced.add(self.path(shard, ending))
            start = end
        self.counts.update(tokens=len(encoded.ids), documents=encoded.documents,
                           bytes=encoded.bytes)
        if encoded.marks is not None:
            self.counts.update(learned=int(np.count_nonzero(encoded.marks == IN_LOSS)))
        return self.tokens // self.shard_tokens > full_shards

    def sync(self):
        """Flush what was written to disk, so that it survives a crash of the machine."""
        while self.unsynced:
            sync(self.unsynced.pop())

    def rewind(self, counts):
        """Return to earlier counts and truncate what was written after them."""
        self.counts = Counter(counts)
        shard, used = divmod(self.tokens, self.shard_tokens)
        for ending, dtype in self.columns.items():
            with suppress(FileNotFoundError):  # finish() may have renamed a single file
                os.replace(self.folder / f'{self.split}{ending}', self.path(0, ending))
            if used:
                os.truncate(self.path(shard, ending), used * dtype.itemsize)

    def finish(self):
        """→ the entry of this split in meta.json. A single file is named SPLIT.bin."""
        self.sync()
        full_shards, remainder = divmod(self.tokens, self.shard_tokens)
        sizes = [self.shard_tokens] * full_shards
        if remainder:
            sizes.append(remainder)
        files = [{'name': self.path(shard).name, 'tokens': size}
                 for shard, size in enumerate(sizes)]
        if len(files) == 1:
            files[0]['name'] = f'{self.split}.bin'
            for ending in self.columns:
                os.replace(self.path(0, ending), self.folder / f'{self.split}{ending}')
        for file in files:
            file['sha256'] = sha256_of(self.folder / file['name'])
            if MASK_SUFFIX in self.columns:
                file['mask_sha256'] = sha256_of(self.folder / mask_name(file['name']))
        entry = {key: self.counts[key] for key in ('tokens', 'documents', 'bytes')}
        entry['files'] = files
        if MASK_SUFFIX in self.columns:
            entry['learned'] = self.counts['learned']
        return entry


def write_meta(folder, dtype, tokenizer, splits, command):
    """Write meta.json, including how much of the validation text is in the training split.
    splits: the entry of each. Raises UserError if a split is empty."""
    for split, entry in splits.items():
        if not entry['tokens']:
            raise UserError(f'{command["input"]}: the {split} split is empty: use more text, or '
                            'another --val_fraction or --val_split')
    meta = {'format_version': FORMAT_VERSION, 'dtype': dtype_name(dtype),
            'vocab_size': tokenizer.vocab_size, 'tokenizer': tokenizer.to_json(),
            'splits': splits, 'source': command}
    dataset = Dataset(folder, meta, tokenizer.vocab_size)
    splits['val'] |= compare_splits(dataset, dataset)
    write_json(folder / 'meta.json', meta)


def write_progress(job, **progress):
    write_json(job.folder / 'progress.json',
               {'version': PROGRESS_VERSION, 'command': job.command, **progress})


def read_progress(folder, command, overwrite):
    """The progress of the same command. If there is none, empty the folder and return {}. Raises
    UserError if another command left its progress, unless `overwrite`."""
    path = folder / 'progress.json'
    progress = read_json(path) if path.exists() else {}
    if (progress.get('version'), progress.get('command')) == (PROGRESS_VERSION, command):
        return progress
    if progress:
        check_command(folder, progress['command'], command, overwrite)
        print(f'{folder}: deleted the partial output of another command, text or version; '
              'starting over')
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return {}


def check_command(folder, existing, command, overwrite):
    """Raises UserError if another command wrote the files in `folder`, unless `overwrite`."""
    default = 'the default'  # of an option that a command does not name
    differences = [f'{key} {existing.get(key, default)}, not {command.get(key, default)}'
                   for key in {**command, **existing}
                   if key not in FINGERPRINTS and existing.get(key) != command.get(key)]
    if differences and not overwrite:
        raise UserError(f'{folder} holds the output of another command '
                        f'({", ".join(differences[:3])}); choose another folder with --data_dir, '
                        'or replace it with --overwrite')


def publish(folder):
    """Move complete data from folder/unfinished to `folder`, replacing what was there. It can be
    repeated after a crash at any point."""
    unfinished = folder / UNFINISHED
    meta = read_meta(unfinished / 'meta.json')
    files = [file for split in meta['splits'].values() for file in split['files']]
    names = [file['name'] for file in files]
    names += [mask_name(file['name']) for file in files if 'mask_sha256' in file]
    (unfinished / 'progress.json').unlink(missing_ok=True)
    # From here on, a crash leaves the folder marked as unfinished.
    (folder / 'meta.json').unlink(missing_ok=True)
    for path in folder.glob('*.bin'):
        if path.name not in names and TOKEN_FILES.fullmatch(path.name):
            path.unlink()
    for name in names:
        if os.path.lexists(unfinished / name):
            os.replace(unfinished / name, folder / name)
    os.replace(unfinished / 'meta.json', folder / 'meta.json')
    shutil.rmtree(unfinished)


def is_up_to_date(folder, command, overwrite):
    """Whether this command wrote `folder` and its files are intact. Raises UserError if another
    command wrote it, unless `overwrite`, or if the files are not from prepare.py."""
    path = folder / 'meta.json'
    if not path.exists():
        if holds_tokens(folder) and not (folder / UNFINISHED).exists():
            raise UserError(f'{folder} has token files but no meta.json, so they are not from '
                            'prepare.py; choose another folder with --data_dir')
        return False
    try:
        existing = read_meta(path)['source']
    except UserError as problem:  # damaged, or of a newer version: the files may be anyone's
        raise UserError(f'{problem}; choose another folder with --data_dir, or delete {folder} '
                        'first') from None
    if describes_own_files(existing):
        raise UserError(f'{folder} holds your own ids, which prepare.py does not replace; choose '
                        'another folder with --data_dir')
    check_command(folder, existing, command, overwrite)
    if existing != command:
        print(f'{folder}: preparing the data again, as the command or the input has changed')
        return False
    return not find_damage(open_dataset(folder))


def write_dataset(folder, command, overwrite, write):
    """Call `write` with a Job, move its output to `folder`, and print a report. Nothing is written
    if `folder` is up to date. `folder` is locked meanwhile. A failure before the first checkpoint
    of the progress leaves no files. Raises UserError."""
    unfinished = folder / UNFINISHED
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder, f'{folder}: another prepare.py is writing there; wait until it has '
                            'finished, or choose another --data_dir'):
            if (unfinished / 'meta.json').exists():  # complete, but interrupted before publish
                publish(folder)
            if is_up_to_date(folder, command, overwrite):
                print(f'{folder} is up to date (same command, checksums verified)')
            else:
                write(Job(unfinished, command, read_progress(unfinished, command, overwrite)))
                publish(folder)
            print_report(open_dataset(folder))
    finally:
        if not any((unfinished / name).exists() for name in ('progress.json', 'meta.json')):
            shutil.rmtree(unfinished, ignore_errors=True)  # nothing to resume from
        with suppress(OSError):  # not empty
            folder.rmdir()
