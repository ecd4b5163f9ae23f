"""Text ↔ token ids: by characters, by bytes, with GPT-2's BPE, with a BPE of one's own, or with a
tokenizer of others (foreign_tokenizer.py); each of them also for conversations (chat_tokenizer.py).
Ids that stand for no text are written as numbers.

    tokenizer.encode(text)   str → numpy array of ids
    tokenizer.decode(ids)    ids → str; decode_bytes: its UTF-8, which may end within a character
    tokenizer.vocab_size     ids run from 0 to vocab_size - 1
    tokenizer.end_of_text    the id put in front of each document, or None
    tokenizer.to_json()      all of it as a JSON object, from which from_json makes it again
"""

import base64
import io
import math
import pickle
import re
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import join_halves

NAMES = 'char, byte, gpt2, bpe or bpe:VOCAB_SIZE'
BPE_VOCAB_SIZE = 8192  # of plain 'bpe'


class UnknownCharacter(UserError):
    """A character is not in the vocabulary."""


class WrongIds(UserError):
    """Ids are not those of tiktoken."""


class Tokenizer:
    """What all tokenizers have that do not say otherwise."""

    def decode(self, ids):
        """Bytes that are no UTF-8, as of a character cut in half, become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')


class CharTokenizer(Tokenizer):
    """One id per distinct character of a corpus: `train` numbers them in code point order, as
    nanoGPT's script does; that of others may have another order."""

    end_of_text = None

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self._ids = np.argsort(code_points(chars))
        self._code_points = code_points(chars)[self._ids]  # sorted, for a binary search

    @classmethod
    def train(cls, texts):
        """From all characters of an iterable of texts (a text is one too), one at a time."""
        found = set()
        for text in texts:
            found.update(text)
        return cls(''.join(sorted(found)))

    def encode(self, text):
        wanted = code_points(text)
        places = np.searchsorted(self._code_points, wanted)
        places = np.minimum(places, self.vocab_size - 1)
        unknown = np.flatnonzero(self._code_points[places] != wanted)
        if len(unknown):
            at = int(unknown[0])
            excerpt = text[max(0, at - 10):at + 10]
            raise UnknownCharacter(f'character {text[at]!r} in {excerpt!r} is not among the '
                                   f'{self.vocab_size} characters that this tokenizer knows')
        return self._ids[places]

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)

    def decode_bytes(self, ids):
        return self.decode(ids).encode('utf-8', 'surrogatepass')

    def to_json(self):
        return {'kind': 'char', 'chars': self.chars}


def code_points(text):
    # surrogatepass: Python's text may hold lone surrogates, and each is a character like others
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4')


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 for end of text. Knows any text, needs no vocabulary.
    Bytes of a file that are no UTF-8 come as lone surrogates (Python's 'surrogateescape')."""

    end_of_text = 256
    vocab_size = 257

    def encode(self, text):
        try:
            data = text.encode('utf-8', 'surrogateescape')
        except UnicodeEncodeError:  # half a character, as JSON can hold it
            data = text.encode('utf-8', 'surrogatepass')
        return np.frombuffer(data, dtype=np.uint8)

    def decode_bytes(self, ids):
        return bytes(i for i in ids if i != self.end_of_text)

    def to_json(self):
        return {'kind': 'byte'}


class IdsTokenizer(Tokenizer):
    """Someone's own ids, of which only their number is known: their text is a list of them."""

    end_of_text = None

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text):
        """'IDS:1,2,3' → [1, 2, 3], blank text → [0]. Raises UserError."""
        words = text.removeprefix('IDS:').replace(',', ' ').split() or ['0']
        if not all(word.isdecimal() and int(word) < self.vocab_size for word in words):
            raise UserError(f'{text[:40]!r} is no list of ids from 0 to {self.vocab_size - 1}: '
                            'write it as IDS:1,2,3')
        return np.array(words, dtype=np.int64)

    def decode_bytes(self, ids):
        return ''.join(f',{i}' for i in ids).encode()

    def to_json(self):
        return {'kind': 'ids', 'vocab_size': self.vocab_size}


class BytePairTokenizer(Tokenizer):
    """What GPT-2's tokenizer and those of our own training share: any text round-trips, and text
    that looks like a control token stays text. The ids are tiktoken's. Where gigatoken is
    installed, it finds the same ids in about a tenth of the time."""

    # After so many bytes gigatoken starts anew, since it remembers each word that it has met.
    RENEWAL_BYTES = 2**25
    # gigatoken knows the letters and digits of Unicode 17, tiktoken 0.14 those of 16. All that are
    # new, and few that are common, are in these ranges: tiktoken encodes texts that hold them.
    NEW_CHARACTERS = re.compile('[\u088f\u0c5c\u0cdc\ua7ce-\ua7f1\U00010940-\U0001efff'
                                '\U00020000-\U0010ffff]')
    CHECKED_BYTES = 2**20  # first, and one in a hundred later, are compared with tiktoken

    def __init__(self, encoding):
        """encoding: tiktoken's, with GPT-2's pattern; its control tokens are its last."""
        self._encoding = encoding
        self._gigatoken, self._bytes_left = None, 0
        self._seen = self._checked = 0  # bytes that gigatoken encoded, that were compared
        self._lock = threading.Lock()  # gigatoken raises where two threads call it at once

    def encode(self, text):
        text, data = join_halves(text)
        known_to_both = text.isascii() or not self.NEW_CHARACTERS.search(text)
        ids = self._encode_fast(data) if known_to_both else None
        if ids is None:
            return self._encode_with_tiktoken(text)
        if self._checked < max(self.CHECKED_BYTES, self._seen // 100):
            self._checked += len(data)
            right = self._encode_with_tiktoken(text)
            if not np.array_equal(ids, right):
                raise WrongIds(f'gigatoken and tiktoken give different ids in {text[:40]!r}…: do '
                               'without gigatoken, which is only faster (pip uninstall gigatoken),'
                               ' and give the same command again')
        return ids

    def _encode_fast(self, data):
        """gigatoken's ids, None where it is not there or gives up."""
        with self._lock, suppress_panic():
            if self._bytes_left <= 0:
                self._gigatoken = None  # frees its memory before there is another
                self._gigatoken = build_gigatoken(self._encoding)
                self._bytes_left = self.RENEWAL_BYTES
            gigatoken, self._gigatoken = self._gigatoken, None  # what gives up is not asked again
            ids = gigatoken and gigatoken.encode(data)
            self._gigatoken = gigatoken
            self._bytes_left -= len(data) if gigatoken else 0
            self._seen += len(data)
            return ids

    def _encode_with_tiktoken(self, text):
        # as an array: the list of encode_ordinary would hold up other threads (Python's lock)
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode_bytes(self, ids):
        return self._encoding.decode_bytes([int(i) for i in ids])


class GPT2Tokenizer(BytePairTokenizer):
    """GPT-2's byte-level BPE of 50,257 tokens, from tiktoken."""

    end_of_text = 50256
    vocab_size = 50257

    def __init__(self):
        import tiktoken
        try:
            super().__init__(tiktoken.get_encoding('gpt2'))
        except (OSError, ValueError) as e:  # network errors are OSErrors; a bad hash a ValueError
            raise UserError(f'the gpt2 tokenizer could not be downloaded ({type(e).__name__}): '
                            'connect to the internet once, set TIKTOKEN_CACHE_DIR to a folder that '
                            'holds it, or name another one: --tokenizer=byte, or a dataset or run '
                            'of yours') from None

    def to_json(self):
        return {'kind': 'gpt2'}


class BPETokenizer(BytePairTokenizer):
    """Byte-level BPE like GPT-2's (Radford et al. 2019, §2.2), with a vocabulary of its own.

    rustbpe trains it, tiktoken runs it. The last two ids are end of text and padding.
    """

    # GPT-2's way of cutting text into the pieces that merges stay within.
    PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

    def __init__(self, tokens):
        """tokens: the bytes of each id but the last two; those merged first come first."""
        import tiktoken
        self.tokens = tokens
        self.end_of_text = len(tokens)
        self.vocab_size = len(tokens) + 2
        super().__init__(tiktoken.Encoding(
            'bpe', pat_str=self.PATTERN,
            mergeable_ranks={token: i for i, token in enumerate(tokens)},
            special_tokens={'<|endoftext|>': len(tokens), '<|padding|>': len(tokens) + 1}))

    @classmethod
    def train(cls, texts, vocab_size):
        """Merge the most frequent pairs of `texts` until there are `vocab_size` tokens (fewer
        where the texts run out of pairs). Raises UserError."""
        if vocab_size < 258:
            raise UserError(f'bpe:{vocab_size} is too few: 256 bytes and 2 control tokens are the '
                            'least, so bpe:258 and up')
        import rustbpe
        trainer = rustbpe.Tokenizer()
        # buffer_size: texts that the trainer holds at a time
        trainer.train_from_iterator(texts, vocab_size - 2, buffer_size=256, pattern=cls.PATTERN)
        ranked = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
        return cls([bytes(token) for token, _ in ranked])

    def to_json(self):
        # Latin-1 maps the 256 bytes to the first 256 characters, so that JSON can hold them.
        return {'kind': 'bpe', 'tokens': [token.decode('latin-1') for token in self.tokens]}


def build_gigatoken(encoding):
    """tiktoken's encoding with GPT-2's pattern → gigatoken's, or None where it is not there."""
    tokens = map(encoding.decode_single_token_bytes, range(encoding.eot_token))
    with suppress_panic(), suppress(ImportError, OSError):  # not there, or no room for the file
        from gigatoken.gigatoken_rs import BPETokenizer as Gigatoken
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, 'ranks.tiktoken')
            path.write_bytes(b''.join(base64.b64encode(token) + b' %d\n' % rank
                                      for rank, token in enumerate(tokens)))
            return Gigatoken.from_tiktoken(path, 'gpt2')
    return None


@contextmanager
def suppress_panic():
    """gigatoken gives up in Rust, as with tokens that no merges make: go on after this context."""
    try:
        yield
    except BaseException as e:  # a PanicException is no Exception
        if type(e).__name__ != 'PanicException':
            raise


def is_name(name):
    """True for one of NAMES, and for 'auto'."""
    return re.fullmatch(r'auto|char|byte|gpt2|bpe(:[0-9]+)?', name) is not None


def choose_vocab_size(size):
    """The vocabulary of a BPE for so many bytes of text: 2,048 for 1 MB, twice as many for ten
    times the text. docs/data.md has what others give."""
    exponent = 11 + math.log10(max(size, 1) / 1e6)
    return 2 ** min(max(round(exponent), 9), 15)


def make_tokenizer(name, texts):
    """The tokenizer of a name in NAMES; char and bpe learn from `texts`. Raises UserError."""
    kind, _, size = name.partition(':')
    if kind == 'char':
        return CharTokenizer.train(texts)
    if kind == 'bpe':
        return BPETokenizer.train(texts, int(size or BPE_VOCAB_SIZE))
    return from_json({'kind': kind})


KINDS = {  # kind → a function from what to_json gave to the tokenizer
    'char': lambda made: CharTokenizer(made['chars']),
    'byte': lambda made: ByteTokenizer(),
    'ids': lambda made: IdsTokenizer(made['vocab_size']),
    'gpt2': lambda made: GPT2Tokenizer(),
    'bpe': lambda made: BPETokenizer([token.encode('latin-1') for token in made['tokens']]),
    'foreign': lambda made: foreign_tokenizer(made),
    'chat': lambda made: chat_tokenizer(made)}


def foreign_tokenizer(made):
    from plaingpt.data.foreign_tokenizer import ForeignTokenizer
    return ForeignTokenizer(made)


def chat_tokenizer(made):
    from plaingpt.data.chat_tokenizer import ChatTokenizer
    return ChatTokenizer(from_json(made['base']), chat_template(made), made.get('system', ''))


def from_json(description):
    """The tokenizer that `to_json` described. Raises UserError where it cannot be made."""
    try:
        return KINDS[description['kind']](description)
    except (KeyError, TypeError):
        raise UserError(f'unknown tokenizer {repr(description)[:80]}: expected one that prepare.py '
                        'wrote') from None


def chat_template(description):
    """The template of a chat tokenizer, '' for ours. Earlier versions wrote the name of one."""
    from plaingpt.data.chat_tokenizer import PLAIN_TEMPLATES
    return description.get('template') or PLAIN_TEMPLATES.get(description.get('form'), '')


def described_vocab_size(description):
    """The vocabulary of `from_json(description)`, without making it; None where it is unknown."""
    kind = description['kind']
    if kind == 'chat':
        from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS
        size = described_vocab_size(description['base'])
        return size + (0 if chat_template(description) else len(SPECIAL_TOKENS))
    if kind in ('char', 'bpe'):
        return len(description['chars']) if kind == 'char' else len(description['tokens']) + 2
    known = {'byte': ByteTokenizer.vocab_size, 'gpt2': GPT2Tokenizer.vocab_size}
    return known.get(kind, description.get('vocab_size'))


def named_vocab_size(name):
    """The vocabulary of `make_tokenizer(name, texts)`, or None where the texts decide."""
    kind, _, size = name.partition(':')
    if kind == 'bpe':
        return int(size or BPE_VOCAB_SIZE)
    return None if kind in ('char', 'auto') else described_vocab_size({'kind': kind})


def token_bytes(tokenizer):
    """How many UTF-8 bytes of text each id stands for, (vocab_size,): 0 for control tokens."""
    words = getattr(tokenizer, 'base', tokenizer)  # what opens and ends a turn is no text
    controls = {words.end_of_text, *getattr(words, 'controls', ())}
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    sizes[:words.vocab_size] = [0 if i in controls else len(words.decode_bytes([i]))
                                for i in range(words.vocab_size)]
    return sizes


def words_of(description):
    """What of the JSON of a tokenizer decides the ids of text; one of others has files beside. None
    for None."""
    if description is None:
        return None
    base = description.get('base', description)
    return base['files']['tokenizer.json'] if base.get('kind') == 'foreign' else description


# -----------------------------------------------------------------------------
# nanoGPT's meta.pkl, read without running anything in it

class PlainUnpickler(pickle.Unpickler):
    """Makes dicts, texts and numbers. A class or a function, which could run code, has a name."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f'it names {module}.{name}')


def read_nanogpt_meta(path):
    """meta.pkl of nanoGPT's data/shakespeare_char/prepare.py, or one that only says vocab_size →
    the description of its tokenizer. Raises UserError for any other pickle."""
    try:
        meta = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        size, itos = meta['vocab_size'], meta.get('itos')
        if itos is None and 'stoi' not in meta and isinstance(size, int) and size > 0:
            return {'kind': 'ids', 'vocab_size': size}
        chars = ''.join(itos[i] for i in range(size))
        ids = {char: i for i, char in enumerate(chars)}
        if not chars or itos != dict(enumerate(chars)) or meta.get('stoi', ids) != ids:
            raise ValueError('itos and stoi are not one-to-one')
        return {'kind': 'char', 'chars': chars}
    except Exception as e:  # a pickle can raise anything
        raise UserError(f'{path} is no meta.pkl as nanoGPT writes it ({type(e).__name__}: '
                        f'{" ".join(str(e).split())}), and nothing in it was run: prepare the text '
                        'into a new folder with python prepare.py text --input=FILE '
                        '--data_dir=NEW_FOLDER') from None


def is_chat(tokenizer):
    """True for the tokenizer of a model that was tuned on conversations."""
    return hasattr(tokenizer, 'end_of_turn')


def ends_of(tokenizer):
    """The ids that end a generated text or answer: those of control tokens."""
    if not is_chat(tokenizer):
        return getattr(tokenizer, 'ends', frozenset({tokenizer.end_of_text} - {None}))
    return ends_of(tokenizer.base) | {tokenizer.end_of_text, tokenizer.end_of_turn,
                                      *tokenizer.roles.values()}
