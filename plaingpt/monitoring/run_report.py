"""report.md and loss.png: the results of a run in sentences and as curves. Needs no torch."""

import io
import math
import textwrap
from pathlib import Path
from statistics import median

import numpy as np

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.references import compare, read_band
from plaingpt.monitoring.run_record import column, is_number, read_rows, rows_with
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
          'train_loss': 'training loss at evaluations (nats per token)',
          'val_loss': 'validation loss (nats per token)',
          'val_bpb': 'validation loss (bits per byte)', 'mfu': 'MFU (fraction of peak FLOP/s)'}
LOG_SCALE = tuple(panel for panel in TITLES if panel.startswith('health/'))
COLUMNS = 4  # of panels
LINE_STYLES = '-', '--', '-.', ':'
ROUND_STEPS = [1, 2, 2.5, 5, 10]  # between the ticks of an axis
POSITIONS = 'iter', 'tokens', 'elapsed_s'  # in the run, of all rows

# -----------------------------------------------------------------------------
# sentences


def write_report(out_dir, run, print_line):
    """Write out_dir/loss.png and report.md. A failure prints a warning, since the run is complete.
    run: the contents of run.json"""
    out_dir = Path(out_dir)
    rows = read_rows(out_dir / 'metrics.jsonl')
    try:
        draw_runs([(out_dir.name, rows, run)], out_dir / 'loss.png')
    except Exception as e:
        print_line(f'warning: loss.png was not written: {one_line(e)}')
    try:
        report = printable(format_report(out_dir, rows, run))
        write_atomically(out_dir / 'report.md', report)
        print_line(f'wrote {out_dir}/report.md (a summary of the run)')
    except Exception as e:
        print_line(f'warning: report.md was not written: {one_line(e)}')


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
    return ['; '.join(progress), *diagnose(rows, run).values(), compare(rows, run)]


# -----------------------------------------------------------------------------
# curves


def draw_runs(runs, path):
    """Draw runs, [(name, rows, contents of run.json)], into the PNG at `path`: the losses, and a
    panel for each other number that was logged. A single run is drawn over its iterations, with the
    band of its reference, several over their tokens. Returns a line about losses that cannot be
    compared, or None.

    Raises UserError if matplotlib is not installed, or no run has a validation loss yet.
    """
    if not any(rows_with(rows, 'val_loss') for _, rows, _ in runs):
        raise UserError('nothing to plot yet: no evaluation has been logged')
    with needs('matplotlib', 'drawing curves'):
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    is_single = len(runs) == 1
    names = dict.fromkeys(name for name, *_ in runs)  # the seeds of a variant share one
    colors = {name: f'C{i % 10}' for i, name in enumerate(names)}
    key, groups, note = comparable_losses(runs)
    panels = group_keys(runs, ['loss', 'train_loss', key] if is_single else [key])
    num_rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(12, 5 + 2.5 * num_rows), layout='constrained')
    grid = figure.add_gridspec(2 + num_rows, COLUMNS)
    top = grid[:2, :].subgridspec(1, len(groups))
    for i, group in enumerate(groups):
        axes = figure.add_subplot(top[i])
        axes.set_yscale('log')
        if is_single:
            draw_losses(axes, *group[0])
        else:
            compare_losses(axes, group, key, colors)
        if len(groups) > 1:
            axes.set_title(f'{TITLES[key]} on {group[0][2]["data"]["folder"]}'.replace('$', r'\$'))
        set_log_ticks(axes, 8)
        add_legend(axes)
    for i, (panel, keys) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[2 + i // COLUMNS, i % COLUMNS])
        draw_panel(axes, runs, panel, keys, colors)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        if not is_single:
            axes.xaxis.set_major_formatter(EngFormatter(sep=''))  # 25000 → 25k
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format='png')
    write_atomically(path, png.getvalue())
    return note


def comparable_losses(runs):
    """→ the key of the loss to compare, the groups of runs whose losses share a panel, and a line
    that says so if not all were evaluated on the same tokens (else None)"""
    runs = [run for run in runs if column(run[1], 'val_loss')]
    data = [run.get('data', {}) for *_, run in runs]
    if all('val' in facts for facts in data):
        tokens = [facts['val'] for facts in data]
    else:  # a run of an older version
        tokens = [(facts.get('folder'), run.get('val_bytes_per_token'))
                  for facts, (*_, run) in zip(data, runs, strict=True)]
    groups = {}
    for run, identity in zip(runs, tokens, strict=True):
        groups.setdefault(identity, []).append(run)
    if len(groups) == 1:
        return 'val_loss', [runs], None
    sides = ' | '.join(', '.join(dict.fromkeys(name for name, *_ in group))
                         for group in groups.values())
    note = f'{sides}: evaluated on different tokens (another text, split or tokenizer)'
    if all(column(rows, 'val_bpb') for _, rows, _ in runs):
        return 'val_bpb', [runs], f'{note}; validation losses are compared in bits per byte'
    return 'val_loss', [*groups.values()], f'{note}; validation losses are drawn in a panel each'


def panel_of(key):
    """The panel of a logged number: 'load.' for that of a block, 'load.3', 'health/NAME/' for
    'health/NAME/wte', else the key."""
    family, dot, number = key.rpartition('.')
    if dot and number.isdecimal():
        return family + dot
    return key[:key.rindex('/') + 1] if key.startswith('health/') else key


def group_keys(runs, drawn):
    """{panel: [key]} of all numbers that were logged, except those that are `drawn` elsewhere.
    Standard errors are drawn with what they belong to."""
    logged = {}  # in the order of the rows
    for _, rows, _ in runs:
        for row in rows:
            logged |= dict.fromkeys(key for key, value in row.items() if is_number(value))
    panels = {panel: [] for panel in TITLES}
    for key in logged:
        is_error = key.endswith('_stderr') and key.removesuffix('_stderr') in logged
        if not is_error and key not in (*drawn, *POSITIONS):
            panels.setdefault(panel_of(key), []).append(key)
    for panel, keys in panels.items():
        if panel.endswith('.'):
            keys.sort(key=lambda key: int(key.rpartition('.')[2]))
    return {panel: keys for panel, keys in panels.items() if keys}


def draw_losses(axes, name, rows, run):
    """Training and validation loss of one run, and the band of its reference."""
    if losses := column(rows, 'loss'):
        iters = column(rows_with(rows, 'loss'), 'iter')
        window = np.ones(1 + 2 * (len(losses) // 40))  # narrower at the ends
        smoothed = np.convolve(losses, window, 'same') \
            / np.convolve(np.ones(len(losses)), window, 'same')
        axes.plot(iters, losses, 'C1', lw=0.8, alpha=0.4)
        axes.plot(iters, smoothed, 'C1', label=f'training {smoothed[-1]:.3f}')
    for key, label, color in (('train_loss', 'training, at evaluations', 'C2'),
                              ('val_loss', 'validation', 'C0')):
        if losses := column(rows, key):
            draw_line(axes, rows, 'iter', key, color=color, marker='.',
                      label=f'{label} {losses[-1]:.3f}')
    if band := read_band(run):
        iters, lows, highs = zip(*band, strict=True)
        axes.fill_between(iters, lows, highs, color='black', alpha=0.15, lw=0,
                          label='reference (95% prediction interval)')
    axes.set(title='training and validation loss (nats per token)', xlabel='iteration')


def compare_losses(axes, group, key, colors):
    """Validation loss of each run of a group. colors: {name of a run: its color}"""
    for name, rows, _ in group:
        draw_line(axes, rows, 'tokens', key, color=colors[name], marker='.',
                  label=name.replace('$', r'\$'))
    axes.set(title=TITLES[key], xlabel='tokens')


def set_log_ticks(axes, ticks):
    """Label a log scale, which shows the end of a curve in as much detail as its beginning."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
    low, high = axes.get_ylim()
    if high < 10 * low:
        locator = MaxNLocator(ticks, steps=ROUND_STEPS)
    else:
        locator = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=ticks)
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter('{x:.4g}')
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_panel(axes, runs, panel, keys, colors):
    """A logged number of each run, or several: of all blocks, or of other parts of the model. Of
    the blocks of several runs, the medians."""
    from matplotlib import colormaps
    from matplotlib.ticker import EngFormatter
    is_family = panel.endswith('.')
    is_single = len(runs) == 1
    x = 'iter' if is_single else 'tokens'
    title = TITLES.get(panel, panel.strip('./'))
    if is_family and not is_single:
        title = f'{title} (median)'
        runs = [(name, with_median(rows, keys, panel), run) for name, rows, run in runs]
        keys = [panel]
    axes.set_title(textwrap.fill(title, 36).replace('$', r'\$'), fontsize='small')
    axes.tick_params(labelsize='small')
    axes.locator_params(axis='x', nbins=4, steps=ROUND_STEPS)
    axes.locator_params(axis='y', nbins=5, steps=ROUND_STEPS)
    if panel in LOG_SCALE:
        axes.set_yscale('log')
    for name, rows, _ in runs:
        for i, key in enumerate(keys):
            style = {'color': f'C{i % 10}'}
            if not is_single:
                style = {'color': colors[name], 'linestyle': LINE_STYLES[i % 4]}
            elif is_family:  # from dark, the first block, to light, the last
                style = {'color': colormaps['viridis'](0.85 * i / max(1, len(keys) - 1))}
            if len(keys) > 1 and (not is_family or len(keys) < 5 or key in (keys[0], keys[-1])):
                style['label'] = key.removeprefix(panel)
            draw_line(axes, rows, x, key, **style)
    if panel in LOG_SCALE and axes.lines:
        set_log_ticks(axes, 5)
    if panel in ('tokens_per_s', 'peak_memory_bytes') and axes.lines:
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)  # from 0: noise should not look like a trend
    if panel == 'tokens_per_s':
        axes.yaxis.set_major_formatter(EngFormatter(sep=''))
    add_legend(axes, fontsize='x-small')


def add_legend(axes, **style):
    """A legend in which runs with the same label, such as the seeds of a variant, share a line."""
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    if by_label:
        axes.legend(by_label.values(), by_label.keys(), frameon=False, **style)


def with_median(rows, keys, name):
    """The rows that have one of these keys, with the median of their values as `name`."""
    medians = []
    for row in rows:
        values = [row[key] for key in keys if is_number(row.get(key))]
        if values:
            medians.append(row | {name: median(values)})
    return medians


def draw_line(axes, rows, x, key, **style):
    """A number over `x`, iterations or tokens, with its standard errors if they were logged."""
    rows = rows_with(rows, x, key)
    if axes.get_yscale() == 'log':  # where zero, such as a first step's gradient, has no place
        rows = [row for row in rows if row[key] > 0]
    if not rows:
        return
    if len(rows) == 1:
        style['marker'] = '.'
    unit = GIB if key == 'peak_memory_bytes' else 1
    stderrs = [abs(row.get(f'{key}_stderr') or 0.0) for row in rows]
    axes.errorbar(column(rows, x), [row[key] / unit for row in rows],
                  stderrs if any(stderrs) else None, lw=1, elinewidth=0.8, capsize=2, **style)
