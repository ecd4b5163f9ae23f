"""The corpora that prepare.py knows by name. A new corpus is one entry in CORPORA."""

from collections.abc import Callable
from dataclasses import dataclass, field

from plaingpt.data.dataset import dataset_folder, has_token_files, open_named, read_names
from plaingpt.data.sources import STANDARD_LIBRARY, find_files, find_standard_library
from plaingpt.data.tokenizers import GPT2Tokenizer
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import short

# The kinds of corpora, and what of prepare.py's options each takes.
ENCODING = 'input val_fraction test_fraction tokenizer shard_tokens num_proc'
OPTIONS = {
    'text': f'{ENCODING} encoding errors documents text_field max_tokens',
    'chat': f'{ENCODING} encoding errors prompt completion',
    'hub': f'{ENCODING} documents text_field max_tokens path subset split val_split test_split',
    'datatrove': 'input val_fraction tokenizer'}  # tokens of its DocumentTokenizer


@dataclass(frozen=True)
class Corpus:
    """Where a corpus comes from (`files`, `url` or `hub`; --input takes the place of each), how it
    is cut and tokenized, and about how large it is."""

    about: str  # one line for --help
    tokenizer: str = 'gpt2'  # char, byte, gpt2 or bpe:VOCAB_SIZE; auto: bpe by the size of the text
    kind: str = 'text'  # a key of OPTIONS
    files: str = ''  # files, folders and globs on this machine, with commas between
    find: Callable = find_files  # `files` → paths
    url: str = ''  # of a text
    sha256: str = ''  # of the text behind `url`
    hub: str = ''  # repository on the Hugging Face hub
    subset: str = ''  # of a dataset of the hub
    splits: dict = field(default_factory=lambda: {'train': 'train'})  # our name → the hub's
    document_form: str = 'file'  # what a document is: a key of readers.DOCUMENT_FORMS
    text_field: str = ''  # of rows: .jsonl, .csv, .parquet and others, the hub
    tokens: int = 0  # to train on
    vocab_size: int = GPT2Tokenizer.vocab_size  # of the tokenizer
    small: bool = False  # prepared in under a minute: train.py then does it when first asked

    def positional(self):
        """(the option that an argument without dashes is, whether there may be several)"""
        return ('path', False) if self.kind == 'hub' and not self.hub else ('input', True)

    def required_option(self):
        """The option that has to say where the text is, or ''."""
        if self.hub or self.url or self.files:
            return ''
        return '--path=OWNER/NAME_OR_FOLDER' if self.kind == 'hub' else '--input=FILES_OR_FOLDERS'


TINY_SHAKESPEARE = dict(
    url='https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed', small=True)
OWN_VALIDATION = {'train': 'train', 'val': 'validation'}
WIKITEXT = dict(kind='hub', hub='Salesforce/wikitext', document_form='title', splits=OWN_VALIDATION)

CORPORA = {
    'pystdlib': Corpus("the source of Python's standard library, found on this machine",
                       'bpe:2048', files=STANDARD_LIBRARY, find=find_standard_library,
                       vocab_size=2048, small=True),
    'readme': Corpus('the README of this project, to try things out', 'char',
                     files=str(ROOT / 'README.md'), small=True),
    'shakespeare_char': Corpus('tiny Shakespeare, one token a character (nanoGPT)', 'char',
                               tokens=1_003_854, vocab_size=65, **TINY_SHAKESPEARE),
    'shakespeare': Corpus('tiny Shakespeare, GPT-2 tokens (nanoGPT)', tokens=301_966,
                          **TINY_SHAKESPEARE),
    'wikitext-2': Corpus('Wikipedia articles', subset='wikitext-2-raw-v1', tokens=2_600_000,
                         **WIKITEXT),
    'wikitext-103': Corpus('Wikipedia articles', subset='wikitext-103-raw-v1',
                           tokens=118_000_000, **WIKITEXT),
    'tinystories': Corpus('stories in the words of small children', kind='hub',
                          hub='roneneldan/TinyStories', splits=OWN_VALIDATION,
                          tokens=480_000_000),
    'openwebtext': Corpus('web pages that Reddit linked to', kind='hub',
                          hub='Skylion007/openwebtext', tokens=9_040_000_000),
    'fineweb-edu': Corpus('educational web pages', kind='hub', hub='HuggingFaceFW/fineweb-edu',
                          subset='sample-10BT', tokens=10_000_000_000),
    'fineweb': Corpus('web pages', kind='hub', hub='HuggingFaceFW/fineweb', subset='sample-10BT',
                      tokens=10_400_000_000),
    'text': Corpus('your own files: --input=FILES_OR_FOLDERS', 'auto'),
    'datatrove': Corpus('tokens that datatrove wrote: --input=FOLDER', kind='datatrove'),
    'chat': Corpus('your own conversations: --input=FILES_OR_FOLDERS', kind='chat',
                   vocab_size=50_262),
    'hf': Corpus('any dataset of the hub, or a folder laid out like one: --path=…', kind='hub'),
}


def describe_corpus(corpus):
    """What is known of a corpus before it is read, as one line."""
    parts = [corpus.about]
    if corpus.hub:
        parts.append('/'.join(filter(None, [corpus.hub, corpus.subset])))
    if corpus.tokens:
        tokens = short(corpus.tokens).replace('G', 'B')
        parts.append(f'about {tokens} tokens, {short(2 * corpus.tokens)}B as .bin')
    return ', '.join(parts)


def table():
    """The corpora, a line each, for --help."""
    lines = []
    for name, corpus in CORPORA.items():
        tokenizer = corpus.tokenizer if 'shard_tokens' in OPTIONS[corpus.kind] else '-'
        lines.append(f'  {name:<20}{tokenizer:<10}{describe_corpus(corpus)}')
    return '\n'.join(lines)


def find_dataset_size(text, vocab_size=0):
    """What the setting `dataset` says → (vocabulary, training tokens or None, where they are known
    from), before it is prepared too. vocab_size: in place of what is found, unless it is 0. Raises
    UserError."""
    if has_token_files(text):
        dataset = open_named(text)
        tokens = sum(len(part.dataset.split('train')) for part in dataset.parts)
        return vocab_size or dataset.vocab_size, tokens, str(dataset.folder)
    name = next(name for name in read_names(text) if not has_token_files(name))
    corpus = CORPORA.get(name, Corpus(''))
    tokens = corpus.tokens or None if name == text else None
    return vocab_size or corpus.vocab_size, tokens, f'{dataset_folder(name)} is not prepared'
