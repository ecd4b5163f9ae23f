"""How long a run takes, and how many iterations fit in --minutes."""

import json
import math

import pytest
import torch
from helpers import fails, lines, same, train_processes, weights

import train
from configurator import load_config
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import dtype_choice, time_budget
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import Start
from plaingpt.training.time_budget import Times


@pytest.fixture
def tiny(tiny):
    return [option for option in tiny if not option.startswith(('--max_iters', '--lr_decay'))]


def slow_steps(*_):
    """With an evaluation every 3 iterations, 20 iterations take 20 × 1 + 8 × 1 + 7 × 1 = 35 s."""
    return Times(step=1.0, evaluation=1.0, save=1.0)


def losses(out):
    return [(row['iter'], row.get('loss'), row.get('val_loss')) for row in lines(out, 'iter')]


@pytest.mark.parametrize('optimizer', ['adamw', 'muon', 'normuon', 'sgd'])
def test_timing_a_step_changes_no_bit_of_the_run(tiny, tmp_path, monkeypatch, optimizer):
    tiny = [*tiny, '--max_iters=3', '--dropout=0.2', f'--optimizer={optimizer}', '--report=True']
    train.main([*tiny, f'--out_dir={tmp_path}/timed'])
    monkeypatch.setattr(time_budget, 'measure', slow_steps)
    train.main([*tiny, f'--out_dir={tmp_path}/not'])
    assert same(weights(tmp_path / 'timed'), weights(tmp_path / 'not'))
    assert losses(tmp_path / 'timed') == losses(tmp_path / 'not')


def test_the_time_of_a_run_counts_steps_evaluations_and_saves():
    config = TrainConfig(eval_interval=10, checkpoint_interval=6)
    times = Times(step=1.0, evaluation=100.0, save=10_000.0)
    assert times.of_run(config, 12) == 12 + 3 * 100 + (2 + 2) * 10_000
    assert times.of_run(config, 0) == 100


def test_a_run_of_minutes_is_the_run_of_as_many_iterations_also_when_it_is_resumed(
        tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_budget, 'measure', slow_steps)
    tiny, out = [*tiny, '--dropout=0.2'], tmp_path / 'out'
    train.main([*tiny, '--minutes=0.59'])
    printed = capsys.readouterr().out
    assert 'max_iters=20' in printed and printed.count('epochs') == 1  # of this length alone
    train.main([*tiny, '--max_iters=20', f'--out_dir={tmp_path}/given'])
    assert same(weights(out), weights(tmp_path / 'given'))
    assert losses(out) == losses(tmp_path / 'given')
    configs = [checkpoints.find(folder).state['config'] for folder in (out, tmp_path / 'given')]
    assert {**configs[0], 'out_dir': ''} == {**configs[1], 'out_dir': ''}

    again = [*tiny, '--minutes=9', '--init_from=auto']
    for n, resume in enumerate((['--init_from=resume'], again)):
        half = f'--out_dir={tmp_path}/half{n}'
        with monkeypatch.context() as patch, pytest.raises(UserError, match='in the middle'):
            patch.setattr(train, 'get_lr', fail_at(9))
            train.main([*tiny, '--minutes=0.59', half])
        capsys.readouterr()
        train.main([*resume, half])
        printed = capsys.readouterr().out
        assert 'changed:' not in printed
        assert ('goes on to max_iters=20' in printed) == (resume == again)
        assert same(weights(tmp_path / f'half{n}'), weights(out))


def fail_at(iter_num):
    original = train.get_lr

    def get_lr(it, config):
        if it == iter_num:
            raise UserError('in the middle')
        return original(it, config)
    return get_lr


@pytest.mark.slow
def test_two_processes_agree_on_the_iterations_that_fit(tiny, tmp_path):
    train_processes(2, tmp_path, *tiny, '--minutes=0.1', '--eval_interval=10000',
                    '--log_interval=1000', '--check=False')
    state = checkpoints.find(tmp_path / 'out').state
    assert state['iter_num'] == state['config']['max_iters'] > 0


def test_minutes_win_over_the_iterations_of_a_config_file(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(time_budget, 'measure', slow_steps)
    (tmp_path / 'recipe.py').write_text(
        'max_iters = 40\nlr_decay_iters = 30\n')
    train.main([*tiny, str(tmp_path / 'recipe.py'), '--minutes=0.59', '--warmup_iters=9'])
    config = json.loads((tmp_path / 'out/run.json').read_text())['config']
    assert [config[key] for key in ('max_iters', 'warmup_iters', 'lr_decay_iters', 'minutes')] \
        == [20, 2, 20, 0]


def test_minutes_that_contradict_or_are_too_few_are_refused_and_leave_nothing(
        tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_budget, 'measure', slow_steps)
    before = sorted(tmp_path.rglob('*'))
    for options, words in ((['--minutes=1', '--max_iters=9'], '--max_iters'),
                           (['--minutes=1', '--lr_decay_iters=9'], '--lr_decay_iters'),
                           (['--minutes=-1'], 'at least 0'), (['--minutes=0.05'], '--minutes=0.1')):
        assert words in fails(capsys, monkeypatch, train.main, *tiny, *options)
        assert sorted(tmp_path.rglob('*')) == before
    with pytest.raises(UserError, match='minutes'):
        train.main([*tiny, '--minutes=1', '--max_iters=9'])


def test_where_a_cpu_takes_hours_the_recipe_for_a_cpu_is_named(tiny, capsys, monkeypatch):
    monkeypatch.setattr(time_budget, 'measure', lambda *_: Times(1000.0, 1.0, 1.0))
    train.main([*tiny, '--max_iters=0', '--eval_iters=1'])
    assert 'about' not in capsys.readouterr().out  # nothing is trained
    monkeypatch.setattr(time_budget, 'measure', lambda *_: Times(0.0, 9e3, 1.0))
    train.main([*tiny, '--max_iters=1'])
    assert 'about 5h00m for 1 iteration' in capsys.readouterr().out
    config = TrainConfig(dataset='shakespeare_char')
    assert 'config/shakespeare_char_cpu_fast.py' in time_budget.recipes(config)
    assert 'config/' not in time_budget.recipes(TrainConfig(dataset='elsewhere'))


def test_a_recipe_for_own_text_is_of_a_size_that_suits_the_text_and_the_time(
        char_data, monkeypatch):
    cores, speed = 2, 1.25e11
    monkeypatch.setattr(torch, 'get_num_threads', lambda: cores)
    monkeypatch.setattr(dtype_choice, 'core_speed', lambda dtype: speed)

    def chosen(*argv):
        config = load_config(TrainConfig, ['config/own_text.py', *argv])
        return config.n_layer, config.n_embd, config.max_iters
    little = f'--dataset={char_data}'  # 90,000 characters
    much = '--dataset=not_prepared'  # taken for a million tokens
    assert chosen(little) == chosen(little, '--minutes=10')
    assert [chosen(little, f'--minutes={minutes}') for minutes in (0.1, 5, 60)] \
        == [(4, 128, 122), (6, 384, 400), (6, 512, 400)]
    assert [chosen(much, f'--minutes={minutes}') for minutes in (0.1, 5, 60)] \
        == [(4, 128, 106), (4, 192, 2484), (6, 448, 3906)]
    assert chosen(much, '--minutes=5', '--n_embd=256') == (4, 256, 1433)
    cores = 8
    assert chosen(much, '--minutes=5') == (6, 256, 3906)
    speed /= 4  # of a CPU without bfloat16
    cores = 2
    assert chosen(much, '--minutes=5')[2] * 192**2 < 2484 * 128**2 * 4 / 3


def test_in_a_recipe_for_own_text_weights_decay_faster_where_the_text_is_short(char_data):
    def decay(*argv):
        return load_config(TrainConfig, ['config/own_text.py', *argv]).weight_decay
    assert decay('--dataset=not_prepared') == pytest.approx(2048 / 1e6 / 6e-3)
    assert decay('--dataset=not_prepared', '--batch_size=4') == pytest.approx(1024 / 1e6 / 6e-3)
    assert decay(f'--dataset={char_data}') == 3.0


def test_a_run_of_minutes_draws_eight_points_and_evaluates_for_a_tenth_of_the_time():
    fast, slow = Times(0.01, 0.2, 0.01), Times(0.8, 11.0, 0.08)
    for minutes, times in ((0.6, slow), (1, slow), (1, fast), (10, slow), (600, fast)):
        config = TrainConfig(minutes=minutes, eval_interval=230, log_interval=50, eval_iters=20)
        found, measured = time_budget.with_points(config, times, frozenset())
        iters = 60 * minutes / times.step - 10 * measured.evaluation / times.step
        evaluations = math.ceil(iters / found.eval_interval)
        assert evaluations >= 8 and iters / found.log_interval >= 8
        least = times.evaluation / 20  # a batch
        assert (1 + evaluations) * measured.evaluation < 1.01 * max(6 * minutes, 11 * least)
        assert measured.evaluation >= times.evaluation * found.eval_iters / 20
    config = TrainConfig(minutes=1, eval_interval=230, log_interval=50)
    for given in ({'eval_interval'}, {'log_interval'}, {'eval_iters'}):
        found, measured = time_budget.with_points(config, slow, given)
        for key in given:
            assert getattr(found, key) == getattr(config, key)
    assert time_budget.with_points(config, slow, {'eval_iters'})[1] == slow


def test_a_short_run_of_minutes_has_a_curve(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(time_budget, 'measure', lambda *_: Times(1.0, 20.0, 0.01))
    recipe = tmp_path / 'recipe.py'
    recipe.write_text('eval_interval = 230\neval_iters = 20\nlog_interval = 50\n')
    tiny = [option for option in tiny if not option.startswith('--eval_')]
    train.main([*tiny, str(recipe), '--minutes=0.5'])
    assert len(lines(tmp_path / 'out', 'val_loss')) >= 8 <= len(lines(tmp_path / 'out', 'loss'))
    state = checkpoints.find(tmp_path / 'out').state
    assert state['eval_sequences'] == 4 * state['config']['eval_iters'] == 4
    train.main([*tiny, str(recipe), '--minutes=0.5', '--eval_interval=9'])
    assert [row['iter'] for row in lines(tmp_path / 'out', 'val_loss')][:2] == [0, 9]


@pytest.mark.parametrize('optimizer', ['adamw', 'normuon'])
def test_minutes_of_a_run_that_goes_on_are_added_to_it(tiny, tmp_path, monkeypatch, capsys,
                                                      optimizer):
    measure = time_budget.measure
    monkeypatch.setattr(time_budget, 'measure', lambda *args: measure(*args) and slow_steps())
    tiny = [*tiny, '--dropout=0.2', f'--optimizer={optimizer}', '--average_decay=0.9']
    for name in ('timed', 'given'):
        train.main([*tiny, '--max_iters=6', f'--out_dir={tmp_path}/{name}'])
    capsys.readouterr()
    resume = ['--init_from=resume', '--eval_interval=3']
    train.main([*resume, '--minutes=0.59', f'--out_dir={tmp_path}/timed'])
    printed = capsys.readouterr().out
    assert '20 iterations more' in printed and 'the end already' not in printed
    train.main([*resume, '--max_iters=26', '--log_interval=1', f'--out_dir={tmp_path}/given'])
    assert same(weights(tmp_path / 'timed'), weights(tmp_path / 'given'))
    assert losses(tmp_path / 'timed') == losses(tmp_path / 'given')
    saved = checkpoints.find(tmp_path / 'timed').state['config']
    assert saved['lr_decay_iters'] == 26 and saved['minutes'] == 0


def test_a_resumed_run_on_own_text_has_the_size_that_it_began_with(trained, monkeypatch):
    monkeypatch.setattr(dtype_choice, 'core_speed', lambda dtype: 1e13)
    state = checkpoints.find(trained).state['config']
    for init_from in ('resume', 'auto'):
        config = load_config(TrainConfig, [
            'config/own_text.py', f'--init_from={init_from}', f'--out_dir={trained}',
            '--dataset=not_prepared'], read_saved=Start().read)
        for key in ('n_layer', 'n_head', 'n_embd', 'max_iters'):
            assert getattr(config, key) == state[key]


def test_the_speed_of_a_core_is_measured_in_the_dtype_of_the_run(monkeypatch):
    asked = []

    def block_seconds(shape, batch_size, dtypes):
        asked.append(dtypes)
        return dict(zip(dtypes, (0.04, 0.02), strict=False))
    monkeypatch.setattr(dtype_choice, 'block_seconds', block_seconds)
    for has_bfloat16, dtype, speed in ((True, 'auto', 2e11), (False, 'auto', 1e11),
                                       (True, 'float32', 1e11)):
        monkeypatch.setattr(dtype_choice, 'cpu_has_bfloat16', lambda has=has_bfloat16: has)
        dtype_choice.core_speed.cache_clear()
        assert dtype_choice.core_speed(dtype) == pytest.approx(speed, rel=0.2)
    assert asked == [('float32', 'bfloat16'), ('float32',), ('float32',)]
    dtype_choice.core_speed.cache_clear()


@pytest.mark.slow
def test_processes_whose_config_file_measured_something_else_agree(tiny, tmp_path):
    (tmp_path / 'recipe.py').write_text(
        'import os\nn_embd = 32 * (1 + int(os.environ["RANK"]))\n')
    words = [word for word in tiny if not word.startswith('--n_embd')]
    train_processes(2, tmp_path, str(tmp_path / 'recipe.py'), *words, '--max_iters=2')
    assert checkpoints.find(tmp_path / 'out').state['model']['n_embd'] == 32
