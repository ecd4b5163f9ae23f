"""Muon on sharded weights: each process orthogonalizes some whole matrices.
Whole runs on several processes are in tests/core/test_equal_runs.py."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from processes import launch
from torch.distributed.fsdp import fully_shard

from model import GPT, GPTConfig
from plaingpt.core.optimizers import build_optimizer
from plaingpt.core.settings import TrainConfig
from plaingpt.system.distributed import full_tensor, launched_world, process_group

# each of three owners has one matrix of a shape
SHAPE = GPTConfig(block_size=8, vocab_size=65, n_layer=3, n_head=2, n_embd=16)


def assert_moves_as_on_one_process(name, gpt):
    alone, config = deepcopy(gpt), TrainConfig(optimizer=name)
    for block in gpt.transformer.h:
        fully_shard(block)
    optimizer = build_optimizer(fully_shard(gpt), config)
    other = build_optimizer(alone, config)
    for _ in range(2):
        idx = torch.zeros(2, 8, dtype=torch.int64)
        gpt(idx, idx)[1].backward()
        for p, q in zip(gpt.parameters(), alone.parameters(), strict=True):
            q.grad = full_tensor(p.grad).clone()
        optimizer.step()
        other.step()
    for p, q in zip(gpt.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(p), q, rtol=1e-4, atol=1e-6)
        for key, value in other.state[q].items():
            torch.testing.assert_close(full_tensor(optimizer.state[p][key]), value)


@pytest.mark.parametrize('name', ['muon', 'normuon'])
@pytest.mark.parametrize('shape', [
    SHAPE, replace(SHAPE, n_layer=4, mlp='swiglu', n_kv_head=1, head_dim=12)],
    ids=['one matrix each', 'an owner has two'])  # and weights of several matrices
def test_sharded_weights_move_as_on_one_process(name, shape, tmp_path, muon_in_float32):
    def main(_):
        torch.manual_seed(0)
        with process_group(launched_world(), torch.device('cpu')):
            assert_moves_as_on_one_process(name, GPT(shape))

    launch(main, 3, tmp_path)
