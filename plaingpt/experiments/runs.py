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
from plaingpt.core.checkpoint import checkpoint_paths, checksum
from plaingpt.core.dataset import has_token_files, open_dataset_spec
from plaingpt.core.progress import FINISHED, TIME_UP
from plaingpt.core.settings import INIT_MODES, TrainConfig
from plaingpt.inference.open_weights import open_weights
from plaingpt.inference.pretrained import MODEL_FILES, download_model
from plaingpt.monitoring.references import p_value, t_quantile
from plaingpt.monitoring.run_folder import archive_previous_run
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

LISTS = ROOT / 'config' / 'variants'
# Settings that change where metrics go, but not the metrics.
OUTPUTS = {'out_dir', 'log_to', 'wandb_log', 'wandb_project', 'wandb_run_name'}
NOT_RECORDED = {'film': False, 'report': False}  # settings of compared runs


class RunFailed(UserError):
    """A run of a variant did not train."""

    def __init__(self, variant, seed, problem):
        super().__init__(f'{variant}, seed {seed}: {problem}')
        self.variant = variant


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
    code = sorted([*ROOT.glob('*.py'), *ROOT.glob('plaingpt/**/*.py')])
    data = None
    if has_token_files(config.dataset):
        dataset = open_dataset_spec(config.dataset, config.vocab_size)
        data = checksum([dataset.state(), dataset.identity('val')])
    return {'settings': settings, 'config files': checksum_of(config_files),
            'code': checksum_of(code), 'data': data, 'weights': initial_weights(config),
            'torch': torch.__version__, 'device': machine_name(choose_device(config.device)[0])}


def initial_weights(config):
    """What identifies the weights that a run starts from: a checksum of the files of a checkpoint
    or a folder, the hub's current revision, or None from scratch. Raises UserError."""
    path = Path(config.init_from)
    if config.init_from in INIT_MODES:
        return None
    if (path / 'state.json').exists() or checkpoint_paths(path):
        return checksum(open_weights(path, config.checkpoint).state)  # has checksums of its files
    if not path.exists():
        return download_model(config.init_from).name  # the commit that these files are of
    patterns = (*MODEL_FILES, 'pytorch_model*.bin', 'ckpt.pt')
    files = (file for pattern in patterns for file in sorted(path.glob(pattern)))
    return checksum_of([path] if path.is_file() else files)


def checksum_of(paths):
    return checksum([sha256_of(path) for path in paths])


def has_ended(folder):
    """Whether there is a completed run whose logs have what summarize needs."""
    rows = read_rows(Path(folder, 'metrics.jsonl'))
    run = read_run(folder)
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
    evaluations; final_loss is None if it was not finite."""
    rows = read_rows(Path(folder, 'metrics.jsonl'))
    run = read_run(folder)
    end = rows[-1]
    rates = column(rows, 'tokens_per_s') or [end['tokens'] / end['elapsed_s']]  # none was logged
    step_s = end['tokens'] / end['iter'] / statistics.median(rates)
    losses = [row['val_loss'] for row in rows if 'val_loss' in row]
    return {'final_loss': losses[-1], 'step_ms': 1e3 * step_s, 'iterations': end['iter'],
            'seconds': end['elapsed_s'], 'dtype': run['dtype'], 'dataset': run['config']['dataset']}


def train_all(variants, folder, trees=None):
    """Train {variant: {seed: arguments of train.py}} in subfolders of `folder` → [a dict per run].
    All variants of a seed are trained before the next seed, so that a drift in the machine's speed
    affects them equally. A failed run has None for its results. Raises RunFailed if the first run
    fails.

    trees: {variant: the folder of its code} for the judge. Then any failure and any loss that is
        not finite raises, and the order of the variants alternates, so that neither always runs
        second."""
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
            if trees and run['final_loss'] is None:
                raise UserError('the last validation loss is not finite')
        except UserError as problem:
            if not runs or trees:
                raise RunFailed(name, seed, problem) from None
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
    of the 95% interval of this change alone; p_value: of a paired t-test; significant: whether that
    is so after Holm's correction for all variants; step_ms, iterations: medians. None stands for
    unknown, and `problem` says why."""
    groups = {}
    for run in runs:
        groups.setdefault(run['variant'], []).append(run)
    base_losses = [run['final_loss'] for run in next(iter(groups.values()))]
    keys = ('loss', 'loss_error', 'change', 'change_error', 'half_width', 'p_value', 'significant',
            'step_ms', 'iterations')
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
            for key in ('step_ms', 'iterations'):
                row[key] = statistics.median(run[key] for run in group)
        if rows and None not in losses + base_losses:
            differences = [a - b for a, b in zip(losses, base_losses, strict=True)]
            row['change'], row['change_error'] = mean_and_error(differences)
            if len(losses) > 1:
                row['half_width'] = t_quantile(len(losses) - 1) * row['change_error']
                row['p_value'] = p_value(row['change'], row['change_error'], len(losses) - 1)
        rows.append(row)
    correct_for_comparisons(rows)
    return rows


def correct_for_comparisons(rows):
    """Set `significant` of the rows with a p-value, so that among variants that all equal the first
    one, any is significant in at most 5% of comparisons (Holm 1979): the smallest of n p-values
    must be below 0.05 / n, the next one below 0.05 / (n - 1), and so on."""
    tested = sorted((row for row in rows if row['p_value'] is not None),
                    key=lambda row: row['p_value'])
    significant = True
    for i, row in enumerate(tested):
        significant = significant and row['p_value'] < 0.05 / (len(tested) - i)
        row['significant'] = significant


def mean_and_error(values):
    """→ (mean, standard error of the mean or None for a single value)"""
    error = statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def format_comparison(rows):
    """→ a Markdown table with a line per variant, and what it means"""
    note = 'change: mean difference from the first line, paired by seed, ± its standard error\n' \
           'significant (95%): paired t-test, p < 0.05'
    comparisons = sum(row['p_value'] is not None for row in rows)
    if comparisons > 1:
        note += f' after Holm\'s correction for {comparisons} comparisons'
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
    """Append the values of a dict to a .tsv file, each in the column of its key. A file that an
    earlier version began may lack columns; their values are left out."""
    header = tsv_line(row)
    with suppress(FileNotFoundError):
        header = Path(path).read_text('utf-8-sig', 'replace').partition('\n')[0] or header
    append_text(path, tsv_line(row.get(name, '') for name in header.split('\t')), header=header)


def tsv_line(cells):
    """White space within a cell becomes a space."""
    return '\t'.join(' '.join(str(cell).split()) for cell in cells)


# -----------------------------------------------------------------------------
# the judge


EXIT_STATUS = {'BETTER': 0, 'NOT SHOWN': 3, 'WORSE': 4}
# Options of a short run of each side, before the others. A mistake or a broken change fails there,
# and it fills the compiler's caches; otherwise a timed run would spend its time on that.
WARM_UP = ['--max_iters=2', '--warmup_iters=0']
# Settings of judged runs. None changes the loss after a step, but what they turn off takes time.
JUDGED = {**NOT_RECORDED, 'log_to': '', 'wandb_log': False, 'eval_tasks': '',
          'always_save_checkpoint': False, 'checkpoint_interval': 10**9, 'clock': 'training'}
MAX_STEP_RATIO = 1.03  # if one side trained for more steps than the other, the verdict says so


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
    if not arg.endswith('.py') or not path.is_relative_to(ROOT):
        return arg
    in_tree = tree / path.relative_to(ROOT)
    if not in_tree.is_file():
        raise UserError(f'{arg}: the {tree.name} has no such file: commit it, or use a config file '
                        'outside of this repository')
    return str(in_tree)


def judged_options(warm_ups, minutes):
    """The options of judged runs of `minutes` (0: of iterations), from a short run of each side.
    Neither side gets a setting that an older base does not know. Raises UserError if the sides
    train on different datasets."""
    datasets = {run['dataset'] for run in warm_ups}
    if len(datasets) > 1:
        raise UserError(f'the sides train on {" and ".join(sorted(datasets))}: losses on '
                        'different datasets cannot be compared; set --dataset in the command')
    base, change = (read_run(run['folder'])['config'] for run in warm_ups)
    known = base.keys() & change.keys()
    if minutes and 'clock' not in known:
        warn('the base is from before --clock: the minutes of both sides include setup, '
             'evaluations and saves')
    return [f'--{key}={value}' for key, value in JUDGED.items() if key in known]


def judge_runs(comparison, minutes):
    """From compare(runs of both sides) → (verdict, its explanation). minutes: of each run, or 0"""
    base, change = comparison
    if not change['significant']:
        verdict = 'NOT SHOWN'
    elif change['change'] < 0:
        verdict = 'BETTER'
    else:
        verdict = 'WORSE'
    explanation = f'{base["iterations"]:,.0f} steps of the base and ' \
                  f'{change["iterations"]:,.0f} of the change (medians)'
    if minutes:
        explanation += f' in {minutes:g} min each'
        remedy = 'leave out --minutes'
    else:
        explanation += f', which took {change["step_ms"] / base["step_ms"]:.2f} times as long each'
        remedy = 'set --max_iters, and --patience=0'
    ratio = change['iterations'] / base['iterations']
    if not 1 / MAX_STEP_RATIO < ratio < MAX_STEP_RATIO:
        explanation += f'\nThe change trained for {ratio:.2f} times as many steps, which is ' \
                       f'part of the difference: to compare equal steps, {remedy}.'
    return verdict, explanation


def append_result(path, judgment, comparison=None, verdict='FAILED', problem=''):
    """Append a row to results.tsv. judgment: its first columns, including when it began;
    comparison: from compare, or None if a side failed to train"""
    start_time = judgment['date (UTC)']
    elapsed = datetime.datetime.now(datetime.UTC) - start_time
    base, change = comparison or ({}, {})
    losses = {'base loss': base.get('loss'), 'change loss': change.get('loss'),
              'difference': change.get('change'),
              '95% interval: difference ±': change.get('half_width')}
    append_tsv(path, {
        **judgment, 'date (UTC)': f'{start_time:%Y-%m-%dT%H:%M:%SZ}',
        **{f'{name} (nats per token)': '' if loss is None else f'{loss:.5f}'
           for name, loss in losses.items()},
        'base steps': base.get('iterations', ''), 'change steps': change.get('iterations', ''),
        'verdict': verdict, 'minutes': f'{elapsed.total_seconds() / 60:.1f}', 'problem': problem})
