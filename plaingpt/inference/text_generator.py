"""Prompts → texts, in pieces as they come: a model with its tokenizer."""

import codecs
import time
from pathlib import Path

import torch

from plaingpt.inference.generation import generate
from plaingpt.system.errors import UserError
from plaingpt.system.streams import warn


def read_text(path, where):
    """The text of a UTF-8 file. Raises UserError, beginning with `where`."""
    try:
        return Path(path).read_text(encoding='utf-8')
    except OSError as e:
        raise UserError(f'{where}: {e.strerror}') from None
    except UnicodeDecodeError:
        raise UserError(f'{where}: not a UTF-8 text file') from None


class StreamDecoder:
    """Decodes one row's tokens as they come, and calls `show` with each new piece of text: whole
    characters only, and nothing of a stop string or after it."""

    def __init__(self, tokenizer, stop=(), show=None):
        self.tokenizer, self.stop, self.show = tokenizer, stop, show
        self.bytes = codecs.getincrementaldecoder('utf-8')('replace')
        self.text = ''
        self.shown = 0  # characters

    def add(self, token):
        """→ True when a stop string is complete. The text then ends before it."""
        before = len(self.text)
        self.text += self.bytes.decode(self.tokenizer.decode_bytes([token]))
        found = [self.text.find(stop, max(0, before - len(stop))) for stop in self.stop]
        stops = [at for at in found if at >= 0]
        if stops:
            self.text = self.text[:min(stops)]
            self.bytes.reset()
        self.release(len(self.text) - self.held_back())
        return bool(stops)

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
    """Writes texts. context: of prepare_for_generation; compiled: of generation.generate"""

    def __init__(self, model, tokenizer, context, compiled=None):
        self.model, self.tokenizer = model, tokenizer
        self.context, self.compiled = context, compiled
        self.tokens, self.seconds = 0, 0.0  # generated so far, and the time it took

    def encode(self, text, where):
        """→ ids. Raises UserError, beginning with `where`, for characters the tokenizer lacks."""
        try:
            ids = self.tokenizer.encode(text).tolist()
        except UserError as e:
            raise UserError(f'{where}: {e}; write with characters of the training text') from None
        if not ids:
            if self.tokenizer.end_of_text is None:
                raise UserError(f'{where} is empty: give at least one character, such as --start=A')
            ids = [self.tokenizer.end_of_text]  # each document begins with it
        return ids

    def encode_prompt(self, text, where):
        """→ ids. Warns on stderr when there are more than the model can read."""
        ids = self.encode(text, where)
        if len(ids) > self.model.config.block_size:
            warn(f'{where} has {len(ids):,} tokens and the model reads at most '
                 f'{self.model.config.block_size:,}: only its end counts')
        return ids

    def write(self, prompts, numbers, sampling, stop=(), show=None):
        """Continue `prompts`, lists of ids → texts.

        numbers: of each text; with sampling.seed it decides the text's random numbers
        sampling: a SampleConfig
        stop: strings that end a text; show: called with each piece of the one text there is
        """
        decoders = [StreamDecoder(self.tokenizer, stop, show) for _ in prompts]
        generators = [torch.Generator().manual_seed((sampling.seed * 1_000_003 + n) % 2**63)
                      for n in numbers]
        began = time.perf_counter()

        def on_token(row, token):
            self.tokens += 1
            return decoders[row].add(token)

        try:
            with self.context:
                generate(
                    self.model, prompts, sampling.max_new_tokens,
                    temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                    min_p=sampling.min_p, repetition_penalty=sampling.repetition_penalty,
                    end_of_text=self.tokenizer.end_of_text if sampling.end_of_text else None,
                    generators=generators, on_token=on_token, compiled=self.compiled)
        finally:  # also after Ctrl-C
            self.seconds += time.perf_counter() - began
            texts = [decoder.finish() for decoder in decoders]
        return texts

    def speed(self):
        return f'{self.tokens:,} tokens in {self.seconds:.1f} s: ' \
               f'{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s'
