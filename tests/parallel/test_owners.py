"""Muon on sharded weights: each process orthogonalizes some whole matrices.
Whole runs on several processes are in tests/training/test_equal_runs.py."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from model import GPT, GPTConfig
from plaingpt.parallel.job import process_group
from plaingpt.parallel.owners import from_owners, to_owners
from plaingpt.system.distributed import full_tensor, launched_world
from plaingpt.training import optimizers
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CPU = torch.device('cpu')
# each of three owners has one matrix of a shape
SHAPE = GPTConfig(block_size=8, vocab_size=65, n_layer=3, n_head=2, n_embd=16)


@pytest.mark.parametrize('n, R', [(3, 6), (4, 7), (1, 6), (2, 1)])
def test_owners_have_whole_matrices_and_each_process_gets_its_rows_back(n, R, tmp_path):
    def main(_):
        with process_group(launched_world(), CPU):
            mesh, rank = init_device_mesh('cpu', (3,)), dist.get_rank()
            whole = torch.arange(n * R * 2.0, dtype=torch.bfloat16).view(n, R, 2)
            weights = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in whole]
            rows = torch.stack([p.to_local() for p in weights])
            owned = to_owners(rows, weights[0])
            k = len(owned)
            assert k == -(-n // 3)
            mine = whole[rank * k:rank * k + k]
            assert torch.equal(owned[:len(mine)], mine) and not owned[len(mine):].any()
            assert torch.equal(from_owners(owned, weights), rows)

    launch(main, 3, tmp_path)


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
def test_sharded_weights_move_as_on_one_process(name, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: False)  # Muon rounds nothing

    def main(_):
        torch.manual_seed(0)
        with process_group(launched_world(), CPU):
            assert_moves_as_on_one_process(name, GPT(SHAPE))
            assert_moves_as_on_one_process(  # some have more; matrices of three heights in a weight
                name, GPT(replace(SHAPE, n_layer=4, mlp='swiglu', n_kv_head=1, head_dim=12)))

    launch(main, 3, tmp_path)
