"""A dataset: data/<name>/ with token files and meta.json, nanoGPT's .bin files, llm.c's shards."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plaingpt.data import tokenizers
from plaingpt.data.token_files import TokenStream, open_tokens
from plaingpt.system.errors import UserError
from plaingpt.system.files import read_json
from plaingpt.system.formatting import quoted

FORMAT_VERSION = 1
MASK_ENDING = '_mask.bin'  # of the file that says which tokens of NAME.bin count in the loss
TOKEN_FILES = re.compile(r'(train|val|test)(_\d{6})?(_mask)?\.bin')  # that prepare.py writes
UNFINISHED = 'unfinished'  # prepare.py's folder for files that are not complete yet


class Part(NamedTuple):
    """A corpus that is trained on."""

    name: str  # in a mixture; '' if it is the only one
    dataset: 'Dataset'
    weight: float = 1.0  # its share of the sequences


@dataclass(frozen=True)
class Dataset:
    """A prepared folder: its token files, and what its meta.json says of them."""

    folder: Path
    meta: dict  # of a folder without meta.json: the tokenizer of its meta.pkl, or nothing
    vocab_size: int
    opened: dict = field(default_factory=dict, repr=False)  # split: what _open found

    @property
    def parts(self):
        """[Part]: the corpora that are trained on. A mixture has several."""
        return [Part('', self)]

    def mean(self, values):
        """The mean of a value of each part, by their weights."""
        return sum(part.weight * value
                   for part, value in zip(self.parts, values, strict=True))

    def epochs(self, tokens):
        """How often a run of `tokens` tokens reads each part → {name: epochs}"""
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
        """Whether it holds conversations, where only some tokens count in the loss."""
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
        known = entry.get('bytes') and not self.has_mask()  # not those of the assistant
        return entry['bytes'] / entry['tokens'] if known else None

    def token_bytes(self, split):
        """As tokenizers.token_bytes, or None where meta.json knows nothing of the text of a split.
        Raises UserError."""
        known = self.bytes_per_token(split)
        return tokenizers.token_bytes(self.tokenizer()) if known else None

    def identity(self, split):
        """What identifies the tokens of a split in any folder: the checksums of its files, or of
        samples from them where meta.json has none."""
        files, masks = self._open(split)
        return [file.sha256 or file.sampled_sha256() for file in [*files, *masks]]

    def is_identity(self, split, saved):
        """True where `saved` is the identity of a split; earlier versions saved the path of a
        folder without meta.json."""
        return saved in (self.identity(split), os.path.abspath(self.folder))

    def state(self):
        """What a checkpoint keeps of the data, so that a resumed run has the same."""
        return {'tokenizer': self.tokenizer_json(), 'data': self.identity('train')}

    def split(self, name, in_ram=False):
        """The token stream of 'train', 'val' or 'test'; with in_ram its checksums are verified.
        Raises UserError."""
        files, masks = self._open(name)
        if masks:
            from plaingpt.data.packing import ConversationTokens, Marks  # with torch
            of_others = {'form', 'template'} & self.tokenizer_json().keys()
            return ConversationTokens(files, masks, self.vocab_size, in_ram,
                                      Marks.of(self.tokenizer()) if of_others else None)
        return TokenStream(files, self.vocab_size, in_ram)

    def loader(self, split, in_ram, *shape, **settings):
        """The loader of a split; shape and settings are those of BatchLoader."""
        if self.has_mask():
            from plaingpt.data.packing import PackedLoader as Loader  # with torch: it takes seconds
        else:
            from plaingpt.data.batches import BatchLoader as Loader
        return Loader(self.split(split, in_ram), *shape, **settings)

    def _open(self, split):
        """→ (files, files of their loss masks)"""
        if split not in self.opened:
            dtype = np.dtype(self.meta.get('dtype', 'uint16')).newbyteorder('<')
            entries = self.split_entry(split).get('files', [])
            files = [open_tokens(self.folder / file['name'], dtype, file['tokens'],
                                 file['sha256'], file.get('offset')) for file in entries] \
                or [open_tokens(path, dtype) for path in self._bare_files(split)]
            if not files:
                hint = ': prepare it with --test_fraction=0.01' if split == 'test' else ''
                raise UserError(f'{self.folder}: no {split}.bin there{hint}')
            masks = [open_tokens(self.folder / mask_name(file['name']), np.dtype('u1'),
                                 file['tokens'], file['mask_sha256'])
                     for file in entries if self.has_mask()]
            self.opened[split] = files, masks
        return self.opened[split]

    def _bare_files(self, split):
        """The token files of a split in a folder whose meta.json does not list any."""
        if self.is_ours():
            return []
        if (single := self.folder / f'{split}.bin').exists():
            return [single]
        return [path for path in sorted(self.folder.glob('*.bin'))
                if split in path.stem.replace('-', '_').split('_')]


def dataset_folder(name):
    """The folder of a dataset: data/<name>, or the path itself where it is one."""
    return Path('data', name) if Path(name).parts == (name,) else Path(name)


def prepared_folder(name):
    """The folder of a prepared dataset, which is given by its name or as the folder itself."""
    return Path(name) if holds_tokens(Path(name)) else dataset_folder(name)


def holds_tokens(folder):
    """Whether a folder has token files, or a meta.json that lists them."""
    return (folder / 'meta.json').exists() or any(folder.glob('*.bin'))


def open_dataset(folder, vocab_size=0):
    """Open a folder that prepare.py wrote, or one with nanoGPT's .bin files or llm.c's shards.
    Without meta.json and meta.pkl its tokens are GPT-2's, or with `vocab_size` someone's own ids.
    Raises UserError."""
    folder = Path(folder)
    if os.path.lexists(folder / 'meta.json'):
        meta = read_meta(folder / 'meta.json')
        return Dataset(folder, meta, meta['vocab_size'])
    if (folder / UNFINISHED).exists():
        raise UserError(f'{folder} is not finished: run the prepare.py command that wrote it again')
    if not holds_tokens(folder):
        raise UserError(not_prepared(folder))
    description = {'kind': 'gpt2'}
    if (folder / 'meta.pkl').exists():
        from plaingpt.data.nanogpt_meta import read_nanogpt_meta
        description = read_nanogpt_meta(folder / 'meta.pkl')
    elif vocab_size not in (0, tokenizers.GPT2Tokenizer.vocab_size):
        description = {'kind': 'ids', 'vocab_size': vocab_size}
    meta = {} if description['kind'] == 'gpt2' else {'tokenizer': description}
    return Dataset(folder, meta, tokenizers.described_vocab_size(description))


def not_prepared(folder):
    line = f'{folder} is not prepared: python prepare.py text FILES --data_dir={quoted(folder)}'
    if folder.parent == Path('data'):
        line += f', or python prepare.py {quoted(folder.name)} where that is a corpus it lists'
    return line


def mask_name(name):
    """'train.bin' → 'train_mask.bin'"""
    return name.removesuffix('.bin') + MASK_ENDING


def read_meta(path):
    """meta.json → a dict whose needed keys are there. Raises UserError."""
    try:
        meta = read_json(path)
        if meta['format_version'] == FORMAT_VERSION:
            return {**meta, **{key: meta[key] for key in ('dtype', 'vocab_size', 'tokenizer',
                                                          'splits')}}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f'{path} is broken ({e!r}): prepare the data again') from None
    raise UserError(f'{path}: format version {meta["format_version"]}, but this plainGPT reads '
                    f'version {FORMAT_VERSION}: prepare the data again')
