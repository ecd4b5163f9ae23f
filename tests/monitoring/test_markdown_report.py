"""report.md: what came of a run, and how it ended."""

import itertools
import os
import re
import signal
import sys

import pytest
from helpers import fails, in_the_loop, lines, size_of_png

import plot
import train
from plaingpt.monitoring.markdown_report import format_report
from plaingpt.monitoring.run_record import read_rows, read_run
from plaingpt.training import step_guard


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr('plaingpt.monitoring.curves.draw_runs', lambda *_: None)
    monkeypatch.setattr(plot, 'draw_runs', lambda *_: None)


def test_a_report_says_what_came_of_a_run(tiny, tmp_path):
    train.main([*tiny, '--report=True', '--max_iters=9'])
    rows, text = lines(tmp_path / 'out', 'val_loss'), (tmp_path / 'out/report.md').read_text()
    best = min(row['val_loss'] for row in rows)
    for words in (f'{best:.4f} at best', f'last validation loss is {rows[-1]["val_loss"]:.4f}',
                  'iteration 9, 1,152 tokens', 'all iterations are done', '(loss.png)',
                  'No check finds anything wrong', 'has no reference'):
        assert words in text, words
    assert size_of_png(tmp_path / 'out/loss.png') > (1000, 600)
    samples = [row['sample'] for row in lines(tmp_path / 'out', 'sample')]
    assert len(samples) == 4 and all(len(sample) == 1 + 100 for sample in samples)
    written = re.findall(r'After (\d) iterations it wrote:', text)  # before, and after
    assert written == ['0', '9']


def test_a_report_has_what_looks_wrong(trained):
    rows, run = read_rows(trained / 'metrics.jsonl'), read_run(trained)
    for row in rows:
        row |= {key: 3.0 for key in ('train_loss', 'val_loss') if key in row}
    assert '- the evaluation at iteration' in format_report(trained, rows, run)


def test_without_matplotlib_a_run_ends_well(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    train.main([*tiny, '--report=True'])
    assert 'no loss.png: drawing curves needs matplotlib' in capsys.readouterr().out
    assert (tmp_path / 'out/report.md').exists() and not (tmp_path / 'out/loss.png').exists()


def test_an_interrupted_run_is_reported_where_it_stands(
        tiny, tmp_path, monkeypatch, capsys, no_picture):
    original, steps = train.forward_backward, itertools.count(1)

    def interrupted(*arguments):
        if next(steps) == 46:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)
    in_the_loop(monkeypatch, forward_backward=interrupted)
    long = [*tiny, '--report=True', '--lr_decay_iters=450', '--eval_interval=150']
    train.main([*long, '--max_iters=450', '--log_interval=50'])
    assert 'stopped after iteration 46' in capsys.readouterr().out
    text = (tmp_path / 'out/report.md').read_text()
    assert f'out: iteration 46, {46 * 128:,} tokens' in text
    plot.main([str(tmp_path / 'out')])
    assert f'out: iteration 46, {46 * 128:,} tokens' in capsys.readouterr().out
    # resumed, it is on its way again, and known from its rows
    train.main([*long, '--init_from=resume', '--max_iters=48'])
    assert 'out: iteration 48, ' in (tmp_path / 'out/report.md').read_text()


def test_patience_ends_a_run_that_gets_no_better_and_survives_a_resume(tiny, tmp_path, no_picture):
    still = [*tiny, '--learning_rate=0.0', '--min_lr=0.0', '--eval_interval=2', '--max_iters=20',
             '--lr_decay_iters=20', '--weight_decay=0.0', '--patience=3']
    train.main([*still, '--max_iters=4'])
    train.main([*still, '--init_from=resume', '--report=True'])
    assert [line['iter'] for line in lines(tmp_path / 'out', 'val_loss')] == [0, 2, 4, 6]
    assert '; patience=3: 3 evaluations' in (tmp_path / 'out/report.md').read_text()


def test_a_run_that_gave_up_says_so_ever_after(tiny, tmp_path, capsys, monkeypatch, no_picture):
    wild = [*tiny, '--learning_rate=1e9', '--warmup_iters=0', '--decay_lr=False',
            '--max_iters=20', '--report=True']
    monkeypatch.setattr(step_guard, 'MAX_BAD_STEPS', 2)
    assert 'not finite' in fails(capsys, monkeypatch, train.main, *wild)
    given_up = 'given up: 2 steps in a row were not finite'
    assert f'; {given_up}' in (tmp_path / 'out/report.md').read_text()
    plot.main([str(tmp_path / 'out')])
    assert given_up in capsys.readouterr().out
