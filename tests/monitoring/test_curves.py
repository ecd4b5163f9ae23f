"""Curves as pictures, and the table of several runs."""

import math
from dataclasses import replace

import pytest
from helpers import size_of_png

from plaingpt.monitoring import curves
from plaingpt.monitoring.references import read_reference


def run(losses, every=10, bits=1.0, tokens=64, **columns):
    """Rows of a run: a logged step and an evaluation every so many iterations; losses: of the
    evaluations; bits: of a byte, for each nat of a token; tokens: of a step; columns: further keys.
    """
    rows = []
    for i, loss in enumerate(losses):
        at = {'iter': every * i, 'tokens': tokens * every * i, 'elapsed_s': 0.5 * every * i}
        rows.append({**at, 'train_loss': loss - 0.2, 'val_loss': loss, 'val_bpb': loss * bits,
                     'val_loss_stderr': 0.03})
        if i:
            rows.append({**at, 'loss': loss - 0.1, 'lr': 1e-3, 'grad_norm': 1.0,
                         'health/update_ratio/h.0': 1e-3, 'health/update_ratio/h.1': 2e-3,
                         **{key: values[i] for key, values in columns.items()}})
    return rows


def evaluated(rows):
    return [row for row in rows if 'val_loss' in row]


def logged(rows):
    return [row for row in rows if 'loss' in row]


@pytest.fixture
def drawn(monkeypatch):
    """drawn([(name, rows)], …) → the axes of their picture, {title: axes}"""
    figures = []
    monkeypatch.setattr(curves, 'save', lambda figure, path: figures.append(figure))

    def drawn(*arguments, **others):
        curves.draw_runs(arguments[0], 'loss.png', *arguments[1:], **others)
        return {axes.get_title(): axes for axes in figures[-1].axes}
    return drawn


def labels(axes):
    return {text.get_text() for text in axes.texts}


def test_a_run_is_one_picture_of_losses_and_what_else_was_logged(drawn):
    rows = run([10.0, 9.0] + [3 - i / 100 for i in range(98)])
    for row in evaluated(rows):
        row['val_loss/a$b_c$'] = 5.0
    losses, *others = drawn([('out', rows)]).values()
    assert labels(losses) == {'validation 2.030', 'training 1.940', r'a\$b_c\$ 5.000'}
    low, high = losses.get_ylim()
    assert low < 2.03 and high > 10 and losses.get_xlim()[0] <= 0
    assert [axes.get_title() for axes in others] == [
        'learning rate', 'gradient norm', 'tokens a second', 'memory, MiB', *curves.LAYERS.values()]
    assert labels(others[4]) == {' h.0', ' h.1'}


@pytest.mark.parametrize('names', [['out'], ['out', 'other']])
def test_the_first_rows_of_runs_are_drawn(names, tmp_path):
    rows = run([4.0, 3.0, 2.0])
    for begun in (rows[:1], rows[1:2], logged(rows)[:1], logged(rows), evaluated(rows), rows[:3],
                  [{**row, 'train_loss': None} for row in rows[:1]],
                  [{**row, 'val_loss': None} for row in rows]):
        curves.draw_runs([(name, begun) for name in names], tmp_path / 'loss.png')
        assert size_of_png(tmp_path / 'loss.png') > (1000, 600)


def test_runs_are_drawn_beside_each_other(drawn):
    rows = run([4.0, 3.0, 2.0])
    losses, *_ = drawn([('a', rows), ('a', rows), ('new', logged(rows)), ('none', [])]).values()
    assert labels(losses) == {'a', 'new'} and losses.get_xlabel() == 'iteration'
    assert losses.lines[0].get_color() == losses.lines[1].get_color() != losses.lines[2].get_color()
    axes = drawn([('a', rows), ('b', run([4.0, 3.0], tokens=128))], by_bits=True)
    assert axes['validation loss, bits a byte'].get_xlabel() == 'tokens'


def test_long_names_stay_apart():
    assert len(set(curves.short_names(['a' * 30 + 'x' + 'b' * 30, 'a' * 30 + 'y' + 'b' * 30]))) == 2


def test_the_band_of_a_reference_is_drawn(drawn):
    reference = read_reference('quickstart')
    losses, *_ = drawn([('out', run([8.0, 3.7, 3.1], every=230))], reference).values()
    xs, ys = losses.collections[-1].get_paths()[0].vertices.T
    edges = [edge for _, *edges in reference.band for edge in edges]
    assert set(xs) == {230, 460} and min(ys) == min(edges) and max(ys) == max(edges)
    assert drawn([('out', run([8.0]))], replace(reference, name='other'))


def test_runs_of_different_tokenizers_are_compared_by_bits():
    bytes_, words = ('bytes', run([5.0, 2.0], bits=1.44)), ('words', run([9.0, 4.0], bits=0.4))
    names = [line.split()[0] for line in curves.loss_table([bytes_, words], by_bits=True)]
    assert names == ['run', 'words', 'bytes']
    assert curves.tokenizers_differ([(*bytes_, {}), (*words, {})])  # of an earlier version


def test_runs_of_one_tokenizer_that_evaluate_other_parts_of_a_split_are_compared_by_loss():
    new, old = {'val_bytes_per_token': 4.0}, 1 / 4.0 / math.log(2)
    runs = [('first tokens', run([4.0, 3.0], bits=0.3), new), ('all', run([4.0, 3.0]), new),
            ('of an earlier version', run([4.0, 3.0], bits=old), {})]
    assert not curves.tokenizers_differ(runs)
    assert curves.tokenizers_differ([*runs, ('other', run([5.0]), {'val_bytes_per_token': 3.0})])


def test_final_losses_are_a_table_with_the_best_first():
    runs = [('bad', run([4.0, 3.5])), ('none', []), ('good', run([4.0, 3.0, 3.1]))]
    assert [line.split() for line in curves.loss_table(runs)[1:]] == [
        ['good', '20', '10s', '2.9000', '3.1000', '3.0000', '3.1000'],
        ['bad', '10', '5s', '3.3000', '3.5000', '3.5000', '3.5000'], ['none', *'------']]
