"""report.md: what a run was and what came of it."""

import itertools
import os
import signal
import sys

from helpers import lines, size_of_png

import plot
import train
from plaingpt.monitoring import figures
from plaingpt.monitoring.markdown_report import format_report
from plaingpt.monitoring.run_record import read_run


def test_a_report_says_what_was_run_and_what_came_of_it(tiny, tmp_path, capsys):
    train.main([*tiny, '--report=True', '--sample_tokens=7', '--health_interval=2'])
    text = (tmp_path / 'out/report.md').read_text()
    for name in ('loss.png', 'loss-details.png'):
        assert size_of_png(tmp_path / 'out' / name) > (1000, 600) and f'({name})' in text
    best = min(line['val_loss'] for line in lines(tmp_path / 'out', 'val_loss'))
    for words in (f'{best:.4f}', 'bits a byte', '| iterations | 6 |', '| tokens | 768,',
                  'n_embd = 32', ' parameters', 'After 0 iterations:',
                  'After 6 iterations:'):
        assert words in text, words
    assert 'learning_rate' not in text  # it is the default
    samples = [line['sample'] for line in lines(tmp_path / 'out', 'sample')]
    assert len(samples) == 3 and all(len(sample) == 1 + 7 for sample in samples)


def test_without_matplotlib_a_run_ends_well(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    train.main([*tiny, '--report=True'])
    assert 'no loss.png: drawing curves needs matplotlib' in capsys.readouterr().out
    assert (tmp_path / 'out/report.md').exists() and not (tmp_path / 'out/loss.png').exists()


def test_an_interrupted_run_is_reported_where_it_stands(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, 'draw_curves', lambda *_: [])
    monkeypatch.setattr(plot, 'draw_curves', lambda *_: [])
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
    assert '| iterations | 46 |' in text and f'| tokens | {46 * 128:,},' in text
    assert 'Too early to judge' in text and 'Nothing looks wrong' not in text
    plot.main([str(tmp_path / 'out')])
    assert f'out: iteration 46, {46 * 128:,} tokens' in capsys.readouterr().out
    # resumed, it is on its way again, and known from its rows
    train.main([*long, '--init_from=resume', '--max_iters=48'])
    assert '| iterations | 48 |' in (tmp_path / 'out/report.md').read_text()


def test_nothing_looks_wrong_once_enough_was_seen(trained):
    run = read_run(trained)
    rows = [{'iter': 50 * i, 'tokens': 800 * i, 'elapsed_s': i,
             'loss': 3 - i / 10, 'train_loss': 3 - i / 10, 'val_loss': 3 - i / 10}
            for i in range(1, 10)]
    assert 'Nothing looks wrong.' in format_report(trained, rows, run)
    few_losses = [rows[0], rows[5]]
    one_evaluation = [{**row, 'val_loss': None} for row in rows[:-1]] + rows[-1:]
    for early in (few_losses, one_evaluation):
        assert 'Too early to judge' in format_report(trained, early, run)
