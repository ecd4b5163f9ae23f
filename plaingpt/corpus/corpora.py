"""The corpora that prepare.py knows by name."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Corpus:
    """A line of the table. Its counts are about right, and tokens are those of GPT-2."""

    about: str
    tokenizer: str = 'gpt2'
    hub: str = ''  # repository on the Hugging Face hub
    subset: str = ''
    form: str = 'file'  # what a document is; 'title' joins rows that are lines
    splits: dict = field(default_factory=lambda: {'train': 'train'})  # ours: theirs
    documents: int = 0
    tokens: int = 0
    small: bool = False  # fits in memory and takes under a minute
    shards: bool = False  # tokens already, in files with llm.c's header

OWN_VALIDATION = {'train': 'train', 'val': 'validation'}

CORPORA = {
    'pystdlib': Corpus("the source of Python's standard library, found on this machine",
                       'bpe:2048', small=True),
    'shakespeare_char': Corpus('tiny Shakespeare, one token a character (nanoGPT)',
                               'char', small=True),
    'shakespeare': Corpus('tiny Shakespeare, GPT-2 tokens (nanoGPT)', small=True),
    'wikitext-2': Corpus('Wikipedia articles', hub='Salesforce/wikitext',
                         subset='wikitext-2-raw-v1', form='title', splits=OWN_VALIDATION,
                         tokens=2_600_000),
    'wikitext-103': Corpus('Wikipedia articles', hub='Salesforce/wikitext',
                           subset='wikitext-103-raw-v1', form='title', splits=OWN_VALIDATION,
                           tokens=118_000_000),
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
    'text': Corpus('your own files: --input=FILES_OR_FOLDERS'),
    'hf': Corpus('any dataset of the hub, or a folder laid out like one: --path=…'),
}


def describe(corpus):
    """What is known of a corpus before it is read, as one line."""
    parts = [corpus.about]
    if corpus.hub:
        parts.append('/'.join(filter(None, [corpus.hub, corpus.subset])))
    if corpus.documents:
        parts.append(f'about {corpus.documents / 1e6:.1f}M documents')
    if corpus.tokens:
        size = f'{corpus.tokens / 1e9:.3g}B' if corpus.tokens >= 1e9 \
            else f'{corpus.tokens / 1e6:.3g}M'
        parts.append(f'about {size} tokens, {2 * corpus.tokens / 1e9:.3g} GB as .bin')
    return ', '.join(parts)


def table():
    """The corpora, a line each, for --help."""
    return '\n'.join(f'  {name:<20}{"-" if corpus.shards else corpus.tokenizer:<10}'
                     f'{describe(corpus)}' for name, corpus in CORPORA.items())
