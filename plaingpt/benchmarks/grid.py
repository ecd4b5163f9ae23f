"""What changes to a training run cost and gain, alone and two together: 24 small runs.

A row changes the model (none, context × 2, layers × 2, embeddings × 2), a column the training
(none, SGD + cosine, float16, bfloat16, reduced batch, accumulation). Each cell is a whole run of
train.py, so what is measured is training as it is.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from plaingpt.benchmarks.result_tables import markdown, result_path
from plaingpt.system.devices import machine_name
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import ROOT, append_line, parse_json
from plaingpt.training.memory_planner import predict, step_settings
from plaingpt.training.settings import TrainConfig

DOUBLED = {'context × 2': 'block_size', 'layers × 2': 'n_layer', 'embeddings × 2': 'n_embd'}
ROWS = ('default', *DOUBLED)
COLUMNS = ('none', 'SGD + cosine', 'float16', 'bfloat16', 'reduced batch', 'accumulation')
SGD_TIMES_LR = 100  # SGD's learning rate, in AdamW's; settings.py on learning_rate says so


def measure_grid(work):
    """Train all cells → (a row for each run, their tables). With --save=FOLDER the runs that
    FOLDER's journal has are not made again."""
    config, device = work.config, work.device
    journal = Path(f'{result_path(config.save, "grid", device)}.jsonl') if config.save else None
    runs = train_cells(config, config.seeds, work.shape.vocab_size, device, journal,
                       machine_name(device))
    # A loss that the default reaches: 5% above its final loss, to two digits.
    reached = round(1.05 * cell_statistics(runs, 'final_loss')['default', 'none'][0], 2)
    add_target(runs, config.target_loss or reached)
    memory_is = 'what tensors on the GPU hold at most' if device.type == 'cuda' \
        else 'what the process holds at most, Python and torch included'
    return runs, format_tables(runs, memory_is)


def cell_config(config, row, column):
    """TrainConfig → that of a cell. 'none' is float32 and AdamW at a constant learning rate after
    the warmup; a reduced batch is a quarter, and accumulation takes four of these a step."""
    config = replace(config, dtype='float32', optimizer='adamw', lr_schedule='constant',
                     total_batch_size=0, gradient_accumulation_steps=config.accumulation())
    if row in DOUBLED:
        config = replace(config, **{DOUBLED[row]: 2 * getattr(config, DOUBLED[row])})
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


def train_cells(config, seeds, vocab_size, device, journal=None, machine=''):
    """Train every cell with `seeds` seeds → the rows of `train_all`. Seed follows seed, so that a
    machine whose speed drifts is fair to all cells."""
    if config.batch_size % 4:
        raise UserError(f'batch_size={config.batch_size}: the reduced batch is a quarter, so it '
                        'must divide by 4')
    cells = []
    for seed, row, column in product(range(seeds), ROWS, COLUMNS):
        cell = replace(cell_config(config, row, column), seed=config.seed + seed)
        planned = predict(cell.gpt_config(vocab_size),
                          step_settings(cell, cell.dtype, device.type)).peak
        cells.append(({'row': row, 'column': column, 'seed': cell.seed,
                       'planned_memory_bytes': planned}, cell))
    return train_all(cells, journal, machine)


def train_all(cells, journal=None, machine=''):
    """cells: (what to call a run, its TrainConfig) → [a row of numbers for each run].

    journal: a file that gets a line when a run ends; a run that it has, of the same settings and
             on the same machine, is not made again, so work that was killed can be resumed
    A run that fails has None for its numbers. Raises UserError where the first run fails.
    """
    for _, config in cells:  # before any is trained
        if config.log_interval > config.max_iters:
            raise UserError(f'log_interval={config.log_interval} is more than max_iters='
                            f'{config.max_iters}: no step would be timed')
    known, runs = read_journal(journal), []
    for names, config in tqdm(cells, 'training', disable=None):
        key = json.dumps([machine, {field.name: getattr(config, field.name)
                                    for field in fields(TrainConfig) if field.name != 'out_dir'}])
        if key in known:
            runs.append({**known[key], **names})
            continue
        try:
            run = {**names, **train_once(config), 'failed': ''}
            if journal:
                append_line(journal, {'key': key, 'run': run})
        except UserError as problem:
            if not runs:
                raise
            run = {**names, 'memory_bytes': None, 'step_ms': None, 'train_s': None,
                   'final_loss': None, 'curve': [], 'failed': str(problem)}
        runs.append(run)
    return runs


def read_journal(path):
    """→ {key: run}. A line that a kill cut short is skipped."""
    known = {}
    for line in path.read_bytes().splitlines() if path and path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            entry = parse_json(line)
            known[entry['key']] = entry['run']
    return known


def train_once(config):
    """Run train.py in a folder of its own → the run's numbers. Raises UserError where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        return summarize(train_in(folder, config), config)


def train_in(folder, config):
    """Train with out_dir `folder` → lines of its metrics.jsonl. Raises UserError."""
    keys = [f'--{field.name}={getattr(config, field.name)}' for field in fields(TrainConfig)]
    run_train([*keys, f'--out_dir={folder}', '--report=False', '--sample_tokens=0'])
    text = Path(folder, 'metrics.jsonl').read_text(encoding='utf-8')
    return [json.loads(line) for line in text.splitlines()]


def run_train(argv):
    """Run train.py in a process of its own. Raises UserError where it failed."""
    done = subprocess.run([sys.executable, ROOT / 'train.py', *argv],
                          capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]
        raise UserError(last.removeprefix('error: '))


def summarize(lines, config):
    """Lines of metrics.jsonl → numbers of memory, time and loss. Time is steps × the median step:
    compiling, evaluating and other work on the machine do not count."""
    rates = [line['tokens_per_s'] for line in lines if 'tokens_per_s' in line]
    memory = [line['peak_memory_bytes'] for line in lines if 'peak_memory_bytes' in line]
    step_s = config.step_tokens() / statistics.median(rates)
    curve = [(line['iter'] * step_s, line['val_loss'])  # None where it was not finite
             for line in lines if 'val_loss' in line]
    return {'memory_bytes': memory[-1], 'step_ms': 1e3 * step_s,
            'train_s': config.max_iters * step_s, 'final_loss': curve[-1][1], 'curve': curve}


def add_target(runs, target):
    """Add to each run the loss to reach, and the seconds that it took to reach it."""
    for run in runs:
        run.update(target_loss=target, target_s=seconds_to(target, run['curve']))


def seconds_to(loss, curve):
    """When a curve [(seconds, loss)] first reaches `loss`, interpolated linearly where the point
    before has a loss; None: never."""
    before = None
    for seconds, value in curve:
        if value is not None and value <= loss:
            if before is None:
                return seconds
            s0, loss0 = before
            return s0 + (seconds - s0) * (loss0 - loss) / (loss0 - value)
        before = None if value is None else (seconds, value)
    return None


METRICS = {'memory_bytes': ('memory, MiB', 2**20, 0), 'train_s': ('training time, s', 1, 2),
           'final_loss': ('final validation loss', 1, 3)}  # key → title, unit, digits
PLANNED = {'planned_memory_bytes': ('memory of tensors as planned, MiB', 2**20, 1)}


def target_metric(runs):
    return {'target_s': (f'seconds to a validation loss of {runs[0]["target_loss"]}', 1, 2)}


def cell_statistics(runs, key):
    """{(row, column): (mean over seeds, standard deviation)}; (None, 0) where a seed has none."""
    cells = {}
    for cell in product(ROWS, COLUMNS):
        values = [run[key] for run in runs if (run['row'], run['column']) == cell]
        sd = statistics.stdev(values) if None not in values and len(values) > 1 else 0.0
        cells[cell] = (None if None in values else statistics.mean(values), sd)
    return cells


def interaction_effects(means):
    """{(row, column): number} → {(row, column): (off the sum, off the product)}: how far two
    changes together are from what each alone predicts, as a share; 0.1 is a tenth more.

    With base b, row alone r and column alone c the sum is b + (r - b) + (c - b), the product
    b · r/b · c/b. Cells with fewer than two changes have none, nor those that failed.
    """
    base, found = means['default', 'none'], {}
    for row, column in product(ROWS[1:], COLUMNS[1:]):
        r, c, measured = means[row, 'none'], means['default', column], means[row, column]
        if None not in (r, c, measured):
            found[row, column] = (measured / (r + c - base) - 1, measured / (r * c / base) - 1)
    return found


def format_tables(runs, memory_is):
    """All runs → Markdown. memory_is: what memory_bytes are, in words."""
    seeds = len({run['seed'] for run in runs})
    parts = [f'{len(runs)} runs, {seeds} seeds; ± is the standard deviation over seeds. '
             f'Memory is {memory_is}.']
    parts += [f'{run["row"]}, {run["column"]}, seed {run["seed"]} failed: {run["failed"]}'
              for run in runs if run['failed']]
    for key, (title, unit, digits) in {**METRICS, **target_metric(runs), **PLANNED}.items():
        parts.append(grid_table(title, {
            cell: '–' if mean is None else f'{mean / unit:,.{digits}f}'
            + (f' ± {sd / unit:.{digits}f}' if sd else '')
            for cell, (mean, sd) in cell_statistics(runs, key).items()}))
    for key, (title, _, _) in {**METRICS, **PLANNED}.items():
        effects = interaction_effects({cell: mean for cell, (mean, _)
                                       in cell_statistics(runs, key).items()})
        parts.append(grid_table(
            f'{title.split(",")[0]}: off the sum / the product',
            {cell: f'{off_sum:+.1%} / {off_product:+.1%}'
             for cell, (off_sum, off_product) in effects.items()}, ROWS[1:], COLUMNS[1:]))
        average = [statistics.mean(abs(pair[k]) for pair in effects.values()) for k in (0, 1)]
        parts.append(f'On average {average[0]:.1%} off the sum of both changes and '
                     f'{average[1]:.1%} off their product.')
    return '\n\n'.join(parts)


def grid_table(title, text, rows=ROWS, columns=COLUMNS):
    """{(row, column): text} → Markdown under a title."""
    return markdown([title, *columns],
                    [[row, *(text.get((row, column), '–') for column in columns)] for row in rows])


def draw_grid(runs, path):
    """Draw the grid into a PNG: bars are measured, ticks are what both changes add up to.
    Raises UserError where matplotlib is absent."""
    with needs('matplotlib', 'the picture'):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(13, 8), layout='constrained')
    axes = dict(zip([*METRICS, 'target_s'], figure.subplots(2, 2).flat, strict=True))
    notes = {'final_loss': '(the axis does not begin at 0)', 'target_s': '(no bar: not reached)'}
    for key, (title, unit, _) in {**METRICS, **target_metric(runs)}.items():
        draw_metric(axes[key], cell_statistics(runs, key), unit, with_sums=key in METRICS)
        axes[key].set_title(f'{title} {notes.get(key, "")}')
    lowest = min(mean - sd for mean, sd in cell_statistics(runs, 'final_loss').values() if mean)
    axes['final_loss'].set_ylim(bottom=0.95 * lowest)
    figure.legend(*axes['memory_bytes'].get_legend_handles_labels(), loc='outside lower center',
                  ncols=5, frameon=False)
    figure.savefig(path, dpi=110)


def draw_metric(axes, cells, unit, with_sums):
    """Bars of all cells that have a mean, a colour for each row; with_sums: and the ticks."""
    for k, row in enumerate(ROWS):
        x = np.arange(len(COLUMNS)) + 0.2 * (k - 1.5)
        # None becomes NaN, which matplotlib leaves out.
        mean, sd = np.array([cells[row, column] for column in COLUMNS], float).T / unit
        axes.bar(x, mean, 0.18, yerr=sd, ecolor='0.4', capsize=2, label=row, color=f'C{k}')
        if k == 0:
            default = mean
        elif with_sums:
            sums = (mean[0] + default - default[0])[1:]
            axes.hlines(sums, x[1:] - 0.09, x[1:] + 0.09, color='black', linewidth=2,
                        label='both changes added up' if row == ROWS[-1] else None)
    axes.set_xticks(range(len(COLUMNS)), [column.replace(' ', '\n', 1) for column in COLUMNS])
    axes.spines[['top', 'right']].set_visible(False)
