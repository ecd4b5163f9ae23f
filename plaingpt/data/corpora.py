"""The corpora that prepare.py knows by name. A new corpus is one entry in CORPORA."""

from collections.abc import Callable
from dataclasses import dataclass, field

from plaingpt.data.dataset import (
    dataset_folder,
    has_token_files,
    open_dataset,
    open_named,
    read_names,
)
from plaingpt.data.sources import STANDARD_LIBRARY, find_files, find_standard_library
from plaingpt.data.tokenizers import GPT2Tokenizer, named_vocab_size
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import short


@dataclass(frozen=True)
class Corpus:
    """Where a corpus comes from (`files`, `url` or `hub`; --input takes the place of each), how it
    is cut and tokenized, and about how large it is."""

    about: str  # one line for --help
    tokenizer: str = 'gpt2'  # char, byte, gpt2 or bpe:VOCAB_SIZE; auto: bpe by the size of the text
    files: str = ''  # files, folders and globs on this machine, with commas between
    find: Callable = find_files  # `files` → paths
    url: str = ''  # of a text
    sha256: str = ''  # of the text behind `url`
    hub: str | None = None  # repository on the Hugging Face hub; '': that which --path names
    subset: str = ''  # of a dataset of the hub
    splits: dict = field(default_factory=lambda: {'train': 'train'})  # our name → the hub's
    shards: bool = False  # the repository holds tokens already, in files with llm.c's header
    datatrove: bool = False  # files in which datatrove's DocumentTokenizer wrote tokens
    document_form: str = 'file'  # what a document is: a key of readers.DOCUMENT_FORMS
    text_field: str = 'text'  # of rows: .jsonl, .csv, .parquet and others, the hub
    documents: int = 0
    tokens: int = 0  # to train on
    vocab_size: int = 0  # where the tokenizer's name does not tell
    small: bool = False  # prepared in under a minute: train.py then does it when first asked

    def is_tokens(self):
        """Whether it holds tokens, which others made, and no text."""
        return self.shards or self.datatrove

    def positional(self):
        """(the option that an argument without dashes is, whether there may be several)"""
        return ('path', False) if self.hub == '' else ('input', True)

    def required_option(self):
        """The option that has to say where the text is, or ''."""
        if self.datatrove:
            return '--input=FOLDER'
        if self.hub == '':
            return '--path=OWNER/NAME_OR_FOLDER'
        return '' if self.hub or self.url or self.files else '--input=FILES_OR_FOLDERS'


TINY_SHAKESPEARE = dict(
    url='https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed', small=True)
OWN_VALIDATION = {'train': 'train', 'val': 'validation'}
WIKITEXT = dict(hub='Salesforce/wikitext', document_form='title', splits=OWN_VALIDATION)

CORPORA = {
    'pystdlib': Corpus("the source of Python's standard library, found on this machine",
                       'bpe:2048', files=STANDARD_LIBRARY, find=find_standard_library,
                       small=True),
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
    'tinystories': Corpus('stories in the words of small children',
                          hub='roneneldan/TinyStories', splits=OWN_VALIDATION,
                          documents=2_141_709, tokens=480_000_000),
    'openwebtext': Corpus('web pages that Reddit linked to', hub='Skylion007/openwebtext',
                          documents=8_013_769, tokens=9_040_000_000),
    'fineweb-edu': Corpus('educational web pages', hub='HuggingFaceFW/fineweb-edu',
                          subset='sample-10BT', documents=9_672_101, tokens=10_000_000_000),
    'fineweb': Corpus('web pages', hub='HuggingFaceFW/fineweb', subset='sample-10BT',
                      documents=14_868_862, tokens=10_400_000_000),
    'fineweb10B-gpt2': Corpus('fineweb as tokens', hub='kjj0/fineweb10B-gpt2', shards=True,
                              tokens=10_400_000_000),
    'finewebedu10B-gpt2': Corpus('fineweb-edu as tokens', hub='kjj0/finewebedu10B-gpt2',
                                 shards=True, tokens=10_000_000_000),
    'fineweb100B-gpt2': Corpus('fineweb as tokens', hub='kjj0/fineweb100B-gpt2', shards=True,
                               tokens=103_000_000_000),
    'text': Corpus('your own files: --input=FILES_OR_FOLDERS', 'auto'),
    'datatrove': Corpus('tokens that datatrove wrote: --input=FOLDER', datatrove=True),
    'chat': Corpus('your own conversations: --input=FILES_OR_FOLDERS', vocab_size=50_262),
    'hf': Corpus('any dataset of the hub, or a folder laid out like one: --path=…', hub=''),
}


def describe_corpus(corpus):
    """What is known of a corpus before it is read, as one line."""
    parts = [corpus.about]
    if corpus.hub:
        parts.append('/'.join(filter(None, [corpus.hub, corpus.subset])))
    if corpus.documents:
        parts.append(f'about {corpus.documents / 1e6:.1f}M documents')
    if corpus.tokens:
        tokens = short(corpus.tokens).replace('G', 'B')
        parts.append(f'about {tokens} tokens, {short(2 * corpus.tokens)}B as .bin')
    return ', '.join(parts)


def table():
    """The corpora, a line each, for --help."""
    return '\n'.join(f'  {name:<20}{"-" if corpus.is_tokens() else corpus.tokenizer:<10}'
                     f'{describe_corpus(corpus)}' for name, corpus in CORPORA.items())


def find_dataset_size(name, vocab_size=0):
    """What `dataset` says → (vocabulary, training tokens or None, where they are known from).

    Where nothing is prepared, the table of corpora answers. vocab_size: takes the place of the
    vocabulary that is found, 0 for none. Raises UserError.
    """
    if has_token_files(name):
        open_named(name)  # sees whether they go together
    sizes = find_sizes(name)
    known = [vocab for each, (vocab, _, _) in sizes.items() if has_token_files(each)]
    usual, tokens, sources = zip(*sizes.values(), strict=True)
    missing = [source for source in sources if source.endswith(NOT_PREPARED)]
    return (vocab_size or (known or usual)[0], None if None in tokens else sum(tokens),
            missing[0] if missing else ', '.join(sources))


NOT_PREPARED = ' is not prepared'


def find_sizes(name):
    """find_dataset_size of each corpus that `dataset` says → {its name: …}"""
    sizes = {}
    for each in read_names(name):
        folder, corpus = dataset_folder(each), CORPORA.get(each, Corpus(''))
        if has_token_files(each):
            dataset = open_dataset(folder)
            sizes[each] = dataset.vocab_size, len(dataset.split('train')), str(folder)
            continue
        usual = corpus.vocab_size or named_vocab_size(corpus.tokenizer) or GPT2Tokenizer.vocab_size
        sizes[each] = usual, corpus.tokens or None, f'{folder}{NOT_PREPARED}'
    return sizes
