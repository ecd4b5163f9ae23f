import inspect
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import HostReads
from torch.nn.attention.varlen import varlen_attn

from model import GPT, GPTConfig
from plaingpt.kernels import documents
from plaingpt.kernels.documents import Documents, document_ends

OPENER = 64
SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32,
                  document_attention=True, document_start=OPENER)
FLAGS = {'learned': {}, 'rotary': {'rotary': True}, 'conv': {'conv': 3},
         'newer': dict(rotary=True, conv=4, rmsnorm=True, qk_norm=True, value_embeddings=True,
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


@pytest.mark.parametrize('flags', FLAGS)
def test_a_document_in_a_sequence_has_the_logits_and_gradients_that_it_has_alone(flags):
    model, idx = make(FLAGS[flags]), packed()
    targets = idx.roll(-1, 1)
    for part, logits in zip(alone(idx), alone(model(idx)[0]), strict=True):
        torch.testing.assert_close(logits, model(part)[0], atol=1e-4, rtol=1e-4)
    loss = sum(model(i, t)[1] * i.numel() for i, t in zip(alone(idx), alone(targets), strict=True))
    expected = torch.autograd.grad(loss / idx.numel(), list(model.parameters()))
    model.loss_chunk_tokens = 24
    for kind in ('none', 'selective', 'full'):
        model.activation_checkpointing = kind
        found = torch.autograd.grad(model(idx, targets)[1], list(model.parameters()))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    plain = GPT(replace(model.config, document_attention=False))
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(idx)[0][0, 8:], model(idx)[0][0, 8:], atol=1e-2)


def test_a_compiled_step_has_one_graph_and_computes_the_same():
    model, idx = make({**FLAGS['newer'], 'n_layer': 1}), packed()
    model.activation_checkpointing = 'selective'
    torch._dynamo.reset()
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    weights = list(model.parameters())
    (loss, again) = (call(idx, idx.roll(-1, 1))[1] for call in (model, compiled))
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(torch.autograd.grad(again, weights),
                               torch.autograd.grad(loss, weights))


# -----------------------------------------------------------------------------
# what a GPU takes instead of a mask


def test_the_documents_of_the_kernel_are_those_of_the_mask():
    idx = packed()
    within = Documents(idx, OPENER, n_layer=1)
    with HostReads() as reads:
        ends = document_ends(within.positions)
    assert not reads.found and ends.dtype == torch.int32
    lengths = ends.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # of each token
    same = (document[:, None] == document).tril()
    assert torch.equal(same, torch.block_diag(*within.mask[:, 0]))
    assert ends[0] == 0 and lengths.count_nonzero() == sum(map(len, CUTS))


def test_more_documents_than_the_kernel_is_told_of_end_the_run():
    idx = torch.full((2, 256), OPENER)
    document_ends(Documents(idx[:, :32], OPENER, n_layer=1).positions)
    with pytest.raises(RuntimeError, match='2 sequences of 256 tokens has more than 64 documents'):
        document_ends(Documents(idx, OPENER, n_layer=1).positions)


def by_document(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size):
    """What torch's documentation says that varlen_attn computes, which takes a GPU."""
    assert window_size == (-1, 0) and torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.diff().max() <= max_q == max_k
    parts = [F.scaled_dot_product_attention(*(t[a:b].transpose(0, 1) for t in (query, key, value)),
                                            is_causal=True).transpose(0, 1)
             for a, b in pairwise(cu_seq_q) if a < b]
    return torch.cat(parts)


def test_what_goes_to_the_kernel_gives_what_the_mask_gives(monkeypatch):
    inspect.signature(varlen_attn).bind(*range(7), window_size=(-1, 0))  # or a TypeError
    model, idx = make(FLAGS['newer']).bfloat16(), packed()
    masked = model(idx)[0].float()
    called = []
    monkeypatch.setattr(documents, 'has_varlen', lambda device: True)
    monkeypatch.setattr(documents, 'varlen_attn',
                        lambda *args, **options: called.append(1) or by_document(*args, **options))
    torch.testing.assert_close(model(idx)[0].float(), masked, atol=0.1, rtol=0.05)
    assert len(called) == SMALL.n_layer
