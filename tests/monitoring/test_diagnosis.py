"""What is said of runs that go wrong, and that healthy ones give no alarm."""

import math
from functools import partial

import pytest
import torch
from processes import options

import train
from plaingpt.core.optimizers import build_optimizer
from plaingpt.monitoring.diagnosis import DIAGNOSES, diagnose
from plaingpt.monitoring.run_record import read_rows, read_run

# -----------------------------------------------------------------------------
# rows of metrics

RUN = dict(train_tokens=10**6, from_scratch=True, data={},
           config=dict(warmup_iters=30, decay_lr=True, weight_decay=0.1,
                       check='auto', n_embd=64, max_iters=300))


def healthy_rows():
    """As metrics.jsonl has them of a healthy run of 300 iterations: a logged step each iteration,
    a look inside every 25, an evaluation every 30."""
    rows = []
    for i in range(301):
        at = {'iter': i, 'tokens': 512 * i, 'elapsed_s': 0.1 * i}
        loss = 1.8 + 2.4 * math.exp(-i / 60)
        if i:
            rate = 3e-3 * min(i / 30, 1 - i / 350)
            rows.append({**at, 'loss': loss, 'lr': rate, 'grad_norm': 1.0})
        if i == 1 or (i and i % 25 == 0):
            rows.append({**at, **{f'health/{key}': value for key, value in {
                'grad_norm/wte': 0.5, 'grad_norm/h.0': 1 + i / 1e4, 'grad_norm/h.1': 0.8,
                'weight_norm/h.0': 1 + i / 300, 'update_ratio/h.0': 2e-3,
                'attention_logit/h.0': 5.0}.items()}})
        if i % 30 == 0:
            rows.append({**at, 'train_loss': loss, 'val_loss': loss + 0.1, 'val_bpb': 2.0,
                         'missed_steps': None, 'lost_states': None})
    return rows


def losses(change):
    return dict.fromkeys(('loss', 'train_loss', 'val_loss'), change)


# name of a diagnosis, iteration by which it is named, {column: function of iteration and value}
WRONG = [
    ('diverging', 30, dict(loss=lambda i, x: x + 1.5 * (5 <= i <= 15))),
    ('diverging', 300, losses(lambda i, x: x + 2 * (i >= 270))),
    ('rate_high', 30, {'health/update_ratio/h.0': lambda i, x: 1.5 if i == 25 else x}),
    ('rate_low', 60, {'health/update_ratio/h.0': lambda i, x: 1e-5}),
    ('rate_low', 30, {'health/update_ratio/h.0': lambda i, x: 0.0}),
    ('no_gradient', 30, {'health/grad_norm/h.1': lambda i, x: 0.0}),
    ('no_gradient', 30, {'health/grad_norm/h.1': lambda i, x: 1e-5}),
    ('overfit', 210, dict(val_loss=lambda i, x: x + max(0, i - 150) / 200)),
    ('optimizer_misused', 60, dict(missed_steps=lambda i, x: -i or x)),
    ('optimizer_misused', 60, dict(missed_steps=lambda i, x: i // 2 or x)),
    ('optimizer_misused', 300, dict(lost_states=lambda i, x: 1 if i > 200 else x)),
    ('implausible', 30, dict(val_bpb=lambda i, x: 0.2 if i else x)),
]


@pytest.mark.parametrize('name, latest, columns', WRONG)
def test_only_what_goes_wrong_is_named(name, latest, columns):
    rows = healthy_rows()
    for key, change in columns.items():
        for row in rows:
            if key in row:
                row[key] = change(row['iter'], row[key])
    assert list(diagnose([row for row in rows if row['iter'] <= latest], RUN)) == [name]
    assert list(diagnose(rows, RUN)) == [name]


def test_each_diagnosis_has_a_run_that_it_names():
    assert {name for name, *_ in WRONG} == {diagnosis.__name__ for diagnosis in DIAGNOSES}


def test_healthy_rows_give_no_alarm_however_many_there_are():
    rows = healthy_rows()
    for n in (*range(5), *range(30, len(rows), 30)):
        assert diagnose(rows[:n], RUN) == {}, n


def test_blocks_without_a_gradient_in_the_first_step_give_no_alarm():
    rows = healthy_rows()
    rows[1].update({'health/grad_norm/h.0': 0.0, 'health/grad_norm/h.1': 0.0})
    for n in (1, 2, 60):
        assert diagnose(rows[:n], RUN) == {}, n


# -----------------------------------------------------------------------------
# runs

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=16, max_iters=300,
             gradient_accumulation_steps=1, eval_interval=30, eval_iters=5, warmup_iters=30,
             lr_decay_iters=300, learning_rate=3e-3, min_lr=3e-4, report=False,
             device='cpu', dtype='float32', check=False)


@pytest.fixture
def diagnosed(char_data, tmp_path):
    """diagnosed(setting=value, …) → the names of what is said of a small run with these settings
    when it has ended."""

    def diagnosed(**changes):
        out = tmp_path / 'out'
        train.main(options(**{**SMALL, 'dataset': char_data, 'out_dir': out, **changes}))
        return set(diagnose(read_rows(out / 'metrics.jsonl'), read_run(out)))
    return diagnosed


def test_a_run_says_once_what_goes_wrong(diagnosed, capsys):
    names = diagnosed(max_iters=20, lr_decay_iters=20, warmup_iters=2, eval_interval=5,
                      learning_rate=1e-6, min_lr=1e-7)
    assert names == {'rate_low'}
    out = capsys.readouterr().out
    assert out.count('diagnosis: ') == 1
    assert out.index('diagnosis: ') < out.index('iter 20 |')  # while it trains


def step_again(run, update, lr):
    grad_norm = update(lr)
    run.step.optimizer.step()
    return grad_norm


def clear_state(run, update, lr):
    run.step.optimizer.state.clear()
    return update(lr)


def clear_each_state_at_times(run, update, lr):
    for state in run.step.optimizer.state.values():
        if run.progress.iter_num % 5 == 4:
            state.clear()
    return update(lr)


def skip_half(run, update, lr):
    return update(lr) if run.progress.iter_num % 2 else torch.zeros(())


def build_again(run, update, lr):
    run.step.optimizer = build_optimizer(run.model, run.config)
    return update(lr)


def overflow_at_times(run, update, lr):  # no mistake: such steps are skipped, and counted
    if run.progress.iter_num % 5 == 4:
        next(run.model.parameters()).grad.fill_(math.inf)
    return update(lr)


SGD = dict(optimizer='sgd', learning_rate=0.1)


@pytest.mark.parametrize('change, settings, is_wrong', [
    (step_again, {'log_interval': 50}, True), (clear_state, SGD, True), (skip_half, {}, True),
    (overflow_at_times, {}, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (step_again, {}, True), (clear_each_state_at_times, {'optimizer': 'muon'}, True),
        (build_again, SGD, True), (overflow_at_times, SGD, False)])])
def test_a_loop_that_misuses_its_optimizer_is_named(change, settings, is_wrong, diagnosed,
                                                    monkeypatch):
    loop = train.train

    def changed(run, monitor):
        run.step.update = partial(change, run, run.step.update)
        return loop(run, monitor)
    monkeypatch.setattr(train, 'train', changed)
    names = diagnosed(max_iters=12, lr_decay_iters=12, warmup_iters=2, eval_interval=6,
                      n_layer=1, batch_size=2, eval_iters=1, **settings)
    assert ('optimizer_misused' in names) == is_wrong


@pytest.mark.parametrize('settings', [dict(max_iters=120, lr_decay_iters=120), *(
    pytest.param(settings, marks=pytest.mark.slow) for settings in [
        {},
        dict(dropout=0.1, dtype='bfloat16', bias=True),
        dict(rotary=True, rmsnorm=True, qk_norm=True, mlp='relu2', tied_head=False, zero_init=True,
             value_embeddings=True, optimizer='muon'),
        dict(rotary=True, mlp='swiglu', lr_schedule='wsd'),
        dict(n_layer=4, n_embd=16, dtype='float16', max_iters=240),
        dict(optimizer='sgd', learning_rate=0.3, min_lr=0.03, weight_decay=1e-4),
        dict(dropout=0.5, batch_size=64, learning_rate=1e-2, log_interval=6)])],  # six epochs
    ids=str)
def test_healthy_runs_of_many_kinds_give_no_alarm(settings, diagnosed):
    assert diagnosed(**settings) == set()
