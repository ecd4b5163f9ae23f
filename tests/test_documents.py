from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from runs import HostReads

from model import GPT, GPTConfig, find_documents
from plaingpt.core.blocks import (
    CHECKPOINT_MODES,
    apply_activation_checkpointing,
)
from plaingpt.core.loss import loss_in_chunks

OPENER = 64
SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32,
                  document_attention=True, document_start=OPENER)
FLAGS = {'learned': {}, 'rotary': {'rotary': True}, 'conv': {'conv': 3},
         'newer': dict(rotary=True, conv=4, rmsnorm=True, qk_norm=True,
                       value_embeddings=True, ngram_rows=50,
                       tied_head=False, mlp='relu2')}
CUTS = [[0, 5, 6, 7], [0, 9], [0, 15], [0]]  # where the documents of each sequence begin


def make(flags):
    torch.manual_seed(0)
    model = GPT(replace(SMALL, **flags))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)  # so that what a token sees matters
    return model


def packed():
    """idx (4, 16): a document that began earlier, then those that CUTS tells."""
    idx = torch.randint(0, OPENER, (4, 16), generator=torch.Generator().manual_seed(1))
    for row, cuts in zip(idx, CUTS, strict=True):
        row[cuts[1:]] = OPENER
    idx[3, 0] = OPENER
    return idx


def alone(t):
    """(4, 16, …) → the documents in it, each (1, n, …)."""
    return [part[None] for row, cuts in zip(t, CUTS, strict=True)
            for part in row.tensor_split(cuts[1:])]


def test_finding_the_documents_of_a_batch_waits_for_no_device():
    with HostReads() as reads:
        find_documents(packed(), OPENER)
    assert not reads.found


@pytest.mark.parametrize('flags', FLAGS)
def test_a_document_in_a_sequence_has_the_logits_that_it_has_alone(flags):
    model, idx = make(FLAGS[flags]), packed()
    for document, logits in zip(alone(idx), alone(model(idx)[0]), strict=True):
        torch.testing.assert_close(logits, model(document)[0], atol=1e-4, rtol=1e-4)
    plain = GPT(replace(model.config, document_attention=False))
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(idx)[0][0, 8:], model(idx)[0][0, 8:], atol=1e-2)


@pytest.mark.parametrize('flags', FLAGS)
def test_a_document_in_a_sequence_has_the_gradients_that_it_has_alone(flags):
    model, idx = make(FLAGS[flags]), packed()
    targets = idx.roll(-1, 1)
    loss = sum(model(i, t)[1] * i.numel() for i, t in zip(alone(idx), alone(targets), strict=True))
    expected = torch.autograd.grad(loss / idx.numel(), list(model.parameters()))
    model.loss_in_chunks = partial(loss_in_chunks, chunk=24)
    for mode in CHECKPOINT_MODES:
        checkpointed = deepcopy(model)
        apply_activation_checkpointing(checkpointed, mode)
        loss = checkpointed(idx, targets)[1]
        gradients = torch.autograd.grad(loss, list(checkpointed.parameters()))
        torch.testing.assert_close(gradients, expected, atol=1e-4, rtol=1e-3)
