"""Muon by owners: what the processes that share its work send each other, and who does how much.
That they move the weights as one process does is in tests/training/test_equal_runs.py."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import launch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from plaingpt.parallel.job import process_group
from plaingpt.parallel.owners import owners_of, work
from plaingpt.system.distributed import full_tensor, launched_world
from plaingpt.training import optimizers
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CPU = torch.device('cpu')
# each of three owners has equally many matrices
SHAPE = GPTConfig(block_size=8, vocab_size=65, n_layer=3, n_head=2, n_embd=16)


def sharded(gpt):
    for block in gpt.transformer.h:
        fully_shard(block)
    return fully_shard(gpt)


class Sent(TorchDispatchMode):
    """Adds up the bytes that this process puts into collectives for others."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as what the DTensor does inside
        name, rank = func.overloadpacket.__name__, dist.get_rank()
        if name == 'alltoall_base_':
            _, rows, _, _, splits, *_ = args
            self.bytes += rows.element_size() * rows.size(1) * (sum(splits) - splits[rank])
        elif name == '_allgather_base_':
            self.bytes += args[1].nbytes * (dist.get_world_size() - 1)
        return func(*args, **kwargs or {})


def step(gpt, wrap):
    """→ the bytes that all processes send for each element of the matrices, which move as those of
    a process that does all of it."""
    alone = deepcopy(gpt)
    model, config = wrap(gpt), TrainConfig(optimizer='muon')
    optimizer = build_optimizer(gpt, config, dist.get_world_size())
    idx = torch.zeros(2, 8, dtype=torch.int64)
    model(idx, idx)[1].backward()
    for p, q in zip(gpt.parameters(), alone.parameters(), strict=True):
        q.grad = full_tensor(p.grad).clone()
    build_optimizer(alone, config).step()
    with Sent() as sent:
        optimizer.step()
    elements, total = 0, torch.tensor(sent.bytes)
    dist.all_reduce(total)
    for p, q in zip(gpt.parameters(), alone.parameters(), strict=True):
        if p in set(optimizer.param_groups[0]['params']):
            assert torch.equal(full_tensor(p), q)
            elements += q.numel()
    return total.item() / elements


def test_owners_move_the_matrices_as_one_process_does_and_send_each_number_in_two_bytes(
        tmp_path, monkeypatch):
    def main(_):
        torch.manual_seed(0)
        with process_group(launched_world(), CPU):
            # from its owner to two others; from two of three owners of its row there and back
            for wrap, travels in ((DDP, 2), (sharded, 2 * 2 / 3)):
                assert step(GPT(SHAPE), wrap) == pytest.approx(2 * travels, rel=0.01)
                step(GPT(replace(SHAPE, n_layer=4, mlp='swiglu')), wrap)  # some have more

    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: True)
    launch(main, 3, tmp_path)


@given(st.integers(1, 64), st.integers(1, 48), st.integers(1, 64), st.booleans())
def test_no_process_has_more_to_do_than_the_mean_and_one_matrix(size, n_layer, C, swiglu):
    layer = [((C, C), 3), ((C, C), 1), ((4 * C, C), 1 + swiglu), ((C, 4 * C), 1)]
    stacks = tuple(layer * n_layer)
    todo = [0] * size
    for (shape, n), owner in zip(stacks, owners_of(stacks, size), strict=True):
        todo[owner] += n * work(shape)
    assert max(todo) <= sum(todo) / size + max(n * work(shape) for shape, n in layer)
