"""report.md and loss.png: the results of a run in sentences and as curves. Needs no torch."""

import io
import textwrap
from pathlib import Path
from statistics import mean, median

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.references import compare, read_band
from plaingpt.monitoring.run_record import column, read_rows, rows_with
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import GIB, duration, one_line, printable

# Panels below the losses: title → key of a row, or the common prefix of the keys of all blocks
PANELS = {'learning rate': 'lr', 'gradient norm before clipping': 'grad_norm',
          'tokens per second': 'tokens_per_s', 'peak memory (GiB)': 'peak_memory_bytes',
          'update-to-weight ratio per block': 'health/update_ratio/h.',
          'gradient norm per block': 'health/grad_norm/h.',
          'activation RMS per block': 'health/activation_rms/h.',
          'largest attention logit per block': 'health/attention_logit/h.'}

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
            paragraphs += [f'Sample after {iter_num:,} iterations:', sample]
    return '\n\n'.join(paragraphs) + '\n'


def describe(name, rows, run):
    """→ sentences: the progress of a run, what looks wrong, how it compares with its reference"""
    # The end of the run, or the last row of one that is still training or was killed.
    ends = [row for row in (*rows[-1:], run.get('end')) if row]
    last = max(ends, key=lambda row: row['iter'])
    progress = [f'{name}: iteration {last["iter"]}, {last["tokens"]:,} tokens, '
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
    figure = Figure(figsize=(12, 10), layout='constrained')
    grid = figure.add_gridspec(4, 4)
    loss_axes = figure.add_subplot(grid[:2, :])
    if len(runs) == 1:
        draw_losses(loss_axes, runs[0][1], band)
    else:
        compare_losses(loss_axes, runs, 'val_bpb' if use_bits_per_byte else 'val_loss')
    use_log_scale(loss_axes, ticks=8)
    loss_axes.legend(frameon=False)
    for i, (title, key) in enumerate(PANELS.items()):
        axes = figure.add_subplot(grid[2 + i // 4, i % 4])
        axes.set_title(title, fontsize='small')
        axes.tick_params(labelsize='small')
        axes.xaxis.set_major_locator(max_ticks(4))
        if not key.endswith('.'):
            draw_panel(axes, runs, key)
        elif len(runs) == 1:
            draw_blocks(axes, runs[0][1], key)
        else:
            axes.set_title(title.replace('per block', '(median block)'), fontsize='small')
            compare_blocks(axes, runs, key)
        if not axes.lines:
            axes.set_axis_off()  # nothing was logged
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format='png')
    write_atomically(path, png.getvalue())


def draw_losses(axes, rows, band):
    """Training and validation loss of one run."""
    steps, evaluations = rows_with(rows, 'loss'), rows_with(rows, 'val_loss')
    if steps:
        iters, losses = column(steps, 'iter'), column(steps, 'loss')
        smoothed = running_mean(losses)
        axes.plot(iters, losses, 'C1', lw=0.8, alpha=0.4)
        axes.plot(iters, smoothed, 'C1', label=f'training {smoothed[-1]:.3f}')
    losses = column(evaluations, 'val_loss')
    stderrs = [abs(row.get('val_loss_stderr') or 0.0) for row in evaluations]
    axes.errorbar(column(evaluations, 'iter'), losses, stderrs, fmt='C0.-', capsize=2,
                  elinewidth=0.8, label=f'validation {losses[-1]:.3f} (± standard error)')
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
        evaluations = rows_with(rows, key)
        label = None if name in labeled else name.replace('$', r'\$')
        labeled.add(name)
        axes.plot(column(evaluations, 'tokens'), column(evaluations, key), '.-',
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


def draw_panel(axes, runs, key):
    """One logged number of each run."""
    unit = GIB if key == 'peak_memory_bytes' else 1
    for name, rows in runs:
        values = [value / unit for value in column(rows, key)]
        draw_line(axes, column(rows_with(rows, key), 'iter'), values, color=color_of(name, runs))
    axes.yaxis.set_major_locator(max_ticks(5))
    if key in ('tokens_per_s', 'peak_memory_bytes') and axes.lines:
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)  # from 0: noise should not look like a trend
    if key == 'tokens_per_s':
        axes.yaxis.set_major_formatter(with_suffix)


def with_suffix(value, _=None):
    """25000 → '25k', for the labels of an axis."""
    for size, suffix in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
        if value >= size:
            return f'{value / size:g}{suffix}'
    return f'{value:g}'


def draw_line(axes, iters, values, **style):
    if iters:
        axes.plot(iters, values, lw=1, marker='.' if len(iters) == 1 else None, **style)


def block_curves(rows, prefix):
    """[(block, iterations, values)] of the numbers whose keys have this prefix, in the order of the
    blocks. Zeros, such as the gradients of a first step, have no place on a log scale."""
    keys = {key for row in rows for key in row if key.startswith(prefix)}
    curves = []
    for block in sorted(int(key.removeprefix(prefix)) for key in keys):
        key = f'{prefix}{block}'
        positive = [row for row in rows if row.get(key)]
        curves.append((block, column(positive, 'iter'), column(positive, key)))
    return curves


def draw_blocks(axes, rows, prefix):
    """A line for each block of one run, from dark (the first) to light (the last)."""
    from matplotlib import colormaps
    curves = block_curves(rows, prefix)
    last = len(curves) - 1
    for i, (block, iters, values) in enumerate(curves):
        color = colormaps['viridis'](0.85 * i / max(1, last))
        is_labeled = i in (0, last) or last < 4
        draw_line(axes, iters, values, color=color, label=f'block {block}' if is_labeled else None)
    if axes.lines:
        use_log_scale(axes, ticks=5)
        axes.legend(frameon=False, fontsize='x-small')


def compare_blocks(axes, runs, prefix):
    """A line for each run: the median over its blocks."""
    for name, rows in runs:
        medians = {}
        for row in rows:
            values = [value for key, value in row.items() if key.startswith(prefix) and value]
            if values:
                medians[row['iter']] = median(values)
        draw_line(axes, list(medians), list(medians.values()), color=color_of(name, runs))
    if axes.lines:
        use_log_scale(axes, ticks=5)
