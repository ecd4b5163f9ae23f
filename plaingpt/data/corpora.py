"""The corpora that prepare.py knows by name. A new corpus is one entry in CORPORA."""

import sys
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plaingpt.core.dataset import (
    dataset_folder,
    has_token_files,
    open_dataset_spec,
    parse_dataset_spec,
)
from plaingpt.data.tokenizers import GPT2Tokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import count_of, short

# For pypackages:
MIN_FILE_BYTES = 500  # shorter files are mostly imports
MAX_DUPLICATE = 0.3  # fraction of a file's shingles that may be in earlier files
MIN_COMPRESSED = 0.15  # of the size, for tables; code compresses to about 0.28
# Kinds of corpora, and the options of prepare.py for each.
ENCODING = 'val_fraction tokenizer shard_tokens num_proc'
OPTIONS = {
    'text': f'{ENCODING} encoding documents separators text_field max_tokens strict',
    'chat': f'{ENCODING} encoding prompt completion strict subset split val_split',
    'hub': f'{ENCODING} separators text_field max_tokens strict subset split val_split',
    'datatrove': 'val_fraction tokenizer',  # output of its DocumentTokenizer
    'ids': 'vocab_size end_of_text dtype',
    'rows of ids': 'vocab_size end_of_text text_field encoding val_fraction shard_tokens num_proc '
                   'max_tokens strict'}


@dataclass(frozen=True)
class Corpus:
    """Where a corpus comes from (`files`, `url` or `hub`; --input overrides each), its tokenizer,
    and its approximate size."""

    about: str  # one line for --help
    tokenizer: str = 'gpt2'  # char, byte, gpt2 or bpe:VOCAB_SIZE; auto: bpe by the size of the text
    kind: str = 'text'  # a key of OPTIONS
    files: str | Callable = ''  # files, folders and globs separated by commas; or their finder
    url: str = ''  # of a text file
    sha256: str = ''  # of the text at `url`
    hub: str = ''  # dataset on the Hugging Face Hub, perhaps with @REVISION
    subset: str = ''  # Hub: name of the subset
    val_split: str = ''  # Hub: name of the validation split, if any
    text_field: str = ''  # Hub and files of rows
    separators: bool = True  # end-of-text tokens in the text end documents
    cut_at_line: bool = True  # where the validation text begins, if this is one long text
    tokens: int = 0  # training tokens
    vocab_size: int = GPT2Tokenizer.vocab_size  # of the tokenizer
    recipe: str = 'config/gpt2_124m.py'  # config file to train with
    gpu_recipe: str = ''  # instead of `recipe` where torch sees a GPU
    small: bool = False  # prepared in under a minute, so train.py does it if needed


def find_standard_library():
    """The source of Python's standard library: text that every machine has."""
    folder = Path(sysconfig.get_paths()['stdlib'])
    # tests, installed packages, and modules that are only tables
    excluded = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
                'pydoc_data', 'encodings'}
    return [path for path in sorted(folder.rglob('*.py'))
            if not excluded & set(path.relative_to(folder).parts)
            and not path.name.startswith('_sysconfigdata')]


def find_packages():
    """The source of the installed Python packages, without near-duplicates: many packages vendor
    parts of others."""
    paths = {}  # in order, each once
    for folder in map(Path, sys.path):
        if folder.name in ('site-packages', 'dist-packages'):
            for path in sorted(folder.rglob('*.py')):
                if path.stat().st_size >= MIN_FILE_BYTES:
                    paths[path] = True
    if not paths:
        raise UserError('no packages are installed for this Python; use the corpus pystdlib')
    print(f'comparing {count_of(len(paths), "Python file")} to exclude near-duplicates and tables')
    known_shingles, selected = set(), []
    for path in paths:
        data = path.read_bytes()
        shingles = sample_shingles(data)
        duplicates = sum(shingle in known_shingles for shingle in shingles)
        if duplicates <= MAX_DUPLICATE * len(shingles) and not is_table(data):
            selected.append(path)
            known_shingles.update(shingles)
    # Shuffled, so that the validation split, which takes the first documents that a hash selects up
    # to a limit, gets some of each package.
    return sorted(selected, key=lambda path: zlib.crc32(bytes(path)))


def is_table(data):
    """Whether a module is just a table of data, which compresses much better than code."""
    middle = data[len(data) // 2:][:2**16] if len(data) > 2**17 else data[:2**16]
    return len(zlib.compress(middle, 1)) < MIN_COMPRESSED * len(middle)


def sample_shingles(data):
    """Hashes of shingles (four consecutive lines) of a file; in larger files a consistent sample of
    one in eight. Short lines are common everywhere and ignored."""
    lines = [zlib.crc32(line.strip()) for line in data.split(b'\n') if len(line) >= 20]
    line_hashes = np.array(lines, np.uint64)
    columns = [line_hashes]
    if len(line_hashes) > 3:
        columns = [line_hashes[i:len(line_hashes) - 3 + i] for i in range(4)]
    shingles = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        shingles = (shingles ^ column) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
        shingles ^= shingles >> np.uint64(32)
    if len(shingles) > 200:
        shingles = shingles[shingles % np.uint64(8) == 0]
    return shingles.tolist()


TINY_SHAKESPEARE = dict(
    url='https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed', small=True,
    cut_at_line=False)  # nanoGPT splits it at the character

CORPORA = {
    'pystdlib': Corpus("the source of Python's standard library on this machine",
                       'bpe:2048', files=find_standard_library, separators=False, vocab_size=2048,
                       small=True, recipe='config/quickstart.py'),
    'pypackages': Corpus("the source of the Python packages installed here, 200 to 400 MB",
                         'bpe:32768', files=find_packages, separators=False, vocab_size=32_768,
                         small=True, tokens=66_000_000, recipe='config/quickstart_gpu.py'),
    'readme': Corpus('the README of this project, for trying things out', 'char',
                     files=str(ROOT / 'README.md'), small=True, recipe='config/tiny.py'),
    'shakespeare_char': Corpus('tiny Shakespeare, one token per character (nanoGPT)', 'char',
                               tokens=1_003_854, vocab_size=65, **TINY_SHAKESPEARE,
                               recipe='config/shakespeare_char_cpu.py',
                               gpu_recipe='config/shakespeare_char.py'),
    'shakespeare': Corpus('tiny Shakespeare, GPT-2 tokens (nanoGPT)', tokens=301_966,
                          **TINY_SHAKESPEARE, recipe='config/finetune_shakespeare.py'),
    'tinystories': Corpus('short stories in simple words', kind='hub',
                          hub='roneneldan/TinyStories', val_split='validation',
                          tokens=480_000_000),
    # `datasets` no longer runs the script in its main branch; the Hub has it converted to Parquet
    'openwebtext': Corpus('web pages linked from Reddit', kind='hub',
                          hub='Skylion007/openwebtext@refs/convert/parquet',
                          tokens=9_040_000_000),
    'fineweb-edu': Corpus('educational web pages', kind='hub', hub='HuggingFaceFW/fineweb-edu',
                          subset='sample-10BT', tokens=10_000_000_000),
    'fineweb': Corpus('web pages', kind='hub', hub='HuggingFaceFW/fineweb', subset='sample-10BT',
                      tokens=10_400_000_000),
    'text': Corpus('your own files: --input=FILES_OR_FOLDERS', 'auto',
                   recipe='config/own_text.py --minutes=10'),
    'datatrove': Corpus('tokens written by datatrove: --input=FOLDER', kind='datatrove'),
    'ids': Corpus('your own token ids: --input=FOLDER_OR_FILES --vocab_size=N', kind='ids',
                  recipe='config/own_text.py --minutes=10'),
    'chat': Corpus('conversations: --input=FILES_OR_FOLDERS or OWNER/NAME', kind='chat',
                   vocab_size=50_262, recipe='config/finetune_chat.py'),
    'hf': Corpus('any dataset on the Hub, or a folder laid out like one: --input=OWNER/NAME',
                 kind='hub'),
}


def describe_corpus(corpus):
    """One line on a corpus that need not be prepared."""
    description = corpus.about
    if corpus.hub:
        description += f', {corpus.hub}'
    if corpus.subset:
        description += f'/{corpus.subset}'
    if corpus.tokens:
        description += f', about {short(corpus.tokens).replace("G", "B")} tokens'
    return description


def corpus_table():
    """The corpora, one line each, for --help."""
    lines = []
    for name, corpus in CORPORA.items():
        tokenizer = '-' if corpus.kind in ('datatrove', 'ids') else corpus.tokenizer
        lines.append(f'  {name:<20}{tokenizer:<10}{describe_corpus(corpus)}')
    return '\n'.join(lines)


def find_dataset_size(spec, vocab_size=0):
    """The setting `dataset` → (vocab_size, training tokens or None, source of these numbers), also
    before it is prepared. vocab_size: overrides the dataset's unless 0. Raises UserError."""
    if has_token_files(spec):
        dataset = open_dataset_spec(spec, vocab_size)
        tokens = sum(len(component.dataset.split('train')) for component in dataset.components)
        return vocab_size or dataset.vocab_size, tokens, str(dataset.folder)
    name = next(name for name in parse_dataset_spec(spec) if not has_token_files(name))
    corpus = CORPORA.get(name, Corpus(''))
    tokens = None
    if name == spec and corpus.tokens:
        tokens = corpus.tokens
    return vocab_size or corpus.vocab_size, tokens, f'{dataset_folder(name)} is not prepared'
