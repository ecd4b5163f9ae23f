"""loss.png: the losses of runs, and below them what else was logged. Without torch."""

import io
import math
import re
from statistics import mean

from plaingpt.monitoring.metrics_file import column, rows_with, step_tokens
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import duration, printable

COLUMNS = {'lr': ('learning rate', 1), 'grad_norm': ('gradient norm', 1),
           'tokens_per_s': ('tokens a second', 1), 'peak_memory_bytes': ('memory, MiB', 2**20)}
LAYERS = {'update_ratio': 'update / weight', 'grad_norm': 'gradient norm of a layer',
          'activation_rms': 'activation, RMS', 'attention_logit': 'largest attention logit'}
ROOM = 0.16  # of the width of the losses, for the names at the ends of lines
NAME_WIDTH = 18  # characters of a run's name


def draw_runs(runs, path, reference=None, by_bits=False):
    """Draw runs, [(name, rows)], into the PNG at `path`, with the band of a references.Reference.
    by_bits: compare runs in bits a byte, where their tokens differ in length.

    Raises UserError where matplotlib is absent, or no run has a loss yet.
    """
    if not any(rows_with(rows, key) for _, rows in runs for key in ('loss', 'val_loss')):
        raise UserError('there is nothing to draw yet: no step is logged, no evaluation made')
    with needs('matplotlib', 'drawing curves'):
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    names = list(dict.fromkeys(name for name, _ in runs))
    shown = dict(zip(names, short_names(names), strict=True))
    colours = [f'C{names.index(name) % 10}' for name, _ in runs]  # seeds of a variant have one
    runs = [(shown[name], rows) for name, rows in runs]
    figure = Figure(figsize=(12, 10), layout='constrained')
    grid = figure.add_gridspec(4, 4)
    losses = figure.add_subplot(grid[:2, :])
    if len(runs) == 1:
        draw_losses(losses, runs[0][1])
    else:
        compare_losses(losses, runs, colours, by_bits)
    if reference:
        xs, lows, highs = zip(*reference.band, strict=True)
        losses.fill_between(xs, lows, highs, color='black', alpha=0.15, lw=0,
                            label=f'{reference.name}: 95% of new seeds')
        losses.legend(loc='upper right', frameon=False)
    places = iter((row, place) for row in (2, 3) for place in range(4))
    for key, (title, scale) in COLUMNS.items():
        axes = figure.add_subplot(grid[next(places)], title=title)
        for (_, rows), colour in zip(runs, colours, strict=True):
            seen = rows_with(rows, key)
            axes.plot(column(seen, 'iter'), [y / scale for y in column(seen, key)], colour, lw=1,
                      marker='.' if len(seen) == 1 else None)
        highest = max((y for line in axes.lines for y in line.get_ydata()), default=0)
        axes.set_ylim(0, 1.08 * highest or 1)
    for measure, title in LAYERS.items():
        axes = figure.add_subplot(grid[next(places)], title=title)
        if len(runs) == 1:
            draw_layers(axes, runs[0][1], measure, colormaps['viridis'])
        else:
            for (_, rows), colour in zip(runs, colours, strict=True):
                seen = [(row['iter'], mean(values.values())) for row in rows
                        if (values := layer_values(row, measure))]
                axes.plot(*zip(*seen, strict=True) if seen else ([], []), color=colour, lw=1)
            axes.set_title(f'{title}, mean of blocks')
        if any(y > 0 for line in axes.lines for y in line.get_ydata()):
            axes.set_yscale('log', nonpositive='mask')
    for axes in figure.axes:
        axes.title.set_fontsize('medium' if axes is losses else 'small')
        axes.grid(alpha=0.25)
    save(figure, path)


def save(figure, path):
    """Write a picture, atomically."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format='png')
    write_atomically(path, picture.getvalue())


# -----------------------------------------------------------------------------
# losses


def draw_losses(axes, rows):
    """Training and validation loss of one run."""
    steps, evaluations = rows_with(rows, 'loss'), rows_with(rows, 'val_loss')
    lines = []  # (label, xs, ys, style)
    if steps:
        xs, ys = column(steps, 'iter'), column(steps, 'loss')
        axes.plot(xs, ys, 'C1', lw=0.8, alpha=0.4)
        start = [row for row in rows_with(rows, 'train_loss') if row['iter'] == 0]
        lines.append(('training', column(start, 'iter') + xs,
                      column(start, 'train_loss') + running_mean(ys), 'C1'))
    elif evaluations:
        seen = rows_with(evaluations, 'train_loss')
        lines.append(('training', column(seen, 'iter'), column(seen, 'train_loss'), 'C1'))
    corpora = dict.fromkeys(key for row in evaluations for key in row if '/' in key)
    for i, key in enumerate(corpora):
        seen = rows_with(evaluations, key)
        lines.append((key.removeprefix('val_loss/'), column(seen, 'iter'), column(seen, key),
                      f'C{2 + i % 8}--'))
    if evaluations:
        axes.errorbar(column(evaluations, 'iter'), column(evaluations, 'val_loss'),
                      [row.get('val_loss_stderr') or 0.0 for row in evaluations], fmt='none',
                      ecolor='C0', capsize=3)
        lines.append(('validation', column(evaluations, 'iter'), column(evaluations, 'val_loss'),
                      'C0o-'))
    label_lines(axes, lines, with_value=True)
    axes.set(title='training and validation loss, nats a token', xlabel='iteration')


def compare_losses(axes, runs, colours, by_bits):
    """The validation loss of each run, of one without evaluations its training loss."""
    key = 'val_bpb' if by_bits else 'val_loss'
    same = len({step_tokens(rows) for _, rows in runs} - {None}) < 2
    x, lines = 'iter' if same else 'tokens', []
    for (name, rows), colour in zip(runs, colours, strict=True):
        seen, style = rows_with(rows, key), f'{colour}.-'
        ys = column(seen, key)
        if not seen and not by_bits:
            seen, style = rows_with(rows, 'loss'), f'{colour}:'
            ys = running_mean(column(seen, 'loss'))
        if seen:
            label = '' if name in [line[0] for line in lines] else name
            lines.append((label, column(seen, x), ys, style))
    label_lines(axes, lines)
    axes.set(title='validation loss, ' + ('bits a byte' if by_bits else 'nats a token'),
             xlabel='iteration' if same else 'tokens')


def label_lines(axes, lines, with_value=False):
    """Draw [(label, xs, ys, style)] with their labels at their ends, moved apart. The y axis is
    logarithmic, so that the end of a curve is seen beside its beginning."""
    lines = [line for line in lines if line[1]]
    for _, xs, ys, style in lines:
        axes.plot(xs, ys, style, lw=1.6, ms=5)
    from matplotlib.ticker import LogLocator, NullFormatter
    if min((min(ys) for _, _, ys, _ in lines), default=0) > 0:
        axes.set_yscale('log')
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
        axes.yaxis.set_major_formatter(lambda y, _: f'{y:g}')
        axes.yaxis.set_minor_formatter(NullFormatter())
    first, last = (pick(pick(xs) for _, xs, _, _ in lines) for pick in (min, max))
    axes.set_xlim(first - 0.02 * (last - first), last + ROOM * max(1, last - first))
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted((*to_axes.transform((xs[-1], ys[-1]))[::-1], label, ys[-1], style)
                  for label, xs, ys, style in lines if label)
    before = -1.0
    for y, x, label, value, style in ends:
        before = max(y, before + 0.05)
        text = printable(f'{label} {value:.3f}' if with_value else label)
        axes.text(x + 0.01, before, text.replace('$', r'\$'), color=style[:2],
                  transform=axes.transAxes, va='center')


def running_mean(values):
    """The mean of each value and its neighbours: a twentieth of all, fewer at the beginning."""
    reach = len(values) // 40
    return [mean(values[i - min(i, reach):i + min(i, reach) + 1]) for i in range(len(values))]


def short_names(names):
    """The same in NAME_WIDTH characters at most, numbered where they would be alike. Names of runs
    differ at their ends."""
    found = [name if len(name) <= NAME_WIDTH
             else f'{name[:NAME_WIDTH // 2 - 1]}…{name[-NAME_WIDTH // 2:]}' for name in names]
    if len(set(found)) < len(set(names)):
        return [f'{i} {name}' for i, name in enumerate(found, 1)]
    return found


# -----------------------------------------------------------------------------
# layers, and the table


def layer_values(row, measure):
    """{0: value, …} of the blocks in a health row."""
    found = {re.fullmatch(rf'health/{measure}/h\.(\d+)', key): value for key, value in row.items()}
    return {int(key[1]): value for key, value in found.items() if key and value is not None}


def draw_layers(axes, rows, measure, colormap):
    """A line of each block, from dark to light; the first and the last are named."""
    seen = [(row['iter'], values) for row in rows if (values := layer_values(row, measure))]
    layers = sorted({layer for _, values in seen for layer in values})
    for i, layer in enumerate(layers):
        xs, ys = zip(*((x, values[layer]) for x, values in seen if layer in values), strict=True)
        colour = colormap(0.85 * i / max(1, len(layers) - 1))
        axes.plot(xs, ys, color=colour, lw=1, marker='.' if len(xs) == 1 else None)
        if i in (0, len(layers) - 1):
            axes.annotate(f' h.{layer}', (xs[-1], ys[-1]), color=colour, va='center', fontsize=8)


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
    """→ lines: the losses at the last evaluation of runs, [(name, rows)], the lowest first: by_bits
    those a byte, else the validation loss. Runs without come last."""
    table = []
    for name, rows in runs:
        seen = rows_with(rows, 'val_loss')
        last = seen[-1] if seen else {}
        losses = [last.get('train_loss'), last.get('val_loss'),
                  min(column(seen, 'val_loss'), default=None), last.get('val_bpb')]
        table.append((losses[3 if by_bits else 1], [
            name, str(last.get('iter', '-')), duration(last['elapsed_s']) if last else '-',
            *('-' if x is None else f'{x:.4f}' for x in losses)]))
    table.sort(key=lambda entry: (entry[0] is None, entry[0]))
    lines = [['run', 'iteration', 'time', 'training', 'validation', 'best', 'bits/byte'],
             *(cells for _, cells in table)]
    width = max(len(name) for name, *_ in lines)
    return [f'{name:<{width}}' + ''.join(f'  {cell:>10}' for cell in cells)
            for name, *cells in lines]
