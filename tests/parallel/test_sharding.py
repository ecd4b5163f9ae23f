"""A run whose model is shared among processes is the run of one process."""

import gc
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
from helpers import TINY, fails, in_background, in_the_loop, launch, one_benchmark, options
from safetensors import safe_open

import model
import train
from model import GPT, GPTConfig
from plaingpt.parallel import sharding
from plaingpt.parallel.job import process_group
from plaingpt.system.devices import rng_state
from plaingpt.system.distributed import launched_world
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CPU = torch.device('cpu')
SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
NEWER = dict(rotary=True, rmsnorm=True, qk_norm=True, conv=3, mlp='swiglu',
             value_embeddings=True, tied_head=False)
UNIQUE = {'elapsed_s', 'tokens_per_s', 'mfu', 'peak_memory_bytes',
          'val_loss_stderr'}  # to each run; the last by how the batches fall to processes


@pytest.fixture
def run(char_data, tmp_path):
    """Trains in tmp_path/name, with six micro-batches a step → what was printed. processes: of a
    job, or this one; before: functions of a MonkeyPatch that are called first."""
    def run(name, *argv, processes=1, before=()):
        argv = [*TINY, f'--dataset={char_data}', '--gradient_accumulation_steps=6',
                '--log_interval=1', '--check=False', *argv, f'--out_dir={tmp_path / name}']
        main = partial(train_here, before=before)
        return launch(main, processes, tmp_path, *argv) if processes > 1 else main(argv)
    return run


def train_here(argv, before):
    """In a process of a job, or in this one."""
    with pytest.MonkeyPatch.context() as patch:
        for change in before:
            change(patch)
        train.main(argv)


def tensors(folder):
    """{kind/name: tensor} of the latest checkpoint, and parts of tensors put together."""
    parts, path = {}, checkpoints.find(folder).path
    for file in sorted(path.glob('*.safetensors')):
        with safe_open(file, framework='pt') as f:
            for key in f.keys():  # noqa: SIM118
                name, first, _ = checkpoints.PART.fullmatch(key).groups()
                parts.setdefault(f'{file.name.partition("-")[0]}/{name}', []).append(
                    (int(first or 0), f.get_tensor(key)))
    return {name: torch.cat([t for _, t in sorted(found, key=lambda part: part[0])])
            if found[0][1].dim() else found[0][1] for name, found in parts.items()}


def assert_tensors_equal(folder, expected):
    found, expected = tensors(folder), tensors(expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], t) for name, t in expected.items()), folder


def assert_tensors_close(folder, expected, atol=2e-6):
    found, expected = tensors(folder), tensors(expected)
    assert {name: t.shape for name, t in found.items()} == \
        {name: t.shape for name, t in expected.items()}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=atol, msg=name)


def rows(folder, without=()):
    """What was logged, without what differs from run to run."""
    lines = map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in UNIQUE
             and not key.startswith(without)} for line in lines]


def assert_rows_close(found, expected, within):
    """The same keys, numbers within that share of each other."""
    assert [list(row) for row in found] == [list(row) for row in expected]
    for row, other in zip(found, expected, strict=True):
        for key, value in row.items():
            same = math.isclose(value, other[key], rel_tol=within, abs_tol=within) \
                if isinstance(value, float) else value == other[key]
            assert same, (row['iter'], key, value, other[key])


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


def with_wide_positions(patch):
    original = GPT.__init__

    def init(self, config):
        original(self, config)
        torch.nn.init.normal_(self.transformer.wpe.weight, std=0.5)
    patch.setattr(GPT, '__init__', init)


def with_one_question(patch):  # fewer than processes
    one_benchmark(patch, [' main'])
    patch.setattr(train, 'write_report', lambda *_: None)  # its pictures take a second
    patch.setattr(model, 'chunk_size', lambda *_: 24)


def test_losses_health_samples_and_benchmarks_are_those_of_one_process(run, tmp_path):
    argv = options(**NEWER, activation_checkpointing='selective', report=True, eval_tasks='own',
                   eval_iters=1, batch_size=1,  # one sequence, which one of the processes has
                   max_iters=2, eval_interval=2)
    run('one', *argv, before=[with_one_question])
    for kind in ('ddp', 'fsdp'):
        run(kind, *argv, f'--parallel={kind}', processes=2, before=[with_one_question])
    one, ddp, fsdp = (tmp_path / name for name in ('one', 'ddp', 'fsdp'))
    assert_rows_close(rows(fsdp, 'health/'), rows(one, 'health/'), within=2e-6)
    # Health is measured on the sequences of rank 0, which are others on one process.
    assert_rows_close(rows(fsdp), rows(ddp), within=1e-4)
    assert_tensors_close(fsdp, one, atol=2e-5)  # AdamW makes steps of gradients that are near zero


def poison_the_second_step(patch):
    """The loss of the second step is not finite on rank 1, or on the only process."""
    original, steps = train.forward_backward, []

    def poisoned(model, *rest):
        loss = original(model, *rest)
        steps.append(loss)
        return loss * math.nan if len(steps) == 2 and os.environ.get('RANK', '1') == '1' else loss
    in_the_loop(patch, forward_backward=poisoned)


def test_a_model_of_your_own_begins_as_on_one_process_and_a_bad_step_of_one_moves_no_weight_on_any(
        run, tmp_path):
    before = [poison_the_second_step, with_wide_positions]
    run('one', '--max_iters=3', before=before)
    printed = run('two', '--max_iters=3', '--parallel=fsdp', processes=2, before=before)
    assert 'iteration 2 left the weights alone: loss 4.' in printed
    assert ', nan, gradient norm' in printed  # the losses of both
    assert_tensors_close(tmp_path / 'two', tmp_path / 'one')
    assert tensors(tmp_path / 'two')['model/transformer.wpe.weight'].std() > 0.4


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


def shape_of(folder):
    return checkpoints.find(folder).load_model().config


def test_any_number_and_kind_of_processes_reads_what_another_wrote(run, tmp_path):
    run('one', '--optimizer=normuon', *options(**NEWER), '--max_iters=2')
    shape, source = shape_of(tmp_path / 'one'), tmp_path / 'one'
    for processes, kind in ((3, 'fsdp'), (2, 'ddp')):
        launch(lambda _, source=source, kind=kind: save_what_is_read(
            source, tmp_path / kind, shape, kind), processes, tmp_path)
        assert_tensors_equal(tmp_path / kind, tmp_path / 'one')
        source = tmp_path / kind
    save_what_is_read(source, tmp_path / 'end', shape, 'ddp')
    assert_tensors_equal(tmp_path / 'end', tmp_path / 'one')


def saving_in_the_background(patch):
    patch.setattr(train, 'Saver', partial(in_background, train.Saver))


def count_groups(patch):
    made, (new_group, finish) = [], (torch.distributed.new_group, train.finish)
    patch.setattr(torch.distributed, 'new_group',
                  lambda *a, **how: made.append(1) or new_group(*a, **how))
    patch.setattr(train, 'finish', lambda *a: print(f'{len(made)} more groups') or finish(*a))


def test_a_resumed_run_has_the_same_bits_and_makes_a_group_more_to_save_in_the_background_alone(
        run, tmp_path):
    argv = ['--parallel=fsdp', '--dropout=0.1', '--max_iters=4', '--eval_interval=2']
    printed = run('whole', *argv, '--check=auto', processes=2,
                  before=[count_groups, saving_in_the_background])
    assert '1 more groups' in printed
    shutil.copytree(tmp_path / 'whole', tmp_path / 'cut')
    shutil.rmtree(checkpoints.find(tmp_path / 'cut').path)  # that of iteration 2 remains
    printed = run('cut', *argv, '--init_from=auto', processes=2, before=[count_groups])
    assert 'resumed from' in printed and '0 more groups' in printed
    assert_tensors_equal(tmp_path / 'cut', tmp_path / 'whole')


def test_sharding_takes_a_job(tiny, capsys, monkeypatch):
    assert 'torchrun' in fails(capsys, monkeypatch, train.main, *tiny, '--parallel=fsdp')


def with_eager_backend(patch):
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend('aot_eager')
    patch.setattr(torch, 'compile', partial(torch.compile, backend=counter))
    original = train.finish

    def tell(run, ending):
        original(run, ending)
        print(f'{counter.frame_count} graphs')
    patch.setattr(train, 'finish', tell)


@pytest.mark.slow
def test_blocks_are_compiled_once_for_training_and_once_for_evaluating(run, tmp_path):
    argv = ['--activation_checkpointing=none', '--report=True']  # with looks at the whole model
    run('one', *argv)
    printed = run('two', *argv, '--parallel=fsdp', '--compile=True', processes=2,
                  before=[with_eager_backend])
    assert_rows_close(rows(tmp_path / 'two', 'health/'), rows(tmp_path / 'one', 'health/'),
                      within=2e-5)
    assert '\n2 graphs' in printed


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
        config = TrainConfig()

        def built():
            model = train.shard(on_meta(WIDE), CPU, 'float32', False)
            return model, build_optimizer(model, config)

        model, optimizer = built()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.data.fill_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        checkpoints.CHUNK_BYTES = 4 * 10**6
        saver = checkpoints.Saver(out_dir, rank=world.rank, world_size=world.size)
        state = {**train.Progress(iter_num=1).state(), 'config': {}, 'tokenizer': {'kind': 'char'},
                 'data': '', 'samples': {}, 'sequences': 0, 'elapsed_s': 0.0, 'scaler': {}}
        saving = growth(lambda: saver.save(model, optimizer, state, rng_state(CPU)))
        optimizer.state.clear()
        [path] = checkpoints.checkpoint_paths(out_dir)
        found = checkpoints.Checkpoint(path, json.loads((path / 'state.json').read_text()))
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
