from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers import fails, in_the_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from tracked_memory import tracked_step

import train
from model import GPT, GPTConfig
from plaingpt.system.devices import rng_state
from plaingpt.system.formatting import GIB
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import memory_fit, memory_planner
from plaingpt.training.memory_planner import (
    StepSettings,
    batch_that_divides,
    largest_batch,
    one_step,
    predict,
    savings,
    step_settings,
)
from plaingpt.training.optimizers import OPTIMIZERS
from plaingpt.training.settings import TrainConfig
from train import forward_backward

# nanoGPT's character model with five layers, which a plan reckons from two and four; GPT-2's
# smallest with two
CHARACTERS = GPTConfig(block_size=256, vocab_size=65, n_layer=5, n_head=6, n_embd=384, bias=False)
SHALLOW = GPTConfig(bias=False, n_layer=2)  # planned by fewer traces


def settings(batch_size, micro_steps=1, dtype='bfloat16', device='cpu', loss_chunk_tokens='auto',
             **config):
    return StepSettings(batch_size, micro_steps, dtype, device, config=TrainConfig(**config),
                        loss_chunk_tokens=loss_chunk_tokens)


def assert_predicted(shape, step):
    """The peak, and what stays after each part, are what torch's memory tracker counts at full
    size."""
    plan, held = predict(shape, step), tracked_step(shape, step)
    assert plan.peak == pytest.approx(held['peak'], rel=0.03), (shape, step)
    for part in ('forward', 'backward', 'optimizer'):
        assert plan.totals[f'after {part}'] == pytest.approx(held[part], rel=0.03), part


def test_a_step_of_several_micro_batches_with_dropout_is_predicted():
    assert_predicted(replace(CHARACTERS, dropout=0.2),
                     settings(16, micro_steps=4, dtype='float32', device='cuda'))


def test_a_step_of_a_large_vocabulary_is_predicted():
    assert_predicted(replace(CHARACTERS, bias=True, vocab_size=5000, n_layer=2),
                     settings(8, micro_steps=2, loss_chunk_tokens=0, optimizer='sgd'))


NEWER = {'rotary': True, 'qk_norm': True, 'rmsnorm': True, 'mlp': 'swiglu'}


def test_what_is_newer_is_predicted_with_layers_recomputed_and_a_chunked_loss():
    assert_predicted(replace(CHARACTERS, n_layer=2, vocab_size=5000, tied_head=False, **NEWER),
                     settings(16, optimizer='muon', activation_checkpointing='selective',
                              loss_chunk_tokens=2048))


@pytest.mark.slow
@pytest.mark.parametrize('shape', [
    {}, {'block_size': 512}, {'n_layer': 12}, {'n_embd': 768, 'n_head': 12}, {'mlp': 'relu2'},
    {'vocab_size': 5000}, NEWER, {'value_embeddings': True, 'tied_head': False},
    {'n_layer': 12, 'n_embd': 768, 'n_head': 12, 'block_size': 1024, 'vocab_size': 50257}], ids=str)
def test_a_step_of_any_shape_is_predicted(shape):
    for device, dropout, step in (
            ('cpu', 0.0, {'dtype': 'float32', 'batch_size': 64}), ('cpu', 0.0, {'batch_size': 1}),
            ('cpu', 0.2, {'optimizer': 'sgd', 'dtype': 'float16'}),
            ('cuda', 0.2, {'micro_steps': 4}),
            ('cpu', 0.0, {'optimizer': 'muon', 'activation_checkpointing': 'selective'}),
            ('cuda', 0.0, {'activation_checkpointing': 'full'})):
        assert_predicted(replace(CHARACTERS, **{'n_layer': 6, 'dropout': dropout, **shape}),
                         settings(**{'batch_size': 16, 'device': device, **step}))


def test_layers_with_dropout_are_recomputed_by_the_kernels_of_their_forward_pass():
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=99, dropout=0.2)
    none, selective, full = (
        predict(shape, settings(1, device='cuda', activation_checkpointing=kind)).totals['forward']
        for kind in ('none', 'selective', 'full'))
    assert none > selective > full


def test_a_step_of_many_micro_batches_is_planned_by_one_that_meets_gradients():
    model, step = replace(CHARACTERS, n_layer=2), settings(16, micro_steps=3, dtype='float32')
    tracker = MemTracker()

    def batches():
        while True:
            tracker.reset_mod_stats()
            yield 2 * [torch.zeros((step.batch_size, model.block_size), dtype=torch.int64)]

    with FakeTensorMode():
        gpt = GPT(model)
        gpt.loss_chunk_tokens = step.loss_chunk_tokens
        tracker.track_external(gpt)
        with tracker:
            scaler = torch.amp.GradScaler('cpu', enabled=False)
            forward_backward(gpt, batches(), step.micro_steps, scaler, nullcontext())
    [held] = tracker.get_tracker_snapshot('peak').values()
    plan = predict(model, step)
    assert plan.peak - plan.items['optimizer states'] == pytest.approx(held['Total'], rel=0.01)


class WithMemory(GPT):
    """What someone might try: a large matrix beside the blocks, which uses an activation."""

    def __init__(self, config):
        super().__init__(config)
        self.memory = torch.nn.Linear(config.n_embd, 50 * config.n_embd)

    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        return x + self.memory(x).unflatten(-1, (50, -1)).sum(-2)


def test_a_changed_model_is_planned(monkeypatch):
    model, step = replace(CHARACTERS, n_layer=2), settings(8, dtype='float32')
    before = predict(model, step)
    monkeypatch.setattr(memory_planner, 'GPT', WithMemory)
    plan = predict(model, step)
    C = model.n_embd
    assert plan.items['parameters'] == before.items['parameters'] + 4 * (50 * C * C + 50 * C)
    assert plan.peak > before.peak + 3 * 4 * 50 * C * C  # it and AdamW's moments
    assert_predicted(model, step)


class ThreeStates(torch.optim.Optimizer):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                for name in 'abc' if not self.state[p] else '':
                    self.state[p][name] = torch.zeros_like(p)


def test_an_optimizer_that_is_new_in_the_table_is_planned(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, 'three', lambda groups, config, fused:
                        ThreeStates(groups.values(), {}))
    step = replace(settings(8), config=replace(TrainConfig(), optimizer='three'))
    shape = replace(CHARACTERS, n_layer=2)
    items = predict(shape, step).items
    assert items['optimizer states'] == 3 * items['parameters']
    assert_predicted(shape, step)


def test_planning_leaves_the_random_numbers_alone():
    before = rng_state(torch.device('cpu'))
    predict(replace(CHARACTERS, dropout=0.3, n_layer=2), settings(3))
    assert rng_state(torch.device('cpu')) == before


def test_the_largest_batch_fits_and_one_more_does_not():
    step = settings(1, micro_steps=2, device='cuda')
    largest = largest_batch(SHALLOW, step, 24 * GIB)
    assert predict(SHALLOW, replace(step, batch_size=largest)).total <= 24 * GIB
    assert predict(SHALLOW, replace(step, batch_size=largest + 1)).total > 24 * GIB
    batch_size, micro_steps = batch_that_divides(SHALLOW, step, 24 * GIB, 480)
    assert batch_size * micro_steps == 480 and largest / 2 < batch_size <= largest
    assert largest_batch(SHALLOW, step, GIB) == 0
    assert batch_that_divides(SHALLOW, step, GIB, 8) == (0, 0)


def test_savings_are_what_the_changed_step_is_predicted_to_take():
    step = settings(8, dtype='float32', loss_chunk_tokens=0)
    found = dict(savings(SHALLOW, step))
    changes_model = ['--block_size=512', '--n_layer=1']
    kept = [size for words, size in found.items() if words not in changes_model]
    assert kept == sorted(kept, reverse=True) and set(list(found)[-2:]) == set(changes_model)
    now = predict(SHALLOW, step).peak
    assert found['--batch_size=4'] == \
        now - predict(SHALLOW, replace(step, batch_size=4, micro_steps=2)).peak


def test_muon_keeps_one_moment_of_matrices():
    states = {kind: memory_fit.kept_bytes(SHALLOW, settings(1, optimizer=kind))[1]
              for kind in ('adamw', 'muon', 'sgd')}
    assert states['adamw'] - states['muon'] == pytest.approx(4 * 2 * 12 * 768**2, rel=1e-3)
    assert states['sgd'] == pytest.approx(states['adamw'] / 2, rel=1e-3)


# -----------------------------------------------------------------------------
# in training


@pytest.fixture
def known_savings(monkeypatch):
    """In place of plans of six changed steps."""
    monkeypatch.setattr(memory_planner, 'savings', lambda *_: [
        (f'--n_layer={n}', 2**21) for n in range(1, 7)])


def test_an_automatic_batch_keeps_the_tokens_of_a_step(tiny, tmp_path, capsys, monkeypatch):
    one, two = (predict(GPTConfig(16, 93, 2, 2, 32, bias=False),
                        settings(n, 2, 'float32')).total for n in (8, 16))
    monkeypatch.setattr(memory_fit, 'available_memory', lambda device: (one + two) // 2)
    train.main([*tiny, '--batch_size=auto', '--total_batch_size=512', '--check=False'])
    out = capsys.readouterr().out
    # of 32 sequences
    assert 'batch_size 8 ' in out and 'accumulation 4' in out and '512 tokens a step' in out
    assert checkpoints.find(tmp_path / 'out').state['config']['batch_size'] == 8


def test_a_planned_batch_that_does_not_fit_is_stepped_down(monkeypatch):
    tried = []

    def fits(shape, step, device, compile):
        assert compile
        tried.append(step.batch_size)
        return step.batch_size <= 5

    monkeypatch.setattr(memory_fit, 'step_fits', fits)
    config = TrainConfig(batch_size='auto', total_batch_size=24 * 1024)
    planned = predict(SHALLOW, step_settings(replace(config, batch_size=12), 'bfloat16')).total
    monkeypatch.setattr(memory_fit, 'available_memory', lambda device: planned)
    batch_size, why = memory_fit.choose_batch_size(SHALLOW, config, 'bfloat16',
                                                       torch.device('cuda'), compile=True)
    assert tried == [12, 8, 6, 4] and batch_size == 4 and '12 did not fit' in why


def test_an_automatic_batch_that_cannot_be_says_what_to_shrink(tiny, capsys, monkeypatch,
                                                               known_savings):
    least = predict(GPTConfig(16, 93, 2, 2, 32, bias=False), settings(1, 2, 'float32')).total
    monkeypatch.setattr(memory_fit, 'available_memory', lambda device: least - 1)
    message = fails(capsys, monkeypatch, train.main, *tiny, '--batch_size=auto',
                    '--total_batch_size=512')
    assert 'not even 1 fits' in message and '--n_layer=1 saves 2.0 MiB' in message


def test_what_a_run_keeps_is_counted_before_it_is_made():
    for name in OPTIMIZERS:
        shape, step = GPTConfig(16, 93, 5, 2, 32), settings(1, 1, 'float32', optimizer=name)
        steps = one_step(shape, step, torch.device('cpu'))
        _, gpt, optimizer = next(steps)
        next(steps)
        assert memory_fit.kept_bytes(shape, step) == [
            sum(p.nbytes for p in gpt.parameters()), sum(
                t.nbytes for state in optimizer.state.values() for t in state.values())], name


def test_a_model_too_large_for_memory_is_one_line_before_it_is_made(tiny, capsys, monkeypatch,
                                                                    known_savings):
    for changes, words in (
            (['--n_layer=1000', '--n_embd=20000'], 'optimizer states take 69.'),
            (['--n_layer=1000', '--n_embd=20000', '--eval_only=True'], 'its parameters take 17.'),
            (['--n_embd=10000000000'], 'no memory holds a matrix of [30000000000, 10000000000]')):
        line = fails(capsys, monkeypatch, train.main, *tiny, *changes)
        assert words in line and 'n_layer=' in line and 'n_embd=' in line
    parameters, states = memory_fit.kept_bytes(
        GPTConfig(16, 93, 2, 2, 32, bias=False), settings(1, 1, 'float32'))
    free = 2 * parameters + states
    monkeypatch.setattr(memory_fit, 'available_memory', lambda device: free - 1)
    assert 'of memory are free' in fails(capsys, monkeypatch, train.main, *tiny)
    monkeypatch.setattr(memory_fit, 'available_memory', lambda device: free)
    # It fits, but no step of it does.
    assert 'batch_size=4: a step takes' in fails(capsys, monkeypatch, train.main, *tiny)
    train.main([*tiny, '--eval_only'])


def test_a_batch_too_large_for_memory_is_one_line_before_it_is_read(tiny, capsys, monkeypatch,
                                                                    known_savings):
    line = fails(capsys, monkeypatch, train.main, *tiny, '--batch_size=100000000')
    assert 'batch_size=100000000: a step takes' in line and '--n_layer=1 saves' in line


def test_an_automatic_batch_needs_the_tokens_of_a_step(tiny, capsys, monkeypatch):
    assert 'total_batch_size' in fails(capsys, monkeypatch, train.main, *tiny,
                                       '--batch_size=auto')


def test_out_of_memory_is_one_line_and_the_checkpoint_stays_whole(tiny, tmp_path, capsys,
                                                                  monkeypatch, known_savings):
    original, steps = train.forward_backward, []

    def step(*arguments):
        steps.append(1)
        if len(steps) == 5:
            raise torch.OutOfMemoryError('CUDA out of memory')
        return original(*arguments)

    in_the_loop(monkeypatch, forward_backward=step)
    message = fails(capsys, monkeypatch, train.main, *tiny)
    assert 'batch_size=4: planned' in message and 'held at most' in message
    assert message.count('saves') == 3 and '--n_layer=1 saves' in message
    found = checkpoints.find(tmp_path / 'out')
    assert found.iter_num == 4 and found.load_model()  # what was learned is saved
