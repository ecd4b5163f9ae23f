"""Muon by owners: processes that share its work, beside one process that does all of it."""

import math
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import product

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
WIDE = GPTConfig(block_size=8, vocab_size=65, n_layer=2, n_head=2, n_embd=32, mlp='swiglu')
NARROW = replace(WIDE, n_embd=4, n_layer=1)  # three processes take 2, 2 and 0 of four rows
# optimizer, shape, whether the CPU has bfloat16
CASES = [('muon', NARROW, True), ('normuon', WIDE, False)]
ALL_CASES = list(product(('muon', 'normuon'), (WIDE, NARROW), (True, False)))


def in_a_group(function, *arguments):
    """→ a main for the processes of a job"""
    def main(_):
        torch.manual_seed(0)
        with process_group(launched_world(), CPU), pytest.MonkeyPatch.context() as patch:
            function(patch, *arguments)
    return main


class Trained:
    """A GPT that all processes train together, and a copy that each trains alone, with the same
    gradients."""

    def __init__(self, shape, wrap, name):
        gpt = GPT(shape)
        alone = deepcopy(gpt)
        self.model = wrap(gpt)
        config = TrainConfig(optimizer=name, learning_rate=1e-2)
        self.optimizer = build_optimizer(gpt, config, dist.get_world_size())
        self.alone = build_optimizer(alone, config)
        self.parameters = list(zip(gpt.parameters(), alone.parameters(), strict=True))
        self.draws = torch.Generator().manual_seed(dist.get_rank())

    def step(self, found_inf=0.0):
        """→ what the processes sent each other in their optimizer's step."""
        idx = torch.randint(0, 65, (2, 8), generator=self.draws)
        self.model(idx, idx)[1].backward()
        for p, q in self.parameters:
            if found_inf:
                p.grad *= float('nan')
            q.grad = full_tensor(p.grad).clone()
        for optimizer in (self.alone, self.optimizer):
            if getattr(optimizer, '_step_supports_amp_scaling', False):
                optimizer.found_inf = torch.tensor(found_inf)
        self.alone.step()
        with Collectives() as sent:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sent

    def beside_the_copy(self):
        """Yield (whether it is of a block's matrix, weight or what the optimizer remembers of it,
        the same of the copy), each of all rows."""
        matrices = set(self.optimizer.param_groups[0]['params'])
        for p, q in self.parameters:
            yield p in matrices, full_tensor(p), q
            assert self.optimizer.state[p].keys() == self.alone.state[q].keys()
            for key, value in self.alone.state[q].items():
                yield p in matrices, full_tensor(self.optimizer.state[p][key]), value


def sharded(gpt):
    for block in gpt.transformer.h:
        fully_shard(block)
    return fully_shard(gpt)


class Collectives(TorchDispatchMode):
    """Counts the collectives, and the bytes that this process puts into them for others."""

    def __init__(self):
        super().__init__()
        self.count, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as what the DTensor does inside
        if func.namespace in ('c10d', '_c10d_functional'):
            name, rank = func.overloadpacket.__name__, dist.get_rank()
            self.count[name] += 1
            if name == 'alltoall_base_':
                _, sent, _, _, splits, *_ = args
                row = sent.size(1) * sent.element_size()
                self.bytes[name] += row * (sum(splits) - splits[rank])
            elif name == '_allgather_base_':
                self.bytes[name] += args[1].nbytes * (dist.get_world_size() - 1)
        return func(*args, **kwargs or {})


def compare_ddp(patch, cases):
    for name, shape, bfloat16 in cases:
        patch.setattr(optimizers, 'cpu_has_bfloat16', lambda bfloat16=bfloat16: bfloat16)
        trained = Trained(shape, DDP, name)
        for found_inf in (0.0, 1.0, 0.0):
            sent = trained.step(found_inf)
            assert sent.count == {'_allgather_base_': 3}
        assert all(torch.equal(ours, alone) for _, ours, alone in trained.beside_the_copy())


def compare_fsdp(patch, cases):
    for name, shape, bfloat16 in cases:
        patch.setattr(optimizers, 'cpu_has_bfloat16', lambda bfloat16=bfloat16: bfloat16)
        trained = Trained(shape, sharded, name)
        lengths = {'allreduce_': 3} if name == 'normuon' else {}
        for found_inf in (0.0, 1.0, 0.0):
            sent = trained.step(found_inf)
            assert sent.count == {'alltoall_base_': 6, **lengths}
        for of_matrix, ours, alone in trained.beside_the_copy():
            if of_matrix and name == 'muon':
                assert torch.equal(ours, alone)
            else:  # sums of NorMuon and kernels of AdamW take other numbers together
                torch.testing.assert_close(ours, alone, rtol=1e-6, atol=1e-6)


def count_bytes(patch):
    patch.setattr(optimizers, 'cpu_has_bfloat16', lambda: True)
    shape = replace(WIDE, n_layer=3, n_embd=16, mlp='gelu')  # each owner has equally many
    # from its owner to two others; from two of three owners of its row there and back
    for wrap, travels in ((DDP, 2), (sharded, 2 * 2 / 3)):
        trained = Trained(shape, wrap, 'muon')
        elements = sum(math.prod(p.shape) for p in trained.optimizer.param_groups[0]['params'])
        sent = torch.tensor(trained.step().bytes.total())
        dist.all_reduce(sent)
        assert sent.item() / elements == pytest.approx(2 * travels, rel=0.01)


def compare_all(patch, cases):
    compare_ddp(patch, cases)
    compare_fsdp(patch, cases)
    if dist.get_world_size() == 3:
        count_bytes(patch)


@pytest.mark.parametrize(('size', 'cases'), [(3, CASES), *(
    pytest.param(size, ALL_CASES, marks=pytest.mark.slow) for size in (2, 4))])
def test_owners_move_the_weights_as_one_process_does_and_send_each_number_in_two_bytes(
        tmp_path, size, cases):
    launch(in_a_group(compare_all, cases), size, tmp_path)


@given(st.integers(1, 64), st.integers(1, 48), st.integers(1, 64), st.booleans())
def test_no_process_has_more_to_do_than_the_mean_and_one_matrix(size, n_layer, C, swiglu):
    layer = [((C, C), 3), ((C, C), 1), ((4 * C, C), 1 + swiglu), ((C, 4 * C), 1)]
    stacks = tuple(layer * n_layer)
    todo = [0] * size
    for (shape, n), owner in zip(stacks, owners_of(stacks, size), strict=True):
        todo[owner] += n * work(shape)
    assert max(todo) <= sum(todo) / size + max(n * work(shape) for shape, n in layer)
