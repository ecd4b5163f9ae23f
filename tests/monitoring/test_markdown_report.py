"""report.md: what a run was and what came of it."""

import sys

from helpers import size_of_png
from test_train import lines

import train
from plaingpt.monitoring.markdown_report import format_report
from plaingpt.monitoring.run_record import read_run


def test_a_report_says_what_was_run_and_what_came_of_it(tiny, tmp_path, capsys):
    train.main([*tiny, '--report=True', '--sample_tokens=7', '--health_interval=2'])
    text = (tmp_path / 'out/report.md').read_text()
    assert size_of_png(tmp_path / 'out/loss.png') > (1000, 1000)
    best = min(line['val_loss'] for line in lines(tmp_path / 'out', 'val_loss'))
    for words in (f'{best:.4f}', 'bits a byte', '| iterations | 6 |', '| tokens | 768,',
                  'n_embd = 32', '(loss.png)', '28,064 parameters', 'After 0 iterations:',
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


def test_a_run_that_was_interrupted_is_not_told_that_it_saw_little_text(trained):
    rows = [{**row, 'iter': 100 * row['iter']} for row in lines(trained, 'iter')]
    run = read_run(trained)
    assert 'it ended after' in format_report(trained, rows, run, ended=True)
    assert 'it ended after' not in format_report(trained, rows, run, ended=False)
