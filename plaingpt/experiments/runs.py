"""Trainings that differ in some settings, over several seeds: run, kept, compared in one table.

A variant is a name and the settings that it changes: {'no convolution': {'conv': 0}}. The others
of a list are compared with its first. Each training is a whole run of train.py in a folder of its
own, which stays: the same command does not train again what has ended.
"""

import re
import runpy
import statistics
import subprocess
import sys
from itertools import product
from math import sqrt
from pathlib import Path

from tqdm import tqdm

from plaingpt.experiments.tables import markdown, number
from plaingpt.monitoring.references import STUDENT_T
from plaingpt.monitoring.run_record import read_rows, read_run
from plaingpt.system.errors import UserError, warn
from plaingpt.system.files import ROOT, read_json, write_json
from plaingpt.system.formatting import count_of

LISTS = ROOT / 'config' / 'variants'

# -----------------------------------------------------------------------------
# lists of variants


def read_variants(name, config):
    """A file that defines `variants`, a dict or a function of the TrainConfig → {name: settings}.
    A name alone is of a file in config/variants. Raises UserError."""
    path = Path(name) if name.endswith('.py') else LISTS / f'{name}.py'
    if not path.is_file():
        raise UserError(f'variants={name}: no such file; it is '
                        f'{", ".join(sorted(path.stem for path in LISTS.glob("*.py")))}, or a file '
                        'of your own, as --variants=mine.py')
    found = runpy.run_path(str(path)).get('variants')
    found = found(config) if callable(found) else found
    if not isinstance(found, dict) or not found \
            or not all(isinstance(changes, dict) for changes in found.values()):
        raise UserError(f"variants={name}: it must define variants = {{'name': {{'key': value}}}}")
    return {str(variant): changes for variant, changes in found.items()}


def sweep_variants(sweep):
    """'learning_rate=1e-3,3e-3 conv=0,4' → {'learning_rate=1e-3, conv=0': its settings, …}, all
    combinations."""
    choices = {key: values.split(',')
               for key, _, values in (choice.partition('=') for choice in sweep.split())}
    combinations = [dict(zip(choices, values, strict=True))
                    for values in product(*choices.values())]
    return {', '.join(f'{key}={value}' for key, value in changes.items()): changes
            for changes in combinations}


# -----------------------------------------------------------------------------
# running them


def train_once(words, folder, tree=ROOT):
    """Train in `folder` as the words of a command say, by the code in `tree` or else this code →
    its numbers, see summarize. A run of the same words that ended there is taken as it is; train.py
    moves another one to old-001. Raises UserError where it fails."""
    folder, asked = Path(folder), Path(folder, 'asked.json')  # of a run that ended
    if not asked.exists() or read_json(asked) != words:
        asked.unlink(missing_ok=True)
        run_command('train', [*words, f'--out_dir={folder}'], tree)
        if not has_ended(folder):
            raise UserError(f'{folder}: its run is incomplete '
                            f'(ending: {read_run(folder).get("ending", "killed")})')
        write_json(asked, words)
    return summarize(folder)


def has_ended(folder):
    return read_run(folder).get('ending', '').startswith(('all iterations are done', 'patience'))


def run_command(name, argv, tree):
    """Run a command of the code in `tree` in a process of its own. Raises UserError where it
    failed."""
    done = subprocess.run([sys.executable, f'{tree}/{name}.py', *argv], capture_output=True,
                          text=True)
    if done.returncode:
        lines = (done.stderr.strip() or f'exit code {done.returncode}').splitlines()
        told = [line for line in lines if line.startswith('error: ')] or lines[-1:]
        raise UserError(told[0].removeprefix('error: '))


def summarize(folder):
    """The files of a run → numbers. A step's time is the median: compiling, evaluating and other
    work on the machine do not count. final_loss is None where it was not finite."""
    lines, run = read_rows(Path(folder, 'metrics.jsonl')), read_run(folder)
    rates = [line['tokens_per_s'] for line in lines if 'tokens_per_s' in line]
    step_s = lines[-1]['tokens'] / lines[-1]['iter'] / statistics.median(rates)
    losses = [line['val_loss'] for line in lines if 'val_loss' in line]
    return {'final_loss': losses[-1], 'step_ms': 1e3 * step_s, 'seconds': lines[-1]['elapsed_s'],
            'dtype': run['dtype'], 'dataset': run['config']['dataset']}


def train_all(variants, folder, trees=None):
    """Train {variant: {seed: words of train.py}} in folders of `folder` → [a dict for each run],
    seed after seed, so that a machine whose speed drifts is fair to all variants. A run that fails
    has None for its numbers. Raises UserError where the first one fails.

    trees: {variant: the folder of its code}, where that is not this one; then any that fails"""
    order = [(name, seed, of_seeds[seed]) for seed in next(iter(variants.values()))
             for name, of_seeds in variants.items()]
    print(f'{count_of(len(order), "run")}, in {folder}', file=sys.stderr)
    runs = []
    for name, seed, words in tqdm(order, 'training', disable=None):
        # what file systems do not take is written as %xx
        where = re.sub(r'[^\w =,.+×-]', lambda found: f'%{ord(found[0]):02x}', name)
        run = {'variant': name, 'seed': seed, 'folder': str(Path(folder, f'{where},seed={seed}'))}
        try:
            run |= train_once(words, run['folder'], (trees or {}).get(name, ROOT))
        except UserError as problem:
            if not runs or trees:
                raise UserError(f'{name}, seed {seed}: {problem}') from None
            warn(f'{name}, seed {seed}: {problem}')
            run |= dict.fromkeys(runs[0].keys() - run.keys())
        tqdm.write(f'{name}, seed {seed}: {number(".4f", run["final_loss"])}', file=sys.stderr)
        runs.append(run)
    return runs


# -----------------------------------------------------------------------------
# comparing them


def compare(runs):
    """Runs → a dict for each variant. loss, loss_error: the mean over seeds and its standard error;
    change, change_error: the same for the difference to the first variant, seed by seed; clear:
    whether its 95% interval excludes zero; step_ms: the median. None: not known."""
    groups = {}
    for run in runs:
        groups.setdefault(run['variant'], []).append(run)
    base, rows = [run['final_loss'] for run in next(iter(groups.values()))], []
    for name, group in groups.items():
        row = {'variant': name, **dict.fromkeys((
            'loss', 'loss_error', 'change', 'change_error', 'clear', 'step_ms'))}
        losses = [run['final_loss'] for run in group]
        if None not in losses:
            row['loss'], row['loss_error'] = mean_and_error(losses)
            row['step_ms'] = statistics.median(run['step_ms'] for run in group)
        if rows and None not in losses + base:
            change, error = mean_and_error([a - b for a, b in zip(losses, base, strict=True)])
            row |= {'change': change, 'change_error': error}
            if error is not None:
                row['clear'] = abs(change) > STUDENT_T[min(len(losses), 31) - 2] * error
        rows.append(row)
    return rows


def mean_and_error(values):
    """→ (mean, its standard error, None for a single value)"""
    error = statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def format_comparison(rows):
    """→ Markdown: a line for each variant."""
    def with_error(form, value, error):
        return number(form, value) + ('' if error is None else f' ± {error:.4f}')

    said = 'The change is that to the first line, of runs with the same seed, ± its standard ' \
           'error. It is more than\nchance where zero is outside of its 95% interval (Student\'s ' \
           't), which takes two seeds or more.'
    return f'{said}\n\n' + markdown(
            ['', 'final validation loss', 'change', 'more than chance', 'ms a step'],
            [[row['variant'], with_error('.4f', row['loss'], row['loss_error']),
              with_error('+.4f', row['change'], row['change_error']),
              {None: '–', True: 'yes', False: 'no'}[row['clear']],
              number('.1f', row['step_ms'])] for row in rows])
