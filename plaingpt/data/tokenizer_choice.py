"""The tokenizer of a dataset: loaded from another dataset, a run or a model, or trained."""

import hashlib
import json
import math
import re
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

from plaingpt.core.dataset import dataset_folder, open_dataset
from plaingpt.data import tokenizers
from plaingpt.data.chat_tokenizer import as_chat
from plaingpt.data.encoding import utf8_bytes
from plaingpt.data.foreign_tokenizer import (
    SUPPORTED,
    TOKENIZER_FILES,
    download,
    find_tokenizer_files,
    read_tokenizer,
)
from plaingpt.data.text_files import find_boundary
from plaingpt.data.tokenizers import PATTERN, BPETokenizer, ListTokenizer
from plaingpt.system.errors import UserError, progress_bar
from plaingpt.system.files import is_hub_name, read_json
from plaingpt.system.formatting import count_of, join_surrogates

NAMES = 'char, byte, gpt2, bpe or bpe:VOCAB_SIZE'
UNTRAINED = 'gpt2', 'byte'  # the same for every text
BPE_VOCAB_SIZE = 8192  # of --tokenizer=bpe
BPE_SAMPLE_BYTES = 50_000_000  # train a BPE on about this much text at most
# Training takes 30 to 120 bytes of memory per byte of distinct words. English has few of them. In
# Chinese, which has no spaces, all text between two punctuation marks is one word, and most differ.
BPE_WORD_BYTES = 7_000_000  # approximate limit on the distinct words in a sample
PROBE_BYTES = 4_000_000  # of the text, to measure its distinct words
BLOCK_CHARS = 4096  # of a sample
# Approximates the words of PATTERN with Python's re, where \w is a letter, a digit or _. Most other
# characters between U+0300 and U+1FFF are marks, which stay in their word.
WORD = re.compile(r'[^\w\r\n]?(?:[^\W\d_]|[^\w\s\0-\u02ff\u2000-\U0010ffff])+|\d'
                  r'| ?(?:[^\w\s]|_)+[\r\n]*|\s+')
CHECKED_CHARS = 2**20  # of the text, which an existing tokenizer must reproduce


# -----------------------------------------------------------------------------
# existing tokenizers


def describe_tokenizer(name):
    """The JSON of a tokenizer: gpt2 or byte, or that of a prepared dataset, a run, a checkpoint or
    a pretrained model (a folder or its name on the Hub). Raises UserError."""
    if name in UNTRAINED:
        return {'kind': name}
    if is_dataset(name):
        description = open_dataset(dataset_folder(name)).tokenizer_json()
    else:
        folder = Path(download(name, TOKENIZER_FILES) if is_hub_name(name) else name)
        states = [*folder.glob('state.json'), *folder.glob('checkpoints/iter-*/state.json')]
        description = read_json(states[-1])['tokenizer'] if states else read_tokenizer(folder)
        if not description and (files := find_tokenizer_files(folder)):
            raise UserError(f'tokenizer={name}: {", ".join(files)}: expected {SUPPORTED}')
    if not description:
        raise UserError(f'tokenizer={name}: expected auto, {NAMES}, or a prepared dataset, a run '
                        'or a model')
    return description


def load_tokenizer(name, for_chat=False):
    """The tokenizer of describe_tokenizer. for_chat: with a pretrained model's chat template.
    Raises UserError."""
    description = describe_tokenizer(name)
    if description['kind'] == 'chat' and not for_chat:
        raise UserError(f'tokenizer={name}: this is a chat tokenizer; choose the tokenizer it is '
                        'based on, or its dataset or run')
    if description['kind'] == 'foreign' and for_chat:
        description = as_chat(description, name)
    return tokenizers.from_json(description)


def check_round_trip(tokenizer, source):
    """Raise UserError if encoding and decoding changes the beginning of a source: a tokenizer may
    lowercase text, or lack some of the bytes."""
    tokenizer, checked = getattr(tokenizer, 'base', tokenizer), 0
    with closing(source.pieces()) as pieces:
        for piece in pieces:
            text, _ = join_surrogates(piece.text)
            decoded = tokenizer.decode(tokenizer.encode(text))
            if decoded != text:
                pairs = enumerate(zip_longest(text, decoded))
                start = max(0, next(i for i, (a, b) in pairs if a != b) - 10)
                raise UserError('the tokenizer does not round-trip this text: '
                                f'{text[start:start + 40]!r} becomes '
                                f'{decoded[start:start + 40]!r}; choose another --tokenizer')
            checked += len(text)
            if checked >= CHECKED_CHARS:
                return


def is_tokenizer_name(name):
    """Whether it is 'auto' or one of NAMES."""
    return re.fullmatch(r'auto|char|byte|gpt2|bpe(:[0-9]+)?', name) is not None


def is_dataset(name):
    return any((dataset_folder(name) / meta).exists() for meta in ('meta.json', 'meta.pkl'))


def checksum(tokenizer):
    """SHA-256 of a tokenizer's JSON."""
    return hashlib.sha256(json.dumps(tokenizer.to_json()).encode()).hexdigest()


# -----------------------------------------------------------------------------
# training


def train_tokenizer(name, source):
    """The tokenizer of a name in NAMES or 'auto', trained on a source. Raises UserError."""
    if name == 'auto':
        name = f'bpe:{choose_vocab_size(source.total)}'
        print(f'tokenizer: {name}, chosen by the size of the text ('
              f'{count_of(source.total, "byte")}); '
              'alternatives: --tokenizer=gpt2, bpe:N, char or byte')
    if name.startswith('bpe'):
        print(f'training the {name} tokenizer')
        return train_bpe(sample(source), int(name.partition(':')[2] or BPE_VOCAB_SIZE))
    if name == 'char':
        chars = set() if source.is_continuous else {'\n'}  # ends each document
        for text in read_texts(source, 'collecting characters'):
            chars.update(text)
        return ListTokenizer(sorted(chars))
    return tokenizers.from_json({'kind': name})


def choose_vocab_size(size):
    """The vocab_size of a BPE for `size` bytes of text: 2,048 for 1 MB, doubled for every ten times
    more text."""
    exponent = 11 + math.log10(max(size, 1) / 1e6)
    return 2 ** min(max(round(exponent), 9), 15)


def train_bpe(texts, vocab_size):
    """Merge the most frequent pairs of `texts` until there are `vocab_size` tokens (fewer if the
    text runs out of pairs) → BPETokenizer. Raises UserError."""
    if vocab_size < 258:
        raise UserError(f'tokenizer=bpe:{vocab_size}: too small: 256 bytes and 2 control tokens '
                        'need at least bpe:258')
    import rustbpe
    trainer = rustbpe.Tokenizer()
    # buffer_size: texts that the trainer holds at a time
    trainer.train_from_iterator(texts, vocab_size - 2, buffer_size=256, pattern=PATTERN)
    if trainer.vocab_size < vocab_size - 2:
        print(f'no more pairs to merge in this text: the vocabulary has {trainer.vocab_size + 2:,} '
              'tokens')
    ranked = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    return BPETokenizer([bytes(token) for token, _ in ranked])


def read_texts(source, description):
    """Yield the texts of a source, with a progress bar."""
    with closing(source.pieces()) as pieces, \
            progress_bar(description, source.total, source.unit) as bar:
        for piece in pieces:
            yield piece.text
            bar.update(source.position() - bar.n)


def sample(source):
    """Yield about BPE_SAMPLE_BYTES of text, or less if that would exceed BPE_WORD_BYTES of distinct
    words; all texts of a small source. The sample is spread evenly over files, whatever their
    order. A dataset on the Hub is too large to read it all: its first texts are the sample."""
    if source.unit != 'B':
        yield from first_texts(source)
        return
    total, distinct_share = measure_text(source)
    sample_bytes = min(BPE_SAMPLE_BYTES, BPE_WORD_BYTES / distinct_share)
    if total <= sample_bytes:
        yield from read_texts(source, 'training the tokenizer')
        return
    print(f'sampling {100 * sample_bytes / total:.3g}% of the text, spread evenly')
    for text in read_texts(source, 'training the tokenizer'):
        yield from sample_blocks(text, sample_bytes / total)


def first_texts(source):
    """Yield the first texts of a source until either limit is reached."""
    probe_share = PROBE_BYTES / BPE_SAMPLE_BYTES
    words, word_bytes, size = set(), 0, 0
    for text in read_texts(source, 'training the tokenizer on the beginning'):
        yield text
        size += utf8_bytes(text)
        for block in sample_blocks(text, probe_share):
            word_bytes += add_words(words, block)
        if size >= BPE_SAMPLE_BYTES or word_bytes >= probe_share * BPE_WORD_BYTES:
            return


def measure_text(source):
    """→ (bytes of text in a source, bytes of distinct words per byte of text). The second is
    measured on about PROBE_BYTES, spread evenly: an upper bound, as more text repeats more words.
    """
    words, word_bytes, total, probed = set(), 0, 0, 0
    for text in read_texts(source, 'measuring the text'):
        total += utf8_bytes(text)
        for block in sample_blocks(text, PROBE_BYTES / source.total):
            probed += utf8_bytes(block)
            word_bytes += add_words(words, block)
    return total, word_bytes / probed if word_bytes else 1


def add_words(words, text):
    """Add the words of a text to a set → the bytes of those that are new."""
    new = set(WORD.findall(text)) - words
    words |= new
    return sum(map(utf8_bytes, new))


def sample_blocks(text, share):
    """Yield about this share of a text, in blocks selected by their hashes. A larger share contains
    the blocks of a smaller one."""
    start = 0
    while start < len(text):
        block = text[start:find_boundary(text, start, BLOCK_CHARS)]
        start += len(block)
        # not the hash that selects splits, so that the sample covers both
        digest = hashlib.blake2b(block.encode('utf-8', 'replace'), digest_size=8,
                                 person=b'sample').digest()
        if int.from_bytes(digest, 'big') < share * 2**64:
            yield block
