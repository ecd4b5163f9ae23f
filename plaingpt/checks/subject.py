"""What a preflight looks at: the parts of a run that is about to begin, and a few short sequences.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from model import GPT
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import Dataset
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

SHORT = 32  # tokens in a sequence of a batch, at most
EVALUATED = 96  # tokens


class NotChecked(Exception):
    """A check that cannot be made here. The message says why."""


@dataclass
class Subject:
    """A run that is about to begin. What several checks read is computed once.

    model: neither compiled nor wrapped; context: autocast, in which forward passes run
    group: of distributed.gloo_group; from_scratch: whether the weights are new
    evaluate: (model, loader, sequences) → the loss that the run's evaluations would report
    evaluated: how many sequences those evaluate
    forward_backward, update: of train.py, which make a step
    """

    config: TrainConfig
    dataset: Dataset
    train_data: BatchLoader
    val_data: BatchLoader
    model: GPT
    optimizer: torch.optim.Optimizer
    context: object
    group: object
    from_scratch: bool
    evaluate: Callable
    evaluated: int
    forward_backward: Callable
    update: Callable
    text: str = ''  # that the model will read first, where the tokenizer is at hand
    passed: int = 0  # checks

    @property
    def device(self):
        return self.train_data.device

    def sequences(self, length):
        """(B, length + 1) tokens of the training split, as many rows as a batch has and at least 4:
        in row 1 its end, else its beginning. With document_attention no document begins there, so
        that all before a token is to be seen."""
        stream = self.train_data.stream
        n = min(length + 1, len(stream))  # few conversations may be less: they are repeated
        starts = np.zeros(max(4, self.train_data.batch_size), np.int64)
        starts[1] = len(stream) - n
        tokens = stream.sequences(starts, n)
        tokens = np.tile(tokens, math.ceil((length + 1) / n))[:, :length + 1]
        tokens = torch.from_numpy(tokens).to(self.device)
        return torch.where(tokens == self.opener, self.others(tokens), tokens)

    @property
    def opener(self):
        return opener(self.model.config)

    @cached_property
    def batch(self):
        """(idx, targets), each (2, T), for what takes a backward pass or several forward passes."""
        tokens = self.sequences(min(SHORT, self.config.block_size))[:2]
        return tokens[:, :-1], tokens[:, 1:]

    @cached_property
    def looked(self):
        """What the head reads of sequences of full length."""
        tokens = self.sequences(self.config.block_size)[:, :-1]
        return Looked(self.hidden, tokens, self.model.config)

    def others(self, tokens):
        return others(tokens, self.model.config)

    def hidden(self, idx):
        """Each call draws the same dropout, so that results differ by the tokens alone. Gradients
        are on: without them the model may take another path than in training."""
        with self.training_mode(), self.context:
            return self.model.hidden(idx).detach().float()

    def loss(self, weights):
        """The training loss of `batch` in float32, of {name: tensor} as the model's weights."""
        with self.training_mode():
            return torch.func.functional_call(self.model, weights, self.batch)[1]

    def gradients_of(self, batch):
        """{name: gradient of the training loss of (idx, targets) in float32, or None}"""
        weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with self.training_mode():
            found = torch.autograd.grad(self.model(*batch)[1], list(weights.values()),
                                        allow_unused=True)
        return dict(zip(weights, found, strict=True))

    @cached_property
    def gradients(self):
        return self.gradients_of(self.batch)

    @cached_property
    def few(self):
        """A loader of few short sequences of the validation split."""
        stream = self.val_data.stream
        T = min(SHORT, self.config.block_size, len(stream) - 1)
        # Of conversations all tokens: the loss mask is another check's.
        kind = type(self.val_data) if stream.loss_mask is None else BatchLoader
        return kind(stream, T, math.ceil(EVALUATED / T), device=self.device)

    def evaluated_loss(self):
        """The loss of `few`, as the run measures it."""
        return self.evaluate(self.model, self.few, self.few.batch_size)

    def evaluated_batch(self):
        """(idx, targets), each (B, T), whose loss that is."""
        [starts] = self.few.eval_batches(self.few.batch_size)
        return tuple(t[:len(starts)] for t in self.few.eval_batch(starts))

    def training_mode(self, training=True):
        return mode(self.model, training)

    def small_model(self):
        """→ (GPT with the flags of this one, all of whose weights count; its optimizer; its
        settings, with a rate that moves each weight a little)."""
        gpt = GPT(replace(small_shape(self.model.config), dropout=0.0))
        with torch.no_grad():
            for p in gpt.parameters():
                p.normal_(std=0.1)
        config = replace(self.config, learning_rate=1e-3, weight_decay=0.0)
        return gpt, build_optimizer(gpt.to(self.device), config, self.device.type), config

    @contextmanager
    def enlarged(self):
        """A context in which each weight of the model counts. What begins at zero, or is small as
        most is at first, hides the mistakes in what it multiplies."""
        kept = []
        with torch.no_grad(), self.training_mode():
            for name, p in self.model.named_parameters():
                in_block = name.startswith('transformer.h.')
                size = p.square().mean().sqrt()
                wanted = 0.02 if not in_block else p.size(1)**-0.5 if p.dim() == 2 else 0.1
                if size == 0 or (in_block and size < wanted):
                    kept.append((p, p.clone()))
                    if size == 0:
                        p.normal_(std=wanted)
                    else:
                        p *= wanted / size
        try:
            yield
        finally:
            with torch.no_grad():
                for p, before in kept:
                    p.copy_(before)


class Looked:
    """What the head of a network reads of some tokens, and of others in their place: in rows 0, 4,
    … from the middle on, in rows 2, 6, … in the middle, in rows 3, 7, … the last. Rows 1, 5, … stay
    as they are.

    hidden: tokens (B, T) → what the head reads; shape: the network's GPTConfig
    """

    def __init__(self, hidden, tokens, shape):
        T = tokens.size(1)
        self.changed = slice(T // 2, T // 2 + min(4, math.ceil(T / 8)))  # the middle
        changed, other = tokens.clone(), others(tokens, shape)
        for row, places in ((0, slice(T // 2, T)), (2, self.changed), (3, slice(T - 1, T))):
            changed[row::4, places] = other[row::4, places]
        self.before, self.after = hidden(tokens), hidden(changed)  # (B, T, C) each


def opener(shape):
    """The token that opens a document, where that changes what is seen; else -1."""
    return shape.document_start if shape.document_attention else -1


def others(tokens, shape):
    """Other tokens of the vocabulary, which open no document. They are not the next ones: new
    special tokens stand together, and have the same row until they are learned."""
    found = (tokens + shape.vocab_size // 2) % shape.vocab_size
    return torch.where(found == opener(shape), (found + 1) % shape.vocab_size, found)


@contextmanager
def mode(model, training):
    """A context for a pass of its own: with the same random numbers each time, after which all is
    as before."""
    was_training, device = model.training, model.lm_head.weight.device
    with torch.random.fork_rng([device] if device.type == 'cuda' else []):
        torch.manual_seed(0)
        model.train(training)
        try:
            yield
        finally:
            model.train(was_training)


def shallow(shape, config, device):
    """→ (a new GPT of that GPTConfig with few layers, the same on all processes; its optimizer)"""
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        gpt = GPT(replace(shape, n_layer=min(2, shape.n_layer)))
    gpt.loss_chunk_tokens = 'auto'
    gpt.activation_checkpointing = config.activation_checkpointing
    return gpt, build_optimizer(gpt.to(device), config, device.type)


def small_shape(shape):
    """The GPTConfig of a small model that has the flags of another."""
    return replace(shape, n_layer=min(2, shape.n_layer), n_embd=8 * shape.n_head, vocab_size=257,
                   block_size=min(16, shape.block_size),
                   document_start=min(256, shape.document_start))


def largest_change(a, b):
    """The largest difference of two tensors, as a share of their RMS."""
    rms = torch.cat((a.flatten(), b.flatten())).square().mean().sqrt()
    return float((a - b).abs().max() / rms.clamp(min=1e-20))

