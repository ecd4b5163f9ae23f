"""plot.py on folders of runs, finished, broken and training."""

import shutil
from contextlib import ExitStack

import pytest
from helpers import ROOT, fails, size_of_png

import plot
from plaingpt.monitoring import curves
from plaingpt.monitoring.markdown_report import write_report
from plaingpt.system.files import lock_output_dir


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr(plot, 'draw_runs', lambda *_: [])


def test_runs_are_drawn_beside_each_other(trained, tmp_path, capsys):
    plot.main([str(trained), str(trained), f'--output={tmp_path}/both.png'])
    out = capsys.readouterr().out
    assert out.count('iteration 6, 768 tokens') == 2
    assert size_of_png(tmp_path / 'both.png') > (1000, 600)


def test_a_run_without_a_step_says_so(tmp_path, capsys, monkeypatch):
    (tmp_path / 'metrics.jsonl').write_text('nonsense\n')
    assert 'nothing to draw yet' in fails(capsys, monkeypatch, plot.main, tmp_path)
    plot_dir = tmp_path / 'nowhere'
    assert 'name the out_dir of a run' in fails(capsys, monkeypatch, plot.main, plot_dir)


def test_lines_of_others_are_named_when_they_are_skipped(trained, tmp_path, capsys, no_picture):
    text = (trained / 'metrics.jsonl').read_text()
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "loss": 2}\n' + text)
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert 'metrics.jsonl: skipped 1 of' in out and 'line 1' in out


def test_a_strange_run_json_costs_the_diagnosis_only(trained, tmp_path, capsys, no_picture):
    shutil.copy(trained / 'metrics.jsonl', tmp_path)
    for text in ('{', '[]', '{"config": 5}', '{"foo": 1}'):
        (tmp_path / 'run.json').write_text(text)
        plot.main([str(tmp_path)])
        out = capsys.readouterr().out
        assert 'iteration 6, 768 tokens' in out and 'nothing is diagnosed' in out, text


def test_a_folder_of_an_older_version_is_drawn_and_reported(tmp_path, capsys, monkeypatch):
    out = tmp_path / 'out'
    shutil.copytree(ROOT / 'tests/data/format_1/run', out)
    plot.main([str(out), '--reference=quickstart'])
    said = capsys.readouterr().out
    assert 'out: iteration 6, 768 tokens' in said and 'all iterations are done' in said
    assert 'does not compare with quickstart' in said and 'warning' not in said
    assert size_of_png(out / 'loss.png') > (1000, 600)
    monkeypatch.setattr(curves, 'draw_runs', lambda *_: [])
    write_report(out, print)
    report = (out / 'report.md').read_text()
    assert 'iteration 6, 768 tokens' in report


def test_live_drawing_begins_before_the_first_row_and_ends_with_the_run(
        trained, tmp_path, capsys, monkeypatch):
    drawn, waits = [], []
    original = plot.draw_runs
    monkeypatch.setattr(plot, 'draw_runs', lambda runs, *rest: (
        original(runs, *rest) if not runs[0][1] else drawn.append(len(runs[0][1])) or []))
    rows = (trained / 'metrics.jsonl').read_text().splitlines(keepends=True)
    with ExitStack() as training:
        training.enter_context(lock_output_dir(tmp_path))

        def wait(seconds):  # meanwhile the run logs some rows, then its last ones, and ends
            waits.append(seconds)
            if len(waits) == 2:
                shutil.copy(trained / 'run.json', tmp_path)
                training.close()
            n = len(rows) if len(waits) == 2 else len(rows) - 2
            (tmp_path / 'metrics.jsonl').write_text(''.join(rows[:n]))
        monkeypatch.setattr(plot.time, 'sleep', wait)
        plot.main([str(tmp_path), '--live', '--every=7'])
    assert waits == [7.0, 7.0] and drawn[0] == len(rows) - 2 and drawn[-1] == len(rows)
    assert 'iteration 6' in capsys.readouterr().out
