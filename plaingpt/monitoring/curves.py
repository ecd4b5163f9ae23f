"""loss.png: the losses of runs, and below them what else was logged. Without torch."""

import io
from statistics import mean

from plaingpt.monitoring.diagnosis import block_values
from plaingpt.monitoring.run_record import column, rows_with
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import printable

COLUMNS = {'lr': ('learning rate', 1), 'grad_norm': ('gradient norm', 1),
           'tokens_per_s': ('tokens a second', 1), 'peak_memory_bytes': ('memory, MiB', 2**20)}
OF_BLOCKS = {'update_ratio': 'update / weight', 'grad_norm': 'gradient norm',
             'activation_rms': 'RMS of activations', 'attention_logit': 'largest attention logit'}


def draw_runs(runs, path, band=(), by_bits=False):
    """Draw runs, [(name, rows)], into the PNG at `path`, of one run with the band of its reference
    (references.read_band). by_bits: compare bits a byte, where their tokens differ in length.

    Raises UserError where matplotlib is absent, or no run has a loss yet.
    """
    if not any(rows_with(rows, key) for _, rows in runs for key in ('loss', 'val_loss')):
        raise UserError('there is nothing to draw yet: no step is logged, no evaluation made')
    with needs('matplotlib', 'drawing curves'):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 10), layout='constrained')
    grid = figure.add_gridspec(4, 4)
    losses = figure.add_subplot(grid[:2, :])
    if len(runs) == 1:
        draw_losses(losses, runs[0][1], band)
    else:
        compare_losses(losses, runs, by_bits)
    places = [grid[row, place] for row in (2, 3) for place in range(4)]
    for place, (key, (title, scale)) in zip(places[:4], COLUMNS.items(), strict=True):
        draw_column(figure.add_subplot(place, title=title), runs, key, scale)
    for place, (measure, title) in zip(places[4:], OF_BLOCKS.items(), strict=True):
        of = ' of each block' if len(runs) == 1 else ', mean of blocks'
        draw_blocks(figure.add_subplot(place, title=f'{title}{of}'), runs, measure)
    for axes in figure.axes:
        axes.title.set_fontsize('medium' if axes is losses else 'small')
        axes.grid(alpha=0.25)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format='png')
    write_atomically(path, picture.getvalue())


# -----------------------------------------------------------------------------
# losses


def draw_losses(axes, rows, band):
    """Training and validation loss of one run."""
    lines = []  # (label, xs, ys, format)
    steps, evaluations = rows_with(rows, 'loss'), rows_with(rows, 'val_loss')
    if steps:
        xs, ys = column(steps, 'iter'), column(steps, 'loss')
        axes.plot(xs, ys, 'C1', lw=0.8, alpha=0.4)
        start = [row for row in rows_with(rows, 'train_loss') if row['iter'] == 0]
        lines.append(('training', column(start, 'iter') + xs,
                      column(start, 'train_loss') + running_mean(ys), 'C1'))
    if evaluations:
        xs, ys = column(evaluations, 'iter'), column(evaluations, 'val_loss')
        errors = [row.get('val_loss_stderr') or 0.0 for row in evaluations]
        axes.errorbar(xs, ys, errors, fmt='none', ecolor='C0', capsize=3)
        lines.append(('validation', xs, ys, 'C0o-'))
    if band:
        xs, lows, highs = zip(*band, strict=True)
        axes.fill_between(xs, lows, highs, color='black', alpha=0.15, lw=0,
                          label='reference: 95% of new seeds')
        axes.legend(loc='upper right', frameon=False)
    draw_lines(axes, [(f'{label} {ys[-1]:.3f}', xs, ys, style) for label, xs, ys, style in lines])
    axes.set(title='training and validation loss, nats a token', xlabel='iteration')


def compare_losses(axes, runs, by_bits):
    """The validation loss of each run, of one without evaluations its training loss."""
    key, lines = 'val_bpb' if by_bits else 'val_loss', []
    # Where steps have different numbers of tokens, iterations do not compare.
    sizes = {round(row['tokens'] / row['iter']) for _, rows in runs for row in rows[-1:]
             if row['iter']}
    x = 'iter' if len(sizes) < 2 else 'tokens'
    for name, rows in runs:
        seen, style = rows_with(rows, key), '.-'
        ys = column(seen, key)
        if not seen and not by_bits:
            seen, style = rows_with(rows, 'loss'), ':'
            ys = running_mean(column(seen, 'loss'))
        if seen:
            label = '' if name in [line[0] for line in lines] else name
            lines.append((label, column(seen, x), ys, colour_of(name, runs) + style))
    draw_lines(axes, lines)
    axes.set(title='validation loss, ' + ('bits a byte' if by_bits else 'nats a token'),
             xlabel='iteration' if x == 'iter' else 'tokens')


def colour_of(name, runs):
    """Runs of one name, such as the seeds of a variant, have one colour."""
    return f'C{list(dict(runs)).index(name) % 10}'


def draw_lines(axes, lines):
    """Draw [(label, xs, ys, format)] with their labels at their ends, moved apart. The y axis is
    logarithmic, so that the end of a curve is seen beside its beginning."""
    from matplotlib.ticker import MaxNLocator
    lines = [line for line in lines if line[1]]
    for _, xs, ys, style in lines:
        axes.plot(xs, ys, style, lw=1.6, ms=5)
    if min((min(ys) for _, _, ys, _ in lines), default=0) > 0:
        use_log_scale(axes, MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    first, last = (pick(pick(xs) for _, xs, _, _ in lines) for pick in (min, max))
    longest = max(len(label) for label, *_ in lines)  # characters; 120 fill the width
    axes.set_xlim(first - 0.02 * (last - first), last + 0.011 * longest * max(1, last - first))
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted((*to_axes.transform((xs[-1], ys[-1]))[::-1], label, style)
                  for label, xs, ys, style in lines if label)
    before = -1.0
    for y, x, label, style in ends:
        before = max(y, before + 0.05)
        axes.text(x + 0.01, before, printable(label).replace('$', r'\$'), color=style[:2],
                  transform=axes.transAxes, va='center')


def use_log_scale(axes, ticks):
    from matplotlib.ticker import NullFormatter
    axes.set_yscale('log', nonpositive='mask')
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(lambda y, _: f'{y:g}')
    axes.yaxis.set_minor_formatter(NullFormatter())


def running_mean(values):
    """The mean of each value and its neighbours: a twentieth of all, fewer at the beginning."""
    reach = len(values) // 40
    return [mean(values[i - min(i, reach):i + min(i, reach) + 1]) for i in range(len(values))]


# -----------------------------------------------------------------------------
# what else was logged


def draw_column(axes, runs, key, scale):
    for name, rows in runs:
        seen = rows_with(rows, key)
        axes.plot(column(seen, 'iter'), [y / scale for y in column(seen, key)],
                  colour_of(name, runs), lw=1, marker='.' if len(seen) == 1 else None)
    highest = max((y for line in axes.lines for y in line.get_ydata()), default=0)
    axes.set_ylim(0, 1.08 * highest or 1)


def draw_blocks(axes, runs, measure):
    """One run: a line for each block, dark to light. Several runs: the mean of their blocks."""
    from matplotlib import colormaps
    from matplotlib.ticker import LogLocator
    for name, rows in runs:
        seen = [(row['iter'], values) for row in rows if (values := block_values(row, measure))]
        if len(runs) > 1:
            axes.plot([x for x, _ in seen], [mean(values.values()) for _, values in seen],
                      colour_of(name, runs), lw=1)
            continue
        blocks = list(dict.fromkeys(block for _, values in seen for block in values))
        for i, block in enumerate(blocks):
            colour = colormaps['viridis'](0.85 * i / max(1, len(blocks) - 1))
            xs, ys = zip(*((x, values[block]) for x, values in seen if block in values),
                         strict=True)
            axes.plot(xs, ys, color=colour, lw=1, marker='.' if len(xs) == 1 else None)
            if i in (0, len(blocks) - 1):
                axes.annotate(f' {block}', (xs[-1], ys[-1]), color=colour, va='center', fontsize=8)
    axes.margins(x=0.12)  # room for the names
    if any(y > 0 for line in axes.lines for y in line.get_ydata()):
        use_log_scale(axes, LogLocator(subs=(1, 2, 5)))
