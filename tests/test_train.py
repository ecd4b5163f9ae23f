"""The training loop: what a step computes, and when the loop evaluates, saves and ends. What a run
keeps over an interruption is in tests/core."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from processes import ROOT, options
from runs import TINY, lines, model_of
from sample_data import write_tasks

import prepare
import sample
import train
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.optimizers import build_optimizer
from plaingpt.core.schedules import get_lr
from plaingpt.core.settings import TrainConfig
from plaingpt.monitoring import observers


@pytest.fixture
def tiny(tiny):
    """Without the checks before the first step, which tests/checks has."""
    return [*tiny, '--check=False']


def test_exactly_max_iters_updates_are_made(tiny, tmp_path):
    train.main([*tiny, '--max_iters=5', '--eval_interval=2'])
    assert [line['iter'] for line in lines(tmp_path / 'out', 'loss')] == [1, 2, 3, 4, 5]
    saved = checkpoints.find(tmp_path / 'out')
    model = model_of(saved)
    optimizer = build_optimizer(model, TrainConfig())
    saved.load_optimizer(optimizer, model)
    assert saved.iter_num == 5
    assert {int(state['step']) for state in optimizer.state.values()} == {5}


def test_one_of_a_thing_is_printed_in_the_singular(tmp_path, capsys):
    (tmp_path / 'a.txt').write_text('ab' * 99)
    prepare.main(['text', 'a.txt', '--tokenizer=char', '--data_dir=d'])
    ones = options(n_layer=1, n_head=1, n_embd=1, block_size=8, batch_size=1, max_iters=1,
                   eval_iters=1, gradient_accumulation_steps=1, warmup_iters=0)
    train.main([*TINY, *ones, '--dataset=./d', '--check=False'])
    sample.main(['out', '--device=cpu', '--start=a', '--num_samples=1', '--max_new_tokens=1'])
    printed = ''.join(capsys.readouterr())
    assert '1 layer,' in printed
    assert re.findall(r'(?<![\d.,])\b1 \w+s\b', printed) == []


def test_the_last_weights_are_evaluated(tiny, tmp_path):
    train.main([*tiny, '--max_iters=5', '--eval_interval=2'])
    rows = lines(tmp_path / 'out', 'val_loss')
    assert [row['iter'] for row in rows] == [0, 2, 4, 5]
    assert checkpoints.find(tmp_path / 'out').val_loss == rows[-1]['val_loss']


def test_each_step_has_the_learning_rate_of_the_schedule_with_a_clipped_gradient(
        tiny, tmp_path, monkeypatch):
    rates, norms = [], []

    def record(optimizer, _, __):  # before each of its steps
        rates.append({group['lr'] for group in optimizer.param_groups})
        gradients = [p.grad for group in optimizer.param_groups for p in group['params']]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    def watched(*arguments):
        optimizer = build_optimizer(*arguments)
        optimizer.register_step_pre_hook(record)
        return optimizer

    monkeypatch.setattr(train, 'build_optimizer', watched)
    train.main([*tiny, '--grad_clip=0.25', '--learning_rate=1e-3'])
    config = TrainConfig(learning_rate=1e-3, warmup_iters=2, lr_decay_iters=6)
    expected = [get_lr(it, config) for it in range(6)]
    assert rates == [{lr} for lr in expected]
    assert [line['lr'] for line in lines(tmp_path / 'out', 'lr')] == expected
    assert norms == pytest.approx([0.25] * 6, rel=1e-4)
    assert min(line['grad_norm'] for line in lines(tmp_path / 'out', 'grad_norm')) > 0.5


def test_eval_only_writes_nothing(tiny, trained, tmp_path, capsys):
    def files():
        return {p: p.stat().st_mtime_ns for p in (tmp_path / 'out').rglob('*') if p.is_file()}

    shutil.copytree(trained, tmp_path / 'out')
    before = files()
    train.main([*tiny, '--init_from=resume', '--eval_only', '--dropout=0.5'])  # of training alone
    assert f"{lines(trained, 'val_loss')[-1]['val_loss']:.4f}" in capsys.readouterr().out
    assert files() == before


def test_a_run_of_no_steps_saves_no_weights(tiny, tmp_path, capsys):
    train.main([*tiny, '--max_iters=0'])
    assert 'sample.py' not in capsys.readouterr().out
    assert not checkpoints.checkpoint_paths(tmp_path / 'out')


def test_always_save_checkpoint_false_saves_the_best_besides_the_last(tiny, tmp_path):
    train.main([*tiny, '--always_save_checkpoint=False', '--learning_rate=0.0', '--min_lr=0.0'])
    # no evaluation is better than that of the initial model; the end is there to resume from
    assert [path.name for path in checkpoints.checkpoint_paths(tmp_path / 'out')] \
        == ['iter-00000006']


@pytest.mark.parametrize('learning_rate', [3e-3, 3.0])
def test_best_is_printed_where_a_loss_is_below_all_before_it_and_is_what_sampling_takes(
        learning_rate, tiny, tmp_path, capsys):
    train.main([*tiny, f'--learning_rate={learning_rate}', '--eval_interval=1', '--grad_clip=0'])
    printed = capsys.readouterr().out
    losses = [row['val_loss'] for row in lines(tmp_path / 'out', 'val_loss')]
    assert [line.endswith(' best') for line in printed.splitlines() if 'val loss' in line] \
        == [i > 0 and loss < min(losses[:i]) for i, loss in enumerate(losses)]
    best = checkpoints.find(tmp_path / 'out', 'best')
    named = re.findall(r'sample\.py uses .*iteration (\d+)', printed)
    assert named == ([] if best.iter_num == 6 else [str(best.iter_num)])


def test_nothing_waits_for_the_device_on_steps_that_are_not_logged(tiny, monkeypatch):
    reads = []
    for name in ('item', 'tolist', '__float__', '__bool__'):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, o=original, n=name:
                            (reads.append(n), o(self))[1])
    monkeypatch.setattr(observers, 'HEALTH_INTERVAL', 0)
    counts = []
    for steps in (2, 5):
        reads.clear()
        train.main([*tiny, f'--max_iters={steps}', '--log_interval=100', '--eval_interval=100'])
        counts.append(len(reads))
    assert counts[0] == counts[1] > 0


def test_benchmarks_come_with_evaluations(tiny, tmp_path, monkeypatch):
    tasks = ','.join(map(str, write_tasks(tmp_path, monkeypatch)[:2]))
    train.main([*tiny, f'--eval_tasks={tasks}', '--eval_tasks_limit=2', '--report=True'])
    rows = lines(tmp_path / 'out', 'word_acc')
    assert [row['iter'] for row in rows] == [0, 3, 6]
    assert rows[0]['word_questions'] == 2
    assert [row['iter'] for row in lines(tmp_path / 'out', 'sample')] == [3, 6]


def test_the_first_evaluation_of_a_new_model_reads_no_more_than_a_step(tiny, tmp_path):
    first, last = {}, {}
    for eval_iters in (1, 2, 9):  # a step has two micro-batches
        train.main([*tiny, '--max_iters=2', '--eval_interval=2', f'--eval_iters={eval_iters}'])
        rows = lines(tmp_path / 'out', 'val_loss')
        first[eval_iters], last[eval_iters] = (row['val_loss'] for row in rows)
    assert first[2] == first[9]
    assert first[1] != first[2]
    assert len(set(last.values())) == 3


EAGER_RUNS = """
import sys
import train
for optimizer in ('sgd', 'normuon', 'adamw'):
    run = [*sys.argv[1:], '--check=False', f'--optimizer={optimizer}', f'--out_dir={optimizer}']
    train.main([*run, '--max_iters=1'])
    train.main([*run, '--max_iters=2', '--init_from=resume'])
assert 'matplotlib' not in sys.modules
train.main([*run, '--check=auto', '--film=True', '--report=True'])
assert not sys.modules.keys() & {
    'torch._dynamo', 'torch._inductor', 'torch.distributed.tensor', 'torch.distributed.fsdp',
    'sympy', 'pandas', 'pyarrow', 'datasets', 'transformers', 'tokenizers', 'lm_eval',
    'plaingpt.data.overlap', 'plaingpt.core.sharding', 'plaingpt.core.mixtures',
    'plaingpt.experiments.memory'}
"""


@pytest.mark.slow
def test_an_eager_run_imports_neither_torchs_compiler_nor_what_it_does_not_use(tiny, tmp_path):
    settings = ['--compile=False', '--rotary=True', '--ema_decay=0.9', '--max_iters=3']
    subprocess.run([sys.executable, '-c', EAGER_RUNS, *tiny, *settings], cwd=tmp_path, check=True,
                   env={**os.environ, 'PYTHONPATH': str(ROOT)})
