"""How long a run takes, and how many iterations fit in --minutes."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import fails, launch, lines, same, weights

import train
from configurator import load_config
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import dtype_choice, stopwatch
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import Start
from plaingpt.training.stopwatch import Deadline, Times


@pytest.fixture
def tiny(tiny):
    return [option for option in tiny if not option.startswith(('--max_iters', '--lr_decay'))]


def losses(out):
    return [(row['iter'], row.get('loss'), row.get('val_loss')) for row in lines(out, 'iter')]


@pytest.mark.parametrize('optimizer', ['adamw', 'muon', 'normuon', 'sgd'])
def test_timing_a_step_changes_no_bit_of_the_run(tiny, tmp_path, monkeypatch, optimizer):
    tiny = [*tiny, '--max_iters=3', '--dropout=0.2', f'--optimizer={optimizer}', '--report=True']
    train.main([*tiny, f'--out_dir={tmp_path}/timed'])
    monkeypatch.setattr(stopwatch, 'measure', lambda *_: Times(1.0, 1.0))
    train.main([*tiny, f'--out_dir={tmp_path}/not'])
    assert same(weights(tmp_path / 'timed'), weights(tmp_path / 'not'))
    assert losses(tmp_path / 'timed') == losses(tmp_path / 'not')


def test_before_a_run_of_hours_on_a_cpu_a_shorter_way_is_named(tiny, capsys, monkeypatch):
    monkeypatch.setattr(stopwatch, 'measure', lambda *_: Times(0.0, 9e3))
    train.main([*tiny, '--max_iters=1'])
    out = capsys.readouterr().out
    assert 'about 5h00m for 1 iteration' in out and '--minutes=10' in out


# -----------------------------------------------------------------------------
# minutes


def fitted(monkeypatch, times, given=(), **settings):
    """→ the TrainConfig that a run gets"""
    config = TrainConfig(**{'eval_interval': 230, 'log_interval': 50, 'eval_iters': 20, **settings})
    monkeypatch.setattr(stopwatch, 'measure', lambda *_: times)
    deadline = SimpleNamespace(left_s=lambda: 60 * config.minutes)
    run = SimpleNamespace(config=config, progress=SimpleNamespace(), deadline=deadline)
    stopwatch.fit_minutes(run, given, None, None)
    assert run.progress.eval_sequences == run.config.eval_sequences()
    return run.config


def test_a_run_of_minutes_draws_eight_points_and_evaluates_for_a_tenth_of_the_time(monkeypatch):
    fast, slow = Times(0.01, 0.2), Times(0.8, 11.0)
    for minutes, times in ((0.6, slow), (1, slow), (1, fast), (10, slow), (600, fast)):
        config = fitted(monkeypatch, times, minutes=minutes)
        evaluations = 1 + math.ceil(config.max_iters / config.eval_interval)
        evaluation = times.evaluation * config.eval_iters / 20
        assert evaluations >= 8 <= config.max_iters / config.log_interval
        assert evaluations * evaluation < max(1.15 * 6 * minutes, 12 * times.evaluation / 20)
        assert config.max_iters * times.step + evaluations * evaluation <= 60 * minutes + 1e-6
        assert config.lr_decay_iters == config.max_iters >= 10 * config.warmup_iters
    for given in ({'eval_interval'}, {'log_interval'}, {'eval_iters'}):
        config = fitted(monkeypatch, slow, given, minutes=1)
        assert [getattr(config, key) for key in given] == [
            {'eval_interval': 230, 'log_interval': 50, 'eval_iters': 20}[key] for key in given]


class Machine:
    """A run of 100 s on a machine whose steps take `step_s(seconds so far)`."""

    def __init__(self, step_s, log_interval=5):
        config = TrainConfig(minutes=100 / 60, log_interval=log_interval, eval_interval=100,
                             max_iters=990, lr_decay_iters=990, warmup_iters=90)
        self.now, self.paused_s, self.evaluations, self.step_s = 1.0, 1.0, 1, step_s
        self.config, self.metrics = config, self
        self.progress = SimpleNamespace(iter_num=0)
        self.deadline = Deadline(config, SimpleNamespace(resumed=False, began=0.0))

    def perf_counter(self):
        return self.now

    def train(self):
        """→ the learning rates of its steps"""
        rates, config = [], self.config
        while self.progress.iter_num < self.config.max_iters:
            rates.append(train.get_lr(self.progress.iter_num, self.config))
            self.now += self.step_s(self.now)
            self.progress.iter_num += 1
            if self.progress.iter_num % config.log_interval == 0:
                self.deadline.decide(self)
        self.now += 1.0  # the last evaluation
        return rates


@pytest.mark.parametrize('step_s', [
    lambda now: 0.1, lambda now: 0.1 if now < 40 else 0.3, lambda now: 0.3 if now < 50 else 0.1,
    lambda now: 0.05, lambda now: 0.2 if int(now) % 7 < 3 else 0.1],
    ids=['steady', 'busier', 'idler', 'fast', 'now and then'])
def test_a_run_of_minutes_ends_in_time_and_with_the_rate_at_its_end_on_a_busy_machine(
        step_s, monkeypatch):
    machine = Machine(step_s)
    monkeypatch.setattr(stopwatch, 'time', machine)
    rates = machine.train()
    assert machine.now == pytest.approx(100, abs=3)
    assert max(rates) > 5e-4 and rates[-1] < 6.2e-5


def test_minutes_win_over_a_config_file_and_a_checkpoint_knows_the_end(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(stopwatch, 'measure', lambda *_: Times(0.01, 0.01))
    tiny = [option for option in tiny if not option.startswith('--eval_')]
    (tmp_path / 'recipe.py').write_text('max_iters = 40\nlr_decay_iters = 30\neval_interval = 230\n'
                                        'eval_iters = 20\nlog_interval = 50\n')
    train.main([*tiny, str(tmp_path / 'recipe.py'), '--minutes=0.05'])
    assert len(lines(tmp_path / 'out', 'val_loss')) >= 2
    state = checkpoints.find(tmp_path / 'out').state
    config = json.loads((tmp_path / 'out/run.json').read_text())['config']
    assert state['left_s'] < 3
    assert state['iter_num'] == config['max_iters'] == config['lr_decay_iters'] \
        == state['config']['max_iters']
    assert state['eval_sequences'] == 4 * state['config']['eval_iters']


def fail_at(iter_num):
    original = train.get_lr

    def get_lr(it, config):
        if it == iter_num:
            raise UserError('in the middle')
        return original(it, config)
    return get_lr


@pytest.mark.parametrize('again', [['--init_from=resume'], ['--init_from=auto', '--minutes=1']])
def test_a_run_of_minutes_that_was_stopped_goes_on_to_the_end_that_it_had(
        tiny, tmp_path, monkeypatch, again):
    monkeypatch.setattr(stopwatch, 'measure', lambda *_: Times(0.2, 0.1))
    with monkeypatch.context() as patch, pytest.raises(UserError, match='in the middle'):
        patch.setattr(Deadline, 'decide', lambda *_: None)  # of some 12 iterations
        patch.setattr(train, 'get_lr', fail_at(9))
        train.main([*tiny, '--minutes=0.05', f'--out_dir={tmp_path}/out'])
    before = checkpoints.find(tmp_path / 'out').state
    words = [*tiny, *again] if len(again) > 1 else again
    train.main([*words, f'--out_dir={tmp_path}/out', '--log_interval=1'])
    after = checkpoints.find(tmp_path / 'out').state
    assert after['left_s'] < before['left_s'] < 60 * 0.05
    assert before['config']['max_iters'] > before['iter_num'] == 9
    assert after['config']['max_iters'] == after['iter_num'] > 9


def test_minutes_of_a_run_that_goes_on_are_added_to_it(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Deadline, 'decide', lambda *_: None)
    train.main([*tiny, '--max_iters=6'])
    state = checkpoints.find(tmp_path / 'out').state
    minutes = 20 / 6 * max(1.0, state['elapsed_s']) / 60
    train.main(['--init_from=resume', f'--minutes={minutes}', f'--out_dir={tmp_path}/out'])
    assert '20 iterations' in capsys.readouterr().out
    saved = checkpoints.find(tmp_path / 'out').state
    assert saved['iter_num'] == saved['config']['lr_decay_iters'] == 26
    assert state['left_s'] is None and saved['left_s'] < 60 * minutes
    # The command says how many: then no clock does.
    train.main(['--init_from=resume', '--max_iters=28', f'--out_dir={tmp_path}/out'])
    assert checkpoints.find(tmp_path / 'out').state['left_s'] is None


def test_minutes_that_contradict_or_are_too_few_are_refused_and_leave_nothing(
        tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stopwatch, 'measure', lambda *_: Times(1.0, 1.0))
    before = sorted(tmp_path.rglob('*'))
    for options, words in ((['--minutes=1', '--max_iters=9'], '--max_iters'),
                           (['--minutes=1', '--lr_decay_iters=9'], '--lr_decay_iters'),
                           (['--minutes=-1'], 'at least 0'), (['--minutes=0.05'], 'too short')):
        assert words in fails(capsys, monkeypatch, train.main, *tiny, *options)
        assert sorted(tmp_path.rglob('*')) == before


@pytest.mark.slow
def test_two_processes_agree_on_the_iterations_that_fit(tiny, tmp_path):
    launch(train.main, 2, tmp_path, *tiny, '--minutes=0.1', '--eval_interval=10000',
                    '--log_interval=10', '--check=False')
    state = checkpoints.find(tmp_path / 'out').state
    assert state['iter_num'] == state['config']['max_iters'] > 0


# -----------------------------------------------------------------------------
# a recipe whose size follows from the time


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


def test_a_resumed_run_on_own_text_has_the_size_that_it_began_with(trained, monkeypatch):
    monkeypatch.setattr(dtype_choice, 'core_speed', lambda dtype: 1e13)
    state = checkpoints.find(trained).state['config']
    for init_from in ('resume', 'auto'):
        config = load_config(TrainConfig, [
            'config/own_text.py', f'--init_from={init_from}', f'--out_dir={trained}',
            '--dataset=not_prepared'], read_saved=Start().read)
        for key in ('n_layer', 'n_head', 'n_embd', 'max_iters'):
            assert getattr(config, key) == state[key]


@pytest.mark.slow
def test_processes_whose_config_file_measured_something_else_agree(tiny, tmp_path):
    (tmp_path / 'recipe.py').write_text(
        'import os\nn_embd = 32 * (1 + int(os.environ["RANK"]))\n')
    words = [word for word in tiny if not word.startswith('--n_embd')]
    launch(train.main, 2, tmp_path, str(tmp_path / 'recipe.py'), *words, '--max_iters=2')
    assert checkpoints.find(tmp_path / 'out').state['model']['n_embd'] == 32
