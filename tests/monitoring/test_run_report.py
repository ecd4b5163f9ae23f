"""report.md and loss.png, the summary of a run."""

import os
import shutil
import signal

import numpy as np
import pytest
from matplotlib.figure import Figure
from runs import change_steps, lines, size_of_png

import train
from plaingpt.monitoring import run_report
from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.run_record import read_rows, read_run


def test_a_report_has_the_numbers_of_its_run(tiny, tmp_path):
    train.main([*tiny, '--report=True', '--max_iters=4'])
    rows, text = lines(tmp_path / 'out', 'val_loss'), (tmp_path / 'out/report.md').read_text()
    last, best = rows[-1], min(row['val_loss'] for row in rows)
    for number in (f'{last["val_loss"]:.4f} ± {last["val_loss_stderr"]:.4f}', f'{best:.4f}',
                   'iteration 4', '512 tokens', '(loss.png)'):
        assert number in text, number
    assert size_of_png(tmp_path / 'out/loss.png') > (1000, 600)
    samples = [row['sample'] for row in lines(tmp_path / 'out', 'sample')]
    assert [len(sample) for sample in samples] == 2 * [1 + 100]


def test_a_report_has_what_looks_wrong(trained):
    rows, run = read_rows(trained / 'metrics.jsonl'), read_run(trained)
    for row in rows:
        row |= {key: 3.0 for key in ('train_loss', 'val_loss') if key in row}
    text = run_report.format_report(trained, rows, run)
    assert all(problem in text for problem in diagnose(rows, run).values())
    assert diagnose(rows, run)


def test_an_interrupted_run_is_reported_where_it_stands(tiny, tmp_path, monkeypatch):
    def interrupted(n, model, loss):
        if n == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss
    change_steps(monkeypatch, interrupted)
    monkeypatch.setattr(run_report, 'draw_runs', lambda runs, path: None)
    train.main([*tiny, '--report=True'])
    text = (tmp_path / 'out/report.md').read_text()
    assert f'iteration 4, {4 * 128:,} tokens' in text
    assert 'SIGTERM' in text


def test_a_last_loss_that_is_not_finite_is_not_passed_over(trained):
    rows, record = read_rows(trained / 'metrics.jsonl'), read_run(trained)
    *_, before, last = (row for row in rows if 'val_loss' in row)
    last.update(val_loss=None, val_loss_stderr=None)
    progress, *_ = run_report.describe('out', rows, record)
    assert 'loss not finite' in progress
    assert progress.count(f'{before["val_loss"]:.4f}') == 1  # as the best


# -----------------------------------------------------------------------------
# curves


def run(losses, tokens=64):
    """Rows of a run: every 10 iterations an evaluation, a logged step and what health measures."""
    rows = []
    for i, loss in enumerate(losses):
        at = {'iter': 10 * i, 'tokens': tokens * 10 * i, 'elapsed_s': 5.0 * i}
        rows.append({**at, 'train_loss': loss - 0.2, 'val_loss': loss, 'val_bpb': 1.2 * loss,
                     'val_loss_stderr': 0.03 if i else None})
        if i:
            rows += [{**at, 'loss': loss - 0.1, 'lr': 1e-3, 'grad_norm': 1.0},
                     {**at, 'health/update_ratio/h.0': 1e-3, 'health/update_ratio/h.1': 2e-3}]
    return rows


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """drawn({name: rows}, {name: contents of run.json}) → the axes of their picture, that of the
    losses first, and what is said of them"""
    figures = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **__: figures.append(figure))

    def drawn(runs, facts=None):
        note = run_report.draw_runs(
            [(name, rows, (facts or {}).get(name, {})) for name, rows in runs.items()],
            tmp_path / 'loss.png')
        return figures[-1].axes, note
    return drawn


def labels(axes):
    return {text.get_text() for text in axes.get_legend().get_texts()}


def test_a_run_is_one_picture_with_its_losses_and_reference(drawn, monkeypatch):
    monkeypatch.setattr(run_report, 'read_band', lambda run: [(230, 2.0, 2.5), (460, 1.5, 1.8)])
    (losses, *_), _ = drawn({'out': run([10.0, 9.0] + [3 - i / 100 for i in range(98)])})
    for loss in '2.030', '1.940', '1.830':
        assert any(loss in label for label in labels(losses))
    [band] = [each for each in losses.collections if each.get_label().startswith('reference')]
    assert set(band.get_paths()[0].vertices.T[0]) == {230, 460}


OWN = {'aux_loss': -0.5, 'mfu': 0.4, 'own_acc': 0.2, 'own_group_acc_norm': 0.3, 'own_questions': 9,
       'router/load': 0.7, 'router/entropy/h.0': 0.0, 'router/entropy/h.11': 1e-9, 'cost$': 3,
       'health/grad_norm/wte': 0.6, 'health/grad_norm/value_embedding.1': 1.5, 'is_odd': True}


@pytest.mark.parametrize('names', [['out'], ['out', 'other']])
def test_every_number_that_was_logged_has_a_curve(names, drawn):
    rows = run([5.0, 4.0, 3.5])
    for i, row in enumerate(rows):
        if 'lr' in row:
            row |= {key: value * (1 + i) for key, value in OWN.items()} | {'note': 'a text'}
        if 'val_loss' in row:
            row |= {'ratio': 0.4 + i, 'ratio_stderr': 0.01, 'sample': 'text'}
    panels, _ = drawn(dict.fromkeys(names, rows))
    curves = [[*map(float, line.get_ydata())] for axes in panels for line in axes.lines]
    for key in {key for row in rows for key in row} - {'iter', 'tokens', 'elapsed_s'}:
        if key.endswith('_stderr') or (len(names) > 1 and key.rpartition('.')[2].isdecimal()):
            continue  # error bars, and the median of the blocks
        values = [row[key] for row in rows if row.get(key) is not None]
        is_text = isinstance(values[0], str)
        assert curves.count(values) >= (0 if is_text else len(names)), key


def test_only_numbers_of_the_same_unit_share_a_panel(drawn):
    rows = run([5.0, 4.0])
    rows[-1] |= {'router/load': 1.0, 'router/entropy': 2.0, 'experts.1': 3.0, 'experts.10': 4.0}
    panels, _ = drawn({'out': rows})
    curves = {axes.get_title(): [line.get_ydata()[-1] for line in axes.lines] for axes in panels}
    assert curves['router/load'] == [1.0]
    assert curves['router/entropy'] == [2.0]
    assert curves['experts'] == [3.0, 4.0]


def facts(val, folder='data/one', bytes_per_token=4.0):
    return {'data': {'folder': folder, **val}, 'val_bytes_per_token': bytes_per_token}


OLD = {}  # as older versions wrote it, without the identity of the validation tokens


@pytest.mark.parametrize(('a', 'b'), [
    (facts({'val': 'one'}), facts({'val': 'other'})), (facts(OLD), facts(OLD, 'data/other')),
    (facts(OLD), facts(OLD, bytes_per_token=3.0)), (facts({'val': 'one'}), facts(OLD, 'other'))])
def test_losses_of_different_validation_tokens_are_compared_in_bits_per_byte_and_a_line_says_so(
        a, b, drawn):
    runs = {'a': run([4.0, 3.0]), 'b': run([5.0, 3.0])}
    (bits, *_), note = drawn(runs, {'a': a, 'b': b})
    assert 4.8 in [line.get_ydata()[0] for line in bits.lines]
    assert 'bits per byte' in note
    for row in runs['b']:
        row.pop('val_bpb', None)
    (first, second, *_), note = drawn(runs, {'a': a, 'b': b})
    assert [labels(first), labels(second)] == [{'a'}, {'b'}]
    assert 'a | b' in note


def test_a_run_that_is_not_evaluated_yet_does_not_change_how_others_are_compared(drawn):
    (losses, *_), note = drawn({'a': run([4.0, 3.0]), 'b': []}, {
        'a': facts({'val': 'one'}), 'b': facts({'val': 'other'})})
    assert labels(losses) == {'a'}
    assert note is None


@pytest.mark.parametrize(('a', 'b'), [
    (facts({'val': 'one'}), facts({'val': 'one'}, 'moved')), (facts({'val': 'one'}), facts(OLD))])
def test_losses_of_the_same_validation_tokens_share_a_panel(a, b, drawn):
    (losses, *_), note = drawn({'a': run([4.0, 3.0]), 'b': run([5.0, 3.0])}, {'a': a, 'b': b})
    assert labels(losses) == {'a', 'b'}
    assert note is None


def test_run_json_tells_other_validation_tokens_apart(tiny, tmp_path, char_data):
    folder = shutil.copytree(char_data, tmp_path / 'reversed')
    np.fromfile(folder / 'val.bin', '<u2')[::-1].tofile(folder / 'val.bin')
    (folder / 'meta.json').unlink()  # which has the checksum of the file
    facts = []
    for dataset, vocab_size in ((char_data, 0), (folder, 200)):
        train.main([*tiny, f'--dataset={dataset}', f'--vocab_size={vocab_size}', '--max_iters=1'])
        facts.append(read_run(tmp_path / 'out')['data']['val'])
    assert facts[0] != facts[1]
