"""How long a run takes, and how many iterations fit in --minutes."""

import json

import pytest
import torch
from helpers import fails, lines, same, train_processes, weights

import train
from configurator import load_config
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import time_budget
from plaingpt.training.settings import TrainConfig
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
    tiny = [*tiny, '--max_iters=3', '--dropout=0.2', f'--optimizer={optimizer}',
            '--sample_tokens=5']
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
        assert ('it keeps max_iters=20: give a larger --max_iters' in printed) == (resume == again)
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
    cores = 2
    monkeypatch.setattr(torch, 'get_num_threads', lambda: cores)

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


def test_in_a_recipe_for_own_text_weights_decay_faster_where_the_text_is_short(char_data):
    def decay(*argv):
        return load_config(TrainConfig, ['config/own_text.py', *argv]).weight_decay
    assert decay('--dataset=not_prepared') == pytest.approx(2048 / 1e6 / 6e-3)
    assert decay('--dataset=not_prepared', '--batch_size=4') == pytest.approx(1024 / 1e6 / 6e-3)
    assert decay(f'--dataset={char_data}') == 3.0
