import itertools
from dataclasses import replace

import pytest
import torch
from helpers import fails

import train
from model import GPTConfig
from plaingpt.benchmarks.memory_check import tracked_step
from plaingpt.system.formatting import GIB
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import memory_planner as memory
from plaingpt.training.memory_planner import (
    Run,
    batch_that_divides,
    largest_batch,
    predict,
    savings,
)
from plaingpt.training.settings import TrainConfig

# nanoGPT's character model and GPT-2's smallest, and what changes them.
CHARACTERS = GPTConfig(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False)
GPT2 = GPTConfig(bias=False)
SHAPES = {'default': {}, 'context x2': {'block_size': 512}, 'layers x2': {'n_layer': 12},
          'embeddings x2': {'n_embd': 768, 'n_head': 12}}
RUNS = {'float32': {}, 'SGD': {'optimizer': 'sgd'}, 'float16': {'dtype': 'float16'},
        'bfloat16': {'dtype': 'bfloat16'}, 'batch 16': {'batch_size': 16},
        'accumulation 4 x 16': {'batch_size': 16, 'micro_steps': 4}}


def off(model, run):
    """How far the predicted peak is from what torch's memory tracker counts in a real step."""
    return abs(predict(model, run).peak / tracked_step(model, run)['peak'] - 1)


@pytest.mark.parametrize('run', RUNS)
@pytest.mark.parametrize('shape', [
    shape if shape == 'default' else pytest.param(shape, marks=pytest.mark.slow)
    for shape in SHAPES])
def test_the_peak_of_a_step_is_predicted(shape, run):
    settings = {'batch_size': 64, 'dtype': 'float32', 'device': 'cpu', **RUNS[run]}
    # On a CPU, dropout has attention of its own; the one without is CUDA's in both cases.
    for dropout in (0.0, 0.2):
        model = replace(CHARACTERS, dropout=dropout, **SHAPES[shape])
        assert off(model, Run(**settings)) < 0.03


@pytest.mark.parametrize(('checkpointing', 'chunk', 'batch_size', 'dtype'), [
    pytest.param(*case, marks=[] if case[1:] == (2048, 4, 'bfloat16') else [pytest.mark.slow])
    for case in itertools.product(('none', 'selective', 'full'), (0, 2048), (1, 4, 16),
                                  ('bfloat16', 'float32'))])
def test_the_peak_of_gpt2_is_predicted(checkpointing, chunk, batch_size, dtype):
    assert off(GPT2, Run(batch_size, dtype=dtype, device='cpu', loss_chunk_tokens=chunk,
                         activation_checkpointing=checkpointing)) < 0.05


@pytest.mark.parametrize('flags', [
    {'rotary': True}, {'rmsnorm': True}, {'qk_norm': True}, {'mlp': 'relu2'}, {'mlp': 'swiglu'},
    {'tied_head': False, 'vocab_size': 5000}, {'logit_softcap': 15.0, 'vocab_size': 5000},
    {'rotary': True, 'qk_norm': True, 'mlp': 'relu2', 'tied_head': False},
    {'rotary': True, 'qk_norm': True, 'rmsnorm': True, 'mlp': 'swiglu'}],
    ids=lambda flags: '-'.join(flags))
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_peak_with_what_is_newer_is_predicted(flags, dtype):
    model = replace(CHARACTERS, **flags)
    assert off(model, Run(16, dtype=dtype, device='cpu', optimizer='muon')) < 0.05


def test_what_stays_after_each_part_of_a_step_is_predicted():
    for chunk, bias in ((0, False), (2048, True)):
        model = replace(CHARACTERS, bias=bias, vocab_size=5000)
        run = Run(8, micro_steps=2, device='cpu', loss_chunk_tokens=chunk)
        held, after = tracked_step(model, run), predict(model, run).after
        for stage in ('forward', 'backward', 'optimizer'):
            assert after[stage] == pytest.approx(held[stage], rel=0.03), stage


def test_the_chunked_loss_and_checkpointing_each_halve_gpt2():
    run = Run(16, device='cpu', loss_chunk_tokens=0)
    plain = predict(GPT2, run).peak
    chunked = predict(GPT2, replace(run, loss_chunk_tokens=2048)).peak
    full = predict(GPT2, replace(run, loss_chunk_tokens=2048,
                                 activation_checkpointing='full')).peak
    assert chunked < plain / 2 and full < chunked / 2


def test_the_largest_batch_fits_and_one_more_does_not():
    run = Run(1)
    largest = largest_batch(GPT2, run, 24 * GIB)
    assert predict(GPT2, replace(run, batch_size=largest)).total <= 24 * GIB
    assert predict(GPT2, replace(run, batch_size=largest + 1)).total > 24 * GIB
    batch_size, micro_steps = batch_that_divides(GPT2, run, 24 * GIB, 480)
    assert batch_size * micro_steps == 480 and largest / 2 < batch_size <= largest
    assert largest_batch(GPT2, run, GIB) == 0 and batch_that_divides(GPT2, run, GIB, 8) == (0, 0)


def test_savings_are_what_the_changed_run_is_predicted_to_take():
    run = Run(8, dtype='float32', loss_chunk_tokens=0)
    found = dict(savings(GPT2, run))
    changes_model = ['--block_size=512', '--n_layer=6']
    kept = [size for words, size in found.items() if words not in changes_model]
    assert kept == sorted(kept, reverse=True) and set(list(found)[-2:]) == set(changes_model)
    assert found['--batch_size=4'] == \
        predict(GPT2, run).peak - predict(GPT2, replace(run, batch_size=4, micro_steps=2)).peak
    assert found['--loss_chunk_tokens=2048'] == \
        predict(GPT2, run).peak - predict(GPT2, replace(run, loss_chunk_tokens=2048)).peak


def test_muon_keeps_one_moment_of_matrices():
    states = {kind: predict(GPT2, Run(1, optimizer=kind)).items['optimizer states']
              for kind in ('adamw', 'muon', 'sgd')}
    assert states['adamw'] - states['muon'] == 4 * 12 * 12 * 768**2
    assert states['sgd'] == states['adamw'] / 2


# -----------------------------------------------------------------------------
# in training


def test_an_automatic_batch_keeps_the_tokens_of_a_step(tiny, tmp_path, capsys, monkeypatch):
    one, two = (predict(GPTConfig(16, 93, 2, 2, 32, bias=False),
                        Run(n, 2, 'float32', device='cpu')).total for n in (8, 16))
    monkeypatch.setattr(memory, 'available_memory', lambda device: (one + two) // 2)
    train.main([*tiny, '--batch_size=auto', '--total_batch_size=512'])  # 32 sequences
    out = capsys.readouterr().out
    assert 'batch_size 8 ' in out and 'accumulation 4' in out and '512 tokens a step' in out
    assert checkpoints.find(tmp_path / 'out').state['config']['batch_size'] == 8


def test_a_planned_batch_that_does_not_fit_is_stepped_down(monkeypatch):
    tried = []

    def fits(model, run, device):
        tried.append(run.batch_size)
        return run.batch_size <= 5

    monkeypatch.setattr(memory, 'fits', fits)
    monkeypatch.setattr(memory, 'available_memory', lambda device: 8 * GIB)
    config = TrainConfig(batch_size='auto', total_batch_size=24 * 1024)
    batch_size, why = memory.choose_batch_size(GPT2, config, 'bfloat16', torch.device('cuda'))
    assert tried == [12, 8, 6, 4] and batch_size == 4 and '12 did not fit' in why


def test_an_automatic_batch_that_cannot_be_says_what_to_shrink(tiny, capsys, monkeypatch):
    monkeypatch.setattr(memory, 'available_memory', lambda device: 100_000)
    message = fails(capsys, monkeypatch, train.main, *tiny, '--batch_size=auto',
                    '--total_batch_size=512')
    assert 'not even 1 fits' in message and 'saves' in message and 'MiB' in message


def test_an_automatic_batch_needs_the_tokens_of_a_step(tiny, capsys, monkeypatch):
    assert 'total_batch_size' in fails(capsys, monkeypatch, train.main, *tiny,
                                       '--batch_size=auto')


def test_out_of_memory_is_one_line_and_the_checkpoint_stays_whole(tiny, tmp_path, capsys,
                                                                  monkeypatch):
    original, steps = train.forward_backward, []

    def step(*arguments):
        steps.append(1)
        if len(steps) == 5:
            raise torch.OutOfMemoryError('CUDA out of memory')
        return original(*arguments)

    monkeypatch.setattr(train, 'forward_backward', step)
    message = fails(capsys, monkeypatch, train.main, *tiny)
    assert 'batch_size=4: planned' in message and 'held at most' in message
    assert message.count('saves') == 3 and '--batch_size=2 saves' in message
    found = checkpoints.find(tmp_path / 'out')
    assert found.iter_num == 3 and found.load_model()
