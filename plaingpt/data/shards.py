"""Tokens → shards on disk. Files are written in data/<name>/unfinished/. When all are complete they
move to data/<name>/, meta.json last, so a kill at any moment spoils nothing. progress.json says how
long each file was when the last shard became full: the same command goes on from there.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plaingpt.data.dataset import (
    FORMAT_VERSION,
    MASK_ENDING,
    TOKEN_FILES,
    UNFINISHED,
    Dataset,
    holds_tokens,
    mask_name,
    open_dataset,
    read_meta,
)
from plaingpt.data.inspection import find_damage, print_report
from plaingpt.data.overlap import compare_with_train
from plaingpt.data.token_files import name_of
from plaingpt.system.errors import UserError
from plaingpt.system.files import locked, read_json, sha256_of, sync, write_json

# These describe the content of the input. If they changed, the same command begins anew.
CONTENT = {'identity', 'tokenizer_sha256'}


@dataclass
class ShardWriter:
    """Writes a split into files of `shard_tokens` tokens; the last one is shorter. Conversations
    have a file with the loss mask beside each."""

    folder: Path
    split: str
    shard_tokens: int
    columns: dict  # ending of a file → type of its numbers: token ids, and the loss mask
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    learned: int = 0  # tokens in the loss
    unsynced: set = field(default_factory=set)  # files

    def path(self, shard, ending='.bin'):
        return self.folder / f'{self.split}_{shard:06d}{ending}'

    def write(self, encoded):
        """Append an Encoded → True where a shard got full."""
        before, start = self.tokens // self.shard_tokens, 0
        while start < len(encoded.ids):
            shard, used = divmod(self.tokens, self.shard_tokens)
            end = start + self.shard_tokens - used
            for ending in self.columns:
                array = encoded.ids if ending == '.bin' else encoded.loss_mask
                with open(self.path(shard, ending), 'ab' if used else 'wb') as file:
                    file.write(array[start:end].tobytes())
                self.unsynced.add(self.path(shard, ending))
            self.tokens += len(encoded.ids[start:end])
            start = end
        self.documents += encoded.documents
        self.bytes += encoded.bytes
        if encoded.loss_mask is not None:
            self.learned += int(np.count_nonzero(encoded.loss_mask))
        return self.tokens // self.shard_tokens > before

    def sync(self):
        """Make what was written so far outlast a crash of the machine."""
        while self.unsynced:
            sync(self.unsynced.pop())

    def state(self):
        return {key: getattr(self, key) for key in ('tokens', 'documents', 'bytes', 'learned')}

    def go_back(self, state):
        """Go back to `state`, and cut off what was written after it."""
        for key, value in state.items():
            setattr(self, key, value)
        shard, used = divmod(self.tokens, self.shard_tokens)
        for ending, dtype in self.columns.items():
            with suppress(FileNotFoundError):  # as finish() named it
                os.replace(self.folder / f'{self.split}{ending}', self.path(0, ending))
            if used:
                os.truncate(self.path(shard, ending), used * dtype.itemsize)

    def finish(self):
        """→ the entry of this split in meta.json. A single file is named SPLIT.bin."""
        self.sync()
        full, rest = divmod(self.tokens, self.shard_tokens)
        files = [{'name': self.path(shard).name, 'tokens': n}
                 for shard, n in enumerate([self.shard_tokens] * full + [rest] * (rest > 0))]
        if len(files) == 1:
            files[0]['name'] = f'{self.split}.bin'
            for ending in self.columns:
                os.replace(self.path(0, ending), self.folder / f'{self.split}{ending}')
        for file in files:
            file['sha256'] = sha256_of(self.folder / file['name'])
            if MASK_ENDING in self.columns:
                file['mask_sha256'] = sha256_of(self.folder / mask_name(file['name']))
        entry = {'tokens': self.tokens, 'documents': self.documents, 'bytes': self.bytes,
                 'files': files}
        return {**entry, 'learned': self.learned} if MASK_ENDING in self.columns else entry


def write_meta(folder, dtype, tokenizer, splits, command):
    """Write meta.json, also how much of the validation text is in the training split.
    tokenizer: what made the tokens; splits: the entry of each. Raises UserError where a split
    stayed empty."""
    for split, entry in splits.items():
        if not entry['tokens']:
            raise UserError(f'{command["input"]}: the {split} split would be empty: use more text, '
                            'or change --val_fraction or the names of the splits')
    meta = {'format_version': FORMAT_VERSION, 'dtype': name_of(dtype),
            'vocab_size': tokenizer.vocab_size, 'tokenizer': tokenizer.to_json(),
            'splits': splits, 'source': command}
    dataset = Dataset(folder, meta, tokenizer.vocab_size)
    splits['val'] |= compare_with_train(dataset)
    write_json(folder / 'meta.json', meta)


def write_progress(folder, command, **progress):
    write_json(folder / 'progress.json', {'command': command, **progress})


def read_progress(folder, command):
    """What the same command wrote of its progress, or {}; then the folder is emptied."""
    path = folder / 'progress.json'
    progress = read_json(path) if path.exists() else {}
    if progress.get('command') == command:
        return progress
    if progress:
        print(f'{folder}: what another command, or this one from other text, left there is '
              'deleted; starting anew')
    empty(folder)
    return {}


def empty(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def publish(folder):
    """Move complete data from folder/unfinished into `folder`, in place of what was there. After a
    crash at any point it can be called again."""
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
    os.replace(unfinished / 'meta.json', folder / 'meta.json')
    shutil.rmtree(unfinished)


def is_done(folder, command, overwrite):
    """Whether this very command wrote the files of `folder`, and they are whole. Raises UserError
    where another one did, unless it may `overwrite` them, and where no prepare.py did."""
    marks = folder / 'meta.json', folder / UNFINISHED
    if not any(path.exists() for path in marks) and holds_tokens(folder):
        raise UserError(f'{folder} has tokens and no meta.json, so prepare.py did not make them: '
                        'name another folder with --data_dir')
    path = folder / 'meta.json'
    if not path.exists():
        return False
    try:
        earlier = read_meta(path)['source']
    except UserError as problem:  # it is damaged, or of a newer version
        may_be_own = '"kind": "ids"' in path.read_text('utf-8', 'replace')
        if overwrite and not may_be_own:
            return False
        hint = 'name another folder with --data_dir'
        if not may_be_own:
            hint += f', or replace the files of {folder} with --overwrite'
        raise UserError(f'{problem}; or {hint}') from None
    if earlier.get('corpus') == 'ids':
        raise UserError(f'{folder} holds ids of your own, which prepare.py does not replace: name '
                        'another folder with --data_dir')
    differ = [f'{key} {earlier.get(key, "none")}, not {command.get(key, "none")}'
              for key in {**command, **earlier}
              if key not in CONTENT and earlier.get(key) != command.get(key)]
    if differ and not overwrite:
        raise UserError(f'{folder} holds another dataset ({", ".join(differ[:3])}): name another '
                        'folder with --data_dir, or replace it with --overwrite')
    return earlier == command and not find_damage(open_dataset(folder))


def write_dataset(folder, command, overwrite, write):
    """Call `write` with a folder for unfinished files, move what it wrote into `folder`, and print
    a report. No other prepare.py can write there meanwhile. Where this command is done already, a
    line says so. Where it fails before there is something to go on from, nothing stays. Raises
    UserError."""
    unfinished = folder / UNFINISHED
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder, f'{folder}: another prepare.py is writing there: wait until it is '
                            'done, or choose another --data_dir'):
            if (unfinished / 'meta.json').exists():  # a kill left a whole dataset to be moved
                publish(folder)
            if is_done(folder, command, overwrite):
                shutil.rmtree(unfinished, ignore_errors=True)
                print(f'{folder} is already prepared by this command, and its checksums are right')
            else:
                unfinished.mkdir(exist_ok=True)
                write(unfinished)
                publish(folder)
            print_report(open_dataset(folder))
    finally:
        if not any((unfinished / name).exists() for name in ('progress.json', 'meta.json')):
            shutil.rmtree(unfinished, ignore_errors=True)  # there is nothing to go on from
        with suppress(OSError):  # it is not empty
            folder.rmdir()
