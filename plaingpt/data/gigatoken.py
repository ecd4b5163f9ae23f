"""Encoding with gigatoken, which computes tiktoken's ids faster: 10× for code, 2× for Chinese and
Japanese. prepare.py uses it if installed (the extra `fast`), and compares the ids of the first
megabyte, and of 1% of the text after it, with tiktoken's."""

import base64
import re
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from plaingpt.data.tokenizers import GPT2_PATTERN, PATTERN, BytePairTokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import join_surrogates

SCHEMES = {GPT2_PATTERN: 'gpt2', PATTERN: 'qwen35'}  # gigatoken's names of patterns
CACHE_BYTES = 2**25  # rebuild the encoder after this much text: it caches every word
CHECKED_BYTES = 2**20  # compared at the start, and 1% later
# gigatoken knows the letters, marks and digits of Unicode 17, tiktoken 0.14 those of 16. These
# ranges contain all new ones and few common ones: text with any of them is encoded by tiktoken.
NEW_CHARACTERS = re.compile('[\u088f\u0c5c\u0cdc\u1acf-\u1aeb\ua7ce-\ua7f1\U00010940-\U0001efff'
                            '\U00020000-\U0010ffff]')


class Gigatoken:
    def __init__(self, tokenizer, backend):
        """tokenizer: a BytePairTokenizer; backend: gigatoken's class BPETokenizer"""
        self.tokenizer, self.backend, self.encoder = tokenizer, backend, None
        self.encoded_bytes = self.checked_bytes = self.cached_bytes = 0
        self.lock = threading.Lock()  # the encoder raises if two threads call it at once

    def encode(self, text):
        """tokenizer.encode. Raises UserError if the ids differ from tiktoken's."""
        text, data = join_surrogates(text)
        if not text.isascii() and NEW_CHARACTERS.search(text):
            return self.tokenizer.encode(text)
        with self.lock:
            if self.encoder is None or self.cached_bytes > CACHE_BYTES:
                self.encoder = None  # free its memory before building another
                self.encoder = self.make_encoder()
                self.cached_bytes = 0
            ids = self.encoder.encode(data)
            self.encoded_bytes += len(data)
            self.cached_bytes += len(data)
        if self.checked_bytes < max(CHECKED_BYTES, self.encoded_bytes // 100):
            self.checked_bytes += len(data)
            if not np.array_equal(ids, self.tokenizer.encode(text)):
                raise UserError(f'gigatoken and tiktoken disagree on {text[:40]!r}…: uninstall '
                                'gigatoken (pip uninstall gigatoken), remove the folder '
                                'unfinished/ and run the same command again')
        return ids

    def make_encoder(self):
        encoding = self.tokenizer.encoding
        tokens = map(encoding.decode_single_token_bytes, range(encoding.eot_token))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, 'ranks.tiktoken')
            path.write_bytes(b''.join(base64.b64encode(token) + b' %d\n' % rank
                                      for rank, token in enumerate(tokens)))
            return self.backend.from_tiktoken(path, SCHEMES[self.tokenizer.pattern])


def fast_encode(tokenizer):
    """→ tokenizer.encode, or a faster function that returns the same ids."""
    if isinstance(tokenizer, BytePairTokenizer):
        with suppress(ImportError):
            from gigatoken.gigatoken_rs import BPETokenizer
            return Gigatoken(tokenizer, BPETokenizer).encode
    return tokenizer.encode
