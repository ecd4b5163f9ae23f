"""Trainings that differ in some settings, over several seeds: run, remembered, compared, drawn.

A variant is a name and the settings that it changes: {'no convolution': {'conv': 0}}. The others
of a list are compared with its first. Each training is a whole run of train.py. A run that ended is
kept in a journal, so an experiment that was killed goes on when its command is given again.
"""

import json
import runpy
import statistics
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import fields
from itertools import product
from math import sqrt
from pathlib import Path

from tqdm import tqdm

from plaingpt.experiments.tables import markdown, number
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import append_line, command, parse_json
from plaingpt.system.formatting import count_of
from plaingpt.training.settings import TrainConfig

# -----------------------------------------------------------------------------
# lists of variants


def read_variants(name, config):
    """A file that defines `variants`, a dict or a function of the TrainConfig → {name: settings}.
    'grid', 'ladder' and 'ablation' are files beside this one. Raises UserError."""
    path = Path(name if name.endswith('.py') else Path(__file__).with_name(f'{name}.py'))
    if not path.is_file():
        raise UserError(f'variants={name}: no such file; it is grid, ladder, ablation, or a file '
                        'of your own, as --variants=mine.py')
    try:
        found = runpy.run_path(str(path)).get('variants')
        found = found(config) if callable(found) else found
    except UserError:
        raise
    except Exception as e:
        raise UserError(f'variants={name}: {type(e).__name__}: {e}') from None
    if not isinstance(found, dict) or not found or not all(
            isinstance(changes, dict) for changes in found.values()):
        raise UserError(f"variants={name}: it must define variants = {{'name': {{'key': value}}}}")
    return {str(variant): changes for variant, changes in found.items()}


def sweep_variants(sweep):
    """'learning_rate=1e-3,3e-3 conv=0,4' → {'learning_rate=1e-3, conv=0': its settings, …}, all
    combinations. Raises UserError."""
    choices = {}
    for choice in sweep.split():
        key, _, values = choice.partition('=')
        values = values.split(',')
        if len(set(values)) < max(2, len(values)) or key in choices:
            raise UserError(f'sweep={choice}: give a setting, once, and two values or more, as '
                            '--sweep=learning_rate=1e-3,3e-3')
        choices[key] = values
    combinations = [dict(zip(choices, values, strict=True))
                    for values in product(*choices.values())]
    return {', '.join(f'{key}={value}' for key, value in changes.items()): changes
            for changes in combinations}


# -----------------------------------------------------------------------------
# running them


def train_all(configs, journal, machine):
    """Train {variant: (its TrainConfig of each seed)} → [a dict for each run], seed after seed, so
    that a machine whose speed drifts is fair to all variants.

    journal: path of the file that gets a line when a run ends; a run of the same settings on the
             same machine that it has is not made again
    A run that fails has None for its numbers. Raises UserError where the first run fails.
    """
    order = [(name, config) for round_ in zip(*configs.values(), strict=True)
             for name, config in zip(configs, round_, strict=True)]
    known, runs = read_journal(journal), []
    for name, config in tqdm(order, 'training', disable=None):
        key = json.dumps([machine, {field.name: getattr(config, field.name)
                                    for field in fields(TrainConfig) if field.name != 'out_dir'}])
        if key not in known:
            try:
                known[key] = {**train_once(config), 'failed': ''}
                append_line(journal, {'key': key, 'run': known[key]})
            except UserError as problem:
                if not runs:
                    raise
                known[key] = {**dict.fromkeys(('final_loss', 'step_ms', 'memory_bytes')),
                              'curve': [], 'failed': str(problem)}
        runs.append({'variant': name, 'seed': config.seed, **known[key]})
    return runs


def read_journal(path):
    """→ {key: run}. A line that a kill cut short is skipped."""
    known = {}
    for line in Path(path).read_bytes().splitlines() if Path(path).exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            entry = parse_json(line)
            known[entry['key']] = entry['run']
    return known


def train_once(config):
    """Run train.py in a folder of its own → the run's numbers. Raises UserError where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        run_train([*(f'--{field.name}={getattr(config, field.name)}'
                     for field in fields(TrainConfig)),
                   f'--log_interval={min(config.log_interval, config.max_iters)}',
                   f'--out_dir={folder}', '--report=False', '--sample_tokens=0'])
        text = Path(folder, 'metrics.jsonl').read_text(encoding='utf-8')
    return summarize([json.loads(line) for line in text.splitlines()], config)


def run_train(argv):
    """Run train.py in a process of its own. Raises UserError where it failed."""
    done = subprocess.run(command('train', *argv), capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]
        raise UserError(last.removeprefix('error: '))


def summarize(lines, config):
    """Lines of metrics.jsonl → numbers. A step's time is the median: compiling, evaluating and
    other work on the machine do not count. curve: [(seconds of steps, validation loss)]"""
    rates = [line['tokens_per_s'] for line in lines if 'tokens_per_s' in line]
    memory = [line['peak_memory_bytes'] for line in lines if 'peak_memory_bytes' in line]
    step_s = config.step_tokens() / statistics.median(rates)
    curve = [(line['iter'] * step_s, line['val_loss'])  # None where it was not finite
             for line in lines if 'val_loss' in line]
    return {'final_loss': curve[-1][1], 'step_ms': 1e3 * step_s, 'memory_bytes': memory[-1],
            'curve': curve}


# -----------------------------------------------------------------------------
# comparing them


def compare(runs, target=0.0):
    """Runs → (a dict for each variant, the target loss: 5% above the first's unless it is given).

    'loss', 'loss_error': mean over seeds and its standard error; 'change', 'change_error': those of
    the differences to the first variant's runs of the same seeds; 'clear': whether the change is
    beyond two standard errors; 'step_ms', 'memory_bytes', 'target_s': medians. None where there is
    none.
    """
    groups = {}
    for run in runs:
        groups.setdefault(run['variant'], []).append(run)
    first, *_ = groups
    base = [run['final_loss'] for run in groups[first]]
    if not target and None not in base:
        target = round(1.05 * statistics.mean(base), 2)
    return [compare_one(name, group, None if name == first else base, target)
            for name, group in groups.items()], target


def compare_one(name, group, base, target):
    """A variant's runs, the losses of the first variant's or None for itself → its dict."""
    losses = [run['final_loss'] for run in group]
    row = {'variant': name, 'losses': losses, 'loss': None, 'loss_error': None, 'change': None,
           'change_error': None, 'clear': None, 'target_s': None}
    for key in ('step_ms', 'memory_bytes'):
        row[key] = median_or_none([run[key] for run in group])
    if None in losses:
        return row
    row['loss'], row['loss_error'] = mean_and_error(losses)
    row['target_s'] = median_or_none([seconds_to(target, run['curve']) for run in group])
    if base and None not in base:
        changes = [loss - other for loss, other in zip(losses, base, strict=True)]
        row['change'], row['change_error'] = mean_and_error(changes)
    if row['change_error'] is not None:
        row['clear'] = abs(row['change']) > 2 * row['change_error']
    return row


def median_or_none(values):
    return None if None in values else statistics.median(values)


def mean_and_error(values):
    """→ (mean, its standard error, None for a single value)"""
    error = statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


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


def format_comparison(runs, rows, target):
    """→ Markdown: a line for each variant."""
    table = [[row['variant'],
              number('.4f', row['loss']) + with_error(row['loss_error']),
              number('+.4f', row['change']) + with_error(row['change_error']),
              {None: '–', True: 'yes', False: 'no'}[row['clear']],
              number('.1f', row['step_ms']), number('.1f', row['target_s']),
              number('.0f', row['memory_bytes'] and row['memory_bytes'] / 2**20)] for row in rows]
    failed = [f'{run["variant"]}, seed {run["seed"]} failed: {run["failed"]}'
              for run in runs if run['failed']]
    return '\n\n'.join([
        f'{len(runs)} runs, {count_of(len(rows[0]["losses"]), "seed")}. The loss is the mean over '
        'seeds ± its standard error; the change is that to the first line, of runs with the same '
        'seed.', *failed,
        markdown(['', 'final validation loss', 'change', 'beyond 2 errors', 'ms a step',
                  f's to {target}', 'memory, MiB'], table)])


def with_error(error):
    return '' if error is None else f' ± {error:.4f}'


def draw_comparison(rows, path, what):
    """Draw the losses into a PNG: each run, and each variant's mean ± two standard errors. what:
    the second line of the title. Raises UserError where matplotlib or any loss is absent."""
    with needs('matplotlib', 'the picture'):
        from matplotlib.figure import Figure
    rows = [row for row in rows if row['loss'] is not None]
    if not rows:
        raise UserError('there is no picture: no variant has a loss for each of its seeds')
    figure = Figure(figsize=(8, 1.9 + 0.34 * len(rows)), layout='constrained')
    axes = figure.subplots()
    looks = {None: ('0.35', 'the first, or no clear difference'), True: ('C0', 'clearly lower'),
             False: ('C3', 'clearly higher')}
    for y, row in enumerate(rows):
        colour, label = looks[row['change'] < 0 if row['clear'] else None]
        axes.plot(row['losses'], [y] * len(row['losses']), '|', color=colour, alpha=0.45, ms=9)
        axes.errorbar(row['loss'], y, xerr=2 * (row['loss_error'] or 0.0), fmt='o', capsize=4,
                      color=colour, label=label)
    axes.axvline(rows[0]['loss'], color='0.6', linewidth=1, linestyle='--', zorder=0)
    axes.set_yticks(range(len(rows)), [row['variant'] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel('final validation loss, nats a token (lower is better)')
    best = min(rows, key=lambda row: row['loss'])
    axes.set_title(f'{best["variant"]} ends lowest, at {best["loss"]:.3f}\n', loc='left')
    axes.annotate(f'{what}; each run (|), and the mean ± 2 standard errors (●)', (0, 1), (0, 6),
                  'axes fraction', textcoords='offset points', fontsize=9, color='0.3')
    axes.grid(axis='x', alpha=0.25)
    axes.spines[['top', 'right', 'left']].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc='outside lower center', ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
