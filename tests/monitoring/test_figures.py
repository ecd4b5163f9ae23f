"""Curves as pictures: what panels show, and that their headlines say it."""

import math

import pytest
from helpers import size_of_png

from plaingpt.monitoring import figures
from plaingpt.monitoring.details import describe_gradients, describe_rate, detail_panels
from plaingpt.monitoring.drawing import make_figure, plain, spread
from plaingpt.monitoring.references import read_reference


def run(losses, every=10, bits=1.0, **columns):
    """Rows of a run: a logged step and an evaluation every so many iterations; losses: of the
    evaluations; bits: of a byte, for each nat of a token; columns: of further keys."""
    rows = []
    for i, loss in enumerate(losses):
        at = {'iter': every * i, 'tokens': 64 * every * i, 'elapsed_s': 0.5 * every * i}
        rows.append({**at, 'train_loss': loss - 0.2, 'val_loss': loss, 'val_bpb': loss * bits,
                     'val_loss_stderr': 0.03})
        if i:
            rows.append({**at, 'loss': loss - 0.1,
                         **{key: values[i] for key, values in columns.items()}})
    return rows


def evaluated(rows):
    return [row for row in rows if 'val_loss' in row]


def logged(rows):
    return [row for row in rows if 'loss' in row]


def axes_of(*runs, reference=None):
    return make_figure(figures.loss_panels(runs, reference)).axes


def labels(axes):
    return {text.get_text() for text in axes.texts}


# -----------------------------------------------------------------------------
# one run


@pytest.mark.parametrize(('losses', 'said'), [
    ([4.0, 3.0, 2.0], 'Yes: validation fell from 4.00 to 2.00 nats a token, 2.00 bits a byte'),
    ([4.0, 3.95, 3.9], 'A little: validation fell from 4.00 to 3.90'),
    ([4.0, 2.0, 3.0], 'Until iteration 10: validation fell from 4.00 to 2.00, and is 3.00 now'),
    ([4.0, 9.0, 3.0], 'Not steadily: validation rose from 4.00 to 9.00 at iteration 10, and is 3'),
    ([4.0, 3.0, 9.0], 'No: validation rose from 4.00 to 9.00'),
    ([4.0, 4.01, 4.001], 'No: validation stays at 4.00'),
    ([4.0], 'Too early to say: 0 iterations are done')])
def test_the_first_headline_says_what_the_whole_curve_shows(losses, said):
    assert figures.learning_headline(run(losses)).startswith(said)


def test_a_loss_that_is_not_finite_any_more_is_said():
    rows = run([4.0, 3.0, 2.0])
    rows.append({'iter': 30, 'tokens': 9, 'elapsed_s': 9, 'loss': None})
    assert figures.learning_headline(rows) == 'No: the loss is not finite after iteration 20'


@pytest.mark.parametrize(('losses', 'said'), [
    ([4.0, 3.0, 2.5, 2.4], 'Validation fell by 0.10 since iteration 20; training is 0.20 lower'),
    ([4.0, 2.0, 2.2, 2.5], 'Worse since iteration 10, by 0.50; training is 0.20 lower')])
def test_the_second_headline_tells_the_late_change_and_the_gap(losses, said):
    assert figures.unseen_headline(evaluated(run(losses))) == said


def test_the_first_panel_has_the_whole_curve_and_the_second_the_later_part():
    whole, late = axes_of(('out', run([10.0, 9.0] + [3 - i / 100 for i in range(98)])))
    low, high = whole.get_ylim()
    assert low < 2.03 and high > 10 and whole.get_xlim()[0] <= 0
    low, high = late.get_ylim()
    assert 1.7 < low < 1.85 < 2.8 < high < 3


def test_training_and_validation_are_named_at_their_ends_and_the_best_is_marked():
    whole, _ = axes_of(('out', run([4.0, 2.0, 2.1, 3.0])))
    assert {'validation 3.00', 'training 2.90', 'best: 2.000', 'Does out learn?'} <= labels(whole)
    assert not any(text.startswith('best')
                   for text in labels(axes_of(('out', run([4.0, 3.0])))[0]))
    # without evaluations, and without steps
    assert labels(axes_of(('out', logged(run([4.0, 3.0, 2.0, 1.5]))))[0]) >= {'training 1.40'}
    assert labels(axes_of(('out', evaluated(run([4.0, 3.0]))))[0]) >= {'training 2.80'}


def test_single_steps_are_pale_and_their_running_mean_begins_with_the_first_evaluation():
    rows = run([4.0, 3.0] * 50)
    steps, mean = figures.training_lines(rows)
    assert steps.faint and not mean.faint
    assert mean.xs[0] == 0 and mean.ys[0] == pytest.approx(3.8)
    assert max(mean.ys[20:]) - min(mean.ys[20:]) < 0.3 < max(steps.ys) - min(steps.ys)


def test_the_validation_loss_has_its_error_where_it_is_known():
    line, = figures.validation_lines(evaluated(run([4.0, 3.0])))
    assert line.errors == [0.03, 0.03]
    line, = figures.validation_lines([{'iter': 0, 'val_loss': 4.0}])  # of an older version
    assert line.errors == [0.0]


def test_other_corpora_are_drawn_by_name_and_one_that_is_forgotten_is_in_the_headline():
    rows = run([4.0, 3.0, 2.0])
    for row, loss in zip(evaluated(rows), (3.0, 3.5, 4.0), strict=True):
        row['val_loss/notes'] = loss
    whole, _ = axes_of(('out', rows))
    assert 'notes 4.00' in labels(whole)
    assert figures.learning_headline(rows).endswith(', but notes rose from 3.00 to 4.00')


@pytest.mark.parametrize('names', [['out'], ['out', 'other']])
def test_the_first_rows_of_runs_are_drawn(names, tmp_path):
    rows = run([4.0, 3.0, 2.0])
    for begun in (rows[:1], rows[1:2], logged(rows)[:1], logged(rows), rows[:3],
                  [{**row, 'train_loss': None} for row in rows[:1]]):
        for path in figures.draw_curves([(name, begun) for name in names], tmp_path / 'loss.png'):
            assert size_of_png(path) > (1000, 400)


def test_losses_of_different_sizes_have_a_logarithmic_axis():
    assert axes_of(('out', run([4.0, 300.0, 4.0])))[0].get_yscale() == 'log'
    assert axes_of(('out', run([4.0, 3.0])))[0].get_yscale() == 'linear'


# -----------------------------------------------------------------------------
# several runs, and a reference


def test_several_runs_are_compared_by_loss_and_by_time():
    slow = [{**row, 'elapsed_s': 2 * row['elapsed_s']} for row in run([4.0, 3.0, 2.8])]
    loss, time = figures.loss_panels([('slow', slow), ('fast', run([4.0, 2.8, 2.5]))])
    assert loss.headline == 'fast is lowest: 2.500, 0.300 below slow'
    assert time.headline == 'fast reaches 2.800 after 5s, slow after 20s'
    assert [line.label for line in loss.lines] == ['slow', 'fast']


def test_runs_of_one_name_have_one_colour_and_one_label():
    panel, _ = figures.loss_panels([(name, run([4.0, 3.0])) for name in ('a', 'a', 'b')])
    a, again, b = panel.lines
    assert a.colour == again.colour != b.colour and (a.label, again.label) == ('a', '')
    assert a.style['lw'] > again.style['lw']  # an equal one is seen at its sides


def test_a_run_without_evaluations_is_named_and_the_others_are_drawn():
    rows = run([4.0, 3.0, 2.0])
    panel, = figures.loss_panels([('a', rows), ('none', []), ('new', logged(rows))])
    assert '(no evaluation: none, new)' in panel.question and len(panel.lines) == 1
    panel, = figures.loss_panels([('none', []), ('new', logged(rows))])
    assert panel.headline.startswith('Too early to say') and len(panel.lines) == 1


def test_runs_of_different_tokenizers_are_compared_by_bits():
    bytes_, words = ('bytes', run([5.0, 2.0], bits=1.44)), ('words', run([9.0, 4.0], bits=0.4))
    panels = figures.loss_panels([bytes_, words], by_bits=True)
    assert {panel.y_label for panel in panels} == {'bits a byte'}
    assert panels[0].headline.startswith('words is lowest: 1.600')
    assert {panel.y_label for panel in figures.loss_panels([bytes_])} == {'loss, nats a token'}
    names = [line.split()[0] for line in figures.loss_table([bytes_, words], by_bits=True)]
    assert names == ['run', 'words', 'bytes']
    assert figures.tokenizers_differ([(*bytes_, {}), (*words, {})])  # of an earlier version


def test_runs_of_one_tokenizer_that_evaluate_other_parts_of_a_split_are_compared_by_loss():
    new, old = {'val_bytes_per_token': 4.0}, 1 / 4.0 / math.log(2)
    runs = [('first tokens', run([4.0, 3.0], bits=0.3), new), ('all', run([4.0, 3.0]), new),
            ('of an earlier version', run([4.0, 3.0], bits=old), {})]
    assert not figures.tokenizers_differ(runs)
    assert figures.tokenizers_differ([*runs, ('other', run([5.0]), {'val_bytes_per_token': 3.0})])


def test_a_run_is_drawn_in_the_band_of_a_reference_and_the_headline_says_where():
    reference = read_reference('quickstart')
    _, low, high = reference.band()[-1]
    rows = [{'iter': t // reference.step_tokens(), 'tokens': t, 'elapsed_s': 1.0, 'val_loss': loss}
            for t, loss in ((0, 7.6), *((t, (a + b) / 2) for t, a, b in reference.band()))]
    for loss, said in (((low + high) / 2, 'Inside the band, where 95% of new seeds end'),
                       (high + 1, 'Worse: 1.00 above the band'), (low - 1, 'Better: 1.00 below')):
        rows[-1]['val_loss'] = loss
        _, panel = figures.loss_panels([('out', rows)], reference)
        assert panel.headline.startswith(said)
    _, panel = figures.loss_panels([('out', rows[:1])], reference)
    assert panel.headline == 'Not within its range of iterations yet'


def test_final_losses_are_a_table_with_the_best_first():
    runs = [('bad', run([4.0, 3.5])), ('none', []), ('good', run([4.0, 3.0, 3.1]))]
    assert [line.split() for line in figures.loss_table(runs)[1:]] == [
        ['good', '20', '2.9000', '3.1000', '3.0000', '3.1000'],
        ['bad', '10', '3.3000', '3.5000', '3.5000', '3.5000'], ['none', *'-----']]


# -----------------------------------------------------------------------------
# names, and the other panels


def test_names_that_would_overlap_are_moved_apart_and_stay_inside():
    assert spread([0.1, 0.12, 0.5], 0.1) == pytest.approx([0.1, 0.2, 0.5])
    assert spread([0.9, 0.95, 1.0], 0.1) == pytest.approx([0.8, 0.9, 1.0])


def test_a_name_between_dollar_signs_is_no_formula():
    whole, _ = axes_of(('a$b_c$', run([4.0, 3.0, 2.0])))
    text, = (text for text in whole.texts if 'b_c' in text.get_text())
    assert text._preprocess_math(text.get_text()) == ('Does a$b_c$ learn?', False)
    assert plain('a\x1b') == r'a\x1b'


def test_details_that_say_nothing_are_left_out(tmp_path):
    flat = [1e-3] * 4
    rows = run([4.0, 3.0, 2.0, 1.0], lr=flat, grad_norm=[9, 1.0, 2.0, 3.0],
               **{'health/dead_units/h.0': [0.0, 0.0, 0.001, 0.0],
                  'health/weight_norm/h.0': [1.0, 2.0, 3.0, 4.0]})
    assert [panel.y_label for panel in detail_panels([('out', rows)])] == [
        'gradient norm', 'weight norms']
    assert not detail_panels([('out', run([4.0], lr=[1e-3]))])
    # the rate of each run is constant, and they differ
    panels = detail_panels([('out', rows), ('other', run([4.0, 3.0], lr=[0, 2e-3]))])
    assert panels[0].headline == 'Learning rate, median: 0.001 (out) to 0.002 (other)'
    paths = figures.draw_curves([('out', rows)], tmp_path / 'loss.png')
    assert [path.name for path in paths] == ['loss.png', 'loss-details.png']
    assert all(size_of_png(path) > (1000, 400) for path in paths)


def test_a_spike_of_the_gradient_is_in_the_headline():
    norms = [2.0] * 10 + [1.0] * 80 + [0.5] * 10
    assert describe_gradients(range(100), norms) == \
        'Gradient norms fell from 2.00 to 0.5, without a spike'
    norms[50] = 9.0
    assert describe_gradients(range(100), norms).endswith('; 1 spike, up to 9.00 at iteration 50')


def test_the_learning_rate_is_told_from_the_first_logged_point():
    assert describe_rate([50, 100], [1e-3, 1e-4]) == \
        'The learning rate was 0.001 at iteration 50 and fell to 0.0001'
    assert describe_rate([50, 100, 150], [5e-4, 1e-3, 1e-4]) == \
        'The learning rate rose to 0.001 at iteration 100 and fell to 0.0001'


def test_a_health_headline_speaks_of_the_layers_that_are_drawn():
    layers = {f'health/{measure}/h.{i}': [0.0, 1.0, 9.0 if i == 1 else i + 2.0] for i in range(4)
              for measure in ('weight_norm', 'activation_rms')}
    panels = detail_panels([('out', run([4.0, 3.0, 2.0], **layers))])
    assert [panel.headline for panel in panels] == [
        'Weight norms end at 2.00 (h.0) to 5.00 (h.3) among the layers drawn',
        'RMS of activations ends at 2.00 (h.0) to 5.00 (h.3) among the layers drawn']


def test_the_loss_by_position_names_the_first_and_the_best():
    losses = {'0': 9.0, '1-3': 5.0, '4-15': 4.0, '16-63': 3.9, '64-255': 4.1}
    row = {'iter': 1, 'tokens': 64, 'elapsed_s': 1.0,
           **{f'health/loss_at/{name}': loss for name, loss in losses.items()}}
    panel, = detail_panels([('out', [*run([4.0]), row])])
    assert panel.headline == 'Tokens at position 0 cost 9.00, at 16-63 the least: 3.90'
    row['health/loss_at/0'] = 3.0
    panel, = detail_panels([('out', [*run([4.0]), row])])
    assert panel.headline == 'Later positions are not cheaper than the first: 3.00'
    del row['health/loss_at/0']  # nothing is learned there
    assert not detail_panels([('out', [row])])
