"""plot.py on folders of runs."""

import json
import shutil

import pytest
from processes import ROOT, fails
from runs import size_of_png

import plot
from plaingpt.monitoring.run_record import read_run
from plaingpt.monitoring.run_report import write_report


def test_runs_are_compared_in_one_picture(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / 'other')
    plot.main([str(trained), f'{tmp_path}/other', f'--output={tmp_path}/both.png'])
    assert capsys.readouterr().out.count('768 tokens') == 2
    assert size_of_png(tmp_path / 'both.png') > (1000, 600)


def test_runs_of_other_tokenizers_are_compared_by_bits(trained, tmp_path):
    shutil.copytree(trained, tmp_path / 'other')
    path, pictures = tmp_path / 'other/run.json', []
    facts = json.loads(path.read_text())
    for scale in (1, 2):
        path.write_text(json.dumps(
            {**facts, 'val_bytes_per_token': scale * facts['val_bytes_per_token']}))
        plot.main([str(trained), f'{tmp_path}/other', f'--output={tmp_path}/both.png'])
        pictures.append((tmp_path / 'both.png').read_bytes())
    assert pictures[0] != pictures[1]


def test_a_run_without_rows_has_nothing_to_draw(trained, tmp_path, capsys, monkeypatch):
    shutil.copy(trained / 'run.json', tmp_path)
    (tmp_path / 'metrics.jsonl').touch()
    assert fails(capsys, monkeypatch, plot.main, tmp_path)


AT = '"iter": 6, "tokens": 768, "elapsed_s": 1.0'
DAMAGE = [line.encode() for line in (
    '{}', '[]', 'null', '{"iter": 5, "val_loss": NaN}', '{"iter": 5, "tokens": 9',
    f'{{{AT}, "val_loss": "3.1"}}', f'{{{AT}, "lr": {{}}}}', f'{{{AT}, "val_loss": 1e999}}',
    '{"iter": "6", "tokens": 768, "elapsed_s": 1.0, "val_loss": 1.0}')] + [b'\xff\x00\xfe\x80']


def test_damaged_lines_of_a_log_are_skipped_with_one_warning(trained, tmp_path, capsys):
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


@pytest.mark.parametrize(('log', 'options'), [('metrics.jsonl', []), ('film.jsonl', ['--film'])])
def test_a_log_with_no_other_lines_is_an_error_that_names_it(
        log, options, trained, tmp_path, capsys, monkeypatch):
    shutil.copy(trained / 'run.json', tmp_path)
    (tmp_path / log).write_bytes(b'\n'.join(DAMAGE) + b'\n')
    assert f'{tmp_path / log}: ' in fails(capsys, monkeypatch, plot.main, tmp_path, *options)


@pytest.mark.parametrize('text', ['', '{"config": {', '[]', '{}', '{"config": {"dataset": 3}}'])
def test_a_damaged_run_json_is_an_error_that_names_it(
        text, trained, tmp_path, capsys, monkeypatch):
    shutil.copytree(trained, tmp_path / 'out')
    path = tmp_path / 'out/run.json'
    path.write_text(text)
    assert f'{path} ' in fails(capsys, monkeypatch, plot.main, tmp_path / 'out')


def test_a_run_of_1_0_is_described(tmp_path, capsys):
    out = tmp_path / 'out'
    shutil.copytree(ROOT / 'tests/data/format_1/run', out)
    plot.main([str(out)])
    write_report(out, read_run(out), print)
    for text in (capsys.readouterr().out, (out / 'report.md').read_text()):
        assert 'iteration 6, 768 tokens' in text
        assert 'warning' not in text
