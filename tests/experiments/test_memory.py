"""A plan is of the step that train.py takes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import fails
from runs import change_steps, same, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import model
import train
from model import GPTConfig
from plaingpt.checks import preflight
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core import evaluation
from plaingpt.core.blocks import parameters_on_meta
from plaingpt.experiments import fitting
from plaingpt.experiments.memory import Planner
from plaingpt.monitoring.health import Health
from plaingpt.system.formatting import GIB
from plan import PlanConfig

SMALL = GPTConfig(block_size=256, vocab_size=5000, n_layer=4, n_head=6, n_embd=384, bias=False)
UNTIED = replace(SMALL, tied_head=False, rotary=True, rmsnorm=True, mlp='swiglu')
MiB = 2**20


def settings(shape, batch_size=8, micro_steps=1, processes=1, **config):
    # What is looked at between steps comes at another time.
    return PlanConfig(**{'batch_size': batch_size, 'block_size': shape.block_size, 'report': False,
                         'gradient_accumulation_steps': micro_steps * processes,
                         'processes': processes, **config})


def predict(shape, config, dtype='float32', device='cpu', build=train.build):
    return Planner(build, shape, dtype, device).predict(config)


def test_a_plan_is_the_sum_of_what_a_step_holds():
    shape = replace(SMALL, bias=True)
    parameters = sum(p.numel() for p in model.GPT(shape).parameters())
    plan = predict(shape, settings(shape))
    between = plan.phases['between steps']
    assert between['weights'] == 4 * parameters
    assert between['optimizer'] == pytest.approx(8 * parameters, rel=1e-4)
    assert between['gradients'] == 0
    assert plan.phases['optimizer']['gradients'] == 4 * parameters
    # What a block's backward pass needs: the inputs of norms and matmuls, q, k, v, the output of
    # attention, GELU's input and output, in units of (B, T, C) numbers; and per row two statistics.
    saved = 1 + 1 + 3 + 1 + 1 + 1 + 4 + 4
    unit = 4 * 8 * 256 * 384
    totals = [plan.totals[f'backward of block {i}'] for i in range(3)]
    assert totals[1] - totals[0] == pytest.approx(saved * unit - 4 * 12 * 384**2, rel=0.05)


def test_accumulated_gradients_are_there_from_the_start():
    one, many = (predict(SMALL, settings(SMALL, micro_steps=n)) for n in (1, 5))
    gradients = one.phases['optimizer']['gradients']
    assert many.totals['forward'] == pytest.approx(one.totals['forward'] + gradients, rel=1e-3)


def test_unlike_layers_are_planned(monkeypatch):
    class LastIsWide(model.GPT):
        def __init__(self, config):
            super().__init__(config)
            self.transformer.h[-1].mlp = model.MLP(replace(config, n_inner=64 * config.n_embd))

    alike = predict(SMALL, settings(SMALL))
    monkeypatch.setattr(train, 'GPT', LastIsWide)
    unlike = predict(SMALL, settings(SMALL))
    more_weights = 4 * 2 * 60 * 384**2
    assert unlike.phases['between steps']['weights'] \
        == alike.phases['between steps']['weights'] + more_weights
    activations = 2 * 60 * 4 * 8 * 256 * 384  # of the MLP, before and after GELU
    assert unlike.totals['forward'] >= alike.totals['forward'] + 3 * more_weights + activations


def test_an_edit_of_the_step_is_planned(monkeypatch):
    class TwoPasses(train.Step):
        def forward_backward(self, batches):
            idx, targets = next(batches)
            self.loss = sum(self.model(idx, targets)[1] for _ in range(2))
            self.loss.backward()
            self.loss = self.loss.detach()
            return self.loss

    where = SMALL, settings(SMALL)
    once = predict(*where)
    monkeypatch.setattr(train, 'Step', TwoPasses)
    held = once.totals['forward'] - once.totals['between steps']
    twice = predict(*where)
    assert twice.totals['forward'] == pytest.approx(once.totals['forward'] + held, rel=0.05)
    assert twice.totals['between steps'] == once.totals['between steps']


@pytest.mark.parametrize(('optimizer', 'states'), [('adamw', 2), ('sgd', 1), ('muon', None)])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_optimizers_and_precisions_are_planned(optimizer, states, dtype):
    plan = predict(SMALL, settings(SMALL, optimizer=optimizer, average_decay=0.9), dtype, 'cuda')
    sizes = plan.phases['between steps']
    if states:
        expected = (states + 1) * sizes['weights']
    else:
        expected = 3 * sizes['weights'] - 4 * 4 * 12 * 384**2
    assert sizes['optimizer'] == pytest.approx(expected, rel=1e-3)


def test_a_large_batch_is_on_the_line_through_two_smaller_ones():
    for device, shape, n in (('cuda', replace(SMALL, n_layer=2), 192),
                             ('cpu', replace(UNTIED, n_layer=2), 24)):
        planner = Planner(train.build, shape, 'bfloat16', device)
        config = settings(shape, n, activation_checkpointing='selective')
        line = planner.predict(config, max_chunks=5)
        assert line.total == pytest.approx(planner.predict(config).total, rel=1e-3)
        assert len(planner.traces) == 3


def test_the_largest_batch_that_divides_the_step_is_taken():
    shape = GPTConfig(bias=False, n_layer=2)
    config = settings(shape, 'auto', total_batch_size=480 * shape.block_size)
    planner = Planner(train.build, shape, 'bfloat16', 'cuda')
    largest = planner.largest_batch(config, 24 * GIB)
    total, more = (planner.predict(replace(config, batch_size=n)).total
                   for n in (largest, min(n for n in range(largest + 1, 481) if 480 % n == 0)))
    assert 480 % largest == 0
    assert total <= 24 * GIB < more
    assert planner.largest_batch(config, GIB) == 0


# -----------------------------------------------------------------------------
# several processes


@pytest.mark.parametrize(
    ('shape', 'processes', 'micro_steps', 'dtype', 'checkpointing'),
    [(UNTIED, 2, 2, 'float32', 'full'), *(
        pytest.param(shape, *case, marks=pytest.mark.slow) for shape in (SMALL, UNTIED)
        for case in [(3, 2, 'bfloat16', 'selective'), (8, 1, 'bfloat16', 'none'),
                     (8, 1, 'float32', 'none'), (2, 1, 'bfloat16', 'full')])])
def test_a_sharded_step_is_planned_close_to_what_fsdp2_takes(
        shape, processes, micro_steps, dtype, checkpointing, monkeypatch):
    config = settings(shape, 8, micro_steps, processes, parallel='fsdp',
                      activation_checkpointing=checkpointing)
    plan = predict(shape, config, dtype, 'cuda')
    # From now on GPTs are sharded among processes to whom nothing travels: torch's fake ones.
    dist.init_process_group('fake', rank=0, world_size=processes, store=FakeStore())
    mesh = init_device_mesh('cpu', (processes,))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == 'float32' else getattr(torch, dtype),
        reduce_dtype=torch.float32, cast_forward_inputs=False)

    def sharded_gpt(shape):
        gpt = model.GPT(shape)
        for block in gpt.transformer.h:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(gpt, mesh=mesh, reshard_after_forward=False)

    monkeypatch.setattr(train, 'GPT', sharded_gpt)
    try:
        counted = predict(shape, replace(config, processes=1, parallel='ddp'), dtype, 'cuda')
    finally:
        dist.destroy_process_group()
    # On a GPU collectives overlap with the work, so a block more is there; a CPU waits for them.
    assert 0.92 * counted.peak <= plan.peak < 1.12 * counted.peak


@pytest.mark.parametrize(('batch', 'smallest'), [
    ({}, {}), ({'batch_size': 'auto', 'total_batch_size': 16 * 8 * SMALL.block_size},
               {'batch_size': 1, 'micro_steps': 2})])  # the batch follows
def test_the_model_is_sharded_where_copies_of_it_do_not_fit(batch, smallest):
    planner = Planner(train.build, SMALL, 'bfloat16', 'cuda')

    def choice(available, **config):
        return planner.choose_parallel(settings(SMALL, **{'processes': 8, **batch, **config}),
                                       available)

    copies = planner.predict(settings(SMALL, processes=8, **smallest)).total
    assert choice(copies) == 'ddp'
    assert choice(copies - 1) == 'fsdp'
    assert choice(copies, parallel='fsdp') == 'fsdp'
    assert choice(1, parallel='ddp') == 'ddp'


# -----------------------------------------------------------------------------
# before and in training


def test_no_plan_is_made_only_where_a_step_certainly_fits():
    logits = replace(SMALL, n_layer=1, n_embd=96, vocab_size=50257)
    heads = replace(SMALL, n_head=48)
    for shape in (SMALL, replace(UNTIED, value_embeddings=True), logits, heads):
        with parameters_on_meta():
            gpt = model.GPT(shape)
        for config, dtype, device in [
                (settings(shape, 8, 2, 8), 'float32', 'cuda'),
                (settings(shape, 8, 2), 'bfloat16', 'cpu'),
                (settings(shape, 1, optimizer='normuon', average_decay=0.9), 'float32', 'cpu')]:
            plan = predict(shape, config, dtype, device)
            assert plan.peak < fitting.most_bytes(gpt, config.batch_size * shape.block_size), shape


def test_a_step_that_cannot_be_planned_trains(tiny, capsys, monkeypatch, free):
    class ReadsNumpy(train.Step):
        def forward_backward(self, batches):
            loss = super().forward_backward(batches)
            return torch.tensor(loss.numpy())

    monkeypatch.setattr(train, 'Step', ReadsNumpy)
    free(MiB)
    train.main([*tiny, '--check=False'])
    assert 'not planned' in capsys.readouterr().out


@pytest.fixture
def free(monkeypatch):
    """free(bytes): so many are free from now on."""
    return lambda size: monkeypatch.setattr(fitting, 'device_memory', lambda *_: size)


TINY = GPTConfig(16, 93, 2, 2, 32, bias=False)


def of_tiny(batch_size):
    return predict(TINY, settings(TINY, batch_size, 2)).total


def test_an_automatic_batch_trains_as_one_that_was_asked_for(tiny, tmp_path, free):
    free((of_tiny(8) + of_tiny(16)) // 2)
    for batch_size in ('auto', 8):
        train.main([*tiny, f'--batch_size={batch_size}', '--total_batch_size=512',
                    '--dropout=0.1', f'--out_dir={batch_size}'])
    assert checkpoints.find('auto').settings()['batch_size'] == 8
    assert same(weights('auto'), weights('8'))


@pytest.mark.parametrize(('changes', 'names'), [
    (['--n_layer=1000', '--n_embd=20000'], 'n_layer=1000'),
    (['--batch_size=100000000'], 'batch_size=100000000'),
    (['--n_embd=10000000000'], 'out of memory')])
def test_a_run_far_too_large_is_one_line_before_it_is_made(
        changes, names, tiny, capsys, monkeypatch):
    assert names in fails(capsys, monkeypatch, train.main, *tiny, '--check=False', *changes)


def test_a_step_a_byte_too_large_is_refused(tiny, capsys, monkeypatch, free):
    free(of_tiny(4) - 1)
    assert 'batch_size=4' in fails(capsys, monkeypatch, train.main, *tiny)
    train.main([*tiny, '--eval_only'])  # which makes no step


def test_out_of_memory_saves_the_steps_before_it(tiny, tmp_path, capsys, monkeypatch):
    def step(n, model, loss):
        if n == 5:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')
        return loss

    change_steps(monkeypatch, step)
    said = fails(capsys, monkeypatch, train.main, *tiny)
    for words in ('20.00 GiB', '--batch_size', '--activation_checkpointing', '--init_from=resume'):
        assert words in said
    assert checkpoints.find(tmp_path / 'out').iter_num == 4


@pytest.mark.parametrize(('phase', 'module', 'function'), [
    ('setup', train, 'build_optimizer'), ('preflight', preflight, 'run_checks'),
    ('evaluation', evaluation, 'mean_loss'), ('save', checkpoints.Saver, 'save'),
    ('health check', Health, 'measure')])
def test_out_of_memory_says_where_it_was(tiny, capsys, monkeypatch, phase, module, function):
    monkeypatch.setattr(module, function, lambda *_, **__: torch.empty(2**60, dtype=torch.int8))
    said = fails(capsys, monkeypatch, train.main, *tiny,
                 f'--check={phase == "preflight"}')
    assert phase in said
    assert '--batch_size' in said
