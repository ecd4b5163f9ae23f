"""Train variants of a recipe over several seeds, keep the runs, and compare them in a table.

A variant is a name and the settings that it changes: {'no convolution': {'conv': 0}}. All are
compared with the first one. Each run is a run of train.py in its own folder, and is kept: running
the same command again does not repeat completed runs.
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
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import find_recipe, load_config
from plaingpt.data.dataset import has_token_files, open_dataset_spec
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
from plaingpt.training.checkpoint import archive_previous_run, checksum
from plaingpt.training.progress import FINISHED, TIME_UP
from plaingpt.training.settings import TrainConfig

LISTS = ROOT / 'config' / 'variants'
# Settings that change where metrics go, but not the metrics.
OUTPUTS = {'out_dir', 'log_to', 'wandb_log', 'wandb_project', 'wandb_run_name'}

# -----------------------------------------------------------------------------
# lists of variants


def read_variants(name, config):
    """Read a file that defines `variants`, a dict or a function of the TrainConfig → {name:
    settings}. A name without .py is a file in config/variants. Raises UserError."""
    path = Path(name) if name.endswith('.py') else LISTS / f'{name}.py'
    if not path.is_file():
        names = sorted(path.stem for path in LISTS.glob('*.py'))
        raise UserError(f'variants={name}: no such file; use {", ".join(names)}, or a file of '
                        'your own, as in --variants=mine.py')
    variants = runpy.run_path(str(path)).get('variants')
    if callable(variants):
        variants = variants(config)
    if not isinstance(variants, dict) or not variants \
            or not all(isinstance(changes, dict) for changes in variants.values()):
        raise UserError(f"variants={name}: it must define variants = {{'name': {{'key': value}}}}")
    return {str(variant): changes for variant, changes in variants.items()}


def sweep_variants(sweep):
    """'learning_rate=1e-3,3e-3 conv=0,4' → all combinations: {'learning_rate=1e-3, conv=0': its
    settings, …}"""
    choices = {}
    for choice in sweep.split():
        key, _, values = choice.partition('=')
        choices[key] = values.split(',')
    variants = {}
    for values in product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        variants[', '.join(f'{key}={value}' for key, value in changes.items())] = changes
    return variants


# -----------------------------------------------------------------------------
# training


def train_once(argv, folder, tree=ROOT):
    """Train in `folder` with the arguments `argv`, using the code in `tree` → summarize(folder) and
    its date. A completed run with the same inputs (of this code only) is reused; a different run
    moves to old-001. Raises UserError if the run fails."""
    folder = Path(folder)
    record_path = Path(folder, 'asked.json')
    inputs = inputs_of(argv) if tree == ROOT else {}
    record = {}
    with suppress(OSError, ValueError, TypeError):
        record = dict(read_json(record_path))
    changed = [key for key, value in inputs.items() if record.get(key) != value]
    with lock_output_dir(folder):
        if changed and (archive := archive_previous_run(folder)):
            print_line(f'{folder}: moved the previous run, which differs in {", ".join(changed)}, '
                       f'to {archive}', sys.stderr)
    if changed or 'ended' not in record or not has_ended(folder):
        write_json(record_path, inputs)
        run_command('train', [*argv, f'--out_dir={folder}'], tree)
        if not has_ended(folder):
            raise UserError(f'{folder}: the run is incomplete '
                            f'(ending: {read_run(folder).get("ending", "killed")})')
        if 'data' in inputs and inputs['data'] is None:  # the run has prepared a small corpus
            inputs['data'] = inputs_of(argv)['data']
        record = {**inputs, 'ended': datetime.date.today().isoformat()}
        write_json(record_path, record)
    return summarize(folder) | {'date': record['ended'], 'code': inputs.get('code'),
                                'config files': inputs.get('config files')}


def inputs_of(argv):
    """All inputs of a run of this code, as JSON: runs with equal inputs are the same run. Raises
    UserError."""
    config = load_config(TrainConfig, argv)
    settings = {key: value for key, value in asdict(config).items() if key not in OUTPUTS}
    config_files = [find_recipe(arg) for arg in argv if not arg.startswith('--')]
    code = [*(ROOT / name for name in ('train.py', 'model.py', 'configurator.py')),
            *sorted(ROOT.glob('plaingpt/**/*.py'))]
    data = None
    if has_token_files(config.dataset):
        dataset = open_dataset_spec(config.dataset, config.vocab_size)
        data = checksum([dataset.state(), dataset.identity('val')])
    init_from = Path(config.init_from)
    weights = [path for path in (init_from, *sorted(init_from.rglob('*')))
               if path.suffix in ('.safetensors', '.pt', '.pth')]
    return {'settings': settings, 'config files': checksum(map_sha256(config_files)),
            'code': checksum(map_sha256(code)), 'data': data,
            'weights': [[str(path), path.stat().st_mtime] for path in weights],
            'torch': torch.__version__,
            'device': machine_name(choose_device(config.device)[0]).partition(',')[0]}


def map_sha256(paths):
    return [sha256_of(path) for path in paths]


def has_ended(folder):
    """Whether there is a completed run whose logs have what summarize needs."""
    rows = read_rows(Path(folder, 'metrics.jsonl'), on_damage=lambda message: None)
    run = read_run(folder, required={'dtype', 'dataset'})
    return run.get('ending', '').startswith((FINISHED, TIME_UP, 'patience')) \
        and any('val_loss' in row for row in rows) and rows[-1]['iter'] > 0


def run_command(name, argv, tree):
    """Run a command of the code in `tree` in a new process. Raises UserError if it fails."""
    done = subprocess.run([sys.executable, f'{tree}/{name}.py', *argv], capture_output=True,
                          encoding='utf-8', errors='replace')
    if done.returncode:
        raise UserError(error_line(done.stderr) or f'exit code {done.returncode}')


def error_line(stderr):
    """stderr of a failed script → its first `error: …`, else the last exception of a traceback
    (without notes), else the last line"""
    errors = re.findall(r'^error: (.*)', stderr, re.M)
    if errors:
        return errors[0]
    exceptions = re.findall(r'^Traceback .*\n(?:[ \t].*\n)*(\S.*)', stderr, re.M)
    lines = exceptions or stderr.strip().splitlines()
    return lines[-1] if lines else ''


def summarize(folder):
    """Results of the run in `folder`. step_ms is the median, which excludes compilation and
    evaluations; final_loss is None if it was not finite; minutes is the setting, or 0."""
    rows = read_rows(Path(folder, 'metrics.jsonl'))
    run = read_run(folder)
    end = rows[-1]
    rates = column(rows, 'tokens_per_s') or [end['tokens'] / end['elapsed_s']]  # none was logged
    step_s = end['tokens'] / end['iter'] / statistics.median(rates)
    losses = [row['val_loss'] for row in rows if 'val_loss' in row]
    return {'final_loss': losses[-1], 'step_ms': 1e3 * step_s, 'iterations': end['iter'],
            'seconds': end['elapsed_s'], 'minutes': run['config'].get('minutes', 0),
            'dtype': run['dtype'], 'dataset': run['config']['dataset']}


def train_all(variants, folder, trees=None):
    """Train {variant: {seed: arguments of train.py}} in subfolders of `folder` → [a dict per run].
    All variants of a seed are trained before the next seed, so that a drift in the machine's speed
    affects them equally. A failed run has None for its results. Raises UserError if the first run
    fails.

    trees: {variant: the folder of its code} for the judge. Then any failure raises, and the order
        of the variants alternates, so that neither always runs second."""
    order = []
    for i, seed in enumerate(next(iter(variants.values()))):
        names = reversed(variants) if trees and i % 2 else variants
        order += [(name, seed, variants[name][seed]) for name in names]
    print(f'{count_of(len(order), "run")} in {folder}', file=sys.stderr)
    runs = []
    for name, seed, argv in tqdm(order, 'training', disable=None):
        # Characters that file systems may reject are percent-encoded.
        escaped = re.sub(r'[^\w =,.+×-]', lambda match: f'%{ord(match[0]):02x}', name)
        run = {'variant': name, 'seed': seed, 'folder': str(Path(folder, f'{escaped},seed={seed}')),
               'problem': ''}
        try:
            run |= train_once(argv, run['folder'], (trees or {}).get(name, ROOT))
        except UserError as problem:
            if not runs or trees:
                raise UserError(f'{name}, seed {seed}: {problem}') from None
            warn(f'{name}, seed {seed}: {problem}')
            run |= {**dict.fromkeys(runs[0].keys() - run.keys()), 'problem': str(problem)}
        tqdm.write(f'{name}, seed {seed}: {format_number(".4f", run["final_loss"])}',
                   file=sys.stderr)
        runs.append(run)
    if len({(run.get('code'), run.get('config files')) for run in runs if not run['problem']}) > 1:
        warn('the code or a config file changed during these runs: run the same command again')
    return runs


# -----------------------------------------------------------------------------
# comparison


def compare(runs):
    """Runs → a dict per variant. loss, loss_error: mean over seeds and its standard error; change,
    change_error: the same for the differences from the first variant, paired by seed; half_width:
    of the 95% interval of the change; significant: whether that excludes zero; step_ms: the median.
    None stands for unknown, and `problem` says why."""
    groups = {}
    for run in runs:
        groups.setdefault(run['variant'], []).append(run)
    base_losses = [run['final_loss'] for run in next(iter(groups.values()))]
    keys = ('loss', 'loss_error', 'change', 'change_error', 'half_width', 'significant', 'step_ms')
    rows = []
    for name, group in groups.items():
        row = {'variant': name, **dict.fromkeys(keys), 'problem': ''}
        losses = [run['final_loss'] for run in group]
        if None in losses:
            failed = group[losses.index(None)]
            problem = failed.get('problem') or 'the loss is not finite'
            row['problem'] = f'seed {failed["seed"]}: {problem}'
        else:
            row['loss'], row['loss_error'] = mean_and_error(losses)
            row['step_ms'] = statistics.median(run['step_ms'] for run in group)
        if rows and None not in losses + base_losses:
            differences = [a - b for a, b in zip(losses, base_losses, strict=True)]
            row['change'], row['change_error'] = mean_and_error(differences)
            if len(losses) > 1:
                row['half_width'] = STUDENT_T[min(len(losses), 31) - 2] * row['change_error']
                row['significant'] = abs(row['change']) > row['half_width']
        rows.append(row)
    return rows


def mean_and_error(values):
    """→ (mean, standard error of the mean or None for a single value)"""
    error = statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def format_comparison(rows):
    """→ a Markdown table with a line per variant, and what it means"""
    note = 'change: mean difference from the first line, paired by seed, ± its standard error\n' \
           'significant (95%): the 95% interval of the change (Student\'s t) excludes zero'
    header = ['', 'final validation loss', 'change', 'significant (95%)', 'ms per step']
    significance = {None: '–', True: 'yes', False: 'no'}
    table = []
    for row in rows:
        loss = row['problem'] or with_error('.4f', row['loss'], row['loss_error'])
        table.append([row['variant'], loss, with_error('+.4f', row['change'], row['change_error']),
                      significance[row['significant']], format_number('.1f', row['step_ms'])])
    return f'{note}\n\n{markdown(header, table)}'


def with_error(spec, value, error):
    return format_number(spec, value) + ('' if error is None else f' ± {error:.4f}')


# -----------------------------------------------------------------------------
# tables


def markdown(header, rows):
    """A Markdown table from header and rows of text; the first column is left-aligned, the others
    are right-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    specs = [f'<{widths[0]}', *(f'>{width}' for width in widths[1:])]

    def line(row):
        return f'| {" | ".join(map(format, row, specs))} |'

    rule = ['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])]
    return '\n'.join(line(row) for row in (header, rule, *rows))


def format_number(spec, value):
    """format(value, spec), or a dash for None."""
    return '–' if value is None else format(value, spec)


def save_csv(path, rows):
    """Write a list of dicts with the same keys."""
    with open(path, 'w', newline='', encoding='utf-8') as table:
        writer = csv.DictWriter(table, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def append_tsv(path, row):
    """Append the values of a dict to a .tsv file with its keys as the header."""
    append_text(path, tsv_line(row.values()), header=tsv_line(row))


def tsv_line(cells):
    """White space within a cell becomes a space."""
    return '\t'.join(' '.join(str(cell).split()) for cell in cells)


# -----------------------------------------------------------------------------
# the judge


EXIT_STATUS = {'BETTER': 0, 'NOT SHOWN': 3, 'WORSE': 4}
# Settings of a short run of each side before timed runs. It fills the compiler's caches; otherwise
# the first run would spend its time on that.
WARM_UP = ['--minutes=0', '--max_iters=2', '--warmup_iters=0']


def copy_sides(commit, folder):
    """Copy the code of the commit and of the working tree into `folder`, since this clone may be
    edited meanwhile → ({side: its folder}, short hash of the commit). The working tree is all
    tracked files, and new .py files. Raises UserError."""
    base, change = folder / 'base', folder / 'change'
    git = partial(subprocess.run, cwd=ROOT, capture_output=True)
    done = git(['git', 'archive', f'--output={base}.zip', commit])
    if done.returncode:
        raise UserError(f'against={commit}: {os.fsdecode(done.stderr).strip()}')
    shutil.unpack_archive(f'{base}.zip', base)
    with zipfile.ZipFile(f'{base}.zip') as archive:
        short_hash = archive.comment.decode()[:8]  # git stores the commit there
    tracked = git(['git', 'ls-files', '-z']).stdout
    new = git(['git', 'ls-files', '-z', '--others', '--exclude-standard', '*.py']).stdout
    for name in os.fsdecode(tracked + new).split('\0'):
        if (ROOT / name).is_file():  # a deleted file is still tracked
            (change / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, change / name)
    return {'base': base, 'change': change}, short_hash


def changed_files(trees):
    """The files that differ between both sides: 'model.py +3 -1' (lines), or 'nothing'."""
    base, change = trees.values()
    numbers = os.fsdecode(subprocess.run(
        ['git', 'diff', '--no-index', '--numstat', '--no-renames', '-z', base.name, change.name],
        cwd=base.parent, capture_output=True).stdout)
    changed = []
    for added, removed, *names in re.findall('(\\S+)\t(\\S+)\t\0(.+?)\0(.+?)\0', numbers):
        name = names[0] if names[1] == '/dev/null' else names[1]
        if (added, removed) != ('0', '0'):  # only the mode differs, which a zip file lacks
            changed.append(f'{name.partition("/")[2]} +{added} -{removed}')
    return ', '.join(changed) or 'nothing'


def in_tree(tree, arg):
    """Replace a config file in an argument by the one in `tree`: each side reads its own."""
    path = Path(arg if os.path.exists(arg) else ROOT / arg).resolve()
    if arg.endswith('.py') and path.is_relative_to(ROOT):
        return str(tree / path.relative_to(ROOT))
    return arg


def judge_runs(runs, comparison):
    """Runs of both sides, and compare(runs) → (verdict, how long the runs took). Raises UserError
    if they cannot be compared."""
    datasets = {run['dataset'] for run in runs}
    if len(datasets) > 1:
        raise UserError(f'the sides trained on {" and ".join(sorted(datasets))}: losses on '
                        'different datasets cannot be compared')
    minutes = {run['minutes'] for run in runs}
    if len(minutes) > 1:
        raise UserError(f'the sides trained with minutes={" and ".join(map(str, sorted(minutes)))}:'
                        ' set --minutes in the command')
    _, change = comparison
    if change['change'] is None:
        raise UserError('the last validation loss of a run is not finite')
    if not change['significant']:
        verdict = 'NOT SHOWN'
    elif change['change'] < 0:
        verdict = 'BETTER'
    else:
        verdict = 'WORSE'
    if minutes == {0}:
        ratio = median_of(runs, 'change', 'seconds') / median_of(runs, 'base', 'seconds')
        return verdict, f'in {ratio:.2f} times the time'
    return verdict, f'after the same time: {minutes.pop():g} min, a median of ' \
                    f'{median_of(runs, "base", "iterations"):,.0f} steps of the base and ' \
                    f'{median_of(runs, "change", "iterations"):,.0f} of the change'


def median_of(runs, side, key):
    return statistics.median(run[key] for run in runs if run['variant'] == side)


def append_result(path, judgment, comparison=None, verdict='FAILED', problem=''):
    """Append a row to results.tsv. judgment: its first columns, including when it began;
    comparison: from compare, or None if a side failed to train"""
    start_time = judgment['date (UTC)']
    elapsed = datetime.datetime.now(datetime.UTC) - start_time
    losses = dict.fromkeys(('base loss', 'change loss', 'difference',
                            '95% interval: difference ±'))
    if comparison:
        base, change = comparison
        losses = {'base loss': base['loss'], 'change loss': change['loss'],
                  'difference': change['change'],
                  '95% interval: difference ±': change['half_width']}
    append_tsv(path, {
        **judgment, 'date (UTC)': f'{start_time:%Y-%m-%dT%H:%M:%SZ}',
        **{f'{name} (nats per token)': '' if loss is None else f'{loss:.5f}'
           for name, loss in losses.items()},
        'verdict': verdict, 'minutes': f'{elapsed.total_seconds() / 60:.1f}', 'problem': problem})
