"""Text ↔ token ids. Every tokenizer is described by a JSON object and can be made again from it.

    tokenizer.encode(text)   str → numpy array of ids
    tokenizer.decode(ids)    ids → str
    tokenizer.vocab_size     ids run from 0 to vocab_size - 1
    tokenizer.end_of_text    the id put in front of each document, or None
    tokenizer.to_json()      → from_json(…)
"""

import numpy as np

from runtime import UserError


class CharTokenizer:
    """One id per distinct character of a corpus, in code point order (nanoGPT's vocabulary)."""

    end_of_text = None

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self._code_points = code_points(chars)  # sorted, so that a binary search finds an id

    @classmethod
    def train(cls, text):
        return cls(''.join(sorted(set(text))))

    def encode(self, text):
        wanted = code_points(text)
        ids = np.searchsorted(self._code_points, wanted)
        ids = np.minimum(ids, self.vocab_size - 1)
        unknown = np.flatnonzero(self._code_points[ids] != wanted)
        if len(unknown):
            at = int(unknown[0])
            raise UserError(f'character {text[at]!r} at position {at} is not among the '
                            f'{self.vocab_size} characters that this tokenizer knows')
        return ids

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)

    def to_json(self):
        return {'kind': 'char', 'chars': self.chars}


def code_points(text):
    # surrogatepass: Python's text may hold lone surrogates, and each is a character like others
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4')


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for end of text. Knows any text, needs no vocabulary."""

    end_of_text = 256
    vocab_size = 257

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'surrogatepass'), dtype=np.uint8)

    def decode(self, ids):
        """Bytes that are no UTF-8 (a character cut in half) become U+FFFD; 256 becomes ''."""
        data = bytes(i for i in ids if i != self.end_of_text)
        return data.decode('utf-8', 'replace')

    def to_json(self):
        return {'kind': 'byte'}


class GPT2Tokenizer:
    """GPT-2's byte-level BPE of 50,257 tokens, from tiktoken."""

    end_of_text = 50256
    vocab_size = 50257

    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise UserError('the gpt2 tokenizer needs tiktoken: pip install tiktoken') from None
        try:
            self._encoding = tiktoken.get_encoding('gpt2')
        except (OSError, ValueError) as e:  # network errors are OSErrors; a bad hash a ValueError
            raise UserError(
                'the gpt2 tokenizer could not be downloaded '
                f'({type(e).__name__}): connect to the internet once, set TIKTOKEN_CACHE_DIR to a '
                'folder that holds it, or use --tokenizer=byte') from None

    def encode(self, text):
        return np.array(self._encoding.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids):
        return self._encoding.decode([int(i) for i in ids])

    def to_json(self):
        return {'kind': 'gpt2'}


KINDS = ('char', 'byte', 'gpt2')


def make_tokenizer(kind, text):
    """The tokenizer of a `kind` in KINDS; `char` learns its vocabulary from `text`."""
    if kind == 'char':
        return CharTokenizer.train(text)
    return from_json({'kind': kind})


def from_json(description):
    """The tokenizer that `to_json` described. Raises UserError where it cannot be made."""
    match description:
        case {'kind': 'char', 'chars': str(chars)} if chars == ''.join(sorted(set(chars))) != '':
            return CharTokenizer(chars)
        case {'kind': 'byte'}:
            return ByteTokenizer()
        case {'kind': 'gpt2'}:
            return GPT2Tokenizer()
    raise UserError(f'unknown tokenizer {str(description)[:80]}: '
                    f'expected one of {", ".join(KINDS)}')
