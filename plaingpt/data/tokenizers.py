"""Text ↔ token ids: characters, words, bytes, GPT-2's BPE, a BPE trained on the dataset, or a
pretrained model's tokenizer (foreign_tokenizer.py); each also for conversations
(chat_tokenizer.py). Ids that do not stand for text are written as numbers.

    tokenizer.encode(text)   str → numpy array of ids
    tokenizer.decode(ids)    ids → str; decode_bytes: UTF-8, which may end within a character
    tokenizer.vocab_size     ids run from 0 to vocab_size - 1
    tokenizer.end_of_text    the id in front of each document, or None
    tokenizer.special_ids    the ids that do not stand for text
    tokenizer.stop_ids       the ids that end a generated text or reply
    tokenizer.to_json()      a JSON object, from which from_json restores the tokenizer
"""

import hashlib
import json
import re

import numpy as np

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of, join_surrogates

# of {token: id} in OpenAI's encoder.json and in every tokenizer.json of GPT-2, sorted by key
GPT2_VOCAB_SHA256 = '855ec41a9d90094ebb1189ee8082e915505cf2dfe0691a4f39da9c020f9476b2'


class Tokenizer:
    """Base class: no special tokens, and decode by way of bytes."""

    end_of_text, special_ids, stop_ids = None, frozenset(), frozenset()

    def decode(self, ids):
        """Invalid UTF-8, such as an incomplete character, becomes U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')


class ListTokenizer(Tokenizer):
    """A list of strings: characters, words, chess moves, notes. Text is encoded by longest match.
    If some tokens are words, longer than a character and not names such as <eos>, and no token
    contains a space, spaces separate words: encode skips white space that is not a token, and
    decode writes a space before each word."""

    UNKNOWN = '<unk>', '<UNK>', '[UNK]'
    NAME = re.compile(r'<[^<>]+>|\[[^\[\]]+\]')

    def __init__(self, tokens):
        """tokens: strings by id. prepare.py sorts characters by code point, as nanoGPT's script
        does; a meta.pkl may have another order."""
        self.tokens = list(tokens)
        self.vocab_size = len(self.tokens)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token}
        unknown_ids = [self._ids[token] for token in self.UNKNOWN if token in self._ids]
        self._unknown_id = unknown_ids[0] if unknown_ids else None
        self._lengths = sorted(set(map(len, self._ids)), reverse=True)
        words = [token for token in self._ids if not token.isspace()]
        self._has_spaces_between = not any(' ' in token for token in self._ids) \
            and all(token.split() == [token] for token in words) \
            and any(len(token) > 1 and not self.NAME.fullmatch(token) for token in words)
        self._unmatched = re.compile(r'\S+|\s' if self._has_spaces_between else r'(?s:.)')
        self._code_points = None
        if all(len(token) == 1 for token in self.tokens):
            code_points_by_id = code_points(''.join(self.tokens))
            self._sorted_ids = np.argsort(code_points_by_id)
            self._code_points = code_points_by_id[self._sorted_ids]  # for a binary search

    def encode(self, text):
        """Raises UserError for unknown text if there is no <unk>. Blank text without tokens → [0],
        unless all tokens are characters."""
        if self._code_points is not None:
            return self._encode_characters(text)
        ids = []
        for part in re.findall(r'\S+|[^\S ]+', text) if self._has_spaces_between else [text]:
            i = self._ids.get(part)
            if i is None:
                ids.extend(self._longest_matches(part))
            else:
                ids.append(i)
        return np.array(ids or [0], dtype=np.int64)

    def _encode_characters(self, text):
        points = code_points(text)
        indices = np.searchsorted(self._code_points, points)
        indices = np.minimum(indices, self.vocab_size - 1)
        unknown = np.flatnonzero(self._code_points[indices] != points)
        if len(unknown):
            start = int(unknown[0])
            self._refuse(text, start, start + 1)
        return self._sorted_ids[indices]

    def _longest_matches(self, text):
        start = 0
        while start < len(text):
            for length in self._lengths:
                end = start + length
                if text[start:end] in self._ids:
                    yield self._ids[text[start:end]]
                    break
            else:
                end = self._unmatched.match(text, start).end()
                is_separator = self._has_spaces_between and text[start].isspace()
                if self._unknown_id is not None and not is_separator:
                    yield self._unknown_id
                elif not is_separator and text.strip():
                    self._refuse(text, start, end)
            start = end

    def _refuse(self, text, start, end):
        raise UserError(f'{text[start:end][:40]!r} in {text[max(0, start - 10):start + 10]!r} is '
                        'not in the vocabulary of this tokenizer '
                        f'({count_of(self.vocab_size, "token")}): remove it, or prepare the data '
                        'with another --tokenizer')

    def decode(self, ids):
        text = self.decode_bytes(ids).decode('utf-8', 'surrogatepass')
        if self._has_spaces_between:
            text = re.sub(r'(^|\s) ', r'\1', text)
        return text

    def decode_bytes(self, ids):
        """Each word begins with its space, so that a text can be continued."""
        tokens = [self.tokens[i] for i in ids]
        if self._has_spaces_between:
            tokens = [f' {token}' if token.strip() else token for token in tokens]
        return ''.join(tokens).encode('utf-8', 'surrogatepass')

    def to_json(self):
        if self._code_points is not None:
            return {'kind': 'char', 'chars': ''.join(self.tokens)}
        return {'kind': 'words', 'tokens': self.tokens}


def code_points(text):
    # surrogatepass: a Python str may contain lone surrogates, which count as characters
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4')


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8, and 256 for end of text. It encodes any text without a vocabulary."""

    end_of_text = 256
    special_ids = stop_ids = frozenset({end_of_text})
    vocab_size = 257

    def encode(self, text):
        return np.frombuffer(join_surrogates(text)[1], dtype=np.uint8)

    def decode_bytes(self, ids):
        return bytes(i for i in ids if i != self.end_of_text)

    def to_json(self):
        return {'kind': 'byte'}


class IdsTokenizer(Tokenizer):
    """The user's own ids. Text is a list of ids. end_of_text: the id that separates documents, or
    None"""

    def __init__(self, vocab_size, end_of_text=None):
        self.vocab_size, self.end_of_text = vocab_size, end_of_text
        self.special_ids = self.stop_ids = frozenset({end_of_text} - {None})

    def encode(self, text):
        """'IDS:1,2,3' → [1, 2, 3], blank text → [0]. Raises UserError."""
        words = text.removeprefix('IDS:').replace(',', ' ').split() or ['0']
        if not all(word.isdecimal() and int(word) < self.vocab_size for word in words):
            raise UserError(f'expected token ids 0–{self.vocab_size - 1}, as in --start=IDS:1,2,3; '
                            f'got {text[:40]!r}')
        return np.array(words, dtype=np.int64)

    def decode(self, ids):
        return ','.join(map(str, ids))

    def decode_bytes(self, ids):
        """Each id begins with its comma, so that a list can be continued."""
        return ''.join(f',{i}' for i in ids).encode()

    def to_json(self):
        description = {'kind': 'ids', 'vocab_size': self.vocab_size}
        if self.end_of_text is not None:
            description['end_of_text'] = self.end_of_text
        return description


# A BPE never merges across the matches of its pattern. GPT-2's (Radford et al. 2019, §2.2):
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# Qwen3.5's, which llama.cpp and gigatoken know by name. A word is letters and their marks: GPT-2's
# ends a word at each vowel sign of Hindi, Tamil or Thai. A word takes one character before it, a
# space or '('. Each digit is a token, so that equal digits of two numbers are equal tokens. English
# endings ('s, 'LL) are cut off at the apostrophe. Line breaks go with the white space or the
# punctuation before them, and of other white space the last one is cut off for the next word.
PATTERN = r"""'(?:[sStTmMdD]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}""" \
    r"""| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
# tiktoken's form of them, with less backtracking: many spaces would overflow its stack.
TIKTOKEN_PATTERNS = {
    GPT2_PATTERN:
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    PATTERN: PATTERN.replace(r'\s+(?!\S)|\s+', r'\s++$|\s+(?!\S)|\s')}


class BytePairTokenizer(Tokenizer):
    """Base class of GPT-2's tokenizer and of trained ones, run by tiktoken: any text round-trips,
    and text that looks like a control token is encoded as text."""

    pattern = GPT2_PATTERN

    def __init__(self, encoding):
        """encoding: tiktoken.Encoding with this pattern; the control tokens have the last ids"""
        self.encoding = encoding

    def encode(self, text):
        # encode_ordinary would build its list while holding the GIL, which blocks other threads.
        return self.encoding.encode_to_numpy(join_surrogates(text)[0], disallowed_special=())

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes([int(i) for i in ids])


class GPT2Tokenizer(BytePairTokenizer):
    """GPT-2's byte-level BPE of 50,257 tokens, from tiktoken."""

    end_of_text = 50256
    special_ids = stop_ids = frozenset({end_of_text})
    vocab_size = 50257

    def __init__(self):
        import tiktoken
        try:
            super().__init__(tiktoken.get_encoding('gpt2'))
        except (OSError, ValueError) as e:  # network errors are OSErrors; a bad hash a ValueError
            raise UserError(f'cannot download the gpt2 tokenizer ({type(e).__name__}): connect to '
                            'the internet once, set TIKTOKEN_CACHE_DIR to a folder that has it, or '
                            'prepare the data with a trained tokenizer, such as '
                            '--tokenizer=bpe:512') from None

    def to_json(self):
        return {'kind': 'gpt2'}


class BPETokenizer(BytePairTokenizer):
    """Byte-level BPE like GPT-2's, trained on the dataset.

    rustbpe trains it, tiktoken runs it. The last two ids are end of text and padding.
    """

    def __init__(self, tokens, pattern=PATTERN):
        """tokens: the bytes of each id except the last two, in merge order"""
        import tiktoken
        self.tokens, self.pattern = tokens, pattern
        self.end_of_text = len(tokens)
        self.special_ids = self.stop_ids = frozenset({self.end_of_text})
        self.vocab_size = len(tokens) + 2
        super().__init__(tiktoken.Encoding(
            'bpe', pat_str=TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks={token: i for i, token in enumerate(tokens)},
            special_tokens={'<|endoftext|>': len(tokens), '<|padding|>': len(tokens) + 1}))

    def to_json(self):
        # JSON holds text only: Latin-1 maps the 256 bytes to the first 256 characters.
        description = {'kind': 'bpe', 'tokens': [token.decode('latin-1') for token in self.tokens]}
        if self.pattern != GPT2_PATTERN:  # that of files of 1.0, which do not name it
            description['pattern'] = self.pattern
        return description


def from_json(description):
    """The inverse of `to_json`. Raises UserError for an unknown description."""
    try:
        match description['kind']:
            case 'char':
                return ListTokenizer(description['chars'])
            case 'words':
                return ListTokenizer(description['tokens'])
            case 'byte':
                return ByteTokenizer()
            case 'ids':
                return IdsTokenizer(description['vocab_size'], description.get('end_of_text'))
            case 'gpt2':
                return GPT2Tokenizer()
            case 'bpe':
                return BPETokenizer([token.encode('latin-1') for token in description['tokens']],
                                    description.get('pattern', GPT2_PATTERN))
            case 'foreign':
                from plaingpt.data.foreign_tokenizer import ForeignTokenizer
                return ForeignTokenizer(description)
            case 'chat':
                from plaingpt.data.chat_tokenizer import ChatTokenizer
                return ChatTokenizer(from_json(description['base']),
                                     description.get('template', ''))
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(f'unknown tokenizer {repr(description)[:80]}: expected one written by '
                    'prepare.py; prepare the data again')


def vocab_size_of(description):
    """from_json(description).vocab_size, without downloading GPT-2's tokenizer."""
    if description['kind'] == 'gpt2':
        return GPT2Tokenizer.vocab_size
    return from_json(description).vocab_size


def document_start_of(description):
    """A tokenizer's JSON → the id that begins each document: end of text or, without one, the line
    break that ends the document before it; None if it has neither. It does not load a pretrained
    model's tokenizer."""
    if description['kind'] == 'gpt2':
        return GPT2Tokenizer.end_of_text
    if 'end_of_text' in description:
        return description['end_of_text']
    tokenizer = from_json(description)
    if tokenizer.end_of_text is not None or not isinstance(tokenizer, ListTokenizer):
        return tokenizer.end_of_text
    return tokenizer.tokens.index('\n') if '\n' in tokenizer.tokens else None


def token_text(tokenizer, token):
    r"""A token id as text; bytes that are not UTF-8 on their own are shown as \xe2."""
    return tokenizer.decode_bytes([token]).decode('utf-8', 'backslashreplace')


def token_bytes(tokenizer):
    """The number of UTF-8 bytes of each id, (vocab_size,): 0 for control tokens."""
    base = getattr(tokenizer, 'base', tokenizer)  # a ChatTokenizer's tokenizer of text
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    for i in range(base.vocab_size):
        if i not in base.special_ids:
            sizes[i] = len(base.decode_bytes([i]))
    return sizes


def vocabulary_of(description):
    """The part of a tokenizer's JSON that determines the ids of text, to compare tokenizers by.
    GPT-2's is the same from tiktoken and from a tokenizer.json. None for None."""
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
    """Whether it encodes conversations."""
    return hasattr(tokenizer, 'end_of_turn')
