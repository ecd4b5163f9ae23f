"""Checks of what the outputs and the loss depend on: change tokens or targets, and compare.

The comparisons work on any device: equal shapes use the same kernels, so equal inputs give equal
outputs.
"""

import copy
from dataclasses import replace

import numpy as np
import torch

from model import GPT
from plaingpt.monitoring.health import ActivationRecorder
from plaingpt.system.formatting import count_of

TEXT_TOKENS = 256  # ids of the small model's text
BOS_ID = TEXT_TOKENS  # the id that starts a document
MAX_LENGTH = 32  # tokens per sequence, in checks that do not need a whole block
SHORT = 64  # tokens of a sequence that is changed at each position
# Tolerances relative to the RMS: for rounding alone (a token that is visible changes more), and for
# sums that are taken in another order or dtype.
TOLERANCE, LOOSE_TOLERANCE = 1e-5, 3e-3


class NotChecked(Exception):
    """Raised by a check that cannot run here. The message says why."""


def small_model(config):
    """→ a small GPT with the flags of a GPTConfig. Noise is added to its weights: one that is
    initialized near zero would hide mistakes in what it multiplies."""
    torch.manual_seed(0)
    model = GPT(replace(config, n_layer=min(2, config.n_layer), n_embd=16 * config.n_head,
                        vocab_size=TEXT_TOKENS + 1, document_start=BOS_ID,
                        ngram_rows=min(1024, config.ngram_rows)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.startswith('transformer.h.'):
                std = 0.02
            elif p.dim() == 2:
                std = p.size(1)**-0.5
            else:
                std = 0.1
            p.add_(torch.randn_like(p), alpha=std)
    return model


def random_tokens(model, rows, length=None):
    """(rows, length) token ids, the same in each call; by default of check_length. BOS_ID is never
    drawn: with document_attention each row is one document."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(TEXT_TOKENS, (rows, length or check_length(model)), generator=generator)
    return tokens.to(model.lm_head.weight.device)


def check_length(model):
    return min(MAX_LENGTH, model.config.block_size)


def largest_change(a, b):
    """The largest difference between two tensors, relative to their RMS; 0 if they are empty."""
    if not a.numel():
        return 0.0
    rms = torch.cat((a.flatten(), b.flatten())).square().mean().sqrt()
    return float((a - b).abs().max() / rms.clamp(min=1e-20))


@torch.no_grad()
def output_changes(run, idx, *changed, training=True):
    """Change some tokens of idx (B, T) → how much each input of the head changes, relative to the
    RMS of all: one (B, T) for each index into (B, T) in `changed`. Dropout stays the same.
    training: in train mode, else in eval mode"""
    run.model.train(training)
    outputs = []
    for where in (None, *changed):
        tokens = idx.clone()
        if where is not None:
            # by an odd number, which changes the hash of an n-gram modulo any power of two
            tokens[where] = (idx[where] + TEXT_TOKENS // 3) % TEXT_TOKENS
        torch.manual_seed(0)
        with run.step.autocast:
            outputs.append(run.model.hidden(tokens).float())  # (B, T, C)
    before, *after = outputs
    rms = before.square().mean().sqrt().clamp(min=1e-20)
    return [(x - before).abs().amax(dim=-1) / rms for x in after]


def attention_is_causal(run):
    """Change all tokens from a position on: from each position of a short sequence, and from a few
    of a whole block, in eval mode."""
    T = run.model.config.block_size
    anywhere = np.random.default_rng(0).integers(1, max(2, T), 3)
    for training, length, positions in (
            (True, min(T, SHORT), range(SHORT)), (False, T, {T // 2 + 1, T - 1, *anywhere})):
        positions = [int(t) for t in positions if 0 < t < length]
        if not positions:
            continue
        idx = random_tokens(run.model, 1, length).repeat(len(positions), 1)
        idx[:, length // 4] = BOS_ID  # with document_attention, a second document starts here
        columns = torch.arange(length, device=idx.device)
        changed = columns >= torch.tensor(positions, device=idx.device)[:, None]  # (positions, T)
        changes, = output_changes(run, idx, changed, training=training)
        leaks = (changes > TOLERANCE) & ~changed
        if leaks.any():
            row = int(leaks.any(dim=1).nonzero()[-1])
            reached = columns[leaks[row]].tolist()
            return f'attention is not causal: changing tokens {positions[row]}… changed the ' \
                   f'outputs at {reached[0]}–{reached[-1]}; look for a missing mask, or a layer ' \
                   'that mixes in later tokens'


def targets_are_not_read(run):
    """The gradient of head rows that belong to no target must not depend on the targets. The
    gradient reveals the head's input even if forward() returns no logits along with the loss."""
    model = run.model
    idx = random_tokens(run.model, 2)
    for mode in ('training', 'evaluation'):
        model.train(mode == 'training')
        gradients = []
        for target in (TEXT_TOKENS // 2, TEXT_TOKENS // 2 + 1):
            torch.manual_seed(0)
            _, loss = model(idx, torch.full_like(idx, target))
            gradient, = torch.autograd.grad(loss, model.lm_head.weight)
            gradients.append(gradient[BOS_ID:])
        if largest_change(*gradients) > TOLERANCE:
            return f'the model reads its targets: they change the input of the head in {mode}'


def every_target_counts(run):
    """Give two rows the same head input but different targets. At each position the gradients must
    differ, and neither may be 0."""
    model = copy.copy(run.model)
    T = run.model.config.block_size
    idx = random_tokens(model, 2, T)
    targets = torch.tensor([TEXT_TOKENS // 2, TEXT_TOKENS // 2 + 1], device=idx.device)
    targets = targets[:, None].expand(2, T)
    x = torch.randn(1, T, model.config.n_embd, device=idx.device).repeat(2, 1, 1).requires_grad_()
    model.hidden = lambda *args: x
    for mode in ('training', 'evaluation'):
        _, loss = model.train(mode == 'training')(idx, targets)
        gradient, = torch.autograd.grad(loss, x, allow_unused=True)
        if gradient is None:
            raise NotChecked('forward() does not use hidden()')
        largest = torch.stack((*gradient, gradient[0] - gradient[1])).abs().amax(dim=-1)  # (3, T)
        ignored = int((largest.amin(dim=0) <= TOLERANCE * largest.max()).sum())
        if ignored:
            return f'the loss ignores the targets at {ignored} of {T} positions in {mode}'


def sequences_are_independent(run):
    """Uses as many sequences as a batch has, in case something depends on their number."""
    idx = random_tokens(run.model, max(2, run.config.batch_size))
    rows = np.s_[:1], np.s_[::2], np.s_[1::2]
    for changed, changes in zip(rows, output_changes(run, idx, *rows), strict=True):
        changes[changed] = 0.0
        if (changes > TOLERANCE).any():
            return 'sequences are not independent: the outputs of one depend on another one in ' \
                   'the batch; look for a view, transpose or mean over the wrong dimension'
    if run.model.config.document_attention:
        t = idx.size(1) // 2
        idx[:, t] = BOS_ID
        changes, = output_changes(run, idx, np.s_[:, :t])
        if (changes[:, t:] > TOLERANCE).any():
            return 'documents are not independent: the outputs of one depend on the previous ' \
                   'document; attention or another layer ignores document_attention'


def token_order_matters(run):
    """Reverse the first half of each sequence: outputs in the second half must change. Only the
    first block is checked, since the causal mask reveals some of the order to later blocks."""
    model = run.model
    idx = random_tokens(run.model, 2)
    t = idx.size(1) // 2
    reversed_idx = torch.cat((idx[:, :t].flip(1), idx[:, t:]), dim=1)
    with ActivationRecorder(model) as recorder, torch.no_grad():
        model.eval().hidden(torch.cat((idx, reversed_idx)))
    # Positions before `first` see the changed tokens through a short convolution or an n-gram.
    ngram = model.config.ngram if model.config.ngram_rows else 1
    first = t + model.config.conv + ngram - 1
    if first >= idx.size(1) or t < 2:
        raise NotChecked(f'sequences of {count_of(idx.size(1), "token")} are too short')
    if largest_change(*recorder.streams[1][:, first:].chunk(2)) <= TOLERANCE:
        return 'token order does not matter to the first block: positions are not added, rotary ' \
               'embeddings are not applied to queries and keys, or attention sees too few tokens'


def blocks_are_residual(run):
    """A block whose attention and MLP output zero must pass its input through."""
    zeroed = copy.deepcopy(run.model)
    for name, p in zeroed.transformer.h.named_parameters():
        if '.c_proj.' in name:  # the output projections of attention and MLP
            torch.nn.init.zeros_(p)
    changes, = output_changes(replace(run, model=zeroed), random_tokens(zeroed, 1), np.s_[:])
    if (changes <= TOLERANCE).all():
        return 'a residual connection is missing: x = attn(x) instead of x = x + attn(x)'
