"""Prompts → texts, in pieces as they come: a model with its tokenizer."""

import codecs
import sys
import time
from bisect import bisect_left
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from configurator import checked
from plaingpt.data.tokenizers import is_chat
from plaingpt.inference.generation import generate
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import printable


@dataclass
class Sampling:
    """How texts are drawn: settings of sample.py, and options of TextGenerator.generate."""

    # sampling
    max_new_tokens: int = 500  # most tokens in each sample
    temperature: float = 0.8  # below 1 safer, above 1 wilder, 0 likeliest
    top_k: int = 200  # choose among this many of the likeliest tokens; 0 for all
    top_p: float = 1.0  # the likeliest that add up to this
    repetition_penalty: float = 1.0  # above 1: earlier tokens are less likely
    seed: int = 1337  # of the random numbers; the same seed gives the same text

    above_0 = ('max_new_tokens', 'top_p', 'repetition_penalty')
    at_least_0 = ('temperature', 'top_k', 'seed')

    def out_of_range(self):
        return [f'top_p={self.top_p}: must be at most 1'] if self.top_p > 1 else []


def print_text(text, end='\n'):
    """Print what a model wrote. In a terminal, control characters are written out as text."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def list_stops(stop):
    """A text that ends what is written ('' for none), or several → a list. Raises UserError."""
    stops = list(filter(None, [stop])) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) \
            or not all(isinstance(each, str) and each for each in stops):
        raise UserError(f'stop={stop!r}: expected a text, or a list of texts, none of them empty')
    return stops


def parse_history(messages):
    """As parse_messages, for what clients of OpenAI's API send: an answer may be empty."""
    from plaingpt.data.chat_tokenizer import MARK
    from plaingpt.data.conversations import parse_messages
    if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
        # parse_messages refuses a blank text; no tokenizer reads MARK
        messages = [{**each, 'content': MARK} if is_blank_answer(each) else each
                    for each in messages]
    return parse_messages(messages, 'messages')


def is_blank_answer(message):
    """Whether the assistant says nothing in a message."""
    from plaingpt.data.conversations import has_content, join_text
    return message.get('role') == 'assistant' and not has_content(join_text(message.get('content')))


class StreamDecoder:
    """Decodes one row's tokens as they come, and calls `show` with each new piece of text: whole
    characters only, and nothing of a stop string or after it."""

    def __init__(self, tokenizer, stop=(), show=None):
        self.tokenizer, self.stop, self.show = tokenizer, stop, show
        self.bytes = codecs.getincrementaldecoder('utf-8')('replace')
        self.text, self.shown = '', 0  # characters

    def add(self, token):
        """→ whether the text ends here, as before a stop string that is complete"""
        before = len(self.text)
        self.text += self.bytes.decode(self.tokenizer.decode_bytes([token]))
        found = [self.text.find(stop, max(0, before - len(stop))) for stop in self.stop]
        stops = [at for at in found if at >= 0]
        if stops:
            self.text = self.text[:min(stops)]
            self.bytes.reset()
        end = self.shown  # what comes after it may begin a stop string
        while end < len(self.text) and not any(
                stop.startswith(self.text[end:]) for stop in self.stop):
            end += 1
        self.release(end)
        return bool(stops)

    def release(self, end):
        """Show the text up to here."""
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

    def __init__(self, model, tokenizer, context=None, compiled=None):
        self.model, self.tokenizer = model, tokenizer
        self.context, self.compiled = context or nullcontext(), compiled
        self.tokens, self.seconds = 0, 0.0  # generated so far, and the time it took
        self.cancelled = False  # another thread sets it to end what is being written

    def generate(self, prompt, stop=(), **sampling):
        """Continue a text → the text after it; of a list of texts, a list.

        stop: a string that ends the text ('' for none), or several; sampling: fields of Sampling.
        Raises UserError.
        """
        sampling = checked(Sampling, sampling)
        texts = [prompt] if isinstance(prompt, str) else prompt
        prompts = [self.encode(text, 'the prompt') for text in texts]
        new = self.write(prompts, range(len(prompts)), sampling, stop)
        return new[0] if isinstance(prompt, str) else new

    def answer(self, messages, stop=(), **sampling):
        """What the assistant says next in a conversation, [{'role': 'user', 'content': 'Hi!'}, …].

        For models that were tuned on conversations. stop, sampling: see generate(). If the
        context is too short, the oldest turns are left out. UserError
        """
        ids, sampling = self.prepare_answer(messages, checked(Sampling, sampling))
        [text] = self.write([ids], [0], sampling, stop)
        return text

    def prepare_answer(self, messages, sampling):
        """Messages, of which parse_history says more, and a Sampling → (ids to continue, a Sampling
        of an answer that has room behind them).

        A quarter of block_size is kept free for the answer, or max_new_tokens if that is less: the
        oldest messages are left out, but not the system's and the last one. Raises UserError.
        """
        if not is_chat(self.tokenizer):
            raise UserError('messages: this model was not tuned on conversations, so it goes on '
                            'from a prompt alone (/v1/completions): see docs/chat.md')
        messages = parse_history(messages)
        if messages[-1]['role'] != 'user':
            raise UserError('messages: the last one must be of the user, to be answered')
        block_size = self.model.config.block_size
        users = [i for i, message in enumerate(messages) if message['role'] == 'user']

        def encode_from(first):
            return self.tokenizer.encode_prompt(messages[:users[0]] + messages[first:]).tolist()

        most = block_size - min(sampling.max_new_tokens, block_size // 4)
        left_out = bisect_left(users[:-1], True, key=lambda i: len(encode_from(i)) <= most)
        ids = encode_from(users[left_out])
        if len(ids) > block_size:
            raise UserError(f'the message has {len(ids):,} tokens with what the system says, and '
                            f'the model reads at most {block_size:,}: write less')
        room = min(sampling.max_new_tokens, block_size - len(ids) + 1)
        return ids, replace(sampling, max_new_tokens=room)

    def encode(self, text, where):
        """→ ids. Raises UserError for a text that no model of this tokenizer continues."""
        if not isinstance(text, str):
            raise UserError(f'{where} must be a text')
        ids = self.tokenizer.encode(text).tolist()
        if not ids and self.tokenizer.end_of_text is None:
            raise UserError(f'{where} is empty: give at least one character, such as --start=A')
        return ids or [self.tokenizer.end_of_text]  # each document begins with it

    def write(self, prompts, numbers, sampling, stop=(), show=None):
        """Continue `prompts`, lists of ids → texts.

        numbers: of each text; with sampling.seed it decides the text's random numbers
        sampling: a Sampling
        stop: as of generate; show: called with each piece of the one text there is
        """
        stops = list_stops(stop)
        decoders = [StreamDecoder(self.tokenizer, stops, show) for _ in prompts]
        generators = [torch.Generator().manual_seed((sampling.seed * 1_000_003 + n) % 2**63)
                      for n in numbers]
        ends, began = self.tokenizer.stop_ids, time.perf_counter()

        def on_token(row, token):
            if token in ends or self.cancelled:
                return True
            self.tokens += 1
            return decoders[row].add(token)

        try:
            with self.context:
                generate(
                    self.model, prompts, sampling.max_new_tokens,
                    temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                    repetition_penalty=sampling.repetition_penalty, generators=generators,
                    on_token=on_token, compiled=self.compiled)
        finally:  # also after Ctrl-C
            self.seconds += time.perf_counter() - began
            texts = [decoder.finish() for decoder in decoders]
        return texts
