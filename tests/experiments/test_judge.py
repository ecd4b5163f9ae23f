"""A change is judged in pairs of runs: what is better is found, and luck is not."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, copy_project, options

import bench
from configurator import load_config
from plaingpt.experiments import judge as judging
from plaingpt.experiments.judge import interval
from plaingpt.system.errors import UserError

RECIPE = options(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, max_iters=20,
                 gradient_accumulation_steps=1, learning_rate=1e-2, warmup_iters=2, eval_iters=4,
                 eval_interval=20, device='cpu', dtype='float32', report=False)


@pytest.mark.parametrize('differences', [[-1.0, -1.1, -1.3], [0.3, -0.2, 0.9, 0.4, -0.1, 0.2]])
def test_the_interval_is_known_from_three_pairs_on_and_its_t_gives_the_stated_likelihood_ratio(
        differences):
    assert interval(differences[:2]) == (-np.inf, np.inf)
    low, high = interval(differences)
    n = len(differences)
    k, t = 1 + 10 * n, (high - low) / 2 / (np.std(differences, ddof=1) / np.sqrt(n))
    ratio = k**-0.5 * ((1 + t**2 / (n - 1)) / (1 + t**2 / (n - 1) / k)) ** (n / 2)
    assert ratio == pytest.approx(1 / 0.05)
    assert (low + high) / 2 == pytest.approx(np.mean(differences))


@pytest.fixture
def judged(monkeypatch, tmp_path, char_data):
    """judged(losses of the base's runs, those of the change's, option=value, …) → (exit status,
    the rows, [(side, seed, dtype)] of the trainings, which take no time)"""
    def judged(base, change, **settings):
        left, made = {'base': list(base), 'change': list(change)}, []

        def train_once(words, folder, tree):
            told = dict(word[2:].split('=', 1) for word in words if '=' in word)
            made.append((tree.name, int(told['seed']), told['dtype']))
            os.mkdir(folder)
            return {'final_loss': left[tree.name].pop(0), 'step_ms': 10.0, 'dtype': 'bfloat16',
                    'dataset': str(char_data)}

        def copy_sides(commit, words, folder):
            return [('base', folder / 'base', words), ('change', folder / 'change', words)]

        monkeypatch.setattr(judging, 'train_once', train_once)
        monkeypatch.setattr(judging, 'copy_sides', copy_sides)
        config = load_config(bench.BenchConfig, options(judge=True, dataset=char_data, **settings))
        rows, text, status = judging.judge(config, [])
        assert f'after pair {len(rows)}: ' in text
        return status, rows, made
    return judged


def test_both_runs_of_a_pair_have_its_seed_and_the_dtype_of_the_first_run(judged):
    status, rows, made = judged([3.0] * 8, [2.0, 2.01, 1.99, 2.0, 2.0, 2.0], seed=5)
    assert status == 0 and [row['change_val'] for row in rows] == [2.0, 2.01, 1.99]
    assert made == [('base', 5, 'auto'), ('change', 5, 'bfloat16'), ('base', 6, 'bfloat16'),
                    ('change', 6, 'bfloat16'), ('base', 7, 'bfloat16'), ('change', 7, 'bfloat16')]


def test_pairs_end_when_they_are_clear_or_the_budget_is_spent(judged):
    close = [3.001, 2.998, 3.0015, 2.999, 3.002, 2.999, 3.001, 3.0]
    for change, status, pairs, settings in (
            ([4.0, 4.01, 3.99], 4, 3, {}), (close, 3, 8, {}), (close, 3, 2, {'pairs': 2}),
            (close, 3, 1, {'minutes': 1e-9})):
        ended, rows, _ = judged([3.0] * 8, change, **settings)
        assert (ended, len(rows)) == (status, pairs), (change, settings)
    with pytest.raises(UserError, match='the change: its last validation loss is not finite'):
        judged([3.0], [None])


needs_git = pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')


@needs_git
def test_a_config_file_of_the_clone_is_that_of_each_side(tmp_path):
    words = ['config/tiny.py', '--max_iters=3']
    for name, tree, told in judging.copy_sides('HEAD', words, tmp_path):
        assert told == [str(tree / 'config/tiny.py'), '--max_iters=3'] and tree.name == name
        assert Path(told[0]).is_file() and (tree / 'plaingpt').is_dir()
    with pytest.raises(UserError, match='against=no_such'):
        judging.copy_sides('no_such', words, tmp_path)


@pytest.mark.slow
def test_what_the_working_tree_changes_is_judged_against_a_commit(char_data, tmp_path):
    clone = copy_project(tmp_path / 'clone')
    for words in ('init -q', 'add .', '-c user.name=a -c user.email=b commit -qm all'):
        subprocess.run(['git', *words.split()], cwd=clone, check=True)
    with open(clone / 'config/tiny.py', 'a', encoding='utf-8') as f:
        f.write('beta1 = 0.8\n')
    words = ['config/tiny.py', *RECIPE, f'--dataset={char_data}', '--judge', '--pairs=1',
             f'--save={tmp_path}/saved']
    done = subprocess.run([sys.executable, 'bench.py', *words], text=True, cwd=clone,
                          capture_output=True, check=False)
    assert done.returncode == 3, done.stderr
    header, row = (tmp_path / 'saved/judge.csv').read_text().splitlines()
    row = dict(zip(header.split(','), row.split(','), strict=False))
    assert row['base_val'] != row['change_val']
