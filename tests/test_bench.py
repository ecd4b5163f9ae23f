import csv
import json
import sys
from contextlib import redirect_stdout

import pytest
import torch
from helpers import fails

import bench
import train
from plaingpt.experiments import runs, speed


@pytest.fixture(autouse=True)
def small_matmul(monkeypatch):
    """No matmul beside a step."""
    monkeypatch.setattr(speed, 'matmul_flops', lambda dtype, device: 1e9)


def test_a_matmul_of_n_is_two_n_cubed_operations_and_its_first_times_do_not_count(monkeypatch):
    monkeypatch.undo()
    seconds = iter([100.0] * 3 + [2.0] * 10)
    monkeypatch.setattr(speed, 'timed', lambda *_: (None, next(seconds)))
    monkeypatch.setattr(speed, 'cpu_has_bfloat16', lambda: False)
    found = speed.matmul_flops(torch.bfloat16, torch.device('cpu'))
    assert found == 2 * 512**3 / 2.0


def test_the_speed_of_a_step_is_json_and_csv_that_agree(tiny, tmp_path, capsys):
    bench.main([*tiny, '--steps=3', '--warmup_steps=1', '--json', f'--save={tmp_path}/results'])
    found = json.loads(capsys.readouterr().out)
    row, = found['rows']
    tokens = 2 * 4 * 16
    assert row['tokens_per_s'] * row['step_ms'] / 1e3 == pytest.approx(tokens)
    assert row['min_ms'] <= row['step_ms'] <= row['max_ms'] and row['mfu'] is None
    assert row['matmul_share'] == pytest.approx(
        row['tokens_per_s'] * row['flops_per_token'] / row['matmul_flops'])
    assert found['command'].startswith('python bench.py') and found['machine']
    line, = csv.DictReader(open(tmp_path / 'results' / 'speed-cpu.csv'))
    assert float(line['step_ms']) == row['step_ms'] and line['date'] == found['date']
    assert found['command'] in (tmp_path / 'results' / 'speed-cpu.md').read_text()


def test_a_profile_says_where_time_goes_and_leaves_a_trace(tiny, tmp_path, capsys):
    bench.main([*tiny, '--steps=1', '--warmup_steps=1', '--profile', '--real_data'])
    assert 'aten::' in capsys.readouterr().out
    assert json.loads((tmp_path / 'out' / 'trace.json').read_text())['traceEvents']


def test_a_sweep_trains_and_is_saved_without_matplotlib(tiny, tmp_path, capsys, monkeypatch):
    def train_here(name, argv, tree):
        with redirect_stdout(sys.stderr):
            train.main(argv)

    monkeypatch.setattr(runs, 'run_command', train_here)
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    words = [word for word in tiny if not word.startswith('--out_dir=')]
    bench.main([*words, '--sweep=n_layer=1,2', '--seeds=1', '--json', f'--save={tmp_path}/results'])
    out, err = capsys.readouterr()
    assert 'warning: drawing curves needs matplotlib' in err
    base, changed = json.loads(out)['rows']
    assert base['final_loss'] != changed['final_loss']
    assert 'n_layer=2' in (tmp_path / 'results' / 'sweep-n_layer-cpu.csv').read_text()
    kept = tmp_path / 'results/sweep-n_layer-cpu/n_layer=2,seed=1337'
    assert (kept / 'checkpoints').is_dir() and (kept / 'run.json').exists()


def test_on_a_cpu_a_small_model_takes_the_place_of_gpt2():
    config, _, _ = bench.read_config(['--device=cpu', '--batch_size=3'])
    assert (config.n_layer, config.batch_size) == (6, 3)
    config, _, _ = bench.read_config(['--device=cpu', '--variants=grid'])
    assert config.n_layer == 2


def test_a_benchmark_says_what_it_cannot_do(capsys, monkeypatch, tiny, tmp_path):
    assert 'one at a time: sweep, profile' in fails(capsys, monkeypatch, bench.main, '--profile',
                                                    '--sweep=conv=0,4')
    assert 'python plan.py CONFIG says' in fails(capsys, monkeypatch, bench.main, '--memory')
    assert 'minutes=3.0 is for train.py' in fails(capsys, monkeypatch, bench.main, '--minutes=3',
                                                  '--device=cpu')
    (tmp_path / 'file').touch()
    assert f'save={tmp_path}/file' in fails(capsys, monkeypatch, bench.main, '--device=cpu',
                                            f'--save={tmp_path}/file')
    assert 'vocab_size=50' in fails(capsys, monkeypatch, bench.main, *tiny, '--real_data',
                                    '--vocab_size=50')
