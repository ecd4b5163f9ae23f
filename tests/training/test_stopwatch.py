"""How long a run takes, and how many iterations fit in --minutes."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import change_steps, fails, launch

import train
from configurator import load_config
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import deadline, dtype_choice
from plaingpt.training.deadline import Deadline
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import Start


@pytest.fixture
def tiny(tiny, trained):
    """Without a length. A run was here before: its imports take no time of one of minutes."""
    return [option for option in tiny if not option.startswith(('--max_iters', '--lr_decay'))]


# -----------------------------------------------------------------------------
# minutes


def test_a_run_of_minutes_evaluates_for_a_tenth_of_the_time_and_on_enough_text(monkeypatch):
    before = {'eval_interval': 230, 'log_interval': 50, 'eval_iters': 20}
    fast, slow = (0.01, 0.2), (0.8, 11.0)  # seconds of a step, of an evaluation

    def fitted(minutes, times, *given):
        """→ the TrainConfig that a run gets"""
        monkeypatch.setattr(deadline, 'time', SimpleNamespace(perf_counter=lambda: 0.0))
        monkeypatch.setattr(deadline, 'measure', lambda *_: times)
        run = SimpleNamespace(
            config=TrainConfig(minutes=minutes, **before), progress=SimpleNamespace(),
            start=SimpleNamespace(checkpoint=None, began=0.0))
        deadline.fit_minutes(run, {*given}, None, None)
        assert run.progress.eval_sequences == run.config.eval_sequences()
        return run.config
    for minutes, times in ((0.6, slow), (1, slow), (1, fast), (10, slow), (600, fast)):
        config, (step_s, evaluation_s) = fitted(minutes, times), times
        evaluations = 1 + math.ceil(config.max_iters / config.eval_interval)
        evaluated_s = evaluations * evaluation_s * config.eval_iters / 20
        assert evaluations >= 5 and config.max_iters / config.log_interval >= 8
        assert config.eval_iters >= 2  # one batch alone has no standard error
        assert evaluations < 8 or config.eval_iters >= 10  # fewer come before smaller ones
        assert evaluated_s < max(1.15 * 6 * minutes, 12 * evaluation_s / 20)
        assert config.max_iters * step_s + evaluated_s <= 60 * minutes + 1e-6
        assert config.lr_decay_iters == config.max_iters >= 10 * config.warmup_iters
    for key, value in before.items():
        assert getattr(fitted(1, slow, key), key) == value


class Machine:
    """A run of 100 s on a machine whose steps take `step_s(seconds so far)`."""

    def __init__(self, step_s, log_interval=5):
        config = TrainConfig(minutes=100 / 60, log_interval=log_interval, eval_interval=100,
                             max_iters=990, lr_decay_iters=990, warmup_iters=90)
        self.now, self.paused_s, self.evaluations, self.step_s = 1.0, 1.0, 1, step_s
        self.config, self.metrics = config, self
        self.progress = SimpleNamespace(iter_num=0)
        self.deadline = Deadline(100.0)

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
    monkeypatch.setattr(deadline, 'time', machine)
    rates = machine.train()
    assert machine.now == pytest.approx(100, abs=3)
    assert max(rates) > 5e-4 and rates[-1] < 6.2e-5


def test_a_run_of_minutes_goes_on_to_the_end_that_it_had_unless_the_command_says_how_far(
        tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(deadline, 'measure', lambda *_: (0.2, 0.1))
    (tmp_path / 'recipe.py').write_text('max_iters = 40\nlr_decay_iters = 30\n')
    resume = ['--init_from=resume', f'--out_dir={tmp_path}/out']

    def stop(n, model, loss):
        if n == 4:
            raise UserError('in the middle')
        return loss

    def resumed(*words):
        train.main([*resume, *words])
        return checkpoints.find(tmp_path / 'out').state

    with monkeypatch.context() as patch, pytest.raises(UserError, match='in the middle'):
        patch.setattr(Deadline, 'decide', lambda *_: None)  # of some 12 iterations
        change_steps(patch, stop)
        train.main([*tiny, str(tmp_path / 'recipe.py'), '--minutes=0.05'])  # which win
    before = checkpoints.find(tmp_path / 'out').state
    assert before['left_s'] < 3 and before['iter_num'] == 3
    after = resumed('--log_interval=1')
    assert after['left_s'] < before['left_s']
    end = after['iter_num']
    config = json.loads((tmp_path / 'out/run.json').read_text())['config']
    assert config['max_iters'] == config['lr_decay_iters'] == end > 3
    assert after['config']['max_iters'] == after['config']['lr_decay_iters'] == end
    assert after['config']['eval_iters'] == before['config']['eval_iters']
    monkeypatch.setattr(Deadline, 'decide', lambda *_: None)
    more = resumed('--minutes=0.1')  # which are added
    assert end + 20 < more['iter_num'] == more['config']['lr_decay_iters'] <= end + 30
    assert more['left_s'] < 6
    assert more['config']['minutes'] == pytest.approx(0.05 - after['left_s'] / 60 + 0.1)
    last = resumed(f'--max_iters={end + 40}')
    assert last['left_s'] is None and last['iter_num'] == end + 40


@pytest.mark.parametrize(('command', 'saved', 'left_s', 'expected'), [
    # a run of 10 minutes that has 240 s left, or none: (init_from, minutes) → (minutes, seconds)
    (('auto', 10), 10, 240, (10, 240)), (('auto', 13), 10, 240, (13, 420)),
    (('auto', 13), 10, -0.5, (13, 179.5)), (('auto', 10), 10, -0.5, (10, -0.5)),
    (('auto', 5), 10, 240, (5, -60)), (('auto', 0), 10, 240, (10, 240)),
    (('resume', 0), 10, 240, (10, 240)), (('resume', 3), 10, 0, (13, 180)),
    (('resume', 3), 10, 240, (9, 180)), (('auto', 9), 9, 180, (9, 180)),
    (('auto', 2), 0, None, (2, 120))])
def test_minutes_are_those_of_the_whole_run_with_auto_and_more_of_them_with_resume(
        command, saved, left_s, expected, monkeypatch):
    monkeypatch.setattr(deadline, 'time', SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(deadline, 'measure', lambda *_: (0.1, 0.1))
    checkpoint = SimpleNamespace(iter_num=9, state={'left_s': left_s},
                                 settings=lambda: {'minutes': saved})
    init_from, minutes = command
    config = deadline.length_of(
        checkpoint, TrainConfig(init_from=init_from, minutes=minutes), {'minutes'})
    run = SimpleNamespace(config=config, start=SimpleNamespace(checkpoint=checkpoint, began=0.0))
    deadline.fit_minutes(run, {'minutes'}, None, None)
    assert (run.config.minutes, run.deadline.left_s()) == pytest.approx(expected)
    assert (run.config.max_iters > 9) == (run.deadline.left_s() > 0)


def test_minutes_that_are_too_few_are_refused_and_nothing_is_written(
        tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(deadline, 'measure', lambda *_: (1.0, 1.0))
    assert 'too short' in fails(capsys, monkeypatch, train.main, *tiny, '--minutes=0.05')
    assert not list(tmp_path.glob('out/*'))


# -----------------------------------------------------------------------------
# a recipe whose size follows from the time


def test_a_recipe_for_own_text_is_larger_where_there_is_more_time_or_text(char_data, monkeypatch):
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(dtype_choice, 'core_speed', lambda dtype: 1.25e11)

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
def test_processes_that_measure_something_else_agree_on_the_size_and_the_iterations(tiny, tmp_path):
    (tmp_path / 'recipe.py').write_text(
        'import os\nn_embd = 32 * (1 + int(os.environ["RANK"]))\n')
    words = [word for word in tiny if not word.startswith('--n_embd')]
    launch(train.main, 2, tmp_path, str(tmp_path / 'recipe.py'), *words, '--minutes=0.1',
           '--eval_interval=10000', '--log_interval=10', '--check=False')
    state = checkpoints.find(tmp_path / 'out').state
    assert state['model']['n_embd'] == 32
    assert state['iter_num'] == state['config']['max_iters'] > 0
