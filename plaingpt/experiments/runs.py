"""Trainings that differ in some settings, over several seeds: run, kept, compared in one table.

A variant is a name and the settings that it changes: {'no convolution': {'conv': 0}}. The others
of a list are compared with its first. Each training is a whole run of train.py in a folder of its
own, which stays: the same command does not train again what has ended.
"""

import csv
import datetime
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import find_recipe, load_config
from plaingpt.data.dataset import has_token_files, open_named
from plaingpt.monitoring.references import STUDENT_T
from plaingpt.monitoring.run_record import column, read_rows, read_run
from plaingpt.system.devices import choose_device, machine_name
from plaingpt.system.errors import UserError, print_line, warn
from plaingpt.system.files import (
    ROOT,
    append_text,
    lock_output_dir,
    read_json,
    sha256_of,
    write_json,
)
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
    rows = read_rows(Path(folder, 'metrics.jsonl'), on_damage=lambda message: None)
    run = read_run(folder, required={'dtype', 'dataset'})
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


# -----------------------------------------------------------------------------
# tables


def markdown(header, rows):
    """A Markdown table: header and rows of text; the first column is left, the others right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    forms = [f'<{widths[0]}', *(f'>{width}' for width in widths[1:])]

    def line(row):
        return f'| {" | ".join(map(format, row, forms))} |'

    rule = ['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])]
    return '\n'.join(line(row) for row in (header, rule, *rows))


def number(form, value):
    """format(value, form), and a dash where there is no number."""
    return '–' if value is None else format(value, form)


def save_csv(path, rows):
    """Write a list of dicts with the same keys."""
    with open(path, 'w', newline='', encoding='utf-8') as table:
        writer = csv.DictWriter(table, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def append_tsv(path, row):
    """Append the values of a dict to a .tsv file, whose header is the keys. White space in a value
    becomes a space."""
    header, line = ('\t'.join(' '.join(str(cell).split()) for cell in cells)
                    for cells in (row, row.values()))
    append_text(path, line, header)


# -----------------------------------------------------------------------------
# the judge


EXIT_STATUS = {'BETTER': 0, 'NOT SHOWN': 3, 'WORSE': 4}
# Settings of a short run of each side, before runs of minutes. It fills the caches of the compiler,
# which the first run would fill in its time, and the others would find filled.
WARM_UP = ['--minutes=0', '--max_iters=2', '--warmup_iters=0']


def copy_sides(commit, folder):
    """Copy both into `folder`, since this clone may be edited meanwhile: all files that git tracks,
    and new ones of code → {name of a side: its folder}, the commit's short hash. Raises UserError.
    """
    base, change = folder / 'base', folder / 'change'
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    done = git(['git', 'archive', f'--output={base}.zip', commit])
    if done.returncode:
        raise UserError(f'against={commit}: {done.stderr.strip()}')
    shutil.unpack_archive(f'{base}.zip', base)
    with zipfile.ZipFile(f'{base}.zip') as archive:
        short_hash = archive.comment.decode()[:8]  # git writes the commit there
    tracked, new = ['git', 'ls-files', '-z'], ['--others', '--exclude-standard', '*.py']
    for name in (git(tracked).stdout + git(tracked + new).stdout).split('\0'):
        if (ROOT / name).is_file():  # one that was deleted is still tracked
            (change / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, change / name)
    return {'base': base, 'change': change}, short_hash


def changed_files(trees):
    """What differs between the trees of both sides, by lines: 'model.py +3 -1', or 'nothing'."""
    base, change = trees.values()
    numbers = subprocess.run(
        ['git', 'diff', '--no-index', '--numstat', '--no-renames', '-z', base.name, change.name],
        cwd=base.parent, capture_output=True, text=True).stdout
    changed = []
    for added, removed, *names in re.findall('(\\S+)\t(\\S+)\t\0(.+?)\0(.+?)\0', numbers):
        name = names[0] if names[1] == '/dev/null' else names[1]
        if (added, removed) != ('0', '0'):  # the mode alone: a zip file has none
            changed.append(f'{name.partition("/")[2]} +{added} -{removed}')
    return ', '.join(changed) or 'nothing'


def of_side(tree, word):
    """A word of a command line for the code in `tree`, which has its own config files."""
    path = Path(word if os.path.exists(word) else ROOT / word).resolve()
    return str(tree / path.relative_to(ROOT)) \
        if word.endswith('.py') and path.is_relative_to(ROOT) else word


def verdict(rows, compared):
    """The runs of both sides, and what runs.compare makes of them → what they show, and after
    which time. Raises UserError."""
    datasets = {run['dataset'] for run in rows}
    if len(datasets) > 1:
        raise UserError(f'the sides trained on {" and ".join(sorted(datasets))}: losses on '
                        'different datasets do not compare')
    minutes = {run['minutes'] for run in rows}
    if len(minutes) > 1:
        raise UserError(f'the sides trained with minutes={" and ".join(map(str, sorted(minutes)))}:'
                        ' give --minutes in the command')
    _, change = compared
    if change['change'] is None:
        raise UserError('the last validation loss of a run is not finite')
    said = 'NOT SHOWN' if not change['clear'] else 'BETTER' if change['change'] < 0 else 'WORSE'

    def median(side, key):
        return statistics.median(run[key] for run in rows if run['variant'] == side)

    if minutes == {0}:
        ratio = median('change', 'seconds') / median('base', 'seconds')
        return said, f'in {ratio:.2f} times the time'
    return said, f'after the same time: {minutes.pop():g} min, ' \
                 f'{median("base", "iterations"):,.0f} steps of base and ' \
                 f'{median("change", "iterations"):,.0f} of change (medians)'


def append_result(path, judged, compared=None, said='FAILED', problem=''):
    """Append a judgement to results.tsv. judged: {column: what was judged}, and when that began;
    compared: what runs.compare returned, or None where a side does not train"""
    began = judged['date (UTC)']
    took = datetime.datetime.now(datetime.UTC) - began
    base, change = compared or 2 * [dict.fromkeys(('loss', 'change', 'half_width'))]
    losses = {'base loss': base['loss'], 'change loss': change['loss'],
              'difference': change['change'], '95% interval: difference ±': change['half_width']}
    append_tsv(path, {
        **judged, 'date (UTC)': f'{began:%Y-%m-%dT%H:%M:%SZ}',
        **{f'{name} (nats per token)': '' if loss is None else f'{loss:.5f}'
           for name, loss in losses.items()},
        'verdict': said, 'minutes': f'{took.total_seconds() / 60:.1f}', 'problem': problem})
