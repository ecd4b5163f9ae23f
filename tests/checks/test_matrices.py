"""Muon has to know which matrices share a weight: the model says so."""

import pytest
import torch
import torch.nn as nn

import model
from plaingpt.system.errors import UserError
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig


def test_parts_that_are_not_the_rows_of_the_weight_are_an_error():
    gpt = model.GPT(model.GPTConfig(16, 65, 1, 2, 32))
    gpt.transformer.h[0].mlp.c_fc.parts = (100, 27)
    with pytest.raises(UserError, match=r'c_fc.parts = \(100, 27\)'):
        build_optimizer(gpt, TrainConfig(optimizer='muon'), 'cpu')


@pytest.mark.parametrize('optimizer', ['muon', 'normuon'])
def test_matrices_of_other_heights_move_as_if_each_had_a_weight_of_its_own(optimizer):
    """As queries, keys and values do where queries share keys: (16, 8, 8) rows of one weight."""
    torch.manual_seed(0)
    whole = nn.Module()
    whole.layer = nn.Linear(16, 32, bias=False)
    whole.layer.parts = (16, 8, 8)
    apart = nn.Module()
    apart.layers = nn.ModuleList(nn.Linear(16, n, bias=False) for n in whole.layer.parts)
    config = TrainConfig(optimizer=optimizer, learning_rate=0.1, weight_decay=0.1)
    gradient = torch.randn(32, 16)
    with torch.no_grad():
        for part, rows in zip(apart.layers, whole.layer.weight.split(whole.layer.parts),
                              strict=True):
            part.weight.copy_(rows)
    whole.layer.weight.grad = gradient
    for part, rows in zip(apart.layers, gradient.split(whole.layer.parts), strict=True):
        part.weight.grad = rows.clone()
    for each in (whole, apart):
        named = nn.Module()
        named.transformer = nn.Module()
        named.transformer.h = nn.ModuleList([each])
        named.scale = nn.Parameter(torch.ones(3))  # for AdamW
        build_optimizer(named, config, 'cpu').step()
    moved = torch.cat([part.weight for part in apart.layers])
    assert torch.allclose(whole.layer.weight, moved, atol=1e-6)
