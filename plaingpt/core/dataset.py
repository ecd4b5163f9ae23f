"""A dataset: data/<name>/ with token files and meta.json, or with token files from elsewhere
(foreign_files.py). The setting `dataset` names one, or several as a mixture (mixtures.py)."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plaingpt.core.token_files import (
    PREPARE_AGAIN,
    READ_TOKENS,
    TokenStream,
    dtype_name,
    open_tokens,
    parse_dtype,
)
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, read_json, refuse_unknown
from plaingpt.system.formatting import command_for, count_of, quoted

FORMAT_VERSION = 1
META_KEYS = {'format_version', 'dtype', 'vocab_size', 'tokenizer', 'splits', 'source'}
SPLITS = ('train', 'val')
MASK_SUFFIX = '_mask.bin'  # the file with the loss mask of NAME.bin
TOKEN_FILES = re.compile(r'(train|val)(_\d{6})?(_mask)?\.bin')
VERIFIED_TOKENS = 2**27  # larger splits are not verified before a run: it would take a second
UNFINISHED = 'unfinished'  # subfolder for files that prepare.py has not completed


class Component(NamedTuple):
    """One corpus of a mixture."""

    name: str  # in the mixture; '' for a single corpus
    dataset: 'Dataset'
    weight: float = 1.0  # its share of the sequences


@dataclass(frozen=True)
class Dataset:
    """A prepared folder: its token files and its meta.json."""

    folder: Path
    meta: dict  # without meta.json: the tokenizer from meta.pkl, or empty
    vocab_size: int
    opened: dict = field(default_factory=dict, repr=False)  # split → result of _open_files

    @property
    def components(self):
        """[Component]: the corpora to train on, several for a mixture."""
        return [Component('', self)]

    def mean(self, values):
        """The mean of one value per component, by their weights."""
        return sum(component.weight * value
                   for component, value in zip(self.components, values, strict=True))

    def tokenizer(self):
        """The tokenizer of the files. Raises UserError if it cannot be loaded."""
        from plaingpt.data.tokenizers import from_json
        return from_json(self.tokenizer_json())

    def tokenizer_json(self):
        return self.meta.get('tokenizer', {'kind': 'gpt2'})

    def split_entry(self, split):
        """The entry of a split in meta.json, {} if there is none."""
        return self.meta.get('splits', {}).get(split, {})

    def has_mask(self):
        """Whether it holds conversations, which have a loss mask."""
        return 'learned' in self.split_entry('train')

    @cached_property
    def document_start(self):
        """The id that starts each document, if it is among the first READ_TOKENS training tokens of
        a corpus that is not one continuous text. None for conversations, whose prompts are those of
        ChatTokenizer.encode_prompt."""
        if self.has_mask():
            return None
        from plaingpt.data.tokenizers import document_start_of
        start = document_start_of(self.tokenizer_json())  # None is not among the ids
        for component in self.components:
            documents = component.dataset.split_entry('train').get('documents', 1)
            if self.is_by_line() and documents == 1:
                continue  # the lines of one continuous text
            if start in component.dataset.split('train').read(0, READ_TOKENS):
                return start
        return None

    def is_by_line(self):
        """Whether the tokenizer has no end-of-text token, so that a line break ends a document."""
        return self.tokenizer_json()['kind'] in ('char', 'words')

    def has_checksums(self):
        """Whether prepare.py wrote a meta.json with the checksums of the files."""
        return 'splits' in self.meta

    def has_own_ids(self):
        """Whether the tokens are the user's own ids, which do not stand for text."""
        return self.tokenizer_json()['kind'] == 'ids'

    def id_dtypes(self):
        """The dtypes of the ids: 'uint16', or 'int64 and uint16' if files differ."""
        names = {dtype_name(file.dtype) for split in SPLITS for file in self._open_files(split)[0]}
        return ' and '.join(sorted(names))

    def bytes_per_token(self, split):
        """UTF-8 bytes of text per token, or None if meta.json does not say."""
        entry = self.split_entry(split)
        if self.has_mask() or not entry.get('bytes'):  # the bytes of the replies are not counted
            return None
        return entry['bytes'] / entry['tokens']

    def token_bytes(self, split):
        """tokenizers.token_bytes, or None if meta.json does not have the bytes of a split.
        Raises UserError."""
        if not self.bytes_per_token(split):
            return None
        from plaingpt.data.tokenizers import token_bytes
        return token_bytes(self.tokenizer())

    def identity(self, split):
        """A fingerprint of the tokens of a split, wherever the folder is: the checksums of its
        files, or of samples from them if meta.json has none. The user's own ids are always
        sampled, as they may get their meta.json later."""
        files, masks = self._open_files(split)
        checksums = []
        for file in [*files, *masks]:
            if self.has_own_ids() or not file.sha256:
                checksums.append(file.sampled_sha256())
            else:
                checksums.append(file.sha256)
        return checksums

    def state(self):
        """The fingerprint of the data in a checkpoint: a resumed run must have the same."""
        return {'tokenizer': self.tokenizer_json(), 'data': self.identity('train')}

    def split(self, name, pack='stream'):
        """The token stream of 'train' or 'val'; pack: see TrainConfig. Raises UserError."""
        files, masks = self._open_files(name)
        if not masks and pack == 'stream':
            return TokenStream(files, self.vocab_size)
        from plaingpt.core.packing import ConversationTokens, DocumentTokens  # import torch
        if not masks:
            from plaingpt.data.tokenizers import document_start_of
            stream = DocumentTokens(files, self.vocab_size,
                                    document_start_of(self.tokenizer_json()))
            documents = self.split_entry(name).get('documents', 1)
            if self.is_by_line() and 1 < documents < len(stream.document_starts):
                raise UserError(f'{self.folder}: pack=documents: {documents:,} documents in '
                                f'{len(stream.document_starts):,} lines, which this tokenizer does '
                                'not tell apart: prepare the data with --tokenizer=byte or bpe:N')
            return stream
        tokenizer = None
        if 'template' in self.tokenizer_json():  # a pretrained model's
            tokenizer = self.tokenizer()
        return ConversationTokens(files, masks, self.vocab_size, tokenizer)

    def loader(self, split, *sizes, pack='stream', **options):
        """The loader of a split; sizes and options are BatchLoader's. Raises UserError, also for a
        damaged split unless it is too large to verify."""
        stream = self.split(split, pack)
        if len(stream) <= VERIFIED_TOKENS:
            stream.verify()
        return self._loader_class(pack)(stream, *sizes, **options)

    def _loader_class(self, pack):
        if self.has_mask() or pack == 'documents':
            from plaingpt.core.packing import PackedLoader  # imports torch, which takes seconds
            return PackedLoader
        from plaingpt.core.batches import BatchLoader
        return BatchLoader

    def _open_files(self, split):
        """→ (token files, loss mask files)"""
        if split not in self.opened:
            entries = self.split_entry(split).get('files', [])
            if self.has_checksums():
                advice = self._advice()
                files = [open_tokens(self.folder / file['name'],
                                     parse_dtype(file.get('dtype', self.meta['dtype'])), file,
                                     advice)
                         for file in entries]
            else:
                from plaingpt.data.foreign_files import find_token_files, open_foreign
                files = [open_foreign(path, self.vocab_size)
                         for path in find_token_files(self.folder, split)]
            if not files:
                raise UserError(f'{self.folder}: {split}.bin is missing')
            masks = []
            if self.has_mask():
                masks = [open_tokens(self.folder / mask_name(file['name']), np.dtype('u1'),
                                     {'tokens': file['tokens'], 'sha256': file['mask_sha256']})
                         for file in entries]
            self.opened[split] = files, masks
        return self.opened[split]

    def _advice(self):
        """What to do if a token file is not as meta.json says."""
        source = self.meta['source']
        if not describes_own_files(source):
            return PREPARE_AGAIN
        command = f'{command_for("prepare")} ids {quoted(self.folder)}'
        for option in 'vocab_size', 'end_of_text', 'dtype':
            if option in source:
                command += f' --{option}={quoted(source[option])}'
        return f'restore the file, or run {command} again'


@dataclass(frozen=True)
class Mixture(Dataset):
    """Weighted datasets with the same tokenizer. `folder` is the setting `dataset`."""

    components: list = None

    def bytes_per_token(self, split):
        sizes = [component.dataset.bytes_per_token(split) for component in self.components]
        return None if None in sizes else self.mean(sizes)

    def shares(self):
        """How many of every thousand sequences come from each component."""
        return tuple(round(1000 * component.weight) for component in self.components)

    def identity(self, split):
        return [[share, component.dataset.identity(split)]
                for share, component in zip(self.shares(), self.components, strict=True)]

    def split(self, name, pack='stream'):
        if pack == 'documents':
            raise UserError('pack=documents: a mixture cannot be packed; set --dataset to one '
                            'corpus, or leave out pack')
        from plaingpt.core.mixtures import MixedStream
        streams = [component.dataset.split(name) for component in self.components]
        return MixedStream(streams, self.shares(), self.vocab_size)

    def _loader_class(self, pack):
        from plaingpt.core.mixtures import MixedLoader
        return MixedLoader


def mask_name(name):
    """'train.bin' → 'train_mask.bin'"""
    return name.removesuffix('.bin') + MASK_SUFFIX


# -----------------------------------------------------------------------------
# a folder → a dataset


def dataset_folder(name):
    """The folder of a dataset: data/<name>, or `name` itself if it is a path."""
    return Path('data', name) if Path(name).parts == (name,) else Path(name)


def holds_tokens(folder):
    """Whether a folder has token files or a meta.json."""
    if (folder / 'meta.json').exists() or any(folder.glob('*.bin')):
        return True
    from plaingpt.data.foreign_files import find_token_files
    return any(find_token_files(folder, split) for split in SPLITS)


def describes_own_files(source):
    """Whether a meta.json with this source describes ids that the user wrote to these files, rather
    than what prepare.py made of its input."""
    return source.get('corpus') == 'ids' and 'identity' not in source


def open_dataset(folder, vocab_size=0):
    """Open a folder that prepare.py wrote, or one with foreign token files (foreign_files.py).
    Without meta.json and meta.pkl, the tokens are assumed to be GPT-2's, or with `vocab_size` the
    user's own ids. Raises UserError."""
    folder = Path(folder)
    if (folder / 'meta.json').exists():
        meta = read_meta(folder / 'meta.json')
        return Dataset(folder, meta, meta['vocab_size'])
    if (folder / UNFINISHED).exists():
        raise UserError(f'{folder} is unfinished: run the same prepare.py command again')
    if not holds_tokens(folder):
        raise UserError(not_prepared(folder))
    from plaingpt.data.foreign_files import read_nanogpt_meta
    from plaingpt.data.tokenizers import GPT2Tokenizer, vocab_size_of
    description = {'kind': 'gpt2'}
    if (folder / 'meta.pkl').exists():
        description = read_nanogpt_meta(folder / 'meta.pkl')
    elif vocab_size not in (0, GPT2Tokenizer.vocab_size):
        description = {'kind': 'ids', 'vocab_size': vocab_size}
    meta = {} if description['kind'] == 'gpt2' else {'tokenizer': description}
    return Dataset(folder, meta, vocab_size_of(description))


def not_prepared(folder):
    prepare = command_for('prepare')
    message = f'{folder} is not prepared: run {prepare} text FILES --data_dir={quoted(folder)}'
    if folder.parent == Path('data'):
        message += f', or {prepare} {quoted(folder.name)} if it is a listed corpus'
    return message


def read_meta(path):
    """meta.json → a dict with META_KEYS. Raises UserError."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        meta = read_json(path)
        if meta['format_version'] != FORMAT_VERSION:
            refuse_unknown(path, [f'format_version={meta["format_version"]}'])
        refuse_unknown(path, meta.keys() - META_KEYS)
        if meta.keys() == META_KEYS:
            return meta
    raise UserError(f'{path} is damaged: prepare the data again')


# -----------------------------------------------------------------------------
# the setting `dataset` → the data of a run


def parse_dataset_spec(spec):
    """The setting `dataset`, a name or 'code:0.3,prose:0.7' → {name: weight}. Raises UserError."""
    if not re.search('[:,]', spec) or dataset_folder(spec).exists():
        return {spec: 1.0}
    from plaingpt.core.mixtures import parse_mixture
    return parse_mixture(spec)


def has_token_files(spec):
    """Whether each dataset in the setting `dataset` has token files."""
    return all(holds_tokens(dataset_folder(name)) for name in parse_dataset_spec(spec))


def open_dataset_spec(spec, vocab_size=0):
    """The setting `dataset` → Dataset, or a Mixture if it names several. vocab_size: see
    open_dataset. Raises UserError."""
    components = [Component(name, open_dataset(dataset_folder(name), vocab_size), weight)
                  for name, weight in parse_dataset_spec(spec).items()]
    first = components[0].dataset
    if len(components) == 1:
        return first
    from plaingpt.core.mixtures import check_components
    check_components(components)
    return Mixture(spec, {'tokenizer': first.tokenizer_json()}, first.vocab_size,
                   components=components)


def open_data(config, world):
    """Open the dataset or mixture of a TrainConfig. Small corpora are prepared first if needed.
    Raises UserError, also if dataset files differ between processes: hosts have different files, or
    the dataset was replaced while the processes started."""
    from plaingpt.system.distributed import all_gather, barrier, gloo_group, print0  # with torch
    if world.local_rank == 0:
        for name in parse_dataset_spec(config.dataset):
            prepare_if_small(name)
    barrier()
    dataset = open_dataset_spec(config.dataset, config.vocab_size)
    for _, corpus, _ in dataset.components:
        if not corpus.meta:
            print0(f'{corpus.folder} has no meta.json: assuming GPT-2 tokens; if they are your own '
                   'ids, set --vocab_size=N, or store it once with '
                   f'{command_for("prepare")} ids {quoted(corpus.folder)} --vocab_size=N')
        if not corpus.has_checksums() and corpus.id_dtypes() != 'uint16':
            print0(f'{corpus.folder}: read as {corpus.id_dtypes()}')
    if config.vocab_size not in (0, dataset.vocab_size):
        raise UserError(f'vocab_size={config.vocab_size}: the vocabulary of {dataset.folder} is '
                        f'{dataset.vocab_size}; remove --vocab_size')
    identity = [dataset.identity('train'), dataset.identity('val')]
    if any(other != identity for other in all_gather(identity, gloo_group())):
        raise UserError(f'{dataset.folder}: the dataset files differ between processes; copy '
                        'the same files to all hosts and start again')
    return dataset


def prepare_if_small(name):
    """Run prepare.py on a small corpus that is not prepared. For others it exits with the command
    to run."""
    folder = dataset_folder(name)
    if folder.parts != ('data', name) or holds_tokens(folder) or (folder / UNFINISHED).exists():
        return
    os.environ.setdefault('PLAINGPT_STARTED_AS', sys.argv[0])  # for the commands in its messages
    completed = subprocess.run([sys.executable, ROOT / 'prepare.py', name, '--if_small'])
    if completed.returncode:
        sys.exit(completed.returncode)  # it has printed the error


def describe_batches(config, dataset, train_data, val_data):
    """One line about the data of a run; for packed documents, two more on how each split is packed.
    """
    tokens = sum(loader.epoch_tokens() for loader in train_data.components)
    amounts = []
    if config.check == 'overfit':
        amounts.append(f'the same {config.step_sequences()} sequences in each step')
    if config.minutes:
        minutes = count_of(f'{config.minutes:.3g}', 'minute')
        amounts.append(f'{minutes} (max_iters, lr_decay_iters and eval_interval have no effect; '
                       'warmup takes at most a tenth)')
    elif not amounts:
        amounts = describe_epochs(dataset, train_data, config.max_iters)
    lines = [f'{dataset.folder}: {tokens:,} training tokens, vocabulary {dataset.vocab_size:,} | '
             f'{config.step_tokens():,} tokens per step, {", ".join(amounts)}']
    if dataset.has_mask() or config.pack == 'documents':
        lines += [f'train: {train_data.describe()}', f'val: {val_data.describe()}']
    return '\n'.join(lines)


def describe_epochs(dataset, train_data, iterations):
    """['0.3 epochs'] of a run of this many iterations; ['0.3 epochs of code (30.0%)', …] for a
    mixture."""
    epochs = []
    for component, loader in zip(dataset.components, train_data.components, strict=True):
        tokens = component.weight * train_data.tokens_before(iterations)
        text = count_of(f'{tokens / loader.epoch_tokens():.3g}', 'epoch')
        if component.name:
            text += f' of {component.name} ({component.weight:.1%})'
        epochs.append(text)
    return epochs
