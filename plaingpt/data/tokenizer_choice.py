"""The tokenizer of a dataset: borrowed from another dataset, a run or a model, or learned."""

import hashlib
import json
import math
import re
from contextlib import closing
from itertools import chain
from pathlib import Path

from plaingpt.data import tokenizers
from plaingpt.data.chat_tokenizer import as_chat
from plaingpt.data.dataset import dataset_folder, open_dataset
from plaingpt.data.encoding import utf8_bytes
from plaingpt.data.foreign_tokenizer import FILES_OF_TOKENIZER, download, read_tokenizer
from plaingpt.data.text_files import place_to_cut
from plaingpt.data.tokenizers import BPETokenizer, CharTokenizer
from plaingpt.system.errors import UserError, progress_bar
from plaingpt.system.files import is_hub_name, read_json
from plaingpt.system.formatting import join_halves

NAMES = 'char, byte, gpt2, bpe or bpe:VOCAB_SIZE'  # those that need no file
COMPLETE = 'gpt2', 'byte'  # those that need no text to learn from
BPE_VOCAB_SIZE = 8192  # of plain 'bpe'
BPE_SAMPLE_BYTES = 50_000_000  # a bpe tokenizer is trained on about this much text at most
# Training takes 30 to 120 bytes of memory per byte of distinct words. English has few of them. In
# Chinese, which has no spaces, all text between two punctuation marks is one word, and most differ.
BPE_WORD_BYTES = 7_000_000  # of distinct words in a sample, about, at most
PROBE_BYTES = 4_000_000  # of a text, in which distinct words are counted
BLOCK_CHARS = 4096  # of a sample
# What GPT-2's pattern calls a word, for Python's re, where \w is a letter, a digit or _.
WORD = re.compile(r' ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+')
CHECKED_CHARS = 2**20  # that a borrowed tokenizer has to give back


# -----------------------------------------------------------------------------
# borrowed


def describe_tokenizer(name):
    """The description of the tokenizer that has this name (gpt2, byte), or of that of a prepared
    dataset, of a run or one of its checkpoints, or of a pretrained model, by their folders or its
    name on the hub. Raises UserError."""
    if name in COMPLETE:
        return {'kind': name}
    if is_dataset(name):
        found = open_dataset(dataset_folder(name)).tokenizer_json()
    else:
        folder = Path(download(name, FILES_OF_TOKENIZER) if is_hub_name(name) else name)
        states = [*folder.glob('state.json'), *folder.glob('checkpoints/iter-*/state.json')]
        found = read_json(states[-1])['tokenizer'] if states else read_tokenizer(folder)
    if not found:
        raise UserError(f'tokenizer={name}: expected auto, {NAMES}, or a prepared dataset, a run '
                        'or a model to take it from')
    return found


def borrow_tokenizer(name, for_chat=False):
    """The tokenizer of describe_tokenizer. for_chat: with the control tokens of its conversations.
    Raises UserError."""
    found = describe_tokenizer(name)
    if found['kind'] == 'chat' and not for_chat:
        raise UserError(f'tokenizer={name}: it is for conversations: name the tokenizer that these '
                        'were prepared with, or its dataset or run')
    if found['kind'] == 'foreign' and for_chat:
        found = as_chat(found, name)
    return tokenizers.from_json(found)


def check_round_trip(tokenizer, source):
    """Raise UserError where the beginning of a source does not survive encoding and decoding:
    a tokenizer may lowercase text, or lack some of the bytes."""
    tokenizer, seen = getattr(tokenizer, 'base', tokenizer), 0
    with closing(source.pieces()) as pieces:
        for piece in pieces:
            text, _ = join_halves(piece.text)
            decoded = tokenizer.decode(tokenizer.encode(text))
            if decoded != text:
                same = next((i for i, (a, b) in enumerate(zip(text, decoded, strict=False))
                             if a != b), min(len(text), len(decoded)))
                start = max(0, same - 10)
                raise UserError(f'the tokenizer does not give the text back: '
                                f'{text[start:start + 40]!r} is decoded as '
                                f'{decoded[start:start + 40]!r}: choose another --tokenizer')
            seen += len(text)
            if seen >= CHECKED_CHARS:
                return


def is_name(name):
    """True for one of NAMES, and for 'auto'."""
    return re.fullmatch(r'auto|char|byte|gpt2|bpe(:[0-9]+)?', name) is not None


def is_dataset(name):
    """Whether it is a prepared dataset."""
    return any((dataset_folder(name) / meta).exists() for meta in ('meta.json', 'meta.pkl'))


def checksum(tokenizer):
    """SHA-256 of a tokenizer's JSON."""
    return hashlib.sha256(json.dumps(tokenizer.to_json()).encode()).hexdigest()


# -----------------------------------------------------------------------------
# learned


def learn_tokenizer(name, source):
    """The tokenizer of a name in NAMES or 'auto', of a source. Raises UserError."""
    texts = ()
    if name == 'auto':
        name = f'bpe:{choose_vocab_size(source.total)}'
        print(f'tokenizer {name}, for {source.total:,} bytes of text (others by --tokenizer: gpt2 '
              "for GPT-2's, bpe:N, char, byte)")
    if name.startswith('bpe'):
        print(f'training the {name} tokenizer')
        texts = sample(source)
    elif name == 'char':
        texts = read_texts(source, 'finding characters')
        if not source.is_one_text:
            texts = chain(texts, '\n')  # ends each document
    return make_tokenizer(name, texts)


def choose_vocab_size(size):
    """The vocabulary of a BPE for a text of `size` bytes: 2,048 for 1 MB, twice as many for ten
    times the text. docs/data.md has what others give."""
    exponent = 11 + math.log10(max(size, 1) / 1e6)
    return 2 ** min(max(round(exponent), 9), 15)


def make_tokenizer(name, texts):
    """The tokenizer of a name in NAMES; char and bpe learn from `texts`. Raises UserError."""
    if name == 'char':
        found = set()
        for text in texts:
            found.update(text)
        return CharTokenizer(''.join(sorted(found)))
    if name.startswith('bpe'):
        return train_bpe(texts, int(name.removeprefix('bpe').lstrip(':') or BPE_VOCAB_SIZE))
    return tokenizers.from_json({'kind': name})


def train_bpe(texts, vocab_size):
    """Merge the most frequent pairs of `texts` until there are `vocab_size` tokens (fewer where the
    texts run out of pairs) → BPETokenizer. Raises UserError."""
    if vocab_size < 258:
        raise UserError(f'bpe:{vocab_size} is too few: 256 bytes and 2 control tokens are the '
                        'least, so bpe:258 and up')
    import rustbpe
    trainer = rustbpe.Tokenizer()
    # buffer_size: texts that the trainer holds at a time
    trainer.train_from_iterator(texts, vocab_size - 2, buffer_size=256,
                                pattern=BPETokenizer.PATTERN)
    if trainer.vocab_size < vocab_size - 2:
        print(f'the text has pairs for {trainer.vocab_size + 2:,} tokens alone')
    ranked = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    return BPETokenizer([bytes(token) for token, _ in ranked])


def read_texts(source, what):
    """Yield the texts of a source, and show how far it is read."""
    with closing(source.pieces()) as pieces, \
            progress_bar(what, source.total, source.unit) as bar:
        for piece in pieces:
            yield piece.text
            bar.update(source.position() - bar.n)


def sample(source):
    """Yield texts of about BPE_SAMPLE_BYTES, or of fewer so that their distinct words are about
    BPE_WORD_BYTES: spread evenly over files in any order, or all texts if there are no more. A
    dataset of the hub is too large to be read whole: it gives its first texts."""
    if source.unit != 'B':
        yield from first_texts(source)
        return
    total, distinct_share = measure_text(source)
    sample_bytes = min(BPE_SAMPLE_BYTES, BPE_WORD_BYTES / distinct_share)
    if total <= sample_bytes:
        yield from read_texts(source, 'learning from it')
        return
    print(f'learning from {100 * sample_bytes / total:.3g}% of the text, which is spread evenly')
    for text in read_texts(source, 'learning from it'):
        yield from sample_blocks(text, sample_bytes / total)


def first_texts(source):
    """Yield the texts with which a source begins until they reach either limit."""
    probe_share = PROBE_BYTES / BPE_SAMPLE_BYTES
    words, size = DistinctWords(), 0
    for text in read_texts(source, 'learning from its beginning'):
        yield text
        size += utf8_bytes(text)
        for block in sample_blocks(text, probe_share):
            words.add(block)
        if size >= BPE_SAMPLE_BYTES or words.bytes >= probe_share * BPE_WORD_BYTES:
            return


def measure_text(source):
    """→ (bytes of text in a source, bytes of distinct words per byte of it). The second is that of
    about PROBE_BYTES spread evenly; more text repeats more words."""
    words, total, probed = DistinctWords(), 0, 0
    for text in read_texts(source, 'measuring the text'):
        total += utf8_bytes(text)
        for block in sample_blocks(text, PROBE_BYTES / source.total):
            probed += utf8_bytes(block)
            words.add(block)
    return total, words.bytes / probed if words.bytes else 1


class DistinctWords:
    """Adds up the bytes of distinct words."""

    def __init__(self):
        self.words, self.bytes = set(), 0

    def add(self, text):
        new = set(WORD.findall(text)) - self.words
        self.words |= new
        self.bytes += sum(map(utf8_bytes, new))


def sample_blocks(text, share):
    """Yield about this share of a text, in blocks chosen by their hashes. The blocks of a small
    share are among those of a larger one."""
    start = 0
    while start < len(text):
        block = text[start:place_to_cut(text, start, BLOCK_CHARS)]
        start += len(block)
        # another hash than the one for splits, so that the sample is spread over all of them
        digest = hashlib.blake2b(block.encode('utf-8', 'replace'), digest_size=8,
                                 person=b'sample').digest()
        if int.from_bytes(digest, 'big') < share * 2**64:
            yield block
