"""Text generation and chat: a model with its tokenizer, streaming, stop strings."""

import codecs
import sys
import time
from bisect import bisect_left, bisect_right
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from configurator import checked
from plaingpt.core.loss import token_losses
from plaingpt.data.tokenizers import is_chat, token_text
from plaingpt.inference.generation import generate
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import printable


@dataclass
class Sampling:
    """Sampling parameters: settings of sample.py and options of TextGenerator.generate."""

    # sampling
    max_new_tokens: int = 500  # maximum number of tokens per sample
    temperature: float = 0.8  # below 1: less random; above 1: more random; 0: greedy
    top_k: int = 200  # sample from the k most likely tokens; 0: from all
    top_p: float = 1.0  # keep the likeliest tokens with total probability top_p
    repetition_penalty: float = 1.0  # above 1: penalize tokens that already occurred
    seed: int = 1337  # random seed; the same seed gives the same text
    continue_text: bool = False  # the prompt is the middle of a document, not its start

    above_0 = ('max_new_tokens', 'top_p', 'repetition_penalty')
    at_least_0 = ('temperature', 'top_k', 'seed')

    def out_of_range(self):
        return [f'top_p={self.top_p}: must be at most 1'] if self.top_p > 1 else []


def prompt_ids(text, tokenizer, document_start):
    """A prompt → token ids. document_start: the id that starts each document in training, which
    the prompt then follows, or which stands alone without a prompt ('', or nanoGPT's default, a
    line break). None if there are no documents, or if the prompt is the middle of one. Raises
    UserError for a prompt without tokens that no end-of-text token can stand for."""
    is_empty = document_start is not None and text in ('', '\n', 'IDS:')
    ids = [] if is_empty else tokenizer.encode(text).tolist()
    if document_start is not None and ids[:1] != [document_start]:
        ids = [document_start, *ids]
    if not ids and tokenizer.end_of_text is None:
        raise UserError('the prompt is empty; give at least one character, such as --start=A')
    return ids or [tokenizer.end_of_text]  # it starts each document


def print_text(text, end='\n'):
    """Print generated text, with control characters escaped if the output is a terminal."""
    if sys.stdout.isatty():
        text = printable(text)
    print(text, end=end, flush=True)


def list_stop_strings(stop):
    """A stop string ('' for none), or a list of them → a list. Raises UserError."""
    if isinstance(stop, str):
        return [stop] if stop else []
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
        raise UserError(f'stop={stop!r}: expected a string or a list of nonempty strings')
    return stop


def parse_history(messages):
    """Like parse_messages, but allows empty assistant messages, which clients of OpenAI's API send.
    """
    from plaingpt.data.chat_tokenizer import MARK
    from plaingpt.data.conversations import has_content, join_text, parse_messages
    if isinstance(messages, list):
        messages = [*messages]
        for i, message in enumerate(messages):
            if isinstance(message, dict) and message.get('role') == 'assistant' \
                    and not has_content(join_text(message.get('content'))):
                # parse_messages rejects blank texts; chat tokenizers encode MARK as no tokens
                messages[i] = {**message, 'content': MARK}
    return parse_messages(messages, 'messages')


class Logprobs:
    """Log-probabilities of the tokens of a text, and of the `n_top` likeliest tokens in the place
    of each: of the model's distribution, before temperature, top_k, top_p and repetition_penalty.
    """

    def __init__(self, n_top):
        self.n_top = n_top
        self.logprobs = None  # (V,): of the next token
        self.pending = []  # tokens with text to come: (where it starts, id, {id: log-probability})
        self.completed = []  # (text of the token, id, {id: log-probability})

    def on_logits(self, logits):  # (1, V)
        self.logprobs = logits[0].log_softmax(dim=-1)

    def add(self, token, start):
        n_top = min(self.n_top, len(self.logprobs))
        ids = [*self.logprobs.topk(n_top).indices.tolist(), token]
        self.pending.append((start, token, {i: self.logprobs[i].item() for i in ids}))

    def complete(self, text, end, is_final):
        """Complete the tokens that end within text[:end], or all of them → where they end."""
        starts = [start for start, *_ in self.pending] + [len(text)]
        n = bisect_right(starts, end) - 1  # tokens that end there
        # The first byte of a character has no text: it is completed with the next token.
        while n > 0 and not is_final and starts[n - 1] == starts[n]:
            n -= 1
        for i, (_, *token) in enumerate(self.pending[:n]):
            self.completed.append((text[starts[i]:starts[i + 1]], *token))
        del self.pending[:n]
        return starts[n]


class StreamDecoder:
    """Decodes the tokens of one row as they are generated, and calls `on_text` with each new piece
    of text: complete characters only, after `space` and up to the first stop string."""

    def __init__(self, tokenizer, stop_strings=(), on_text=None, space='', logprobs=None):
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.on_text = on_text
        self.space = space
        self.logprobs = logprobs
        self.utf8 = codecs.getincrementaldecoder('utf-8')('replace')
        self.text = ''
        self.n_emitted = 0  # characters passed to on_text

    def add(self, token):
        """Decode a token → whether the text is complete, because a stop string follows it."""
        previous_length = len(self.text)
        self.text += self.utf8.decode(self.tokenizer.decode_bytes([token]))
        if self.space:
            if self.space.startswith(self.text) and self.text != self.space:
                return False  # the rest of the space may follow
            self.text, self.space, previous_length = self.text.removeprefix(self.space), '', 0
        positions = [self.text.find(stop, max(0, previous_length - len(stop)))
                     for stop in self.stop_strings]
        positions = [position for position in positions if position >= 0]
        if positions:
            self.text = self.text[:min(positions)]
            self.utf8.reset()
            if self.logprobs:  # forget the tokens of the stop string
                self.logprobs.pending = [token for token in self.logprobs.pending
                                         if token[0] < len(self.text)]
        end = self.n_emitted  # hold back what may be the start of a stop string
        while end < len(self.text) and not any(stop.startswith(self.text[end:])
                                               for stop in self.stop_strings):
            end += 1
        self.emit(end)
        return bool(positions)

    @property
    def next_start(self):
        """Where the text of the next token begins."""
        return 0 if self.space else len(self.text)

    def emit(self, end, is_final=False):
        """Pass the text up to `end` to on_text; with Logprobs, up to the end of a token."""
        if self.logprobs:
            end = self.logprobs.complete(self.text, end, is_final)
        if self.on_text and end > self.n_emitted:
            self.on_text(self.text[self.n_emitted:end])
        self.n_emitted = end

    def finish(self):
        """→ the whole text; an incomplete character becomes U+FFFD."""
        self.text += self.utf8.decode(b'', final=True)
        self.emit(len(self.text), is_final=True)
        return self.text


class TextGenerator:
    """A model and its tokenizer. context: from prepare_for_generation(); compiled: a CompiledStep;
    document_start: see prompt_ids()"""

    def __init__(self, model, tokenizer, context=None, compiled=None, document_start=None):
        self.model = model
        self.tokenizer = tokenizer
        self.document_start = document_start
        self.context = context or nullcontext()
        self.compiled = compiled
        self.tokens = 0  # generated so far
        self.seconds = 0.0  # spent on generating them
        self.cancelled = False  # set by another thread to stop generating

    def generate(self, prompt, stop=(), **sampling):
        """Continue a prompt → the new text; for a list of prompts, a list of texts.

        stop: a stop string ('' for none) or a list of them; sampling: fields of Sampling.
        Raises UserError.
        """
        sampling = checked(Sampling, sampling)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        ids = [self.encode(text, 'the prompt', sampling.continue_text) for text in prompts]
        texts = self.generate_texts(ids, range(len(ids)), sampling, stop)
        return texts[0] if isinstance(prompt, str) else texts

    @torch.no_grad()
    def logprobs(self, text):
        """A text of at most block_size tokens → [(token, its log-probability in nats)].

        The text follows the end-of-text token; if the tokenizer has none, the first token has None.
        A byte that is not a character on its own is shown as \\xe2. Raises UserError.
        """
        if not isinstance(text, str) or not text:
            raise UserError(f'logprobs({text!r:.99}): expected a text')
        start = [] if self.tokenizer.end_of_text is None else [self.tokenizer.end_of_text]
        ids = torch.tensor([*start, *self.tokenizer.encode(text).tolist()])
        block_size = self.model.config.block_size
        if len(ids) - 1 > block_size:
            raise UserError(f'logprobs: the text has {len(ids) - len(start):,} tokens, and the '
                            f'context length is {block_size:,}; shorten it')
        if len(ids) == 1:  # nothing predicts it
            return [(text, None)]
        targets = ids[1:].to(self.model.lm_head.weight.device)
        with self.context:
            logits = self.model(ids[None, :-1].to(targets.device))[0][0]  # (T, V)
        logprobs = (-token_losses(self.model, logits, targets)).tolist()
        if not start:
            logprobs = [None, *logprobs]
        tokens = [token_text(self.tokenizer, i) for i in ids[len(start):].tolist()]
        return list(zip(tokens, logprobs, strict=True))

    def answer(self, messages, stop=(), **sampling):
        """The assistant's next message in a conversation, [{'role': 'user', 'content': 'Hi!'}, …].

        For models that were fine-tuned on conversations. If the conversation exceeds the context,
        the oldest turns are dropped. stop, sampling: as in generate(). Raises UserError.
        """
        ids, sampling = self.prepare_answer(messages, checked(Sampling, sampling))
        [text] = self.generate_texts([ids], [0], sampling, stop)
        return text

    def prepare_answer(self, messages, sampling):
        """Messages (see parse_history) and a Sampling → (token ids of the prompt, a Sampling whose
        max_new_tokens fits after it).

        A quarter of block_size is reserved for the answer, or max_new_tokens if that is less: the
        oldest turns are dropped, except for the system message and the last one. Raises UserError.
        """
        if not is_chat(self.tokenizer):
            raise UserError('messages: this model was not fine-tuned on conversations; send a '
                            'prompt to /v1/completions instead, or see docs/chat.md')
        messages = parse_history(messages)
        if messages[-1]['role'] != 'user':
            raise UserError("messages: the last message must have the role 'user'")
        block_size = self.model.config.block_size
        turns = [i for i, message in enumerate(messages) if message['role'] == 'user']

        def encode_from(first):
            return self.tokenizer.encode_prompt(messages[:turns[0]] + messages[first:]).tolist()

        def fits(first):
            return len(encode_from(first)) <= max_prompt_tokens

        max_prompt_tokens = block_size - min(sampling.max_new_tokens, block_size // 4)
        n_dropped = bisect_left(turns[:-1], True, key=fits)
        ids = encode_from(turns[n_dropped])
        if len(ids) > block_size:
            raise UserError(f'the message is too long: {len(ids):,} tokens with the system prompt, '
                            f'and the context length is {block_size:,}; shorten it')
        max_new_tokens = min(sampling.max_new_tokens, block_size - len(ids) + 1)
        return ids, replace(sampling, max_new_tokens=max_new_tokens)

    def encode(self, text, name, continue_text=False):
        """A prompt → token ids (see prompt_ids). Raises UserError for anything else; `name` is for
        its message."""
        if not isinstance(text, str):
            raise UserError(f'{name} must be a string')
        return prompt_ids(text, self.tokenizer, None if continue_text else self.document_start)

    def generate_texts(self, prompts, indices, sampling, stop=(), on_text=None, logprobs=None):
        """Continue `prompts` (lists of token ids) → texts.

        indices: one per text, which together with sampling.seed seeds its random numbers
        sampling: a Sampling; stop: as in generate()
        on_text: called with each new piece of text, if there is one prompt
        logprobs: a Logprobs that records those of the new tokens, if there is one prompt
        """
        stop_strings = list_stop_strings(stop)
        spaces = [''] * len(prompts)
        if is_chat(self.tokenizer):
            spaces = map(self.tokenizer.space_after, prompts)
        decoders = [StreamDecoder(self.tokenizer, stop_strings, on_text, space, logprobs)
                    for space in spaces]
        generators = [torch.Generator().manual_seed((sampling.seed * 1_000_003 + i) % 2**63)
                      for i in indices]
        end_tokens = self.tokenizer.stop_ids
        start_time = time.perf_counter()

        def on_token(row, token):
            if self.cancelled:
                return True
            if token in end_tokens:
                return True
            if logprobs:
                logprobs.add(token, decoders[row].next_start)
            self.tokens += 1
            return decoders[row].add(token)

        try:
            with self.context:
                generate(
                    self.model, prompts, sampling.max_new_tokens,
                    temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                    repetition_penalty=sampling.repetition_penalty, generators=generators,
                    on_token=on_token, compiled=self.compiled,
                    on_logits=logprobs and logprobs.on_logits)
        finally:  # also after Ctrl-C
            self.seconds += time.perf_counter() - start_time
            texts = [decoder.finish() for decoder in decoders]
        return texts
