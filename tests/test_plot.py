"""plot.py on folders of runs, and the pictures and tables that it makes."""

import json
import shutil

import pytest
from helpers import ROOT, fails, lines, size_of_png
from matplotlib.figure import Figure

import plot
from plaingpt.monitoring import curves
from plaingpt.monitoring.markdown_report import write_report
from plaingpt.monitoring.run_record import read_run


def run(losses, every=10, tokens=64, **columns):
    """Rows of a run: a logged step and an evaluation every so many iterations; losses: of the
    evaluations; tokens: of a step."""
    rows = []
    for i, loss in enumerate(losses):
        at = {'iter': every * i, 'tokens': tokens * every * i, 'elapsed_s': 0.5 * every * i}
        rows.append({**at, 'train_loss': loss - 0.2, 'val_loss': loss, 'val_bpb': 1.2 * loss,
                     'val_loss_stderr': 0.03, **columns})
        if i:
            rows.append({**at, 'loss': loss - 0.1, 'lr': 1e-3, 'grad_norm': 1.0,
                         'health/update_ratio/h.0': 1e-3, 'health/update_ratio/h.1': 2e-3})
    return rows


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """drawn([(name, rows)], …) → the axes of their picture, {title: axes}"""
    def drawn(*arguments, **others):
        figures = []
        original = Figure.savefig
        monkeypatch.setattr(Figure, 'savefig', lambda figure, *rest, **more: (
            figures.append(figure), original(figure, *rest, **more)))
        curves.draw_runs(arguments[0], tmp_path / 'loss.png', *arguments[1:], **others)
        assert size_of_png(tmp_path / 'loss.png') > (1000, 600)
        return {axes.get_title(): axes for axes in figures[-1].axes}
    return drawn


def labels(axes):
    return {text.get_text() for text in axes.texts}


def test_a_run_is_one_picture_of_losses_and_what_else_was_logged(drawn):
    rows = run([10.0, 9.0] + [3 - i / 100 for i in range(98)])
    losses, *others = drawn([('out', rows)], [(230, 2.0, 2.5), (460, 1.5, 1.8)]).values()
    assert labels(losses) == {'validation 2.030', 'training 1.940'}
    assert losses.get_title() == 'training and validation loss, nats a token'
    low, high = losses.get_ylim()
    assert low < 1.5 and high > 10 and losses.get_xlim()[0] <= 0
    [band] = [each for each in losses.collections if each.get_label().startswith('reference')]
    assert set(band.get_paths()[0].vertices.T[0]) == {230, 460}
    assert [axes.get_title() for axes in others] == [
        'learning rate', 'gradient norm', 'tokens a second', 'memory, MiB',
        *(f'{title} of each block' for title in curves.OF_BLOCKS.values())]
    assert labels(others[4]) == {' h.0', ' h.1'}


def test_the_first_rows_of_runs_are_drawn(drawn):
    rows = run([4.0, 3.0, 2.0])
    logged = [row for row in rows if 'loss' in row]
    for begun in (rows[:1], rows[1:2], logged[:1], logged, rows[:3],
                  [{**row, 'train_loss': None} for row in rows[:1]],
                  [{**row, 'val_loss': None} for row in rows]):
        assert drawn([('out', begun)]) and drawn([('out', begun), ('other', begun)])


def test_runs_are_drawn_beside_each_other(drawn):
    rows = run([4.0, 3.0, 2.0])
    new = [row for row in rows if 'loss' in row]
    losses, *_ = drawn([('a', rows), ('a', rows), ('$new', new), ('none', [])]).values()
    assert labels(losses) == {'a', r'\$new'} and losses.get_xlabel() == 'iteration'
    assert losses.lines[0].get_color() == losses.lines[1].get_color() != losses.lines[2].get_color()
    axes = drawn([('a', rows), ('b', run([4.0, 3.0], tokens=128))], by_bits=True)
    assert axes['validation loss, bits a byte'].get_xlabel() == 'tokens'


def test_runs_are_described_and_compared_by_bits_where_tokenizers_differ(
        trained, tmp_path, capsys, monkeypatch):
    other = tmp_path / 'other'
    shutil.copytree(trained, other)
    plot.main([str(trained), str(other), f'--output={tmp_path}/both.png'])
    assert capsys.readouterr().out.count('iteration 6, 768 tokens') == 2
    assert size_of_png(tmp_path / 'both.png') > (1000, 600)
    facts = json.loads((other / 'run.json').read_text())
    for scale, expected in ((1, False), (2, True)):
        (other / 'run.json').write_text(json.dumps(
            {**facts, 'val_bytes_per_token': scale * facts['val_bytes_per_token']}))
        monkeypatch.setattr(plot, 'draw_runs', lambda runs, path, band, by_bits, expected=expected:
                            pytest.fail() if by_bits != expected else None)
        plot.main([str(trained), str(other)])


def test_mistakes_are_one_line_and_a_missing_run_json_costs_the_diagnosis_only(
        trained, tmp_path, capsys, monkeypatch):
    (tmp_path / 'metrics.jsonl').write_text('nonsense\n')
    assert 'nothing to draw yet' in fails(capsys, monkeypatch, plot.main, tmp_path)
    assert 'name the out_dir of a run' in fails(capsys, monkeypatch, plot.main, 'nowhere')
    assert 'must end in .png' in fails(capsys, monkeypatch, plot.main, trained, '--output=a.html')
    shutil.copy(trained / 'metrics.jsonl', tmp_path)
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert 'iteration 6, 768 tokens' in out and 'nothing is diagnosed' in out


def test_a_folder_of_an_older_version_is_drawn_and_reported(tmp_path, capsys):
    out = tmp_path / 'out'
    shutil.copytree(ROOT / 'tests/data/format_1/run', out)
    plot.main([str(out)])
    said = capsys.readouterr().out
    assert 'out: iteration 6, 768 tokens' in said and 'all iterations are done' in said
    assert 'has no reference' in said and 'warning' not in said
    write_report(out, read_run(out), print)
    assert 'iteration 6, 768 tokens' in (out / 'report.md').read_text()
    assert lines(out, 'val_loss')
