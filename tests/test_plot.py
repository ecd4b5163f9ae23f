"""plot.py on folders of runs."""

import json
import shutil

import pytest
from processes import ROOT, fails
from runs import size_of_png

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


AT = '"iter": 6, "tokens": 768, "elapsed_s": 1.0'
DAMAGE = [line.encode() for line in (
    '{}', '[]', 'null', '3', '"text"', '{"iter": 5, "val_loss": NaN}', '{"iter": 5, "tokens": 9',
    f'{{{AT}, "val_loss": "3.1"}}', f'{{{AT}, "loss": [1]}}', f'{{{AT}, "lr": {{}}}}',
    f'{{{AT}, "health/update_ratio/h.0": "high"}}', f'{{{AT}, "sample": 5}}',
    f'{{{AT}, "val_loss": 1e999}}', f'{{{AT}, "val_loss": 1{"0" * 400}}}', '[' * 10_000,
    '{"iter": "6", "tokens": 768, "elapsed_s": 1.0, "val_loss": 1.0}',
    '{"iter": 6, "tokens": null, "elapsed_s": 1.0, "val_loss": 1.0}')] + [b'\xff\x00\xfe\x80']


def test_lines_of_a_log_that_are_damaged_are_skipped_with_one_warning_that_names_them(
        trained, tmp_path, capsys):
    out, other = tmp_path / 'out', tmp_path / 'other'
    for folder in (out, other):
        shutil.copytree(trained, folder)
    plot.main([str(out)])
    told = capsys.readouterr().out
    first, *lines = (out / 'metrics.jsonl').read_bytes().splitlines()
    path = out / 'metrics.jsonl'
    path.write_bytes(b'\n'.join([first, *DAMAGE, *lines, b'{"iter": 6, "tok']))
    for folders in ([out], [out, other]):
        plot.main([*map(str, folders), f'--output={out}/loss.png'])
        said, err = capsys.readouterr()
        assert told.splitlines()[0] in said
        assert err.startswith(f'warning: {path}: skipped {len(DAMAGE)} ')
        assert err.count('\n') == 1
    write_report(out, read_run(out), print)
    assert 'out: iteration 6, 768 tokens' in (out / 'report.md').read_text()


@pytest.mark.parametrize('options', [[], ['--film']])
def test_a_log_with_no_other_lines_is_an_error_that_names_it(
        options, trained, tmp_path, capsys, monkeypatch):
    shutil.copy(trained / 'run.json', tmp_path)
    log = tmp_path / ('film.jsonl' if options else 'metrics.jsonl')
    for damage in (DAMAGE, [b'[{"iter": 1}]']):
        log.write_bytes(b'\n'.join(damage) + b'\n')
        assert f'{log}: skipped' in fails(capsys, monkeypatch, plot.main, tmp_path, *options)


def test_a_damaged_run_json_is_an_error_that_names_it(trained, tmp_path, capsys, monkeypatch):
    facts = json.loads((trained / 'run.json').read_text())
    shutil.copy(trained / 'metrics.jsonl', tmp_path)
    path, config = tmp_path / 'run.json', facts['config']
    wrong = [{**facts, **change} for change in (
        {'config': None}, {'config': []}, {'config': {}}, {'ending': 3},
        {'config': {**config, 'warmup_iters': 'two'}}, {'end': []}, {'end': {'iter': '6'}},
        {'from_scratch': None}, {'train_tokens': 'many'}, {'val_bytes_per_token': []})]
    wrong += [{k: x for k, x in facts.items() if k != key}
              for key in ('config', 'from_scratch', 'train_tokens')]
    texts = ['', '{"config": {', '\x00', *map(json.dumps, ([], None, 5, 'text', {}, *wrong))]
    for text in texts:
        path.write_text(text)
        assert f'{path} is damaged' in fails(capsys, monkeypatch, plot.main, tmp_path), text


def test_a_run_of_1_0_is_drawn_and_reported(tmp_path, capsys):
    out = tmp_path / 'out'
    shutil.copytree(ROOT / 'tests/data/format_1/run', out)
    plot.main([str(out)])
    write_report(out, read_run(out), print)
    for said in (capsys.readouterr().out, (out / 'report.md').read_text()):
        assert 'out: iteration 6, 768 tokens' in said and 'all iterations are done' in said
        assert 'has no reference' in said and 'warning' not in said
