"""Turn text into token files: data/<name>/train.bin, val.bin and meta.json.

    python prepare.py                                list the corpora
    python prepare.py shakespeare_char               prepare one of them
    python prepare.py text notes/ book.txt           your own files
    python prepare.py hf OWNER/NAME                  any dataset of the hub
    python prepare.py chat questions.csv             conversations, to tune a model on
    python prepare.py inspect data/NAME              check what was prepared, and look inside
    python prepare.py datatrove --input=FOLDER       tokens that datatrove made on many machines
    python prepare.py ids FOLDER --vocab_size=N      ids of your own: no other command needs N then

After a kill, the same command goes on after the last finished file of tokens.
"""

import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from configurator import load_config
from plaingpt.data import pretokenized, tokenizers
from plaingpt.data.chat_tokenizer import ChatTokenizer, plain_template
from plaingpt.data.conversations import ConversationReader
from plaingpt.data.corpora import CORPORA, OPTIONS, describe_corpus, table
from plaingpt.data.dataset import dataset_folder, not_prepared
from plaingpt.data.documents import open_source
from plaingpt.data.encoding import VAL_CHARS, write_tokens
from plaingpt.data.inspection import inspect
from plaingpt.data.rows import TextReader
from plaingpt.data.shards import read_progress, write_dataset
from plaingpt.data.text_files import separators_of
from plaingpt.data.token_files import dtype_named
from plaingpt.data.tokenizer_choice import (
    COMPLETE,
    borrow_tokenizer,
    check_round_trip,
    checksum,
    is_dataset,
    is_name,
    learn_tokenizer,
)
from plaingpt.data.tokenizers import is_chat
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import command_for, quoted
from plaingpt.system.machine import allowed_cpus


@dataclass
class PrepareConfig:
    # where from and where to
    input: str = ''  # files, folders and globs, with commas between; hf: a dataset of the hub
    subset: str = ''  # hub: the subset of a dataset
    split: str = ''  # hub: the split to train on (default: train)
    val_split: str = ''  # hub: the split to validate on (default: held out of split)
    data_dir: str = ''  # folder to write (default: data/NAME)
    # what a document is
    documents: Literal['auto', 'file', 'line'] = 'auto'  # auto: a few files are one running text
    text_field: str = ''  # field of a row (default: text or content, or the corpus's)
    prompt: str = ''  # chat: the column with what the user says (default: found by its name)
    completion: str = ''  # chat: the column with what the assistant says
    encoding: str = 'utf-8'  # of all files: latin-1, cp1252, utf-16, or another
    strict: bool = False  # no file or row may be left out (default: 1% that cannot be used)
    # how much
    max_tokens: int | str = 0  # to train on, such as 100M or 1.5B (0: all); then reading ends
    val_fraction: Literal['auto'] | float = 'auto'  # held out (auto: 0.1, up to 1M tokens)
    # ids of your own
    vocab_size: int = 0  # how many there are
    dtype: str = 'auto'  # of ids without a header: uint16, int64, >u2, … (auto: by their bytes)
    # how
    tokenizer: str = 'auto'  # char, byte, gpt2, bpe:SIZE, dataset, run, model (auto: listed)
    shard_tokens: int = 100_000_000  # tokens a file
    num_proc: Literal['auto'] | int = 'auto'  # threads (auto: one a core)
    overwrite: bool = False  # replace what another command prepared in the same folder
    if_small: bool = False  # only if it takes under a minute; else print the command to run

    above_0 = ('val_fraction', 'shard_tokens', 'num_proc')
    at_least_0 = ('vocab_size',)
    below_1 = ('val_fraction',)

    def conflicts(self):
        found = []
        if bool(self.prompt) != bool(self.completion):
            found.append('prompt and completion go together: name both columns')
        try:
            'text'.encode(self.encoding)
        except LookupError as e:
            found.append(f'encoding={self.encoding}: {e}: expected one such as latin-1 or cp1252')
        if self.dtype != 'auto' and not is_integer_type(self.dtype):
            found.append(f'dtype={self.dtype}: expected auto or a type of integers, such as uint16')
        if parse_count(self.max_tokens) is None:
            found.append(f'max_tokens={self.max_tokens}: expected a number, such as 100M or 1.5B')
        return found

    def is_given(self, option):
        return getattr(self, option) != getattr(PrepareConfig, option)


def is_integer_type(name):
    try:
        return dtype_named(name).kind in 'iu'
    except (TypeError, ValueError, SyntaxError):
        return False


def parse_count(text):
    """'1.5B' → 1500000000, '100_000' → 100000, also with k, M and G; None for what is no number."""
    found = re.fullmatch(r'(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([kMGB]?)', str(text), re.IGNORECASE)
    if not found:
        return None
    unit = {'': 1, 'k': 10**3, 'm': 10**6, 'g': 10**9, 'b': 10**9}[found[2].lower()]
    return round(float(found[1]) * unit)


def main(argv):
    help_text = f'{__doc__}\nCorpora, with the tokenizer of each:\n{table()}'
    if not argv:
        print(help_text)
        return
    name, *options = argv
    if name == 'inspect':
        if len(options) != 1:
            raise UserError(f'inspect takes one folder: {command_for("prepare")} inspect data/NAME')
        return inspect(dataset_folder(options[0]))
    if name in ('-h', '--help'):
        load_config(PrepareConfig, argv, help_text, 'input', several=True)
    if name not in CORPORA:
        if '--if_small' in options:  # train.py asks
            raise UserError(not_prepared(dataset_folder(name)))
        own = quoted(name) if Path(name).exists() else 'FILES'
        raise UserError(f'no corpus is called {name!r}: {command_for("prepare")} lists all; for '
                        f'files of your own, {command_for("prepare")} text {own}')
    corpus = CORPORA[name]
    config = load_config(PrepareConfig, options, help_text, 'input', several=corpus.kind != 'hub')
    folder = Path(config.data_dir or f'data/{name}')
    if name == 'ids':
        folder = dataset_folder(config.input)
    if config.if_small and not corpus.small:
        raise UserError(f'{folder} is not prepared: run {command_for("prepare")} {name}')
    check_options(config, name, corpus)
    print(f'preparing {name}: {describe_corpus(corpus)}')
    prepare = {'datatrove': prepare_datatrove, 'ids': prepare_ids}.get(corpus.kind, prepare_text)
    prepare(name, corpus, folder, config)
    if not config.if_small:
        dataset = folder.name if folder.parent == Path('data') else os.path.join('.', folder)
        recipe = corpus.recipe
        if name == 'chat' and not is_name(config.tokenizer) and not is_dataset(config.tokenizer):
            recipe += f' --init_from={quoted(config.tokenizer)}'
        elif name == 'chat' and config.tokenizer not in ('auto', 'gpt2'):
            recipe = CORPORA['text'].recipe  # no model is known that has this tokenizer
            print(f'to tune a run with this tokenizer, OUT_DIR: {command_for("train")} '
                  f'{corpus.recipe} --init_from=OUT_DIR --dataset={quoted(dataset)}')
        print(f'next: {command_for("train")} {recipe} --dataset={quoted(dataset)}')


def check_options(config, name, corpus):
    """Raises UserError for an option that says nothing about a corpus of this kind, and where none
    says where the text is."""
    takes = {*OPTIONS[corpus.kind].split(), 'input', 'if_small'}
    if name != 'ids':  # which stay where they are
        takes |= {'data_dir', 'overwrite'}
    for option in asdict(config):
        if config.is_given(option) and option not in takes:
            raise UserError(f'{option}={getattr(config, option)}: {name} does not take it: leave '
                            'it out')
    if name == 'ids' and not config.vocab_size:
        raise UserError('vocab_size is missing: say how many ids there are: '
                        f'{command_for("prepare")} ids FOLDER --vocab_size=N')
    if not (config.input or corpus.files or corpus.url or corpus.hub):
        raise UserError(f'{name} takes {corpus.about}')


def prepare_text(name, corpus, folder, config):
    """Source → tokenizer → tokens → report. Raises UserError."""
    asked = corpus.tokenizer if config.tokenizer == 'auto' else config.tokenizer
    is_of_chat = corpus.kind == 'chat'
    borrowed = None if is_name(asked) else borrow_tokenizer(asked, is_of_chat)
    if is_of_chat:
        reader = ConversationReader((config.prompt, config.completion) if config.prompt else ())
    else:
        reader = TextReader(config.text_field or corpus.text_field, separators_of(borrowed))
    source = open_source(name, corpus, config, folder, reader)
    if source.total == 0:
        raise UserError(f'{source.name}: there is no text in it')
    plain = source.as_plain_text() if is_of_chat else source
    if asked == 'char' and source.unit != 'B':
        raise UserError(f'{name} is too large for --tokenizer=char: use gpt2, byte or bpe:32768')
    max_tokens = parse_count(config.max_tokens)
    if max_tokens and source.is_one_text:
        raise UserError(f'max_tokens: {source.name} is one running text and has no documents: say '
                        'what a document is with --documents=file or line')
    command = describe_command(name, config, borrowed, identity=source.identity())
    held_out = config.val_fraction, math.inf
    if config.val_fraction == 'auto':
        held_out = 0.1, VAL_CHARS

    def write(unfinished):
        progress = read_progress(unfinished, command)
        if borrowed and not progress:
            check_round_trip(borrowed, plain)
        tokenizer = tokenizers.from_json(progress['tokenizer']) if progress else \
            borrowed or learn_tokenizer(asked, plain)
        if is_of_chat and not is_chat(tokenizer):
            tokenizer = ChatTokenizer(tokenizer, plain_template(tokenizer))
        threads = len(allowed_cpus()) if config.num_proc == 'auto' else config.num_proc
        write_tokens(source, tokenizer, unfinished, command, progress, held_out,
                     shard_tokens=config.shard_tokens, threads=threads, max_tokens=max_tokens)

    write_dataset(folder, command, config.overwrite, write)


def prepare_datatrove(name, corpus, folder, config):
    """Tokens that datatrove made → report. Raises UserError."""
    found = pretokenized.find_datatrove(config.input)
    if is_name(config.tokenizer) and config.tokenizer not in COMPLETE:
        raise UserError('datatrove needs --tokenizer: the dataset or run that has the tokenizer of '
                        'these tokens, or gpt2 or byte')
    tokenizer = borrow_tokenizer(config.tokenizer)
    sizes = [[path.name, path.stat().st_size] for path, *_ in found]
    command = describe_command(name, config, tokenizer, identity=sizes)
    share = 0.01 if config.val_fraction == 'auto' else config.val_fraction
    write_dataset(folder, command, config.overwrite, lambda unfinished:
                  pretokenized.link_datatrove(found, tokenizer, unfinished, command, share))


def prepare_ids(name, corpus, folder, config):
    """Ids of someone's own → meta.json beside them. Raises UserError."""
    dtype = None if config.dtype == 'auto' else dtype_named(config.dtype)
    pretokenized.describe_ids(folder, config.vocab_size, dtype, describe_command(name, config))


def describe_command(name, config, tokenizer=None, **content):
    """Everything that decides the content of the files, which meta.json keeps as `source`.
    tokenizer: one that was borrowed, because its owner may be prepared again with another one"""
    given = {option: value for option, value in asdict(config).items() if config.is_given(option)
             and option not in ('data_dir', 'num_proc', 'overwrite', 'if_small', 'strict')}
    if tokenizer:
        content['tokenizer_sha256'] = checksum(tokenizer)
    return {'corpus': name, 'input': name, **given, **content}


if __name__ == '__main__':
    run_script(main)
