"""A dataset: data/<name>/ with token files and meta.json, or with token files of others. The
setting `dataset` names one, or several as a mixture (mixtures.py)."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plaingpt.data import tokenizers
from plaingpt.data.foreign_files import find_token_files, open_foreign, read_nanogpt_meta
from plaingpt.data.token_files import TokenStream, dtype_named, name_of, open_tokens
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, read_json, refuse_unknown
from plaingpt.system.formatting import command_for, quoted

FORMAT_VERSION = 1
META_KEYS = {'format_version', 'dtype', 'vocab_size', 'tokenizer', 'splits', 'source'}
SPLITS = ('train', 'val')
MASK_ENDING = '_mask.bin'  # of the file that says which tokens of NAME.bin count in the loss
TOKEN_FILES = re.compile(r'(train|val)(_\d{6})?(_mask)?\.bin')
VERIFIED_TOKENS = 2**27  # a larger split is not read whole before a run: it would take a second
QUESTIONS = 3  # of the validation split, for samples of a tuned model
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

    def is_ours(self):
        """Whether prepare.py wrote the folder, so that meta.json has its checksums."""
        return 'splits' in self.meta

    def has_own_ids(self):
        """Whether its tokens are someone's own ids, which stand for no text."""
        return self.tokenizer_json()['kind'] == 'ids'

    def id_types(self):
        """The types of its ids: 'uint16', or 'train int64, val uint16' where splits differ."""
        types = {split: ' and '.join(sorted({name_of(file.dtype) for file in self._open(split)[0]}))
                 for split in SPLITS}
        if len(set(types.values())) == 1:
            return types['train']
        return ', '.join(f'{split} {name}' for split, name in types.items())

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
        samples from them where meta.json has none. Own ids may get their meta.json later."""
        files, masks = self._open(split)
        return [file.sampled_sha256() if self.has_own_ids() or not file.sha256 else file.sha256
                for file in [*files, *masks]]

    def state(self):
        """What a checkpoint keeps of the data, so that a resumed run has the same."""
        return {'tokenizer': self.tokenizer_json(), 'data': self.identity('train')}

    def split(self, name):
        """The token stream of 'train' or 'val'. Raises UserError."""
        files, masks = self._open(name)
        if masks:
            from plaingpt.data.packing import ConversationTokens  # with torch
            of_others = 'template' in self.tokenizer_json()
            return ConversationTokens(files, masks, self.vocab_size,
                                      self.tokenizer() if of_others else None)
        return TokenStream(files, self.vocab_size)

    def loader(self, split, *shape, **settings):
        """The loader of a split; shape and settings are those of BatchLoader. Raises UserError,
        also where a split that is small is damaged."""
        stream = self.split(split)
        if len(stream) <= VERIFIED_TOKENS:
            stream.verify()
        return self._loader_class()(stream, *shape, **settings)

    def _loader_class(self):
        if self.has_mask():
            from plaingpt.data.packing import PackedLoader  # with torch: it takes seconds
            return PackedLoader
        from plaingpt.data.batches import BatchLoader
        return BatchLoader

    def _open(self, split):
        """→ (files, files of their loss masks)"""
        if split not in self.opened:
            entries = self.split_entry(split).get('files', [])
            if self.is_ours():
                files = [open_tokens(self.folder / file['name'],
                                     dtype_named(file.get('dtype', self.meta['dtype'])),
                                     file['tokens'], file['sha256'], file.get('offset'))
                         for file in entries]
            else:
                files = [open_foreign(path, self.vocab_size)
                         for path in find_token_files(self.folder, split)]
            if not files:
                raise UserError(f'{self.folder}: no {split}.bin there')
            masks = [open_tokens(self.folder / mask_name(file['name']), np.dtype('u1'),
                                 file['tokens'], file['mask_sha256'])
                     for file in entries if self.has_mask()]
            self.opened[split] = files, masks
        return self.opened[split]


@dataclass(frozen=True)
class Mixture(Dataset):
    """Datasets of one tokenizer, read by their shares. `folder` is what the setting says."""

    parts: list = None  # Part

    def bytes_per_token(self, split):
        sizes = [part.dataset.bytes_per_token(split) for part in self.parts]
        return None if None in sizes else self.mean(sizes)

    def shares(self):
        """How many of every thousand sequences each part has."""
        return tuple(round(1000 * part.weight) for part in self.parts)

    def identity(self, split):
        return [[share, part.dataset.identity(split)]
                for share, part in zip(self.shares(), self.parts, strict=True)]

    def split(self, name):
        from plaingpt.data.mixtures import MixedStream
        return MixedStream([part.dataset.split(name) for part in self.parts], self.shares(),
                           self.vocab_size)

    def _loader_class(self):
        from plaingpt.data.mixtures import MixedLoader
        return MixedLoader


def mask_name(name):
    """'train.bin' → 'train_mask.bin'"""
    return name.removesuffix('.bin') + MASK_ENDING


# -----------------------------------------------------------------------------
# a folder → a dataset


def dataset_folder(name):
    """The folder of a dataset: data/<name>, or the path itself where it is one."""
    return Path('data', name) if Path(name).parts == (name,) else Path(name)


def holds_tokens(folder):
    """Whether a folder has token files, or a meta.json that lists them."""
    return (folder / 'meta.json').exists() or any(folder.glob('*.bin')) \
        or any(find_token_files(folder, split) for split in SPLITS)


def open_dataset(folder, vocab_size=0):
    """Open a folder that prepare.py wrote, or one with token files of others (foreign_files.py).
    Without meta.json and meta.pkl its tokens are GPT-2's, or with `vocab_size` someone's own ids.
    Raises UserError."""
    folder = Path(folder)
    if (folder / 'meta.json').exists():
        meta = read_meta(folder / 'meta.json')
        return Dataset(folder, meta, meta['vocab_size'])
    if (folder / UNFINISHED).exists():
        raise UserError(f'{folder} is not finished: run the prepare.py command that wrote it again')
    if not holds_tokens(folder):
        raise UserError(not_prepared(folder))
    description = {'kind': 'gpt2'}
    if (folder / 'meta.pkl').exists():
        description = read_nanogpt_meta(folder / 'meta.pkl')
    elif vocab_size not in (0, tokenizers.GPT2Tokenizer.vocab_size):
        description = {'kind': 'ids', 'vocab_size': vocab_size}
    meta = {} if description['kind'] == 'gpt2' else {'tokenizer': description}
    return Dataset(folder, meta, tokenizers.described_vocab_size(description))


def not_prepared(folder):
    prepare = command_for('prepare')
    line = f'{folder} is not prepared: {prepare} text FILES --data_dir={quoted(folder)}'
    if folder.parent == Path('data'):
        line += f', or {prepare} {quoted(folder.name)} where that is a corpus it lists'
    return line


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


def read_names(text):
    """The setting `dataset`, a name or 'code:0.3,prose:0.7' → {name: weight}. Raises UserError."""
    if not re.search('[:,]', text) or dataset_folder(text).exists():
        return {text: 1.0}
    from plaingpt.data.mixtures import read_mixture
    return read_mixture(text)


def has_token_files(text):
    """Whether there are token files of all that `dataset` says."""
    return all(holds_tokens(dataset_folder(name)) for name in read_names(text))


def open_named(text, vocab_size=0):
    """What the setting `dataset` says → Dataset, a Mixture where it names several. vocab_size: as
    of open_dataset. Raises UserError."""
    weights = read_names(text)
    parts = [Part(name, open_dataset(dataset_folder(name), vocab_size), weight)
             for name, weight in weights.items()]
    if len(parts) == 1:
        return parts[0].dataset
    from plaingpt.data.mixtures import check_parts
    check_parts(parts)
    first = parts[0].dataset
    return Mixture(text, {'tokenizer': first.tokenizer_json()}, first.vocab_size, parts=parts)


def open_data(config, world):
    """Open data/<name>, or each corpus of a mixture, for a TrainConfig. A small corpus that is not
    prepared yet is prepared now. Raises UserError, also where processes find different tokens:
    hosts have other files, or the dataset was replaced while the processes started."""
    from plaingpt.system.distributed import all_gather, barrier, gloo_group, print0  # with torch
    if world.local_rank == 0:
        for name in read_names(config.dataset):
            prepare_small(name)
    barrier()
    dataset = open_named(config.dataset, config.vocab_size)
    for _, each, _ in dataset.parts:
        if not each.meta:
            print0(f'{each.folder} has no meta.json: its files are taken for GPT-2 tokens; if they '
                   'are ids of your own, say how many there are with --vocab_size=N, or once for '
                   f'all commands: {command_for("prepare")} ids {quoted(each.folder)} '
                   '--vocab_size=N')
        if not each.is_ours() and each.id_types() != 'uint16':
            print0(f'{each.folder}: read as {each.id_types()}')
    if config.vocab_size not in (0, dataset.vocab_size):
        raise UserError(f'vocab_size={config.vocab_size}: {dataset.folder} has '
                        f'{dataset.vocab_size} tokens; leave it at 0')
    known = [dataset.identity('train'), dataset.identity('val')]
    if any(other != known for other in all_gather(known, gloo_group())):
        raise UserError(f'{dataset.folder}: the processes of this run find different tokens there: '
                        'give all hosts the same files, and start again')
    return dataset


def prepare_small(name):
    """Run prepare.py where there is nothing of a name yet: it prepares small corpora alone."""
    folder = dataset_folder(name)
    if folder.parts != ('data', name) or holds_tokens(folder) or (folder / UNFINISHED).exists():
        return
    os.environ.setdefault('PLAINGPT_STARTED_AS', sys.argv[0])  # for the commands in its hints
    done = subprocess.run([sys.executable, ROOT / 'prepare.py', name, '--if_small'])
    if done.returncode:
        sys.exit(done.returncode)  # it has said why


def describe_batches(config, dataset, train_data, val_data):
    """What a run reads with these loaders, as one line; of conversations two more lines say how
    each split is packed."""
    step_tokens = config.step_tokens()
    epochs = [f'{config.minutes:.3g} minutes'] if config.minutes else [
        f'{part.weight * config.max_iters * step_tokens / loader.epoch_tokens():.3g} epochs'
        + (f' of {part.name} ({part.weight:.1%})' if part.name else '')
        for part, loader in zip(dataset.parts, train_data.parts, strict=True)]
    lines = [f'{dataset.folder}: {train_data.epoch_tokens():,} training tokens, vocabulary '
             f'{dataset.vocab_size:,} | {step_tokens:,} tokens a step, {", ".join(epochs)}']
    if dataset.has_mask():
        lines += [f'train: {train_data.describe()}', f'val: {val_data.describe()}']
    return '\n'.join(lines)


def sample_prompts(dataset, val_loader):
    """What samples of a run continue: a new line, or questions of conversations that leave room for
    an answer → (prompts as ids, options of GPT.generate, the id that ends an answer or None).
    Raises UserError."""
    tokenizer = dataset.tokenizer()
    if not dataset.has_mask():
        prompt = tokenizer.encode('\n').tolist() or [tokenizer.end_of_text or 0]
        return [prompt], {'temperature': 0.8, 'top_k': 200}, None
    prompts = val_loader.questions(QUESTIONS)
    if not prompts:
        raise UserError('no question of the validation split has room for an answer')
    return prompts, {'temperature': 0}, tokenizer.end_of_turn
