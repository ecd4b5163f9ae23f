"""The tokenizer of a dataset: borrowed from another dataset, a run or a model, or learned."""

import hashlib
import json
import math
import re
from contextlib import closing
from functools import lru_cache
from itertools import chain
from pathlib import Path

from plaingpt.data import tokenizers
from plaingpt.data.chat_tokenizer import as_chat
from plaingpt.data.dataset import dataset_folder, open_dataset
from plaingpt.data.foreign_tokenizer import FILES_OF_TOKENIZER, download, read_tokenizer
from plaingpt.data.text_files import place_to_cut
from plaingpt.data.tokenizers import BPETokenizer, CharTokenizer
from plaingpt.system.errors import UserError, progress_bar
from plaingpt.system.files import is_hub_name, read_json
from plaingpt.system.formatting import join_halves

NAMES = 'char, byte, gpt2, bpe or bpe:VOCAB_SIZE'  # those that need no file
COMPLETE = 'gpt2', 'byte'  # those that need no text to learn from
BPE_VOCAB_SIZE = 8192  # of plain 'bpe'
BPE_SAMPLE_CHARS = 50_000_000  # a bpe tokenizer is trained on about this much text at most
BLOCK_CHARS = 4096  # of a sample
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
        texts = sample(source, BPE_SAMPLE_CHARS)
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


@lru_cache(1)  # of a running text they are asked for twice
def count_characters(source):
    return sum(map(len, read_texts(source, 'counting characters')))


def sample(source, characters):
    """Yield texts of about `characters` in all, spread evenly over files in any order, or all texts
    if there are fewer. A dataset of the hub is too large to be read whole: it gives its first
    texts."""
    if source.unit != 'B':
        for text in read_texts(source, 'learning from its beginning'):
            yield text
            characters -= len(text)
            if characters <= 0:
                break
        return
    total = count_characters(source)
    if total <= characters:
        yield from read_texts(source, 'learning from it')
        return
    print(f'learning from {100 * characters / total:.3g}% of the text, which is spread evenly')
    for text in read_texts(source, 'learning from it'):
        start = 0
        while start < len(text):
            block = text[start:place_to_cut(text, start, BLOCK_CHARS)]
            start += len(block)
            # another hash than the one for splits, so that the sample is spread over all of them
            digest = hashlib.blake2b(block.encode('utf-8', 'replace'), digest_size=8,
                                     person=b'sample').digest()
            if int.from_bytes(digest, 'big') < characters / total * 2**64:
                yield block
