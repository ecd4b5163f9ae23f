"""gigatoken finds the ids of tiktoken in about a tenth of the time. prepare.py takes it where it is
installed, and compares the ids of the first megabyte, and of one in a hundred, with tiktoken's."""

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

RENEWAL_BYTES = 2**25  # then it starts anew, because it remembers every word
CHECKED_BYTES = 2**20  # first, and one in a hundred later, are compared
# gigatoken knows the letters and digits of Unicode 17, tiktoken 0.14 those of 16. All that are new,
# and few that are common, are in these ranges: tiktoken encodes texts that hold them.
NEW_CHARACTERS = re.compile('[\u088f\u0c5c\u0cdc\ua7ce-\ua7f1\U00010940-\U0001efff'
                            '\U00020000-\U0010ffff]')


class Gigatoken:
    def __init__(self, tokenizer, kind):
        """tokenizer: a BytePairTokenizer; kind: gigatoken's class of a tokenizer"""
        self.tokenizer, self.kind, self.made = tokenizer, kind, None
        self.seen = self.checked = self.renewed = 0  # bytes
        self.lock = threading.Lock()  # it raises where two threads call it at once

    def encode(self, text):
        text, data = join_halves(text)
        if not text.isascii() and NEW_CHARACTERS.search(text):
            return self.tokenizer.encode(text)
        with self.lock:
            if self.made is None or self.seen - self.renewed > RENEWAL_BYTES:
                self.made = None  # frees its memory before there is another
                self.made, self.renewed = self.make(), self.seen
            ids = self.made.encode(data)
            self.seen += len(data)
        if self.checked < max(CHECKED_BYTES, self.seen // 100):
            self.checked += len(data)
            if not np.array_equal(ids, self.tokenizer.encode(text)):
                raise UserError(f'gigatoken and tiktoken give different ids in {text[:40]!r}…: do '
                                'without gigatoken, which is only faster (pip uninstall gigatoken),'
                                ' remove the folder unfinished/ and give the same command again')
        return ids

    def make(self):
        encoding = self.tokenizer.encoding
        tokens = map(encoding.decode_single_token_bytes, range(encoding.eot_token))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, 'ranks.tiktoken')
            path.write_bytes(b''.join(base64.b64encode(token) + b' %d\n' % rank
                                      for rank, token in enumerate(tokens)))
            return self.kind.from_tiktoken(path, 'gpt2')


def fast_encode(tokenizer):
    """→ tokenizer.encode, or a faster function that does the same."""
    if isinstance(tokenizer, BytePairTokenizer):
        with suppress(ImportError):
            from gigatoken.gigatoken_rs import BPETokenizer
            return Gigatoken(tokenizer, BPETokenizer).encode
    return tokenizer.encode
