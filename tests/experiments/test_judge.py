"""The code as it is here is judged against a commit: what is better is found, and luck is not."""

import csv
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers import ROOT, copy_project, options

import bench
from configurator import load_config
from plaingpt.experiments import judge, runs
from plaingpt.system.errors import UserError

RECIPE = options(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, max_iters=20,
                 gradient_accumulation_steps=1, learning_rate=1e-2, warmup_iters=2, eval_iters=4,
                 eval_interval=20, device='cpu', dtype='float32')


@pytest.mark.parametrize('change, status', [
    ([2.0, 2.01, 1.99], 0), ([4.0, 4.01, 3.99], 4), ([3.001, 2.998, 3.0015], 3)])
def test_both_sides_have_the_same_seeds_and_what_is_clear_is_said(
        change, status, monkeypatch, capsys, char_data):
    left, made = {'base': [3.0, 3.02, 2.99], 'change': list(change)}, []

    def train_once(words, folder, tree):
        config = load_config(bench.TrainConfig, words)
        made.append((tree.name, config.seed))
        return {'final_loss': left[tree.name].pop(0), 'step_ms': 10.0, 'dataset': str(char_data),
                'seconds': 2.0 if tree.name == 'base' else 3.0}
    monkeypatch.setattr(runs, 'train_once', train_once)
    monkeypatch.setattr(bench, 'copy_sides', lambda commit, folder: {
        name: folder / name for name in ('base', 'change')})
    with pytest.raises(SystemExit) if status else nullcontext() as ended:
        bench.main([*options(judge=True, dataset=char_data, seed=5, device='cpu')])
    assert not status or ended.value.code == status
    assert made == [(side, seed) for seed in (5, 6, 7) for side in ('base', 'change')]
    said = {0: 'BETTER', 3: 'NOT SHOWN', 4: 'WORSE'}[status]
    assert capsys.readouterr().out.endswith(f'\n\n{said}, in 1.50 times the time\n')


def test_runs_that_cannot_be_compared_are_an_error():
    good = [dict(variant=name, seed=seed, final_loss=3.0, step_ms=1.0, seconds=1.0, dataset='a')
            for name in ('base', 'change') for seed in (1, 2)]
    for broken, words in (({'dataset': 'b'}, 'trained on a and b'),
                          ({'final_loss': None}, 'is not finite')):
        with pytest.raises(UserError, match=words):
            rows = [*good[:3], {**good[3], **broken}]
            judge.verdict(rows, runs.compare(rows))


needs_git = pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')


@needs_git
def test_a_config_file_of_the_clone_is_that_of_each_side(tmp_path):
    for name, tree in judge.copy_sides('HEAD', tmp_path).items():
        told = judge.of_side(tree, 'config/tiny.py')
        assert told == str(tree / 'config/tiny.py') and tree.name == name
        assert Path(told).is_file() and (tree / 'plaingpt').is_dir()
        assert judge.of_side(tree, '--max_iters=3') == '--max_iters=3'
    with pytest.raises(UserError, match='against=no_such'):
        judge.copy_sides('no_such', tmp_path)


@pytest.mark.slow
def test_what_the_working_tree_changes_is_judged_against_a_commit(char_data, tmp_path):
    clone = copy_project(tmp_path / 'clone')
    for words in ('init -q', 'add .', '-c user.name=a -c user.email=b commit -qm all'):
        subprocess.run(['git', *words.split()], cwd=clone, check=True)
    with open(clone / 'config/tiny.py', 'a', encoding='utf-8') as f:
        f.write('beta1 = 0.8\n')
    words = ['config/tiny.py', *RECIPE, f'--dataset={char_data}', '--judge', '--seeds=2',
             f'--save={tmp_path}/saved']
    done = subprocess.run([sys.executable, 'bench.py', *words], text=True, cwd=clone,
                          capture_output=True, check=False)
    assert done.returncode in (0, 3, 4) and done.stdout.count('±') >= 4, done.stderr
    rows = list(csv.DictReader(open(tmp_path / 'saved/judge.csv')))
    assert [row['variant'] for row in rows] == ['base', 'change'] * 2
    assert rows[0]['final_loss'] != rows[1]['final_loss']
