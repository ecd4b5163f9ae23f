"""A run whose model is shared among processes is the run of one process."""

import gc
import itertools
import json
import math
import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import TINY, in_background, in_the_loop, launch, lines, options
from torch._dynamo.testing import CompileCounterWithBackend

import train
from model import GPT, GPTConfig
from plaingpt.parallel import sharding
from plaingpt.parallel.job import process_group
from plaingpt.system.devices import rng_state
from plaingpt.system.distributed import launched_world
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import optimizers
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CPU = torch.device('cpu')
SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
NEWER = dict(rotary=True, rmsnorm=True, qk_norm=True, conv=3, mlp='swiglu',
             value_embeddings=True, tied_head=False)


@pytest.fixture
def run(char_data, tmp_path):
    """Trains in tmp_path/name, with six micro-batches a step, in new processes → what was printed.
    """
    def run(name, *argv, processes=2):
        parallel = ['--parallel=fsdp'] if processes > 1 else []
        return launch(train.main, processes, tmp_path, *TINY, *parallel, f'--dataset={char_data}',
                      '--gradient_accumulation_steps=6', '--check=False', *argv,
                      f'--out_dir={tmp_path / name}')
    return run


def saved(folder, optimizer='adamw'):
    """{name: tensor} of the weights in the latest checkpoint, and of what the optimizer remembers
    of each."""
    found = checkpoints.find(folder)
    model = found.load_model()
    made = build_optimizer(model, TrainConfig(optimizer=optimizer))
    found.load_optimizer(made, model)
    tensors = dict(model.named_parameters())
    for name, p in model.named_parameters():
        tensors |= {f'{name}/{key}': value for key, value in made.state[p].items()}
    return tensors


def on_meta(shape):
    with sharding.parameters_on_meta():
        return GPT(shape)


def test_a_model_on_the_meta_device_has_buffers_and_ties_and_draws_no_weights():
    before = torch.get_rng_state()
    gpt = on_meta(replace(SMALL, rotary=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta for p in gpt.parameters()) and gpt.lm_head.weight is \
        gpt.transformer.wte.weight
    assert torch.equal(gpt.cos, GPT(gpt.config).cos)
    assert not any(p.is_meta for p in GPT(SMALL).parameters())


def test_a_model_of_your_own_begins_as_on_one_process_and_a_bad_step_of_one_moves_no_weight_on_any(
        run, tmp_path, monkeypatch):
    init, steps, original = GPT.__init__, itertools.count(1), train.forward_backward

    def with_wide_positions(self, config):
        init(self, config)
        torch.nn.init.normal_(self.transformer.wpe.weight, std=0.5)

    def poisoned(model, *rest):
        """The loss of the second step is not finite on rank 1, or on the only process."""
        loss = original(model, *rest)
        bad = next(steps) == 2 and os.environ.get('RANK', '1') == '1'
        return loss * math.nan if bad else loss

    monkeypatch.setattr(GPT, '__init__', with_wide_positions)
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: False)  # Muon rounds nothing
    in_the_loop(monkeypatch, forward_backward=poisoned)
    words = ['--max_iters=3', '--optimizer=muon']
    run('one', *words, processes=1)
    printed = run('two', *words)
    assert 'iteration 2 left the weights alone: loss 4.' in printed
    assert ', nan, gradient norm' in printed  # the losses of both
    one, two = (saved(tmp_path / name, 'muon') for name in ('one', 'two'))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    assert two['transformer.wpe.weight'].std() > 0.4


def save_what_is_read(folder, target, shape, kind):
    """In a process of a job, or alone: read a checkpoint and write it into `target`."""
    world = launched_world()
    with process_group(world, CPU) if world.launched else nullcontext():
        model = GPT(shape) if kind == 'ddp' else train.shard(on_meta(shape), CPU, 'float32', False)
        optimizer = build_optimizer(model, TrainConfig(optimizer='normuon'))
        found = checkpoints.find(folder)
        found.load_into(model)
        found.load_optimizer(optimizer, model)
        saver = checkpoints.Saver(target, rank=world.rank, world_size=world.size)
        saver.save(model, optimizer, found.state, rng_state(CPU))
        saver.wait()


def test_any_number_and_kind_of_processes_reads_what_another_wrote(run, tmp_path):
    run('one', '--optimizer=normuon', *options(**NEWER), '--max_iters=2', processes=1)
    source = tmp_path / 'one'
    shape, expected = checkpoints.find(source).load_model().config, saved(source, 'normuon')
    for processes, kind in ((3, 'fsdp'), (2, 'ddp'), (1, 'ddp')):
        target = tmp_path / f'{kind}{processes}'
        launch(lambda _, source=source, target=target, kind=kind: save_what_is_read(
            source, target, shape, kind), processes, tmp_path)
        torch.testing.assert_close(saved(target, 'normuon'), expected, rtol=0, atol=0)
        source = target


def test_a_resumed_run_that_was_saved_in_the_background_has_the_same_bits(
        run, tmp_path, monkeypatch):
    argv = ['--dropout=0.1', '--max_iters=4', '--eval_interval=2']
    with monkeypatch.context() as patch:
        patch.setattr(train, 'Saver', partial(in_background, train.Saver))
        run('whole', *argv, '--check=auto')
    shutil.copytree(tmp_path / 'whole', tmp_path / 'cut')
    shutil.rmtree(checkpoints.find(tmp_path / 'cut').path)  # that of iteration 2 remains
    assert 'resumed from' in run('cut', *argv, '--init_from=auto')
    torch.testing.assert_close(saved(tmp_path / 'cut'), saved(tmp_path / 'whole'), rtol=0, atol=0)


@pytest.mark.slow
def test_blocks_are_compiled_once_for_training_and_once_for_evaluating(run, tmp_path, monkeypatch):
    counter, finish = CompileCounterWithBackend('aot_eager'), train.finish

    def tell(*arguments):
        finish(*arguments)
        print(f'{counter.frame_count} graphs')

    argv = ['--activation_checkpointing=none', '--report=True']  # with looks at the whole model
    run('one', *argv, processes=1)
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=counter))
    monkeypatch.setattr(train, 'finish', tell)
    assert '\n2 graphs' in run('two', *argv, '--compile=True')
    one, two = ([line['loss'] for line in lines(tmp_path / name, 'loss')]
                for name in ('one', 'two'))
    assert two == pytest.approx(one, rel=2e-5)


# -----------------------------------------------------------------------------
# memory of a process


WIDE = GPTConfig(block_size=16, vocab_size=8192, n_layer=8, n_head=8, n_embd=512)


def resident(which):
    """Bytes of this process's memory: VmRSS, those now, or VmHWM, the most since `forget`."""
    line, = (line for line in Path('/proc/self/status').read_text().splitlines() if which in line)
    return int(line.split()[1]) * 1024


def growth(work):
    """How far this process's memory rose above what it was while it worked."""
    gc.collect()
    Path('/proc/self/clear_refs').write_text('5')  # forget the most
    before = resident('VmRSS')
    work()
    return resident('VmHWM') - before


def save_and_load(out_dir):
    """In a process of a job: print by how much memory grows while it saves, and while it loads."""
    world = launched_world()
    with process_group(world, CPU):
        model = train.shard(on_meta(WIDE), CPU, 'float32', False)
        optimizer = build_optimizer(model, TrainConfig())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.data.fill_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        checkpoints.CHUNK_BYTES = 4 * 10**6
        saver = checkpoints.Saver(out_dir, rank=world.rank, world_size=world.size)
        state = {'iter_num': 1, 'config': {}, 'tokenizer': {'kind': 'char'}}
        saving = growth(lambda: saver.save(model, optimizer, state, rng_state(CPU)))
        optimizer.state.clear()
        found = checkpoints.find(out_dir)
        loading = growth(lambda: (found.load_into(model),
                                  found.load_optimizer(optimizer, model)))
    print(f'[{saving}, {loading}]')


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='it reads /proc')
def test_a_process_saves_and_loads_its_share_and_a_chunk_at_a_time(tmp_path):
    printed = launch(lambda _: save_and_load(tmp_path / 'run'), 3, tmp_path)
    saving, loading = json.loads(printed.splitlines()[-1])
    weights = 4 * sum(p.numel() for p in on_meta(WIDE).parameters())
    slack = 4e6 + 12e6  # a chunk; buffers of hashing, JSON and gloo
    assert saving < slack
    assert loading < 2 * weights / 3 + slack  # two states of each weight are made anew
