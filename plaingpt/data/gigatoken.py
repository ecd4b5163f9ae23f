"""Encoding with gigatoken, which finds tiktoken's ids in about a tenth of the time. prepare.py uses
it where it is installed (the extra `fast`), and compares the ids of the first megabyte, and of one
in a hundred later, with tiktoken's."""

import base64
import re
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from plaingpt.data.tokenizers import BytePairTokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import join_halves

CACHE_BYTES = 2**25  # of text, after which the tokenizer is made again: it remembers every word
CHECKED_BYTES = 2**20  # first, and one in a hundred later, are compared
# gigatoken knows the letters and digits of Unicode 17, tiktoken 0.14 those of 16. All that are new,
# and few that are common, are in these ranges: tiktoken encodes text that contains them.
NEW_CHARACTERS = re.compile('[\u088f\u0c5c\u0cdc\ua7ce-\ua7f1\U00010940-\U0001efff'
                            '\U00020000-\U0010ffff]')


class Gigatoken:
    def __init__(self, tokenizer, backend):
        """tokenizer: a BytePairTokenizer; backend: gigatoken's class BPETokenizer"""
        self.tokenizer, self.backend, self.encoder = tokenizer, backend, None
        self.seen = self.checked = self.cached = 0  # bytes
        self.lock = threading.Lock()  # it raises where two threads call it at once

    def encode(self, text):
        """As tokenizer.encode. Raises UserError where the ids are not tiktoken's."""
        text, data = join_halves(text)
        if not text.isascii() and NEW_CHARACTERS.search(text):
            return self.tokenizer.encode(text)
        with self.lock:
            if self.encoder is None or self.cached > CACHE_BYTES:
                self.encoder = None  # free its memory before there is another
                self.encoder, self.cached = self.make_encoder(), 0
            ids = self.encoder.encode(data)
            self.seen += len(data)
            self.cached += len(data)
        if self.checked < max(CHECKED_BYTES, self.seen // 100):
            self.checked += len(data)
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
            return self.backend.from_tiktoken(path, 'gpt2')


def fast_encode(tokenizer):
    """→ tokenizer.encode, or a faster function that returns the same ids."""
    if isinstance(tokenizer, BytePairTokenizer):
        with suppress(ImportError):
            from gigatoken.gigatoken_rs import BPETokenizer
            return Gigatoken(tokenizer, BPETokenizer).encode
    return tokenizer.encode
