"""Checks of what a token sees: change tokens, and compare the output at other positions.

The comparisons hold on any device: the same shapes take the same kernels, so equal numbers stay
equal.
"""

import copy
from dataclasses import replace

import numpy as np
import torch

from model import GPT
from plaingpt.monitoring.health import ActivationRecorder

TOKENS = 256  # of the small model's vocabulary, beside the one that opens a document
OPENER = TOKENS
SHORT = 32  # tokens in a sequence, at most, where they need not be many
SAME = 1e-5  # of the RMS: what rounding may change; a token that is seen changes more
NEARLY_SAME = 3e-3  # where the same sums are taken in another order, or in another dtype


class NotChecked(Exception):
    """A check that cannot be made here. The message says why."""


def small_model(shape):
    """→ a GPT with the flags of a GPTConfig, in which each weight counts. A weight that begins at
    or near zero would hide the mistakes in what it multiplies."""
    torch.manual_seed(0)
    model = GPT(replace(shape, n_layer=min(2, shape.n_layer), n_embd=16 * shape.n_head,
                        vocab_size=TOKENS + 1, document_start=OPENER))
    with torch.no_grad():
        for name, p in model.named_parameters():
            in_block = name.startswith('transformer.h.')
            size = 0.02 if not in_block else p.size(1)**-0.5 if p.dim() == 2 else 0.1
            p.add_(torch.randn_like(p), alpha=size)
    return model


def random_tokens(model, rows, length=None):
    """(rows, length) tokens, the same each time; by default as many as are enough to look at. None
    opens a document, so that with document_attention all before a token is to be seen."""
    seeded = torch.Generator().manual_seed(0)
    tokens = torch.randint(TOKENS, (rows, length or short(model)), generator=seeded)
    return tokens.to(model.lm_head.weight.device)


def short(model):
    return min(SHORT, model.config.block_size)


def largest_change(a, b):
    """The largest difference of two tensors, as a share of their RMS; 0 where they are empty."""
    if not a.numel():
        return 0.0
    rms = torch.cat((a.flatten(), b.flatten())).square().mean().sqrt()
    return float((a - b).abs().max() / rms.clamp(min=1e-20))


def effect(run, idx, changed, seen):
    """Change tokens of idx (B, T) → how much the input of the head changes at other positions.
    changed, seen: indices into (B, T). Dropout is the same before and after."""
    other = idx.clone()
    other[changed] = (idx[changed] + TOKENS // 2) % TOKENS
    run.model.train()
    found = []
    for tokens in (idx, other):
        torch.manual_seed(0)
        with run.context:
            found.append(run.model.hidden(tokens).detach().float()[seen])  # (B, T, C), a part
    return largest_change(*found)


def future_is_hidden(run):
    return reads_ahead(run) or reads_targets(run.model)


def reads_ahead(run):
    T = run.model.config.block_size
    for t in (T // 2, T - 1):
        if effect(run, random_tokens(run.model, 1, T), np.s_[:, t:], np.s_[:, :t]) > SAME:
            return f'positions 0 to {t - 1} change with the tokens from {t} on: ' \
                   'attention without a causal mask, or a layer that mixes in later tokens'


def reads_targets(model):
    """Rows of the head that belong to no target have the same gradient for any targets. Gradients
    show the input of the head, even if forward() returns no logits beside the loss."""
    idx = random_tokens(model, 2)
    for training in (True, False):
        model.train(training)
        found = []
        for target in (0, 1):
            torch.manual_seed(0)
            _, loss = model(idx, torch.full_like(idx, target))
            found.append(torch.autograd.grad(loss, model.lm_head.weight)[0])
        if largest_change(*(gradient[OPENER:] for gradient in found)) > SAME:
            when = 'training' if training else 'evaluations'
            return f'the input of the head changes with the targets in {when}'


def texts_are_apart(run):
    """With as many sequences as a batch has, in case something depends on their number."""
    idx = random_tokens(run.model, max(2, run.config.batch_size))
    if effect(run, idx, np.s_[::2], np.s_[1::2]) > SAME:
        return 'the output for a sequence changes with another sequence of the batch: a view, ' \
               'transpose or mean over the wrong dimension'
    t = idx.size(1) // 2
    idx[:, t] = OPENER
    if run.model.config.document_attention \
            and effect(run, idx, np.s_[:, :t], np.s_[:, t:]) > SAME:
        return 'the output for a document changes with the document before it: attention or ' \
               'another layer ignores document_attention'


def order_matters(run):
    """Reverse the first half of sequences: the second half must change. Only the first block is
    checked, because in later blocks the causal mask reveals a little of the order."""
    model, idx = run.model, random_tokens(run.model, 2)
    t = idx.size(1) // 2
    turned = torch.cat((idx[:, :t].flip(1), idx[:, t:]), dim=1)
    with ActivationRecorder(model) as seen, torch.no_grad():
        model.eval().hidden(torch.cat((idx, turned)))
    first = t + model.config.conv  # before it, a short convolution reads what has changed
    if first >= idx.size(1) or t < 2:
        raise NotChecked(f'sequences of {idx.size(1)} are too short')
    if largest_change(*seen.streams[1][:, first:].chunk(2)) <= SAME:
        return 'the output of the first block stays the same when earlier tokens change places: ' \
               'positions are not added, rotary does not reach queries and keys, or attention ' \
               'sees too little'


def blocks_pass_on(run):
    """Blocks whose attention and MLP add nothing must pass their input on."""
    silent = copy.deepcopy(run.model)
    for name, p in silent.transformer.h.named_parameters():
        if '.c_proj.' in name:  # which ends a branch
            torch.nn.init.zeros_(p)
    if effect(replace(run, model=silent), random_tokens(silent, 1), np.s_[:], np.s_[:]) <= SAME:
        return 'blocks whose attention and MLP add nothing lose their input: a residual ' \
               'connection is missing, as in x = attn(x) for x = x + attn(x)'
