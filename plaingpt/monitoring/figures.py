"""Curves of runs as a picture, with matplotlib and without torch. make_panels lists its parts."""

import io
import re
from dataclasses import dataclass, field

from plaingpt.monitoring.metrics_file import column, rows_with, step_tokens
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import printable

# Okabe and Ito 2008, a palette that colour-blind people tell apart too; black is for references
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
STYLES = ('-', '--', ':', '-.')
COLUMNS = 3  # panels beside each other
FLAT = 0.01  # a panel whose values differ by less than this share of the largest is left out
NAME_WIDTH = 28  # characters of a run's name in a table
# key of a row → (label, whether it is of the validation split, style)
LOSSES = {'loss': ('training, single steps', False, dict(ls='-', lw=0.8, alpha=0.5)),
          'train_loss': ('training', False, dict(ls='-', marker='o')),
          'val_loss': ('validation', True, dict(ls='--', marker='o'))}
BITS = {'val_bpb': ('validation', True, dict(ls='--', marker='o'))}


@dataclass
class Line:
    """A line of a panel, or a dot where it has a single point."""

    run: int  # the number of its run
    xs: list
    ys: list
    label: str | None = None  # several lines with one label are named once
    colour: int | None = None  # index of COLOURS; None: the colour of its run
    style: dict = field(default_factory=dict)


@dataclass
class Panel:
    """A coordinate system with lines."""

    title: str
    lines: list
    x_label: str = 'iteration'
    y_label: str = ''
    log: bool = False  # a logarithmic y axis, where the values differ by a factor of 30 and more
    range: tuple | None = (0, None)  # of the y axis; None: what fits
    zoom: bool = False  # see cut_off_the_start
    band: tuple | None = None  # (label, xs, lows, highs) of a reference
    ticks: list | None = None  # names of 0, 1, 2, … on the x axis

    def is_flat(self):
        """Whether no line rises or falls, and lines do not differ."""
        values = [y for line in self.lines for y in line.ys]
        height = 1 if self.range and self.range[1] else max(map(abs, values), default=0)
        return all(len(line.xs) < 2 for line in self.lines) \
            or max(values) - min(values) <= FLAT * height


def draw_curves(runs, path, reference=None):
    """Draw runs, [(name, rows)], into the PNG at `path`, and the band of a references.Reference.

    Raises UserError where matplotlib is absent, or no run has anything to draw.
    """
    if not any(rows_with(rows, 'loss') or rows_with(rows, 'val_loss') for _, rows in runs):
        raise UserError('there is nothing to draw yet: no step is logged, no evaluation made')
    picture = io.BytesIO()
    make_figure(runs, reference).savefig(picture, dpi=110)
    write_atomically(path, picture.getvalue())


def make_figure(runs, reference=None):
    """→ the Figure of runs, [(name, rows)]: the panels that say something of them."""
    with needs('matplotlib', 'drawing curves'):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    panels = make_panels([rows for _, rows in runs], reference)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * max(2, columns), 3.6 * lines + 0.5), layout='constrained')
    FigureCanvasAgg(figure)
    last_iter = max(row['iter'] for _, rows in runs for row in rows)
    for i, panel in enumerate(panels):
        draw_panel(figure.add_subplot(lines, columns, i + 1), panel, len(runs), last_iter)
    name_runs(figure, runs)
    return figure


# -----------------------------------------------------------------------------
# rows of runs → panels


def make_panels(runs, reference=None):
    """runs: lists of rows → the Panels that say something of them, the loss over iterations first
    or after bits a byte."""
    rates = [column_panel(runs, 'learning rate', 'lr'),
             column_panel(runs, 'gradient norm, before clipping', 'grad_norm', log=True),
             column_panel(runs, 'tokens a second', 'tokens_per_s')]
    health = [layer_panel(runs, 'gradient norm of a layer', 'grad_norm', log=True),
              layer_panel(runs, 'weight norm of a layer', 'weight_norm'),
              layer_panel(runs, 'update / weight in a step', 'update_ratio', log=True),
              layer_panel(runs, 'activation RMS after a layer', 'activation_rms'),
              layer_panel(runs, 'largest attention logit', 'attention_logit', log=True),
              layer_panel(runs, 'share of dead MLP units', 'dead_units', range=(-0.02, 1.02)),
              position_panel(runs)]
    return loss_panels(runs, reference) \
        + [panel for panel in rates + health if not panel.is_flat()]


def loss_panels(runs, reference):
    """Losses over iterations and over time; over tokens where steps have different sizes. Where
    tokenizers differ, bits a byte instead of losses that do not compare."""
    sizes = {step_tokens(rows) for rows in runs} | {reference and reference.step_tokens()}
    same_steps = len(sizes - {None}) <= 1
    longest = max(row['elapsed_s'] for rows in runs for row in rows)
    unit, seconds = ('hours', 3600) if longest > 3 * 3600 else \
        ('minutes', 60) if longest > 180 else ('seconds', 1)

    def panel(name, x, keys, x_label, scale=1):
        y_label = 'bits a byte' if keys is BITS else 'loss, nats a token'
        lines = [Line(i, [at / scale for at in column(seen, x)], column(seen, key), label,
                      int(validates) if len(runs) == 1 else None, style)
                 for i, rows in enumerate(runs) for key, (label, validates, style) in keys.items()
                 if (seen := rows_with(rows, x, key))]
        band = reference_band(reference, x) if reference and keys is LOSSES \
            and (x == 'tokens' or (x == 'iter' and same_steps)) else None
        return Panel(name, lines, x_label, y_label, zoom=True, band=band)

    over_iterations = panel('loss over iterations', 'iter', LOSSES, 'iteration')
    if tokenizers_differ(runs):
        return [panel('bits a byte over iterations', 'iter', BITS, 'iteration'),
                panel('bits a byte over time', 'elapsed_s', BITS, unit, seconds), over_iterations]
    others = [panel('loss over tokens', 'tokens', LOSSES, 'tokens')] * (not same_steps) \
        + [panel('loss over time', 'elapsed_s', LOSSES, unit, seconds)]
    return [over_iterations, *(each for each in others if not each.is_flat())]


def reference_band(reference, x):
    """The validation losses that 95% of new seeds of a reference are expected in, as of Panel."""
    tokens, lows, highs = zip(*reference.band(), strict=True) if reference.band() else ((), (), ())
    xs = [t if x == 'tokens' else t / reference.step_tokens() for t in tokens]
    return f'expected of {reference.name}, {len(reference.rows)} seeds', xs, lows, highs


def column_panel(runs, title, key, **options):
    """The values of a key of each run."""
    lines = [Line(i, column(seen, 'iter'), column(seen, key))
             for i, rows in enumerate(runs) if (seen := rows_with(rows, 'iter', key))]
    return Panel(title, lines, **options)


def layer_panel(runs, title, measure, **options):
    """A health measure of the first and the last block; of a single run also of a middle block and
    of the token embedding."""
    prefix, lines = f'health/{measure}/', []
    for i, rows in enumerate(runs):
        names = {key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)}
        blocks = sorted((name for name in names if re.fullmatch('h[.][0-9]+', name)),
                        key=lambda name: (len(name), name))
        layers = [*blocks[:1], *blocks[-1:]]
        if len(runs) == 1:
            middle = len(blocks) // 2
            layers = [*blocks[:1], *blocks[middle:middle + 1], *blocks[-1:], *(names & {'wte'})]
        layers = list(dict.fromkeys(layers))  # a small model has fewer
        for n, layer in enumerate(layers):
            seen = rows_with(rows, 'iter', prefix + layer)
            label = layer if len(runs) == 1 else ('first block', 'last block')[n]
            lines.append(Line(i, column(seen, 'iter'), column(seen, prefix + layer), label,
                              n if len(runs) == 1 else None, {'ls': STYLES[n]}))
    return Panel(title, lines, **options)


def position_panel(runs):
    """How the loss falls with the position in the sequence, at the last health check."""
    prefix, losses = 'health/loss_at/', []
    for rows in runs:
        row = next((row for row in reversed(rows) if f'{prefix}0' in row), {'iter': 0})
        losses.append({key.removeprefix(prefix): value for key, value in row.items()
                       if key.startswith(prefix) and value is not None})
    # Models of several block sizes have other ranges of positions.
    names = sorted({name for found in losses for name in found},
                   key=lambda name: [int(n) for n in re.findall('[0-9]{1,9}', name)])
    lines = [Line(i, [names.index(name) for name in found], list(found.values()),
                  style={'marker': 'o'}) for i, found in enumerate(losses) if found]
    return Panel('loss by position in the sequence', lines, 'position',
                 'nats a token' + f', at iteration {row["iter"]}' * (len(runs) == 1),
                 range=None, ticks=names)


# -----------------------------------------------------------------------------
# panels → matplotlib


def draw_panel(axes, panel, n_runs, last_iter):
    """Lines, title, labels, ranges and legend. last_iter: of all runs; iterations end alike"""
    from matplotlib.ticker import EngFormatter
    colours = choose_colours(n_runs)
    if panel.band and panel.band[1]:
        label, xs, lows, highs = panel.band
        axes.fill_between(xs, lows, highs, color='black', alpha=0.2, lw=0)
        axes.plot(xs, [(low + high) / 2 for low, high in zip(lows, highs, strict=True)],
                  color='black', lw=1, ls=':', label=label)
    for line in panel.lines:
        # Lines and dots are smaller than those of the runs below them: equal ones remain seen.
        width = line_width(line.run, n_runs)
        options = {'lw': width, 'ms': 3 * width, **line.style}
        if len(line.xs) == 1:
            options['marker'] = 'o'
        named = line.label in axes.get_legend_handles_labels()[1]
        colour = colours[line.run] if line.colour is None else COLOURS[line.colour]
        axes.plot(line.xs, line.ys, color=colour, label=None if named else line.label, **options)
    positive = [y for line in panel.lines for y in line.ys if y > 0]
    if panel.zoom:
        cut_off_the_start(axes)
    elif panel.log and positive and max(positive) > 30 * min(positive):
        axes.set_yscale('log', nonpositive='mask')  # zeros are left out
    elif panel.range:
        axes.set_ylim(panel.range[0], panel.range[1] or 1.05 * max(positive, default=1))
    axes.set_title(panel.title, fontsize=11, loc='left')
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    else:  # iterations, tokens and time begin at 0
        last = last_iter if panel.x_label == 'iteration' and last_iter and not panel.band \
            else axes.get_xlim()[1]
        axes.set_xlim(-0.02 * last, 1.02 * last)
    for axis, label in ((axes.xaxis, panel.x_label), (axes.yaxis, panel.title)):
        if label in ('tokens', 'tokens a second'):
            axis.set_major_formatter(EngFormatter(sep=''))  # 250k
        elif label == 'iteration':
            axis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        legend = axes.legend(fontsize=8, framealpha=0.8, edgecolor='none')
        for handle in legend.legend_handles if n_runs > 1 else ():
            if handle.get_color() in colours:  # a style stands for all runs
                handle.set(color='grey', lw=1.2, ms=3.5)


def cut_off_the_start(axes):
    """Fit the y axis to what comes after the first twentieth of each line: with its steep start in
    the picture, small differences later on could not be seen. A line with fewer than three points
    there is shown whole."""
    shown = []
    for line in axes.get_lines():
        xs, ys = line.get_xdata(), line.get_ydata()
        late = [y for x, y in zip(xs, ys, strict=True) if x > xs[0] + (xs[-1] - xs[0]) / 20]
        shown += late if len(late) > 2 else list(ys)
    margin = 0.05 * (max(shown) - min(shown)) if shown else 0
    if margin:
        axes.set_ylim(min(shown) - margin, max(shown) + margin)


def name_runs(figure, runs):
    """One run is the title; several share one legend of their colours."""
    from matplotlib.lines import Line2D
    if len(runs) == 1:
        figure.suptitle(plain(runs[0][0]), fontsize=12)
        return
    handles = [Line2D([], [], color=colour, lw=line_width(i, len(runs)))
               for i, colour in enumerate(choose_colours(len(runs)))]
    names = [plain(name) + ('' if rows else ' (nothing logged yet)') for name, rows in runs]
    figure.legend(handles, names, loc='outside upper center', ncols=min(4, len(runs)),
                  fontsize=10, frameon=False)


def plain(name):
    """The name of a run as matplotlib shows it, which takes what is between two $ for a formula."""
    return printable(name).replace('$', r'\$')


def line_width(i, n):
    return 1.2 + 0.9 * (n - 1 - i) / max(1, n - 1)


def choose_colours(n):
    """n different colours; beyond the palette those of a map from dark to light."""
    if n <= len(COLOURS):
        return COLOURS[:n]
    from matplotlib import colormaps
    return [colormaps['viridis'](0.95 * i / (n - 1)) for i in range(n)]


# -----------------------------------------------------------------------------
# the losses of several runs


def tokenizers_differ(runs):
    """Whether tokens stand for different amounts of text, so that losses a token do not compare.
    runs: lists of rows."""
    lengths = [row['val_loss'] / row['val_bpb'] for rows in runs
               for row in rows_with(rows, 'val_loss', 'val_bpb')[-1:] if row['val_bpb']]
    return bool(lengths) and max(lengths) > 1.001 * min(lengths)


def loss_table(runs):
    """→ the lines of a table of the losses at the last evaluation of runs, [(name, rows)], the best
    first: by bits a byte where tokenizers differ, else by validation loss. Runs without come last.
    """
    key = 'val_bpb' if tokenizers_differ([rows for _, rows in runs]) else 'val_loss'
    table = []
    for name, rows in runs:
        seen = rows_with(rows, 'val_loss')
        last = seen[-1] if seen else {}
        losses = [last.get('train_loss'), last.get('val_loss'),
                  min(column(seen, 'val_loss'), default=None), last.get('val_bpb')]
        name = printable(name)
        if len(name) > NAME_WIDTH:  # names of runs differ at their ends
            name = f'{name[:NAME_WIDTH // 2 - 1]}…{name[-NAME_WIDTH // 2:]}'
        table.append((last.get(key), [name, str(last.get('iter', '-')),
                                      *('-' if x is None else f'{x:.4f}' for x in losses)]))
    table.sort(key=lambda entry: (entry[0] is None, entry[0]))
    lines = [('run', 'iteration', 'training', 'validation', 'best', 'bits/byte'),
             *(cells for _, cells in table)]
    width = max(len(name) for name, *_ in lines)
    return [f'{name:<{width}}' + ''.join(f'  {cell:>10}' for cell in cells)
            for name, *cells in lines]
