"""A run whose model is shared among processes is the run of one process."""

import gc
import json
import math
import os
import re
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import ROOT, exit_code, fails, fork, ranks, wait_until
from safetensors import safe_open

import train
from model import GPT, GPTConfig
from plaingpt.inference import scoring
from plaingpt.parallel import sharding
from plaingpt.system.devices import rng_state
from plaingpt.system.distributed import launched_world, process_group
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.checkpoint_writer import Saver
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.progress import Progress
from plaingpt.training.settings import TrainConfig

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
NEWER = dict(rotary=True, rmsnorm=True, qk_norm=True, embedding_norm=True, conv=3, mlp='swiglu',
             value_embeddings=True, tied_head=False, head_bias=True, logit_softcap=15.0)
UNIQUE = {'elapsed_s', 'tokens_per_s', 'mfu', 'peak_memory_bytes', 'data_wait'}  # to each run


CPU = torch.device('cpu')


def start(folder, size, main, *argv, before=None):
    """A job of forks of this process → [process id]; size 0: one process that is no job."""
    folder.mkdir(exist_ok=True)
    return [fork(main, *argv, log=folder / f'log{rank}', before=before, **env)
            for rank, env in enumerate(ranks(size) if size else [{}])]


def job(folder, size, *argv, main=train.main, before=None, code=0):
    """Run a job to its end → what rank 0 printed."""
    pids = start(folder, size, main, *argv, f'--out_dir={folder}/out', before=before)
    codes = [exit_code(pid) for pid in pids]
    logs = [(folder / f'log{rank}').read_text() for rank in range(len(pids))]
    assert codes == [code] * len(pids), '\n'.join(logs)
    return logs[0]


def tensors(folder, which='latest'):
    """{kind/name: tensor} of a checkpoint, and parts of tensors put together."""
    parts, path = {}, checkpoints.find(folder / 'out', which).path
    for file in sorted(path.glob('*.safetensors')):
        with safe_open(file, framework='pt') as f:
            for key in f.keys():  # noqa: SIM118
                name, first, _ = checkpoints.PART.fullmatch(key).groups()
                parts.setdefault(f'{file.name.partition("-")[0]}/{name}', []).append(
                    (int(first or 0), f.get_tensor(key)))
    return {name: torch.cat([t for _, t in sorted(found, key=lambda part: part[0])])
            if found[0][1].dim() else found[0][1] for name, found in parts.items()}


def rows(folder):
    """What was logged, without what differs from run to run."""
    lines = map(json.loads, (folder / 'out' / 'metrics.jsonl').read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in UNIQUE} for line in lines]


def losses(folder):
    return [{key: value for key, value in row.items() if not key.startswith('health/')}
            for row in rows(folder)]


def assert_close(a, b, within):
    """Of rows: the same keys, numbers within that share of each other."""
    assert [list(row) for row in a] == [list(row) for row in b]
    for one, other in zip(a, b, strict=True):
        for key, value in one.items():
            same = math.isclose(value, other[key], rel_tol=within, abs_tol=within) \
                if isinstance(value, float) else value == other[key]
            assert same, (one['iter'], key, value, other[key])


def flags(**settings):
    return [f'--{key}={value}' for key, value in settings.items()]


@pytest.fixture
def small(tiny):
    """The command line of a run whose step has six micro-batches; out_dir is added by `job`."""
    return [*tiny[:-1], '--gradient_accumulation_steps=6', '--log_interval=1', '--parallel=auto']


@pytest.mark.parametrize('shape', [SMALL, replace(SMALL, **NEWER), replace(SMALL, zero_init=True)])
def test_weights_made_one_after_another_are_those_of_a_whole_model(shape):
    torch.manual_seed(3)
    whole = dict(GPT(shape).named_parameters())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made = dict(sharding.initial_weights(shape, 3))
    assert list(made) == list(whole)
    assert all(torch.equal(made[name], p) for name, p in whole.items())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_hollow_model_has_tables_and_ties_and_no_weights():
    gpt = sharding.hollow(replace(SMALL, rotary=True))
    assert all(p.is_meta for p in gpt.parameters()) and gpt.lm_head.weight is \
        gpt.transformer.wte.weight
    assert torch.equal(gpt.cos, GPT(gpt.config).cos)


def test_weights_that_are_set_outside_of_init_weights_are_refused(monkeypatch):
    sharding.check_initial_weights(replace(SMALL, **NEWER), 3)
    original = GPT.__init__

    def init(self, config):
        original(self, config)
        torch.nn.init.normal_(self.transformer.wpe.weight, std=0.5)
    monkeypatch.setattr(GPT, '__init__', init)
    with pytest.raises(UserError, match=r'transformer.wpe.weight: GPT.__init__ sets'):
        sharding.check_initial_weights(SMALL, 3)


def test_weights_that_cannot_be_gathered_with_their_block_are_named():
    sharding.check_groups(GPT(SMALL))  # embedding and head may be one
    gpt = GPT(SMALL)
    gpt.transformer.h[1].mlp = gpt.transformer.h[0].mlp
    with pytest.raises(UserError, match=r'h\.1\.mlp\.c_fc.weight is the same weight as .*h.0.mlp'):
        sharding.check_groups(gpt)
    gpt = GPT(SMALL)
    gpt.gain = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match='gain has no dimension'):
        sharding.check_groups(gpt)


SHAPES = {
    'gpt2': dict(loss_chunk_tokens=24),
    'newer, recomputed in part': dict(**NEWER, loss_chunk_tokens=0,
                                      activation_checkpointing='selective'),
    'recomputed': dict(loss_chunk_tokens=2048, activation_checkpointing='full', bias=True,
                       eval_tokens=16)}  # one sequence: some processes have none


@pytest.mark.parametrize('shape', [
    'gpt2', 'newer, recomputed in part', pytest.param('recomputed', marks=pytest.mark.slow)])
def test_losses_health_samples_and_benchmarks_are_those_of_one_process(small, tmp_path, shape,
                                                                       monkeypatch):
    question = scoring.Question('def', [' main'], 0, 'here')  # fewer than processes
    monkeypatch.setattr(scoring, 'read_questions', lambda *_: [question])
    argv = [*small, *flags(**SHAPES[shape]), '--health_interval=2', '--sample_tokens=8',
            '--eval_tasks=lambada', '--eval_tasks_interval=2']
    job(tmp_path / 'one', 0, *argv)
    job(tmp_path / 'ddp', 2, *argv, '--parallel=ddp')
    for size in (2, 3):
        job(tmp_path / f'{size}', size, *argv, '--parallel=fsdp')
        assert_close(*(losses(tmp_path / name) for name in (f'{size}', 'one')), within=2e-6)
    # Health is measured on the sequences of rank 0, which are others on one process.
    assert_close(rows(tmp_path / '2'), rows(tmp_path / 'ddp'), within=1e-4)
    found, expected = tensors(tmp_path / '3'), tensors(tmp_path / 'one')
    assert {name: t.shape for name, t in found.items()} == \
        {name: t.shape for name, t in expected.items()}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.slow
def test_one_process_that_shards_for_itself_has_the_losses_of_one_that_does_not(small, tmp_path):
    job(tmp_path / 'one', 0, *small)
    job(tmp_path / 'fsdp', 1, *small, '--parallel=fsdp')
    assert_close(*(losses(tmp_path / name) for name in ('fsdp', 'one')), within=2e-6)


def test_copies_that_groups_of_processes_share_are_one_model(small, tmp_path):
    argv = [*small, '--gradient_accumulation_steps=4', '--optimizer=normuon', '--health_interval=2']
    job(tmp_path / 'one', 0, *argv)
    job(tmp_path / 'four', 4, *argv, '--fsdp_group=2')  # which asks for sharding
    assert_close(*(losses(tmp_path / name) for name in ('four', 'one')), within=2e-6)
    found, expected = tensors(tmp_path / 'four'), tensors(tmp_path / 'one')
    assert {name: t.shape for name, t in found.items()} == \
        {name: t.shape for name, t in expected.items()}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=2e-5, msg=name)
    printed = job(tmp_path / 'four', 4, *argv, '--fsdp_group=4', '--init_from=resume',
                  '--max_iters=8')
    assert 'changed: fsdp_group 2 → 4' in printed


def poison():
    """In a process of a job: the loss of the second step is not finite on rank 1."""
    original, steps = train.forward_backward, []

    def poisoned(model, *rest):
        loss = original(model, *rest)
        steps.append(loss)
        return loss * math.nan if len(steps) == 2 and os.environ.get('RANK', '1') == '1' else loss
    train.forward_backward = poisoned


@pytest.mark.parametrize('optimizer', ['adamw', 'sgd'])
def test_a_step_that_is_not_finite_on_one_process_moves_no_weight_on_any(small, tmp_path,
                                                                         optimizer):
    argv = [*small, f'--optimizer={optimizer}']
    job(tmp_path / 'one', 0, *argv, before=poison)
    printed = job(tmp_path / 'two', 2, *argv, '--parallel=fsdp', before=poison)
    assert 'iteration 2 left the weights alone' in printed
    found, expected = tensors(tmp_path / 'two'), tensors(tmp_path / 'one')
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize(('dtype', 'shape'), [
    ('bfloat16', {'bias': True}), pytest.param('bfloat16', NEWER, marks=pytest.mark.slow),
    pytest.param('float16', {}, marks=pytest.mark.slow)])
def test_lower_precision_is_near_to_that_of_one_process(small, tmp_path, dtype, shape):
    argv = [*small, f'--dtype={dtype}', *flags(**shape)]
    job(tmp_path / 'one', 0, *argv)
    job(tmp_path / 'two', 2, *argv, '--parallel=fsdp')
    found, expected = ([row['val_loss'] for row in rows(tmp_path / name) if 'val_loss' in row]
                       for name in ('two', 'one'))
    assert found == pytest.approx(expected, abs=2e-3)


def save_only(folder):
    """In a process of a job: a run that continues saves what it has read, elsewhere."""
    def train_nothing(run):
        run.metrics.begin(run.progress.iter_num)
        run.saver.out_dir, run.progress.saved_at = folder, None
        train.save(run)
        run.saver.wait()
        return 'saved'
    train.train = train_nothing


def hand_on(folder, target, size, kind, *argv):
    """A job reads the checkpoint of `folder` and writes it into `target`."""
    target.mkdir()
    job(folder, size, *argv, f'--parallel={kind}', '--init_from=resume', '--checkpoint=latest',
        before=partial(save_only, target / 'out'))


def test_any_number_and_kind_of_processes_reads_what_another_wrote(small, tmp_path):
    argv = [*small, '--optimizer=normuon', *flags(**NEWER), '--max_iters=2']
    job(tmp_path / '0', 0, *argv)
    original = tensors(tmp_path / '0')
    for i, (size, kind) in enumerate([(3, 'fsdp'), (2, 'ddp'), (0, 'auto')]):
        hand_on(tmp_path / f'{i}', tmp_path / f'{i + 1}', size, kind, *argv,
                *['--checkpoint_async'] * (i == 0))
        found = tensors(tmp_path / f'{i + 1}')
        assert found.keys() == original.keys()
        assert all(torch.equal(found[name], t) for name, t in original.items()), (size, kind)


KINDS = [(0, 'auto'), (2, 'ddp'), (3, 'ddp'), (1, 'fsdp'), (2, 'fsdp'), (3, 'fsdp')]


@pytest.mark.slow
@pytest.mark.parametrize('writer', KINDS)
@pytest.mark.parametrize('reader', KINDS)
def test_all_pairs_of_kinds_read_each_other(small, tmp_path, writer, reader):
    size, kind = writer
    job(tmp_path / '0', size, *small, '--max_iters=2', f'--parallel={kind}')
    hand_on(tmp_path / '0', tmp_path / '1', *reader, *small, '--max_iters=2')
    original, found = tensors(tmp_path / '0'), tensors(tmp_path / '1')
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], t) for name, t in original.items())


def test_a_resumed_run_has_the_same_bits(small, tmp_path):
    argv = [*small, '--parallel=fsdp', '--dropout=0.1', '--checkpoint_interval=3']
    job(tmp_path / 'whole', 2, *argv, '--checkpoint_async')
    job(tmp_path / 'parts', 2, *argv, '--max_iters=3', '--lr_decay_iters=6')
    printed = job(tmp_path / 'parts', 2, *argv, '--init_from=auto', '--checkpoint=latest')
    assert 'resumed from' in printed
    whole, parts = tensors(tmp_path / 'whole'), tensors(tmp_path / 'parts')
    assert all(torch.equal(parts[name], t) for name, t in whole.items())


def test_a_signal_to_one_process_stops_and_saves_all(small, tmp_path):
    folder = tmp_path / 'run'
    pids = start(folder, 3, train.main, *small, '--parallel=fsdp', '--max_iters=100000',
                 f'--out_dir={folder}/out')
    log = folder / 'log0'
    wait_until(lambda: log.exists() and re.search('iter +5 ', log.read_text()))
    os.kill(pids[1], signal.SIGTERM)
    assert [exit_code(pid) for pid in pids] == [0] * 3
    assert 'SIGTERM: stopped after iteration' in log.read_text()
    assert checkpoints.newest_valid(folder / 'out')[0].iter_num >= 5


def test_a_run_ends_early_on_all_processes(small, tmp_path):
    printed = job(tmp_path / 'run', 2, *small, '--parallel=fsdp', '--learning_rate=0',
                  '--patience=1')
    assert 'stopped after iteration 3, patience=1' in printed


def run_out_of_memory():
    """In a process of a job: the third step finds no memory, on rank 1."""
    original, steps = train.forward_backward, []

    def without_memory(*arguments):
        steps.append(1)
        if len(steps) == 3 and os.environ['RANK'] == '1':
            raise torch.OutOfMemoryError('CUDA out of memory')
        return original(*arguments)
    train.forward_backward = without_memory


def test_out_of_memory_is_explained_by_the_process_that_has_none(small, tmp_path):
    folder = tmp_path / 'run'
    pids = start(folder, 2, train.main, *small, '--parallel=fsdp', f'--out_dir={folder}/out',
                 before=run_out_of_memory)
    assert [exit_code(pid) for pid in pids] == [2, 2]
    assert 'error: out of memory on cpu' in (folder / 'log1').read_text()
    assert 'error: lost rank 1' in (folder / 'log0').read_text()


def test_sharding_takes_a_job(small, capsys, monkeypatch):
    assert 'torchrun' in fails(capsys, monkeypatch, train.main, *small, '--parallel=fsdp')


def with_eager_backend():
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend('aot_eager')
    torch.compile = partial(torch.compile, backend=counter)
    original = train.finish

    def tell(run, ending):
        original(run, ending)
        print(f'{counter.frame_count} graphs')
    train.finish = tell


@pytest.mark.slow
def test_blocks_are_compiled_once_for_training_and_once_for_evaluating(small, tmp_path):
    argv = [*small, '--activation_checkpointing=none']
    job(tmp_path / 'one', 0, *argv)
    printed = job(tmp_path / 'two', 2, *argv, '--parallel=fsdp', '--compile=True',
                  before=with_eager_backend)
    assert_close(*(losses(tmp_path / name) for name in ('two', 'one')), within=2e-5)
    assert '\n2 graphs' in printed


def test_the_recipe_of_7b_trains_with_another_shape(small, tmp_path):
    job(tmp_path / 'run', 2, ROOT / 'config' / 'gpt_7b.py', *small, '--n_layer=1',
        '--total_batch_size=0', '--min_lr=0', '--eval_tokens=0', '--parallel=fsdp')
    assert [row['iter'] for row in rows(tmp_path / 'run') if 'val_loss' in row] == [0, 3, 6]


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


def save_and_load(argv):
    """A command's main: print by how much memory grows, and how much a process holds."""
    world = launched_world()
    with process_group(world, CPU):
        def built():
            model = sharding.hollow(WIDE)
            sharding.Sharded(model, CPU, False, 'float32',
                             sharding.unknown_weights(model))
            return model, build_optimizer(model, TrainConfig(), 'cpu')

        model, optimizer = built()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.data.fill_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        out_dir = argv[0].partition('=')[2]
        saver = Saver(out_dir, rank=world.rank, world_size=world.size, chunk_mb=4)
        state = {**Progress(iter_num=1).state(), 'config': {}, 'tokenizer': {'kind': 'char'},
                 'data': '', 'samples': {}, 'sequences': 0, 'elapsed_s': 0.0, 'scaler': {}}
        saving = growth(lambda: saver.save(model, optimizer, state, rng_state(CPU)))
        optimizer.state.clear()
        [path] = checkpoints.checkpoint_paths(out_dir)
        found = checkpoints.Checkpoint(path, json.loads((path / 'state.json').read_text()))
        loading = growth(lambda: (found.load_weights(model),
                                  found.load_optimizer(optimizer, model)))
    print(f'[{saving}, {loading}]')


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='it reads /proc')
def test_a_process_saves_and_loads_its_share_and_a_chunk_at_a_time(tmp_path):
    printed = job(tmp_path / 'run', 3, main=save_and_load)
    saving, loading = json.loads(printed.splitlines()[-1])
    weights = 4 * sum(p.numel() for p in sharding.hollow(WIDE).parameters())
    slack = 4e6 + 12e6  # a chunk; buffers of hashing, JSON and gloo
    assert saving < slack
    assert loading < 2 * weights / 3 + slack  # two states of each weight are made anew
