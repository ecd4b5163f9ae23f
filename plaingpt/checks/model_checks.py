"""Checks of what outputs and the loss depend on: change tokens or targets, and compare.

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
    """Raised by a check that is not possible here. The message says why."""


def small_model(config):
    """→ a GPT with the flags of a GPTConfig, in which each weight counts. A weight that begins at
    or near zero would hide the mistakes in what it multiplies."""
    torch.manual_seed(0)
    model = GPT(replace(config, n_layer=min(2, config.n_layer), n_embd=16 * config.n_head,
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
        with run.step.autocast:
            found.append(run.model.hidden(tokens).detach().float()[seen])  # (B, T, C), a part
    return largest_change(*found)


def attention_is_causal(run):
    T = run.model.config.block_size
    for t in (T // 2, T - 1):
        if effect(run, random_tokens(run.model, 1, T), np.s_[:, t:], np.s_[:, :t]) > SAME:
            return f'attention is not causal: changing tokens {t}… changed the outputs at ' \
                   f'0–{t - 1}; look for a missing mask, or a layer that mixes in later tokens'


def targets_are_not_read(run):
    """Rows of the head that belong to no target have the same gradient for any targets. Gradients
    show the input of the head, even if forward() returns no logits beside the loss."""
    model, idx = run.model, random_tokens(run.model, 2)
    for mode in ('training', 'evaluations'):
        model.train(mode == 'training')
        found = []
        for target in (TOKENS // 2, TOKENS // 2 + 1):
            torch.manual_seed(0)
            _, loss = model(idx, torch.full_like(idx, target))
            found.append(torch.autograd.grad(loss, model.lm_head.weight)[0])
        if largest_change(*(gradient[OPENER:] for gradient in found)) > SAME:
            return f'the model reads its targets: they change the input of the head in {mode}'


def every_target_counts(run):
    """Two rows get the same input of the head, and different targets. Its gradient must differ
    between them at each position, and be 0 in neither."""
    model, T = copy.copy(run.model), run.model.config.block_size
    idx = random_tokens(model, 2, T)
    targets = torch.tensor([[TOKENS // 2], [TOKENS // 2 + 1]], device=idx.device).expand(2, T)
    x = torch.randn(1, T, model.config.n_embd, device=idx.device).repeat(2, 1, 1).requires_grad_()
    model.hidden = lambda *args: x
    for mode in ('training', 'evaluations'):
        _, loss = model.train(mode == 'training')(idx, targets)
        gradient, = torch.autograd.grad(loss, x, allow_unused=True)
        if gradient is None:
            raise NotChecked('forward() does not use hidden()')
        effects = torch.stack((*gradient, gradient[0] - gradient[1])).abs().amax(dim=-1)  # (3, T)
        if ignored := int((effects.amin(dim=0) <= SAME * effects.max()).sum()):
            return f'the loss ignores the targets at {ignored} of {T} positions in {mode}'


def sequences_are_independent(run):
    """With as many sequences as a batch has, in case something depends on their number."""
    idx = random_tokens(run.model, max(2, run.config.batch_size))
    if effect(run, idx, np.s_[::2], np.s_[1::2]) > SAME:
        return 'sequences are not independent: the output for one changes with another of the ' \
               'batch; look for a view, transpose or mean over the wrong dimension'
    t = idx.size(1) // 2
    idx[:, t] = OPENER
    if run.model.config.document_attention \
            and effect(run, idx, np.s_[:, :t], np.s_[:, t:]) > SAME:
        return 'documents are not independent: the output for one changes with the document ' \
               'before it; attention or another layer ignores document_attention'


def token_order_matters(run):
    """Reverse the first half of sequences: the second half must change. Only the first block is
    checked, because in later blocks the causal mask reveals a little of the order."""
    model, idx = run.model, random_tokens(run.model, 2)
    t = idx.size(1) // 2
    turned = torch.cat((idx[:, :t].flip(1), idx[:, t:]), dim=1)
    with ActivationRecorder(model) as seen, torch.no_grad():
        model.eval().hidden(torch.cat((idx, turned)))
    # before it, a short convolution or an n-gram reads what has changed
    ngram = model.config.ngram if model.config.ngram_rows else 1
    first = t + model.config.conv + ngram - 1
    if first >= idx.size(1) or t < 2:
        raise NotChecked(f'sequences of {idx.size(1)} are too short')
    if largest_change(*seen.streams[1][:, first:].chunk(2)) <= SAME:
        return 'token order does not matter to the first block: positions are not added, rotary ' \
               'is not applied to queries and keys, or attention sees too little'


def blocks_are_residual(run):
    """Blocks whose attention and MLP add nothing must pass on their input."""
    silent = copy.deepcopy(run.model)
    for name, p in silent.transformer.h.named_parameters():
        if '.c_proj.' in name:  # which ends a branch
            torch.nn.init.zeros_(p)
    if effect(replace(run, model=silent), random_tokens(silent, 1), np.s_[:], np.s_[:]) <= SAME:
        return 'a residual connection is missing, as in x = attn(x) instead of x = x + attn(x)'
