"""Turn text into token files: data/<name>/train.bin, val.bin and meta.json.

    python prepare.py                                list the corpora
    python prepare.py shakespeare_char               prepare one of them
    python prepare.py text notes/ book.txt           your own files
    python prepare.py hf OWNER/NAME                  any dataset of the hub
    python prepare.py chat questions.csv             conversations, to tune a model on
    python prepare.py inspect data/NAME              check what was prepared, and look inside
    python prepare.py tokenizer data/NAME            write its tokenizer.json, for datatrove
    python prepare.py datatrove --input=FOLDER       tokens that datatrove made on many machines

After a kill, the same command resumes where it was.
"""

if __name__ == '__main__':
    from plaingpt.system.errors import begin_script
    begin_script(loading='')

import difflib
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from configurator import load_config
from plaingpt.data import tokenizers
from plaingpt.data.chat_templates import as_chat
from plaingpt.data.chat_tokenizer import ChatTokenizer
from plaingpt.data.conversations import open_conversations
from plaingpt.data.corpora import CORPORA, describe_corpus, table
from plaingpt.data.dataset import UNFINISHED, dataset_folder, open_dataset
from plaingpt.data.encoding import write_shards
from plaingpt.data.foreign_tokenizer import (
    FILES_OF_TOKENIZER,
    download,
    is_hub_name,
    read_tokenizer,
)
from plaingpt.data.inspection import (
    find_damage,
    inspect,
    print_overlaps,
    print_report,
    record_overlap,
)
from plaingpt.data.pretokenized import fetch_shards, find_datatrove, link_datatrove
from plaingpt.data.readers import UTF8, find_encoding
from plaingpt.data.shards import (
    check_ours,
    check_replaceable,
    complete_meta,
    find_journal,
    lock_dataset_dir,
    publish,
)
from plaingpt.data.sources import count_characters, open_source, read_texts, sample
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import read_json, write_json
from plaingpt.system.formatting import parse_count, quoted, short
from plaingpt.system.streams import require_stdout

BPE_SAMPLE_CHARS = 50_000_000  # a bpe tokenizer is trained on about so much text at most


@dataclass
class PrepareConfig:
    # where from and where to
    input: str = ''  # files, folders and globs, with commas between, instead of downloading
    path: str = ''  # hf: a dataset of the hub, or a folder laid out like one
    subset: str = ''  # of a dataset of the hub
    split: str = ''  # of a dataset of the hub, to train on (default: train)
    val_split: str = ''  # of a dataset of the hub, to validate on (default: held out of split)
    test_split: str = ''  # of a dataset of the hub, for evaluate.py --split=test
    data_dir: str = ''  # folder to write (default: data/NAME)
    # what a document is
    documents: Literal['auto', 'file', 'line', 'paragraph', 'title'] = 'auto'  # title: WikiText's
    text_field: str = ''  # of rows; a.b: b in a (default: text, or the corpus's)
    format: Literal['auto', 'messages', 'sharegpt', 'alpaca', 'completion'] = 'auto'  # of chat
    prompt: str = ''  # chat: the column with what the user says (default: found by its name)
    completion: str = ''  # chat: the column with what the assistant says
    encoding: str = 'utf-8'  # of files that are no UTF-8: latin-1, cp1252, utf-16, or another
    errors: Literal['strict', 'replace'] = 'strict'  # at other bytes stop, or put U+FFFD
    # how much
    max_tokens: int | str = 0  # to train on, such as 100M or 1.5B (0: all); then reading ends
    dedup: bool = False  # leave out documents that equal an earlier one but for white space
    val_fraction: Literal['auto'] | float = 'auto'  # held out (auto: 0.1 small, 0.0005 hub)
    test_fraction: float = 0.0  # held out as well, for evaluate.py --split=test (0: none)
    # how
    tokenizer: str = 'auto'  # char, byte, gpt2, bpe:SIZE, dataset, run, model (auto: listed)
    shard_tokens: Annotated[int, 'at least 1'] = 100_000_000  # tokens a file
    max_shards: Annotated[int, 'at least 0'] = 0  # of tokens that are downloaded as such (0: all)
    num_proc: Literal['auto'] | Annotated[int, 'at least 1'] = 'auto'  # threads (auto: one a core)
    overwrite: bool = False  # replace what another command prepared in the same folder
    if_small: bool = False  # only if it takes under a minute; else print the command to run

    def problems(self):
        found = []
        if self.val_fraction != 'auto' and not 0 < self.val_fraction < 1:
            found.append(f'val_fraction={self.val_fraction}: expected a number between 0 and 1')
        most = 1 - (0.1 if self.val_fraction == 'auto' else self.val_fraction)
        if self.test_fraction and not 0 < self.test_fraction < most:
            found.append(f'test_fraction={self.test_fraction}: expected a number between 0 and '
                         f'{most:g}, which is what validation leaves')
        if self.test_fraction and self.test_split:
            found.append('test_fraction and test_split cannot go together: leave one out')
        if bool(self.prompt) != bool(self.completion):
            found.append('prompt and completion go together: name both columns')
        if self.prompt and self.format != 'auto':
            found.append(f'prompt={self.prompt} and format={self.format} cannot go together: leave '
                         'one out')
        if find_encoding(self.encoding) is None:
            found.append(f'encoding={self.encoding[:40]}: Python has no such text encoding: '
                         'expected one such as utf-8, latin-1, cp1252, utf-16 or shift_jis')
        if parse_count(self.max_tokens) is None:
            found.append(f'max_tokens={self.max_tokens}: expected a number, such as 100M or 1.5B')
        if self.tokenizer != 'auto' and not tokenizers.is_name(self.tokenizer) \
                and not Path(self.tokenizer).is_dir() and not is_hub_name(self.tokenizer) \
                and not has_tokenizer(prepared_folder(self.tokenizer)):
            found.append(unknown_tokenizer(self.tokenizer))
        return found


def prepared_folder(name):
    """The folder of a prepared dataset, which is given by its name or as the folder itself."""
    folder = Path(name)
    return folder if has_tokenizer(folder) or any(folder.glob('*.bin')) else dataset_folder(name)


def has_tokenizer(folder):
    return (folder / 'meta.json').exists() or (folder / 'meta.pkl').exists()  # ours, nanoGPT's


def names_dataset(name):
    """Whether it is a prepared dataset. A model's folder stands before a dataset of its name."""
    folder = prepared_folder(name)
    is_path = folder == Path(name) or not (Path(name) / 'tokenizer.json').exists()
    return has_tokenizer(folder) and is_path


def unknown_tokenizer(name):
    return f'tokenizer={name}: expected auto, {tokenizers.NAMES}, or a prepared dataset, a run ' \
           'or a model to take it from'


def borrow_tokenizer(name):
    """The JSON of the tokenizer of a prepared dataset, of a run or one of its checkpoints, or of a
    model of others, by their folders or its name on the hub. Raises UserError."""
    if names_dataset(name):
        return open_dataset(prepared_folder(name)).tokenizer_json()
    folder = download(name, FILES_OF_TOKENIZER) if is_hub_name(name) else name
    if found := read_tokenizer(folder):
        return found
    from plaingpt.training.open_weights import open_weights  # the model too, which takes a second
    found = open_weights(name, 'latest').tokenizer_json()
    if found is None:
        raise UserError(f'tokenizer={name}: the folder has no tokenizer.json, and is no run and no '
                        'prepared dataset')
    return found


def main(argv):
    help_text = f'{__doc__}\nCorpora, with the tokenizer of each:\n{table()}'
    if not argv:
        require_stdout()
        print(help_text)
        return
    name, *options = argv
    if name in ('inspect', 'tokenizer'):
        if len(options) != 1:
            raise UserError(f'{name} takes one folder: python prepare.py {name} data/NAME')
        if name == 'inspect':
            return inspect(prepared_folder(options[0]))
        from plaingpt.inference.hf_export import write_tokenizer  # torch too, which takes a second
        return write_tokenizer(prepared_folder(options[0]))
    if name in ('-h', '--help'):
        load_config(PrepareConfig, argv, help_text, 'input', several=True)
    if name not in CORPORA:
        raise UserError(unknown_corpus(name))
    corpus = CORPORA[name]
    config = load_config(PrepareConfig, options, help_text, *corpus.positional())
    config.encoding = find_encoding(config.encoding)
    folder = Path(config.data_dir or f'data/{name}')
    if config.if_small and not corpus.small:
        raise UserError(f'{folder} is not prepared: run '
                        + f'python prepare.py {name} {corpus.required_option()}'.rstrip())
    check_ours(folder)  # before anything is downloaded
    check_options(config, name, corpus)
    print(f'preparing {name}: {describe_corpus(corpus)}')
    if corpus.is_tokens():
        prepare_shards(name, corpus, folder, config)
    else:
        prepare_text(name, corpus, folder, config)
    if not config.if_small:
        dataset = folder.name if folder.parent == Path('data') else folder
        recipe = {'chat': 'config/finetune_chat.py',
                  'text': 'config/own_text.py --minutes=10'}.get(name, 'config/NAME.py')
        by_name = config.tokenizer == 'auto' or tokenizers.is_name(config.tokenizer)
        is_model = not by_name and not names_dataset(config.tokenizer)
        start = f' --init_from={quoted(config.tokenizer)}' * (name == 'chat' and is_model)
        print(f'next: python train.py {recipe} --dataset={quoted(dataset)}{start}')


def unknown_corpus(name):
    if os.path.lexists(name):
        return f'{name} is no corpus: for files of your own, python prepare.py text {quoted(name)}'
    nearest = difflib.get_close_matches(name, CORPORA, n=1)
    return f'{dataset_folder(name)} is not there, and no corpus is called {name!r}: ' \
        + (f'did you mean {nearest[0]}? ' if nearest else '') + 'python prepare.py lists all; ' \
        'for your own files, python prepare.py text FILES ' \
        f'--data_dir={quoted(dataset_folder(name))}'


def check_options(config, name, corpus):
    """Raises UserError for an option that says nothing about a corpus of this kind."""
    refused = dict.fromkeys(('format', 'prompt', 'completion'), 'no conversations')
    if name == 'chat':
        refused = dict.fromkeys(('max_tokens', 'documents', 'text_field'),
                                 'conversations, which are prepared whole and all at once')
    if corpus.is_tokens():
        refused |= dict.fromkeys(('max_tokens', 'dedup', 'test_fraction', 'test_split', 'documents',
                                  'errors', 'encoding', 'text_field', 'path', 'subset', 'split',
                                  'val_split'),
                                 'tokens already, of which --max_shards takes some')
    else:
        refused['max_shards'] = 'no tokens yet'
    if corpus.hub is not None:
        refused['encoding'] = 'of the hub, whose library reads the files'
    else:
        refused |= dict.fromkeys(('path', 'subset', 'split', 'val_split', 'test_split'),
                                 'no dataset of the hub, and has no splits of its own')
    for option, what in refused.items():
        if (value := getattr(config, option)) != getattr(PrepareConfig, option):
            raise UserError(f'{option}={value}: {name} is {what}: leave it out')


def prepare_text(name, corpus, folder, config):
    """Source → tokenizer → shards → report. Raises UserError."""
    tokenizer_name = config.tokenizer if config.tokenizer != 'auto' else \
        earlier_tokenizer(folder, config) or corpus.tokenizer
    by_name = tokenizer_name == 'auto' or tokenizers.is_name(tokenizer_name)
    borrowed = None if by_name else borrow_tokenizer(tokenizer_name)
    if borrowed and borrowed['kind'] == 'chat' and name != 'chat':
        raise UserError(f'tokenizer={tokenizer_name}: it is for conversations: name the tokenizer '
                        'that these were prepared with, or its dataset or run')
    errors = config.errors
    kind = borrowed['kind'] if borrowed else tokenizer_name
    if kind == 'byte' and errors == 'strict' and config.encoding == UTF8:
        errors = 'surrogateescape'  # any bytes are tokens of the byte tokenizer
    source = open_conversations(config, name) if name == 'chat' else \
        open_source(name, corpus, config, errors)
    check_source(name, config, source, tokenizer_name)
    command = describe_command(name, corpus, config, tokenizer_name, borrowed, source)
    with lock_dataset_dir(folder) as unfinished:
        if not is_prepared(folder, command, config.overwrite):
            journal = find_journal(unfinished, command)
            tokenizer = tokenizers.from_json(journal['tokenizer']) if journal \
                else choose_tokenizer(name, tokenizer_name, borrowed, source)
            cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') \
                else os.cpu_count()
            threads = cores if config.num_proc == 'auto' else config.num_proc
            meta = write_shards(unfinished, source, command, tokenizer, journal, threads)
            write_json(unfinished / 'meta.json', complete_meta(meta, source.name))
            record_overlap(unfinished)  # not once files were moved: they are found below
            print_report(folder, publish(folder))
        print_overlaps(record_overlap(folder))


def earlier_tokenizer(folder, config):
    """'gpt2' where an earlier version began or made a dataset of the same text with it, which was
    its choice for text where no tokenizer was named; else None."""
    places = {folder / UNFINISHED / 'journal.json': 'command', folder / 'meta.json': 'source'}
    if config.overwrite:
        del places[folder / 'meta.json']
    for path, key in places.items():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            earlier = read_json(path)[key]
            if (earlier['corpus'], earlier['input'], earlier['tokenizer']) \
                    == ('text', config.input, 'gpt2'):
                print(f'tokenizer gpt2, as {folder} has it')
                return 'gpt2'
    return None


def check_source(name, config, source, tokenizer_name):
    """Raises UserError where an option asks for what a source of this kind does not have."""
    if source.unit != 'B' and tokenizer_name == 'char':
        raise UserError(f'{name} is too large for --tokenizer=char: use gpt2, byte or bpe:32768')
    for option in ('dedup', 'max_tokens'):
        if getattr(config, option) and source.is_one_text:
            raise UserError(f'{option}: {source.name} is one running text and has no documents: '
                            'say what a document is with --documents=file, line, paragraph or '
                            'title')


def prepare_shards(name, corpus, folder, config):
    """Shards that hold tokens already → report. Raises UserError."""
    pattern = '*.ds' if corpus.datatrove else '*.bin'
    found = sorted(Path(config.input).glob(pattern)) if config.input else []
    command = {'corpus': name, 'input': config.input, 'max_shards': config.max_shards,
               'files': [[path.name, path.stat().st_size] for path in found]}
    if corpus.datatrove:
        if not config.input:
            raise UserError("datatrove: --input=FOLDER names the output_folder of datatrove's "
                            'DocumentTokenizer')
        shards = find_datatrove(config.input, config.max_shards)
        description = choose_datatrove_tokenizer(shards, config.tokenizer)
        command |= {'val_fraction': 0.01 if config.val_fraction == 'auto' else config.val_fraction,
                    'tokenizer': description['kind'],
                    'tokenizer_sha256': tokenizer_sha256(description)}
    with lock_dataset_dir(folder) as unfinished:
        if not is_prepared(folder, command, config.overwrite):
            if corpus.datatrove:
                link_datatrove(shards, description, unfinished, command)
            else:
                fetch_shards(corpus, unfinished, command)
            record_overlap(unfinished)
            print_report(folder, publish(folder))
        print_overlaps(record_overlap(folder))


def choose_datatrove_tokenizer(shards, asked):
    """The JSON of the tokenizer of [Shard]: that which their files name, or --tokenizer. Raises
    UserError."""
    from plaingpt.inference.hf_export import find_tokenizer  # torch too, which takes a second
    name, found = shards[0].tokenizer, find_tokenizer(shards[0].tokenizer)
    if asked == 'auto':
        if found is None:
            raise UserError(f'{shards[0].path}.metadata names the tokenizer {name!r}, which is not '
                            'known here: name it with --tokenizer=gpt2, byte, or a prepared '
                            'dataset or a run that has it')
        chosen = found
    elif not tokenizers.is_name(asked):
        chosen = borrow_tokenizer(asked)
    elif asked in ('gpt2', 'byte'):
        chosen = {'kind': asked}
    else:
        raise UserError(f'tokenizer={asked}: it would be learned from text, and these are tokens: '
                        'name a prepared dataset or a run that has their tokenizer')
    if found not in (None, chosen):
        raise UserError(f'tokenizer={asked}: {shards[0].path}.metadata names another one, {name}: '
                        'leave --tokenizer out')
    if chosen['kind'] == 'chat':
        raise UserError(f'{shards[0].path}: its tokenizer is for conversations, and datatrove '
                        'encodes text: name the tokenizer that these were prepared with')
    return chosen


def tokenizer_sha256(tokenizer):
    """SHA-256 of the JSON of a tokenizer."""
    return hashlib.sha256(json.dumps(tokenizer).encode()).hexdigest()


def describe_command(name, corpus, config, tokenizer_name, borrowed, source):
    """All that decides the content of the files, kept as `source` in meta.json.

    borrowed: JSON of a tokenizer of another dataset, or None
    """
    val_fraction, max_tokens = config.val_fraction, parse_count(config.max_tokens)
    if val_fraction == 'auto':
        large = source.total is None or source.total > 100_000_000
        of_hub = 0.01 if 0 < max_tokens < 10**9 else 0.0005
        val_fraction = of_hub if source.unit != 'B' else 0.01 if large else 0.1
    command = {'corpus': name, 'input': config.input or config.path or name,
               'val_fraction': val_fraction, 'shard_tokens': config.shard_tokens,
               'tokenizer': tokenizer_name, 'documents': config.documents, 'errors': config.errors,
               'subset': config.subset or corpus.subset, 'split': config.split,
               'val_split': config.val_split, 'text_field': config.text_field or corpus.text_field,
               'identity': source.identity()}
    if name == 'chat':
        command['format'] = config.format
    if borrowed:  # another tokenizer once that dataset is prepared anew
        command['tokenizer_sha256'] = tokenizer_sha256(borrowed)
    given = {'max_tokens': max_tokens, 'test_fraction': config.test_fraction,
             'test_split': config.test_split, 'dedup': config.dedup, 'prompt': config.prompt,
             'completion': config.completion,
             'encoding': config.encoding if config.encoding != UTF8 else ''}
    # Only what is given, so that what earlier versions prepared is of the same command.
    command.update({key: value for key, value in given.items() if value})
    if source.is_one_text:
        characters = count_characters(source)
        held_out = val_fraction + config.test_fraction
        command['train_characters'] = int(characters * (1 - held_out))
        if config.test_fraction:
            command['val_characters'] = int(characters * (1 - config.test_fraction))
    return command


def is_written(folder, command):
    """True where `command` wrote the meta.json of `folder`, which it does at the end."""
    with suppress(UserError):
        return open_dataset(folder).meta.get('source') == command
    return False


def is_prepared(folder, command, overwrite):
    """True, with a printed line, where `command` wrote the files of `folder` and they are whole.
    Raises UserError where another command did, unless it may `overwrite` them."""
    if not overwrite:
        check_replaceable(folder, command)
    if not is_written(folder, command) or find_damage(open_dataset(folder)):
        return False
    print(f'{folder} is already prepared by this command, and its checksums are right')
    return True


def choose_tokenizer(corpus_name, tokenizer_name, borrowed, source):
    """The tokenizer of a corpus, for conversations with special tokens. Raises UserError."""
    if corpus_name != 'chat':
        return borrow_or_train(tokenizer_name, borrowed, source)
    if borrowed and borrowed['kind'] == 'foreign':
        borrowed = as_chat(borrowed, tokenizer_name)
    made = borrow_or_train(tokenizer_name, borrowed, source.texts())
    return made if isinstance(made, ChatTokenizer) else ChatTokenizer(made)


def borrow_or_train(name, borrowed, source):
    """By its name, trained on `source` where it learns; or a borrowed one. Raises UserError."""
    if borrowed:
        return tokenizers.from_json(borrowed)
    texts = ()
    if name == 'auto':
        name = f'bpe:{tokenizers.choose_vocab_size(source.total)}'
        print(f'tokenizer {name}, for {short(source.total)}B of text (others by --tokenizer: gpt2 '
              "for GPT-2's, bpe:N, char, byte)")
    if name.startswith('bpe'):
        print(f'training the {name} tokenizer')
        texts = sample(source, BPE_SAMPLE_CHARS)
    elif name == 'char':
        texts = read_texts(source, 'finding characters')
        if not source.is_one_text:
            texts = chain(texts, '\n')  # ends each document
    made = tokenizers.make_tokenizer(name, texts)
    asked = tokenizers.named_vocab_size(name)
    if asked and made.vocab_size < asked:
        print(f'{name} asks for {asked:,} tokens and got {made.vocab_size:,}: the text has no more '
              'pairs to merge')
    return made


if __name__ == '__main__':
    run_script(main)
