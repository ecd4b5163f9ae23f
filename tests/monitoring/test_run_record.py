"""run.json: the facts of a run, and how it ended."""

from helpers import fails, lines

import plot
import train
from plaingpt.monitoring import curves
from plaingpt.training import training_step


def test_patience_ends_a_run_that_gets_no_better_and_survives_a_resume(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(curves, 'draw_runs', lambda *_: [])
    still = [*tiny, '--learning_rate=0.0', '--min_lr=0.0', '--eval_interval=2', '--max_iters=20',
             '--lr_decay_iters=20', '--weight_decay=0.0', '--patience=3']
    train.main([*still, '--max_iters=4'])
    train.main([*still, '--init_from=resume', '--report=True'])
    assert [line['iter'] for line in lines(tmp_path / 'out', 'val_loss')] == [0, 2, 4, 6]
    assert '; patience=3: 3 evaluations' in (tmp_path / 'out/report.md').read_text()


def test_a_run_that_gave_up_says_so_ever_after(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(curves, 'draw_runs', lambda *_: [])
    monkeypatch.setattr(plot, 'draw_runs', lambda *_: [])
    wild = [*tiny, '--learning_rate=1e9', '--warmup_iters=0', '--decay_lr=False',
            '--max_iters=20', '--report=True']
    monkeypatch.setattr(training_step, 'MAX_BAD_STEPS', 2)
    assert 'not finite' in fails(capsys, monkeypatch, train.main, *wild)
    given_up = 'given up: 2 steps in a row were not finite'
    assert f'; {given_up}' in (tmp_path / 'out/report.md').read_text()
    plot.main([str(tmp_path / 'out')])
    assert given_up in capsys.readouterr().out
