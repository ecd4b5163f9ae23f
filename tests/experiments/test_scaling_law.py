"""The scaling law: its ladder, its fit, its intervals, what plan.py and bench.py tell of it."""

import json
import math
import os
import shlex
import signal
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, exit_code, fails, fork, size_of_png, wait_until

import bench
import plan
import train
from configurator import load_config
from plaingpt.experiments import runs, scaling_law
from plaingpt.experiments.scaling_law import (
    best_run,
    describe,
    find_ladder,
    fit,
    interval,
    loss_at,
    measure,
    model_at,
    plan_ladder,
    predict,
    settings_at,
    widths,
)
from plaingpt.system.errors import UserError
from plaingpt.training.checkpoint import checkpoint_paths
from plaingpt.training.settings import TrainConfig

QUICKSTART = str(ROOT / 'config/quickstart.py')
SEEDS = 0.015  # nats: standard deviation of a run's loss, as of other seeds


def read(*words):
    return bench.load_config(bench.BenchConfig, ['--law', '--device=cpu', *map(str, words)])


def known_law(random):
    """A law, text and sizes like those of a ladder → (f(n, tokens), runs, the largest run, text)"""
    E, a, b = (random.uniform(*ends) for ends in ((0.8, 2.0), (0.2, 0.6), (0.2, 0.6)))
    N0a, D0b = random.uniform(0.4, 1.2, 2)
    text = random.choice([5e5, 1e6, 3e6, 3e7])
    theta = np.log([E, N0a, a, D0b, b, 15.0])

    def loss(n, tokens):
        return float(loss_at(theta, n / 6e4, tokens / 3e6, text / 3e6))
    rows = [{'size': size, 'n': n, 'tokens': tokens * part, 'step_s': n / 1e6,
             'loss': loss(n, tokens * part)}
            for size, (n, tokens) in enumerate(((2e4, 4e6), (4e4, 3.6e6), (7e4, 3.2e6),
                                                (1.2e5, 2.6e6))) for part in (0.5, 0.75, 1)]
    return loss, rows, (2.3e5, 5.8e6), text


def law_of(rows, text, held=(2.3e5, 5.8e6)):
    """A law.json of runs"""
    law = fit(rows, text)
    low, middle, high = interval(predict(law, *held, noisy=True))
    return {**law, 'held_out': {**rows[-1], 'n': held[0], 'tokens': held[1], 'low': low,
                                'predicted': middle, 'high': high, 'holds': True},
            'machine': 'another', 'command': 'python bench.py --law mine.py', 'date': '2030-01-01',
            'vocab_size': 2048, 'bytes_per_token': 3.2, 'flops_per_s': 5e10}


# -----------------------------------------------------------------------------
# the fit


def test_a_larger_run_of_a_known_law_is_predicted_and_more_text_is_worth_what_it_says():
    random = np.random.default_rng(3)
    for _ in range(3):
        loss, rows, largest, text = known_law(random)
        law = fit(rows, text)
        low, middle, high = interval(predict(law, *largest))
        assert middle == pytest.approx(loss(*largest), abs=0.03)
        assert high - low < 0.12
        epochs = largest[1] / text
        gain = np.median(predict(law, *largest) - predict(law, *largest, text=2))
        assert gain > 0 if epochs > 1 else gain == pytest.approx(0)


@pytest.mark.slow
def test_four_of_five_largest_runs_lie_in_the_80_percent_interval(monkeypatch):
    monkeypatch.setattr(scaling_law, 'SAMPLES', 50)
    random, inside, laws = np.random.default_rng(0), 0, 50
    for _ in range(laws):
        loss, rows, largest, text = known_law(random)
        seeds = random.normal(size=4)  # one of each size
        for row in rows:
            row['loss'] += SEEDS * (seeds[row['size']] + random.normal() / 2)
        low, _, high = interval(predict(fit(rows, text), *largest, noisy=True))
        inside += low <= loss(*largest) + SEEDS * random.normal() <= high
    assert 0.8 * laws - 2 * math.sqrt(0.16 * laws) <= inside  # two standard errors
    assert inside < laws


# -----------------------------------------------------------------------------
# the ladder


def test_a_ladder_fills_its_minutes_with_five_sizes_whose_quarters_are_whole():
    config = read(QUICKSTART, '--minutes=40')
    seconds = {}

    def step_seconds(width):
        seconds[width] = model_at(config, width, 2048).matmul_parameters() / 2e7 + 0.01
        return seconds[width]
    ladder = plan_ladder(config, 2048, step_seconds)
    assert len(ladder) == 5 and ladder == sorted(ladder, key=lambda size: size['n'])
    spent = sum(size['steps'] * seconds[size['width']] for size in ladder)
    assert 0.8 * 2400 < spent < 2400
    assert all(size['steps'] % 4 == 0 for size in ladder)
    tokens = [size['steps'] * config.step_tokens() / size['n'] for size in ladder]
    assert 5 < tokens[-1] < 20 and tokens[0] > 50
    with pytest.raises(UserError, match='too short for a ladder'):
        plan_ladder(replace(config, minutes=0.3), 2048, step_seconds)


def test_any_shape_of_model_has_larger_and_smaller_ones_of_the_same_depth():
    for words in ([], ['--n_head=4', '--n_kv_head=2'], ['--head_dim=32', '--n_inner=300'],
                  ['--n_embd=126', '--n_head=3', '--n_layer=1', '--optimizer=adamw']):
        config = read(QUICKSTART, *words)
        found = [model_at(config, width, 2048) for width in islice(widths(config), 30)]
        n = [gpt.matmul_parameters() for gpt in found]
        assert n[:16] == sorted(set(n[:16])) and n[-1] > 30 * n[0]
        assert {gpt.config.n_layer for gpt in found} == {config.n_layer}
        same = settings_at(config, config.n_embd)
        for key in ('n_embd', 'n_head', 'n_kv_head', 'n_inner'):
            assert same[key] == getattr(config, key)


@pytest.fixture
def tiny_ladder(char_data, tmp_path, monkeypatch):
    """(BenchConfig, a function that measures its law in a folder, the commands of its trainings)
    with two sizes below the largest, trained in forks of this process"""
    commands = []

    def run_in_a_fork(command, **_):
        log, argv = tmp_path / 'log', command[3:]
        commands.append(argv)
        pid = fork(train.main, *argv, log=log)
        if len(commands) == run_in_a_fork.kill:
            folder = next(arg[10:] for arg in argv if arg.startswith('--out_dir='))
            wait_until(lambda: checkpoint_paths(folder))
            os.kill(pid, signal.SIGKILL)
        return SimpleNamespace(returncode=exit_code(pid), stderr=log.read_text())
    run_in_a_fork.kill = 0

    monkeypatch.setattr(runs, 'subprocess', SimpleNamespace(run=run_in_a_fork))
    for name, value in (('SIZES', 2), ('SAMPLES', 20)):
        monkeypatch.setattr(scaling_law, name, value)
    monkeypatch.setattr(scaling_law, 'plan_ladder', lambda config, vocab_size, _: [
        {'width': width, 'n': model_at(config, width, vocab_size).matmul_parameters(),
         'steps': 40} for width in (8, 16, 24)])
    config = read(f'--dataset={char_data}', '--n_layer=2', '--n_head=1', '--n_embd=16',
                  '--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=1',
                  '--eval_iters=2', '--warmup_iters=3', '--learning_rate=1e-2', '--minutes=1',
                  '--dtype=float32', '--check=warn')
    device, dataset = bench.devices.choose_device('cpu')[0], bench.open_data(
        config, bench.launched_world())
    work = bench.workload(config, device, dataset.vocab_size)

    def law_in(folder):
        folder.mkdir(exist_ok=True)
        return measure(config, dataset, folder, work, {'machine': 'here', 'command': 'this'})
    return config, law_in, commands, run_in_a_fork


@pytest.mark.slow
def test_a_ladder_that_was_killed_goes_on_to_the_same_law(tiny_ladder, tmp_path):
    _, law_in, commands, run_in_a_fork = tiny_ladder

    def losses(law):
        return [(row['n'], row['tokens'], row['loss']) for row in law['rows']]
    whole = law_in(tmp_path / 'whole')
    assert len(commands) == 3
    for run_in_a_fork.kill in (1, 3):  # the first run, the largest
        commands.clear()
        with pytest.raises(UserError):
            law_in(tmp_path / f'killed {run_in_a_fork.kill}')
        commands.clear()
        kill, run_in_a_fork.kill = run_in_a_fork.kill, 0
        assert losses(law_in(tmp_path / f'killed {kill}')) == losses(whole)
        assert len(commands) == 3 - (kill - 1) and '--init_from=resume' in commands[0]


def test_the_ladder_of_another_command_stays_and_is_told(tmp_path):
    path = tmp_path / 'ladder.json'
    path.write_text('{"command": "bench.py --minutes=3", "ladder": [1]}')
    assert find_ladder(None, 65, tmp_path, None, 'bench.py --minutes=3') == [1]
    with pytest.raises(UserError, match='by another command: bench'):
        find_ladder(None, 65, tmp_path, None, 'bench.py --minutes=4')


# -----------------------------------------------------------------------------
# what it tells


@pytest.fixture
def law(char_data):
    """A law beside the tokens of char_data, for this test"""
    _, rows, _, _ = known_law(np.random.default_rng(1))
    path = char_data / 'law.json'
    found = law_of(rows, 1e6)
    path.write_text(json.dumps(found))
    yield found
    path.unlink()


def test_the_best_run_is_better_than_its_neighbours_and_more_time_makes_it_larger(law):
    config = read(QUICKSTART)
    found = [best_run(law, config, 1e14 * times) for times in (1, 8)]
    assert found[0]['n'] < found[1]['n'] and found[0]['loss'][1] > found[1]['loss'][1]
    for factor in (0.5, 2):
        other = predict(law, found[0]['n'] * factor, found[0]['tokens'] / factor)
        assert np.median(other) >= found[0]['loss'][1] - 0.005
    assert all(low <= middle <= high for low, middle, high in found[0]['gains'].values())


PLAN = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=16', '--batch_size=8',
        '--gradient_accumulation_steps=1', '--max_iters=9', '--optimizer=normuon']


@pytest.mark.slow
def test_a_plan_tells_the_best_run_for_a_time_and_for_a_price(law, char_data, capsys):
    words = [*PLAN, f'--dataset={char_data}', '--gpu=H100']
    plan.main([*words, '--hours=2'])
    of_hours = capsys.readouterr().out
    plan.main([*words, '--price=5', '--gpu_hour_price=2.5'])
    assert capsys.readouterr().out.split('best for')[1] == of_hours.split('best for')[1]
    assert 'bits a byte' in of_hours and 'twice the text' in of_hours
    assert 'times the work of its largest run' in of_hours
    assert 'by python bench.py --law mine.py, on 2030-01-01' in of_hours
    plan.main([*words, '--json', '--hours=2'])
    assert json.loads(capsys.readouterr().out)['law']['hours'] == 2


def test_the_advice_is_a_command_that_train_takes(law, char_data):
    argv = [QUICKSTART, f'--dataset={char_data}', '--law', '--minutes=5', '--save=there']
    best = best_run(law, config := read(*argv), 1e12)
    words = shlex.split(describe(law, config, best, '1h', argv)[4])
    advised = load_config(TrainConfig, words[2:])
    assert words[:2] == ['python', 'train.py'] and advised.dataset == str(char_data)
    assert advised.lr_schedule == best['settings'].pop('lr_schedule') == 'constant'
    assert {key: getattr(advised, key) for key in best['settings']} == pytest.approx(
        best['settings'], rel=1e-2)


def test_a_law_that_does_not_hold_gives_no_advice(law):
    law['held_out']['holds'] = False
    config = read(QUICKSTART)
    text = '\n'.join(describe(law, config, best_run(law, config, 1e12), '1h', []))
    assert 'it gives no advice' in text and 'best for' not in text


def test_a_budget_without_a_law_and_a_damaged_law_are_told(char_data, capsys, monkeypatch):
    words = [*PLAN, f'--dataset={char_data}', '--gpu=H100']
    for options, said in ((['--hours=2'], 'python bench.py --law CONFIG measures it'),
                          (['--price=2'], 'price=2 takes --gpu_hour_price')):
        assert said in fails(capsys, monkeypatch, plan.main, *words, *options)
    path = char_data / 'law.json'
    path.write_text('{')
    assert 'absent or damaged' in fails(capsys, monkeypatch, plan.main, *words, '--hours=2')
    path.unlink()


def test_the_command_keeps_law_and_picture_and_says_an_hours_best(
        law, char_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling_law, 'measure', lambda *_: law)
    (char_data / 'law.json').unlink()
    bench.main(['--law', f'--dataset={char_data}', '--device=cpu', f'--save={tmp_path}', *PLAN])
    out = capsys.readouterr().out
    assert out.startswith('loss(N, D) = E') and 'best for 1 hour on this machine: ' in out
    assert json.loads((char_data / 'law.json').read_text()) == json.loads(json.dumps(law))
    assert size_of_png(tmp_path / 'law-code_char-cpu.png')[0] > 1000


def test_minutes_are_for_a_law_alone(capsys, monkeypatch):
    assert 'minutes=3.0 is for train.py' in fails(
        capsys, monkeypatch, bench.main, '--minutes=3', '--device=cpu')
    assert 'one at a time' in fails(
        capsys, monkeypatch, bench.main, '--law', '--memory', '--device=cpu')
