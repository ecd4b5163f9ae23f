"""Text ↔ token ids: by characters, by words, by bytes, with GPT-2's BPE, with a BPE of one's own,
or with a tokenizer of others (foreign_tokenizer.py); each of them also for conversations
(chat_tokenizer.py). Ids that stand for no text are written as numbers.

    tokenizer.encode(text)   str → numpy array of ids
    tokenizer.decode(ids)    ids → str; decode_bytes: its UTF-8, which may end within a character
    tokenizer.vocab_size     ids run from 0 to vocab_size - 1
    tokenizer.end_of_text    the id put in front of each document, or None
    tokenizer.controls       the ids that stand for no text
    tokenizer.ends           the ids that end a generated text or answer
    tokenizer.to_json()      all of it as a JSON object, from which from_json makes it again
"""

import hashlib
import json
import re

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import join_halves

# of {token: id}, as OpenAI's encoder.json and each tokenizer.json of GPT-2 have it, by its keys
GPT2_VOCAB_SHA256 = '855ec41a9d90094ebb1189ee8082e915505cf2dfe0691a4f39da9c020f9476b2'


class Tokenizer:
    """What most tokenizers have in common."""

    end_of_text, controls, ends = None, frozenset(), frozenset()

    def decode(self, ids):
        """Bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')


class CharTokenizer(Tokenizer):
    """One id per distinct character of a corpus. prepare.py numbers them in code point order, as
    nanoGPT's script does; a meta.pkl of others may have another order."""

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self._ids = np.argsort(code_points(chars))
        self._code_points = code_points(chars)[self._ids]  # sorted, for a binary search

    def encode(self, text):
        wanted = code_points(text)
        places = np.searchsorted(self._code_points, wanted)
        places = np.minimum(places, self.vocab_size - 1)
        unknown = np.flatnonzero(self._code_points[places] != wanted)
        if len(unknown):
            at = int(unknown[0])
            excerpt = text[max(0, at - 10):at + 10]
            raise UserError(f'character {text[at]!r} in {excerpt!r} is not among the '
                            f'{self.vocab_size} characters that this tokenizer knows: leave it '
                            'out, or choose another --tokenizer for prepare.py')
        return self._ids[places]

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)

    def decode_bytes(self, ids):
        return self.decode(ids).encode('utf-8', 'surrogatepass')

    def to_json(self):
        return {'kind': 'char', 'chars': self.chars}


class WordTokenizer(Tokenizer):
    """A list of tokens of any length: words, chess moves, notes. Where no token contains a space,
    spaces separate them in text. Otherwise text is split at the longest token that matches."""

    UNKNOWN = '<unk>', '<UNK>', '[UNK]'
    SPECIAL = re.compile(r'<[^<>]+>|\[[^\[\]]+\]')  # tokens such as <eos> beside characters

    def __init__(self, tokens):
        self.tokens = tokens
        self.vocab_size = len(tokens)
        self._ids = {token: i for i, token in enumerate(tokens) if token}
        unknown = [self._ids[token] for token in self.UNKNOWN if token in self._ids]
        self._unknown = unknown[0] if unknown else None
        spaces = [token for token in self._ids if token.isspace()]
        words = [token for token in self._ids if not token.isspace()]
        self._spaced = not any(' ' in token for token in spaces) \
            and all(token.split() == [token] for token in words) \
            and any(len(token) > 1 and not self.SPECIAL.fullmatch(token) for token in words)
        self._lengths = sorted(set(map(len, self._ids)), reverse=True)
        self._pieces = re.compile('|'.join([*map(re.escape, sorted(spaces, key=len, reverse=True)),
                                            r'\S+']))

    def encode(self, text):
        """Blank text without tokens → [0]. Raises UserError for text that no token matches, where
        there is no <unk>."""
        pieces = self._pieces.findall(text) if self._spaced else self._longest(text)
        ids = []
        for piece in pieces:
            i = self._ids.get(piece, self._unknown)
            if i is None and text.strip():
                raise UserError(f'{piece[:40]!r} in {text[:40]!r} is not among the '
                                f'{self.vocab_size} tokens of this tokenizer, which has no <unk>: '
                                'leave it out, or choose another --tokenizer for prepare.py')
            ids.append(i or 0)
        return np.array(ids or [0], dtype=np.int64)

    def _longest(self, text):
        at = 0
        while at < len(text):
            piece = next((text[at:at + length] for length in self._lengths
                          if text[at:at + length] in self._ids), text[at])
            yield piece
            at += len(piece)

    def decode(self, ids):
        text = self.decode_bytes(ids).decode('utf-8', 'surrogatepass')
        return re.sub(r'(^|\s) ', r'\1', text) if self._spaced else text

    def decode_bytes(self, ids):
        """Each word begins with its space, so that a text can be continued."""
        tokens = (self.tokens[i] for i in ids)
        if self._spaced:
            tokens = (f' {token}' if token.strip() else token for token in tokens)
        return ''.join(tokens).encode('utf-8', 'surrogatepass')

    def to_json(self):
        return {'kind': 'words', 'tokens': self.tokens}


def code_points(text):
    # surrogatepass: Python's text may hold lone surrogates, and each is a character like others
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4')


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 for end of text. Knows any text, needs no vocabulary."""

    end_of_text = 256
    controls = ends = frozenset({end_of_text})
    vocab_size = 257

    def encode(self, text):
        return np.frombuffer(join_halves(text)[1], dtype=np.uint8)

    def decode_bytes(self, ids):
        return bytes(i for i in ids if i != self.end_of_text)

    def to_json(self):
        return {'kind': 'byte'}


class IdsTokenizer(Tokenizer):
    """Someone's own ids. Only their number is known, so their text is a list of ids."""

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
    that looks like a control token stays text. tiktoken does the work."""

    def __init__(self, encoding):
        """encoding: tiktoken's, with GPT-2's pattern; its control tokens are its last."""
        self.encoding = encoding

    def encode(self, text):
        # as an array: the list of encode_ordinary would hold up other threads (Python's lock)
        return self.encoding.encode_to_numpy(join_halves(text)[0], disallowed_special=())

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes([int(i) for i in ids])


class GPT2Tokenizer(BytePairTokenizer):
    """GPT-2's byte-level BPE of 50,257 tokens, from tiktoken."""

    end_of_text = 50256
    controls = ends = frozenset({end_of_text})
    vocab_size = 50257

    def __init__(self):
        import tiktoken
        try:
            super().__init__(tiktoken.get_encoding('gpt2'))
        except (OSError, ValueError) as e:  # network errors are OSErrors; a bad hash a ValueError
            raise UserError(f'the gpt2 tokenizer could not be downloaded ({type(e).__name__}): '
                            'connect to the internet once, set TIKTOKEN_CACHE_DIR to a folder that '
                            'holds it, or name another one, such as --tokenizer=byte') from None

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
        self.controls = self.ends = frozenset({self.end_of_text})
        self.vocab_size = len(tokens) + 2
        super().__init__(tiktoken.Encoding(
            'bpe', pat_str=self.PATTERN,
            mergeable_ranks={token: i for i, token in enumerate(tokens)},
            special_tokens={'<|endoftext|>': len(tokens), '<|padding|>': len(tokens) + 1}))

    def to_json(self):
        # Latin-1 maps the 256 bytes to the first 256 characters, so that JSON can hold them.
        return {'kind': 'bpe', 'tokens': [token.decode('latin-1') for token in self.tokens]}


def from_json(description):
    """The tokenizer that `to_json` described. Raises UserError where it cannot be made."""
    try:
        match description['kind']:
            case 'char':
                return CharTokenizer(description['chars'])
            case 'words':
                return WordTokenizer(description['tokens'])
            case 'byte':
                return ByteTokenizer()
            case 'ids':
                return IdsTokenizer(description['vocab_size'])
            case 'gpt2':
                return GPT2Tokenizer()
            case 'bpe':
                return BPETokenizer([token.encode('latin-1') for token in description['tokens']])
            case 'foreign':
                from plaingpt.data.foreign_tokenizer import ForeignTokenizer
                return ForeignTokenizer(description)
            case 'chat':
                from plaingpt.data.chat_tokenizer import ChatTokenizer
                return ChatTokenizer(from_json(description['base']),
                                     description.get('template', ''))
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(f'unknown tokenizer {repr(description)[:80]}: expected one that prepare.py '
                    'wrote')


def described_vocab_size(description):
    """The vocabulary of `from_json(description)`. GPT-2's tokenizer need not be there for it."""
    if description['kind'] == 'gpt2':
        return GPT2Tokenizer.vocab_size
    return from_json(description).vocab_size


def token_bytes(tokenizer):
    """How many UTF-8 bytes of text each id stands for, (vocab_size,): 0 for control tokens."""
    words = getattr(tokenizer, 'base', tokenizer)  # for text, without the tokens of turns
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    sizes[:words.vocab_size] = [0 if i in words.controls else len(words.decode_bytes([i]))
                                for i in range(words.vocab_size)]
    return sizes


def words_of(description):
    """The part of a tokenizer's JSON that decides the ids of text, without other files; GPT-2's is
    the same from tiktoken and from a tokenizer.json. None for None."""
    if description is None:
        return None
    base = description.get('base', description)
    if base.get('kind') != 'foreign':
        return description
    text = base['files']['tokenizer.json']
    if base['vocab_size'] == GPT2Tokenizer.vocab_size:
        vocab = json.dumps(json.loads(text)['model']['vocab'], sort_keys=True)
        if hashlib.sha256(vocab.encode()).hexdigest() == GPT2_VOCAB_SHA256:
            return {'kind': 'gpt2'}
    return text


def is_chat(tokenizer):
    """True for the tokenizer of a model that was tuned on conversations."""
    return hasattr(tokenizer, 'end_of_turn')
