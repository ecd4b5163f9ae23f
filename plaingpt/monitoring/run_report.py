"""report.md and loss.png: the results of a run in sentences and as curves. Needs no torch."""

import io
import math
import textwrap
from pathlib import Path
from statistics import mean, median

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.references import compare, read_band
from plaingpt.monitoring.run_record import TYPES, column, read_rows, rows_with
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import GIB, count_of, duration, one_line, printable

# Panels below the losses: panel_of a key → title. Other numbers have panels after these.
TITLES = {'lr': 'learning rate', 'grad_norm': 'gradient norm before clipping',
          'tokens_per_s': 'tokens per second', 'peak_memory_bytes': 'peak memory (GiB)',
          'health/update_ratio/h.': 'update-to-weight ratio per block',
          'health/grad_norm/h.': 'gradient norm per block',
          'health/activation_rms/h.': 'activation RMS per block',
          'health/attention_logit/h.': 'largest attention logit per block',
          'health/update_ratio/': 'update-to-weight ratio of other parts',
          'health/grad_norm/': 'gradient norm of other parts',
          'loss': 'training loss (nats per token)',
          'train_loss': 'training loss at evaluations',
          'val_loss': 'validation loss (nats per token)',
          'val_bpb': 'validation loss (bits per byte)', 'mfu': 'MFU'}
LOG_SCALE = tuple(panel for panel in TITLES if panel.startswith('health/'))
COLUMNS = 4  # of panels
LINE_STYLES = '-', '--', '-.', ':'
POSITIONS = 'iter', 'tokens', 'elapsed_s'  # in the run, of all rows

# -----------------------------------------------------------------------------
# sentences


def write_report(out_dir, run, print_line):
    """Write out_dir/loss.png and report.md. A failure prints a warning, since the run is complete.
    run: the contents of run.json"""
    out_dir = Path(out_dir)
    rows = read_rows(out_dir / 'metrics.jsonl')

    def write_picture(path):
        draw_runs([(out_dir.name, rows)], path, read_band(run))

    def write_text(path):
        write_atomically(path, printable(format_report(out_dir, rows, run)))

    for name, write in (('loss.png', write_picture), ('report.md', write_text)):
        try:
            write(out_dir / name)
        except Exception as e:
            print_line(f'warning: {name} was not written: {one_line(e)}')
    if (out_dir / 'report.md').exists():
        print_line(f'wrote {out_dir}/report.md (a summary of the run)')


def format_report(out_dir, rows, run):
    """The text of report.md."""
    progress, *findings = describe(out_dir.name, rows, run)
    paragraphs = [f'# {out_dir.name}', f'{progress}.', *(f'- {finding}' for finding in findings)]
    if (out_dir / 'loss.png').exists():
        paragraphs.append('![loss](loss.png)')
    samples = {row['iter']: row['sample'] for row in rows if row.get('sample')}
    if samples:
        for iter_num in sorted({min(samples), max(samples)}):
            # Indented, since the sample may contain code fences.
            sample = textwrap.indent(samples[iter_num], '    ', lambda line: True)
            paragraphs += [f'Sample after {count_of(iter_num, "iteration")}:', sample]
    return '\n\n'.join(paragraphs) + '\n'


def describe(name, rows, run):
    """→ sentences: the progress of a run, what looks wrong, how it compares with its reference"""
    # The end of the run, or the last row of one that is still training or was killed.
    ends = [row for row in (*rows[-1:], run.get('end')) if row]
    last = max(ends, key=lambda row: row['iter'])
    progress = [f'{name}: iteration {last["iter"]}, {count_of(last["tokens"], "token")}, '
                f'{duration(last["elapsed_s"])}']
    evaluations = [row for row in rows if 'val_loss' in row]
    best = min(rows_with(rows, 'val_loss'), key=lambda row: row['val_loss'], default=None)
    if best:
        loss, stderr = evaluations[-1]['val_loss'], evaluations[-1].get('val_loss_stderr')
        loss = 'not finite' if loss is None else f'{loss:.4f}'
        margin = f' ± {stderr:.4f}' if stderr else ''
        progress.append(f'validation loss {loss}{margin}, '
                        f'best {best["val_loss"]:.4f} at iteration {best["iter"]}')
    if 'ending' in run:
        progress.append(run['ending'])
    return ['; '.join(progress), *diagnose(rows, run).values(), f'{name} {compare(rows, run)}']


# -----------------------------------------------------------------------------
# curves


def draw_runs(runs, path, band=(), use_bits_per_byte=False):
    """Draw runs, [(name, rows)], into the PNG at `path`. A single run is drawn with the band of its
    reference (references.read_band). use_bits_per_byte: for runs with different tokenizers

    Raises UserError if matplotlib is not installed, or no run has a validation loss yet.
    """
    if not any(rows_with(rows, 'val_loss') for _, rows in runs):
        raise UserError('nothing to plot yet: no evaluation has been logged')
    with needs('matplotlib', 'drawing curves'):
        from matplotlib.figure import Figure
    loss_keys = ['loss', 'train_loss', 'val_loss']
    if len(runs) > 1:
        loss_keys = ['val_bpb' if use_bits_per_byte else 'val_loss']
    panels = group_keys(runs, loss_keys)
    num_rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(12, 5 + 2.5 * num_rows), layout='constrained')
    grid = figure.add_gridspec(2 + num_rows, COLUMNS)
    loss_axes = figure.add_subplot(grid[:2, :])
    if len(runs) == 1:
        draw_losses(loss_axes, runs[0][1], band)
    else:
        compare_losses(loss_axes, runs, *loss_keys)
    use_log_scale(loss_axes, ticks=8)
    loss_axes.legend(frameon=False)
    for i, (panel, keys) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[2 + i // COLUMNS, i % COLUMNS])
        draw_panel(axes, runs, panel, keys)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format='png')
    write_atomically(path, png.getvalue())


def panel_of(key):
    """The panel of a logged number: 'health/NAME/h.' for that of block 'health/NAME/h.3',
    'health/NAME/' for 'health/NAME/wte', else the key."""
    prefix, slash, name = key.rpartition('/')
    family, dot, number = name.rpartition('.')
    if dot and number.isdecimal():
        return f'{prefix}{slash}{family}{dot}'
    return prefix + slash if slash else key


def group_keys(runs, drawn):
    """{panel: [key]} of all numbers that were logged, except those that are `drawn` elsewhere.
    Standard errors are drawn with what they belong to."""
    logged = {}  # in the order of the rows
    for _, rows in runs:
        for row in rows:
            logged |= dict.fromkeys(key for key, value in row.items() if value is not None)
    panels = {panel: [] for panel in TITLES}
    for key in logged:
        is_error = key.endswith('_stderr') and key.removesuffix('_stderr') in logged
        if not is_error and key not in (*drawn, *POSITIONS, *TYPES):
            panels.setdefault(panel_of(key), []).append(key)
    return {panel: keys for panel, keys in panels.items() if keys}


def draw_losses(axes, rows, band):
    """Training and validation loss of one run."""
    losses = column(rows, 'loss')
    if losses:
        iters, smoothed = column(rows_with(rows, 'loss'), 'iter'), running_mean(losses)
        axes.plot(iters, losses, 'C1', lw=0.8, alpha=0.4)
        axes.plot(iters, smoothed, 'C1', label=f'training {smoothed[-1]:.3f}')
    for key, name, color in (('train_loss', 'training, at evaluations', 'C2'),
                             ('val_loss', 'validation', 'C0')):
        if losses := column(rows, key):
            draw_line(axes, rows, key, color=color, marker='.', label=f'{name} {losses[-1]:.3f}')
    if band:
        iters, lows, highs = zip(*band, strict=True)
        axes.fill_between(iters, lows, highs, color='black', alpha=0.15, lw=0,
                          label='reference (95% prediction interval)')
    axes.set(title='training and validation loss (nats per token)', xlabel='iteration')


def compare_losses(axes, runs, key):
    """Validation loss of each run. Runs with the same name, the seeds of a variant, share a color.
    """
    labeled = set()
    for name, rows in runs:
        label = None if name in labeled else name.replace('$', r'\$')
        labeled.add(name)
        axes.plot(column(rows_with(rows, key), 'tokens'), column(rows, key), '.-',
                  color=color_of(name, runs), label=label)
    unit = 'bits per byte' if key == 'val_bpb' else 'nats per token'
    axes.set(title=f'validation loss ({unit})', xlabel='tokens')
    axes.xaxis.set_major_formatter(with_suffix)


def color_of(name, runs):
    return f'C{list(dict(runs)).index(name) % 10}'


def max_ticks(n):
    """A matplotlib locator of at most n intervals between round numbers."""
    from matplotlib.ticker import MaxNLocator
    return MaxNLocator(n, steps=[1, 2, 2.5, 5, 10])


def use_log_scale(axes, ticks):
    """A log scale for y, to show the end of a curve in as much detail as its beginning."""
    from matplotlib.ticker import LogLocator, NullFormatter
    axes.set_yscale('log')
    low, high = axes.get_ylim()
    if high < 10 * low:
        locator = max_ticks(ticks)
    elif high < 100 * low:
        locator = LogLocator(subs=(1, 2, 5))
    else:
        locator = LogLocator(numticks=ticks)
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter('{x:.4g}')
    axes.yaxis.set_minor_formatter(NullFormatter())


def running_mean(values):
    """The mean of each value and its neighbors: a window of a twentieth of all values, narrower at
    the ends."""
    radius = len(values) // 40
    means = []
    for i in range(len(values)):
        reach = min(i, radius)
        means.append(mean(values[i - reach:i + reach + 1]))
    return means


def draw_panel(axes, runs, panel, keys):
    """One logged number of each run, or several: of all blocks, or of other parts of the model."""
    title = TITLES.get(panel) or (keys[0] if len(keys) == 1 else panel.strip('./'))
    is_log = panel.startswith(LOG_SCALE)
    if panel.endswith('.') and len(runs) > 1:
        title = f'{title} (median)'
    axes.set_title(textwrap.fill(title, 36).replace('$', r'\$'), fontsize='small')
    axes.tick_params(labelsize='small')
    axes.xaxis.set_major_locator(max_ticks(4))
    axes.yaxis.set_major_locator(max_ticks(5))
    for name, rows in runs:
        if is_log:  # zeros, such as the gradients of a first step, have no place on a log scale
            rows = [{key: value for key, value in row.items() if value or key == 'iter'}
                    for row in rows]
        if panel == 'peak_memory_bytes':
            rows = [row | {panel: row[panel] / GIB} for row in rows_with(rows, panel)]
        if not panel.endswith('.'):
            draw_parts(axes, rows, keys, color_of(name, runs) if len(runs) > 1 else None)
        elif len(runs) == 1:
            draw_blocks(axes, rows, keys)
        else:
            medians = [{'iter': row['iter'], panel: median(values)} for row in rows
                       if (values := [row[key] for key in keys if row.get(key) is not None])]
            draw_line(axes, medians, panel, color=color_of(name, runs))
    if is_log and axes.lines:
        use_log_scale(axes, ticks=5)
    if panel in ('tokens_per_s', 'peak_memory_bytes') and axes.lines:
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)  # from 0: noise should not look like a trend
    if panel == 'tokens_per_s':
        axes.yaxis.set_major_formatter(with_suffix)
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))  # the same of each run
    if by_label:
        axes.legend(by_label.values(), by_label.keys(), frameon=False, fontsize='x-small')


def with_suffix(value, _=None):
    """25000 → '25k', for the labels of an axis."""
    for size, suffix in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
        if value >= size:
            return f'{value / size:g}{suffix}'
    return f'{value:g}'


def draw_line(axes, rows, key, **style):
    """A number over the iterations, with its standard errors if they were logged."""
    rows = rows_with(rows, key)
    if len(rows) == 1:
        style['marker'] = '.'
    if rows:
        stderrs = [abs(row.get(f'{key}_stderr') or 0.0) for row in rows]
        axes.errorbar(column(rows, 'iter'), column(rows, key), stderrs if any(stderrs) else None,
                      lw=1, elinewidth=0.8, capsize=2, **style)


def draw_blocks(axes, rows, keys):
    """A line for each block of one run, from dark (the first) to light (the last)."""
    from matplotlib import colormaps
    numbers = sorted(int(key.rpartition('.')[2]) for key in keys)
    prefix = keys[0].rpartition('.')[0]
    for i, number in enumerate(numbers):
        color = colormaps['viridis'](0.85 * i / max(1, len(numbers) - 1))
        is_labeled = number in (numbers[0], numbers[-1]) or len(numbers) < 5
        draw_line(axes, rows, f'{prefix}.{number}', color=color,
                  label=str(number) if is_labeled else None)


def draw_parts(axes, rows, keys, color=None):
    """A line for each key: in several colors, or for one of several runs in its color."""
    for i, key in enumerate(keys):
        draw_line(axes, rows, key, color=color or f'C{i % 10}',
                  linestyle=LINE_STYLES[i % len(LINE_STYLES)] if color else '-',
                  label=key.rpartition('/')[2] if len(keys) > 1 else None)
