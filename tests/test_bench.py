import csv
import sys
from contextlib import redirect_stdout

import pytest
from runs import model_of

import bench
import train
from plaingpt.experiments import runs
from plaingpt.training.checkpoint import find


def test_the_speed_of_a_step_is_told_and_saved(tiny, tmp_path, capsys):
    bench.main([*tiny, '--steps=3', f'--save={tmp_path}/results'])
    row, = csv.DictReader(open(tmp_path / 'results/speed.csv'))
    assert float(row['tokens_per_s']) * float(row['step_ms']) / 1e3 == pytest.approx(2 * 4 * 16)
    assert float(row['min_ms']) <= float(row['step_ms']) <= float(row['max_ms'])
    assert row['mfu'] == '' and row['command'].startswith('python bench.py') and row['machine']
    out, err = capsys.readouterr()
    assert f'{float(row["step_ms"]):.1f}' in out and 'timing 3 steps' in err


def test_the_speed_is_that_of_the_model_that_a_run_starts_from(trained, tiny, capsys):
    before = model_of(find(trained, 'latest')).num_parameters()
    bench.main([*tiny, '--n_layer=3', f'--init_from={trained}', '--steps=1'])
    assert f'{before:,} parameters' in capsys.readouterr().out


def test_a_sweep_trains_and_is_saved_without_matplotlib(tiny, tmp_path, capsys, monkeypatch):
    def train_here(name, argv, tree):
        with redirect_stdout(sys.stderr):
            train.main(argv)

    monkeypatch.setattr(runs, 'run_command', train_here)
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    bench.main([*tiny, '--sweep=n_layer=1,2', '--seeds=1', f'--save={tmp_path}/results'])
    assert 'warning: drawing curves needs matplotlib' in capsys.readouterr().err
    base, changed = csv.DictReader(open(tmp_path / 'results/sweep-n_layer.csv'))
    assert base['final_loss'] != changed['final_loss'] and changed['variant'] == 'n_layer=2'
    kept = tmp_path / 'results/sweep-n_layer/n_layer=2,seed=1337'
    assert (kept / 'checkpoints').is_dir() and (kept / 'run.json').exists()
