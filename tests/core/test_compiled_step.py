from dataclasses import replace
from functools import partial
from itertools import repeat

import pytest
import torch
from runs import HostReads, after_init, lines
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.profiler import ProfilerActivity, profile

import train
from model import GPT, GPTConfig
from plaingpt.core.blocks import apply_activation_checkpointing, compile_blocks
from plaingpt.core.optimizers import OPTIMIZERS
from plaingpt.core.settings import TrainConfig
from plaingpt.experiments.speed import time_step
from plaingpt.system import devices

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32,
                  document_attention=True, document_start=0)
CPU = torch.device('cpu')
COMPILE = torch.compile


@pytest.fixture
def compile_with(monkeypatch):
    """compile_with(backend): torch.compile uses it, and must not break a graph."""
    def compile_with(backend):
        torch._dynamo.reset()
        monkeypatch.setattr(torch, 'compile', partial(COMPILE, backend=backend, fullgraph=True))
        monkeypatch.setattr(devices, 'compile_problem', lambda device: None)  # it needs no compiler
        return backend
    return compile_with


def test_a_run_compiles_a_graph_for_training_and_one_for_evaluation(tiny, compile_with):
    counter = compile_with(CompileCounterWithBackend('eager'))
    # 5 sequences end in a batch of 1
    train.main([*tiny, '--compile=True', '--batch_size=5', '--eval_iters=1'])
    assert counter.frame_count == 2


def test_compiled_blocks_share_their_graphs(tiny, compile_with):
    for depth in (2, 3):
        counter = compile_with(CompileCounterWithBackend('eager'))
        train.main([*tiny, '--compile=blocks', f'--n_layer={depth}'])
        assert counter.frame_count == 4  # a block and the loss, each to train and to evaluate


class BatchNorm(torch.nn.BatchNorm1d):
    def forward(self, x):  # (B, T, C)
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize('how', ['True', pytest.param('blocks', marks=pytest.mark.slow)])
def test_a_compiled_run_matches_the_eager_one_also_where_modes_differ(
        how, tiny, tmp_path, compile_with, monkeypatch):
    def patch(owner, name, change):
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))

    compile_with('eager')
    after_init(patch, lambda model: model.transformer.update(
        {'drop': torch.nn.Sequential(torch.nn.Dropout(0.5), BatchNorm(32))}))
    train.main([*tiny, f'--compile={how}', '--out_dir=compiled'])
    train.main([*tiny, '--out_dir=eager'])
    for key in ('loss', 'val_loss'):
        losses = [[line[key] for line in lines(tmp_path / folder, key)]
                  for folder in ('compiled', 'eager')]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), key


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('optimizer', sorted(OPTIMIZERS.keys() - {'sgd'}))
def test_a_step_never_waits_for_the_device(optimizer, dtype):
    config = TrainConfig(optimizer=optimizer, batch_size=2, gradient_accumulation_steps=2)
    batch = torch.randint(65, (2, 2, 16))
    _, step = train.build(SMALL, config, CPU, dtype)
    with HostReads() as reads:
        for _ in range(2):
            time_step(step, repeat(batch), 1e-3)
    assert not reads.found
    with reads:
        assert batch.sum() > 0
    assert reads.found  # else this test would see nothing


# -----------------------------------------------------------------------------
# activation checkpointing, the cache of graphs, and autocast


@pytest.mark.parametrize('kind, n', [('selective', 8), ('full', 11)])
def test_a_compiled_block_recomputes_what_its_kind_says(kind, n, compile_with):
    # Each of 4 matmuls has 2 in the backward pass; 'full' needs the outputs of 3 again.
    compile_with(aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph),
                              partition_fn=min_cut_rematerialization_partition))
    gpt = GPT(replace(SMALL, mlp='swiglu', rotary=True, bias=False, document_attention=False))
    apply_activation_checkpointing(gpt, kind)
    compile_blocks(gpt)
    for _ in range(2):  # the first compiles the backward pass
        x = gpt(torch.randint(65, (2, 16)))[0]
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            x.sum().backward()
    [matmuls] = [event.count for event in prof.key_averages() if event.key == 'aten::mm']
    assert matmuls == 2 * n + 2  # in two layers and the head
