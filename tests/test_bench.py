import csv

import pytest
from runs import model_of

import bench
from plaingpt.core.checkpoint import find
from plaingpt.experiments import speed


def test_the_speed_of_a_step_is_saved(tiny, tmp_path, capsys):
    bench.main([*tiny, '--steps=3', f'--save={tmp_path}/results'])
    row, = csv.DictReader(open(tmp_path / 'results/speed.csv'))
    assert float(row['tokens_per_s']) * float(row['step_ms']) / 1e3 == pytest.approx(2 * 4 * 16)
    assert float(row['min_ms']) <= float(row['step_ms']) <= float(row['max_ms'])
    assert f'{float(row["step_ms"]):.1f}' in capsys.readouterr().out


def test_on_a_cpu_mfu_is_relative_to_a_measured_matmul(trained, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, 'matmul_speed', lambda dtype: {'float32': 1e12}[dtype])
    bench.main([*tiny, '--dtype=float32', '--steps=1', f'--save={tmp_path}/results'])
    row, = csv.DictReader(open(tmp_path / 'results/speed.csv'))
    flops = model_of(find(trained, 'latest')).flops_per_token() * 2 * 4 * 16
    assert float(row['mfu']) * 1e12 * float(row['step_ms']) / 1e3 == pytest.approx(flops)


def test_the_speed_is_that_of_the_model_that_a_run_starts_from(trained, tiny, capsys):
    parameters = model_of(find(trained, 'latest')).num_parameters()
    bench.main([*tiny, '--n_layer=3', f'--init_from={trained}', '--steps=1'])
    assert f'{parameters:,} parameters' in capsys.readouterr().out
