"""report.md and loss.png: what came of a run, in sentences and as curves. Without torch."""

import io
import textwrap
from pathlib import Path
from statistics import mean

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.references import compare, read_band
from plaingpt.monitoring.run_record import column, read_rows, rows_with
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import duration, one_line, printable

# What is drawn below the losses: title → key of a row, or how the keys of all blocks begin
PANELS = {'learning rate': 'lr', 'gradient norm': 'grad_norm', 'tokens a second': 'tokens_per_s',
          'memory, bytes': 'peak_memory_bytes',
          'update / weight of blocks': 'health/update_ratio/h.',
          'gradient norm of blocks': 'health/grad_norm/h.',
          'RMS of activations': 'health/activation_rms/h.',
          'largest attention logit': 'health/attention_logit/h.'}

# -----------------------------------------------------------------------------
# sentences


def write_report(out_dir, run, print_line):
    """Write out_dir/loss.png and report.md. What fails is said in a line: the run came to its end.
    run: the facts of run.json"""
    out_dir = Path(out_dir)
    rows = read_rows(out_dir / 'metrics.jsonl')
    for name, write in (
            ('loss.png', lambda path: draw_runs([(out_dir.name, rows)], path, read_band(run))),
            ('report.md', lambda path: write_atomically(path, printable(
                format_report(out_dir, rows, run))))):
        try:
            write(out_dir / name)
        except Exception as e:
            print_line(f'warning: no {name}: {one_line(e)}')
    if (out_dir / 'report.md').exists():
        print_line(f'{out_dir}/report.md says what came of the run')


def format_report(out_dir, rows, run):
    """The text of report.md."""
    first, *found = describe(out_dir.name, rows, run)
    parts = [f'# {out_dir.name}', f'{first}.', *(f'- {each}' for each in found)]
    if (out_dir / 'loss.png').exists():
        parts.append('![loss](loss.png)')
    samples = {row['iter']: row['sample'] for row in rows if row.get('sample')}
    for iter_num in sorted({*list(samples)[:1], *list(samples)[-1:]}):
        parts += [f'After {iter_num:,} iterations it wrote:',  # indented: it may hold fences itself
                  textwrap.indent(samples[iter_num], '    ', lambda line: True)]
    return '\n\n'.join(parts) + '\n'


def describe(name, rows, run):
    """→ sentences: where a run stands, what looks wrong, where it lies beside its reference"""
    # where the run ended, or the last row of one that trains or was killed
    places = [place for place in (*rows[-1:], run.get('end')) if place]
    last = max(places, key=lambda place: place['iter'])
    parts = [f'{name}: iteration {last["iter"]}, {last["tokens"]:,} tokens, '
             f'{duration(last["elapsed_s"])}']
    if evaluations := rows_with(rows, 'val_loss'):
        best = min(evaluations, key=lambda row: row['val_loss'])
        error = evaluations[-1].get('val_loss_stderr')
        parts.append(f'validation {evaluations[-1]["val_loss"]:.4f}'
                     f'{f" ± {error:.4f}" if error else ""}, at best '
                     f'{best["val_loss"]:.4f} at iteration {best["iter"]}')
    if 'ending' in run:
        parts.append(run['ending'])
    return ['; '.join(parts), *diagnose(rows, run).values(), f'{name} {compare(rows, run)}']


# -----------------------------------------------------------------------------
# curves


def draw_runs(runs, path, band=(), by_bits=False):
    """Draw runs, [(name, rows)], into the PNG at `path`, of one run with the band of its reference
    (references.read_band). by_bits: compare bits a byte, where their tokens differ in length.

    Raises UserError where matplotlib is absent, or no run has a loss yet.
    """
    if not any(rows_with(rows, 'val_loss') for _, rows in runs):
        raise UserError('there is nothing to draw yet: no evaluation was made')
    with needs('matplotlib', 'drawing curves'):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 10), layout='constrained')
    grid = figure.add_gridspec(4, 4)
    losses = figure.add_subplot(grid[:2, :])
    if len(runs) == 1:
        draw_losses(losses, runs[0][1], band)
    else:
        compare_losses(losses, runs, 'val_bpb' if by_bits else 'val_loss')
    use_log_scale(losses)
    losses.legend(frameon=False)
    places = [grid[row, place] for row in (2, 3) for place in range(4)]
    for place, (title, key) in zip(places, PANELS.items(), strict=True):
        axes = figure.add_subplot(place)
        axes.set_title(title, fontsize='small')
        draw_panel(axes, runs, key)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format='png')
    write_atomically(path, picture.getvalue())


def draw_losses(axes, rows, band):
    """Training and validation loss of one run."""
    steps, evaluations = rows_with(rows, 'loss'), rows_with(rows, 'val_loss')
    xs, ys = column(steps, 'iter'), column(steps, 'loss')
    axes.plot(xs, ys, 'C1', lw=0.8, alpha=0.4)
    smooth = running_mean(ys)
    axes.plot(xs, smooth, 'C1', label=f'training {smooth[-1]:.3f}' if steps else None)
    ys = column(evaluations, 'val_loss')
    errors = [abs(row.get('val_loss_stderr') or 0.0) for row in evaluations]
    axes.errorbar(column(evaluations, 'iter'), ys, errors, fmt='C0o-', ms=4, capsize=3,
                  label=f'validation {ys[-1]:.3f}')
    if band:
        xs, lows, highs = zip(*band, strict=True)
        axes.fill_between(xs, lows, highs, color='black', alpha=0.15, lw=0,
                          label='reference: 95% of new seeds')
    axes.set(title='training and validation loss, nats a token', xlabel='iteration')


def compare_losses(axes, runs, key):
    """The validation loss of each run. Runs of one name, the seeds of a variant, have one colour.
    """
    labelled = set()
    for name, rows in runs:
        seen = rows_with(rows, key)
        label = None if name in labelled else name.replace('$', r'\$')
        labelled.add(name)
        axes.plot(column(seen, 'tokens'), column(seen, key), '.-', color=colour_of(name, runs),
                  label=label)
    unit = 'bits a byte' if key == 'val_bpb' else 'nats a token'
    axes.set(title=f'validation loss, {unit}', xlabel='tokens')


def colour_of(name, runs):
    return f'C{list(dict(runs)).index(name) % 10}'


def use_log_scale(axes):
    """So that the end of a loss is seen beside its beginning."""
    from matplotlib.ticker import MaxNLocator, NullFormatter
    axes.set_yscale('log')
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter('{x:g}')
    axes.yaxis.set_minor_formatter(NullFormatter())


def running_mean(values):
    """The mean of each value and its neighbours: a twentieth of all, fewer at the beginning."""
    reach = len(values) // 40
    return [mean(values[i - min(i, reach):i + min(i, reach) + 1]) for i in range(len(values))]


def draw_panel(axes, runs, key):
    """What else was logged. Of one run, the lines of its blocks go from dark to light."""
    from matplotlib import colormaps
    for name, rows in runs:
        keys = [key]
        if key.endswith('.'):
            keys = list(dict.fromkeys(k for row in rows for k in row if k.startswith(key)))
            if any(row.get(each) for row in rows for each in keys):  # all are 0 after one step
                axes.set_yscale('log')
        for i, each in enumerate(keys):
            seen, colour = rows_with(rows, each), colour_of(name, runs)
            if len(keys) > 1 and len(runs) == 1:
                colour = colormaps['viridis'](0.85 * i / (len(keys) - 1))
            axes.plot(column(seen, 'iter'), column(seen, each), color=colour, lw=1,
                      marker='.' if len(seen) == 1 else None)
