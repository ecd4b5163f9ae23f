"""The rows of metrics.jsonl, the console, and the clock of a run."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from plaingpt.monitoring.metrics import Metrics
from plaingpt.monitoring.run_record import read_rows, trim_rows
from plaingpt.system.files import append_line
from plaingpt.training.settings import TrainConfig

CONFIG = TrainConfig(batch_size=10, block_size=10, gradient_accumulation_steps=1, max_iters=1000,
                     eval_interval=100)


def new(out_dir, processes=1, **changes):
    return Metrics(SimpleNamespace(**{**dict(
        config=replace(CONFIG, out_dir=str(out_dir)),
        train_data=Mock(tokens_before=lambda iter_num: 100 * iter_num),
        model=Mock(flops_per_token=lambda: 10**9), device=torch.device('cpu'), dtype='float32',
        scaler=torch.amp.GradScaler('cpu', enabled=False),
        world=SimpleNamespace(size=processes, is_main=True)), **changes}),
        {'compile': False}, bytes_per_token=4.0)


@pytest.fixture(autouse=True)
def no_diagnosis(monkeypatch):
    monkeypatch.setattr('plaingpt.monitoring.metrics.diagnose', lambda *_: {})


@pytest.fixture
def now(monkeypatch):
    """The time of the clock is now[0]."""
    now = [0.0]
    monkeypatch.setattr('plaingpt.monitoring.metrics.time.perf_counter', lambda: now[0])
    return now


@pytest.fixture
def metrics(tmp_path):
    return new(tmp_path)


def test_a_step_is_a_line_of_the_documented_keys(metrics, capsys):
    metrics.begin(0)
    metrics.step(10, torch.tensor(2.5), 1e-3, torch.tensor(0.7))
    (line,) = read_rows(metrics.path)
    assert list(line) == ['iter', 'tokens', 'elapsed_s', 'loss', 'lr', 'grad_norm', 'tokens_per_s',
                          'mfu', 'peak_memory_bytes']
    assert [line[key] for key in ('iter', 'tokens', 'loss', 'mfu')] == [10, 1000, 2.5, None]
    assert 'iter   10 | loss 2.5000 | lr 1.00e-03 | grad 0.70' in capsys.readouterr().out


def test_mfu_is_that_of_each_gpu_and_null_where_the_peak_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr('plaingpt.monitoring.metrics.peak_memory_bytes', lambda _: 0)
    shares = []
    for i, (name, changes) in enumerate([
            ('NVIDIA A100-SXM4', {}), ('NVIDIA A100-SXM4', {'processes': 2}),
            ('NVIDIA A100-SXM4', {'dtype': 'float32'}), ('NVIDIA GB999', {}), ('cpu', {})]):
        monkeypatch.setattr('plaingpt.monitoring.metrics.device_name', lambda _, name=name: name)
        (tmp_path / str(i)).mkdir()
        metrics = new(tmp_path / str(i), **{
            'device': torch.device('cpu' if name == 'cpu' else 'cuda'), 'dtype': 'bfloat16',
            **changes})
        metrics.begin(0)
        metrics.step(1, 2.5, 1e-3, 0.7)
        (line,) = read_rows(metrics.path)
        shares.append(line['mfu'] and line['mfu'] * 312e12 / line['tokens_per_s'] / 10**9)
    assert shares == [pytest.approx(1.0), pytest.approx(0.5), None, None, None]


def test_an_evaluation_is_a_line_of_the_documented_keys(metrics, capsys):
    metrics.evaluation(20, 2.0, 4 * math.log(2), None, best=True)
    (line,) = read_rows(metrics.path)
    assert list(line) == ['iter', 'tokens', 'elapsed_s', 'train_loss', 'val_loss', 'val_bpb']
    assert line['val_bpb'] == pytest.approx(1.0)
    assert capsys.readouterr().out.rstrip().endswith('1.000 bits/byte | best')


def test_what_is_not_a_number_is_null_and_the_file_stays_json(metrics):
    metrics.evaluation(20, math.nan, math.inf, None, best=False)
    line = json.loads(metrics.path.read_text(), parse_constant=lambda c: pytest.fail(c))
    assert line['train_loss'] is None and line['val_loss'] is None


def test_what_a_pause_takes_is_no_step_time_and_queued_steps_before_it_are(
        metrics, now, monkeypatch):
    def drain(_):  # of three seconds of queued steps
        now[0] += 3.0
    monkeypatch.setattr('plaingpt.monitoring.metrics.synchronize', drain)
    metrics.begin(0)
    now[0] = 1.0
    with metrics.paused('evaluating'):
        now[0] += 60.0
    metrics.step(4, 1.0, 1e-3, 1.0)
    [line] = read_rows(metrics.path)
    assert line['tokens_per_s'] == pytest.approx(4 * 100 / 4)


def row(i, **values):
    return json.dumps({'iter': i, 'tokens': 100 * i, 'elapsed_s': 0.1 * i, **values}) + '\n'


def test_a_line_does_not_continue_half_of_another(tmp_path):
    path = tmp_path / 'x.jsonl'
    path.write_bytes(b'{"a": 1}\n{"a": \xc3')  # killed in the middle of a character
    for n in (2, 3):
        append_line(path, {'a': n})
    assert path.read_bytes() == b'{"a": 1}\n{"a": \xc3\n{"a": 2}\n{"a": 3}\n'


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    for end in ('', '{"iter"', '3', '[1]', '\n\n'):  # what a kill leaves
        path.write_text(row(1) + row(2) + row(3) + end)
        assert [found['iter'] for found in read_rows(path)] == [1, 2, 3]
        trim_rows(path, 2)
        assert path.read_text() == row(1) + row(2)
    steps = row(1, loss=1.0) + row(2, loss=1.0) + row(2, **{'health/grad_norm/h.0': 1.0})
    path.write_text(steps + row(2, val_loss=1.0) + row(2, sample='x'))
    trim_rows(path, 2, evaluated=False)  # it evaluates there again
    assert path.read_text() == steps


def test_a_backend_or_a_disk_that_fails_stops_no_training(metrics, capsys):
    metrics.backends = [Mock(log=Mock(side_effect=ConnectionError('the network is gone')))]
    metrics.evaluation(1, 2.0, 2.0, None, best=True)
    metrics.evaluation(2, 2.0, 2.0, None, best=True)
    assert capsys.readouterr().out.count('the network is gone') == 1
    assert len(read_rows(metrics.path)) == 2
    metrics.path = metrics.path.parent  # a folder: cannot be appended to
    metrics.evaluation(3, 2.0, 2.0, None, best=True)
    assert 'is lost' in capsys.readouterr().err
