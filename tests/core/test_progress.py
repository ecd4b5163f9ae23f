"""How far a run is, by iterations or by the time of --minutes."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT, fails
from runs import change_steps, lines, set_clock, tick

import train
from configurator import load_config
from model import GPT
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.blocks import parameters_on_meta
from plaingpt.core.checkpoint import Saver
from plaingpt.core.dataset import open_dataset
from plaingpt.core.progress import MinuteClock, make_clock
from plaingpt.core.schedules import get_lr
from plaingpt.core.settings import TrainConfig
from plaingpt.core.start import StartingPoint, resolve_minutes
from plaingpt.data.tokenizer_choice import choose_vocab_size
from plaingpt.experiments import core_speed
from plaingpt.monitoring import metrics
from plaingpt.monitoring.film import Film
from plaingpt.monitoring.health import Health
from plaingpt.system.errors import UserError
from train import Step

CONFIG = TrainConfig(minutes=100 / 60, warmup_iters=90, max_iters=990)


class Machine:
    """A run of 100 s on a machine whose steps take `step_s(seconds so far)`."""

    def __init__(self, step_s, evaluation_s=1.0):
        self.now, self.step_s, self.evaluation_s = 0.0, step_s, evaluation_s
        self.rates, self.evaluated_at = [], []

    def perf_counter(self):
        return self.now

    def train(self, until=1.0, used_s=0.0, evaluations=()):
        """Train as train.train() does, until this much is done. Returns the clock."""
        clock = MinuteClock(CONFIG, self.now)
        if used_s:
            clock.load_state_dict({'left_s': 60 * CONFIG.minutes - used_s, 'evaluated': True,
                                   'config': {'minutes': CONFIG.minutes},
                                   'evaluations': evaluations})
        self.now += 1  # setup
        iter_num = 1 if used_s else 0
        while True:
            done = clock.read(iter_num)
            if done == 1 or clock.evaluation_is_due(iter_num, done):
                self.evaluated_at.append(self.now)
                with clock.timed_evaluation():
                    self.now += self.evaluation_s
            if done >= until:
                return clock
            self.rates.append(get_lr(iter_num, CONFIG, done))
            self.now += self.step_s(self.now)
            iter_num += 1


@pytest.mark.parametrize('step_s', [
    lambda now: 0.1, lambda now: 0.1 if now < 40 else 0.3,
    lambda now: 0.2 if int(now) % 7 < 3 else 0.1], ids=['steady', 'busier', 'now and then'])
def test_a_run_of_minutes_ends_in_time_with_its_schedule_complete(step_s, monkeypatch):
    machine = Machine(step_s)
    set_clock(monkeypatch, machine.perf_counter)
    machine.train()
    assert machine.now == pytest.approx(100, abs=1)
    assert len(machine.evaluated_at) == 11
    assert max(machine.rates) > 5e-4
    assert machine.rates[-1] < 6.2e-5


def test_slow_evaluations_run_less_often(monkeypatch):
    machine = Machine(lambda now: 0.1, evaluation_s=8.0)
    set_clock(monkeypatch, machine.perf_counter)
    machine.train()
    assert len(machine.evaluated_at) <= 3
    assert machine.now == pytest.approx(100, abs=1)


@pytest.mark.parametrize('stop_at', [1.0, 0.07, 0.5, 0.97])
@pytest.mark.parametrize('evaluation_s', [0.01, 1.0, 4.0, 15.0, 40.0, 200.0])
def test_evaluations_are_a_tenth_of_the_time_apart_also_in_a_resumed_run(
        evaluation_s, stop_at, monkeypatch):
    for step_s in (0.02, 0.3, 3.0, 11.0, 60.0):
        machine = Machine(lambda now, step_s=step_s: step_s * (1 + int(now) % 3), evaluation_s)
        set_clock(monkeypatch, machine.perf_counter)
        clock = machine.train(stop_at)
        left_s = clock.state_dict()['left_s']
        if stop_at < 1 and left_s > 0:
            machine.evaluation_s *= 0.6
            machine.train(1.0, 100 - left_s, clock.evaluations)
        assert machine.evaluated_at[-1] == pytest.approx(machine.now - machine.evaluation_s)
        *gaps, last = [b - a for a, b in itertools.pairwise(machine.evaluated_at)]
        assert all(gap >= 10 for gap in gaps)
        assert last >= min(5, machine.now - 95)  # none shortly before the end
        assert len(machine.evaluated_at) <= 2 + 10 / max(1, 0.6 * evaluation_s)


@pytest.mark.parametrize(('command', 'saved', 'left_s', 'expected'), [
    # a run of 10 minutes that has 240 s left, or none: (init_from, minutes) → (minutes, seconds)
    (('auto', 10), 10, 240, (10, 240)), (('auto', 13), 10, -0.5, (13, 179.5)),
    (('auto', 5), 10, 240, (5, -60)), (('auto', 0), 10, 240, (10, 240)),
    (('resume', 0), 10, 240, (10, 240)), (('resume', 3), 10, 240, (9, 180)),
    (('resume', 2), 0, None, (12, 120))])
def test_minutes_are_added_by_resume_alone(command, saved, left_s, expected, monkeypatch):
    set_clock(monkeypatch, lambda: 0.0)
    state = {'left_s': left_s, 'elapsed_s': 600.0, 'config': {'minutes': saved}, 'evaluated': False}
    start = SimpleNamespace(resumed=True, weights=SimpleNamespace(state=state))
    init_from, minutes = command
    config = resolve_minutes(TrainConfig(init_from=init_from, minutes=minutes), start, {'minutes'})
    clock = make_clock(config, started_at=0.0)
    clock.load_state_dict(state)
    assert (config.minutes, clock.state_dict()['left_s']) == pytest.approx(expected)


@pytest.mark.parametrize(('minutes', 'overrides', 'expected'), [
    (0, {'lr_decay_iters'}, None), (0, {'max_iters', 'lr_decay_iters'}, 0), (0, {'max_iters'}, 0),
    (0, {'min_lr', 'warmup_iters'}, 10), (3, {'minutes', 'lr_decay_iters'}, None),
    (3, {'minutes', 'max_iters'}, None)])
def test_a_timed_run_that_is_resumed_refuses_what_it_would_ignore(minutes, overrides, expected):
    state = {'left_s': 240, 'elapsed_s': 360.0, 'config': {'minutes': 10}}
    start = SimpleNamespace(resumed=True, weights=SimpleNamespace(state=state))
    config = TrainConfig(init_from='resume', minutes=minutes)
    if expected is None:
        with pytest.raises(UserError, match=f'--{min(overrides - {"minutes"})}'):
            resolve_minutes(config, start, overrides)
    else:
        assert resolve_minutes(config, start, overrides).minutes == expected


# -----------------------------------------------------------------------------
# whole runs


@pytest.fixture
def ticking(monkeypatch):
    tick(monkeypatch)


@pytest.fixture
def tiny(tiny):
    """Without a length."""
    return [option for option in tiny if not option.startswith(('--max_iters', '--lr_decay'))]


def test_a_run_of_minutes_that_is_resumed_has_the_time_that_is_left(tiny, tmp_path, ticking):
    def stop(n, model, loss):
        if n == 8:
            raise UserError('in the middle')
        return loss

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match='in the middle'):
        change_steps(patch, stop)
        train.main([*tiny, '--minutes=0.1'])
    before = checkpoints.find(tmp_path / 'out').state
    train.main(['--init_from=resume', f'--out_dir={tmp_path}/out'])
    after = checkpoints.find(tmp_path / 'out').state
    assert 0 < before['left_s'] < 6
    assert after['left_s'] == pytest.approx(0, abs=1)
    assert after['config']['minutes'] == 0.1
    rates = [line['lr'] for line in lines(tmp_path / 'out', 'loss')]
    assert max(rates) > 4e-4
    assert rates[-1] < 1.3e-4


def test_too_few_minutes_are_refused_before_the_first_step(
        tiny, tmp_path, monkeypatch, capsys, ticking):
    assert 'minutes=0.001' in fails(capsys, monkeypatch, train.main, *tiny, '--minutes=0.001')
    assert not list(tmp_path.rglob('checkpoints/iter-*'))


def test_the_clock_of_a_judged_run_counts_nothing_but_steps(tiny, tmp_path, monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=0.0)
    set_clock(monkeypatch, clock.perf_counter)
    monkeypatch.setattr(metrics, 'time', clock)

    def takes(seconds, owner, name):
        function = getattr(owner, name)

        def slow(*args, **options):
            clock.now += seconds
            return function(*args, **options)
        monkeypatch.setattr(owner, name, slow)

    for owner, name in ((train, 'preflight'), (train, 'evaluate'), (Saver, 'save'),
                        (Health, 'measure'), (metrics, 'append_line'), (Film, 'record')):
        takes(50.0, owner, name)
    takes(0.25, Step, 'update')
    train.main([*tiny, '--minutes=0.025', '--clock=training', '--film=True', '--check=False',
                '--checkpoint_interval=2', '--patience=100'])
    assert lines(tmp_path / 'out', 'val_loss')[-1]['iter'] == 1.5 / 0.25


def test_a_judged_run_is_evaluated_at_its_end(tiny, tmp_path, ticking):
    train.main([*tiny, '--minutes=0.02', '--clock=training', '--check=False'])
    last, = lines(tmp_path / 'out', 'val_loss')
    assert last['iter'] == lines(tmp_path / 'out', 'loss')[-1]['iter']


def test_a_timed_run_says_which_settings_have_no_effect(tiny, tmp_path, capsys, ticking):
    train.main([*tiny, '--minutes=0.02'])
    (tmp_path / 'recipe.py').write_text('max_iters = 1\nlr_decay_iters = 7\neval_interval = 5\n')
    resume = [f'{tmp_path}/recipe.py', '--init_from=resume', f'--out_dir={tmp_path}/out']
    train.main([*resume, '--minutes=0.02'])
    printed = capsys.readouterr().out
    first, = re.findall('iter +0 .*', printed)
    assert 'val loss' in first and 'best' not in first
    for run in printed.split('resumed from'):
        assert 'max_iters, lr_decay_iters and eval_interval have no effect' in run
        assert 'changed: max_iters' not in run


# -----------------------------------------------------------------------------
# a recipe whose size follows from the time


def test_a_recipe_for_own_text_is_larger_with_more_time_or_text(char_data, monkeypatch):
    monkeypatch.setattr(core_speed, 'core_speed', lambda dtype: 2.5e11)

    def chosen(dataset, minutes):
        config = load_config(TrainConfig, [
            'config/own_text.py', f'--dataset={dataset}', f'--minutes={minutes}'])
        return config.n_layer, config.n_embd, config.max_iters
    # of 90,000 characters, and one that is taken for a million tokens
    assert [chosen(char_data, minutes) for minutes in (0.1, 5, 60)] \
        == [(4, 128, 122), (6, 384, 400), (6, 512, 400)]
    assert [chosen('not_prepared', minutes) for minutes in (0.1, 5, 60)] \
        == [(4, 128, 106), (4, 192, 2484), (6, 448, 3906)]


def test_the_sizes_on_the_page_are_those_of_the_recipe_for_own_text(tmp_path, monkeypatch):
    """docs/training.md has a row for each text and time: its speed of a core, and its bytes per
    token, are repeated here."""
    monkeypatch.setattr(core_speed, 'core_speed', lambda dtype: 2e11)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    page = (ROOT / 'docs/training.md').read_text(encoding='utf-8').splitlines()
    for megabytes, minutes in itertools.product((0.3, 3, 30, 300), (1, 10, 60)):
        dataset, tokens = tmp_path / f'{megabytes}', round(1e6 * megabytes / 2.9)
        dataset.mkdir(exist_ok=True)
        for split, size in ('train', tokens), ('val', 10_000):
            with open(dataset / f'{split}.bin', 'wb') as file:
                file.truncate(2 * size)  # zeros, which take no space on the disk
        row = [f'{megabytes} MB', f'{minutes}']
        for has_gpu in False, True:
            monkeypatch.setattr(torch.cuda, 'is_available', lambda answer=has_gpu: answer)
            config = load_config(TrainConfig, [
                'config/own_text.py', f'--dataset={dataset}', f'--minutes={minutes}',
                f'--vocab_size={choose_vocab_size(1e6 * megabytes)}'])
            with parameters_on_meta():
                parameters = GPT(config.gpt_config(config.vocab_size)).num_parameters()
            epochs = config.max_iters * config.step_tokens() / tokens
            row += [f'{config.n_layer} × {config.n_embd}', f'{parameters / 1e6:.1f}M',
                    f'{config.max_iters:,}', f'{epochs:.2f}']
        row += [f'{config.weight_decay:.2f}']
        assert f'| {" | ".join(row)} |' in page


def test_weights_for_own_text_decay_within_an_epoch(char_data, monkeypatch):
    monkeypatch.setattr(core_speed, 'core_speed', lambda dtype: 2.5e11)
    tokens = len(open_dataset(char_data).split('train'))
    config = load_config(TrainConfig, [
        'config/own_text.py', f'--dataset={char_data}', '--minutes=5'])
    epoch_steps = tokens / config.step_tokens()
    assert config.weight_decay * config.learning_rate * epoch_steps == pytest.approx(1)


def test_branches_start_large_for_own_text_that_is_read_many_times(char_data, monkeypatch):
    monkeypatch.setattr(core_speed, 'core_speed', lambda dtype: 2.5e11)
    for dataset, expected in (char_data, 'head'), ('not_prepared', True):
        config = load_config(TrainConfig, [
            'config/own_text.py', f'--dataset={dataset}', '--minutes=1'])
        assert config.zero_init == expected


@pytest.mark.parametrize('init_from', ['resume', 'auto'])
def test_a_resumed_run_on_own_text_keeps_its_size(init_from, trained):
    config = load_config(TrainConfig, [
        'config/own_text.py', f'--init_from={init_from}', f'--out_dir={trained}',
        '--dataset=not_prepared', '--lr_decay_iters=auto'], read_saved=StartingPoint().read)
    for key, value in dict(n_layer=2, n_head=2, n_embd=32, max_iters=6).items():
        assert getattr(config, key) == value


def test_other_weights_are_tuned_on_own_text_at_a_small_rate_and_keep_their_architecture(
        trained, char_data, monkeypatch):
    monkeypatch.setattr(core_speed, 'core_speed', lambda dtype: 2.5e11)
    config = load_config(TrainConfig, [
        'config/own_text.py', f'--init_from={trained}', f'--dataset={char_data}',
        '--out_dir=out-more'], read_saved=StartingPoint().read)
    assert (config.n_layer, config.n_embd) == (2, 32)
    assert (config.learning_rate, config.weight_decay) == (3e-5, 0.1)
