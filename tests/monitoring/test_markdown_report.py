"""report.md: what came of a run."""

import itertools
import os
import re
import signal
import sys

from helpers import lines, size_of_png

import plot
import train
from plaingpt.monitoring import curves
from plaingpt.monitoring.markdown_report import format_report
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.monitoring.run_record import read_run


def test_a_report_says_what_came_of_a_run(tiny, tmp_path):
    train.main([*tiny, '--report=True', '--sample_tokens=7', '--max_iters=9'])
    rows, text = lines(tmp_path / 'out', 'val_loss'), (tmp_path / 'out/report.md').read_text()
    best = min(row['val_loss'] for row in rows)
    for words in (f'{best:.4f} at best', f'last validation loss is {rows[-1]["val_loss"]:.4f}',
                  'iteration 9, 1,152 tokens', 'all iterations are done', '(loss.png)',
                  'No check finds anything wrong'):
        assert words in text, words
    assert size_of_png(tmp_path / 'out/loss.png') > (1000, 600)
    samples = [row['sample'] for row in lines(tmp_path / 'out', 'sample')]
    assert len(samples) == 4 and all(len(sample) == 1 + 7 for sample in samples)
    written = re.findall(r'After (\d) iterations it wrote:', text)  # before, and after
    assert written == ['0', '9']


def test_a_report_has_what_looks_wrong_and_where_the_run_lies_in_its_reference(trained):
    rows, run = read_rows(trained / 'metrics.jsonl', print), read_run(trained)
    assert 'the run began with other data: x' in format_report(
        trained, rows, {**run, 'changed_data': 'x'})
    assert 'an iteration of quickstart: 230, 460' in format_report(
        trained, rows, {**run, 'reference': 'quickstart'})


def test_without_matplotlib_a_run_ends_well(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    train.main([*tiny, '--report=True'])
    assert 'no loss.png: drawing curves needs matplotlib' in capsys.readouterr().out
    assert (tmp_path / 'out/report.md').exists() and not (tmp_path / 'out/loss.png').exists()


def test_an_interrupted_run_is_reported_where_it_stands(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curves, 'draw_runs', lambda *_: [])
    monkeypatch.setattr(plot, 'draw_runs', lambda *_: [])
    original, steps = train.forward_backward, itertools.count(1)

    def interrupted(*arguments):
        if next(steps) == 46:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)
    monkeypatch.setattr(train, 'forward_backward', interrupted)
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
