import json
import math
from dataclasses import replace

import pytest
import torch

from plaingpt.monitoring.metrics import Metrics
from plaingpt.monitoring.metrics_file import read_rows, trim_rows
from plaingpt.system.formatting import duration, short
from plaingpt.training.settings import TrainConfig

CONFIG = TrainConfig(batch_size=10, block_size=10, gradient_accumulation_steps=1, max_iters=1000,
                     eval_interval=100)


class Loader:
    waited_s = 0.0

    def tokens_before(self, iter_num):
        return 100 * iter_num


class Model:
    def flops_per_token(self):
        return 10**9


def new(path, **changes):
    return Metrics(path, **{**dict(
        config=CONFIG, run={}, loader=Loader(), model=Model(), device=torch.device('cpu'),
        dtype='float32', scaler=torch.amp.GradScaler('cpu', enabled=False), bytes_per_token=4.0),
        **changes})


@pytest.fixture(autouse=True)
def no_diagnosis(monkeypatch):
    monkeypatch.setattr('plaingpt.monitoring.metrics.diagnose', lambda *_: [])


@pytest.fixture
def now(monkeypatch):
    """The time of the clock is now[0]."""
    now = [0.0]
    monkeypatch.setattr('plaingpt.monitoring.metrics.time.perf_counter', lambda: now[0])
    return now


@pytest.fixture
def metrics(tmp_path):
    return new(tmp_path / 'metrics.jsonl')


def lines(metrics):
    return [json.loads(line) for line in metrics.path.read_text().splitlines()]


def test_a_step_is_a_line_of_the_documented_keys(metrics, capsys):
    metrics.begin(0)
    metrics.step(10, torch.tensor(2.5), 1e-3, torch.tensor(0.7))
    (line,) = lines(metrics)
    assert list(line) == ['iter', 'tokens', 'elapsed_s', 'loss', 'lr', 'grad_norm',
                          'tokens_per_s', 'mfu', 'peak_memory_bytes', 'data_wait']
    assert (line['iter'], line['tokens'], line['loss'], line['mfu']) == (10, 1000, 2.5, None)
    assert 'iter   10 | loss 2.5000 | lr 1.00e-03 | grad 0.70' in capsys.readouterr().out


def test_learning_rates_of_groups_are_logged_where_they_differ(tmp_path):
    metrics = new(tmp_path / 'metrics.jsonl',
                  config=replace(CONFIG, lr_scales='embedding:8,vector:0.5'))
    metrics.begin(0)
    metrics.step(10, 2.5, 1e-3, 0.7)
    (line,) = lines(metrics)
    assert {key: line[key] for key in line if key.startswith('lr')} == \
        {'lr': 1e-3, 'lr_embedding': 8e-3, 'lr_vector': 5e-4}


def test_mfu_is_that_of_each_gpu_and_null_where_the_peak_is_not_known(tmp_path, monkeypatch,
                                                                      capsys):
    monkeypatch.setattr('plaingpt.monitoring.metrics.peak_memory_bytes', lambda _: 0)
    shares, columns = [], []
    for i, (name, changes) in enumerate([
            ('NVIDIA A100-SXM4', {}), ('NVIDIA A100-SXM4', {'world_size': 2}),
            ('NVIDIA A100-SXM4', {'dtype': 'float32'}), ('NVIDIA GB999', {}), ('cpu', {})]):
        monkeypatch.setattr('plaingpt.monitoring.metrics.device_name', lambda _, name=name: name)
        metrics = new(tmp_path / f'{i}.jsonl', **{
            'device': torch.device('cpu' if name == 'cpu' else 'cuda'), 'dtype': 'bfloat16',
            **changes})
        metrics.begin(0)
        metrics.step(1, 2.5, 1e-3, 0.7)
        (line,) = lines(metrics)
        shares.append(line['mfu'] and line['mfu'] * 312e12 / line['tokens_per_s'] / 10**9)
        columns += [[part for part in capsys.readouterr().out.split(' | ') if 'mfu' in part]]
    assert shares == [pytest.approx(1.0), pytest.approx(0.5), None, None, None]
    assert all(part.endswith('%') for (part,) in columns[:2])
    assert columns[2:] == [['mfu n/a'], ['mfu n/a'], []]  # on a CPU it cannot be known


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


def test_time_spent_evaluating_is_no_step_time(metrics, now):
    metrics.begin(0)
    now[0] = 1.0
    with metrics.paused('evaluating'):
        now[0] = 61.0
    now[0] = 62.0
    metrics.loader.waited_s = 0.5
    metrics.step(4, 1.0, 1e-3, 1.0)
    [line] = lines(metrics)
    assert line['tokens_per_s'] == pytest.approx(4 * 100 / 2) and line['data_wait'] == 0.25


def row(i):
    return json.dumps({'iter': i, 'tokens': 100 * i, 'elapsed_s': 0.1 * i}) + '\n'


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    for end in ('{"iter"', '3', '[1]', '\n\n', '{"iter": 1}'):
        path.write_text(row(1) + row(2) + row(3) + end)
        trim_rows(path, 2)
        assert path.read_text() == row(1) + row(2)
    path.write_text((row(1) + row(2)).rstrip())  # the newline did not make it to disk
    trim_rows(path, 2)
    assert path.read_text() == row(1) + row(2)


def test_lines_that_are_no_rows_are_named_and_skipped(tmp_path):
    path, said = tmp_path / 'metrics.jsonl', []
    path.write_bytes(row(1).encode() + b'\xff\xfe\n{"loss": 3}\n' + row(2).encode()
                     + b'{"iter": 3, "tokens": 1}\n[1]\n3\n' + row(3).encode()[:-9])
    assert [found['iter'] for found in read_rows(path, said.append)] == [1, 2]
    (line,) = said
    assert str(path) in line and 'skipped 6 of 8' in line and 'line 2, 3, 5, 6, 7, …' in line


def test_a_disk_that_refuses_a_line_stops_no_training(metrics, capsys):
    metrics.path = metrics.path.parent  # a folder: cannot be appended to
    metrics.evaluation(20, 2.0, 2.0, best=True)
    assert 'is lost' in capsys.readouterr().err


def test_other_ranks_write_nothing(tmp_path, capsys):
    quiet = new(tmp_path / 'm.jsonl', quiet=True)
    quiet.begin(0)
    quiet.step(1, 1.0, 1.0, 1.0)
    quiet.evaluation(1, 1.0, 1.0, best=True)
    quiet.close()
    assert not quiet.path.exists() and capsys.readouterr().out == ''


def test_the_time_left_counts_the_evaluations_to_come(metrics, now):
    metrics.begin(0)
    with metrics.paused('evaluating'):
        now[0] += 30.0
        metrics.evaluation(0, 1.0, 1.0, best=True)
    assert metrics.remaining_s(500, step_s=2.0) == 500 * 2 + 5 * 30


def test_what_a_device_has_still_to_do_before_a_pause_is_step_time(metrics, now, monkeypatch):

    def drain(_):  # of seven seconds of queued steps
        now[0] += 7.0

    monkeypatch.setattr('plaingpt.monitoring.metrics.synchronize', drain)
    metrics.begin(0)
    with metrics.paused('health check'):
        now[0] += 30.0
    metrics.step(10, 1.0, 1.0, 1.0)
    assert lines(metrics)[0]['tokens_per_s'] == CONFIG.step_tokens() / 0.7


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_queued_kernels_are_step_time_on_a_gpu(tmp_path):
    metrics = new(tmp_path / 'metrics.jsonl', device=torch.device('cuda', 0))
    torch.cuda.synchronize()
    metrics.begin(0)
    torch.cuda._sleep(10**9)  # cycles: some half a second
    with metrics.paused('health check'):
        torch.cuda.synchronize()
    metrics.step(1, 1.0, 1.0, 1.0)
    assert lines(metrics)[0]['tokens_per_s'] < CONFIG.step_tokens() / 0.2


def test_rows_in_memory_stay_few_and_evaluations_stay(metrics, monkeypatch):
    monkeypatch.setattr('plaingpt.monitoring.metrics.MAX_ROWS', 100)
    for i in range(1000):
        metrics._remember({'iter': i, **({'val_loss': 1.0} if i % 50 == 0 else {})})
    assert len(metrics.rows) <= 100
    assert [r['iter'] for r in metrics.rows if 'val_loss' in r] == list(range(0, 1000, 50))


def test_a_backend_that_fails_is_dropped_and_the_run_goes_on(metrics, capsys):
    class Broken:
        name = 'broken'

        def log(self, row):
            raise ConnectionError('the network is gone')
    metrics.backends = [Broken()]
    metrics.evaluation(1, 2.0, 2.0, best=True)
    metrics.evaluation(2, 2.0, 2.0, best=True)
    out = capsys.readouterr().out
    assert out.count('the network is gone') == 1 and len(lines(metrics)) == 2


def test_numbers_are_short_for_people():
    assert [short(n) for n in (999, 15000, 23456, 123456, 999900, 1234567)] == \
        ['999', '15.0k', '23.5k', '123k', '1.00M', '1.23M']
    assert [duration(s) for s in (5, 65, 3725, 360000, 1e9, math.inf)] == \
        ['5s', '1m05s', '1h02m', '100h00m', '31.7 years', 'inf years']
