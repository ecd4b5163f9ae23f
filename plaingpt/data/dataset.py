"""Token files on disk: data/<name>/ with meta.json, nanoGPT's bare .bin files, llm.c's shards."""

import gc
import os
import re
import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plaingpt.data import tokenizers
from plaingpt.data.nanogpt_vocabulary import read_nanogpt_chars
from plaingpt.data.token_files import TokenStream, identify, open_tokens
from plaingpt.system.errors import UserError
from plaingpt.system.files import (
    is_count,
    is_number,
    is_positive,
    lock_holders,
    read_json,
    system_lock,
)
from plaingpt.system.formatting import quoted

FORMAT_VERSION = 1
MASK_ENDING = '_mask.bin'  # of the file that says which tokens of NAME.bin are learned
UNFINISHED = 'unfinished'  # prepare.py's folder for files that are not complete yet
PARTS = 'parts'  # its folder for what --part=K/N wrote, until it is merged
SHARES = 1000  # sequences that the corpora of a mixture share out, again and again


class Part(NamedTuple):
    """A corpus that is trained on."""

    name: str  # in a mixture; '' where there is one only
    dataset: 'Dataset'
    share: int  # of every SHARES sequences

    @property
    def weight(self):
        return self.share / SHARES


@dataclass(frozen=True)
class Dataset:
    """A prepared folder: its token files, and what its meta.json says of them."""

    folder: Path
    meta: dict  # of a folder without meta.json: the tokenizer of its meta.pkl, or nothing
    vocab_size: int
    seen: tuple = ()  # what identify() said of its meta.json
    opened: dict = field(default_factory=dict, repr=False)  # split: what _open found

    @property
    def parts(self):
        """The corpora that are trained on, of a mixture several: [Part]"""
        return [Part('', self, SHARES)]

    def mean(self, values):
        """The mean of a value of each part, by their shares."""
        return sum(part.weight * value
                   for part, value in zip(self.parts, values, strict=True))

    def epochs(self, tokens):
        """How often each part is read by a run of so many tokens → {name: epochs}"""
        return {part.name: part.weight * tokens / len(part.dataset.split('train'))
                for part in self.parts}

    def tokenizer(self):
        """The tokenizer that made the files. Raises UserError where it cannot be had."""
        return tokenizers.from_json(self.tokenizer_json())

    def tokenizer_json(self):
        return self.meta.get('tokenizer', {'kind': 'gpt2'})

    def split_entry(self, split):
        """What meta.json says of a split, {} where there is none."""
        return self.meta.get('splits', {}).get(split, {})

    def has_mask(self):
        """Whether it holds conversations, of whose tokens some are learned only."""
        return 'learned' in self.split_entry('train')

    def held_out(self):
        """The names of the splits that are not for training: val, and test where there is one."""
        return ('val', 'test') if self.split_entry('test') or self._bare_files('test') else ('val',)

    def is_ours(self):
        """Whether prepare.py wrote the folder, so that meta.json has its checksums."""
        return 'splits' in self.meta

    def bytes_per_token(self, split):
        """UTF-8 bytes of text per token, or None where meta.json does not say."""
        entry = self.split_entry(split)
        known = entry.get('bytes') and not self.has_mask()  # it does not say those of the assistant
        return entry['bytes'] / entry['tokens'] if known else None

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
        """The token stream of 'train', 'val' or 'test'; with in_ram its checksums are verified.
        One that is read from disk keeps prepare.py from replacing the folder. Raises UserError."""
        files, _, _, masks = self._open(name)
        if masks:
            from plaingpt.data.packing import Conversations  # with torch, which takes seconds
            stream = Conversations(files, masks, self.vocab_size, in_ram)
        else:
            stream = TokenStream(files, self.vocab_size, in_ram)
        if self.is_ours() and not in_ram:
            self._keep_while_read(stream)
        return stream

    def loader(self, split, in_ram, *shape, **settings):
        """The loader of a split; shape and settings are those of BatchLoader."""
        from plaingpt.data.batches import BatchLoader  # with torch, which takes seconds
        from plaingpt.data.packing import PackedLoader
        kind = PackedLoader if self.has_mask() else BatchLoader
        return kind(self.split(split, in_ram), *shape, **settings)

    def describe_reading(self, in_ram):
        """Where tokens are read from, and whether what is read is known to be what was written."""
        if not self.is_ours():
            return f'{"in memory" if in_ram else "on disk"}, no checksums to verify'
        if in_ram:
            return 'in memory, checksums verified'
        return 'on disk, checksums not verified (python prepare.py inspect ' \
               f'{quoted(self.folder)} does)'

    def _keep_while_read(self, stream):
        """Share the lock of meta.json until `stream` is gone: the system ends it with the process,
        and a folder that cannot be written to has it too. Raises UserError where meta.json is not
        the one that was read."""
        path = self.folder / 'meta.json'
        for _ in range(20):  # replacing is a matter of renaming files
            try:
                handle = system_lock(path, shared=True)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            raise UserError(f'{self.folder} is being replaced by {lock_holders(path)}: give this '
                            'command again when that is done')
        if handle is not None:
            weakref.finalize(stream, os.close, handle)
        try:
            now = identify(os.stat(path))
        except OSError:
            now = None
        if now != self.seen:
            raise UserError(f'{path} has changed since this command read it, so prepare.py '
                            'has written the data anew: give this command again')

    def _open(self, split):
        """→ (files, identity, samples, masks)"""
        if split not in self.opened:
            dtype = np.dtype(self.meta.get('dtype', 'uint16')).newbyteorder('<')
            if entry := self.split_entry(split):
                files = [open_tokens(self.folder / file['name'], dtype, file['tokens'],
                                     file['sha256']) for file in entry['files']]
            else:
                files = [open_tokens(path, dtype) for path in self._bare_files(split)]
            if not files:
                hint = ': prepare it with --test_fraction=0.01' if split == 'test' else ''
                raise UserError(f'{self.folder}: no {split}.bin there{hint}')
            masks = [open_tokens(self.folder / mask_name(file['name']), np.dtype('u1'),
                                 file['tokens'], file['mask_sha256'])
                     for file in entry['files']] if self.has_mask() else []
            samples = [*(file.sampled_sha256(self.vocab_size) for file in files),
                       *(mask.sampled_sha256(2) for mask in masks)]
            known = [file.sha256 or sample
                     for file, sample in zip([*files, *masks], samples, strict=True)]
            self.opened[split] = files, known, samples, masks
        return self.opened[split]

    def _bare_files(self, split):
        """The token files of a split in a folder whose meta.json does not list any."""
        return [] if self.is_ours() else [
            path for path in sorted(self.folder.glob('*.bin'))
            if split in path.stem.replace('-', '_').split('_')]


def open_dataset(folder):
    """Open a folder that prepare.py wrote, or one with nanoGPT's .bin files or llm.c's shards; one
    without meta.json and meta.pkl is taken to hold GPT-2 tokens. Raises UserError."""
    folder = Path(folder)
    path = folder / 'meta.json'
    if os.path.lexists(path):
        # Before the reading: what is written meanwhile is then another one.
        seen = identify(os.stat(path)) if path.exists() else ()
        meta = read_meta(path)
        dataset = Dataset(folder, meta, meta['vocab_size'], seen)
        if not dataset.has_mask() and (found := next(folder.glob(f'*{MASK_ENDING}'), None)):
            raise UserError(f'{found} is there, and meta.json does not say what is learned: copy '
                            'the whole folder again, or prepare it anew')
        return dataset
    if (folder / UNFINISHED).exists():
        raise UserError(f'{folder} is not finished: run the prepare.py command that wrote it again')
    if (folder / PARTS).exists():
        raise UserError(f'{folder} holds parts that are not merged: run python prepare.py merge '
                        f'{quoted(folder)} once all are there')
    if found := next(folder.glob(f'*{MASK_ENDING}'), None):
        raise UserError(f'{folder} has {found.name} and no meta.json, which says what that is: '
                        'copy the whole folder again')
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


def mask_name(name):
    """'train.bin' → 'train_mask.bin'"""
    return name.removesuffix('.bin') + MASK_ENDING


@contextmanager
def not_read(folder, advice=''):
    """Keep readers from a prepared folder in here. Raises UserError where a process reads it from
    disk. Where the system has no locks, readers notice by themselves what is replaced."""
    path = folder / 'meta.json'
    try:
        handle = system_lock(path)
    except BlockingIOError:
        gc.collect()  # a run that has ended in this process, as in a notebook, may not be gone yet
        try:
            handle = system_lock(path)
        except BlockingIOError:
            raise UserError(f'{folder} is read by {lock_holders(path)}, so it is not replaced'
                            f'{advice}: wait until that has ended or stop it, and give the same '
                            'command again') from None
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


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
            # All files of all splits have a mask, or none.
            masked = 'learned' in meta['splits']['train']
            if masked != ('learned' in entry) or any(
                    isinstance(file.get('mask_sha256'), str) != masked for file in entry['files']):
                raise ValueError('a mask is missing')
            if masked and not is_positive(entry['learned']):
                raise ValueError('nothing is learned')
            share = entry.get('in_train', 0)
            if not is_number(share) or not 0 <= share <= 1:
                raise ValueError('in_train is no number from 0 to 1')
        if not isinstance(meta.get('source', {}), dict) or not is_count(meta.get('duplicates', 0)):
            raise ValueError('source or duplicates is of another type')
        return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        what = f'{e} is missing' if isinstance(e, KeyError) else e
        raise UserError(f'{path} is broken ({what}): prepare the data again') from None


# -----------------------------------------------------------------------------
# what the setting `dataset` says

ROUNDING = 1e-3  # by which the weights of a mixture may miss 1, as three times 0.333 does


def read_names(text):
    """What `dataset` says, a name or 'code:0.3,prose:0.7' → {name: its share of every thousand
    sequences}. Raises UserError."""
    pieces = [split_weight(piece.strip()) for piece in text.split(',')]
    is_mixture = all(weight is not None for _, weight in pieces)
    if os.path.exists(dataset_folder(text)):
        if is_mixture:
            raise UserError(f'dataset={text} is a mixture and also the name of '
                            f'{dataset_folder(text)}: end it with / to mean that folder')
        return {text: SHARES}
    if not is_mixture:
        if ',' not in text:
            return {text: SHARES}
        name = next(piece for piece, weight in pieces if weight is None)
        problem = f'{name!r} has no weight from 0 to 1 behind a colon' if name else \
            'there is a comma too many'
        raise UserError(f'dataset={text}: {problem}: write a mixture as code:0.3,prose:0.7')
    names, weights = zip(*pieces, strict=True)
    if len({dataset_folder(name).resolve() for name in names}) < len(names):
        raise UserError(f'dataset={text} names a corpus twice: give it one weight')
    if (total := sum(weights)) <= 0 or abs(total - 1) > ROUNDING:
        meant = ','.join(f'{name}:{weight / (total or 1):.3g}' for name, weight in pieces)
        raise UserError(f'dataset={text}: the weights come to {total:.6g}, and must come to 1'
                        + f': did you mean {meant}?' * (total > 0))
    shares = dict(zip(names, apportion(weights, SHARES), strict=True))
    for name, share in shares.items():
        if not share:
            raise UserError(f'dataset={text}: {name} would have none of every {SHARES:,} '
                            f'sequences: give it a weight of at least {1 / SHARES:g}, or leave it '
                            'out')
    return shares


def split_weight(piece):
    """'code:0.3' → ('code', 0.3); the weight is None where there is none."""
    found = re.fullmatch(r'(.*\S) *: *([0-9]+\.?[0-9]*|\.[0-9]+)', piece)
    return (found[1], float(found[2])) if found else (piece, None)


def apportion(weights, n):
    """n in whole numbers that are as the weights: what is left by rounding down goes to the
    largest remainders, the first of equal ones."""
    exact = np.array(weights) * n / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind='stable')[:n - counts.sum()]] += 1
    return counts.tolist()


def has_token_files(text):
    """Whether there are token files of all that `dataset` says."""
    return all(any(dataset_folder(name).glob('*.bin')) for name in read_names(text))
