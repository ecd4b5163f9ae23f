"""The training loop: what a step computes, and when the loop evaluates, saves and ends. What a run
keeps over an interruption is in tests/training."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from processes import ROOT
from runs import lines, model_of
from sample_data import write_tasks

import train
from plaingpt.monitoring.run_record import read_run
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import monitor
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import TrainConfig


@pytest.fixture
def tiny(tiny):
    """Without the checks before the first step, which tests/checks has."""
    return [*tiny, '--check=False']


def test_exactly_max_iters_updates_are_made_and_the_last_weights_evaluated(
        tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(monitor, 'find_reference', lambda *_: 'mine')
    train.main([*tiny, '--max_iters=5', '--eval_interval=2'])
    assert read_run(tmp_path / 'out')['reference'] == 'mine'
    out = capsys.readouterr().out
    for words in (' training tokens, vocabulary ', 'done: '):
        assert words in out
    assert [line['iter'] for line in lines(tmp_path / 'out', 'loss')] == [1, 2, 3, 4, 5]
    assert [line['iter'] for line in lines(tmp_path / 'out', 'val_loss')] == [0, 2, 4, 5]
    found = checkpoints.find(tmp_path / 'out')
    model = model_of(found)
    config = TrainConfig(learning_rate=1e-3)
    optimizer = build_optimizer(model, config)
    found.load_optimizer(optimizer, model)
    assert found.iter_num == 5
    assert found.val_loss == lines(tmp_path / 'out', 'val_loss')[-1]['val_loss']
    assert {int(state['step']) for state in optimizer.state.values()} == {5}


def test_each_step_has_the_learning_rate_of_the_schedule_and_a_clipped_gradient(
        tiny, tmp_path, monkeypatch):
    rates, norms = [], []

    def record(optimizer, _, __):  # before each of its steps
        rate = {group['lr'] for group in optimizer.param_groups}
        rates.append(rate)
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
    assert all(line['grad_norm'] > 0.5 for line in lines(tmp_path / 'out', 'grad_norm'))


def test_eval_only_evaluates_once_and_writes_nothing(tiny, trained, tmp_path, capsys):
    def files():
        return {p: p.stat().st_mtime_ns for p in (tmp_path / 'out').rglob('*') if p.is_file()}

    shutil.copytree(trained, tmp_path / 'out')
    before = files()
    train.main([*tiny, '--init_from=resume', '--eval_only', '--dropout=0.5'])  # of training alone
    out = capsys.readouterr().out
    expected = lines(trained, 'val_loss')[-1]['val_loss']
    assert out.count('val loss') == 1 and f'val loss {expected:.4f}' in out
    assert files() == before


def test_a_run_of_no_steps_promises_no_weights(tiny, tmp_path, capsys):
    train.main([*tiny, '--max_iters=0'])
    out = capsys.readouterr().out
    assert 'iter 0 | ' in out and 'sample.py' not in out
    assert not checkpoints.checkpoint_paths(tmp_path / 'out')


def test_only_the_best_and_the_last_are_saved_when_asked(tiny, tmp_path):
    train.main([*tiny, '--always_save_checkpoint=False', '--learning_rate=0.0', '--min_lr=0.0'])
    # no evaluation is better than the first, and the end is there to resume from
    best, last = checkpoints.checkpoint_paths(tmp_path / 'out')
    assert (best.name, last.name) == ('iter-00000003', 'iter-00000006')


def test_nothing_waits_for_the_device_on_steps_that_are_not_logged(tiny, monkeypatch):
    reads = []
    for name in ('item', 'tolist', '__float__', '__bool__'):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, o=original, n=name:
                            (reads.append(n), o(self))[1])
    monkeypatch.setattr(monitor, 'HEALTH_INTERVAL', 0)
    counts = []
    for steps in (2, 5):
        reads.clear()
        train.main([*tiny, f'--max_iters={steps}', '--log_interval=100', '--eval_interval=100'])
        counts.append(len(reads))
    assert counts[0] == counts[1] > 0


def test_benchmarks_and_samples_come_on_time(tiny, tmp_path, capsys, monkeypatch):
    tasks = ','.join(map(str, write_tasks(tmp_path, monkeypatch)))
    capsys.readouterr()
    train.main([*tiny, f'--eval_tasks={tasks}', '--eval_tasks_limit=2', '--eval_interval=3',
                '--report=True'])
    out = capsys.readouterr().out
    assert [line['iter'] for line in lines(tmp_path / 'out', 'sample')] == [3, 6]
    assert out.count('word: perplexity ') == 3 and 'iter 3 | ending: acc' in out
    found = lines(tmp_path / 'out', 'word_acc')
    assert [line['iter'] for line in found] == [0, 3, 6] and found[0]['word_questions'] == 2


def test_the_first_evaluation_of_a_new_model_reads_as_much_as_a_step_and_others_all(
        tiny, tmp_path):  # a step has two micro-batches
    rows = {}
    for eval_iters in (1, 2, 9):
        train.main([*tiny, '--max_iters=2', '--eval_interval=2', f'--eval_iters={eval_iters}'])
        rows[eval_iters] = [line['val_loss'] for line in lines(tmp_path / 'out', 'val_loss')]
    assert rows[2][0] == rows[9][0] != rows[1][0] and len({last for _, last in rows.values()}) == 3
    train.main([*tiny, '--max_iters=0', '--eval_iters=9'])
    assert lines(tmp_path / 'out', 'val_loss')[0]['val_loss'] != rows[9][0]


EAGER_RUNS = """
import sys
import train
for optimizer in ('adamw', 'sgd', 'normuon'):
    run = [*sys.argv[1:], f'--optimizer={optimizer}', f'--out_dir={optimizer}']
    train.main([*run, '--max_iters=2'])
    train.main([*run, '--max_iters=3', '--init_from=resume'])
assert 'torch._dynamo' not in sys.modules
"""


def test_an_eager_run_does_not_import_torchs_compiler(tiny, tmp_path):
    settings = ['--check=auto', '--compile=False', '--rotary=True', '--average_decay=0.9',
                '--report=True', '--film=True']
    subprocess.run([sys.executable, '-c', EAGER_RUNS, *tiny, *settings], cwd=tmp_path, check=True,
                   env={**os.environ, 'PYTHONPATH': str(ROOT)})


# -----------------------------------------------------------------------------
# schedules


def test_the_learning_rate_warms_up_and_falls_on_a_cosine():
    config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, lr_decay_iters=109)
    for it, expected in {0: 0.1, 4: 0.5, 9: 1.0, 59: 0.55, 109: 0.1, 10**6: 0.1}.items():
        assert get_lr(it, config) == pytest.approx(expected), it
    assert all(get_lr(i, config) > get_lr(i + 1, config) for i in range(9, 108))


def test_each_schedule_begins_high_and_ends_low():
    for name, expected in {'linear': (0.595, 0.325, 0.1), 'constant': (1.0, 1.0, 1.0),
                           'wsd:0.5': (1.0, 0.1 + 0.9 * 25 / 55, 0.1)}.items():
        config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110,
                             lr_schedule=name)
        assert get_lr(0, config) == pytest.approx(1 / 11) and get_lr(10, config) == 1.0, name
        found = [get_lr(it, config) for it in (55, 85, 110)]
        assert found == pytest.approx(expected), name
    assert get_lr(0, TrainConfig(decay_lr=False, learning_rate=0.003)) == 0.003
    short = TrainConfig(warmup_iters=60, lr_decay_iters=100, lr_schedule='wsd:1.0')
    assert get_lr(61, short) > 0.97 * short.learning_rate  # no jump where the warmup ends
