"""A run with a sharded model matches the run of one process."""

import math
import os
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from processes import launch, options
from runs import TINY, change_steps, lines, model_of, weights
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import train
from model import GPT, GPTConfig
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core import optimizers, sharding
from plaingpt.core.optimizers import build_optimizer
from plaingpt.core.settings import TrainConfig
from plaingpt.system import devices
from plaingpt.system.distributed import (
    full_tensor,
    is_sharded,
    launched_world,
    process_group,
)

CPU = torch.device('cpu')
NEWER = dict(rotary=True, rmsnorm=True, qk_norm=True, conv=3, mlp='swiglu',
             value_embeddings=True, ngram_rows=50, tied_head=False)


@pytest.fixture
def run(char_data, tmp_path):
    """Trains in tmp_path/name, with six micro-batches per step, in new processes → what was
    printed."""
    def run(name, *argv, processes=2, main=train.main):
        parallel = ['--parallel=fsdp'] if processes > 1 else []
        return launch(main, processes, tmp_path, *TINY, *parallel, f'--dataset={char_data}',
                      '--gradient_accumulation_steps=6', '--check=False', *argv,
                      f'--out_dir={tmp_path / name}')
    return run


def saved(folder, optimizer='adamw'):
    """{name: tensor} of the weights in the latest checkpoint, and of what the optimizer remembers
    of each."""
    found = checkpoints.find(folder)
    model = model_of(found)
    made = build_optimizer(model, TrainConfig(optimizer=optimizer))
    found.load_optimizer(made, model)
    tensors = dict(model.named_parameters())
    for name, p in model.named_parameters():
        tensors |= {f'{name}/{key}': value for key, value in made.state[p].items()}
    return tensors


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


@pytest.mark.parametrize(('name', 'shape'), [
    # each of three processes orthogonalizes one matrix of a shape
    pytest.param('muon', dict(n_layer=3), marks=pytest.mark.slow),
    # two processes orthogonalize two weights of several matrices each, the third none
    ('normuon', dict(n_layer=4, mlp='swiglu', n_kv_head=1, head_dim=12))])
def test_sharded_weights_move_as_on_one_process(name, shape, tmp_path, muon_in_float32):
    def main(_):
        torch.manual_seed(0)
        with process_group(launched_world(), CPU):
            gpt = GPT(GPTConfig(8, 65, n_head=2, n_embd=16, **shape))
            assert_moves_as_on_one_process(name, gpt)

    launch(main, 3, tmp_path)


def test_a_bad_step_of_one_process_moves_no_weight(run, tmp_path, monkeypatch, muon_in_float32):
    def poisoned(n, model, loss):
        """The loss of the second step is not finite on rank 1, or on the only process."""
        bad = n == 2 and os.environ.get('RANK', '1') == '1'
        return loss * math.nan if bad else loss

    change_steps(monkeypatch, poisoned)
    words = ['--max_iters=3', '--optimizer=muon']
    run('one', *words, processes=1)
    assert 'nan' in run('two', *words)
    one, two = (saved(tmp_path / name, 'muon') for name in ('one', 'two'))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
def test_muon_in_bfloat16_on_two_processes_differs_by_a_small_part_of_the_updates(
        parallel, run, tmp_path, monkeypatch):
    # A gradient that is one rounding error larger does as much to a run of one process.
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: True)
    argv = options(optimizer='muon', ema_decay=0.9, learning_rate=6e-3, max_iters=20,
                   eval_interval=10, warmup_iters=0)
    run('one', *argv, processes=1)
    run('two', *argv, f'--parallel={parallel}')
    before = weights(tmp_path / 'one', 10)
    one, two = (weights(tmp_path / name) for name in ('one', 'two'))
    for old, p, q in zip(before, one, two, strict=True):
        assert (p - q).norm() < 0.25 * (p - old).norm()
    losses = [lines(tmp_path / name, 'val_loss')[-1]['val_loss'] for name in ('one', 'two')]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def save_what_is_read(folder, target, shape, kind):
    """In a process of a job, or alone: read a checkpoint and write it into `target`."""
    world = launched_world()
    DTensor.full_tensor = None  # a process loads and saves its share
    with process_group(world, CPU) if world.launched else nullcontext():
        model = GPT(shape)
        if kind == 'fsdp':
            with sharding.parameters_on_meta():
                model = GPT(shape)
            model = sharding.shard(model, CPU, 'float32')
        optimizer = build_optimizer(model, TrainConfig(optimizer='normuon'))
        found = checkpoints.find(folder)
        found.load_into(model)
        found.load_optimizer(optimizer, model)
        states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
        assert all(is_sharded(t) == (kind == 'fsdp') for t in states)
        saver = checkpoints.Saver(target, rank=world.rank, world_size=world.size)
        saver.save(model, optimizer, found.state)
        saver.wait()


def test_any_number_of_processes_reads_what_any_number_wrote(run, tmp_path):
    run('one', '--optimizer=normuon', *options(**NEWER), '--max_iters=2', processes=1)
    source = tmp_path / 'one'
    shape, expected = model_of(checkpoints.find(source)).config, saved(source, 'normuon')
    for processes, kind in ((3, 'fsdp'), (2, 'ddp'), (1, 'ddp')):
        target = tmp_path / f'{kind}{processes}'
        launch(lambda _, source=source, target=target, kind=kind: save_what_is_read(
            source, target, shape, kind), processes, tmp_path)
        torch.testing.assert_close(saved(target, 'normuon'), expected, rtol=0, atol=0)
        source = target


@pytest.mark.slow
def test_sharded_blocks_are_compiled_once_each_to_train_or_evaluate(run, tmp_path, monkeypatch):
    counter = CompileCounterWithBackend('aot_eager')

    def main(argv):
        train.main(argv)
        print(f'{counter.frame_count} graphs')

    argv = ['--activation_checkpointing=none', '--report=True']  # with looks at the whole model
    run('one', *argv, processes=1)
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=counter))
    monkeypatch.setattr(devices, 'compile_problem', lambda device: None)  # it needs no compiler
    assert '\n4 graphs' in run('two', *argv, '--compile=True', main=main)
    one, two = ([line['loss'] for line in lines(tmp_path / name, 'loss')]
                for name in ('one', 'two'))
    assert two == pytest.approx(one, rel=2e-5)
