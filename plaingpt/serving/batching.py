"""Texts of many clients, written together by one thread, which owns the model.

A text joins the others as soon as there is room, and leaves when it ends: each step writes one
token of every text that is there (Yu et al. 2022, "Orca": continuous batching).
"""

import threading
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from plaingpt.inference.generation import BACKENDS, KVCache, context_start
from plaingpt.inference.next_token import choose_next_token, draw_noise
from plaingpt.inference.text_generator import StreamDecoder
from plaingpt.system.formatting import one_line
from plaingpt.system.streams import warn

# Prompts of so many tokens together are read between two steps: texts that are being written wait
# no longer for those that join.
PROMPT_TOKENS_A_STEP = 512


class QueueFull(Exception):
    """More texts wait than may."""


@dataclass(eq=False)
class Text:
    """A text that is to be written, and how far it is."""

    prompt: list  # ids
    max_new_tokens: int
    choice: tuple = ()  # sorted pairs, options of choose_next_token: texts may share them
    generator: torch.Generator | None = None
    ends: frozenset = frozenset()  # ids that end it; they are not part of it
    stop: tuple = ()  # strings that end it
    receiver: object = None  # whoever asked for it
    index: int = 0  # among the texts of the receiver
    n_tokens: int = 0  # written so far
    left: bool = False  # True: nobody waits for it any more
    pieces: list = field(default_factory=list)  # written since the last delivery
    cache: KVCache | None = None  # what the model has read of it
    start: int | None = None  # where that begins

    def begin(self, tokenizer):
        self.ids = list(self.prompt)
        self.decoder = StreamDecoder(tokenizer, self.stop, self.pieces.append)

    def add(self, token):
        """→ why the text ends with this token, as OpenAI calls it, or None."""
        if token in self.ends:
            reason = 'stop'
        else:
            self.ids.append(token)
            self.n_tokens += 1
            stopped = self.decoder.add(token)
            reason = 'stop' if stopped else \
                'length' if self.n_tokens == self.max_new_tokens else None
        if reason:
            self.decoder.finish()
            self.forget()
        return reason

    def forget(self):
        """Free what was read. A cache and its layers hold each other, so its memory would wait for
        the garbage collector."""
        if self.cache is not None:
            self.cache.layers.clear()
            self.cache = None


class Batch:
    """The texts that are written and those that wait. `run` is the work of a thread of its own; all
    else may be called from any other.

    context: of prepare_for_generation
    deliver: called in that thread after each step, with [(text, piece, reason, error)]: what is new
        of each text; why it ended, or None; what went wrong, or None
    """

    def __init__(self, model, tokenizer, context, max_texts=32, max_waiting=256):
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.max_texts, self.max_waiting = max_texts, max_waiting
        self.deliver = None
        self.device = model.transformer.wte.weight.device
        self.waiting, self.running = deque(), []
        self.changed, self.closed = threading.Condition(), False

    def submit(self, texts):
        """Let them be written, or none of them. Raises QueueFull."""
        with self.changed:
            free = self.max_texts - len(self.running)
            if len(self.waiting) + len(texts) > self.max_waiting + free or self.closed:
                raise QueueFull
            self.waiting.extend(texts)
            self.changed.notify()

    def leave(self, texts):
        """Nobody waits for these any more: they make room before the next step."""
        with self.changed:
            for text in texts:
                text.left = True
            self.waiting = deque(text for text in self.waiting if not text.left)

    def close(self):
        """End all texts; `run` returns after its present step."""
        self.closed = True  # no lock: a signal handler, which calls this, may interrupt its holder

    def run(self):
        with torch.inference_mode(), sdpa_kernel(BACKENDS, set_priority=True), self.context:
            while not self.closed:
                self.admit()
                if self.running:
                    self.step()
        with self.changed:
            self.fail([*self.running, *self.waiting], 'the server stops')

    def admit(self):
        """Bring in texts that wait, and let go of those that nobody waits for. Where there are
        none, wait a moment."""
        with self.changed:
            if not self.waiting and not self.running:
                self.changed.wait(0.2)  # `close` cannot notify
            for text in self.running:
                if text.left:
                    text.forget()
            self.running = [text for text in self.running if not text.left]
            to_read = 0
            while self.waiting and len(self.running) < self.max_texts \
                    and to_read < PROMPT_TOKENS_A_STEP:
                text = self.waiting.popleft()
                text.begin(self.tokenizer)
                to_read += len(text.prompt)
                self.running.append(text)

    def step(self):
        """Write a token of each text."""
        try:
            tokens = self.choose(self.next_logits())
            reasons = [text.add(token) for text, token in zip(self.running, tokens, strict=True)]
        except Exception as e:  # out of memory, say: the next texts may be shorter
            warn(f'{len(self.running)} texts were not written: {type(e).__name__}: {one_line(e)}')
            self.fail(self.running, 'the model could not write this text')
            self.running = []
            return
        news = []
        for text, reason in zip(self.running, reasons, strict=True):
            if text.pieces or reason:
                news.append((text, ''.join(text.pieces), reason, None))
                text.pieces.clear()
        self.running = [text for text, reason in zip(self.running, reasons, strict=True)
                        if not reason]
        if news:
            self.deliver(news)

    def fail(self, texts, error):
        for text in texts:
            text.forget()
        self.deliver([(text, '', None, error) for text in texts])

    def next_logits(self):
        """→ (B, V), float32, of the next token of each running text, in this order: those whose
        context begins elsewhere than before come first."""
        block_size = self.model.config.block_size
        moved = [text for text in self.running
                 if text.start != context_start(len(text.ids), block_size)]
        going_on = [text for text in self.running if text not in moved]
        self.running = moved + going_on
        logits = [self.read(text) for text in moved]
        if going_on:
            idx = torch.tensor([text.ids[-1:] for text in going_on], device=self.device)  # (B, 1)
            caches = SideBySide([text.cache for text in going_on], idx)
            logits.append(self.model.logits(self.model.hidden(idx, caches)[:, -1]).float())
        return torch.cat(logits)

    def read(self, text):
        """Read the context of a text into a new cache → logits (1, V) of its next token."""
        config = self.model.config
        text.forget()
        text.start = context_start(len(text.ids), config.block_size)
        idx = torch.tensor([text.ids[text.start:]], device=self.device)  # (1, T)
        remaining = text.max_new_tokens - text.n_tokens
        text.cache = KVCache(config.n_layer, [0],
                             min(config.block_size, idx.size(1) + remaining - 1), self.device,
                             opener=config.document_start if config.document_attention else None)
        text.cache.advance(idx)
        return self.model.logits(self.model.hidden(idx, text.cache)[:, -1]).float()

    def choose(self, logits):
        """logits (B, V) → the next token of each text."""
        alike = {}  # texts with the same options are one call
        for i, text in enumerate(self.running):
            alike.setdefault(text.choice, []).append(i)
        tokens = [None] * len(self.running)
        for choice, places in alike.items():
            noise = draw_noise(len(places), [self.running[i].generator for i in places])
            chosen = choose_next_token(logits[places], noise=noise, **dict(choice))
            for i, token in zip(places, chosen.flatten().tolist(), strict=True):
                tokens[i] = token
        return tokens


class SideBySide:
    """The caches of B texts of any lengths, as one KVCache for a step of one token each: idx (B, 1)
    are the new tokens. No text is padded, and none is copied where another joins or leaves."""

    def __init__(self, caches, idx):
        for i, cache in enumerate(caches):
            cache.advance(idx[i:i + 1])
        self.layers = [SideBySideLayer(layers)
                       for layers in zip(*(cache.layers for cache in caches), strict=True)]
        if caches[0].opener is None:
            ends = [[cache.end - 1] for cache in caches]
            self.positions = torch.tensor(ends, device=idx.device)  # (B, 1)
        else:
            self.positions = torch.cat([cache.positions for cache in caches])  # (B, 1)


class SideBySideLayer:
    """One layer's part: a LayerCache for all texts. What is computed token by token sees them as a
    batch; attention goes from text to text."""

    def __init__(self, layers):
        self.layers = layers

    @property
    def ages(self):
        ages = [layer.ages for layer in self.layers]
        return None if ages[0] is None else torch.cat(ages)

    @property
    def columns(self):
        """(1,): after `extend`, the column of all new tokens: its rows are aligned at the end."""
        first = self.layers[0].columns
        return first.new_tensor([max(layer.cache.end for layer in self.layers) - 1])

    def extend(self, k, v):
        """As of LayerCache, for an attention of your own: shorter texts are padded in front."""
        found = [layer.extend(k[i:i + 1], v[i:i + 1]) for i, layer in enumerate(self.layers)]
        longest = max(keys.size(2) for keys, _, _ in found)
        k, v = (torch.cat([F.pad(x[which], (0, 0, longest - x[which].size(2), 0)) for x in found])
                for which in (0, 1))
        masks = [F.pad(keys.new_ones(1, 1, 1, keys.size(2), dtype=torch.bool) if mask is None
                       else mask, (longest - keys.size(2), 0)) for keys, _, mask in found]
        return k, v, torch.cat(masks)  # the mask is (B, 1, 1, longest)

    def attention(self, q, k, v):
        """q, k, v (B, H, 1, D) of the new tokens → (B, H, 1, D)."""
        return torch.cat([layer.attention(q[i:i + 1], k[i:i + 1], v[i:i + 1])
                          for i, layer in enumerate(self.layers)])

    def with_earlier(self, x, n):
        return torch.cat([layer.with_earlier(x[i:i + 1], n) for i, layer in enumerate(self.layers)])
