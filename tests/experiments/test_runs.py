import csv
import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT, exit_code, fork

import bench
import train
from configurator import load_config
from plaingpt.experiments import runs
from plaingpt.experiments.runs import (
    compare,
    format_comparison,
    read_variants,
    summarize,
    sweep_variants,
    train_once,
)
from plaingpt.system.errors import UserError
from plaingpt.training.settings import TrainConfig

# -----------------------------------------------------------------------------
# lists of variants


def read(words):
    return load_config(TrainConfig, words)


def test_the_grid_is_24_different_runs_that_can_run():
    words = ['--batch_size=8', '--block_size=16', '--total_batch_size=1024', '--vocab_size=65']
    config = load_config(bench.BenchConfig, [*words, '--seeds=1'])
    grid = {name: read(cell[1337]) for name, cell in bench.words_of(
        read_variants('grid', config), config, words).items()}
    assert len(grid) == len({repr(cell) for cell in grid.values()}) == 24
    tokens = {name: cell.step_tokens() for name, cell in grid.items()}
    assert tokens['accumulation'] == tokens['default'] == 4 * tokens['reduced batch']


def test_the_ladder_adds_one_change_at_a_time_and_the_ablation_undoes_one():
    ladder = list(read_variants('ladder', TrainConfig()).values())
    for below, above in pairwise(ladder):
        assert sum(below[key] != above[key] for key in above) == 1
    ablation = read_variants('ablation', TrainConfig()).values()
    assert [len(changes) for changes in ablation] == [0] + 7 * [1]


def test_settings_of_a_sweep_are_combined_and_what_follows_from_them_follows():
    words = ['--sweep=learning_rate=1e-3,2e-3 conv=0,4', '--max_iters=7', '--seeds=2', '--save=x']
    config = load_config(bench.BenchConfig, words)
    found = bench.words_of(sweep_variants(config.sweep), config, words)
    assert list(found) == ['learning_rate=1e-3, conv=0', 'learning_rate=1e-3, conv=4',
                           'learning_rate=2e-3, conv=0', 'learning_rate=2e-3, conv=4']
    assert list(found['learning_rate=2e-3, conv=4']) == [1337, 1338]
    one = read(found['learning_rate=2e-3, conv=4'][1338])
    assert (one.conv, one.max_iters, one.seed, one.min_lr) == (4, 7, 1338, pytest.approx(2e-4))


# -----------------------------------------------------------------------------
# runs


@pytest.fixture
def trainings(monkeypatch, tmp_path):
    """The words that train.py was called with, which writes the files of a run that ended."""
    made = []

    def run_command(name, argv, tree):
        made.append(argv)
        options = dict(word[2:].split('=', 1) for word in argv if word.startswith('--'))
        folder = Path(options['out_dir'])
        if options.get('seed') == '7' and options.get('conv') == '4':
            raise UserError('no convolution here')
        folder.mkdir(parents=True, exist_ok=True)
        row = {'iter': 9, 'tokens': 9, 'elapsed_s': 1.0, 'tokens_per_s': 9.0, 'loss': 3.0,
               'train_loss': 3.0, 'val_loss': 3.0}
        (folder / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
        ending = 'SIGTERM' if len(made) == 3 else 'all iterations are done'
        (folder / 'run.json').write_text(json.dumps({
            'changed': {}, 'config': {'dataset': 'here'}, 'dtype': 'float32',
            'ending': ending}))
        if len(made) == 4:
            raise KeyboardInterrupt
    monkeypatch.setattr(runs, 'run_command', run_command)
    monkeypatch.chdir(tmp_path)
    return made


def folders_of(trainings):
    return [argument.removeprefix('--out_dir=') for argv in trainings for argument in argv
            if argument.startswith('--out_dir=out-experiments')]


def test_a_sweep_keeps_its_runs_by_setting_and_seed_and_does_not_repeat_what_has_ended(trainings):
    words = ['--sweep=init_from=gpt2,a/b', '--seeds=2', '--seed=5', '--device=cpu']
    with pytest.raises(KeyboardInterrupt):
        bench.main(words)
    folder = 'out-experiments/sweep-init_from'
    names = [f'{folder}/init_from={value},seed={seed}'
             for seed in (5, 6) for value in ('gpt2', 'a%2fb')]
    assert folders_of(trainings) == names  # seed after seed
    bench.main(words)  # the third was stopped by a signal, the fourth killed
    assert folders_of(trainings[4:]) == names[2:]
    bench.main(words)
    assert len(trainings) == 6
    bench.main([*words, '--max_iters=99'])  # other settings begin anew
    assert folders_of(trainings[6:]) == names
    assert sorted(path.suffix for path in Path('out-experiments').iterdir()) == ['', '.csv', '.png']


def test_a_run_that_never_began_does_not_get_the_numbers_of_other_settings(
        trainings, tmp_path, monkeypatch):
    assert train_once(['--n_layer=2'], tmp_path / 'run')['final_loss'] == 3.0
    for _ in range(2):
        with pytest.raises(UserError, match='no convolution here'):
            train_once(['--seed=7', '--conv=4'], tmp_path / 'run')
    assert len(trainings) == 3


SEEDS = 5, 6
RECIPE = """from numbers_of_mine import steps
max_iters = steps
dataset = 'bare'
device = 'cpu'
"""


@pytest.fixture
def sweep(trainings, char_data, tmp_path, monkeypatch):
    """sweep(*words) → how many of its two runs were trained. The code is that of tmp_path/code, the
    recipe imports a file of the working directory, and the first run prepares the data."""
    trainings += [[]] * 5  # none of these is stopped
    for name in ('train.py', 'model.py', 'configurator.py', 'plaingpt/weights.py'):
        Path('code', name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, Path('code', name))
    monkeypatch.setattr(runs, 'ROOT', tmp_path / 'code')
    monkeypatch.syspath_prepend(tmp_path)
    run_command = runs.run_command

    def prepare_and_train(*arguments):  # as train.py does with a small corpus
        if not Path('data/bare').exists():
            shutil.copytree(char_data, 'data/bare', ignore=lambda *_: ['meta.json'])
        run_command(*arguments)
    monkeypatch.setattr(runs, 'run_command', prepare_and_train)
    Path('recipe.py').write_text(RECIPE)
    Path('numbers_of_mine.py').write_text('steps = 9\n')
    Path('weights').mkdir()
    Path('weights/model.safetensors').write_text('weights')

    def sweep(*words):
        before = len(trainings)
        sys.modules.pop('numbers_of_mine', None)
        for seed in SEEDS:
            train_once(['recipe.py', '--init_from=weights', f'--seed={seed}', *words],
                       f'runs/{seed}', runs.ROOT)
        return len(trainings) - before
    return sweep


def append(path, text='\n'):
    with open(path, 'a', encoding='utf-8') as f:
        f.write(text)


def change_a_token(path):
    data = bytearray(Path(path).read_bytes())
    data[100] ^= 1
    Path(path).write_bytes(data)


def test_a_run_is_taken_again_only_where_all_that_it_was_made_of_is_the_same(
        sweep, tmp_path, monkeypatch, capsys):
    assert (sweep(), sweep()) == (2, 0)
    for same_in_other_words in ('--beta2=95e-2', '--wandb_run_name=now'):
        assert sweep(same_in_other_words) == 0
    changes = {
        'the recipe': lambda: append('recipe.py', 'beta1 = 0.8\n'),
        'what the recipe does beside': lambda: append('recipe.py', 'import torch.nn\n'),
        'what the recipe imports': lambda: Path('numbers_of_mine.py').write_text('steps = 8888\n'),
        'the model': lambda: append('code/model.py'),
        'another file of the code': lambda: append('code/plaingpt/weights.py'),
        'weights to start from': lambda: Path('weights/model.safetensors').write_text('others'),
        'training tokens': lambda: change_a_token('data/bare/train.bin'),
        'validation tokens': lambda: change_a_token('data/bare/val.bin'),
        'torch': lambda: monkeypatch.setattr(torch, '__version__', '99'),
        'the machine': lambda: monkeypatch.setattr(runs, 'machine_name', lambda device: 'another'),
        'damaged numbers': lambda: [Path(f'runs/{seed}/metrics.jsonl').write_text('[]\n')
                                    for seed in SEEDS],
        'damaged facts': lambda: [Path(f'runs/{seed}/run.json').write_text('[]')
                                  for seed in SEEDS],
        'what is known of them': lambda: [Path(f'runs/{seed}/asked.json').write_text('["--a"]')
                                          for seed in SEEDS]}
    for name, change in changes.items():
        change()
        assert (sweep(), sweep()) == (2, 0), name
    assert 'its run had other code, and is in' in capsys.readouterr().err
    assert Path('runs/5/old-001/metrics.jsonl').exists()


def test_results_have_the_date_of_their_runs_and_code_that_changed_meanwhile_is_told(
        trainings, monkeypatch, capsys):
    trainings += [[]] * 5
    words = ['--sweep=conv=0,4', '--seeds=1', '--device=cpu']
    bench.main(words)
    asked = Path('out-experiments/sweep-conv/conv=0,seed=1337/asked.json')
    made_of = json.loads(asked.read_text())
    asked.write_text(json.dumps({**made_of, 'ended': '2020-01-02'}))
    capsys.readouterr()
    bench.main(words)
    said, told = capsys.readouterr()
    assert f', 2020-01-02 to {made_of["ended"]}:' in said and 'changed' not in told
    first, _ = csv.DictReader(open('out-experiments/sweep-conv.csv'))
    assert first['date'] == '2020-01-02' and first['code'] == made_of['code']
    ingredients = runs.ingredients
    monkeypatch.setattr(runs, 'ingredients', lambda words: {
        **ingredients(words), 'code': 'later' if '--conv=4' in words else made_of['code']})
    bench.main(words)
    assert 'changed while these runs trained' in capsys.readouterr().err


def test_a_run_that_fails_is_told_and_the_others_stand_but_the_first_ends_all(
        trainings, capsys):
    trainings += [[]] * 5  # none of these is stopped
    bench.main(['--sweep=conv=0,4', '--seeds=2', '--seed=6', '--device=cpu'])
    rows = list(csv.DictReader(open('out-experiments/sweep-conv.csv')))
    assert [row['final_loss'] for row in rows] == ['3.0', '3.0', '3.0', '']
    said, told = capsys.readouterr()
    assert 'conv=4, seed 7: no convolution here' in told
    assert '| seed 7: no convolution here |' in said and rows[3]['problem'] == 'no convolution here'
    with pytest.raises(UserError, match='no convolution here'):
        bench.main(['--sweep=conv=4,0', '--seed=7', '--device=cpu', '--save=other'])


@pytest.mark.parametrize('stderr, line', [
    ('warning: a\nerror: b\nerror: c\n', 'b'), ('a\nb\n', 'b'), ('', ''),
    ('Traceback (most recent call last):\n  File "a.py", line 3\n    f()\nKeyError: 1\n\n'
     'Traceback (most recent call last):\n  File "b.py"\nValueError: x\n  more of it\na note\n',
     'ValueError: x')])
def test_the_line_of_an_error_is_that_of_the_exception_and_no_note(stderr, line):
    assert runs.error_line(stderr) == line


def test_a_step_takes_the_median_and_nothing_else_counts(tmp_path):
    lines = [{'iter': 0, 'train_loss': 4.0, 'val_loss': 4.0}]
    lines += [{'iter': 5 * k, 'tokens_per_s': rate}
              for k, rate in ((1, 8.0), (2, 256.0), (3, 256.0), (4, 512.0))]
    lines += [{'iter': 20, 'train_loss': 2.0, 'val_loss': 3.0}]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(  # 256 tokens a step
        {**line, 'tokens': 256 * line['iter'], 'elapsed_s': 1.0}) + '\n' for line in lines))
    (tmp_path / 'run.json').write_text(json.dumps({
        'changed': {}, 'config': {'dataset': 'here'}, 'dtype': 'float32'}))
    assert summarize(tmp_path) == {'step_ms': 1000.0, 'final_loss': 3.0, 'seconds': 1.0,
                                   'iterations': 20, 'minutes': 0, 'dtype': 'float32',
                                   'dataset': 'here'}


def test_a_run_is_a_training(char_data, tmp_path, monkeypatch):
    def run_in_a_fork(command, **_):
        log = tmp_path / 'log'
        _, script, *argv = command
        assert script.endswith('/train.py')
        code = exit_code(fork(train.main, *argv, log=log))
        return SimpleNamespace(returncode=code, stderr=log.read_text())

    monkeypatch.setattr(runs, 'subprocess', SimpleNamespace(run=run_in_a_fork))
    words = [f'--dataset={char_data}', '--n_layer=1', '--n_head=2', '--n_embd=32',
             '--block_size=16', '--batch_size=8', '--max_iters=20', '--eval_interval=10',
             '--eval_iters=2', '--log_interval=20', '--warmup_iters=2', '--device=cpu',
             '--learning_rate=1e-2']
    found = train_once(words, tmp_path / 'run')
    assert (tmp_path / 'run/report.md').exists()
    assert found['final_loss'] < 4.5 and found['step_ms'] > 0
    with pytest.raises(UserError, match='is not prepared'):
        train_once([*words, f'--dataset={tmp_path}/none'], tmp_path / 'none')


# -----------------------------------------------------------------------------
# their comparison


def test_a_variant_is_compared_with_the_first_at_the_same_seeds():
    found = compare([{'variant': name, 'seed': seed, 'final_loss': loss, 'step_ms': 10.0}
                     for name, losses in (('first', [2.0, 3.0, 2.5]), ('other', [1.5, 2.0, 2.5]),
                                          ('lower', [1.9, 2.91, 2.4]), ('broken', [2.0, None, 2.0]))
                     for seed, loss in enumerate(losses)])
    first, other, lower, broken = found
    assert first['loss'] == 2.5 and first['change'] is None
    # differences of -0.5, -1 and 0: mean -0.5, standard error 0.5/√3, of which 4.3 reach past zero
    assert other['change'] == pytest.approx(-0.5)
    assert other['change_error'] == pytest.approx(0.5 / 3**0.5)
    assert other['clear'] is False and lower['clear'] is True  # -0.1, -0.09, -0.1
    assert broken['loss'] is broken['change'] is None
    assert '-0.5000 ± 0.2887' in format_comparison(found)
    _, other = compare([{'variant': name, 'seed': 1, 'final_loss': loss, 'step_ms': 10.0}
                        for name, loss in (('first', 2.0), ('other', 1.0))])
    assert other['change'] == -1 and other['change_error'] is other['clear'] is None
