"""Curves of runs as a picture: matplotlib, and nothing that needs torch."""

from plaingpt.monitoring.metrics import step_tokens
from plaingpt.system.errors import UserError

# Okabe and Ito 2008, a palette that colour-blind people tell apart too; black is for references
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')


def draw(runs, path, reference=None):
    """Draw runs, [(name, rows)], into the PNG at `path`, and the band of a reference.Reference.

    Raises UserError where matplotlib is absent, or no run has anything to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import EngFormatter
    except ImportError:
        raise UserError('curves need matplotlib: pip install matplotlib') from None
    if not any(points(rows, 'iter', key)[0] for _, rows in runs for key in ('loss', 'val_loss')):
        raise UserError('there is nothing to draw yet: no step is logged, no evaluation made')
    panels = [panel for panel in PANELS if any(panel.has(rows) for _, rows in runs)]
    columns = 3
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * lines + 0.5), layout='constrained')
    FigureCanvasAgg(figure)
    coloured = [(name, rows, colour)
                for (name, rows), colour in zip(runs, colours(len(runs)), strict=True)]
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        panel.draw(axes, coloured, reference)
        axes.set_title(panel.title, fontsize=11, loc='left')
        axes.set_xlabel(axes.get_xlabel() or panel.x_label)
        axes.grid(alpha=0.25)
        for axis, label in ((axes.xaxis, panel.x_label), (axes.yaxis, panel.title)):
            if label in ('tokens', 'tokens a second'):
                axis.set_major_formatter(EngFormatter(sep=''))  # 250k
        axes.spines[['top', 'right']].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, framealpha=0.8, edgecolor='none')
    if len(runs) == 1:
        figure.suptitle(runs[0][0], fontsize=12)
    else:  # which colour is whose, once for all panels
        figure.legend([Line2D([], [], color=colour, lw=2) for *_, colour in coloured],
                      [name for name, _ in runs], loc='outside upper center',
                      ncols=min(4, len(runs)), fontsize=10, frameon=False)
    figure.savefig(path, dpi=110)


def colours(n):
    """n colours that differ; beyond the palette those of a map from dark to light."""
    if n <= len(COLOURS):
        return COLOURS[:n]
    from matplotlib import colormaps
    return [colormaps['viridis'](0.95 * i / (n - 1)) for i in range(n)]


def curve(axes, xs, ys, style, **how):
    """A line, and a dot where it would have a single point."""
    axes.plot(xs, ys, style, lw=1.2, marker='o' if len(xs) == 1 else None, ms=3.5, **how)


def points(rows, x, y):
    """→ (xs, ys) of the rows that have both."""
    found = [(row[x], row[y]) for row in rows if row.get(y) is not None and row.get(x) is not None]
    return [a for a, _ in found], [b for _, b in found]


def smoothed(ys, n):
    """Running means over up to n values, as many as there are at the start."""
    sums, out = 0.0, []
    for i, y in enumerate(ys):
        sums += y - (ys[i - n] if i >= n else 0.0)
        out.append(sums / min(i + 1, n))
    return out


class Panel:
    """One picture: `keys` of the rows over x. bottom, top: of the y axis, if not anywhere;
    log: a logarithmic one, where the values differ by a factor of 30 and more"""

    def __init__(self, title, keys, x='iter', x_label='iteration', log=False, bottom=None,
                 top=None):
        self.title, self.keys, self.x, self.x_label = title, keys, x, x_label
        self.log, self.bottom, self.top = log, bottom, top

    def has(self, rows):
        return any(points(rows, self.x, key)[0] for key in self.keys)

    def draw(self, axes, runs, reference):
        """runs: [(name, rows, colour)]"""
        for _, rows, colour in runs:
            for key, style in zip(self.keys, ('-', '--', ':'), strict=False):
                curve(axes, *points(rows, self.x, key), style, color=colour)
        self.scale(axes)

    def scale(self, axes):
        ys = [y for line in axes.get_lines() for y in line.get_ydata() if y > 0]
        if self.log and ys and max(ys) > 30 * min(ys):
            axes.set_yscale('log', nonpositive='mask')  # zeros are left out
        elif self.bottom is not None:
            axes.set_ylim(self.bottom, self.top)


class LossPanel(Panel):
    """Training loss as it was logged, pale and smoothed, and validation loss with a dot for each
    evaluation; behind them the band of a reference."""

    def draw(self, axes, runs, reference):
        unit, seconds = unit_of_time(runs) if self.x == 'elapsed_s' else (self.x_label, 1)
        axes.set_xlabel(unit)
        many = len(runs) > 1
        same = reference and all(step_tokens(rows) == reference.step_tokens()
                                 for _, rows, _ in runs)
        if reference and (self.x == 'tokens' or (self.x == 'iter' and same)):
            band(axes, reference, self.x)
        for i, (_, rows, colour) in enumerate(runs):
            xs, ys = points(rows, self.x, 'loss')
            xs = [x / seconds for x in xs]
            axes.plot(xs, ys, color=colour, lw=0.6, alpha=0.3)
            curve(axes, xs, smoothed(ys, max(1, len(ys) // 50)), '-', color=colour,
                  label='training' if i == 0 else None)
            xs, ys = points(rows, self.x, 'val_loss')
            axes.plot([x / seconds for x in xs], ys, '--o', ms=3.5, lw=1.2,
                      color=colour if many else COLOURS[1],
                      label='validation' if i == 0 else None)
        show_the_end(axes)
        axes.set_ylabel('loss, nats a token')


def show_the_end(axes):
    """Let the steep start of the curves leave the picture at the top, so that small differences
    later on are seen: the y axis spans what comes after the first twentieth."""
    found = [point for line in axes.get_lines() for point in line.get_xydata()]
    xs = [x for x, _ in found]
    late = [y for x, y in found if x > min(xs) + (max(xs) - min(xs)) / 20]
    margin = 0.05 * (max(late) - min(late)) if late else 0
    if margin:
        axes.set_ylim(min(late) - margin, max(late) + margin)


def unit_of_time(runs):
    """→ (its name, how many seconds it has), to suit the longest run."""
    longest = max((row['elapsed_s'] for _, rows, _ in runs for row in rows), default=0)
    return ('hours', 3600) if longest > 3 * 3600 else ('minutes', 60) if longest > 180 \
        else ('seconds', 1)


def band(axes, reference, x):
    """What 95% of new seeds of a reference lie within."""
    found = reference.band()
    xs = [tokens if x == 'tokens' else tokens / reference.step_tokens() for tokens, _, _ in found]
    axes.fill_between(xs, [low for _, low, _ in found], [high for _, _, high in found],
                      color='black', alpha=0.2, lw=0)
    axes.plot(xs, [(low + high) / 2 for _, low, high in found], color='black', lw=1, ls=':',
              label=f'{reference.name}, validation of {len(reference.rows)} seeds')


class LayersPanel(Panel):
    """A health measure of the first, a middle and the last block, and of the embedding; of several
    runs that of the first and the last block."""

    def __init__(self, title, what, log=False, bottom=None, top=None):
        super().__init__(title, (), log=log, bottom=bottom, top=top)
        self.what = what

    def parts(self, rows, few=False):
        """Names of layers, few of them where there are many runs."""
        prefix = f'health/{self.what}/'
        found = {key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)}
        layers = sorted(int(part[2:]) for part in found if part[:2] == 'h.')
        if not layers:
            return []
        middle = set() if few else {len(layers) // 2}
        chosen = [f'h.{layers[i]}' for i in sorted({0, len(layers) - 1} | middle)]
        return chosen if few else chosen + sorted(found & {'wte'})

    def has(self, rows):
        return bool(self.parts(rows))

    def draw(self, axes, runs, reference):
        many = len(runs) > 1
        for j, (_, rows, colour) in enumerate(runs):
            parts = self.parts(rows, few=many)
            names = ('first block', 'last block') if many else parts
            for i, (part, name) in enumerate(zip(parts, names, strict=False)):
                xs, ys = points(rows, 'iter', f'health/{self.what}/{part}')
                curve(axes, xs, ys, ('-', '--', ':', '-.')[i % 4],
                      color=colour if many else COLOURS[i], label=name if j == 0 else None)
        self.scale(axes)


class PositionsPanel(Panel):
    """How the loss falls with the position in the sequence, at the last look inside."""

    def __init__(self):
        super().__init__('loss by position in the sequence', (), x_label='position')

    def last(self, rows):
        """→ (iteration, {positions: loss}) of the last look."""
        looks = [row for row in rows if 'health/loss_at/0' in row]
        return (looks[-1]['iter'], {
            key.rpartition('/')[2]: value for key, value in looks[-1].items()
            if key.startswith('health/loss_at/') and value is not None}) if looks else (0, {})

    def has(self, rows):
        return bool(self.last(rows)[1])

    def draw(self, axes, runs, reference):
        for _, rows, colour in runs:
            it, found = self.last(rows)
            axes.plot(list(found), list(found.values()), '-o', ms=3.5, lw=1.2, color=colour)
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
