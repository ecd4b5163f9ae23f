"""Tokens → shards on disk, so that a kill at any moment loses little and spoils nothing.

All is written in data/<name>/unfinished/, with a journal that says how far each file is good: what
a kill left after that place is cut off. Only complete data moves to data/<name>/, meta.json last.
A part of a corpus is written in the same way to data/<name>/parts/<k>-of-<n>/, and all of them are
then merged into data/<name>/.
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

from plaingpt.data.text_files import describe_inputs
from plaingpt.system.errors import UserError
from plaingpt.system.files import (
    check_keys,
    in_use,
    is_count,
    is_text,
    locked,
    read_json,
    sha256_of,
    write_json,
)
from plaingpt.system.formatting import amount
from plaingpt.data.dataset import (
    MASK_ENDING,
    PARTS,
    UNFINISHED,
    mask_name,
    not_read,
    read_meta,
)

# What of a command its other options and the input decide, and how the tokens lie in files.
NO_CHOICE = ('identity', 'files', 'train_characters', 'tokenizer_sha256', 'shard_tokens',
             'max_shards', 'part', 'val_characters')
TOKEN_FILES = r'(train|val|test)(_\d{6})?(_mask)?\.bin'
# These are in a command only where they are given.
IF_GIVEN = ('max_tokens', 'test_fraction', 'test_split', 'dedup')


@dataclass
class ShardWriter:
    """Writes a split into files of `shard_tokens` tokens, the last one shorter; with a `mask`, a
    writer like it, beside each of them a file that says which of its tokens are learned."""

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
    learned: int = 0
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
            self.mask.append(encoded.learned)
            self.learned += int(np.count_nonzero(encoded.learned))
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
    if journal.get('mark') and journal.get('duplicates'):
        path = folder / 'duplicates'
        return path.exists() and path.stat().st_size >= 8 * journal['duplicates']['hashes']
    return True


def complete_meta(meta, name):
    """What write_shards says of all of a source → the content of meta.json. Raises UserError where
    a split stayed empty."""
    if not any(entry['tokens'] for entry in meta['splits'].values()):
        raise UserError(f'{name}: empty, no text to learn from')
    for split, entry in meta['splits'].items():
        if not entry['tokens']:
            raise UserError(f'{name}: the {split} split would be empty: use more text or '
                            + ' or '.join(reasons_for_none(split, meta)))
    return {**meta, 'inputs': describe_inputs(meta['inputs'])}


def reasons_for_none(split, meta):
    """What to change in the options of `meta` so that a split has text."""
    command, own = meta['source'], f'{split}_split'
    if split == 'train':
        took = [option for option, is_so in (
            ('val_fraction', not command.get('val_split')),
            ('test_fraction', command.get('test_fraction'))) if is_so] or ['split']
    else:
        took = [own if command.get(own) else f'{split}_fraction']
    reasons = [f'another --{option}' for option in took]
    if split != 'train' and 'max_tokens' in command and not command.get(own):
        reasons.append('a larger --max_tokens')  # reading ended before there was any
    return reasons + ['no --dedup'] * bool(meta.get('duplicates'))


def publish(folder):
    """Move complete data from folder/unfinished into `folder`, in place of what was there → meta.
    After a crash at any point it can be called again. Raises UserError where a process reads what
    was there."""
    unfinished = folder / UNFINISHED
    meta = read_meta(unfinished / 'meta.json')
    with not_read(folder, f'; what was prepared stays in {unfinished}'):
        move_into(folder, unfinished, meta)
    return meta


def move_into(folder, unfinished, meta):
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
def lock_dataset_dir(folder, part=None):
    """Make `folder`, or that of a part (k, n), and keep every other prepare.py out of it → the
    folder for unfinished files. Folders that stay empty are removed at the end. UserError."""
    outer, folder = folder, part_folder(folder, part)
    check_ours(folder)
    unfinished, ours = folder / UNFINISHED, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, f'{folder}: another prepare.py is writing there: wait until it is done'
                            + (', or choose another --data_dir' if not part else '')):
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
        with suppress(OSError):
            for empty in ((folder, folder.parent, outer) if part else (folder,)) if ours else ():
                empty.rmdir()


# -----------------------------------------------------------------------------
# parts of a corpus, each prepared on its own

PART_NAME = re.compile(r'([1-9]\d{0,5})-of-([1-9]\d{0,5})')
# What prepare.py writes in such a folder, and a merge that was killed beside them.
OURS = re.compile(r'(train|val|test)(_\d{6})?\.bin|meta\.json(\.tmp)?|unfinished|\.lock.*')


def part_folder(folder, part):
    """Where part (k, n) of a dataset is written; `folder` itself where it is not in parts."""
    return folder / PARTS / '{}-of-{}'.format(*part) if part else folder


def merge_parts(folder):
    """Make the parts of `folder` its unfinished files, with a meta.json, for publish. Raises
    UserError where they do not fit together. After a crash at any point it can be called again."""
    parts, unfinished = folder / PARTS, folder / UNFINISHED
    paths, metas = find_parts(parts), {}
    for path in paths:
        metas[path] = read_part(path)
        first = metas[paths[0]]
        check_same_command(path, metas[path], paths[0], first)
        metas[path]['tokenizer'] = first['tokenizer']  # a large one is in memory once
    splits, moves = {}, {}
    for split in metas[paths[0]]['splits']:
        entries = [meta['splits'][split] for meta in metas.values()]
        files = [(path / file['name'], file) for path, entry in zip(metas, entries, strict=True)
                 for file in entry['files']]
        names = [f'{split}_{i:06d}.bin' for i in range(len(files))] if len(files) > 1 \
            else [f'{split}.bin'] * len(files)
        splits[split] = {key: sum(entry[key] for entry in entries)
                         for key in ('tokens', 'documents', 'bytes')}
        splits[split]['files'] = [{**file, 'name': name}
                                  for name, (_, file) in zip(names, files, strict=True)]
        for name, (path, file) in zip(names, files, strict=True):
            # A merge that was killed may have renamed it already.
            moves[name] = path if path.exists() else parts / name
            check_file(path, moves[name], file, np.dtype(first['dtype']).itemsize)
    meta = {key: value for key, value in first.items() if key not in ('cut', 'given')}
    meta['source'] = {key: value for key, value in first['source'].items() if key != 'part'}
    meta['encoders'] = {name: version for part in metas.values()
                        for name, version in part.get('encoders', {}).items()}
    inputs = [file for part in metas.values() for file in part['inputs']]
    meta = complete_meta({**meta, 'splits': splits, 'inputs': inputs}, folder)
    for name, path in moves.items():
        os.replace(path, parts / name)
    write_json(parts / 'meta.json', meta)
    shutil.rmtree(unfinished, ignore_errors=True)
    os.replace(parts, unfinished)


def find_parts(parts):
    """→ the folders of all parts, in order. Raises UserError where some are not there or not
    finished, or where others put something there, which would be lost."""
    inside = [path for path in parts.glob('*/*') if PART_NAME.fullmatch(path.parent.name)]
    for path in [*parts.iterdir(), *inside]:
        if not OURS.fullmatch(path.name) and (path in inside or not PART_NAME.fullmatch(path.name)):
            raise UserError(f'{path} was not written by prepare.py: move it elsewhere')
    matches = filter(None, (PART_NAME.fullmatch(path.name) for path in parts.iterdir()))
    counts = sorted({int(match[2]) for match in matches})
    if len(counts) != 1:
        raise UserError(f'{parts} holds parts of {" and parts of ".join(map(str, counts))}: delete '
                        'those that do not belong there' if counts else
                        f'{parts} holds no parts: delete it')
    paths = {number: part_folder(parts.parent, (number, counts[0]))
             for number in range(1, counts[0] + 1)}
    states = {'missing': [], 'not finished': [], 'being written': []}
    for number, path in paths.items():
        if not path.exists():
            states['missing'].append(str(number))
        elif in_use(path):
            states['being written'].append(str(number))
        elif not (path / 'meta.json').exists():
            states['not finished'].append(str(number))
    if any(states.values()):
        raise UserError(f'{parts}: of {counts[0]} parts '
                        + '; '.join(f'{",".join(numbers[:50])}{",…" if numbers[50:] else ""} '
                                    f'{"is" if len(numbers) == 1 else "are"} {state}'
                                    for state, numbers in states.items() if numbers)
                        + ': ' + ' and '.join(filter(None, (
                            f'give the same command again with --part=K/{counts[0]} for each of '
                            'them' if states['missing'] + states['not finished'] else '',
                            'wait for what is being written' * bool(states['being written'])))))
    return list(paths.values())


def read_part(path):
    """The meta.json of a part. Raises UserError."""
    meta = read_meta(path / 'meta.json')
    file = {'name': is_text, 'bytes': is_count, 'sha256': is_text}
    try:
        if '{}-of-{}'.format(*meta['source']['part']) != path.name:
            raise ValueError('it is of another part')
        for entry in meta['splits'].values():
            check_keys(entry, {'documents': is_count, 'bytes': is_count})
        for each in meta['inputs']:
            check_keys(each, file)
        return meta
    except (LookupError, TypeError, ValueError) as e:
        what = f'{e} is missing' if isinstance(e, KeyError) else e
        raise UserError(f'{path}/meta.json is broken ({what}): delete {path} and prepare that part '
                        'again') from None


def check_same_command(path, meta, first_path, first):
    """Raises UserError where the metas of two parts are of different commands or tokenizers, or of
    different files."""
    if differ := differences(meta, first):
        raise UserError(f'{path} does not fit to {first_path.name} ({"; ".join(differ)}): delete '
                        'what is wrong and prepare it again, all parts with the same options and '
                        'on the same files')


def check_neighbours(folder, part, meta, overwrite):
    """Raises UserError where the parts beside `part` are of another number of parts or, as far as
    they are finished, of another command or input than `meta` says, unless it may `overwrite`."""
    others = [path for path in sorted((folder / PARTS).glob('*-of-*'))
              if PART_NAME.fullmatch(path.name) and path != part_folder(folder, part)]
    for path in others:
        if (count := path.name.partition('-of-')[2]) != str(part[1]):
            raise UserError(f'{path} is one of {count} parts, not of {part[1]}: give --part=K/'
                            f'{count}, or delete {folder / PARTS} to begin anew')
    for path in others:
        with suppress(UserError):  # broken, which merge says, or not finished
            other = read_part(path)
            break
    else:
        return
    differ = differences(other, meta)  # of one: each was compared when it began
    if differ and not overwrite:
        raise UserError(f'{path} is of another command or input ({"; ".join(differ)}): give the '
                        f'same ones for all parts, or delete {folder / PARTS} to begin anew; '
                        '--overwrite writes this part all the same')


def differences(meta, other):
    """How the command and the input of a part differ from another's, each with both values."""
    command, others = meta.get('source', {}), other.get('source', {})
    found = []
    for key in {**others, **command}:
        ours, theirs = command.get(key), others.get(key)
        of_other_files = key == 'identity' and command.get('input') != others.get('input')
        if key == 'part' or ours == theirs or of_other_files:
            continue
        if key == 'identity':
            states = [each.get('given') for each in (meta, other)]
            found.append('the input was changed between them: ' + (
                '{}, not {}'.format(*states) if states[0] != states[1]
                else 'the name, size or time of change of a file'))
        elif key != 'tokenizer_sha256':
            found.append(f'{key} {ours or "none"}, not {theirs or "none"}')
        elif command['tokenizer'] == others['tokenizer']:
            found.append(f'--tokenizer={command["tokenizer"]} was prepared anew between them: its '
                         f'checksum is {ours[:8]}, not {theirs[:8]}')
    found += [f'{key} {meta.get(key)}, not {other[key]}' for key in ('dtype', 'vocab_size', 'cut')
              if key in other and meta.get(key) != other[key]]
    if 'tokenizer' in other and meta.get('tokenizer') != other['tokenizer'] and not found:
        found = ['the tokens of its tokenizer']
    return found


def check_file(path, moved, file, width):
    """Raises UserError where the token file of a part, which lies at `moved`, is not what
    was written."""
    size, expected = moved.stat().st_size if moved.exists() else 0, width * file['tokens']
    if size != expected:
        found = f'{size:,} bytes where {expected:,} were written'
    elif sha256_of(moved) != file['sha256']:
        found = 'another checksum than when it was written'
    else:
        return
    number, of = PART_NAME.fullmatch(path.parent.name).groups()
    raise UserError(f'{path}: {found}: the file is damaged; give its command again, with '
                    f'--part={number}/{of}')
