"""plot.py on folders of runs."""

import json
import shutil

from helpers import ROOT, fails, size_of_png

import plot
from plaingpt.monitoring.run_record import read_run
from plaingpt.monitoring.run_report import write_report


def test_runs_are_described_and_compared_by_bits_where_tokenizers_differ(
        trained, tmp_path, capsys, monkeypatch):
    other = tmp_path / 'other'
    shutil.copytree(trained, other)
    plot.main([str(trained), str(other), f'--output={tmp_path}/both.png'])
    assert capsys.readouterr().out.count('iteration 6, 768 tokens') == 2
    assert size_of_png(tmp_path / 'both.png') > (1000, 600)
    facts, asked = json.loads((other / 'run.json').read_text()), []
    monkeypatch.setattr(plot, 'draw_runs', lambda runs, path, band, by_bits: asked.append(by_bits))
    for scale in (1, 2):
        (other / 'run.json').write_text(json.dumps(
            {**facts, 'val_bytes_per_token': scale * facts['val_bytes_per_token']}))
        plot.main([str(trained), str(other)])
    assert asked == [False, True]


def test_a_run_without_rows_has_nothing_to_draw(trained, tmp_path, capsys, monkeypatch):
    shutil.copy(trained / 'run.json', tmp_path)
    (tmp_path / 'metrics.jsonl').write_text('nonsense\n')
    assert 'nothing to draw yet' in fails(capsys, monkeypatch, plot.main, tmp_path)


def test_a_folder_of_an_older_version_is_drawn_and_reported(tmp_path, capsys):
    out = tmp_path / 'out'
    shutil.copytree(ROOT / 'tests/data/format_1/run', out)
    plot.main([str(out)])
    write_report(out, read_run(out), print)
    for said in (capsys.readouterr().out, (out / 'report.md').read_text()):
        assert 'out: iteration 6, 768 tokens' in said and 'all iterations are done' in said
        assert 'has no reference' in said and 'warning' not in said
