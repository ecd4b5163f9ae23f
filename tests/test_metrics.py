import json
import math

import pytest
import torch

from metrics import Metrics, duration, short, trim


@pytest.fixture
def metrics(tmp_path):
    return Metrics(tmp_path / 'metrics.jsonl', step_tokens=100, tokens_at=lambda it: 100 * it,
                   max_iters=1000, bytes_per_token=4.0, mfu_of=lambda rate: None,
                   device=torch.device('cpu'))


def lines(metrics):
    return [json.loads(line) for line in metrics.path.read_text().splitlines()]


def test_a_step_is_a_line_of_the_documented_keys(metrics, capsys):
    metrics.start_steps(0)
    metrics.step(10, torch.tensor(2.5), 1e-3, torch.tensor(0.7))
    (line,) = lines(metrics)
    assert list(line) == ['iter', 'tokens', 'elapsed_s', 'loss', 'lr', 'grad_norm',
                          'tokens_per_s', 'mfu', 'peak_memory_bytes']
    assert (line['iter'], line['tokens'], line['loss'], line['mfu']) == (10, 1000, 2.5, None)
    assert 'iter   10 | loss 2.5000 | lr 1.00e-03 | grad 0.70' in capsys.readouterr().out


def test_an_evaluation_is_a_line_of_the_documented_keys(metrics, capsys):
    metrics.evaluation(20, 2.0, 4 * math.log(2), best=True)
    (line,) = lines(metrics)
    assert list(line) == ['iter', 'tokens', 'elapsed_s', 'train_loss', 'val_loss', 'val_bpb']
    assert line['val_bpb'] == pytest.approx(1.0)
    assert capsys.readouterr().out.rstrip().endswith('1.000 bits/byte | best')


def test_what_is_not_a_number_is_null_and_the_file_stays_json(metrics):
    metrics.evaluation(20, math.nan, math.inf, best=False)
    line = json.loads(metrics.path.read_text(), parse_constant=lambda c: pytest.fail(c))
    assert line['train_loss'] is None and line['val_loss'] is None


def test_time_spent_evaluating_is_no_step_time(metrics, monkeypatch):
    now = [0.0]
    monkeypatch.setattr('metrics.time.perf_counter', lambda: now[0])
    metrics.start_steps(0)
    now[0] = 1.0
    with metrics.paused():
        now[0] = 61.0
    now[0] = 62.0
    metrics.step(4, 1.0, 1e-3, 1.0)
    assert lines(metrics)[0]['tokens_per_s'] == pytest.approx(4 * 100 / 2)


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    for end in ('{"iter"', '3', '[1]', '\n\n', '{"iter": "x"}'):
        path.write_text('{"iter": 1}\n{"iter": 2}\n{"iter": 3}\n' + end)
        trim(path, 2)
        assert path.read_text() == '{"iter": 1}\n{"iter": 2}\n'
    path.write_text('{"iter": 1}\n{"iter": 2}')  # the newline did not make it to disk
    trim(path, 2)
    assert path.read_text() == '{"iter": 1}\n{"iter": 2}\n'


def test_a_disk_that_refuses_a_line_stops_no_training(metrics, capsys):
    metrics.path = metrics.path.parent  # a folder: cannot be appended to
    metrics.evaluation(20, 2.0, 2.0, best=True)
    assert 'is lost' in capsys.readouterr().err


def test_other_ranks_write_nothing(tmp_path, capsys):
    quiet = Metrics(tmp_path / 'm.jsonl', step_tokens=1, tokens_at=lambda it: it, max_iters=1,
                    bytes_per_token=None, mfu_of=lambda rate: None, device=torch.device('cpu'),
                    quiet=True)
    quiet.start_steps(0)
    quiet.step(1, 1.0, 1.0, 1.0)
    quiet.evaluation(1, 1.0, 1.0, best=True)
    assert not quiet.path.exists() and capsys.readouterr().out == ''


def test_numbers_are_short_for_people():
    assert [short(n) for n in (999, 15000, 23456, 123456, 999900, 1234567)] == \
        ['999', '15.0k', '23.5k', '123k', '1.00M', '1.23M']
    assert [duration(s) for s in (5, 65, 3725, 360000, 1e9, math.inf)] == \
        ['5s', '1m05s', '1h02m', '100h00m', '31.7 years', 'inf years']
