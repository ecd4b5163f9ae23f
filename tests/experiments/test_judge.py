"""A change is judged in pairs of runs: what is better is found, and luck is not."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, fails, options

import bench
import prepare
from configurator import load_config
from plaingpt.experiments import judge as judging
from plaingpt.experiments.judge import git, interval
from plaingpt.system.errors import UserError

RECIPE = options(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, max_iters=20,
                 gradient_accumulation_steps=1, learning_rate=1e-2, warmup_iters=2, eval_iters=4,
                 eval_interval=20, device='cpu', dtype='float32', report=False)


def test_the_interval_is_known_from_three_pairs_on_and_its_t_gives_the_stated_likelihood_ratio():
    assert interval([-1.0, -1.1]) == (-np.inf, np.inf)
    low, high = interval([-1.0, -1.1, -1.3])
    n, k, t = 3, 31, (high - low) / 2 / (np.std([1, 1.1, 1.3], ddof=1) / np.sqrt(3))
    ratio = k**-0.5 * ((1 + t**2 / (n - 1)) / (1 + t**2 / (n - 1) / k)) ** (n / 2)
    assert ratio == pytest.approx(1 / 0.05)


@pytest.mark.parametrize('draw', [random.gauss, lambda a, b: random.uniform(-1, 1),
                                  lambda a, b: random.expovariate(1) - random.expovariate(1)])
def test_no_change_is_called_better_in_one_of_twenty_at_most_though_one_looks_after_each_pair(
        draw):
    random.seed(0)
    better = 0
    for _ in range(2000):
        found = [draw(0, 1) for _ in range(12)]
        looks = (interval(found[:n]) for n in range(2, 13))
        better += next((high < 0 for low, high in looks if low > 0 or high < 0), False)
    assert better < 0.04 * 2000


def test_a_gain_of_three_times_what_pairs_differ_by_is_found_in_eight():
    random.seed(0)
    found = [[random.gauss(-3, 1) for _ in range(8)] for _ in range(500)]
    assert sum(any(interval(each[:n])[1] < 0 for n in range(2, 9)) for each in found) > 0.95 * 500


# -----------------------------------------------------------------------------
# pairs, of runs that take no time


@pytest.fixture
def judged(monkeypatch, tmp_path, char_data, capsys):
    """judged(losses of the base's runs, those of the change's, option=value, …) → (exit status,
    what --json prints, [(side, seed, dtype)] of the trainings)"""
    monkeypatch.chdir(tmp_path)

    def judged(base, change, dataset=char_data, changed=None, **settings):
        left, made = {'base': list(base), 'change': list(change)}, []

        def train_once(words, folder, tree):
            told = dict(word[2:].split('=', 1) for word in words if '=' in word)
            made.append((tree.name, int(told['seed']), told['dtype']))
            os.mkdir(folder)
            return {'final_loss': left[tree.name].pop(0), 'step_ms': 10.0, 'dtype': 'bfloat16',
                    'dataset': str(changed or dataset)}

        def run_command(script, words, tree):
            told = dict(word[2:].split('=', 1) for word in words)
            assert told['tasks'] == 'test' and (tree / 'evaluate.py').exists()
            with open(told['output'], 'w') as f:
                json.dump({'results': {'test': {'loss': 7.0 + (tree.name == 'change')}}}, f)

        monkeypatch.setattr(judging, 'train_once', train_once)
        monkeypatch.setattr(judging, 'run_command', run_command)
        words = options(dataset=dataset, set='conv=0', **settings)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            bench.main(['--judge', '--device=cpu', '--json', *words])
        return end.value.code, json.loads(capsys.readouterr().out), made
    return judged


def test_both_runs_of_a_pair_have_its_seed_and_the_dtype_of_the_first_run(judged):
    status, found, made = judged([3.0] * 8, [2.0, 2.01, 1.99, 2.0, 2.0, 2.0], seed=5)
    assert status == 0 and 'BETTER after pair 3: -1.0000 nats a token' in found['table']
    assert 'as the runs themselves report it' in found['table']
    assert '1.00x the time a step' in found['table']
    assert made == [('base', 5, 'auto'), ('change', 5, 'bfloat16'), ('base', 6, 'bfloat16'),
                    ('change', 6, 'bfloat16'), ('base', 7, 'bfloat16'), ('change', 7, 'bfloat16')]
    assert [row['change_val'] for row in found['rows']] == [2.0, 2.01, 1.99]


def test_pairs_end_when_they_are_clear_or_the_same_or_closer_than_what_matters(judged):
    close = [3.001, 2.998, 3.0015, 2.999, 3.002, 2.999, 3.001, 3.0]
    for change, status, pairs, settings in (([4.0, 4.01, 3.99], 4, 3, {}), ([3.0] * 3, 3, 3, {}),
                                            (close, 3, 8, {}), (close, 3, 4, {'least': 0.01}),
                                            (close, 3, 2, {'pairs': 2}),
                                            (close, 3, 1, {'minutes': 1e-9})):
        ended, found, _ = judged([3.0] * 8, change, **settings)
        assert (ended, len(found['rows'])) == (status, pairs), (change, settings)


def test_a_split_that_no_run_looked_at_decides_where_it_is_asked_for(judged, tmp_path, text_file):
    with pytest.raises(UserError, match='--test_fraction'):
        judged([3.0], [2.0], split='test')
    prepare.main(['text', f'--input={text_file}', '--tokenizer=char', '--test_fraction=0.1',
                  f'--data_dir={tmp_path}/three'])
    status, found, _ = judged([3.0] * 3, [2.0, 2.01, 1.99], tmp_path / 'three', split='test')
    of_val, of_test = found['table'].splitlines()
    assert of_val.startswith('BETTER') and of_test.startswith('WORSE after pair 3: +1.0000')
    assert 'which no run looked at' in of_test and status == 4


def test_losses_that_cannot_be_compared_are_no_verdict(judged, text_file, tmp_path):
    prepare.main(['text', f'--input={text_file}', '--tokenizer=byte', f'--data_dir={tmp_path}/b'])
    with pytest.raises(UserError, match='losses of other text, or in other tokens'):
        judged([3.0], [2.0], changed=tmp_path / 'b')
    with pytest.raises(UserError, match='the change: its last validation loss is not finite'):
        judged([3.0], [None])


# -----------------------------------------------------------------------------
# the two sides

needs_git = pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')


@pytest.fixture
def clone(tmp_path):
    """A clone whose only commit is the code as it is here."""
    folder = tmp_path / 'clone'
    judging.copy_code(ROOT, folder)
    for words in ('init -q', 'add .', '-c user.name=a -c user.email=b commit -qm all'):
        git(*words.split(), cwd=folder)
    return folder


def test_what_cannot_be_judged_is_said_before_anything_is_trained(
        char_data, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judging, 'train_once', None)
    (tmp_path / 'bad.diff').write_text('nothing\n', encoding='utf-8')
    for words, said in ((['--judge'], 'judge takes a change'), (['--patch=x'], 'judge takes a'),
                        (['--judge', '--set=n_layers=2'], "unknown key 'n_layers'"),
                        (['--judge', '--patch=bad.diff'], 'No valid patches in input'),
                        (['--judge', '--patch=none.diff'], "none.diff': No such file"),
                        (['--judge', '--change=nothing'], 'nothing: no clone of plainGPT')):
        assert said in fails(capsys, monkeypatch, bench.main, *words, *RECIPE,
                             f'--dataset={char_data}')


@needs_git
def test_a_small_corpus_is_prepared_before_the_sides_look_for_it(monkeypatch):
    monkeypatch.setattr(bench, 'judge', lambda *_: None)
    words = ['--judge', 'config/tiny.py', '--set=learning_rate=1e-2']
    bench.judge_change(load_config(bench.BenchConfig, words), words)
    assert Path('data/readme/meta.json').exists()


def test_a_commit_that_is_not_there_is_named(char_data, capsys, monkeypatch):
    assert 'nothing' in fails(capsys, monkeypatch, bench.main, '--judge', '--against=nothing',
                              *RECIPE, f'--dataset={char_data}')


@pytest.mark.slow
def test_a_change_of_the_working_tree_is_judged_against_a_commit_each_with_its_own_config(
        clone, char_data, tmp_path):
    with open(clone / 'config/tiny.py', 'a', encoding='utf-8') as f:
        f.write('beta1 = 0.8\n')
    words = ['config/tiny.py', *RECIPE, f'--dataset={char_data}', '--judge', '--against=HEAD',
             '--pairs=1', f'--save={tmp_path}/saved']
    done = subprocess.run([sys.executable, 'bench.py', *words], text=True, cwd=clone,
                          capture_output=True, check=False)
    assert done.returncode == 3, done.stderr
    header, row = (tmp_path / 'saved/judge-cpu.csv').read_text().splitlines()
    row = dict(zip(header.split(','), row.split(','), strict=False))
    assert row['base_val'] != row['change_val']


@pytest.mark.slow
def test_a_patch_that_changes_nothing_is_not_shown_better_on_either_split(
        char_data, text_file, tmp_path):
    first = (ROOT / 'model.py').read_text(encoding='utf-8').splitlines()[0]
    (tmp_path / 'mine.diff').write_text(f'--- a/model.py\n+++ b/model.py\n@@ -1,1 +1,2 @@\n'
                                        f'+# a comment\n {first}\n', encoding='utf-8')
    prepare.main(['text', f'--input={text_file}', '--tokenizer=char', '--test_fraction=0.1',
                  f'--data_dir={tmp_path}/data'])
    done = subprocess.run(
        [sys.executable, ROOT / 'bench.py', '--judge', *RECIPE, f'--dataset={tmp_path}/data',
         '--patch=mine.diff', '--split=test', '--pairs=2', '--json'], text=True, cwd=tmp_path,
        capture_output=True, check=False)
    assert done.returncode == 3, done.stderr
    for row in json.loads(done.stdout)['rows']:
        assert row['base_val'] == row['change_val'] and row['base_test'] == row['change_test']


@pytest.mark.skipif(os.name == 'nt', reason='no SIGTERM there')
@pytest.mark.slow
def test_a_judgement_that_is_told_to_end_keeps_its_pairs_and_leaves_nothing(char_data, tmp_path):
    (tmp_path / 'tmp').mkdir()
    with subprocess.Popen(
            [sys.executable, '-u', ROOT / 'bench.py', *RECIPE, f'--dataset={char_data}', '--judge',
             '--set=beta1=0.8', '--pairs=1000'], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, 'TMPDIR': str(tmp_path / 'tmp')}) as process:
        while not (line := process.stderr.readline()).startswith('pair 1 '):
            assert line
        process.send_signal(signal.SIGTERM)
        assert 'after pair ' in process.stdout.read()
    assert process.returncode in (0, 3, 4)
    assert not list((tmp_path / 'tmp').glob('plaingpt-*'))
