"""The code as it is here is judged against a commit."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, copy_project, needs_git, options

import bench
from configurator import load_config
from plaingpt.experiments import runs
from plaingpt.system.errors import UserError

RECIPE = options(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8,
                 gradient_accumulation_steps=1, learning_rate=1e-2, warmup_iters=2, eval_iters=4,
                 eval_interval=20, device='cpu', dtype='float32')


BETTER, WORSE, SAME = [2.0, 2.01, 1.99], [4.0, 4.01, 3.99], [3.001, 3.018, 2.9915]


@pytest.fixture
def judged(monkeypatch, char_data):
    """judged(losses of the change, *words) → (exit code, the runs: side and TrainConfig). The base
    has losses of 3.0, 3.02, 2.99. A loss may be an error instead. Nothing is trained."""
    def judged(change, *words):
        losses, trained = {'base': [3.0, 3.02, 2.99], 'change': list(change)}, []

        def train_once(words, folder, tree):
            config = load_config(bench.TrainConfig, words)
            trained.append((tree.name, config))
            is_warm_up = config.max_iters == 2
            loss = 9.0 if is_warm_up else losses[tree.name].pop(0)
            if isinstance(loss, UserError):
                raise loss
            return {'final_loss': loss, 'step_ms': 10.0, 'dataset': str(char_data),
                    'iterations': 200 if tree.name == 'base' else 100, 'minutes': config.minutes,
                    'seconds': 2.0 if tree.name == 'base' else 3.0}
        monkeypatch.setattr(runs, 'train_once', train_once)
        try:
            bench.main([*options(judge=True, dataset=char_data, seed=5, device='cpu'), *words])
        except SystemExit as ended:
            return ended.code, trained
        return 0, trained
    return judged


@needs_git
@pytest.mark.parametrize('change, code, verdict', [
    (BETTER, 0, 'BETTER'), (WORSE, 4, 'WORSE'), (SAME, 3, 'NOT SHOWN')])
def test_a_judgement_is_an_exit_code(change, code, verdict, judged, capsys):
    assert judged(change)[0] == code
    printed = capsys.readouterr().out
    assert verdict in printed
    assert '1.50' in printed  # times the time


@needs_git
def test_both_sides_are_trained_with_the_same_seeds(judged):
    _, trained = judged(SAME)
    assert [(side, config.seed) for side, config in trained] == [
        ('base', 5), ('change', 5), ('change', 6), ('base', 6), ('base', 7), ('change', 7)]


@needs_git
def test_runs_of_minutes_come_after_a_short_run_of_each_side(judged):
    _, trained = judged(SAME, '--minutes=0.5')
    assert [(side, config.minutes, config.max_iters) for side, config in trained[:2]] == [
        ('base', 0, 2), ('change', 0, 2)]
    assert [config.minutes for _, config in trained[2:]] == 6 * [0.5]


@needs_git
def test_each_judgement_is_a_row_of_one_table(judged):
    judged(BETTER, '--minutes=0.5', '--wandb_run_name=a\tb')
    before = Path('out-experiments/results.tsv').read_text()
    judged(WORSE)
    with pytest.raises(UserError):
        judged([UserError('a tab\tand\nanother line')])
    text = Path('out-experiments/results.tsv').read_text()
    assert text.startswith(before)
    assert [line.count('\t') for line in text.splitlines()] == 4 * [11]
    better, worse, failed = csv.DictReader(text.splitlines(), delimiter='\t')
    assert [row['verdict'] for row in (better, worse, failed)] == ['BETTER', 'WORSE', 'FAILED']
    assert git(ROOT, 'rev-parse', 'HEAD').startswith(better['base commit'])
    assert '--minutes=0.5' in better['settings']
    assert float(better['change loss (nats per token)']) == 2.0
    difference = float(better['difference (nats per token)'])
    assert difference == pytest.approx(-3.01 / 3, abs=1e-5)
    half_width = float(better['95% interval: difference ± (nats per token)'])
    assert half_width == pytest.approx(4.303 * 0.00333, rel=1e-2)  # of -1, -1.01 and -1
    assert 'a tab and another line' in failed['problem']


@pytest.mark.parametrize('broken, words', [
    ({'dataset': 'b'}, 'a and b'), ({'minutes': 1}, 'minutes'), ({'final_loss': None}, 'finite')])
def test_runs_that_cannot_be_compared_are_an_error(broken, words):
    rows = [dict(variant=name, seed=seed, final_loss=3.0, step_ms=1.0, seconds=1.0, dataset='a',
                 minutes=0) for name in ('base', 'change') for seed in (1, 2)]
    rows[3] |= broken
    with pytest.raises(UserError, match=words):
        runs.judge_runs(rows, runs.compare(rows))


def git(folder, *words):
    """→ what git prints"""
    return subprocess.run(['git', *words], cwd=folder, check=True, text=True,
                          stdout=subprocess.PIPE).stdout


@needs_git
def test_each_side_reads_its_own_config_files(tmp_path):
    trees, _ = runs.copy_sides('HEAD', tmp_path)
    for tree in trees.values():
        assert runs.in_tree(tree, 'config/tiny.py') == str(tree / 'config/tiny.py')
        assert (tree / 'config/tiny.py').is_file()
        assert runs.in_tree(tree, '--max_iters=3') == '--max_iters=3'


@needs_git
def test_results_are_ignored_by_git():
    assert git(ROOT, 'check-ignore', 'out-experiments/results.tsv')


@pytest.mark.slow
@pytest.mark.parametrize('length', ['--max_iters=20', '--minutes=0.2'])
def test_what_the_working_tree_changes_is_judged_against_a_commit(length, char_data, tmp_path):
    clone = copy_project(tmp_path / 'clone')
    for words in ('init -q', 'add .', '-c user.name=a -c user.email=b commit -qm all'):
        git(clone, *words.split())
    with open(clone / 'config/tiny.py', 'a', encoding='utf-8') as f:
        f.write('beta1 = 0.8\n')
    words = ['config/tiny.py', *RECIPE, length, f'--dataset={char_data}', '--judge', '--seeds=2',
             f'--save={tmp_path}/saved']
    done = subprocess.run([sys.executable, 'bench.py', *words], text=True, cwd=clone,
                          capture_output=True, check=False)
    assert done.returncode in (0, 3, 4), done.stderr
    rows = list(csv.DictReader(open(tmp_path / 'saved/judge.csv')))
    assert [row['variant'] for row in rows] == ['base', 'change', 'change', 'base']
    assert rows[0]['final_loss'] != rows[1]['final_loss']
    result, = csv.DictReader(open(tmp_path / 'saved/results.tsv'), delimiter='\t')
    assert result['change'] == 'config/tiny.py +1 -0'
    assert result['verdict'] in done.stdout
