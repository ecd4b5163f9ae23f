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
from plaingpt.corpus.batches import BatchLoader
from plaingpt.corpus.dataset import Dataset
from plaingpt.training.settings import TrainConfig

LENGTH = 32  # tokens in a sequence, at most
EVALUATED = 96  # tokens


class NotChecked(Exception):
    """A check that cannot be made here. The message says why."""


@dataclass
class Subject:
    """A run that is about to begin. What several checks read is computed once.

    model: neither compiled nor wrapped; context: autocast, in which forward passes run
    group: of distributed.host_group; from_scratch: whether the weights are new
    evaluate: (model, loader, config) → the loss that the run's evaluations would report
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
    text: str = ''  # that the model will read first, where the tokenizer is at hand
    passed: int = 0  # checks

    @property
    def device(self):
        return self.train_data.device

    @cached_property
    def sequences(self):
        """(3, T + 1) tokens of the training split: its beginning, its end, its beginning again."""
        stream = self.train_data.stream
        length = min(LENGTH, self.config.block_size) + 1
        starts = np.array([0, len(stream) - length, 0])
        return torch.from_numpy(stream.sequences(starts, length)).to(self.device)

    @property
    def idx(self):
        return self.sequences[:, :-1]  # (3, T)

    @property
    def targets(self):
        return self.sequences[:, 1:]  # (3, T)

    @cached_property
    def place(self):
        """The position in the middle, from which the other sequences of `changed_logits` differ."""
        return self.idx.size(1) // 2

    @cached_property
    def logits(self):
        """(3, T, V) as in training."""
        return self.logits_of(self.idx)

    @cached_property
    def changed_logits(self):
        """Those of other tokens: all from `place` on in row 0, none in row 1, that one in row 2."""
        idx = self.idx.clone()
        idx[0, self.place:] = self.others(idx[0, self.place:])
        idx[2, self.place] = self.others(idx[2, self.place])
        return self.logits_of(idx)

    def evaluated_loss(self):
        """The loss of short sequences of the validation split, as the run measures it."""
        T = self.idx.size(1)
        loader = BatchLoader(self.val_data.stream, T, math.ceil(EVALUATED / T), device=self.device)
        few = replace(self.config, eval_iters=1, eval_tokens=0)
        return self.evaluate(self.model, loader, few)

    def others(self, tokens):
        """Other tokens of the vocabulary."""
        return (tokens + 1) % self.model.config.vocab_size

    def logits_of(self, idx):
        """Each call draws the same dropout, so that logits differ by the tokens alone. Gradients
        are on: without them the model may take another path than in training."""
        with self.training_mode(), self.context:
            return self.model.logits(self.model.hidden(idx)).detach().float()

    def loss(self, weights):
        """The training loss in float32, of {name: tensor} in place of the model's weights. Nothing
        is recomputed: the backward pass comes when the model has its own weights again."""
        recomputing, self.model.activation_checkpointing = \
            self.model.activation_checkpointing, 'none'
        try:
            with self.training_mode():
                return torch.func.functional_call(self.model, weights, (self.idx, self.targets))[1]
        finally:
            self.model.activation_checkpointing = recomputing

    @cached_property
    def large_weights(self):
        """{name: tensor}: the weights, with the blocks' matrices large enough to keep the size of
        what they multiply. At 0.02 a branch is a small part of its sum, and hides its mistakes."""
        found = {}
        for name, p in self.model.named_parameters():
            p = p.detach()
            if p.dim() == 2 and name.startswith('transformer.h.'):
                p = p * (p.size(1)**-0.5 / p.square().mean().sqrt()).clamp(min=1)
            found[name] = p.requires_grad_()
        return found

    @cached_property
    def gradients(self):
        """{name: gradient of `loss` at large_weights, or None}"""
        weights = self.large_weights
        found = torch.autograd.grad(self.loss(weights), list(weights.values()), allow_unused=True)
        return dict(zip(weights, found, strict=True))

    @contextmanager
    def training_mode(self, training=True):
        """A context for a pass of its own: with the same random numbers each time, after which all
        is as before."""
        was_training = self.model.training
        with torch.random.fork_rng([self.device] if self.device.type == 'cuda' else []):
            torch.manual_seed(0)
            self.model.train(training)
            try:
                yield
            finally:
                self.model.train(was_training)

    @contextmanager
    def zeros_filled(self):
        """A context in which no matrix or vector of the model is 0 throughout. What begins at zero
        hides all that it multiplies."""
        with torch.no_grad(), self.training_mode():
            zeros = [p for p in self.model.parameters() if not p.any()]
            for p in zeros:
                p.normal_(std=0.02)
        try:
            yield
        finally:
            with torch.no_grad():
                for p in zeros:
                    p.zero_()


def largest_change(a, b):
    """The largest difference of two tensors, as a share of their RMS."""
    rms = torch.cat((a.flatten(), b.flatten())).square().mean().sqrt()
    return float((a - b).abs().max() / rms.clamp(min=1e-20))

