"""The rows of metrics.jsonl, the console, and the clock of a run."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from plaingpt.core.settings import TrainConfig
from plaingpt.monitoring.metrics import Metrics
from plaingpt.monitoring.run_record import read_rows, trim_rows
from plaingpt.system.devices import mfu
from plaingpt.system.files import append_line

CONFIG = TrainConfig(batch_size=10, block_size=10, gradient_accumulation_steps=1, max_iters=1000,
                     eval_interval=100, log_interval=1)


RECORD = dict(compile=False, train_tokens=10**6, from_scratch=True, data={}, config=vars(CONFIG))


def new(out_dir):
    step = SimpleNamespace(device=torch.device('cpu'), dtype='float32', compile=False)
    metrics = Metrics(replace(CONFIG, out_dir=str(out_dir)), Mock(flops_per_token=lambda: 10**9),
                      step, Mock(), Mock(tokens_before=lambda iter_num: 100 * iter_num))
    metrics.open(RECORD, bytes_per_token=4.0)
    return metrics


@pytest.fixture
def metrics(tmp_path):
    return new(tmp_path)


def test_a_step_is_a_row_of_the_documented_keys(metrics, capsys):
    metrics.begin(0)
    metrics(10, loss=torch.tensor(2.5), lr=1e-3, grad_norm=torch.tensor(0.7))
    [row] = read_rows(metrics.path)
    assert list(row) == ['iter', 'tokens', 'elapsed_s', 'loss', 'lr', 'grad_norm', 'tokens_per_s',
                         'mfu', 'peak_memory_bytes']
    assert [row[key] for key in ('iter', 'tokens', 'loss', 'mfu')] == [10, 1000, 2.5, None]
    printed = capsys.readouterr().out
    for number in ('10', '2.5000', '1.00e-03', '0.70'):
        assert number in printed


def test_numbers_and_texts_are_logged_as_tensors_are(metrics):
    metrics.begin(0)
    metrics(10, loss=2.5, lr=1e-3, grad_norm=0.7, entropy=0.25, phase='warmup')
    [row] = read_rows(metrics.path)
    assert [row[key] for key in ('loss', 'entropy', 'phase')] == [2.5, 0.25, 'warmup']


def test_an_evaluation_is_a_row_of_the_documented_keys(metrics, capsys):
    metrics.evaluation(20, 2.0, 4 * math.log(2), None, best=True)
    [row] = read_rows(metrics.path)
    assert list(row) == ['iter', 'tokens', 'elapsed_s', 'train_loss', 'val_loss', 'val_bpb']
    assert row['val_bpb'] == pytest.approx(1.0)
    assert '1.000' in capsys.readouterr().out


def test_the_flops_of_a_step_are_shared_by_the_processes(tmp_path, monkeypatch):
    for name, value in (('RANK', '0'), ('LOCAL_RANK', '0'), ('WORLD_SIZE', '2'),
                        ('LOCAL_WORLD_SIZE', '2')):
        monkeypatch.setenv(name, value)
    assert new(tmp_path).flops_per_token == 10**9 / 2


def test_mfu_is_the_share_of_the_peak():
    assert mfu(156e12, 'NVIDIA A100-SXM4', 'bfloat16') == 0.5


def test_a_loss_that_is_not_finite_is_null_in_json(metrics):
    metrics.evaluation(20, math.nan, math.inf, None, best=False)
    row = json.loads(metrics.path.read_text(), parse_constant=lambda c: pytest.fail(c))
    assert row['train_loss'] is None
    assert row['val_loss'] is None


def test_step_time_includes_queued_steps_but_no_pause(metrics, monkeypatch):
    now = 0.0

    def drain(_):  # of three seconds of queued steps
        nonlocal now
        now += 3.0
    monkeypatch.setattr('plaingpt.monitoring.metrics.synchronize', drain)
    monkeypatch.setattr('plaingpt.monitoring.metrics.time.perf_counter', lambda: now)
    metrics.begin(0)
    now = 1.0
    with metrics.paused('evaluating'):
        now += 60.0
    metrics(4, loss=torch.tensor(1.0), lr=1e-3, grad_norm=torch.tensor(1.0))
    [row] = read_rows(metrics.path)
    assert row['tokens_per_s'] == pytest.approx(4 * 100 / 4)


def row(i, **values):
    return json.dumps({'iter': i, 'tokens': 100 * i, 'elapsed_s': 0.1 * i, **values}) + '\n'


def test_a_row_does_not_continue_half_of_another(tmp_path):
    path = tmp_path / 'x.jsonl'
    path.write_bytes(b'{"a": 1}\n{"a": \xc3')  # killed in the middle of a character
    append_line(path, {'a': 2})
    assert path.read_bytes() == b'{"a": 1}\n{"a": \xc3\n{"a": 2}\n'


@pytest.mark.parametrize('end', ['', '{"iter"', '[1]', '\n\n'])  # what a kill leaves
def test_a_resumed_run_drops_what_came_after_its_checkpoint(end, tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(row(1) + row(2) + row(3) + end)
    assert [each['iter'] for each in read_rows(path)] == [1, 2, 3]
    trim_rows(path, 2, evaluated=True)
    assert path.read_text() == row(1) + row(2)


def test_a_run_that_evaluates_again_drops_the_evaluation_of_its_checkpoint(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    steps = row(1, loss=1.0) + row(2, loss=1.0) + row(2, **{'health/grad_norm/h.0': 1.0})
    path.write_text(steps + row(2, val_loss=1.0) + row(2, sample='x'))
    trim_rows(path, 2, evaluated=False)
    assert path.read_text() == steps


def test_a_backend_that_fails_does_not_stop_training(metrics, capsys):
    metrics.backends = [Mock(log=Mock(side_effect=ConnectionError('the network is gone')))]
    metrics.evaluation(1, 2.0, 2.0, None, best=True)
    metrics.evaluation(2, 2.0, 2.0, None, best=True)
    assert capsys.readouterr().out.count('the network is gone') == 1
    assert len(read_rows(metrics.path)) == 2


def test_a_disk_that_fails_does_not_stop_training(metrics, capsys):
    metrics.path = metrics.path.parent  # a folder: cannot be appended to
    metrics.evaluation(3, 2.0, 2.0, None, best=True)
    assert str(metrics.path) in capsys.readouterr().err
