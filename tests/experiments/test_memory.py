"""A plan is of the step that train.py takes."""

from dataclasses import replace

import pytest
import runs
import torch
from processes import fails, launch
from runs import change_steps, same, weights

import model
import train
from model import GPTConfig
from plaingpt.checks import preflight
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core import evaluation
from plaingpt.core.blocks import parameters_on_meta
from plaingpt.experiments import fitting, memory
from plaingpt.experiments.memory import Planner
from plaingpt.monitoring.health import Health
from plan import PlanConfig

SMALL = GPTConfig(block_size=256, vocab_size=5000, n_layer=3, n_head=6, n_embd=384, bias=False)
UNTIED = replace(SMALL, n_layer=1, tied_head=False, rotary=True, rmsnorm=True, mlp='swiglu')
MiB = 2**20


def settings(shape, batch_size=8, micro_steps=1, processes=1, **config):
    # What is looked at between steps comes at another time.
    return PlanConfig(**{'batch_size': batch_size, 'block_size': shape.block_size, 'report': False,
                         'gradient_accumulation_steps': micro_steps * processes,
                         'processes': processes, **config})


PLANNERS = {}  # whose traces the tests share


def planner(shape, dtype, device):
    return PLANNERS.setdefault(repr((shape, dtype, device)),
                               Planner(train.build, shape, dtype, device))


def predict(shape, config, dtype='float32', device='cpu'):
    return planner(shape, dtype, device).predict(config)


def predict_changed(shape, config):
    """After a change of train.py or the model."""
    return Planner(train.build, shape, 'float32', 'cpu').predict(config)


def test_a_plan_is_the_sum_of_what_a_step_holds():
    parameters = sum(p.numel() for p in model.GPT(SMALL).parameters())
    plan = predict(SMALL, settings(SMALL))
    between = plan.phases['between steps']
    assert between['weights'] == 4 * parameters
    assert between['optimizer'] == pytest.approx(8 * parameters, rel=1e-4)
    assert between['gradients'] == 0
    assert plan.phases['optimizer']['gradients'] == 4 * parameters
    # What a block's backward pass needs: the inputs of norms and matmuls, q, k, v, the output of
    # attention, GELU's input and output, in units of (B, T, C) numbers; and per row two statistics.
    saved = 1 + 1 + 3 + 1 + 1 + 1 + 4 + 4
    unit = 4 * 8 * 256 * 384
    totals = [plan.totals[f'backward of block {i}'] for i in range(2)]
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
    unlike = predict_changed(SMALL, settings(SMALL))
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

    once = predict(SMALL, settings(SMALL))
    monkeypatch.setattr(train, 'Step', TwoPasses)
    held = once.totals['forward'] - once.totals['between steps']
    twice = predict_changed(SMALL, settings(SMALL))
    assert twice.totals['forward'] == pytest.approx(once.totals['forward'] + held, rel=0.05)
    assert twice.totals['between steps'] == once.totals['between steps']


@pytest.mark.parametrize(('optimizer', 'states', 'dtype'), [
    ('adamw', 2, 'float16'), ('sgd', 1, 'float32'), ('muon', None, 'bfloat16')])
def test_optimizers_and_precisions_are_planned(optimizer, states, dtype):
    shape = replace(SMALL, n_layer=1)
    plan = predict(shape, settings(shape, optimizer=optimizer, ema_decay=0.9), dtype, 'cuda')
    sizes = plan.phases['between steps']
    if states:
        expected = (states + 1) * sizes['weights']
    else:
        expected = 3 * sizes['weights'] - 4 * 12 * 384**2
    assert sizes['optimizer'] == pytest.approx(expected, rel=1e-3)


def test_the_chunks_of_the_loss_that_are_left_out_take_no_more_memory(monkeypatch):
    config = settings(UNTIED, 12, activation_checkpointing='selective')  # 12 chunks
    plan = predict(UNTIED, config)
    monkeypatch.setattr(memory, 'first_chunks', range)
    assert predict_changed(UNTIED, config).phases == plan.phases


def test_the_largest_batch_that_divides_the_step_is_taken():
    shape = replace(UNTIED, vocab_size=100)
    config = settings(shape, 'auto', total_batch_size=20 * shape.block_size)
    fits, more = (predict(shape, replace(config, batch_size=n)).total for n in (5, 10))
    largest = planner(shape, 'float32', 'cpu').largest_batch
    assert [largest(config, available) for available in (fits - 1, fits, more - 1, more)] \
        == [4, 5, 5, 10]
    assert largest(config, MiB) == 0


# -----------------------------------------------------------------------------
# several processes


def test_a_sharded_step_holds_its_share_and_gathers_a_block():
    n_layer, processes = 6, 4
    shape = replace(SMALL, n_layer=n_layer)
    one = predict(shape, settings(shape, 1), 'bfloat16', 'cuda')
    sharded = predict(shape, settings(shape, 1, processes=processes, parallel='fsdp', report=True),
                      'bfloat16', 'cuda')
    for phase in 'between steps', 'optimizer':
        assert processes * sharded.totals[phase] == pytest.approx(one.totals[phase], rel=1e-2)
    held, weights = sharded.totals['between steps'], one.phases['between steps']['weights']
    block = 12 * 384**2  # parameters
    outside = weights - n_layer * 4 * block  # bytes of the other parameters
    # a full copy for a sample, with blocks in bfloat16
    assert sharded.totals['health check or sample'] == pytest.approx(
        held + outside + n_layer * 2 * block, rel=1e-2)
    # gradients of shards, and of one block the weights and the gradient in bfloat16
    assert sharded.totals['backward of block 0'] > held + outside + 2 * 2 * block


@pytest.mark.slow
def test_a_job_with_shards_plans_its_batch_size(char_data, tmp_path):
    printed = launch(train.main, 2, tmp_path, *runs.TINY, f'--dataset={char_data}',
                     '--batch_size=auto', '--total_batch_size=512', '--parallel=fsdp')
    assert 'batch_size 16' in printed
    assert 'done' in printed


@pytest.mark.parametrize(('batch', 'smallest'), [
    ({}, {}), ({'batch_size': 'auto', 'total_batch_size': 8 * SMALL.block_size},
               {'batch_size': 1})])  # the batch follows
def test_the_model_is_sharded_where_copies_of_it_do_not_fit(batch, smallest):
    def choice(available, **config):
        return planner(SMALL, 'bfloat16', 'cuda').resolve(
            settings(SMALL, **{'processes': 8, **batch, **config}), available).parallel

    copies = predict(SMALL, settings(SMALL, processes=8, **smallest), 'bfloat16', 'cuda').total
    assert choice(copies) == 'ddp'
    assert choice(copies - 1) == 'fsdp'
    assert choice(copies, parallel='fsdp') == 'fsdp'
    assert choice(1, parallel='ddp') == 'ddp'


# -----------------------------------------------------------------------------
# before and in training


def test_no_plan_is_made_only_where_a_step_certainly_fits():
    logits = replace(UNTIED, n_embd=96, vocab_size=50257)
    heads = replace(UNTIED, n_head=48, value_embeddings=True)
    many = settings(SMALL, 8, 2)
    update = settings(SMALL, 1, optimizer='normuon', ema_decay=0.9)
    for shape, config, dtype, device in ((logits, many, 'float32', 'cuda'),
                                         (heads, many, 'bfloat16', 'cpu'),
                                         (heads, update, 'float32', 'cpu')):
        with parameters_on_meta():
            gpt = model.GPT(shape)
        peak = predict(shape, config, dtype, device).peak
        assert peak < fitting.most_bytes(gpt, config.batch_size * shape.block_size)


def test_a_step_that_cannot_be_planned_trains(tiny, capsys, monkeypatch, free):
    class ReadsNumpy(train.Step):
        def forward_backward(self, batches):
            loss = super().forward_backward(batches)
            return torch.tensor(loss.numpy())

    monkeypatch.setattr(train, 'Step', ReadsNumpy)
    free(MiB)
    monkeypatch.setattr(memory, 'Planner', Planner)  # whose traces no other test shares
    train.main([*tiny, '--check=False'])
    assert 'could not plan' in capsys.readouterr().out


@pytest.fixture
def free(monkeypatch):
    """free(bytes): so many are free from now on."""
    monkeypatch.setattr(memory, 'Planner', lambda _, *settings: planner(*settings))
    return lambda size: monkeypatch.setattr(fitting, 'device_memory', lambda *_: size)


TINY = GPTConfig(16, 95, 2, 2, 32, bias=False)


def of_tiny(batch_size):
    return predict(TINY, settings(TINY, batch_size, 2)).total


def test_an_automatic_batch_trains_as_one_that_was_asked_for(tiny, tmp_path, free):
    free((of_tiny(8) + of_tiny(16)) // 2)
    for batch_size in ('auto', 8):
        train.main([*tiny, f'--batch_size={batch_size}', '--total_batch_size=256', '--check=False',
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
    ('preflight', preflight, 'run_checks'), ('health check', Health, 'measure'),
    pytest.param('setup', train, 'build_optimizer', marks=pytest.mark.slow),
    pytest.param('evaluation', evaluation, 'mean_loss', marks=pytest.mark.slow),
    pytest.param('save', checkpoints.Saver, 'save', marks=pytest.mark.slow)])
def test_out_of_memory_says_where_it_was(tiny, capsys, monkeypatch, phase, module, function):
    monkeypatch.setattr(module, function, lambda *_, **__: torch.empty(2**60, dtype=torch.int8))
    said = fails(capsys, monkeypatch, train.main, *tiny,
                 f'--check={phase == "preflight"}')
    assert phase in said
    assert '--batch_size' in said
