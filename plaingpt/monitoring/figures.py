"""Curves of runs as a picture, with matplotlib and without torch. PANELS lists its parts."""

import io

from plaingpt.monitoring.metrics_file import column, rows_with, step_tokens
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import printable

# Okabe and Ito 2008, a palette that colour-blind people tell apart too; black is for references
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
STYLES = ('-', '--', ':', '-.')
COLUMNS = 3  # panels beside each other


def draw(runs, path, reference=None):
    """Draw runs, [(name, rows)], into the PNG at `path`, and the band of a references.Reference.

    Raises UserError where matplotlib is absent, or no run has anything to draw.
    """
    with needs('matplotlib', 'drawing curves'):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    if not any(points(rows, 'iter', key)[0] for _, rows in runs for key in ('loss', 'val_loss')):
        raise UserError('there is nothing to draw yet: no step is logged, no evaluation made')
    runs = [(*run, colour) for run, colour in zip(runs, choose_colours(len(runs)), strict=True)]
    panels = [panel for panel in PANELS if any(panel.has(rows) for _, rows, _ in runs)]
    lines = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3.6 * lines + 0.5), layout='constrained')
    FigureCanvasAgg(figure)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(lines, COLUMNS, i + 1)
        panel.draw(axes, runs, reference)
        finish_axes(axes, panel)
    name_runs(figure, runs)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    write_atomically(path, picture.getvalue())


def finish_axes(axes, panel):
    """Title, labels, grid and legend."""
    from matplotlib.ticker import EngFormatter
    axes.set_title(panel.title, fontsize=11, loc='left')
    axes.set_xlabel(axes.get_xlabel() or panel.x_label)
    axes.grid(alpha=0.25)
    for axis, label in ((axes.xaxis, panel.x_label), (axes.yaxis, panel.title)):
        if label in ('tokens', 'tokens a second'):
            axis.set_major_formatter(EngFormatter(sep=''))  # 250k
    axes.spines[['top', 'right']].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        show_as_they_are(axes.legend(fontsize=8, framealpha=0.8, edgecolor='none').get_texts())


def name_runs(figure, runs):
    """One run is the title; several share one legend of their colours."""
    from matplotlib.lines import Line2D
    if len(runs) == 1:
        show_as_they_are([figure.suptitle(runs[0][0], fontsize=12)])
    else:
        legend = figure.legend([Line2D([], [], color=colour, lw=2) for *_, colour in runs],
                               [name for name, *_ in runs], loc='outside upper center',
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


def curve(axes, xs, ys, style, **options):
    """A line, or a dot where there is a single point."""
    axes.plot(xs, ys, style, lw=1.2, marker='o' if len(xs) == 1 else None, ms=3.5, **options)


def points(rows, x, y):
    """→ (xs, ys) of the rows that have both."""
    rows = rows_with(rows, x, y)
    return column(rows, x), column(rows, y)


def smoothed(ys, n):
    """Means over each value and up to n - 1 before it."""
    sums, out = 0.0, []
    for i, y in enumerate(ys):
        sums += y - (ys[i - n] if i >= n else 0.0)
        out.append(sums / min(i + 1, n))
    return out


class Panel:
    """`keys` of the rows over `x`. bottom, top: of the y axis (default: what fits);
    log: make it logarithmic where the values differ by a factor of 30 and more"""

    def __init__(self, title, keys, x='iter', x_label='iteration', log=False, bottom=None,
                 top=None):
        self.title, self.keys, self.x, self.x_label = title, keys, x, x_label
        self.log, self.bottom, self.top = log, bottom, top

    def has(self, rows):
        return any(points(rows, self.x, key)[0] for key in self.keys)

    def draw(self, axes, runs, reference):
        """runs: [(name, rows, colour)]"""
        for _, rows, colour in runs:
            for key, style in zip(self.keys, STYLES, strict=False):
                curve(axes, *points(rows, self.x, key), style, color=colour)
        self.scale(axes)

    def scale(self, axes):
        ys = [y for line in axes.get_lines() for y in line.get_ydata() if y > 0]
        if self.log and ys and max(ys) > 30 * min(ys):
            axes.set_yscale('log', nonpositive='mask')  # zeros are left out
        elif self.bottom is not None:
            axes.set_ylim(self.bottom, self.top)


class LossPanel(Panel):
    """Training loss as logged, pale, and smoothed; validation loss with a dot for each evaluation;
    behind them the band of a reference, where the x axes are the same."""

    def draw(self, axes, runs, reference):
        unit, seconds = time_unit(runs) if self.x == 'elapsed_s' else (self.x_label, 1)
        axes.set_xlabel(unit)
        same_steps = reference and all(step_tokens(rows) == reference.step_tokens()
                                       for _, rows, _ in runs)
        if reference and (self.x == 'tokens' or (self.x == 'iter' and same_steps)):
            draw_band(axes, reference, self.x)
        for i, (_, rows, colour) in enumerate(runs):
            xs, ys = points(rows, self.x, 'loss')
            xs = [x / seconds for x in xs]
            axes.plot(xs, ys, color=colour, lw=0.6, alpha=0.3)
            curve(axes, xs, smoothed(ys, max(1, len(ys) // 50)), '-', color=colour,
                  label='training' if i == 0 else None)
            xs, ys = points(rows, self.x, 'val_loss')
            axes.plot([x / seconds for x in xs], ys, '--o', ms=3.5, lw=1.2,
                      color=colour if len(runs) > 1 else COLOURS[1],
                      label='validation' if i == 0 else None)
        cut_off_the_start(axes)
        axes.set_ylabel('loss, nats a token')


def cut_off_the_start(axes):
    """Fit the y axis to what comes after the first twentieth of the curves: with their steep start
    in the picture, small differences later on could not be seen."""
    found = [point for line in axes.get_lines() for point in line.get_xydata()]
    xs = [x for x, _ in found]
    late = [y for x, y in found if x > min(xs) + (max(xs) - min(xs)) / 20]
    margin = 0.05 * (max(late) - min(late)) if late else 0
    if margin:
        axes.set_ylim(min(late) - margin, max(late) + margin)


def time_unit(runs):
    """→ (name, seconds) of a unit that suits the longest run."""
    longest = max(row['elapsed_s'] for _, rows, _ in runs for row in rows)
    if longest > 3 * 3600:
        return 'hours', 3600
    return ('minutes', 60) if longest > 180 else ('seconds', 1)


def draw_band(axes, reference, x):
    """The validation losses that 95% of new seeds of a reference lie within."""
    band = reference.band()
    xs = [tokens if x == 'tokens' else tokens / reference.step_tokens() for tokens, _, _ in band]
    axes.fill_between(xs, [low for _, low, _ in band], [high for _, _, high in band],
                      color='black', alpha=0.2, lw=0)
    axes.plot(xs, [(low + high) / 2 for _, low, high in band], color='black', lw=1, ls=':',
              label=f'{reference.name}, validation of {len(reference.rows)} seeds')


class LayersPanel(Panel):
    """A health measure of the first, a middle and the last block, and of the embedding; of several
    runs that of the first and the last block."""

    def __init__(self, title, measure, log=False, bottom=None, top=None):
        super().__init__(title, (), log=log, bottom=bottom, top=top)
        self.prefix = f'health/{measure}/'

    def has(self, rows):  # where health was measured: a panel may say that this was not seen
        return any(key.startswith('health/') for row in rows for key in row)

    def draw(self, axes, runs, reference):
        several = len(runs) > 1
        for j, (_, rows, colour) in enumerate(runs):
            layers = self.choose_layers(rows, several)
            names = ('first block', 'last block') if several else layers
            for i, (layer, name) in enumerate(zip(layers, names, strict=False)):
                curve(axes, *points(rows, 'iter', self.prefix + layer), STYLES[i],
                      color=colour if several else COLOURS[i], label=name if j == 0 else None)
        if not axes.get_lines():
            axes.text(0.5, 0.5, 'not seen in this model', ha='center', transform=axes.transAxes)
        self.scale(axes)

    def choose_layers(self, rows, several):
        """['h.0', …]: the layers to draw, fewer where there are several runs."""
        found = {key.removeprefix(self.prefix) for row in rows for key in row
                 if key.startswith(self.prefix)}
        blocks = sorted(int(layer[2:]) for layer in found if layer.startswith('h.'))
        if not blocks:
            return []
        middle = () if several else (len(blocks) // 2,)
        chosen = [f'h.{blocks[i]}' for i in sorted({0, len(blocks) - 1, *middle})]
        return chosen if several else chosen + sorted(found & {'wte'})


class PositionsPanel(Panel):
    """How the loss falls with the position in the sequence, at the last health check."""

    def __init__(self):
        super().__init__('loss by position in the sequence', (), x_label='position')

    def last(self, rows):
        """→ (iteration, {positions: loss}) of the last health check."""
        prefix = 'health/loss_at/'
        row = next((row for row in reversed(rows) if f'{prefix}0' in row), {'iter': 0})
        return row['iter'], {key.removeprefix(prefix): value for key, value in row.items()
                             if key.startswith(prefix) and value is not None}

    def has(self, rows):
        return bool(self.last(rows)[1])

    def draw(self, axes, runs, reference):
        for _, rows, colour in runs:
            it, losses = self.last(rows)
            axes.plot(list(losses), list(losses.values()), '-o', ms=3.5, lw=1.2, color=colour)
            axes.set_ylabel('nats a token' if len(runs) > 1 else
                            f'nats a token, at iteration {it}')


PANELS = (
    LossPanel('loss over iterations', ('loss', 'val_loss')),
    LossPanel('loss over tokens', ('loss', 'val_loss'), 'tokens', 'tokens'),
    LossPanel('loss over time', ('loss', 'val_loss'), 'elapsed_s', 'seconds'),
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
