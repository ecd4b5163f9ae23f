"""24 small trainings, {default, context × 2, layers × 2, embeddings × 2} × {none, SGD + cosine,
float16, bfloat16, reduced batch, accumulation}: what each change costs and gains, and whether two
together cost and gain what they do apart.

Each run is a train.py of its own, so all that is measured is training as it is.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

from tqdm import tqdm

from plaingpt.benchmarks.result_tables import markdown
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, append_line
from plaingpt.training.memory_planner import predict, step_settings
from plaingpt.training.settings import TrainConfig

# -----------------------------------------------------------------------------
# the grid

ROWS = ('default', 'context × 2', 'layers × 2', 'embeddings × 2')
COLUMNS = ('none', 'SGD + cosine', 'float16', 'bfloat16', 'reduced batch', 'accumulation')
SGD_TIMES_LR = 100  # SGD's learning rate, in AdamW's; settings.py on learning_rate says so


def settings(config, row, column):
    """TrainConfig → that of a cell. 'none' is float32 and AdamW at a constant learning rate after
    the warmup; a reduced batch is a quarter, and accumulation makes it whole again."""
    config = replace(config, dtype='float32', optimizer='adamw', lr_schedule='constant',
                     total_batch_size=0, gradient_accumulation_steps=config.accumulation())
    key = {'context × 2': 'block_size', 'layers × 2': 'n_layer', 'embeddings × 2': 'n_embd'}
    if row in key:
        config = replace(config, **{key[row]: 2 * getattr(config, key[row])})
    if column == 'SGD + cosine':
        return replace(config, optimizer='sgd', lr_schedule='cosine', decay_lr=True,
                       learning_rate=SGD_TIMES_LR * config.learning_rate,
                       min_lr=SGD_TIMES_LR * config.min_lr)
    if column in ('float16', 'bfloat16'):
        return replace(config, dtype=column)
    if column in ('reduced batch', 'accumulation'):
        times = 4 if column == 'accumulation' else 1
        return replace(config, batch_size=config.batch_size // 4,
                       gradient_accumulation_steps=times * config.gradient_accumulation_steps)
    return config


# -----------------------------------------------------------------------------
# runs


def run_all(config, seeds, model_of, device, journal=None, where=''):
    """Train every cell with `seeds` seeds → [a row of numbers for each run, its curve included].

    model_of: TrainConfig → GPTConfig, for what the plan says of memory
    journal: a file that gets a line when a run ends; what it has of the same settings and `where`
             (the machine) is not run again, so a grid that was killed goes on
    All cells come once before any comes again, so that a machine whose speed drifts is fair. One
    that fails (out of memory, say) has None for its numbers, and the others go on. Raises UserError
    where the default itself fails.
    """
    if config.batch_size % 4:
        raise UserError(f'batch_size={config.batch_size}: the reduced batch is a quarter, so it '
                        'must divide by 4')
    if config.log_interval > config.max_iters:
        raise UserError(f'log_interval={config.log_interval} is more than max_iters='
                        f'{config.max_iters}: no step would be timed')
    cells = [(seed, row, column) for seed in range(seeds) for row in ROWS for column in COLUMNS]
    known, runs = read_journal(journal), []
    for seed, row, column in tqdm(cells, 'training', disable=None):
        cell = replace(settings(config, row, column), seed=config.seed + seed)
        key = json.dumps([where, {field.name: getattr(cell, field.name)
                                  for field in fields(TrainConfig) if field.name != 'out_dir'}])
        if key in known:
            runs.append(known[key])
            continue
        planned = predict(model_of(cell), step_settings(cell, cell.dtype, device.type)).peak
        run = {'row': row, 'column': column, 'seed': cell.seed,
               'planned_memory_bytes': planned}
        try:
            with tempfile.TemporaryDirectory() as folder:
                lines = train(replace(cell, out_dir=folder))
            runs.append({**run, **numbers(lines, cell), 'failed': ''})
            if journal:
                append_line(journal, {'key': key, 'run': runs[-1]})
        except UserError as problem:
            if not runs:
                raise
            runs.append({**run, 'memory_bytes': None, 'step_ms': None, 'train_s': None,
                         'final_loss': None, 'curve': [], 'failed': str(problem)})
    return runs


def read_journal(path):
    """→ {key: run}, without a line that a kill cut short, after which a new one begins."""
    known, text = {}, path.read_text(encoding='utf-8') if path and path.exists() else ''
    if not text.endswith('\n') and text:
        path.write_text(text + '\n', encoding='utf-8')
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            known[entry['key']] = entry['run']
    return known


def train(config):
    """Run train.py → the lines of its metrics.jsonl. Raises UserError where it failed."""
    keys = [f'--{field.name}={getattr(config, field.name)}' for field in fields(TrainConfig)]
    keys += ['--report=False', '--sample_tokens=0']  # what nobody looks at
    done = subprocess.run([sys.executable, ROOT / 'train.py', *keys],
                          capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]
        raise UserError(said.removeprefix('error: '))
    text = Path(config.out_dir, 'metrics.jsonl').read_text(encoding='utf-8')
    return [json.loads(line) for line in text.splitlines()]


def numbers(lines, config):
    """metrics.jsonl's lines → what they say of memory, time and loss.

    Time is steps × the median step: whatever else the machine did meanwhile hardly counts, and
    neither do compiling and evaluating.
    """
    rates = [line['tokens_per_s'] for line in lines if 'tokens_per_s' in line]
    memory = [line['peak_memory_bytes'] for line in lines if 'peak_memory_bytes' in line]
    step_s = config.step_tokens() / statistics.median(rates)
    curve = [(line['iter'] * step_s, line['val_loss'])  # None where it was not finite
             for line in lines if 'val_loss' in line]
    return {'memory_bytes': memory[-1], 'step_ms': 1e3 * step_s,
            'train_s': config.max_iters * step_s, 'final_loss': curve[-1][1], 'curve': curve}


def seconds_to(loss, curve):
    """When a curve [(seconds, loss)] first comes down to `loss`, in a straight line between its
    points; None where it does not."""
    for (s0, loss0), (s1, loss1) in pairwise(curve):
        if None not in (loss0, loss1) and loss1 <= loss < loss0:
            return s0 + (s1 - s0) * (loss0 - loss) / (loss0 - loss1)
    return None


def target_of(runs):
    """A loss that the default reaches: 5% above what it ends at, to two digits."""
    return round(1.05 * cell_values(runs, 'final_loss')['default', 'none'][0], 2)


# -----------------------------------------------------------------------------
# what they say together


def cell_values(runs, key):
    """{(row, column): (mean over seeds, standard deviation)}; (None, 0) where a seed has none."""
    cells = {}
    for row in ROWS:
        for column in COLUMNS:
            values = [run[key] for run in runs if (run['row'], run['column']) == (row, column)]
            known = None not in values
            cells[row, column] = (statistics.mean(values), statistics.stdev(values)
                                  if len(values) > 1 else 0.0) if known else (None, 0.0)
    return cells


def interaction_effects(means):
    """{(row, column): number} → the same of how far each is from what its row and its column, each
    alone, would bring together: (share of the sum, share of the product).

    With base b, row alone r and column alone c the sum is b + (r - b) + (c - b), the product
    b · r/b · c/b; 0.1 is a tenth more. Cells with one change at most have none, nor what failed.
    """
    base, found = means['default', 'none'], {}
    for row in ROWS[1:]:
        for column in COLUMNS[1:]:
            r, c = means[row, 'none'], means['default', column]
            measured = means[row, column]
            if None not in (r, c, measured):
                found[row, column] = (measured / (r + c - base) - 1, measured / (r * c / base) - 1)
    return found


METRICS = {'memory_bytes': ('memory, MiB', 2**20, 0), 'train_s': ('training time, s', 1, 2),
           'final_loss': ('final validation loss', 1, 3)}
PLANNED = {'planned_memory_bytes': ('memory of tensors as planned, MiB', 2**20, 1)}


def tables(runs, target, memory_is):
    """All runs → Markdown.

    target: the loss to reach; memory_is: what memory_bytes are, in words
    """
    seeds = len({run['seed'] for run in runs})
    parts = [f'{len(runs)} runs, {seeds} seeds; ± is the standard deviation over seeds. '
             f'Memory is {memory_is}.']
    parts += [f'{run["row"]}, {run["column"]}, seed {run["seed"]} failed: {run["failed"]}'
              for run in runs if run['failed']]
    for key, (title, unit, digits) in {
            **METRICS, 'target_s': (f'seconds to a validation loss of {target}', 1, 2),
            **PLANNED}.items():
        text = {}
        for cell, (mean, sd) in cell_values(runs, key).items():
            text[cell] = '–' if mean is None else f'{mean / unit:,.{digits}f}' + \
                (f' ± {sd / unit:.{digits}f}' if sd else '')
        parts.append(grid_table(title, text))
    for key, (title, _, _) in {**METRICS, **PLANNED}.items():
        means = {cell: mean for cell, (mean, _) in cell_values(runs, key).items()}
        apart = interaction_effects(means)
        text = {cell: f'{of_sum:+.1%} / {of_product:+.1%}'
                for cell, (of_sum, of_product) in apart.items()}
        off = [statistics.mean(abs(pair[k]) for pair in apart.values()) for k in (0, 1)]
        parts.append(grid_table(f'{title.split(",")[0]}: off the sum / the product', text,
                                ROWS[1:], COLUMNS[1:])
                     + f'\n\nOn average {off[0]:.1%} off the sum of both changes and {off[1]:.1%} '
                       'off their product.')
    return '\n\n'.join(parts)


def grid_table(title, text, rows=ROWS, columns=COLUMNS):
    """{(row, column): text} → Markdown under a title."""
    return markdown([title, *columns],
                    [[row, *(text.get((row, column), '–') for column in columns)] for row in rows])


def draw(runs, path):
    """A picture of the grid: bars are what was measured, ticks what the single changes add up to.
    Raises UserError where matplotlib is absent."""
    try:
        import matplotlib
    except ImportError:
        raise UserError('the picture needs matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')  # a file, no window
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), layout='constrained')
    target = runs[0]['target_loss']
    panels = {**METRICS, 'target_s': (f'seconds to a validation loss of {target}', 1, 1)}
    for axis, (key, (title, unit, _)) in zip(axes.flat, panels.items(), strict=True):
        cells = cell_values(runs, key)
        means = {cell: mean for cell, (mean, _) in cells.items()}
        adds_up = key in METRICS and None not in means.values()
        for k, row in enumerate(ROWS):
            at = [x + 0.2 * (k - 1.5) for x in range(len(COLUMNS))]
            there = [(x, *cells[row, column]) for x, column in zip(at, COLUMNS, strict=True)
                     if means[row, column] is not None]
            axis.bar([x for x, _, _ in there], [mean / unit for _, mean, _ in there], 0.18,
                     yerr=[sd / unit for _, _, sd in there], ecolor='0.4', capsize=2, label=row,
                     color=f'C{k}')
            if adds_up and k:
                sums = [means[row, 'none'] + means['default', c] - means['default', 'none']
                        for c in COLUMNS[1:]]
                axis.hlines([value / unit for value in sums], [x - 0.09 for x in at[1:]],
                            [x + 0.09 for x in at[1:]], color='black', linewidth=2,
                            label='both changes added up' if k == 3 else None)
        axis.set_title(title)
        axis.set_xticks(range(len(COLUMNS)), [column.replace(' ', '\n', 1) for column in COLUMNS])
        axis.spines[['top', 'right']].set_visible(False)
    lows = [mean - sd for mean, sd in cell_values(runs, 'final_loss').values() if mean]
    axes.flat[2].set_ylim(bottom=0.95 * min(lows))
    axes.flat[2].set_title(f'{METRICS["final_loss"][0]} (the axis does not begin at 0)')
    axes.flat[3].set_title(f'{panels["target_s"][0]} (no bar: not reached)')
    handles = dict(zip(*axes.flat[0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc='outside lower center', ncols=5, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
