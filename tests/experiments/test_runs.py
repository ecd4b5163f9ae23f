"""Variants × seeds: lists of variants, runs that are remembered, their comparison."""

import json
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import exit_code, fails, fork, size_of_png

import bench
import train
from plaingpt.experiments import runs
from plaingpt.experiments.runs import (
    compare,
    describe_best,
    describe_times,
    difference,
    draw_comparison,
    format_comparison,
    read_variants,
    seconds_to,
    summarize,
    sweep_variants,
    train_once,
)
from plaingpt.monitoring import run_record
from plaingpt.system.errors import UserError
from plaingpt.system.files import lock_output_dir
from plaingpt.training.settings import TrainConfig

SMALL = TrainConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=8, max_iters=20,
                    gradient_accumulation_steps=2, log_interval=5, lr_decay_iters=20,
                    warmup_iters=2)

# -----------------------------------------------------------------------------
# lists of variants


def test_the_grid_is_24_different_runs_that_can_run():
    words = ['--batch_size=8', '--block_size=16', '--total_batch_size=1024', '--vocab_size=65']
    config, _, words = bench.read_config([*words, '--seeds=1', '--variants=grid', '--device=cpu'])
    grid = bench.configs_of(read_variants('grid', config), config, words)
    assert len(grid) == len({repr(cell) for cell in grid.values()}) == 24
    tokens = {name: cell.step_tokens() for name, (cell,) in grid.items()}
    assert tokens['accumulation'] == tokens['default'] == 4 * tokens['reduced batch']
    assert tokens['context × 2 & float16'] == 2 * tokens['default']
    sgd, = grid['layers × 2 & SGD + cosine']
    assert (sgd.optimizer, sgd.learning_rate) == ('sgd', 100 * config.learning_rate)


def test_the_ladder_adds_one_change_at_a_time_and_the_ablation_undoes_one():
    ladder = list(read_variants('ladder', SMALL).values())
    for below, above in pairwise(ladder):
        assert sum(below[key] != above[key] for key in above) == 1
    assert [len(changes) for changes in read_variants('ablation', SMALL).values()] == [0] + 6 * [1]


def test_settings_of_a_sweep_are_combined_and_what_follows_from_them_follows():
    words = ['--sweep', 'learning_rate=1e-3,2e-3', '--sweep=conv=0,4', '--max_iters=7',
             '--seeds=2', '--device=cpu']
    config, _, words = bench.read_config(bench.gathered(words, 'sweep'))
    found = bench.configs_of(sweep_variants(config.sweep), config, words)
    assert list(found) == ['learning_rate=1e-3, conv=0', 'learning_rate=1e-3, conv=4',
                           'learning_rate=2e-3, conv=0', 'learning_rate=2e-3, conv=4']
    assert [one.seed for one in found['learning_rate=2e-3, conv=4']] == [1337, 1338]
    one = found['learning_rate=2e-3, conv=4'][0]
    assert (one.conv, one.max_iters, one.min_lr) == (4, 7, pytest.approx(2e-4))  # a tenth


def test_variants_that_name_their_seeds_are_one_run_each():
    config, _, words = bench.read_config(['--sweep=seed=1,2,30', '--device=cpu'])
    found = bench.configs_of(sweep_variants(config.sweep), config, words)
    assert [[one.seed for one in each] for each in found.values()] == [[1], [2], [30]]
    mixed = bench.configs_of({'as it is': {}, 'another': {'seed': 7}}, config, words)
    assert [[one.seed for one in each] for each in mixed.values()] == [[1337], [7]]


def test_a_wrong_list_is_named_before_anything_is_trained(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, 'train_once', None)
    monkeypatch.chdir(tmp_path)
    Path('mine.py').write_text('variants = ["conv"]')
    Path('broken.py').write_text('variants = {1 / 0}')
    Path('typo.py').write_text('variants = {"none": {"conf": 0}}')
    for words, said in (
            ('--sweep=conv=4', 'sweep=conv=4: give a setting, once, and two values'),
            ('--sweep=conf=0,4', "variant 'conf=0': unknown key 'conf'"),
            ('--sweep=conv=0,4 --sweep=conv=0,8', 'sweep=conv=0,8: give a setting, once'),
            ('--sweep=conv=0,4 --profile', 'one at a time'),
            ('--sweep=conv=0,4 --out_dir=here', 'name the folder of all with --save'),
            ('--variants=yours.py', 'variants=yours.py: no such file; it is ablation, grid'),
            ('--variants=mine.py', "variants=mine.py: it must define variants = {'name':"),
            ('--variants=broken.py', 'variants=broken.py: ZeroDivisionError'),
            ('--variants=typo.py', "variant 'none': unknown key 'conf'"),
            ('--variants=grid --batch_size=6', 'batch_size=6')):
        assert said in fails(capsys, monkeypatch, bench.main, *words.split(), '--device=cpu'), words


# -----------------------------------------------------------------------------
# runs


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """(seed, conv) of runs that take no time; convolutions fail at seed 7."""
    made = []

    def train(config, folder, machine):
        made.append((config.seed, config.conv))
        if (config.seed, config.conv) == (7, 4):
            raise UserError('no convolution here')
        loss = 3.0 - config.conv / 10 + config.seed / 100
        folder.mkdir(parents=True)
        (folder / 'metrics.jsonl').write_text(json.dumps(
            {'iter': 1, 'tokens': 9, 'elapsed_s': 1.0, 'val_loss': loss}))
        return {'final_loss': loss, 'step_ms': 10.0, 'memory_bytes': 2**20,
                'curve': [(0.0, 4.0), (1.0, 3.0)]}

    monkeypatch.setattr(runs, 'train_once', train)
    monkeypatch.chdir(tmp_path)
    Path('mine.py').write_text(
        'def variants(config):\n    return {"none": {"conv": 0}, "conv": {"conv": config.conv}}')
    return made


MINE = ['--variants=mine.py', '--conv=4', '--seeds=2', '--seed=5', '--device=cpu',
        '--vocab_size=65']


@pytest.fixture
def trainings(monkeypatch):
    """The words that train.py was called with, which writes the files of a run that ended."""
    made = []

    def run_command(name, argv):
        made.append(argv)
        options = dict(word[2:].split('=', 1) for word in argv)
        folder = Path(options['out_dir'])
        (folder / 'checkpoints/iter-00000001').mkdir(parents=True, exist_ok=True)
        row = {'iter': int(options['max_iters']), 'tokens': 9, 'elapsed_s': 1.0,
               'tokens_per_s': 9.0, 'loss': 3.0, 'peak_memory_bytes': 2**20, 'train_loss': 3.0,
               'val_loss': 3.0}
        (folder / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
        ending = 'SIGTERM' if len(made) == 3 else 'all iterations are done'
        (folder / 'run.json').write_text(json.dumps({
            **{key: {} for key in run_record.KEYS}, 'ending': ending}))
        if len(made) == 4:
            raise KeyboardInterrupt
    monkeypatch.setattr(runs, 'run_command', run_command)
    return made


def folders_of(trainings):
    return [argument.removeprefix('--out_dir=') for argv in trainings for argument in argv
            if argument.startswith('--out_dir=out-experiments')]


def test_a_sweep_keeps_its_runs_by_setting_and_seed_and_goes_on_from_them(
        trainings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ['--sweep=init_from=gpt2,a/b', '--seeds=2', '--seed=5', '--device=cpu']
    with pytest.raises(KeyboardInterrupt):
        bench.main(words)
    folder = 'out-experiments/sweep-init_from-cpu'
    names = [f'{folder}/init_from={value},seed={seed}'
             for seed in (5, 6) for value in ('gpt2', 'a%2fb')]
    assert folders_of(trainings) == names  # seed after seed
    stopped, killed = trainings[2:4]
    said = capsys.readouterr().err
    assert said.startswith(f'4 runs of 150 iterations, in {folder}\n')
    assert f'{names[2]}: its run is incomplete (ending: SIGTERM): the same command goes on' in said
    bench.main(words)  # the third was stopped: it is resumed; the fourth had ended
    assert folders_of(trainings[4:]) == names[2:3]
    assert '--init_from=resume' in trainings[4] and '--init_from=resume' not in stopped + killed
    bench.main(words)
    assert len(trainings) == 5
    bench.main([*words, '--max_iters=99'])  # other settings begin anew
    assert folders_of(trainings[5:]) == names and '--init_from=resume' not in trainings[5]
    assert sorted(path.suffix for path in Path('out-experiments').iterdir()) == [
        '', '.csv', '.md', '.png']
    assert Path(names[0], 'old-001/metrics.jsonl').exists()


def test_a_run_that_never_began_does_not_get_the_numbers_of_other_settings(
        trainings, tmp_path, monkeypatch):
    write_run, config = runs.run_command, bench.load_config(bench.BenchConfig, ['--device=cpu'])

    def refuse(name, argv):
        raise UserError('no room')
    assert train_once(config, tmp_path / 'run', 'here')['final_loss'] == 3.0
    monkeypatch.setattr(runs, 'run_command', refuse)
    for _ in range(2):
        with pytest.raises(UserError, match='no room'):
            train_once(replace(config, n_layer=3), tmp_path / 'run', 'here')
    monkeypatch.setattr(runs, 'run_command', write_run)
    assert train_once(replace(config, n_layer=3), tmp_path / 'run', 'here')['final_loss'] == 3.0


def test_a_second_sweep_leaves_the_folder_of_a_live_run_as_it_is(trainings, tmp_path):
    config, folder = bench.load_config(bench.BenchConfig, ['--device=cpu']), tmp_path / 'run'
    train_once(config, folder, 'here')
    files = {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    with lock_output_dir(folder), pytest.raises(UserError, match='another sweep is writing there'):
        train_once(replace(config, n_layer=3), folder, 'here')
    assert {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()} == files
    assert len(trainings) == 1


def test_a_sweep_that_came_between_does_not_get_the_numbers_of_the_one_that_trained(
        trainings, tmp_path, monkeypatch):
    config, folder = bench.load_config(bench.BenchConfig, ['--device=cpu']), tmp_path / 'run'
    write_run = runs.run_command

    def refuse(name, argv):
        raise UserError('a run is writing there')

    def train_after_another_asked(name, argv):
        monkeypatch.setattr(runs, 'run_command', refuse)
        with pytest.raises(UserError):
            train_once(replace(config, n_layer=3), folder, 'here')
        monkeypatch.setattr(runs, 'run_command', write_run)
        write_run(name, argv)
    monkeypatch.setattr(runs, 'run_command', train_after_another_asked)
    train_once(config, folder, 'here')
    train_once(replace(config, n_layer=3), folder, 'here')
    assert len(trainings) == 2 and '--n_layer=3' in trainings[1]
    assert (folder / 'old-001/metrics.jsonl').exists()


def test_a_run_of_another_length_is_not_taken_for_the_one_that_is_asked_for(trainings, tmp_path):
    config, folder = bench.load_config(bench.BenchConfig, ['--device=cpu']), tmp_path / 'run'
    train_once(config, folder, 'here')
    metrics = folder / 'metrics.jsonl'
    metrics.write_text(json.dumps({**json.loads(metrics.read_text()), 'iter': 7}))
    train_once(config, folder, 'here')
    assert len(trainings) == 2 and '--init_from=resume' not in trainings[1]
    assert (folder / 'old-001/metrics.jsonl').exists()


def test_a_run_that_fails_is_told_and_the_others_stand(trained, capsys):
    bench.main([*MINE, '--seeds=3', '--json'])
    found = json.loads(capsys.readouterr().out)
    assert [row['final_loss'] for row in found['rows']][-2:] == [3.07, None]
    assert 'conv, seed 7 failed: no convolution here' in found['table']


def test_a_first_run_that_fails_ends_the_experiment(trained):
    with pytest.raises(UserError, match='no convolution here'):
        bench.main(['--sweep=conv=4,0', '--seed=7', '--device=cpu'])


def test_a_step_takes_the_median_and_nothing_else_counts(tmp_path):
    lines = [{'iter': 0, 'train_loss': 4.0, 'val_loss': 4.0}]
    lines += [{'iter': 5 * k, 'tokens_per_s': rate, 'peak_memory_bytes': 100 * k}
              for k, rate in ((1, 8.0), (2, 256.0), (3, 256.0), (4, 512.0))]
    lines += [{'iter': 20, 'train_loss': 2.0, 'val_loss': 3.0}]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(  # 256 tokens a step
        {**line, 'tokens': 256 * line['iter'], 'elapsed_s': 1.0}) + '\n' for line in lines))
    assert summarize(tmp_path) == {
        'memory_bytes': 400, 'step_ms': 1000.0, 'final_loss': 3.0, 'curve': [(0.0, 4.0),
                                                                             (20.0, 3.0)]}


def test_a_run_is_a_training(char_data, tmp_path, monkeypatch):
    def run_in_a_fork(command, **_):
        log = tmp_path / 'log'
        _, _, script, *argv = command
        assert script == 'train'
        code = exit_code(fork(train.main, *argv, log=log))
        return SimpleNamespace(returncode=code, stderr=log.read_text())

    monkeypatch.setattr(runs, 'subprocess', SimpleNamespace(run=run_in_a_fork))
    words = [f'--dataset={char_data}', '--n_layer=1', '--n_head=2', '--n_embd=32',
             '--block_size=16', '--batch_size=8', '--max_iters=20', '--eval_interval=10',
             '--eval_iters=2', '--log_interval=50', '--warmup_iters=2', '--device=cpu',
             '--learning_rate=1e-2']
    found = train_once(bench.load_config(bench.BenchConfig, words), tmp_path / 'run', 'here')
    assert (tmp_path / 'run/report.md').exists()
    seconds = [seconds for seconds, _ in found['curve']]
    assert seconds == pytest.approx([0, 10 * found['step_ms'] / 1e3, 20 * found['step_ms'] / 1e3])
    assert found['final_loss'] < found['curve'][0][1] and found['memory_bytes'] > 2**20
    with pytest.raises(UserError, match='is not prepared'):
        train_once(bench.load_config(bench.BenchConfig, [*words, f'--dataset={tmp_path}/none']),
                   tmp_path / 'none', 'here')


# -----------------------------------------------------------------------------
# their comparison


def made_runs(folder, **losses):
    """{name: final losses of its seeds} → runs that fall linearly from 4 within a second."""
    found = []
    for name, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            where = folder / f'{name} {seed}'
            where.mkdir(parents=True, exist_ok=True)
            (where / 'metrics.jsonl').write_text(''.join(json.dumps(
                {'iter': i, 'tokens': 9 * i, 'elapsed_s': i, 'val_loss': y}) + '\n'
                for i, y in enumerate((4.0, loss))))
            found.append({'variant': name, 'seed': seed, 'folder': str(where), 'final_loss': loss,
                          'failed': '' if loss else 'no', 'step_ms': 10.0, 'memory_bytes': 2**20,
                          'curve': [(0.0, 4.0), (1.0, loss)]})
    return found


def test_a_variant_is_compared_with_the_first_at_the_same_seeds(tmp_path):
    (first, better, lower), target = compare(made_runs(
        tmp_path, first=[2.0, 3.0, 2.5], better=[1.5, 2.0, 2.5], lower=[1.9, 2.91, 2.4]))
    assert first['loss'] == 2.5 and target == 2.62  # 5% above
    assert first['change'] is None and first['loss_error'] == pytest.approx(0.5 / 3**0.5)
    assert better['change'] == pytest.approx(-0.5)
    assert better['change_error'] == pytest.approx(0.5 / 3**0.5)  # -0.5, -1 and 0
    assert better['clear'] is False and lower['clear'] is True  # a small change, but at each seed


def test_a_difference_of_two_errors_is_within_the_seeds_where_these_are_three():
    assert difference([1.0, 1.0, 1.0], [0.9, 0.8, 0.98])[2] is False  # 2.3 errors, of 4.3
    assert difference([1.0] * 3 * 9, [0.9, 0.8, 0.98] * 9)[2] is True
    assert difference([1.0], [0.5]) == (0.5, None, None)


def test_what_failed_was_not_reached_or_has_one_seed_has_no_number(tmp_path):
    found = made_runs(tmp_path, first=[2.0, 2.0], worse=[2.5, 2.6], broken=[2.0, None])
    rows, target = compare(found, 2.2)
    _, worse, broken = rows
    assert worse['target_s'] is None and broken['loss'] is None
    text = format_comparison(found, rows, target)
    assert 'broken, seed 1 failed: no' in text and '+0.5500 ± 0.0500' in text
    draw_comparison(found, rows, tmp_path / 'runs.png')
    assert size_of_png(tmp_path / 'runs.png') > (600, 200)
    with pytest.raises(UserError, match='no picture'):
        draw_comparison(found, rows[2:], tmp_path / 'none.png')
    found = made_runs(tmp_path, first=[2.0], other=[1.0])
    (_, other), target = compare(found)
    assert other['change'] == -1 and other['change_error'] is other['clear'] is None
    text = format_comparison(found, compare(found)[0], 2)
    assert 'With one seed nothing can be said' in text and '| more than chance |' in text


def test_the_best_is_named_with_those_that_the_seeds_tell_from_it(tmp_path):
    rows, _ = compare(made_runs(tmp_path, far=[3.0, 3.01, 3.02], near=[2.0, 2.2, 2.1],
                                best=[1.99, 2.1, 2.11]))
    assert describe_best(rows) == (
        'best ends lowest, at 2.0667',
        'It is below far by more than chance; its distance to near may be chance')


def test_times_that_differ_for_learning_rates_alone_are_called_noise():
    rows = [{'step_ms': 10.0}, {'step_ms': 13.0}]
    slow, fast = (replace(SMALL, learning_rate=rate, min_lr=rate / 10) for rate in (1e-3, 1e-2))
    said, = describe_times({'a': [slow], 'b': [fast]}, rows)
    assert said.startswith('Times of a step differ by 30% though only learning_rate and min_lr')
    assert not describe_times({'a': [slow], 'b': [replace(fast, n_layer=3)]}, rows)
    assert not describe_times({'a': [slow], 'b': [fast]}, [rows[0], {'step_ms': None}])
    assert {field.name for field in fields(TrainConfig)} >= runs.SAME_WORK


def test_the_time_to_a_loss_lies_between_evaluations():
    curve = [(0.0, 4.0), (10.0, 3.0), (20.0, 2.0), (30.0, 2.5), (40.0, 1.5)]
    assert seconds_to(2.5, curve) == 15.0 and seconds_to(2.0, curve) == 20.0
    assert seconds_to(1.0, curve) is None and seconds_to(2.5, [(0.0, 4.0), (9.0, None)]) is None
    # No line can be drawn from before the first evaluation, or from one that was not finite.
    assert seconds_to(5.0, curve) == 0.0
    assert seconds_to(2.5, [(0.0, 4.0), (9.0, None), (20.0, 2.0)]) == 20.0
