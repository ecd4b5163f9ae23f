"""Curves of runs as pictures, with matplotlib and without torch: the losses, in two panels that
each answer a question, and in a second picture what else was logged."""

import math
from pathlib import Path

from plaingpt.monitoring.details import detail_panels
from plaingpt.monitoring.diagnosis import THRESHOLDS
from plaingpt.monitoring.drawing import COLOURS, GREY, Line, Panel, choose_colours, save_figure
from plaingpt.monitoring.metrics_file import column, rows_with, step_tokens
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import duration, printable

NAME_WIDTH = 28  # characters of a run's name in a table
LABEL_WIDTH = 18  # and in a picture
NATS = 'loss, nats a token'  # a label of axes
COMPARED = ('val_loss', NATS), ('val_bpb', 'bits a byte')  # key of rows, label; by_bits the second
VALIDATION, TRAINING, *OTHERS = COLOURS
CORPUS = 'val_loss/'  # keys of rows: the loss on another corpus
DETAILS_HEIGHT = 3.6  # inches of a panel


def draw_curves(runs, path, reference=None, by_bits=False):
    """Draw runs, [(name, rows)], into the PNG at `path`, with the band of a references.Reference,
    and what else they logged into a PNG beside it → the paths of both. by_bits: compare them in
    bits a byte.

    Raises UserError where matplotlib is absent, or no run has anything to draw.
    """
    if not any(rows_with(rows, 'loss') or rows_with(rows, 'val_loss') for _, rows in runs):
        raise UserError('there is nothing to draw yet: no step is logged, no evaluation made')
    names = short_names([name for name, _ in runs], LABEL_WIDTH)
    runs = [(names[name], rows) for name, rows in runs]
    save_figure(loss_panels(runs, reference, by_bits), path)
    panels, beside = detail_panels(runs), Path(path).with_stem(f'{Path(path).stem}-details')
    if not panels:
        return [path]
    save_figure(panels, beside, DETAILS_HEIGHT)
    return [path, beside]


def loss_panels(runs, reference=None, by_bits=False):
    """Runs, [(name, rows)] → two Panels: what they learn, and how they stand."""
    if len(runs) == 1:
        (name, rows), = runs
        first = learning_panel(name, rows)
    else:
        first = comparison_panel(runs, by_bits)
    if reference and reference.band():
        return [first, reference_panel(runs, reference)]
    if len(runs) > 1:
        return [first, *speed_panel(runs, by_bits)]
    return [first, *unseen_panel(rows)]


def short_names(names, width):
    """Names → {name: the same in `width` characters at most}, numbered where they would be alike"""
    found = {name: short_name(name, width) for name in names}
    if len(set(found.values())) < len(found):
        found = {name: f'{i} {short_name(name, width - 3)}' for i, name in enumerate(found, 1)}
    return found


def short_name(name, width):
    """A name of `width` characters at most. Names of runs differ at their ends."""
    name = printable(name)
    return name if len(name) <= width else f'{name[:width // 2 - 1]}…{name[-width // 2:]}'


# -----------------------------------------------------------------------------
# one run


def learning_panel(name, rows):
    """The whole curve, from iteration 0."""
    evaluations = rows_with(rows, 'val_loss')
    ring = None
    if evaluations and (best := lowest(evaluations)) is not evaluations[-1]:
        ring = best['iter'], best['val_loss'], f'best: {best["val_loss"]:.3f}'
    lines = training_lines(rows) + corpus_lines(evaluations) + validation_lines(evaluations)
    return Panel(learning_headline(rows), lines, f'Does {name} learn?', y_label=NATS, ring=ring)


def learning_headline(rows):
    steps = [row for row in rows if 'loss' in row]
    if steps and steps[-1]['loss'] is None:
        finite = column(rows_with(steps, 'loss'), 'iter')
        return f'No: the loss is not finite after iteration {max(finite, default=0):,}'
    evaluations, steps = rows_with(rows, 'val_loss'), rows_with(rows, 'loss')
    evaluated = len(evaluations) > 1
    what = 'validation' if evaluated else 'the training loss'
    iters = column(evaluations if evaluated else steps, 'iter')
    losses = column(evaluations, 'val_loss') if evaluated else running_mean(column(steps, 'loss'))
    if len(losses) < 2:
        return f'Too early to say: {rows[-1]["iter"]:,} iterations are done'
    first, last, best, top = losses[0], losses[-1], min(losses), max(losses)
    if abs(last - first) < 0.005 and top - best < THRESHOLDS['overfit']:
        return f'No: {what} stays at {last:.2f}'
    if last > first:
        return f'No: {what} rose from {first:.2f} to {last:.2f}'
    if top > first + THRESHOLDS['rise']:
        return f'Not steadily: {what} rose from {first:.2f} to {top:.2f} at iteration ' \
               f'{iters[losses.index(top)]:,}, and is {last:.2f} now'
    if last > best + THRESHOLDS['overfit']:
        return f'Until iteration {iters[losses.index(best)]:,}: {what} fell from {first:.2f} to ' \
               f'{best:.2f}, and is {last:.2f} now'
    said = f'{what} fell from {first:.2f} to {last:.2f}'
    if evaluated and evaluations[-1].get('val_bpb'):
        said += f' nats a token, {evaluations[-1]["val_bpb"]:.2f} bits a byte'
    return ('Yes: ' if first - last >= THRESHOLDS['progress'] else 'A little: ') + said \
        + ''.join(forgotten(evaluations))


def forgotten(evaluations):
    """', but NAME rose from 3.91 to 8.52' for each other corpus whose loss rose."""
    for key in other_corpora(evaluations):
        losses = column(evaluations, key)
        if losses[-1] >= losses[0] + THRESHOLDS['forgotten']:
            yield f', but {key.removeprefix(CORPUS)} rose from {losses[0]:.2f} to {losses[-1]:.2f}'


def other_corpora(evaluations):
    """The keys of the losses of each corpus of a mixture."""
    return list(dict.fromkeys(key for row in evaluations for key in row if key.startswith(CORPUS)
                              and row[key] is not None))


def unseen_panel(rows):
    """→ [the Panel of the later part of the curve], [] where there is one evaluation or none"""
    evaluations = rows_with(rows, 'val_loss')
    if len(evaluations) < 2:
        return []
    late = [row for row in evaluations if row['iter'] >= evaluations[-1]['iter'] / 4]
    late = late if len(late) > 2 else evaluations[1:] if len(evaluations) > 2 else evaluations
    steps = [row for row in rows_with(rows, 'loss') if row['iter'] >= late[0]['iter']]
    lines = [Line(column(steps, 'iter'), column(steps, 'loss'), colour=TRAINING, faint=True)] \
        if len(steps) > 2 else []
    if trained := rows_with(late, 'train_loss'):
        lines.append(value_line(trained, 'train_loss', 'training', TRAINING,
                                {'ls': '--', 'marker': 's'}))
    return [Panel(unseen_headline(evaluations), lines + validation_lines(late),
                  'And on text that it has not seen?', y_label=NATS)]


def unseen_headline(evaluations):
    last, best = evaluations[-1], lowest(evaluations)
    rise = last['val_loss'] - best['val_loss']
    if rise > THRESHOLDS['overfit']:
        said = f'Worse since iteration {best["iter"]:,}, by {rise:.2f}'
    else:
        before = [row for row in evaluations if row['iter'] <= 2 / 3 * last['iter']][-1]
        change = last['val_loss'] - before['val_loss']
        said = f'Validation {"fell" if change < 0 else "rose"} by {abs(change):.2f} since ' \
               f'iteration {before["iter"]:,}'
    if last.get('train_loss') is None:
        return said
    gap = last['val_loss'] - last['train_loss']
    return f'{said}; training is {abs(gap):.2f} {"lower" if gap >= 0 else "higher"}'


def training_lines(rows):
    """The losses of single steps, pale, and their running mean, which begins with the evaluation
    at iteration 0; where no steps are logged, the evaluated training loss."""
    steps, evaluated = rows_with(rows, 'loss'), rows_with(rows, 'train_loss')
    if len(steps) < 3 and evaluated:
        return [value_line(evaluated, 'train_loss', 'training', TRAINING)]
    if not steps:
        return []
    xs, ys = column(steps, 'iter'), column(steps, 'loss')
    start = evaluated[:1] if evaluated and evaluated[0]['iter'] < xs[0] else []
    smooth = column(start, 'train_loss') + running_mean(ys)
    return [Line(xs, ys, colour=TRAINING, faint=True),
            Line(column(start, 'iter') + xs, smooth, f'training {smooth[-1]:.2f}', TRAINING)]


def running_mean(values):
    """The mean of each value and its neighbours: a twentieth of all, fewer in the steep beginning.
    """
    reach = len(values) // 40
    near = [values[i - min(i, reach):i + min(i, reach) + 1] for i in range(len(values))]
    return [sum(each) / len(each) for each in near]


def validation_lines(evaluations):
    """The validation loss with its standard errors."""
    if not evaluations:
        return []
    line = value_line(evaluations, 'val_loss', 'validation', VALIDATION, {'marker': 'o'})
    line.errors = [row.get('val_loss_stderr') or 0.0 for row in evaluations]
    return [line]


def corpus_lines(evaluations):
    """The loss on each other corpus."""
    return [value_line(rows_with(evaluations, key), key, key.removeprefix(CORPUS),
                       OTHERS[i % len(OTHERS)], {'ls': '--', 'marker': 'D', 'ms': 3.5, 'lw': 1.5})
            for i, key in enumerate(other_corpora(evaluations))]


def value_line(rows, key, name, colour, style=None):
    """A Line over iterations, with its last value beside its name."""
    ys = column(rows, key)
    return Line(column(rows, 'iter'), ys, f'{name} {ys[-1]:.2f}', colour, style=style or {})


def lowest(rows, key='val_loss'):
    return min(rows, key=lambda row: row[key])


# -----------------------------------------------------------------------------
# several runs, and references


def comparison_panel(runs, by_bits=False):
    """The validation loss of each run, in bits a byte where their tokens differ in length; the
    training loss where no run has an evaluation."""
    key, y_label = COMPARED[by_bits]
    same_steps = len({step_tokens(rows) for _, rows in runs} - {None}) < 2
    x, x_label = ('iter', 'iteration') if same_steps else ('tokens', 'tokens')
    best = best_of_runs(runs, key)
    if not best:
        return Panel('Too early to say: no evaluation yet, these are the losses of training',
                     run_lines(runs, x, 'loss'), 'Which run learns best?', x_label, NATS)
    absent = list(dict.fromkeys(name for name, _ in runs if name not in best))
    (name, loss), *others = best.items()
    headline = f'{name} is lowest: {loss:.3f}'
    if others:
        headline += f', {others[0][1] - loss:.3f} below {others[0][0]}'
    return Panel(headline, run_lines(runs, x, key), 'Which run learns best?'
                 + f' (no evaluation: {", ".join(absent)})' * bool(absent), x_label, y_label)


def speed_panel(runs, by_bits):
    """→ [the Panel of losses over time, after iteration 0], [] where there are no two runs of it"""
    key, y_label = COMPARED[by_bits]
    best = best_of_runs(runs, key)
    if len(best) < 2:
        return []
    (first, _), (second, goal), *_ = best.items()
    took = {name: min(row['elapsed_s'] for each, rows in runs if each == name
                      for row in rows_with(rows, key) if row[key] <= goal)
            for name in (first, second)}
    later = [(name, [row for row in rows if row['iter'] > 0]) for name, rows in runs]
    lines = run_lines(later, 'elapsed_s', key)
    if not lines:
        return []
    longest = max(x for line in lines for x in line.xs)
    unit, seconds = ('hours', 3600) if longest > 3 * 3600 else \
        ('minutes', 60) if longest > 180 else ('seconds', 1)
    for line in lines:
        line.xs = [x / seconds for x in line.xs]
    headline = f'{first} reaches {goal:.3f} after {duration(took[first])}, {second} after ' \
               f'{duration(took[second])}'
    return [Panel(headline, lines, 'Which is faster by the clock?', unit, y_label)]


def run_lines(runs, x, key):
    """A Line of each run that has values. Runs of one name have one colour, and the first of them
    has the label; a later one is thinner, so that none hides an equal one."""
    names = list(dict.fromkeys(name for name, _ in runs))
    colours, lines = dict(zip(names, choose_colours(len(names)), strict=True)), []
    for i, (name, rows) in enumerate(runs):
        if seen := rows_with(rows, key):
            width = 2.8 - 1.4 * i / len(runs)
            style = {'lw': width} if key == 'loss' else \
                {'lw': width, 'marker': 'o', 'ms': 2.2 * width}
            label = name * (name not in [line.label for line in lines])
            lines.append(Line(column(seen, x), column(seen, key), label, colours[name],
                              style=style))
    return lines


def best_of_runs(runs, key):
    """{name: the lowest loss of its runs}, the best first"""
    losses = {}
    for name, rows in runs:
        losses.setdefault(name, []).extend(column(rows, key))
    return dict(sorted(((name, min(found)) for name, found in losses.items() if found),
                       key=lambda entry: entry[1]))


def reference_panel(runs, reference):
    """The validation losses that 95% of new seeds of a reference are expected in, and the runs."""
    tokens, lows, highs = zip(*reference.band(), strict=True)
    sizes = {step_tokens(rows) for _, rows in runs} | {reference.step_tokens()}
    x, scale = ('iter', reference.step_tokens()) if len(sizes - {None}) == 1 else ('tokens', 1)
    xs = [t / scale for t in tokens]
    middle = [(low + high) / 2 for low, high in zip(lows, highs, strict=True)]
    later = [(name, [row for row in rows if row['tokens'] >= tokens[0]]) for name, rows in runs]
    lines = run_lines(later, x, 'val_loss')
    if len(runs) == 1:
        for line in lines:
            line.colour = VALIDATION
    lines.append(Line(xs, middle, f'{len(reference.rows)} seeds', GREY,
                      style={'ls': ':', 'lw': 1.2}))
    return Panel(reference.headline(runs), lines, f'As good as the reference {reference.name}?',
                 'iteration' if x == 'iter' else x, NATS, band=(xs, lows, highs))


# -----------------------------------------------------------------------------
# the losses of several runs


def tokenizers_differ(runs):
    """Whether tokens stand for different amounts of text, so that losses a token do not compare.
    runs: [(name, rows, what run.json says)]"""
    lengths = []  # bytes a token of the whole split, whatever part of it a run evaluates
    for _, rows, run in runs:
        seen = [row for row in rows_with(rows, 'val_loss', 'val_bpb') if row['val_bpb']]
        if length := run.get('val_bytes_per_token'):
            lengths.append(length)
        elif seen:  # of an earlier version, whose bits are by that length
            lengths.append(seen[-1]['val_loss'] / math.log(2) / seen[-1]['val_bpb'])
    return bool(lengths) and max(lengths) > 1.001 * min(lengths)


def loss_table(runs, by_bits=False):
    """→ the lines of a table of the losses at the last evaluation of runs, [(name, rows)], the best
    first: by_bits those a byte, else the validation loss. Runs without come last."""
    key, _ = COMPARED[by_bits]
    table = []
    for name, rows in runs:
        seen = rows_with(rows, 'val_loss')
        last = seen[-1] if seen else {}
        losses = [last.get('train_loss'), last.get('val_loss'),
                  min(column(seen, 'val_loss'), default=None), last.get('val_bpb')]
        table.append((last.get(key), [short_name(name, NAME_WIDTH), str(last.get('iter', '-')),
                                      *('-' if x is None else f'{x:.4f}' for x in losses)]))
    table.sort(key=lambda entry: (entry[0] is None, entry[0]))
    lines = [('run', 'iteration', 'training', 'validation', 'best', 'bits/byte'),
             *(cells for _, cells in table)]
    width = max(len(name) for name, *_ in lines)
    return [f'{name:<{width}}' + ''.join(f'  {cell:>10}' for cell in cells)
            for name, *cells in lines]
