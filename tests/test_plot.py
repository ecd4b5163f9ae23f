"""plot.py on folders of runs."""

import json
import shutil

import pytest
from processes import ROOT, fails
from runs import size_of_png

import plot
from plaingpt.monitoring.run_record import read_run
from plaingpt.monitoring.run_report import format_report
from plaingpt.system.errors import UserError


@pytest.fixture
def no_picture(monkeypatch):
    """Nothing is drawn, which takes most of the time."""
    monkeypatch.setattr(plot, 'draw_runs', lambda runs, path: None)


def test_runs_are_compared_in_one_picture(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / 'other')
    plot.main([str(trained), f'{tmp_path}/other', f'--output={tmp_path}/both.png'])
    out = capsys.readouterr().out
    assert out.count('768 tokens') == 2
    assert 'different tokens' not in out
    assert size_of_png(tmp_path / 'both.png') > (1000, 600)


def test_a_run_without_rows_has_nothing_to_draw(trained, tmp_path, capsys, monkeypatch):
    shutil.copy(trained / 'run.json', tmp_path)
    (tmp_path / 'metrics.jsonl').touch()
    assert fails(capsys, monkeypatch, plot.main, tmp_path)


DAMAGE = [b'{}', b'[]', b'null', b'{"iter": 5, "tokens": 9', b'{"iter": "6"}', b'\xff\x00\xfe\x80']


def test_damaged_lines_of_a_log_are_skipped_with_one_warning(
        trained, tmp_path, capsys, no_picture):
    out = tmp_path / 'out'
    shutil.copytree(trained, out)
    plot.main([str(out)])
    described = capsys.readouterr().out
    path = out / 'metrics.jsonl'
    first, *lines = path.read_bytes().splitlines()
    path.write_bytes(b'\n'.join([first, *DAMAGE, *lines, b'{"iter": 6, "tok']))
    plot.main([str(out)])
    again, err = capsys.readouterr()
    assert again == described
    assert err.startswith(f'warning: {path}: skipped {len(DAMAGE)} ')
    assert err.count('\n') == 1


@pytest.mark.parametrize('text', ['', '{"config": {', '[]', '{}', '3'])
def test_a_damaged_run_json_is_an_error_that_names_it(text, trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / 'out')
    path = tmp_path / 'out/run.json'
    path.write_text(text)
    with pytest.raises(UserError, match=r'run\.json'):
        plot.main([str(tmp_path / 'out')])
    assert f'{path} ' in capsys.readouterr().err


def test_a_run_of_1_0_is_described_and_drawn(tmp_path, capsys):
    out = tmp_path / 'out'
    shutil.copytree(ROOT / 'tests/data/format_1/run', out)
    plot.main([str(out)])
    rows = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    for text in (capsys.readouterr().out, format_report(out, rows, read_run(out))):
        assert 'iteration 6, 768 tokens' in text
        assert 'warning' not in text
    assert size_of_png(out / 'loss.png') > (1000, 600)
