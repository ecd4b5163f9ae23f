"""The code as it is here is judged against a commit: what is better is found, and luck is not."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, copy_project, options

import bench
from configurator import load_config
from plaingpt.experiments import judge, runs
from plaingpt.system.errors import UserError

RECIPE = options(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8,
                 gradient_accumulation_steps=1, learning_rate=1e-2, warmup_iters=2, eval_iters=4,
                 eval_interval=20, device='cpu', dtype='float32')


@pytest.fixture
def judged(monkeypatch, char_data):
    """judged(losses of the change, *words) → (exit status, the runs that were trained: side and
    TrainConfig). The base has losses of 3.0, 3.02, 2.99. A loss may be an error instead."""
    monkeypatch.setattr(bench, 'changed_files', lambda trees: 'model.py +3 -1')
    monkeypatch.setattr(bench, 'copy_sides', lambda commit, folder: (
        {name: folder / name for name in ('base', 'change')}, 'abcdef01'))

    def judged(change, *words):
        losses, made = {'base': [3.0, 3.02, 2.99], 'change': list(change)}, []

        def train_once(words, folder, tree):
            config = load_config(bench.TrainConfig, words)
            made.append((tree.name, config))
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
            return ended.code, made
        return 0, made
    return judged


BETTER, WORSE, SAME = [2.0, 2.01, 1.99], [4.0, 4.01, 3.99], [3.001, 3.018, 2.9915]


@pytest.mark.parametrize('change, status, said', [
    (BETTER, 0, 'BETTER'), (WORSE, 4, 'WORSE'), (SAME, 3, 'NOT SHOWN')])
def test_both_sides_have_the_same_seeds_and_what_is_clear_is_said(
        change, status, said, judged, capsys):
    code, made = judged(change)
    assert code == status
    assert [(side, config.seed) for side, config in made] == [
        ('base', 5), ('change', 5), ('change', 6), ('base', 6), ('base', 7), ('change', 7)]
    assert f'\n\n{said}, in 1.50 times the time\n' in capsys.readouterr().out


def test_both_sides_have_the_same_minutes_and_a_short_run_before(judged, capsys):
    code, made = judged(SAME, '--minutes=0.5')
    assert code == 3
    assert [(side, config.minutes, config.max_iters) for side, config in made[:2]] == [
        ('base', 0, 2), ('change', 0, 2)]
    assert [config.minutes for _, config in made[2:]] == 6 * [0.5]
    said = capsys.readouterr().out
    assert 'NOT SHOWN, after the same time' in said and '200 steps' in said and '100' in said


def test_a_judgement_is_a_row_below_one_header_also_where_a_side_does_not_train(judged):
    judged(BETTER, '--minutes=0.5', '--wandb_run_name=a\tb')
    before = Path('out-experiments/results.tsv').read_text()
    judged(WORSE)
    with pytest.raises(UserError):
        judged([UserError('a tab\tand\nanother line')])
    text = Path('out-experiments/results.tsv').read_text()
    assert text.startswith(before)
    assert len(text.splitlines()) == 4 and {line.count('\t') for line in text.splitlines()} == {11}
    better, worse, failed = csv.DictReader(text.splitlines(), delimiter='\t')
    assert [row['verdict'] for row in (better, worse, failed)] == ['BETTER', 'WORSE', 'FAILED']
    assert better['base commit'] == 'abcdef01' and better['change'] == 'model.py +3 -1'
    assert better['seeds'] == '5 to 7' and '--minutes=0.5' in better['settings']
    loss, difference, half_width = (float(better[key]) for key in better if 'nats' in key
                                    and not key.startswith('base'))
    assert loss == 2.0 and difference == pytest.approx(-3.01 / 3, abs=1e-5)
    assert half_width == pytest.approx(4.303 * 0.00333, rel=1e-2)  # of -1, -1.01 and -1
    assert 'a tab and another line' in failed['problem'] and worse['problem'] == ''


def test_runs_that_cannot_be_compared_are_an_error():
    good = [dict(variant=name, seed=seed, final_loss=3.0, step_ms=1.0, seconds=1.0, dataset='a',
                 minutes=0) for name in ('base', 'change') for seed in (1, 2)]
    for broken, words in (({'dataset': 'b'}, 'trained on a and b'), ({'minutes': 1}, 'minutes=0'),
                          ({'final_loss': None}, 'is not finite')):
        with pytest.raises(UserError, match=words):
            rows = [*good[:3], {**good[3], **broken}]
            judge.verdict(rows, runs.compare(rows))


needs_git = pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')


def git(folder, *words):
    """→ what git prints"""
    return subprocess.run(['git', *words], cwd=folder, check=True, text=True,
                          stdout=subprocess.PIPE).stdout


@needs_git
def test_a_config_file_of_the_clone_is_that_of_each_side(tmp_path):
    trees, commit = judge.copy_sides('HEAD', tmp_path)
    assert git(ROOT, 'rev-parse', 'HEAD').startswith(commit) and commit
    for name, tree in trees.items():
        told = judge.of_side(tree, 'config/tiny.py')
        assert told == str(tree / 'config/tiny.py') and tree.name == name
        assert Path(told).is_file() and (tree / 'plaingpt').is_dir()
        assert judge.of_side(tree, '--max_iters=3') == '--max_iters=3'
    with pytest.raises(UserError, match='against=no_such'):
        judge.copy_sides('no_such', tmp_path)


@needs_git
def test_results_are_ignored_by_git():
    assert git(ROOT, 'check-ignore', 'out-experiments/results.tsv')


@pytest.mark.skipif(not shutil.which('git'), reason='git is not installed')
def test_what_changed_is_counted_in_lines(tmp_path):
    files = {'base': {'model.py': 'a\nb\n', 'plaingpt/old name.py': 'a\n', 'same.py': 'a\n'},
             'change': {'model.py': 'a\nc\nd\n', 'plaingpt/new.py': 'b\n', 'same.py': 'a\n'}}
    for side, texts in files.items():
        for name, text in texts.items():
            path = tmp_path / side / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (tmp_path / 'change/same.py').chmod(0o755)  # which a zip file does not keep
    trees = {side: tmp_path / side for side in files}
    assert judge.changed_files(trees) == 'model.py +2 -1, plaingpt/new.py +1 -0, ' \
                                         'plaingpt/old name.py +0 -1'
    assert judge.changed_files({'base': trees['base'], 'change': trees['base']}) == 'nothing'


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
    assert done.returncode in (0, 3, 4) and done.stdout.count('±') >= 4, done.stderr
    rows = list(csv.DictReader(open(tmp_path / 'saved/judge.csv')))
    assert [row['variant'] for row in rows] == ['base', 'change', 'change', 'base']
    assert rows[0]['final_loss'] != rows[1]['final_loss']
    result, = csv.DictReader(open(tmp_path / 'saved/results.tsv'), delimiter='\t')
    assert result['change'] == 'config/tiny.py +1 -0' and result['verdict'] in done.stdout
