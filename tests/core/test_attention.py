from functools import partial

import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig
from plaingpt.core.attention import MAX_LENGTH, fast_attention, use_fast_attention


def heads(T, dtype=torch.bfloat16, **how):
    """Queries, keys and values (2, 3, T, 16), laid out as those of a model."""
    torch.manual_seed(0)
    return [torch.randn(2, T, 3, 16, dtype=dtype).transpose(1, 2).requires_grad_(**how)
            for _ in range(3)]


def with_gradients(attention, inputs):
    y = attention(*inputs, is_causal=True)
    return [y, *torch.autograd.grad(y, inputs, torch.ones_like(y).cumsum(2))]


@pytest.mark.parametrize('T', [1, 128])
def test_attention_matches_float32_within_rounding(T):
    inputs = heads(T)
    exact = with_gradients(F.scaled_dot_product_attention,
                           [x.detach().float().requires_grad_() for x in inputs])
    for computed, expected in zip(with_gradients(fast_attention, inputs), exact, strict=True):
        assert computed.dtype == torch.bfloat16
        assert (computed - expected).norm() <= 0.01 * expected.norm() + 1e-6


@pytest.mark.parametrize('inputs, how', [
    (heads(8, torch.float32), {'is_causal': True}),
    (heads(MAX_LENGTH + 1), {'is_causal': True}),
    (heads(8, requires_grad=False), {'is_causal': True}),
    (heads(8), {}),
    (heads(8), {'attn_mask': torch.eye(8).bool()}),
    (heads(8), {'is_causal': True, 'scale': 0.5})],
    ids=['float32', 'long', 'no gradient', 'not causal', 'a mask', 'a scale'])
def test_everything_else_is_computed_by_torch(inputs, how):
    torch.testing.assert_close(fast_attention(*inputs, **how),
                               F.scaled_dot_product_attention(*inputs, **how), rtol=0, atol=0)


def test_an_attention_of_ones_own_is_kept():
    model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=2, n_head=2, n_embd=8))
    own = model.transformer.h[0].attn.sdpa = partial(F.scaled_dot_product_attention, scale=0.5)
    use_fast_attention(model)
    assert model.transformer.h[0].attn.sdpa is own
    assert model.transformer.h[1].attn.sdpa is fast_attention
