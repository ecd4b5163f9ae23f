"""Prompts as text → texts: a model and its tokenizer, ready to write."""

import codecs
import sys
import time

import torch

from plaingpt.inference.generation import generate
from plaingpt.system.errors import UserError


class StreamDecoder:
    """One row's tokens as text that grows: no character in halves, nothing from a stop string on.

    show: called with each new piece of text that is sure to stay
    """

    def __init__(self, tokenizer, stop=(), show=None):
        self.tokenizer, self.stop, self.show = tokenizer, stop, show
        self.bytes = codecs.getincrementaldecoder('utf-8')('replace')
        self.text = ''
        self.shown = 0  # characters

    def add(self, token):
        """→ True where a stop string is complete: the row ends before it."""
        before = len(self.text)
        self.text += self.bytes.decode(self.tokenizer.decode_bytes([token]))
        found = [self.text.find(stop, max(0, before - len(stop))) for stop in self.stop]
        if stopped := max(found, default=-1) >= 0:
            self.text = self.text[:min(at for at in found if at >= 0)]
            self.bytes.reset()
        self.release(len(self.text) if stopped else len(self.text) - self.held_back())
        return stopped

    def held_back(self):
        """How many characters at the end could be the beginning of a stop string."""
        return max((n for stop in self.stop for n in range(1, len(stop))
                    if self.text.endswith(stop[:n])), default=0)

    def release(self, end):
        if self.show and end > self.shown:
            self.show(self.text[self.shown:end])
            self.shown = end

    def finish(self):
        """→ the whole text; a character that was never completed is U+FFFD."""
        self.text += self.bytes.decode(b'', final=True)
        self.release(len(self.text))
        return self.text


class TextGenerator:
    """A model and its tokenizer, ready to write texts."""

    def __init__(self, model, tokenizer, context, compiled=None):
        self.model, self.tokenizer = model, tokenizer
        self.context, self.compiled = context, compiled
        self.tokens, self.seconds = 0, 0.0  # written so far, and how long it took

    def encode(self, text, where):
        """→ ids. Raises UserError where the model never saw a character of it."""
        try:
            ids = self.tokenizer.encode(text).tolist()
        except UserError as e:
            raise UserError(f'{where}: {e}; write with characters of the training text') from None
        if not ids:
            if self.tokenizer.end_of_text is None:
                raise UserError(f'{where} is empty: give at least one character, such as --start=A')
            ids = [self.tokenizer.end_of_text]  # as at the beginning of a document
        return ids

    def encode_prompt(self, text, where):
        """→ ids, and a line on stderr where the model reads only the last of them."""
        ids = self.encode(text, where)
        if len(ids) > self.model.config.block_size:
            print(f'{where} has {len(ids):,} tokens and the model reads at most '
                  f'{self.model.config.block_size:,}: only its end counts', file=sys.stderr)
        return ids

    def write(self, prompts, numbers, how, stop=(), show=None):
        """Go on from `prompts`, lists of ids → texts. numbers: of each, for its random numbers."""
        writers = [StreamDecoder(self.tokenizer, stop, show) for _ in prompts]
        generators = [torch.Generator().manual_seed((how.seed * 1_000_003 + n) % 2**63)
                      for n in numbers]
        began = time.perf_counter()

        def on_token(row, token):
            self.tokens += 1
            return writers[row].add(token)

        try:
            with self.context:
                generate(self.model, prompts, how.max_new_tokens, temperature=how.temperature,
                         top_k=how.top_k, top_p=how.top_p, min_p=how.min_p,
                         repetition_penalty=how.repetition_penalty, generators=generators,
                         end_of_text=self.tokenizer.end_of_text if how.end_of_text else None,
                         on_token=on_token, compiled=self.compiled)
        finally:
            self.seconds += time.perf_counter() - began
            texts = [writer.finish() for writer in writers]
        return texts

    def speed(self):
        return f'{self.tokens:,} tokens in {self.seconds:.1f} s: ' \
               f'{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s'
