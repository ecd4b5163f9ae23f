"""The code as it is here is judged against a commit."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, copy_project, needs_git, options

import bench
from configurator import load_config
from plaingpt.experiments import judge, runs
from plaingpt.system.errors import UserError

RECIPE = options(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8,
                 gradient_accumulation_steps=1, learning_rate=1e-2, warmup_iters=2, eval_iters=4,
                 eval_interval=20, device='cpu', dtype='float32')


BETTER, WORSE, SAME = [2.0, 2.01, 1.99], [4.0, 4.01, 3.99], [3.001, 3.018, 2.9915]


@pytest.fixture
def judged(monkeypatch, char_data):
    """judged(losses of the change, *words) → (exit code, the runs: side and TrainConfig, first the
    short ones). The base has losses of 3.0, 3.02, 2.99, or `base`. A loss may be an error instead.
    `unknown`: settings that the base does not accept. Nothing is trained."""
    def judged(change, *words, base=(3.0, 3.02, 2.99), unknown=()):
        losses, trained = {'base': list(base), 'change': list(change)}, []

        def accepted(command, tree):
            return json.dumps([word for word in command if word.startswith('--') and not (
                tree.name == 'base' and word[2:].partition('=')[0] in unknown)])

        def train_once(words, folder, tree):
            config = load_config(bench.TrainConfig, words)
            is_base = tree.name == 'base'
            trained.append((tree.name, config))
            is_warm_up = config.max_iters == 2
            loss = 9.0 if is_warm_up else losses[tree.name].pop(0)
            if isinstance(loss, UserError):
                raise loss
            return {'final_loss': loss, 'step_ms': 10.0 if is_base else 15.0,
                    'dataset': str(char_data), 'iterations': 2000 if is_base else 1000}
        monkeypatch.setattr(runs, 'train_once', train_once)
        monkeypatch.setattr(judge, 'run_python', accepted)
        if not any(word.startswith('--against') for word in words):
            trees = {'base': Path('base'), 'change': Path('change')}
            monkeypatch.setattr(judge, 'copy_sides', lambda *_: (trees, 'abc123', 'model.py +1 -1'))
        try:
            bench.main([*options(judge=True, dataset=char_data, seed=5, device='cpu'), *words])
        except SystemExit as ended:
            return ended.code, trained
        return 0, trained
    return judged


@pytest.mark.parametrize('change, code, verdict', [
    (BETTER, 0, 'BETTER'), (WORSE, 4, 'WORSE'), (SAME, 3, 'INCONCLUSIVE')])
def test_a_judgement_is_an_exit_code(change, code, verdict, judged, capsys):
    assert judged(change)[0] == code
    printed = capsys.readouterr().out
    assert verdict in printed
    assert '1.50' in printed  # times the time of a step
    assert re.search('2,000 .* 1,000 ', printed)
    assert '0.50 times' in printed
    assert '--max_iters' in printed


@pytest.mark.parametrize('minutes', [0, 0.5])
def test_both_sides_are_trained_with_the_same_seeds_after_a_short_run_of_each(minutes, judged):
    _, trained = judged(SAME, f'--minutes={minutes}')
    assert [(side, config.minutes, config.max_iters) for side, config in trained[:2]] == [
        ('base', 0, 2), ('change', 0, 2)]
    assert [(side, config.seed, config.minutes) for side, config in trained[2:]] == [
        ('base', 5, minutes), ('change', 5, minutes), ('change', 6, minutes),
        ('base', 6, minutes), ('base', 7, minutes), ('change', 7, minutes)]


def test_judged_runs_do_nothing_besides_training(judged):
    Path('rich.py').write_text("film = True\neval_tasks = 'hellaswag'\nlog_to = 'wandb'\n"
                               'checkpoint_interval = 1\n')
    _, trained = judged(SAME, 'rich.py', '--minutes=0.5', '--report=True')
    for _, config in trained[2:]:
        assert (config.film, config.report, config.log_to, config.eval_tasks) \
            == (False, False, '', '')
        assert (config.always_save_checkpoint, config.checkpoint_interval) == (False, 10**9)
        assert config.clock == 'training'


def test_neither_side_gets_a_setting_of_the_judge_that_an_old_base_does_not_know(judged, capsys):
    _, trained = judged(SAME, '--minutes=0.5', unknown=('clock', 'film'))
    assert [(config.clock, config.report) for _, config in trained[2:]] == 6 * [('wall', False)]
    assert 'clock' in capsys.readouterr().err


def test_an_option_that_the_base_does_not_accept_goes_to_the_change_alone(judged, capsys):
    _, trained = judged(SAME, '--conv=4', '--rotary', unknown=('conv',))
    assert {(side, config.conv, config.rotary) for side, config in trained} == {
        ('base', 0, True), ('change', 4, True)}
    assert '--conv=4' in capsys.readouterr().err


def test_each_judgement_is_a_row_of_one_table(judged):
    judged(BETTER, '--minutes=0.5', '--wandb_run_name=a\tb')
    before = Path('out-experiments/results.tsv').read_text()
    judged(WORSE)
    with pytest.raises(UserError):
        judged([UserError('a tab\tand\nanother line')])
    text = Path('out-experiments/results.tsv').read_text()
    assert text.startswith(before)
    assert [line.count('\t') for line in text.splitlines()] == 4 * [13]
    better, worse, failed = csv.DictReader(text.splitlines(), delimiter='\t')
    assert [row['verdict'] for row in (better, worse, failed)] == ['BETTER', 'WORSE', 'FAILED']
    assert (better['base commit'], better['change']) == ('abc123', 'model.py +1 -1')
    assert '--minutes=0.5' in better['settings']
    assert (better['base steps'], better['change steps']) == ('2000', '1000')
    assert float(better['change loss (nats per token)']) == 2.0
    difference = float(better['difference (nats per token)'])
    assert difference == pytest.approx(-3.01 / 3, abs=1e-5)
    half_width = float(better['95% interval: difference ± (nats per token)'])
    assert half_width == pytest.approx(4.303 * 0.00333, rel=1e-2)  # of -1, -1.01 and -1
    assert 'a tab and another line' in failed['problem']


def test_a_table_of_an_earlier_version_keeps_its_columns(judged):
    old = 'date (UTC)\tbase commit\tchange\tsettings\tseeds\tverdict\tminutes\tproblem\n' \
          '2026-11-01T00:00:00Z\tabc\tmodel.py +1 -0\t\t1 to 3\tWORSE\t1.0\t\n'
    Path('out-experiments').mkdir()
    Path('out-experiments/results.tsv').write_text(old)
    judged(BETTER)
    text = Path('out-experiments/results.tsv').read_text()
    assert text.startswith(old)
    _, new = csv.DictReader(text.splitlines(), delimiter='\t')
    assert (new['seeds'], new['verdict'], new['problem']) == ('5 to 7', 'BETTER', '')


@needs_git
@pytest.mark.parametrize('base, change, words, rows', [
    ([UserError('skip_checks=x')], SAME, [], 0), ([None], SAME, [], 0),
    (SAME, [UserError('no dot_product_attention')], [], 1), (SAME, [None], [], 1),
    (SAME, SAME, ['--against=HEAD~99999'], 0), (SAME, SAME, ['--max_itrs=3'], 0),
    (SAME, SAME, ['config/x.py'], 0), (SAME, SAME, ['--dataset=no/where'], 0),
    (SAME, SAME, ['--dtype=int'], 0), (SAME, SAME, ['--minutes=1', '--max_iters=3'], 0)], ids=str)
def test_only_a_change_that_fails_where_the_base_trains_adds_a_row(
        base, change, words, rows, judged):
    with pytest.raises(UserError):
        judged(change, *words, base=base)
    table = Path('out-experiments/results.tsv')
    written = list(csv.DictReader(open(table), delimiter='\t')) if table.exists() else []
    assert [row['verdict'] for row in written] == rows * ['FAILED']


def test_each_side_reads_its_own_config_files(tmp_path):
    own = tmp_path / 'base/config/tiny.py'
    own.parent.mkdir(parents=True)
    own.touch()
    assert judge.in_tree(tmp_path / 'base', 'config/tiny.py') == str(own)
    assert judge.in_tree(tmp_path / 'base', '--max_iters=3') == '--max_iters=3'
    with pytest.raises(UserError, match=r'config/tiny\.py.* change'):
        judge.in_tree(tmp_path / 'change', 'config/tiny.py')


def test_sides_with_different_datasets_are_not_compared(monkeypatch):
    monkeypatch.setattr(judge, 'train_all', lambda sides, *_, **__: [
        {'dataset': side.name} for side in sides])
    with pytest.raises(UserError, match='a and b'):
        judge.warm_up([runs.Variant('a', [], [1]), runs.Variant('b', [], [1])], 'folder')


def git(folder, *words):
    """→ what git prints"""
    return subprocess.run(['git', *words], cwd=folder, check=True, text=True,
                          stdout=subprocess.PIPE).stdout


@pytest.fixture
def clone(tmp_path):
    """A copy of the project, committed."""
    clone = copy_project(tmp_path / 'clone')
    for words in ('init -q', 'add .', '-c user.name=a -c user.email=b commit -qm all'):
        git(clone, *words.split())
    return clone


@needs_git
def test_the_change_is_the_working_tree(clone, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, 'ROOT', clone)
    monkeypatch.chdir(clone)
    (clone / 'plan.py').unlink()
    (clone / 'new.py').write_text('a\nb\n')
    (clone / 'notes.txt').write_text('not code')
    (clone / 'staged.csv').write_text('1\n')
    git(clone, 'add', 'staged.csv')
    status = git(clone, 'status', '--porcelain')
    (tmp_path / 'copies').mkdir()
    trees, commit, changed = judge.copy_sides('HEAD', tmp_path / 'copies')
    assert git(clone, 'rev-parse', 'HEAD').startswith(commit)
    base, change = ({path.name for path in tree.iterdir()} for tree in trees.values())
    assert (base - change, change - base) == ({'plan.py'}, {'new.py', 'staged.csv'})
    assert re.fullmatch(r'new.py \+2 -0, plan.py \+0 -\d+, staged.csv \+1 -0', changed)
    assert git(clone, 'status', '--porcelain') == status


@needs_git
def test_results_are_ignored_by_git():
    assert git(ROOT, 'check-ignore', 'out-experiments/results.tsv')


@pytest.mark.slow
def test_new_settings_and_new_values_are_not_accepted():
    known = ['--rotary', '--lr_schedule=wsd:0.1', '--log_to=']
    new = ['config/tiny.py', '--louder=4', '--optimizer=lion', '--lr_schedule=steps']
    printed = judge.run_python(['-c', judge.ACCEPTED, *known, *new], ROOT)
    assert json.loads(printed) == known


@pytest.mark.slow
@pytest.mark.parametrize('length', ['--max_iters=20', '--minutes=0.1'])
def test_a_new_flag_of_the_working_tree_is_judged_against_a_commit(
        length, clone, char_data, tmp_path):
    model = (clone / 'model.py').read_text(encoding='utf-8')
    for old, new in (('    dropout: float', '    louder: float = 1.0\n    dropout: float'),
                     ('self.transformer.ln_f(x)', 'self.transformer.ln_f(x) * self.config.louder')):
        assert old in model
        model = model.replace(old, new)
    (clone / 'model.py').write_text(model, encoding='utf-8')
    words = ['config/tiny.py', *RECIPE, length, f'--dataset={char_data}', '--judge', '--seeds=2',
             '--louder=4', f'--save={tmp_path}/saved']
    done = subprocess.run([sys.executable, 'bench.py', *words], text=True, cwd=clone,
                          capture_output=True, check=False)
    assert done.returncode in (0, 3, 4), done.stderr
    rows = list(csv.DictReader(open(tmp_path / 'saved/judge.csv')))
    assert [row['variant'] for row in rows] == ['base', 'change', 'change', 'base']
    assert rows[0]['final_loss'] != rows[1]['final_loss']
    result, = csv.DictReader(open(tmp_path / 'saved/results.tsv'), delimiter='\t')
    assert result['change'] == 'model.py +2 -1'
    assert result['verdict'] in done.stdout
