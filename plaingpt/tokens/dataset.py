"""Token files on disk: data/<name>/ with meta.json, nanoGPT's bare .bin files, llm.c's shards."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.system.files import is_count, is_number, is_positive, read_json
from plaingpt.system.formatting import quoted
from plaingpt.tokens import tokenizers
from plaingpt.tokens.batches import BatchLoader
from plaingpt.tokens.nanogpt_vocabulary import read_nanogpt_chars
from plaingpt.tokens.token_files import TokenStream, open_tokens

FORMAT_VERSION = 1
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
    opened: dict = field(default_factory=dict, repr=False)  # split: (files, identity, samples)

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

    def loader(self, split, in_ram, *shape, **settings):
        """The BatchLoader of a split; shape and settings are that of its class."""
        return BatchLoader(self.split(split, in_ram), *shape, **settings)

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
