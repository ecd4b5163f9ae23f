"""Turn text into token files: data/<name>/train.bin, val.bin and meta.json.

    python prepare.py                                list the corpora
    python prepare.py shakespeare_char               prepare one of them
    python prepare.py text --input=notes/            your own files
    python prepare.py hf --path=OWNER/NAME           any dataset of the hub
    python prepare.py inspect data/NAME              check what was prepared, and look inside

A command that was killed goes on from where it was when it is given again.
"""

import difflib
import hashlib
import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from configurator import load_config
from plaingpt.corpus import tokenizers
from plaingpt.corpus.corpora import CORPORA, describe, table
from plaingpt.corpus.dataset import check_files, folder_of, open_dataset
from plaingpt.corpus.encoding import check_disk, write_shards
from plaingpt.corpus.pretokenized import fetch_shards
from plaingpt.corpus.shards import clear_disk_errors, lock_dataset_dir, publish, read_journal
from plaingpt.corpus.sources import open_source
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import write_json


@dataclass
class PrepareConfig:
    # where from and where to
    input: str = ''  # files, folders and globs, with commas between, instead of downloading
    path: str = ''  # hf: a dataset of the hub, or a folder laid out like one
    subset: str = ''  # of a dataset of the hub
    split: str = ''  # of a dataset of the hub, to train on (default: train)
    val_split: str = ''  # of a dataset of the hub, to validate on (default: held out of split)
    data_dir: str = ''  # folder to write (default: data/NAME)
    # what a document is
    documents: Literal['auto', 'file', 'line', 'paragraph', 'title'] = 'auto'  # title: WikiText's
    text_field: str = 'text'  # of .jsonl, .parquet and the hub
    errors: Literal['strict', 'replace'] = 'strict'  # no UTF-8: stop (byte keeps it), or put U+FFFD
    # how
    tokenizer: str = 'auto'  # char, byte, gpt2, bpe:VOCAB_SIZE or a prepared dataset (auto: listed)
    val_fraction: Literal['auto'] | float = 'auto'  # held out (auto: 0.1 small, 0.0005 hub)
    shard_tokens: int = 100_000_000  # tokens a file
    max_shards: int = 0  # of tokens that are downloaded as such (0: all)
    num_proc: Literal['auto'] | int = 'auto'  # encoding threads (auto: one a core)
    if_small: bool = False  # only if it takes under a minute; else say which command to run

    def problems(self):
        found = []
        if self.val_fraction != 'auto' and not 0 < self.val_fraction < 1:
            found.append(f'val_fraction={self.val_fraction}: expected a number between 0 and 1')
        if self.tokenizer != 'auto' and not tokenizers.is_name(self.tokenizer) \
                and not (dataset_folder(self.tokenizer) / 'meta.json').exists():
            found.append(f'tokenizer={self.tokenizer}: expected auto, {tokenizers.NAMES}, or a '
                         'prepared dataset to take it from')
        for name, least in (('shard_tokens', 1), ('max_shards', 0)):
            if getattr(self, name) < least:
                found.append(f'{name}={getattr(self, name)}: expected {least} or more')
        if self.num_proc != 'auto' and self.num_proc < 1:
            found.append(f'num_proc={self.num_proc}: expected 1 or more')
        return found


def dataset_folder(name):
    """A prepared dataset by its name or its folder."""
    return Path(name) if Path(name, 'meta.json').exists() else folder_of(name)


# -----------------------------------------------------------------------------
# pieces of text → those of each split


# -----------------------------------------------------------------------------
# text → tokens, in parallel and in order


# -----------------------------------------------------------------------------
# tokens → files


# -----------------------------------------------------------------------------
# the tokenizer


BPE_SAMPLE = 50_000_000  # characters that a bpe tokenizer is trained on, at most


def choose_tokenizer(kind, source):
    """By name, trained on `source` where it learns; or that of a prepared dataset. UserError."""
    if not tokenizers.is_name(kind):
        return open_dataset(dataset_folder(kind)).tokenizer()
    if kind.startswith('bpe'):
        print(f'training the {kind} tokenizer'
              + ('' if source.unit == 'B' and source.total <= BPE_SAMPLE else
                 f' on the first {BPE_SAMPLE // 10**6} MB of text'))
    with closing(source.pieces()) as pieces:
        return tokenizers.make_tokenizer(kind, sample(pieces) if kind.startswith('bpe') else
                                         (piece.text for piece in pieces))


def sample(pieces):
    """The first BPE_SAMPLE characters."""
    characters = 0
    for piece in pieces:
        yield piece.text
        characters += len(piece.text)
        if characters >= BPE_SAMPLE:
            return


def default_val_fraction(source):
    if source.unit != 'B':
        return 0.0005
    return 0.1 if source.total <= 100_000_000 else 0.01


# -----------------------------------------------------------------------------
# what came out


def report(folder, meta):
    """Counts, and how each split begins."""
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    for split, about in meta['splits'].items():
        names = [file['name'] for file in about['files']]
        text = '' if 'documents' not in about else (
            f', {about["bytes"] / about["tokens"]:.2f} bytes each, from {about["documents"]:,} '
            f'document{"s" if about["documents"] != 1 else ""}')
        print(f'{folder}/{names[0]}{f" to {names[-1]}" if len(names) > 1 else ""}: '
              f'{about["tokens"]:,} tokens{text}')
        print(f'    {first_sequence(dataset.split(split), tokenizer)}')
        if about['tokens'] < 1025:
            print(f'    note: that allows a block_size of {about["tokens"] - 1} at most')
    print(f'{folder}/meta.json: {meta["tokenizer"]["kind"]} tokenizer, {meta["vocab_size"]:,} '
          f'tokens, {meta["dtype"]}')


def first_sequence(stream, tokenizer):
    text = tokenizer.decode(stream.sequences(np.array([0]), min(24, len(stream)))[0].tolist())
    return repr(text)


def inspect(folder):
    """Print what a prepared folder holds and read all of it. Raises UserError for damage."""
    dataset = open_dataset(folder)
    tokenizer = dataset.tokenizer()
    print(f'{folder}: {tokenizer.to_json()["kind"]} tokenizer, {dataset.vocab_size:,} tokens')
    for key, value in dataset.meta.get('source', {}).items():
        if value:
            print(f'  {key}: {value}')
    problems = check_files(dataset)
    for split in ('train', 'val'):
        try:
            stream = dataset.split(split)
        except UserError as problem:
            problems.append(str(problem))
            continue
        documents, bad = count_documents(stream, tokenizer.end_of_text, problems)
        about = dataset.meta.get('splits', {}).get(split, {})
        per_token = dataset.bytes_per_token(split)
        print(f'{split}: {len(stream):,} tokens in {len(stream.files)} '
              f'file{"s" if len(stream.files) > 1 else ""}'
              + (f', {per_token:.2f} bytes each' if per_token else '')
              + (f', {documents:,} ends of text' if documents else ', no end of text'))
        said = about.get('documents', 0)
        if documents and said and documents != said:
            problems.append(f'{folder}: {split} has {documents:,} ends of text where meta.json '
                            f'says {said:,} documents: prepare the data again')
        for where in ([] if bad else range(0, len(stream), -(-len(stream) // 3))):
            length = min(24, len(stream) - where)
            ids = stream.sequences(np.array([where]), length)[0].tolist()
            print(f'  {where:>14,}  {tokenizer.decode(ids)!r}')
    if problems:
        raise UserError('\n'.join(dict.fromkeys(problems)))
    print('no damage found' if dataset.meta else 'no damage found; no checksums to compare with')


def count_documents(stream, end_of_text, problems):
    """(end-of-text tokens, whether an id is out of range) of a split, read once."""
    documents, bad = 0, False
    for file in stream.files:
        for start in range(0, file.tokens, 2**22):
            ids = file.read(start, 2**22)
            if end_of_text is not None:
                documents += int(np.count_nonzero(ids == end_of_text))
            wrong = np.flatnonzero(ids >= stream.vocab_size)
            if len(wrong) and not bad:
                bad = True
                problems.append(f'{file.path}: token {start + int(wrong[0]):,} has id '
                                f'{ids[wrong[0]]}, but the vocabulary ends at '
                                f'{stream.vocab_size - 1}: prepare the data again')
    return documents, bad


# -----------------------------------------------------------------------------


def main(argv):
    help_text = f'{__doc__}\nCorpora, with the tokenizer of each:\n{table()}'
    if not argv:
        print(help_text)
        return
    name, *options = argv
    if name == 'inspect':
        if len(options) != 1:
            raise UserError('inspect takes one folder: python prepare.py inspect data/NAME')
        inspect(dataset_folder(options[0]))
        return
    if name in ('-h', '--help'):
        load_config(PrepareConfig, argv, help_text)
    if name not in CORPORA:
        nearest = difflib.get_close_matches(name, CORPORA, n=1)
        raise UserError(f'unknown corpus {name!r}: '
                        + (f'did you mean {nearest[0]}? ' if nearest else '')
                        + 'python prepare.py lists all, and text --input=… reads your own')
    config = load_config(PrepareConfig, options, help_text)
    corpus = CORPORA[name]
    folder = Path(config.data_dir or f'data/{name}')
    if config.if_small and not corpus.small:
        raise UserError(f'{folder} is not prepared: run python prepare.py {name}'
                        + {'text': ' --input=FILES_OR_FOLDERS', 'hf': ' --path=…'}.get(name, ''))
    print(f'preparing {name}: {describe(corpus)}')
    prepare(name, corpus, folder, config)


def prepare(name, corpus, folder, config):
    """The whole way from a command line to a folder with a meta.json. Raises UserError."""
    if corpus.shards:
        command = {'corpus': name, 'input': config.input, 'max_shards': config.max_shards,
                   'files': [[path.name, path.stat().st_size]
                             for path in sorted(Path(config.input).glob('*.bin'))]
                   if config.input else []}
        with clear_disk_errors(folder), lock_dataset_dir(folder) as unfinished:
            if not already(folder, command):
                fetch_shards(corpus, unfinished, command)
                report(folder, publish(folder))
        return
    kind = corpus.tokenizer if config.tokenizer == 'auto' else config.tokenizer
    borrowed = None if tokenizers.is_name(kind) else \
        open_dataset(dataset_folder(kind)).tokenizer_json()
    errors = config.errors
    if errors == 'strict' and (borrowed['kind'] if borrowed else kind) == 'byte':
        errors = 'surrogateescape'
    source = open_source(name, config, errors)
    if source.unit != 'B' and kind == 'char':
        raise UserError(f'{name} is too large for --tokenizer=char: use gpt2, byte or bpe:32768')
    val_fraction = default_val_fraction(source) if config.val_fraction == 'auto' \
        else config.val_fraction
    command = {'corpus': name, 'input': config.input or config.path or name,
               'val_fraction': val_fraction, 'shard_tokens': config.shard_tokens,
               'tokenizer': kind, 'documents': config.documents, 'errors': config.errors,
               'subset': config.subset or corpus.subset, 'split': config.split,
               'val_split': config.val_split, 'text_field': config.text_field,
               'identity': source.identity()}
    if borrowed:  # another one, once that dataset is prepared anew
        command['tokenizer_sha256'] = \
            hashlib.sha256(json.dumps(borrowed).encode()).hexdigest()
    if source.running:
        with closing(source.pieces()) as pieces:
            characters = sum(len(piece.text) for piece in pieces)
        command['train_characters'] = int(characters * (1 - val_fraction))
    with clear_disk_errors(folder), lock_dataset_dir(folder) as unfinished:
        if already(folder, command):
            return
        if not ended_by(unfinished, command):
            journal = read_journal(unfinished, command)
            tokenizer = tokenizers.from_json(journal['tokenizer']) if journal \
                else choose_tokenizer(kind, source)
            written = sum(path.stat().st_size for path in unfinished.glob('*.bin'))
            check_disk(folder, corpus, source, kind, written)
            num_proc = config.num_proc if config.num_proc != 'auto' else cores()
            meta = write_shards(unfinished, source, command, tokenizer, journal, num_proc)
            write_json(unfinished / 'meta.json', meta)
        report(folder, publish(folder))


def ended_by(unfinished, command):
    """True where all was written by `command`, and only the last step is missing."""
    try:
        meta = json.loads((unfinished / 'meta.json').read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(meta, dict) and meta.get('source') == command


def already(folder, command):
    """True, and said so, where `command` wrote what is there, unharmed."""
    try:
        dataset = open_dataset(folder)
        if dataset.meta.get('source') != command or check_files(dataset):
            return False
    except UserError:
        return False
    print(f'{folder} is already prepared by this command, and its checksums are right')
    return True


def cores():
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


if __name__ == '__main__':
    run_script(main)
