"""Curves as pictures."""

import pytest

from plaingpt.monitoring import figures


def run(losses, every=10, bits=1.0, **columns):
    """Rows of a run: a logged step and an evaluation every so many iterations; losses: of the
    evaluations; bits: of a byte, for each nat of a token; columns: of further keys."""
    rows = []
    for i, loss in enumerate(losses):
        at = {'iter': every * i, 'tokens': 64 * every * i, 'elapsed_s': 0.5 * every * i}
        rows.append({**at, 'train_loss': loss - 0.2, 'val_loss': loss, 'val_bpb': loss * bits})
        if i:
            rows.append({**at, 'loss': loss - 0.1,
                         **{key: values[i] for key, values in columns.items()}})
    return rows


def panels(*runs):
    """The axes of a picture by their titles. runs: [(name, rows)]"""
    return {axes.get_title(loc='left'): axes for axes in figures.make_figure(runs).axes}


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_what_differs_late_fills_the_picture_and_not_the_steep_start():
    axes = panels(('out', run([10.0, 9.0] + [3 - i / 100 for i in range(98)])))
    low, high = axes['loss over iterations'].get_ylim()
    assert 1.7 < low < 1.85 < 2.9 < high < 3.2


def test_the_evaluated_training_loss_is_beside_validation_and_legends_name_what_is_there():
    axes = panels(('out', run([4.0, 3.0, 2.0])))['loss over iterations']
    assert labels(axes) == ['training, single steps', 'training', 'validation']
    single, training, validation = axes.get_lines()
    assert single.get_linewidth() < training.get_linewidth() == validation.get_linewidth()
    assert list(training.get_ydata()) == pytest.approx([3.8, 2.8, 1.8])
    evaluated = [row for row in run([4.0, 3.0]) if 'val_loss' in row]
    assert labels(panels(('out', evaluated))['loss over iterations']) == ['training', 'validation']
    # also where the first of several runs lacks it
    logged = [row for row in run([4.0, 3.0, 2.0]) if 'loss' in row]
    assert labels(panels(('a', logged), ('b', evaluated))['loss over iterations']) \
        == ['training, single steps', 'training', 'validation']


def test_panels_that_say_nothing_are_left_out():
    flat = [1e-3] * 4
    rows = run([4.0, 3.0, 2.0, 1.0], lr=flat, grad_norm=[9, 1.0, 2.0, 3.0],
               **{'health/dead_units/h.0': [0.0, 0.0, 0.001, 0.0],
                  'health/weight_norm/h.0': [1.0, 2.0, 3.0, 4.0]})
    assert set(panels(('out', rows))) == {
        'loss over iterations', 'loss over time', 'gradient norm, before clipping',
        'weight norm of a layer'}
    assert set(panels(('out', run([4.0], lr=[1e-3])))) == {'loss over iterations'}
    # the rate of each run is constant, and they differ
    other = run([4.0, 3.0], lr=[0, 2e-3])
    assert 'learning rate' in panels(('out', rows), ('other', other))


def test_iterations_begin_and_end_alike_in_all_panels():
    rows = run([4.0, 3.0, 2.0, 1.0], grad_norm=[0, 1.0, 2.0, 3.0])
    rows += [{'iter': i, 'tokens': 64 * i, 'elapsed_s': 0.5 * i, 'health/weight_norm/h.0': i}
             for i in (1, 12)]
    ranges = {axes.get_xlim() for axes in panels(('out', rows)).values()
              if axes.get_xlabel() == 'iteration'}
    assert len(ranges) == 1 and all(low <= 0 and high >= 30 for low, high in ranges)


def test_no_run_vanishes_beside_a_longer_or_an_equal_one():
    short = [7.0, 6.0]
    long = run([8.0] + [2 - i / 100 for i in range(99)], every=100)
    axes = panels(('long', long), ('short', run(short)), ('again', long))['loss over iterations']
    low, high = axes.get_ylim()
    for colour in figures.choose_colours(3):
        seen = [y for line in axes.get_lines() if line.get_color() == colour
                for y in line.get_ydata()]
        assert any(low <= y <= high for y in seen)
    first, last = ([line for line in axes.get_lines() if line.get_color() == colour][-1]
                   for colour in (figures.COLOURS[0], figures.COLOURS[2]))
    assert first.get_linewidth() > last.get_linewidth()  # seen at its sides
    assert first.get_markersize() > last.get_markersize()


def test_runs_of_different_tokenizers_are_compared_by_bits():
    bytes_, words = ('bytes', run([5.0, 2.0], bits=1.44)), ('words', run([9.0, 4.0], bits=0.4))
    seen = panels(bytes_, words)
    assert {'bits a byte over iterations', 'bits a byte over time'} <= set(seen)
    assert 'loss over time' not in seen and 'bits a byte over time' not in panels(bytes_)
    names = [line.split()[0] for line in figures.loss_table([bytes_, words])]
    assert names == ['run', 'words', 'bytes']


def test_final_losses_are_a_table_with_the_best_first():
    runs = [('bad', run([4.0, 3.5])), ('none', []), ('good', run([4.0, 3.0, 3.1]))]
    assert [line.split() for line in figures.loss_table(runs)[1:]] == [
        ['good', '20', '2.9000', '3.1000', '3.0000', '3.1000'],
        ['bad', '10', '3.3000', '3.5000', '3.5000', '3.5000'], ['none', *'-----']]


def test_a_name_between_dollar_signs_is_no_formula():
    name = 'a$b_c$'
    title = figures.make_figure([(name, run([4.0, 3.0, 2.0]))])._suptitle
    assert title._preprocess_math(title.get_text()) == (name, False)


def test_the_first_position_of_a_sequence_is_in_the_picture():
    losses = {'0': 9.0, '1-3': 5.0, '4-15': 4.0, '16-63': 3.9, '64-255': 3.8}
    row = {'iter': 1, 'tokens': 64, 'elapsed_s': 1.0,
           **{f'health/loss_at/{name}': loss for name, loss in losses.items()}}
    axes = panels(('out', [*run([4.0, 3.0]), row]))['loss by position in the sequence']
    assert axes.get_ylim()[1] > 9
