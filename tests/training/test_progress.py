"""How far a run is, by iterations or by the time of --minutes."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from processes import fails, launch
from runs import change_steps, lines

import train
from configurator import load_config
from plaingpt.system.errors import UserError
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training import dtype_choice, progress
from plaingpt.training import start as start_module
from plaingpt.training.progress import IterationClock, MinuteClock, make_clock
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import Start, with_minutes

CONFIG = TrainConfig(minutes=100 / 60, warmup_iters=90, max_iters=990)


class Machine:
    """A run of 100 s on a machine whose steps take `step_s(seconds so far)`."""

    def __init__(self, step_s, evaluation_s=1.0):
        self.now, self.step_s, self.evaluation_s = 1.0, step_s, evaluation_s
        self.rates, self.evaluated_at = [], []

    def perf_counter(self):
        return self.now

    def train(self):
        """Train as train.train() does."""
        clock, iter_num, done = MinuteClock(CONFIG, 0.0, 0.0), 0, 0.0
        while True:
            done = clock.read(iter_num)
            if done == 1 or clock.evaluation_is_due(iter_num, done):
                self.evaluated_at.append(self.now)
                with clock.timed_evaluation():
                    self.now += self.evaluation_s
            if done == 1:
                return
            self.rates.append(clock.get_lr(iter_num, done))
            self.now += self.step_s(self.now)
            iter_num += 1


@pytest.mark.parametrize('step_s', [
    lambda now: 0.1, lambda now: 0.1 if now < 40 else 0.3, lambda now: 0.3 if now < 50 else 0.1,
    lambda now: 0.05, lambda now: 0.2 if int(now) % 7 < 3 else 0.1],
    ids=['steady', 'busier', 'idler', 'fast', 'now and then'])
def test_a_run_of_minutes_ends_in_time_and_with_the_rate_at_its_end_on_a_busy_machine(
        step_s, monkeypatch):
    machine = Machine(step_s)
    monkeypatch.setattr(progress, 'time', machine)
    machine.train()
    assert machine.now == pytest.approx(100, abs=1)
    assert len(machine.evaluated_at) == 11
    assert max(machine.rates) > 5e-4 and machine.rates[-1] < 6.2e-5


def test_evaluations_that_take_long_come_less_often(monkeypatch):
    machine = Machine(lambda now: 0.1, evaluation_s=8.0)
    monkeypatch.setattr(progress, 'time', machine)
    machine.train()
    assert len(machine.evaluated_at) <= 3 and machine.now == pytest.approx(100, abs=1)


def test_a_run_of_minutes_has_the_schedule_of_as_many_iterations(monkeypatch):
    machine = Machine(lambda now: 0.1, evaluation_s=0.0)
    monkeypatch.setattr(progress, 'time', machine)
    machine.train()
    known = TrainConfig(max_iters=len(machine.rates), warmup_iters=0)
    clock = IterationClock(known)
    for it in range(100, len(machine.rates)):
        assert machine.rates[it] == pytest.approx(clock.get_lr(it, None), abs=2e-6)


def test_a_run_of_iterations_reads_its_share(tiny):
    clock = IterationClock(TrainConfig(max_iters=6, eval_interval=3))
    assert [clock.read(i) for i in (0, 3, 6, 7)] == [0, 0.5, 1, 1]
    assert [i for i in range(7) if clock.evaluation_is_due(i, None)] == [0, 3, 6]


# -----------------------------------------------------------------------------
# whole runs


@pytest.fixture
def ticking(monkeypatch):
    """Each look at the clock takes a tenth of a second."""
    ticks = itertools.count()
    fake = SimpleNamespace(perf_counter=lambda: next(ticks) / 10)
    monkeypatch.setattr(progress, 'time', fake)
    monkeypatch.setattr(start_module, 'time', fake)


@pytest.fixture
def tiny(tiny):
    """Without a length."""
    return [option for option in tiny if not option.startswith(('--max_iters', '--lr_decay'))]


def test_a_run_of_minutes_that_is_resumed_has_the_time_that_is_left(
        tiny, tmp_path, monkeypatch, ticking):
    resume = ['--init_from=resume', f'--out_dir={tmp_path}/out']

    def state():
        return checkpoints.find(tmp_path / 'out').state

    def stop(n, model, loss):
        if n == 8:
            raise UserError('in the middle')
        return loss

    with monkeypatch.context() as patch, pytest.raises(UserError, match='in the middle'):
        change_steps(patch, stop)
        train.main([*tiny, '--minutes=0.1'])
    before = state()
    assert before['iter_num'] == 7 and 0 < before['left_s'] < 6
    train.main(resume)
    after = state()
    assert after['iter_num'] > 7 and abs(after['left_s']) < 1 and after['config']['minutes'] == 0.1
    rates = [line['lr'] for line in lines(tmp_path / 'out', 'loss')]
    assert rates[-1] < 1.3e-4 < 4e-4 < max(rates)
    train.main([*resume, '--minutes=0.2'])  # which are added
    more = state()
    assert more['iter_num'] > after['iter_num'] + 20 and abs(more['left_s']) < 1
    train.main([*resume, f'--max_iters={more["iter_num"] + 5}'])
    assert state()['left_s'] is None and state()['iter_num'] == more['iter_num'] + 5


def test_a_run_of_minutes_times_a_whole_evaluation_at_its_start(tiny, tmp_path, ticking):
    first = set()
    for eval_iters in (2, 9):
        train.main([*tiny, '--minutes=0.05', f'--eval_iters={eval_iters}'])
        first.add(lines(tmp_path / 'out', 'val_loss')[0]['val_loss'])
    assert len(first) == 2


@pytest.mark.parametrize(('command', 'saved', 'left_s', 'expected'), [
    # a run of 10 minutes that has 240 s left, or none: (init_from, minutes) → (minutes, seconds)
    (('auto', 10), 10, 240, (10, 240)), (('auto', 13), 10, 240, (13, 420)),
    (('auto', 13), 10, -0.5, (13, 179.5)), (('auto', 10), 10, -0.5, (10, -0.5)),
    (('auto', 5), 10, 240, (5, -60)), (('auto', 0), 10, 240, (10, 240)),
    (('resume', 0), 10, 240, (10, 240)), (('resume', 3), 10, 0, (13, 180)),
    (('resume', 3), 10, 240, (9, 180)), (('auto', 9), 9, 180, (9, 180)),
    (('auto', 2), 0, None, (2, 120)), (('resume', 2), 0, None, (12, 120))])
def test_minutes_are_those_of_the_whole_run_with_auto_and_more_of_them_with_resume(
        command, saved, left_s, expected, monkeypatch):
    monkeypatch.setattr(progress, 'time', SimpleNamespace(perf_counter=lambda: 0.0))
    checkpoint = SimpleNamespace(state={'left_s': left_s, 'elapsed_s': 600.0},
                                 settings=lambda: {'minutes': saved})
    start = SimpleNamespace(resumed=True, weights=checkpoint, began=0.0)
    init_from, minutes = command
    config = with_minutes(TrainConfig(init_from=init_from, minutes=minutes), start, {'minutes'})
    clock = make_clock(config, start)
    assert (config.minutes, clock.left_s()) == pytest.approx(expected)
    assert (clock.read(9) < 1) == (clock.left_s() > 0)


def test_minutes_that_are_too_few_are_refused_before_the_first_step(
        tiny, tmp_path, monkeypatch, capsys, ticking):
    assert 'too short' in fails(capsys, monkeypatch, train.main, *tiny, '--minutes=0.001')
    assert not list(tmp_path.rglob('checkpoints/iter-*'))


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
           '--log_interval=10', '--check=False')
    state = checkpoints.find(tmp_path / 'out').state
    assert state['model']['n_embd'] == 32 and state['iter_num'] > 0
