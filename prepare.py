"""Tokenize text: data/<name>/train.bin, val.bin and meta.json.

    python prepare.py                                list the corpora
    python prepare.py shakespeare_char               prepare one of them
    python prepare.py text notes/ book.txt           your own files
    python prepare.py hf OWNER/NAME                  any dataset on the Hugging Face Hub
    python prepare.py chat questions.csv             conversations, for fine-tuning
    python prepare.py inspect data/NAME              verify a prepared dataset and show samples
    python prepare.py inspect data/A data/B          overlap of their validation and training text
    python prepare.py datatrove --input=FOLDER       tokens from datatrove's DocumentTokenizer
    python prepare.py ids FOLDER --vocab_size=N      your own token ids

If interrupted, run the same command again: it resumes after the last complete shard.
"""

import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from configurator import load_config
from plaingpt.core.dataset import (
    dataset_folder,
    has_token_files,
    holds_tokens,
    not_prepared,
    open_dataset,
    open_dataset_spec,
    parse_dataset_spec,
)
from plaingpt.core.token_files import parse_dtype
from plaingpt.data import pretokenized, tokenizers
from plaingpt.data.chat_tokenizer import ChatTokenizer, plain_template
from plaingpt.data.conversations import ConversationReader
from plaingpt.data.corpora import CORPORA, OPTIONS, corpus_table, describe_corpus
from plaingpt.data.documents import open_source
from plaingpt.data.encoding import EncodingOptions, write_tokens
from plaingpt.data.input_files import search
from plaingpt.data.inspection import compare_datasets, inspect
from plaingpt.data.rows import IdsReader, TextReader, file_format
from plaingpt.data.shards import write_dataset
from plaingpt.data.splits import VAL_CHARS
from plaingpt.data.text_files import Separators, separators_for
from plaingpt.data.tokenizer_choice import (
    UNTRAINED,
    check_round_trip,
    checksum,
    is_dataset,
    is_tokenizer_name,
    load_tokenizer,
    train_tokenizer,
)
from plaingpt.data.tokenizers import is_chat
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import command_for, quoted, shown
from plaingpt.system.machine import allowed_cpus


@dataclass
class PrepareConfig:
    # input and output
    input: str | list = ''  # files, folders and globs, separated by commas; hf: OWNER/NAME
    subset: str = ''  # Hub datasets: name of the subset
    split: str = ''  # Hub datasets: training split (default: train)
    val_split: str = ''  # Hub datasets: validation split (default: held out from split)
    data_dir: str = ''  # output folder (default: data/NAME)
    # documents
    documents: Literal['auto', 'file', 'line', 'paragraph'] = 'auto'  # what counts as one document
    separators: bool = True  # <|endoftext|> and <|startoftext|> separate documents
    text_field: str = ''  # field with the text or ids, or number of a column without a name
    prompt: str = ''  # chat: column with the user's message, or its number
    completion: str = ''  # chat: column with the assistant's reply
    encoding: str = 'utf-8'  # text encoding of all files, e.g. latin-1, cp1252 or utf-16
    strict: bool = False  # fail on any unusable file or row (default: skip up to 1%)
    # size
    max_tokens: int | str = 0  # training tokens, e.g. 100M or 1.5B (0: all)
    val_fraction: Literal['auto'] | float = 'auto'  # validation share (auto: 0.1, at most 4M chars)
    # your own ids
    vocab_size: int = 0  # vocabulary size of the ids
    end_of_text: Literal['none'] | int = 'none'  # the id that separates documents
    dtype: str = 'auto'  # dtype of files without a header: int64, >u2, … (auto: uint16)
    # encoding
    tokenizer: str = 'auto'  # char, byte, gpt2, bpe:SIZE, or that of a dataset, run or model
    shard_tokens: int = 100_000_000  # tokens per file
    num_proc: Literal['auto'] | int = 'auto'  # threads (auto: one per core)
    overwrite: bool = False  # replace a dataset that another command prepared in this folder
    if_small: bool = False  # prepare only small corpora; otherwise print the command to run

    above_0 = ('val_fraction', 'shard_tokens', 'num_proc')
    at_least_0 = ('vocab_size', 'end_of_text')
    below_1 = ('val_fraction',)

    def conflicts(self):
        problems = []
        if bool(self.prompt) != bool(self.completion):
            problems.append('set both --prompt and --completion, or neither')
        try:
            'text'.encode(self.encoding)
        except LookupError as e:
            problems.append(f'encoding={self.encoding}: {e}; try latin-1 or cp1252')
        if self.vocab_size and self.end_of_text != 'none' \
                and self.vocab_size <= self.end_of_text:
            problems.append(f'end_of_text={self.end_of_text}: expected an id below vocab_size')
        if self.dtype != 'auto' and not is_integer_dtype(self.dtype):
            problems.append(f'dtype={self.dtype}: expected auto or an integer dtype such as uint16')
        if parse_count(self.max_tokens) is None:
            problems.append(f'max_tokens={self.max_tokens}: expected a number such as 100M or 1.5B')
        return problems

    def inputs(self):
        """The files, folders and globs. Commas separate them in --input, if it is not a path; other
        arguments are taken as they are."""
        names = self.input
        if isinstance(names, str):
            names = [names] if os.path.lexists(names) else map(str.strip, names.split(','))
        return [Path(name).as_posix() for name in names if name]  # './a//b/' is 'a/b'

    def is_set(self, option):
        return getattr(self, option) != getattr(PrepareConfig, option)


def is_integer_dtype(name):
    try:
        return parse_dtype(name).kind in 'iu'
    except (TypeError, ValueError, SyntaxError):
        return False


def parse_count(text):
    """'1.5B' → 1500000000, '100_000' → 100000; suffixes k, M, G and B. None if not a number."""
    match = re.fullmatch(r'(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([kMGB]?)', str(text), re.IGNORECASE)
    if not match:
        return None
    unit = {'': 1, 'k': 10**3, 'm': 10**6, 'g': 10**9, 'b': 10**9}[match[2].lower()]
    return round(float(match[1]) * unit)


def main(argv):
    help_text = f'{__doc__}\nCorpora and their default tokenizers:\n{corpus_table()}'
    if not argv:
        print(help_text)
        return
    name, *options = argv
    if name in ('-h', '--help') or (name == 'inspect' and {'-h', '--help'} & {*options}):
        load_config(PrepareConfig, ['--help'], help_text, 'input', several=True)
    if name == 'inspect':
        return inspect_folders(options)
    if name not in CORPORA:
        if '--if_small' in options:  # from train.py
            raise UserError(not_prepared(dataset_folder(name)))
        files = quoted(name) if Path(name).exists() else 'FILES'
        raise UserError(f'unknown corpus {name!r}: {command_for("prepare")} lists all corpora; for '
                        f'your own files, run {command_for("prepare")} text {files}')
    corpus = CORPORA[name]
    config = load_config(PrepareConfig, options, help_text, 'input',
                         several=corpus.kind not in ('hub', 'datatrove'))
    folder = Path(config.data_dir or f'data/{name}')
    if corpus.kind == 'ids':
        if holds_rows(config.inputs()):
            corpus = replace(corpus, kind='rows of ids')
        else:  # ids are described in place
            folder = ids_folder(*config.inputs())
    if config.if_small and not corpus.small:
        raise UserError(f'{folder} is not prepared: run {command_for("prepare")} {name}')
    check_options(config, name, corpus)
    inputs = shown(', '.join(config.inputs())[:100])
    print(f'preparing {name} from {inputs}' if inputs
          else f'preparing {name}: {describe_corpus(corpus)}')
    if corpus.kind == 'datatrove':
        prepare_datatrove(name, folder, config)
    elif corpus.kind == 'ids':
        prepare_ids(name, folder, config)
    else:
        prepare_text(name, corpus, folder, config)
    if not config.if_small:
        print_next_command(name, corpus, folder, config.tokenizer)


def inspect_folders(names):
    if not names or any(name.startswith('-') for name in names):
        command = f'{command_for("prepare")} inspect'
        raise UserError(f'inspect takes one folder, or several to compare: {command} data/NAME, '
                        f'or {command} data/A data/B')
    folders = [dataset_folder(name) for name in names]
    if len(folders) == 1:
        inspect(*folders)
    else:
        compare_datasets(folders)


def print_next_command(name, corpus, folder, tokenizer):
    """Print the command that trains on the dataset."""
    dataset = folder.name if folder.parent == Path('data') else os.path.join('.', folder)
    recipe = corpus.recipe
    if corpus.gpu_recipe:
        import torch  # takes a second
        recipe = corpus.gpu_recipe if torch.cuda.is_available() else corpus.recipe
    if not is_tokenizer_name(tokenizer) and not is_dataset(tokenizer):  # fine-tune its model
        if name != 'chat':
            kind = open_dataset(folder).tokenizer_json()['kind']
            is_pretrained = kind in ('gpt2', 'foreign')
            recipe = CORPORA['shakespeare'].recipe  # with a small learning rate
            if not is_pretrained:
                recipe = 'config/own_text.py'
                dataset = with_old_text(dataset, tokenizer)
        recipe += f' --init_from={quoted(tokenizer)}'
    elif name == 'chat' and tokenizer not in ('auto', 'gpt2'):
        recipe = CORPORA['text'].recipe  # from scratch: which run has this tokenizer is not known
        print(f'to fine-tune a run with this tokenizer: {command_for("train")} '
              f'{corpus.recipe} --init_from=OUT_DIR --dataset={quoted(dataset)}')
    print(f'next: {command_for("train")} {recipe} --dataset={quoted(dataset)}')


def with_old_text(dataset, source):
    """The new dataset, mixed with the text that the run `source` was trained on, if that is here:
    without the old text, the model forgets it."""
    from plaingpt.inference.open_weights import open_weights  # imports torch
    state = open_weights(source).state
    old = state['config']['dataset'] if state else dataset
    if old == dataset or not has_token_files(old):
        return dataset
    corpora = open_dataset_spec(old)
    if corpora.identity('train') != state['data'] or corpora.has_mask():
        return dataset
    shares = parse_dataset_spec(old)
    if dataset in shares:  # the run was trained on it, too
        return old
    shares = {dataset: 1 / 3, **{name: share * 2 / 3 for name, share in shares.items()}}
    return ','.join(f'{name}:{share:.4f}' for name, share in shares.items())


def check_options(config, name, corpus):
    """Raises UserError for an option that this kind of corpus does not take, and for a missing
    input or vocab_size."""
    accepted = {*OPTIONS[corpus.kind].split(), 'input', 'if_small'}
    if corpus.kind != 'ids':  # which are described in place
        accepted |= {'data_dir', 'overwrite'}
    for option in asdict(config):
        if config.is_set(option) and option not in accepted:
            raise UserError(f'{option}={getattr(config, option)}: not an option of {name}; '
                            f'remove --{option}')
    if name == 'ids' and not config.vocab_size:
        raise UserError('vocab_size is missing; run '
                        f'{command_for("prepare")} ids FOLDER --vocab_size=N')
    if not (config.inputs() or corpus.files or corpus.url or corpus.hub):
        raise UserError(f'{name} needs an input: {corpus.about}')


def prepare_text(name, corpus, folder, config):
    """Source → tokenizer → tokens → report. Raises UserError."""
    tokenizer_name = corpus.tokenizer if config.tokenizer == 'auto' else config.tokenizer
    for_chat = corpus.kind == 'chat'
    existing = None  # the tokenizer of a dataset, run or model
    if not is_tokenizer_name(tokenizer_name):
        existing = load_tokenizer(tokenizer_name, for_chat)
    if corpus.kind == 'rows of ids':
        existing = ids_tokenizer(config)
        reader = IdsReader(config.text_field or 'input_ids', tokenizer=existing)
    elif for_chat:
        columns = (config.prompt, config.completion) if config.prompt else ()
        reader = ConversationReader(columns, tokenizer=existing if is_chat(existing) else None)
    else:
        separators = Separators((), config.documents == 'paragraph')
        if config.separators and corpus.separators:
            separators = separators_for(existing, config.documents == 'paragraph')
        reader = TextReader(config.text_field or corpus.text_field, separators)
    source = open_source(name, corpus, config, folder, reader)
    plain = source.as_plain_text() if for_chat else source
    options = encoding_options(config, corpus.cut_at_line)
    if options.max_tokens and source.is_continuous:
        raise UserError(f'max_tokens={config.max_tokens}: {source.name} is one continuous text '
                        'without documents; split it with --documents=file, line or paragraph')
    command = describe_command(name, config, existing, identity=source.identity())

    def write(job):
        if job.progress:
            tokenizer = tokenizers.from_json(job.progress['tokenizer'])
        elif existing:
            check_round_trip(existing, plain)
            tokenizer = existing
        else:
            tokenizer = train_tokenizer(tokenizer_name, plain)
        if for_chat and not is_chat(tokenizer):
            tokenizer = ChatTokenizer(tokenizer, plain_template(tokenizer))
        write_tokens(source, tokenizer, job, options)

    write_dataset(folder, command, config.overwrite, write)


def encoding_options(config, cut_at_line):
    if config.val_fraction == 'auto':
        val_fraction, max_val_chars = 0.1, VAL_CHARS
    else:
        val_fraction, max_val_chars = config.val_fraction, math.inf
    threads = len(allowed_cpus()) if config.num_proc == 'auto' else config.num_proc
    return EncodingOptions(val_fraction, max_val_chars, config.shard_tokens, threads,
                           parse_count(config.max_tokens), cut_at_line)


def prepare_datatrove(name, folder, config):
    """Shards written by datatrove → dataset → report. Raises UserError."""
    shards = pretokenized.find_datatrove(config.input)
    if is_tokenizer_name(config.tokenizer) and config.tokenizer not in UNTRAINED:
        raise UserError('datatrove needs --tokenizer: the dataset or run whose tokenizer made '
                        'these tokens, or gpt2 or byte')
    tokenizer = load_tokenizer(config.tokenizer)
    sizes = [[path.name, path.stat().st_size] for path, *_ in shards]
    command = describe_command(name, config, tokenizer, identity=sizes)
    val_fraction = 0.01 if config.val_fraction == 'auto' else config.val_fraction

    def write(job):
        pretokenized.link_datatrove(shards, tokenizer, job, val_fraction)

    write_dataset(folder, command, config.overwrite, write)


def prepare_ids(name, folder, config):
    """The user's own ids → a meta.json beside them. Raises UserError."""
    dtype = None if config.dtype == 'auto' else parse_dtype(config.dtype)
    pretokenized.describe_ids(folder, ids_tokenizer(config), dtype, describe_command(name, config))


def ids_tokenizer(config):
    end_of_text = None if config.end_of_text == 'none' else config.end_of_text
    return tokenizers.IdsTokenizer(config.vocab_size, end_of_text)


def holds_rows(inputs):
    """Whether the input of `ids` is files of rows, or a folder that holds them and no train.bin."""
    if len(inputs) != 1 or file_format(Path(*inputs)) != 'text':
        return True
    folder = ids_folder(*inputs)
    return folder.is_dir() and not holds_tokens(folder) \
        and any(file_format(path) != 'text' for path in search(folder))


def ids_folder(name):
    return Path(name) if Path(name).exists() else dataset_folder(name)


def describe_command(name, config, tokenizer=None, **content):
    """Everything that determines the token files; meta.json stores it as `source`. tokenizer: an
    existing one, recorded by its checksum, since another may have its name later"""
    options = {}
    for option, value in asdict(config).items():
        if option in ('data_dir', 'num_proc', 'overwrite', 'if_small', 'strict'):
            continue  # these do not change the tokens
        if config.is_set(option):
            options[option] = ','.join(config.inputs()) if option == 'input' else value
    if tokenizer:
        content['tokenizer_sha256'] = checksum(tokenizer)
    return {'corpus': name, 'input': name, **options, **content}


if __name__ == '__main__':
    run_script(main)
