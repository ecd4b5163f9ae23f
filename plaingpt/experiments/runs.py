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
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from itertools import product
from math import sqrt
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import find_recipe, load_config
from plaingpt.data.dataset import has_token_files, open_named
from plaingpt.experiments.tables import markdown, number
from plaingpt.monitoring.references import STUDENT_T
from plaingpt.monitoring.run_record import column, read_rows, read_run
from plaingpt.system.devices import choose_device, machine_name
from plaingpt.system.errors import UserError, print_line, warn
from plaingpt.system.files import ROOT, lock_output_dir, read_json, sha256_of, write_json
from plaingpt.system.formatting import count_of
from plaingpt.training.checkpoint import checksum
from plaingpt.training.progress import FINISHED, TIME_UP
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import archive_previous_run

LISTS = ROOT / 'config' / 'variants'
# Settings that change where a run's numbers go, and not the numbers.
OUTPUTS = {'out_dir', 'log_to', 'wandb_log', 'wandb_project', 'wandb_run_name'}

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
    its numbers, see summarize, and its date. A run of this code that was made of the same and ended
    there is taken as it is; another one moves to old-001. Raises UserError where it fails."""
    folder, asked = Path(folder), Path(folder, 'asked.json')
    made_of, before = ingredients(words) if tree == ROOT else {}, {}
    with suppress(OSError, ValueError, TypeError):
        before = dict(read_json(asked))
    others = [key for key, value in made_of.items() if before.get(key) != value]
    with lock_output_dir(folder):
        if others and (archive := archive_previous_run(folder)):
            print_line(f'{folder}: its run had other {", ".join(others)}, and is in {archive}',
                       sys.stderr)
    if others or 'ended' not in before or not has_ended(folder):
        write_json(asked, made_of)
        run_command('train', [*words, f'--out_dir={folder}'], tree)
        if not has_ended(folder):
            raise UserError(f'{folder}: its run is incomplete '
                            f'(ending: {read_run(folder).get("ending", "killed")})')
        if made_of.get('data', '') is None:  # the run has prepared a small corpus
            made_of['data'] = ingredients(words)['data']
        before = {**made_of, 'ended': date.today().isoformat()}
        write_json(asked, before)
    return summarize(folder) | {'date': before['ended'], 'code': made_of.get('code'),
                                'config files': made_of.get('config files')}


def ingredients(words):
    """What a run of this code is made of, as JSON: two runs of equal ingredients are the same run.
    Raises UserError."""
    config = load_config(TrainConfig, words)
    code = [*(ROOT / name for name in ('train.py', 'model.py', 'configurator.py')),
            *sorted(ROOT.glob('plaingpt/**/*.py'))]
    data = None
    if has_token_files(config.dataset):
        dataset = open_named(config.dataset, config.vocab_size)
        data = checksum([dataset.state(), dataset.identity('val')])
    start = Path(config.init_from)
    weights = [path for path in (start, *sorted(start.rglob('*')))
               if path.suffix in ('.safetensors', '.pt', '.pth')]
    return {'settings': {key: value for key, value in asdict(config).items() if key not in OUTPUTS},
            'config files': checksum([sha256_of(find_recipe(word)) for word in words
                                      if not word.startswith('--')]),
            'code': checksum([sha256_of(path) for path in code]), 'data': data,
            'weights': [[str(path), path.stat().st_mtime] for path in weights],
            'torch': torch.__version__,
            'device': machine_name(choose_device(config.device)[0]).partition(',')[0]}


def has_ended(folder):
    """Whether there is a run that came to its end, and what summarize needs can be read."""
    rows = read_rows(Path(folder, 'metrics.jsonl'), tell=lambda problem: None)
    run = read_run(folder, needed={'dtype', 'dataset'})
    return run.get('ending', '').startswith((FINISHED, TIME_UP, 'patience')) \
        and any('val_loss' in row for row in rows) and rows[-1]['iter'] > 0


def run_command(name, argv, tree):
    """Run a command of the code in `tree` in a process of its own. Raises UserError where it
    failed."""
    done = subprocess.run([sys.executable, f'{tree}/{name}.py', *argv], capture_output=True,
                          text=True)
    if done.returncode:
        raise UserError(error_line(done.stderr) or f'exit code {done.returncode}')


def error_line(stderr):
    """What a script that failed printed → its `error: …`, or the exception of a traceback, which
    notes may follow, or else the last line."""
    errors = re.findall(r'^error: (.*)', stderr, re.M)
    exceptions = re.findall(r'^Traceback .*\n(?:[ \t].*\n)*(\S.*)', stderr, re.M)
    return (errors[:1] or exceptions[-1:] or stderr.strip().splitlines()[-1:] or [''])[0]


def summarize(folder):
    """The files of a run → numbers. A step's time is the median: compiling, evaluating and other
    work on the machine do not count. final_loss is None where it was not finite. minutes: what the
    run was given, or 0"""
    lines, run = read_rows(Path(folder, 'metrics.jsonl')), read_run(folder)
    end = lines[-1]
    rates = column(lines, 'tokens_per_s') or [end['tokens'] / end['elapsed_s']]  # none was logged
    step_s = end['tokens'] / end['iter'] / statistics.median(rates)
    losses = [line['val_loss'] for line in lines if 'val_loss' in line]
    return {'final_loss': losses[-1], 'step_ms': 1e3 * step_s, 'iterations': end['iter'],
            'seconds': end['elapsed_s'], 'minutes': run['config'].get('minutes', 0),
            'dtype': run['dtype'], 'dataset': run['config']['dataset']}


def train_all(variants, folder, trees=None):
    """Train {variant: {seed: words of train.py}} in folders of `folder` → [a dict for each run],
    seed after seed, so that a machine whose speed drifts is fair to all variants. A run that fails
    has None for its numbers. Raises UserError where the first one fails.

    trees: {variant: the folder of its code}, where that is not this one; then any that fails raises
        it, and every other seed has the variants in reverse: none always runs after another"""
    order = []
    for count, seed in enumerate(next(iter(variants.values()))):
        names = reversed(variants) if trees and count % 2 else variants
        order += [(name, seed, variants[name][seed]) for name in names]
    print(f'{count_of(len(order), "run")}, in {folder}', file=sys.stderr)
    runs = []
    for name, seed, words in tqdm(order, 'training', disable=None):
        # what file systems do not take is written as %xx
        where = re.sub(r'[^\w =,.+×-]', lambda found: f'%{ord(found[0]):02x}', name)
        run = {'variant': name, 'seed': seed, 'folder': str(Path(folder, f'{where},seed={seed}')),
               'problem': ''}
        try:
            run |= train_once(words, run['folder'], (trees or {}).get(name, ROOT))
        except UserError as problem:
            if not runs or trees:
                raise UserError(f'{name}, seed {seed}: {problem}') from None
            warn(f'{name}, seed {seed}: {problem}')
            run |= {**dict.fromkeys(runs[0].keys() - run.keys()), 'problem': str(problem)}
        tqdm.write(f'{name}, seed {seed}: {number(".4f", run["final_loss"])}', file=sys.stderr)
        runs.append(run)
    if len({(run.get('code'), run.get('config files')) for run in runs if not run['problem']}) > 1:
        warn('the code or a config file changed while these runs trained: give the command again')
    return runs


# -----------------------------------------------------------------------------
# comparing them


def compare(runs):
    """Runs → a dict for each variant. loss, loss_error: the mean over seeds and its standard error;
    change, change_error: the same for the difference to the first variant, seed by seed;
    half_width: of its 95% interval; clear: whether that excludes zero; step_ms: the median. None:
    not known, and `problem` says why."""
    groups = {}
    for run in runs:
        groups.setdefault(run['variant'], []).append(run)
    base, rows = [run['final_loss'] for run in next(iter(groups.values()))], []
    for name, group in groups.items():
        row = {'variant': name, **dict.fromkeys((
            'loss', 'loss_error', 'change', 'change_error', 'half_width', 'clear', 'step_ms'))}
        losses = [run['final_loss'] for run in group]
        row['problem'] = next((f'seed {run["seed"]}: {run.get("problem") or "not finite"}'
                               for run in group if run['final_loss'] is None), '')
        if None not in losses:
            row['loss'], row['loss_error'] = mean_and_error(losses)
            row['step_ms'] = statistics.median(run['step_ms'] for run in group)
        if rows and None not in losses + base:
            change, error = mean_and_error([a - b for a, b in zip(losses, base, strict=True)])
            row |= {'change': change, 'change_error': error}
            if error is not None:
                row['half_width'] = STUDENT_T[min(len(losses), 31) - 2] * error
                row['clear'] = abs(change) > row['half_width']
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
            [[row['variant'], row['problem'] or with_error('.4f', row['loss'], row['loss_error']),
              with_error('+.4f', row['change'], row['change_error']),
              {None: '–', True: 'yes', False: 'no'}[row['clear']],
              number('.1f', row['step_ms'])] for row in rows])
