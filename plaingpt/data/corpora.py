"""The corpora that prepare.py knows by name. A new corpus is one entry in CORPORA."""

import sys
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plaingpt.data.dataset import (
    dataset_folder,
    has_token_files,
    open_dataset_spec,
    parse_dataset_spec,
)
from plaingpt.data.tokenizers import GPT2Tokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import short

# Of the packages that are installed here:
SMALL_FILE_BYTES = 500  # shorter files are mostly lists of imports
MAX_SHARED = 0.3  # share of a file's passages that may be in files before it
MIN_COMPRESSED = 0.15  # of its size; code compresses to about 0.28
# The kinds of corpora, and what of prepare.py's options each takes.
ENCODING = 'val_fraction tokenizer shard_tokens num_proc'
OPTIONS = {
    'text': f'{ENCODING} encoding documents text_field max_tokens strict',
    'chat': f'{ENCODING} encoding prompt completion strict subset split val_split',
    'hub': f'{ENCODING} text_field max_tokens strict subset split val_split',
    'datatrove': 'val_fraction tokenizer',  # tokens of its DocumentTokenizer
    'ids': 'vocab_size dtype'}


@dataclass(frozen=True)
class Corpus:
    """Where a corpus comes from (`files`, `url` or `hub`; --input takes the place of each), how it
    is tokenized, and about how large it is."""

    about: str  # one line for --help
    tokenizer: str = 'gpt2'  # char, byte, gpt2 or bpe:VOCAB_SIZE; auto: bpe by the size of the text
    kind: str = 'text'  # a key of OPTIONS
    files: str | Callable = ''  # files, folders and globs with commas between; or what finds them
    url: str = ''  # of a text
    sha256: str = ''  # of the text behind `url`
    hub: str = ''  # repository on the Hugging Face hub; NAME@REVISION is one of its branches
    subset: str = ''  # of a dataset of the hub
    val_split: str = ''  # of a dataset of the hub that has one
    text_field: str = ''  # of rows: .jsonl, .csv, .parquet and others, the hub
    tokens: int = 0  # to train on
    vocab_size: int = GPT2Tokenizer.vocab_size  # of the tokenizer
    recipe: str = 'config/gpt2_124m.py'  # that trains on it
    small: bool = False  # prepared in under a minute: train.py then does it when first asked


def find_standard_library():
    """The source of Python's own standard library: text on every machine."""
    folder = Path(sysconfig.get_paths()['stdlib'])
    # no tests, nothing that was installed later, and no tables that are programs only in name
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
            'pydoc_data', 'encodings'}
    return [p for p in sorted(folder.rglob('*.py'))
            if not skip & set(p.relative_to(folder).parts)
            and not p.name.startswith('_sysconfigdata')]


def find_packages():
    """The Python source of the packages that are installed here, without near-copies: many packages
    bring parts of others."""
    folders = [Path(folder) for folder in sys.path
               if Path(folder).name in ('site-packages', 'dist-packages')]
    paths = dict.fromkeys(path for folder in folders for path in sorted(folder.rglob('*.py'))
                          if path.stat().st_size >= SMALL_FILE_BYTES)
    if not paths:
        raise UserError('no package is installed beside this Python: train on pystdlib')
    print(f'comparing {len(paths):,} Python files, to leave out near-copies and tables')
    seen, kept = set(), []
    for path in paths:
        data = path.read_bytes()
        passages = sample_passages(data)
        is_copy = sum(passage in seen for passage in passages) > MAX_SHARED * len(passages)
        if not is_copy and not is_table(data):
            kept.append(path)
            seen.update(passages)
    # Validation gets the first documents that are chosen for it: some of each package.
    return sorted(kept, key=lambda path: zlib.crc32(bytes(path)))


def is_table(data):
    """Whether a file is a table that is a program only in name: it compresses far more than code.
    """
    middle = data[len(data) // 2:][:2**16] if len(data) > 2**17 else data[:2**16]
    return len(zlib.compress(middle, 1)) < MIN_COMPRESSED * len(middle)


def sample_passages(data):
    """Hashes of passages of a file, each of four lines in a row: of about one in eight, and always
    the same ones. Short lines are everywhere, and left out."""
    lines = [zlib.crc32(line.strip()) for line in data.split(b'\n') if len(line) >= 20]
    hashes = np.array(lines, np.uint64)
    rows = [hashes[i:len(hashes) - 3 + i] for i in range(4)] if len(hashes) > 3 else [hashes]
    passages = np.zeros(len(rows[0]), np.uint64)
    for row in rows:
        passages = (passages ^ row) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
        passages ^= passages >> np.uint64(32)
    chosen = passages[passages % np.uint64(8) == 0] if len(passages) > 200 else passages
    return chosen.tolist()


TINY_SHAKESPEARE = dict(
    url='https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed', small=True)

CORPORA = {
    'pystdlib': Corpus("the source of Python's standard library, found on this machine",
                       'bpe:2048', files=find_standard_library, vocab_size=2048, small=True,
                       recipe='config/quickstart.py'),
    'pypackages': Corpus("the source of the Python packages installed here, 200 to 400 MB",
                         'bpe:32768', files=find_packages, vocab_size=32_768, small=True,
                         tokens=66_000_000, recipe='config/quickstart_gpu.py'),
    'readme': Corpus('the README of this project, to try things out', 'char',
                     files=str(ROOT / 'README.md'), small=True, recipe='config/tiny.py'),
    'shakespeare_char': Corpus('tiny Shakespeare, one token a character (nanoGPT)', 'char',
                               tokens=1_003_854, vocab_size=65, **TINY_SHAKESPEARE,
                               recipe='config/shakespeare_char.py'),
    'shakespeare': Corpus('tiny Shakespeare, GPT-2 tokens (nanoGPT)', tokens=301_966,
                          **TINY_SHAKESPEARE, recipe='config/finetune_shakespeare.py'),
    'tinystories': Corpus('stories in the words of small children', kind='hub',
                          hub='roneneldan/TinyStories', val_split='validation',
                          tokens=480_000_000),
    # its main branch was a script, which `datasets` no longer runs; the hub keeps Parquet of it
    'openwebtext': Corpus('web pages that Reddit linked to', kind='hub',
                          hub='Skylion007/openwebtext@refs/convert/parquet',
                          tokens=9_040_000_000),
    'fineweb-edu': Corpus('educational web pages', kind='hub', hub='HuggingFaceFW/fineweb-edu',
                          subset='sample-10BT', tokens=10_000_000_000),
    'fineweb': Corpus('web pages', kind='hub', hub='HuggingFaceFW/fineweb', subset='sample-10BT',
                      tokens=10_400_000_000),
    'text': Corpus('your own files: --input=FILES_OR_FOLDERS', 'auto',
                   recipe='config/own_text.py --minutes=10'),
    'datatrove': Corpus('tokens that datatrove wrote: --input=FOLDER', kind='datatrove'),
    'ids': Corpus('ids of your own, written by numpy: --input=FOLDER --vocab_size=N', kind='ids',
                  recipe='config/own_text.py --minutes=10'),
    'chat': Corpus('conversations: --input=FILES_OR_FOLDERS or OWNER/NAME', kind='chat',
                   vocab_size=50_262, recipe='config/finetune_chat.py'),
    'hf': Corpus('any dataset of the hub, or a folder laid out like one: --input=OWNER/NAME',
                 kind='hub'),
}


def describe_corpus(corpus):
    """What is known of a corpus before it is read, as one line."""
    parts = [corpus.about, '/'.join(filter(None, [corpus.hub, corpus.subset]))]
    if corpus.tokens:
        parts.append(f'about {short(corpus.tokens).replace("G", "B")} tokens')
    return ', '.join(filter(None, parts))


def corpus_table():
    """The corpora, a line each, for --help."""
    lines = []
    for name, corpus in CORPORA.items():
        tokenizer = '-' if corpus.kind in ('datatrove', 'ids') else corpus.tokenizer
        lines.append(f'  {name:<20}{tokenizer:<10}{describe_corpus(corpus)}')
    return '\n'.join(lines)


def find_dataset_size(text, vocab_size=0):
    """What the setting `dataset` says → (vocabulary, training tokens or None, where they are known
    from), before it is prepared too. vocab_size: in place of what is found, unless it is 0. Raises
    UserError."""
    if has_token_files(text):
        dataset = open_dataset_spec(text, vocab_size)
        tokens = sum(len(part.dataset.split('train')) for part in dataset.parts)
        return vocab_size or dataset.vocab_size, tokens, str(dataset.folder)
    name = next(name for name in parse_dataset_spec(text) if not has_token_files(name))
    corpus = CORPORA.get(name, Corpus(''))
    tokens = corpus.tokens or None if name == text else None
    return vocab_size or corpus.vocab_size, tokens, f'{dataset_folder(name)} is not prepared'
