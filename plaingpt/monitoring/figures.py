"""Curves of runs as a picture, with matplotlib and without torch. PANELS lists its parts."""

import io
import re
from dataclasses import dataclass

from plaingpt.monitoring.metrics_file import column, rows_with, step_tokens
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import printable

# Okabe and Ito 2008, a palette that colour-blind people tell apart too; black is for references
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
STYLES = ('-', '--', ':', '-.')
COLUMNS = 3  # panels beside each other
FLAT = 0.01  # a panel whose values differ by less than this share of its height is left out
NAME_WIDTH = 28  # characters of a run's name in a table


@dataclass(frozen=True)
class Run:
    """A run as it is drawn."""

    name: str
    rows: list
    colour: object
    width: float = 1.2  # of its lines


def draw(runs, path, reference=None):
    """Draw runs, [(name, rows)], into the PNG at `path`, and the band of a references.Reference.

    Raises UserError where matplotlib is absent, or no run has anything to draw.
    """
    if not any(points(rows, 'iter', key)[0] for _, rows in runs for key in ('loss', 'val_loss')):
        raise UserError('there is nothing to draw yet: no step is logged, no evaluation made')
    picture = io.BytesIO()
    make_figure(runs, reference).savefig(picture, dpi=110)
    write_atomically(path, picture.getvalue())


def make_figure(runs, reference=None):
    """→ the Figure of runs, [(name, rows)]: the panels that say something of them."""
    with needs('matplotlib', 'drawing curves'):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    # Lines and dots are smaller than those of the runs below them: equal ones remain seen.
    n = len(runs)
    runs = [Run(name, rows, colour, 1.2 + 0.9 * (n - 1 - i) / max(1, n - 1))
            for i, ((name, rows), colour) in enumerate(zip(runs, choose_colours(n), strict=True))]
    panels = [panel for panel in PANELS if panel.says_something(runs, reference)]
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * max(2, columns), 3.6 * lines + 0.5), layout='constrained')
    FigureCanvasAgg(figure)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        panel.draw(axes, runs, reference)
        finish_axes(axes, panel, runs, reference)
    name_runs(figure, runs)
    return figure


def finish_axes(axes, panel, runs, reference):
    """Title, labels, range, grid and legend."""
    from matplotlib.ticker import EngFormatter
    axes.set_title(panel.title, fontsize=11, loc='left')
    if not axes.axison:  # a text
        return
    axes.set_xlabel(axes.get_xlabel() or panel.x_label)
    axes.grid(alpha=0.25)
    for axis, label in ((axes.xaxis, panel.x_label), (axes.yaxis, panel.title)):
        if label in ('tokens', 'tokens a second'):
            axis.set_major_formatter(EngFormatter(sep=''))  # 250k
    axes.spines[['top', 'right']].set_visible(False)
    if panel.x == 'iter':
        axes.xaxis.get_major_locator().set_params(integer=True)
    if panel.x:  # iterations, tokens and time begin at 0, and iterations end alike
        last = max(row['iter'] for run in runs for row in run.rows)
        if panel.x != 'iter' or reference or not last:
            last = axes.get_xlim()[1]
        axes.set_xlim(-0.02 * last, 1.02 * last)
    if axes.get_legend_handles_labels()[0]:
        legend = axes.legend(fontsize=8, framealpha=0.8, edgecolor='none')
        show_as_they_are(legend.get_texts())
        for handle in legend.legend_handles:  # a style stands for all runs
            if len(runs) > 1 and handle.get_color() in [run.colour for run in runs]:
                handle.set(color='grey', lw=1.2, ms=3.5)


def name_runs(figure, runs):
    """One run is the title; several share one legend of their colours."""
    from matplotlib.lines import Line2D
    if len(runs) == 1:
        show_as_they_are([figure.suptitle(runs[0].name, fontsize=12)])
    else:
        legend = figure.legend([Line2D([], [], color=run.colour, lw=run.width) for run in runs],
                               [run.name + ('' if run.rows else ' (nothing logged yet)')
                                for run in runs], loc='outside upper center',
                               ncols=min(4, len(runs)), fontsize=10, frameon=False)
        show_as_they_are(legend.get_texts())


def show_as_they_are(texts):
    """Names of runs are no formulas: matplotlib would take what is between two $ for one."""
    for text in texts:
        text.set_parse_math(False)
        text.set_text(printable(text.get_text()))


def choose_colours(n):
    """n different colours; beyond the palette those of a map from dark to light."""
    if n <= len(COLOURS):
        return COLOURS[:n]
    from matplotlib import colormaps
    return [colormaps['viridis'](0.95 * i / (n - 1)) for i in range(n)]


def points(rows, x, y):
    """→ (xs, ys) of the rows that have both."""
    rows = rows_with(rows, x, y)
    return column(rows, x), column(rows, y)


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
        table.append((last.get(key), [shortened(printable(name)), str(last.get('iter', '-')),
                                      *('-' if x is None else f'{x:.4f}' for x in losses)]))
    table.sort(key=lambda entry: (entry[0] is None, entry[0]))
    table = [['run', 'iteration', 'training', 'validation', 'best', 'bits/byte'],
             *(cells for _, cells in table)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return ['  '.join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width
                                                in zip(cells, widths[1:], strict=True))])
            for name, *cells in table]


def shortened(name):
    """A name without its middle, where it is long: names of runs differ at their ends."""
    half = NAME_WIDTH // 2
    return name if len(name) <= NAME_WIDTH else f'{name[:half - 1]}…{name[-half:]}'


# -----------------------------------------------------------------------------
# panels


class Panel:
    """`keys` of the rows over `x`. bottom, top: of the y axis (default: what fits);
    log: make it logarithmic where the values differ by a factor of 30 and more"""

    def __init__(self, title, keys, x='iter', x_label='iteration', log=False, bottom=None,
                 top=None):
        self.title, self.keys, self.x, self.x_label = title, keys, x, x_label
        self.log, self.bottom, self.top = log, bottom, top

    def curves(self, rows, several):
        """→ [(label, xs, ys)] of a run; several: there are other runs in the picture."""
        return [(None, *points(rows, self.x, key)) for key in self.keys]

    def says_something(self, runs, reference):
        """Whether there is a line, and lines that rise, fall or differ."""
        curves = [curve for run in runs for curve in self.curves(run.rows, len(runs) > 1)]
        values = [y for _, _, ys in curves for y in ys]
        height = self.top or max(map(abs, values), default=0)
        return any(len(xs) > 1 for _, xs, _ in curves) \
            and max(values) - min(values) > FLAT * height

    def draw(self, axes, runs, reference):
        several = len(runs) > 1
        for run in runs:
            for i, (label, xs, ys) in enumerate(self.curves(run.rows, several)):
                plot(axes, xs, ys, label, color=run.colour if several else COLOURS[i],
                     lw=run.width, ls=STYLES[i])
        self.scale(axes)

    def scale(self, axes):
        ys = [y for line in axes.get_lines() for y in line.get_ydata() if y > 0]
        if self.log and ys and max(ys) > 30 * min(ys):
            axes.set_yscale('log', nonpositive='mask')  # zeros are left out
        elif self.bottom is not None:
            axes.set_ylim(self.bottom, self.top or 1.05 * max(ys, default=1))


def plot(axes, xs, ys, label, **options):
    """A line, or a dot where there is a single point. A label of several lines is named once."""
    if xs:
        if len(xs) == 1:
            options['marker'] = 'o'
        named = label in axes.get_legend_handles_labels()[1]
        axes.plot(xs, ys, label=None if named else label, ms=3 * options['lw'], **options)


LOSSES = {'loss': ('training, single steps', dict(ls='-', lw=0.8, alpha=0.5)),
          'train_loss': ('training', dict(ls='-', marker='o')),
          'val_loss': ('validation', dict(ls='--', marker='o')),
          'val_bpb': ('validation', dict(ls='--', marker='o'))}


class LossPanel(Panel):
    """Losses over `x`: of single steps a thin line, of evaluations a dot each; behind them the band
    of a reference, where the x axes are the same."""

    def __init__(self, title, keys=('loss', 'train_loss', 'val_loss'),
                 y_label='loss, nats a token', **options):
        super().__init__(title, keys, **options)
        self.y_label = y_label

    def curves(self, rows, several):
        return [(LOSSES[key][0], *points(rows, self.x, key)) for key in self.keys]

    def says_something(self, runs, reference):
        differ = tokenizers_differ([run.rows for run in runs])
        if 'val_bpb' in self.keys:
            return differ
        if self.x == 'tokens':  # over iterations it is the same picture, unless steps differ
            return not differ and not same_steps(runs, reference)
        # A single evaluation is shown once.
        curves = [curve for run in runs for curve in self.curves(run.rows, len(runs) > 1)]
        return self.x == 'iter' or (not differ and any(len(xs) > 1 for _, xs, _ in curves))

    def draw(self, axes, runs, reference):
        unit, seconds = time_unit(runs) if self.x == 'elapsed_s' else (self.x_label, 1)
        axes.set_xlabel(unit)
        several = len(runs) > 1
        if reference and 'val_loss' in self.keys \
                and (self.x == 'tokens' or (self.x == 'iter' and same_steps(runs, reference))):
            draw_band(axes, reference, self.x)
        for run in runs:
            for key, (label, xs, ys) in zip(self.keys, self.curves(run.rows, several), strict=True):
                validates = key.startswith('val_') and not several
                options = {'color': COLOURS[1] if validates else run.colour, 'lw': run.width,
                           **LOSSES[key][1]}
                plot(axes, [x / seconds for x in xs], ys, label, **options)
        cut_off_the_start(axes)
        axes.set_ylabel(self.y_label)


def same_steps(runs, reference):
    """Whether all have equally many tokens in a step."""
    sizes = {step_tokens(run.rows) for run in runs} | {reference and reference.step_tokens()}
    return len(sizes - {None}) <= 1


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


def time_unit(runs):
    """→ (name, seconds) of a unit that suits the longest run."""
    longest = max(row['elapsed_s'] for run in runs for row in run.rows)
    if longest > 3 * 3600:
        return 'hours', 3600
    return ('minutes', 60) if longest > 180 else ('seconds', 1)


def draw_band(axes, reference, x):
    """The validation losses that 95% of new seeds of a reference are expected in."""
    band = reference.band()
    xs = [tokens if x == 'tokens' else tokens / reference.step_tokens() for tokens, _, _ in band]
    axes.fill_between(xs, [low for _, low, _ in band], [high for _, _, high in band],
                      color='black', alpha=0.2, lw=0)
    axes.plot(xs, [(low + high) / 2 for _, low, high in band], color='black', lw=1, ls=':',
              label=f'expected of {reference.name}, {len(reference.rows)} seeds')


class LayersPanel(Panel):
    """A health measure of the first, a middle and the last block, and of the embedding; of several
    runs that of the first and the last block."""

    def __init__(self, title, measure, log=False, bottom=None, top=None):
        super().__init__(title, (), log=log, bottom=bottom, top=top)
        self.prefix = f'health/{measure}/'

    def curves(self, rows, several):
        layers = self.choose_layers(rows, several)
        names = ('first block', 'last block') if several else layers
        return [(name, *points(rows, 'iter', self.prefix + layer))
                for layer, name in zip(layers, names, strict=False)]

    def choose_layers(self, rows, several):
        """['h.0', …]: the layers to draw, fewer where there are several runs."""
        found = {key.removeprefix(self.prefix) for row in rows for key in row
                 if key.startswith(self.prefix)}
        blocks = sorted(int(layer[2:]) for layer in found if re.fullmatch('h[.][0-9]{1,9}', layer))
        if not blocks:
            return []
        middle = () if several else (len(blocks) // 2,)
        chosen = [f'h.{blocks[i]}' for i in sorted({0, len(blocks) - 1, *middle})]
        return chosen if several else chosen + sorted(found & {'wte'})


class PositionsPanel(Panel):
    """How the loss falls with the position in the sequence, at the last health check."""

    def __init__(self):
        super().__init__('loss by position in the sequence', (), x=None, x_label='position')

    def last(self, rows):
        """→ (iteration, {positions: loss}) of the last health check."""
        prefix = 'health/loss_at/'
        row = next((row for row in reversed(rows) if f'{prefix}0' in row), {'iter': 0})
        return row['iter'], {key.removeprefix(prefix): value for key, value in row.items()
                             if key.startswith(prefix) and value is not None}

    def curves(self, rows, several):
        losses = self.last(rows)[1]
        return [(None, list(losses), list(losses.values()))]

    def positions(self, runs):
        """Those of all runs, in order: models of several block sizes have other ranges."""
        found = {name for run in runs for name in self.last(run.rows)[1]}
        return sorted(found, key=lambda name: [int(n) for n in re.findall('[0-9]{1,9}', name)])

    def draw(self, axes, runs, reference):
        axes.xaxis.update_units(self.positions(runs))
        super().draw(axes, runs, reference)
        for line in axes.get_lines():
            line.set_marker('o')
        axes.set_ylabel('nats a token' if len(runs) > 1 else
                        f'nats a token, at iteration {self.last(runs[0].rows)[0]}')


class TablePanel(Panel):
    """The losses of several runs in figures."""

    def __init__(self):
        super().__init__('final losses, the best first', (), x=None)

    def says_something(self, runs, reference):
        return len(runs) > 1

    def draw(self, axes, runs, reference):
        axes.set_axis_off()
        lines = loss_table([(run.name, run.rows) for run in runs])
        show_as_they_are([axes.text(0, 0.97, '\n'.join(lines), family='monospace', fontsize=7,
                                    va='top', transform=axes.transAxes)])


PANELS = (
    LossPanel('bits a byte over iterations', ('val_bpb',), 'bits a byte'),
    LossPanel('bits a byte over time', ('val_bpb',), 'bits a byte', x='elapsed_s'),
    LossPanel('loss over iterations'),
    LossPanel('loss over tokens', x='tokens', x_label='tokens'),
    LossPanel('loss over time', x='elapsed_s', x_label='seconds'),
    TablePanel(),
    Panel('learning rate', ('lr',), bottom=0),
    Panel('gradient norm, before clipping', ('grad_norm',), log=True, bottom=0),
    Panel('tokens a second', ('tokens_per_s',), bottom=0),
    LayersPanel('gradient norm of a layer', 'grad_norm', log=True, bottom=0),
    LayersPanel('weight norm of a layer', 'weight_norm', bottom=0),
    LayersPanel('update / weight in a step', 'update_ratio', log=True, bottom=0),
    LayersPanel('activation RMS after a layer', 'activation_rms', bottom=0),
    LayersPanel('largest attention logit', 'attention_logit', log=True, bottom=0),
    LayersPanel('share of dead MLP units', 'dead_units', bottom=-0.02, top=1.02),
    PositionsPanel(),
)
