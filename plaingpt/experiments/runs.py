"""Trainings that differ in some settings, over several seeds: run, kept, compared, drawn.

A variant is a name and the settings that it changes: {'no convolution': {'conv': 0}}. The others
of a list are compared with its first. Each training is a whole run of train.py in a folder of its
own, which stays: an experiment that was stopped goes on when its command is given again.
"""

import json
import re
import runpy
import statistics
import subprocess
import sys
from dataclasses import fields
from itertools import product
from math import sqrt
from pathlib import Path

from tqdm import tqdm

from plaingpt.experiments.tables import markdown, number
from plaingpt.monitoring.curves import draw_runs
from plaingpt.monitoring.references import STUDENT_T
from plaingpt.monitoring.run_record import read_rows, read_run
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, command, locked, make_writable, read_json, write_json
from plaingpt.system.formatting import count_of, listed
from plaingpt.system.removed import REMOVED
from plaingpt.training.checkpoint import checkpoint_paths
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import archive_previous_run

# Settings that change numbers, and not the work of a step
SAME_WORK = {'learning_rate', 'lr_scales', 'beta1', 'beta2', 'decay_lr', 'lr_schedule',
             'warmup_iters', 'lr_decay_iters', 'min_lr', 'max_iters', 'seed', 'eval_interval',
             'eval_iters'}
LISTS = ROOT / 'config' / 'variants'
ALL_DONE = 'all iterations are done'  # as run.json says it
NAMED = 3  # variants that a sentence names; of more it tells their number

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


def train_all(configs, folder, machine):
    """Train {variant: (its TrainConfig of each seed)} in folders of `folder` → [a dict for each
    run], seed after seed, so that a machine whose speed drifts is fair to all variants.

    A run of the same settings on the same machine that is there is not made again.
    A run that fails has None for its numbers. Raises UserError where the first run fails.
    """
    order = [(name, config) for round_ in zip(*configs.values(), strict=True)
             for name, config in zip(configs, round_, strict=True)]
    lengths = sorted({config.max_iters for _, config in order})
    iterations = count_of(lengths[-1], 'iteration')
    if len(lengths) > 1:
        iterations = f'{lengths[0]:,} to {iterations}'
    print(f'{count_of(len(order), "run")} of {iterations}, in {folder}', file=sys.stderr)
    runs = []
    for name, config in tqdm(order, 'training', disable=None):
        where = run_folder(folder, name, config.seed)
        run = {'variant': name, 'seed': config.seed, 'folder': str(where), 'failed': ''}
        try:
            run |= train_once(config, where, machine)
        except UserError as problem:
            if not runs:
                raise
            run |= {**dict.fromkeys(('final_loss', 'step_ms', 'memory_bytes')), 'curve': [],
                    'failed': str(problem)}
        came_to = run['failed'] or number('.4f', run['final_loss'])
        tqdm.write(f'{name}, seed {config.seed}: {came_to}', file=sys.stderr)
        runs.append(run)
    return runs


def run_folder(folder, name, seed):
    """Where the run of a variant and a seed is; what file systems do not take is written as %xx."""
    name = re.sub(r'[^\w =,.+×-]', lambda found: f'%{ord(found[0]):02x}', name)
    return Path(folder, f'{name},seed={seed}')


def train_once(config, folder, machine):
    """Train in `folder`, go on with what is there of the same run, or take it as it is where it is
    done → its numbers. What other settings left there moves to old-001. Raises UserError where it
    fails."""
    asked = {'machine': machine, 'settings': {
        field.name: getattr(config, field.name) for field in fields(TrainConfig)
        if field.init and field.name != 'out_dir'}}
    make_writable(folder, 'save')
    refusal = f'{folder}: another sweep is writing there: wait until it is done, stop it, or ' \
              'choose another folder with --save'
    with locked(folder, refusal):
        if not holds_run_of(folder, asked):
            archive_previous_run(folder)
            write_json(folder / 'asked.json', asked)
        done, resumed = is_done(folder, config.max_iters), bool(checkpoint_paths(folder))
    if not done:
        run_command('train', [
            *(f'--{key}={value}' for key, value in asked['settings'].items()),
            f'--log_interval={min(config.log_interval, config.max_iters)}',
            f'--out_dir={folder}', *['--init_from=resume'] * resumed])
        with locked(folder, refusal):  # another sweep may have asked before train.py had the lock
            write_json(folder / 'asked.json', asked)
        if not is_done(folder, config.max_iters):
            ending = read_run(folder).get('ending', 'killed')
            raise UserError(f'{folder}: its run is incomplete (ending: {ending}): the same '
                            'command goes on with it')
    return summarize(folder)


def holds_run_of(folder, asked):
    """Whether what is in a folder, if anything, is of the settings that are asked for."""
    try:
        same = read_json(folder / 'asked.json') == json.loads(json.dumps(asked))
    except (OSError, ValueError):
        return False
    # Another sweep may have trained here after asked.json was written.
    return same and (read_run(folder).get('ending') != ALL_DONE
                     or is_done(folder, asked['settings']['max_iters']))


def is_done(folder, max_iters):
    """Whether the run of a folder has come to its end: its last iteration, or that of patience."""
    ending = read_run(folder).get('ending', '')
    rows = read_rows(folder / 'metrics.jsonl')
    return bool(rows) and (ending.startswith('patience')
                           or (ending == ALL_DONE and rows[-1]['iter'] == max_iters))


def training_words(argv):
    """A command line of bench.py → the config files and settings that train.py takes"""
    taken = {field.name for field in fields(TrainConfig)} | REMOVED.keys()
    taken -= {'minutes', 'out_dir'}
    return [word for word in argv
            if not word.startswith('--') or word[2:].partition('=')[0] in taken]


def run_command(name, argv, tree=None):
    """Run a command of ours, or that of the code in `tree`, in a process of its own. Raises
    UserError where it failed."""
    words = [sys.executable, f'{tree}/{name}.py', *argv] if tree else command(name, *argv)
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]
        raise UserError(last.removeprefix('error: '))


def summarize(folder):
    """metrics.jsonl of a run → numbers. A step's time is the median: compiling, evaluating and
    other work on the machine do not count. curve: [(seconds of steps, validation loss)]"""
    lines = read_rows(Path(folder, 'metrics.jsonl'))
    rates = [line['tokens_per_s'] for line in lines if 'tokens_per_s' in line]
    memory = [line['peak_memory_bytes'] for line in lines if 'peak_memory_bytes' in line]
    step_s = lines[-1]['tokens'] / lines[-1]['iter'] / statistics.median(rates)
    curve = [(line['iter'] * step_s, line['val_loss'])  # None where it was not finite
             for line in lines if 'val_loss' in line]
    return {'final_loss': curve[-1][1], 'step_ms': 1e3 * step_s, 'memory_bytes': memory[-1],
            'curve': curve}


# -----------------------------------------------------------------------------
# comparing them


def compare(runs, target=0.0):
    """Runs → (a dict for each variant, the target loss: 5% above the first's unless it is given).

    'losses', 'loss', 'loss_error': of each seed, their mean and its standard error; 'change',
    'change_error', 'clear': the difference to the first variant, see difference; 'step_ms',
    'memory_bytes', 'target_s': medians. None where there is none.
    """
    groups = {}
    for run in runs:
        groups.setdefault(run['variant'], []).append(run)
    base = [run['final_loss'] for run in next(iter(groups.values()))]
    if not target and None not in base:
        target = round(1.05 * statistics.mean(base), 2)
    rows = []
    for i, (name, group) in enumerate(groups.items()):
        losses = [run['final_loss'] for run in group]
        row = {'variant': name, 'losses': losses,
               **dict.fromkeys(('loss', 'loss_error', 'change', 'change_error', 'clear'))}
        if None not in losses:
            row['loss'], row['loss_error'] = mean_and_error(losses)
        if i and None not in losses + base:
            row['change'], row['change_error'], row['clear'] = difference(losses, base)
        for key in ('step_ms', 'memory_bytes'):
            row[key] = median_or_none([run[key] for run in group])
        row['target_s'] = median_or_none([seconds_to(target, run['curve']) for run in group])
        rows.append(row)
    return rows, target


def difference(losses, others):
    """Losses of two variants with the same seeds → (the mean difference, its standard error,
    whether it is more than chance: zero is outside of its 95% interval by Student's t). The last
    two are None for one seed."""
    mean, error = mean_and_error([a - b for a, b in zip(losses, others, strict=True)])
    if error is None:
        return mean, None, None
    return mean, error, abs(mean) > STUDENT_T[min(len(losses) - 1, len(STUDENT_T)) - 1] * error


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
    """→ Markdown: what is seen, and a line for each variant."""
    table = [[row['variant'],
              number('.4f', row['loss']) + with_error(row['loss_error']),
              number('+.4f', row['change']) + with_error(row['change_error']),
              {None: '–', True: 'yes', False: 'no'}[row['clear']],
              number('.1f', row['step_ms']), number('.1f', row['target_s']),
              number('.0f', row['memory_bytes'] and row['memory_bytes'] / 2**20)] for row in rows]
    failed = [f'{run["variant"]}, seed {run["seed"]} failed: {run["failed"]}'
              for run in runs if run['failed']]
    said = []
    if any(row['loss'] is not None for row in rows):
        said.append(f'{". ".join(filter(None, describe_best(rows)))}.')
    return '\n\n'.join([
        f'{len(runs)} runs, {count_of(len(rows[0]["losses"]), "seed")}. The loss is the mean over '
        'seeds ± its standard error; the change is that to the first line, of runs with the same '
        "seed, and more than chance where zero is outside of its 95% interval (Student's t).",
        *failed, *said,
        markdown(['', 'final validation loss', 'change', 'more than chance', 'ms a step',
                  f's to {target}', 'memory, MiB'], table)])


def with_error(error):
    return '' if error is None else f' ± {error:.4f}'


def describe_best(rows):
    """→ (which variant has the lowest loss, which others differ by more than chance), sentences"""
    best, *others = sorted((row for row in rows if row['loss'] is not None),
                           key=lambda row: row['loss'])
    lowest = f'{best["variant"]} ends lowest, at {best["loss"]:.4f}'
    if len(best['losses']) == 1:
        return lowest, 'With one seed nothing can be said on whether that is more than chance: ' \
                       'give --seeds=3'
    told = [row for row in others if difference(row['losses'], best['losses'])[2]]
    chance = [row for row in others if row not in told]
    said = []
    if told:
        said.append(f'it is below {list_names(told)} by more than chance')
    if chance:
        said.append(f'its distance to {list_names(chance)} may be chance')
    said = '; '.join(said)
    return lowest, said[:1].upper() + said[1:]


def list_names(rows):
    """Names of variants, of many their number."""
    names = [row['variant'] for row in rows]
    return listed(names) if len(names) <= NAMED else f'{len(names)} others'


def describe_times(configs, rows):
    """→ [a sentence] where the times of steps differ though a step does the same work. configs: as
    of train_all"""
    first = [config for config, *_ in configs.values()]
    differing = sorted(field.name for field in fields(TrainConfig)
                       if len({str(getattr(config, field.name)) for config in first}) > 1)
    times = [row['step_ms'] for row in rows if row['step_ms']]
    if len(times) < 2 or not differing or not SAME_WORK.issuperset(differing):
        return []
    return [f'Times of a step differ by {max(times) / min(times) - 1:.0%} though only '
            f'{" and ".join(differing)} differ{"s" * (len(differing) == 1)}, which cannot change '
            'the work of a step: that is the noise of this machine.']


# -----------------------------------------------------------------------------
# drawing them


def draw_comparison(runs, rows, path):
    """Draw the curves of all runs into a PNG. Raises UserError where matplotlib or any loss is
    absent."""
    names = [row['variant'] for row in rows if row['loss'] is not None]
    if not names:
        raise UserError('there is no picture: no variant has a loss for each of its seeds')
    draw_runs([(run['variant'], read_rows(Path(run['folder'], 'metrics.jsonl')))
               for run in runs if run['variant'] in names], path)
