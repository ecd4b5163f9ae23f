"""Train variants of a recipe over several seeds.

A list of variants has names and the settings that they change: {'no convolution': {'conv': 0}}.
Each run is a run of train.py in its own folder, and is kept: running the same command again does
not repeat completed runs.
"""

import ast
import datetime
import re
import runpy
import statistics
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import load_config
from plaingpt.core.checkpoint import checkpoint_paths, checksum
from plaingpt.core.dataset import has_token_files, open_dataset_spec
from plaingpt.core.progress import FINISHED, TIME_UP
from plaingpt.core.settings import INIT_MODES, TrainConfig
from plaingpt.core.start import StartingPoint, resolve_minutes
from plaingpt.experiments.comparison import format_number
from plaingpt.inference.open_weights import open_weights
from plaingpt.inference.pretrained import MODEL_FILES, download_model
from plaingpt.monitoring.run_folder import archive_previous_run
from plaingpt.monitoring.run_record import column, read_rows, read_run
from plaingpt.system.devices import choose_device, machine_name
from plaingpt.system.errors import UserError, print_line, warn
from plaingpt.system.files import ROOT, lock_output_dir, read_json, sha256_of, write_json
from plaingpt.system.formatting import count_of

LISTS = ROOT / 'config' / 'variants'
# Settings that change where metrics go, but not the metrics; and settings whose effect inputs_of()
# records as weights, data and device.
NOT_INPUTS = {'out_dir', 'log_to', 'wandb_log', 'wandb_project', 'wandb_run_name',
              'init_from', 'checkpoint', 'dataset', 'device'}
FINISHED_1_0 = 'all iterations are done'  # FINISHED in version 1.0, which may be judged
NOT_RECORDED = {'film': False, 'report': False}  # settings of compared runs


@dataclass
class Variant:
    """A row of a table: the runs of the code in `tree` with the arguments `argv`, one per seed."""

    name: str
    argv: list
    seeds: list
    tree: Path = ROOT


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
        if not values:
            raise UserError(f'sweep={sweep}: {choice}: write it as NAME=VALUE,VALUE')
        choices[key] = values.split(',')
    variants = {}
    for values in product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        variants[', '.join(f'{key}={value}' for key, value in changes.items())] = changes
    return variants


def option_names(argv):
    """['a.py', '--lr=3'] → {'lr'}"""
    return {arg[2:].partition('=')[0] for arg in argv if arg.startswith('--')}


def make_variant(name, changes, argv, seeds):
    """→ a Variant of the command line `argv` with the settings `changes` after it, so that 'auto'
    values follow them. seeds: the number of seeds. Raises UserError if these are invalid."""
    if 'out_dir' in changes or ('seed' in changes and seeds > 1):
        raise UserError(f'variant {name!r}: remove seed and out_dir: --seeds sets the number of '
                        'seeds, and each run has its own folder')
    argv = [*argv, *(f'--{key}={value}' for key, value in changes.items())]
    try:
        config = load_config(TrainConfig, argv)
        resolve_minutes(config, StartingPoint(verifies=False), option_names(argv))
    except UserError as problem:
        raise UserError(f'variant {name!r}: {problem}') from None
    return Variant(name, argv, [*range(config.seed, config.seed + seeds)])


# -----------------------------------------------------------------------------
# training


def train_once(argv, folder, tree=ROOT):
    """Train in `folder` with the arguments `argv`, using the code in `tree` → summarize(folder).
    Raises UserError if the run fails."""
    run_python([Path(tree, 'train.py'), *argv, f'--out_dir={folder}'])
    if not has_ended(folder):
        raise UserError(f'{folder}: the run is incomplete '
                        f'(ending: {read_run(folder).get("ending", "killed")})')
    return summarize(folder)


def train_or_reuse(argv, folder):
    """train_once with this code, unless a run with the same inputs has finished in `folder` → its
    results and date. A run with other inputs moves to old-001."""
    record_path = Path(folder, 'asked.json')
    inputs = inputs_of(argv)
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
        train_once(argv, folder)
        if inputs['data'] is None:  # the run has prepared a small corpus
            inputs['data'] = inputs_of(argv)['data']
        record = {**inputs, 'ended': datetime.date.today().isoformat()}
        write_json(record_path, record)
    return summarize(folder) | {'date': record['ended']}


def inputs_of(argv):
    """What decides the results of a run of this code, as JSON: runs with equal inputs are the same
    run. Raises UserError."""
    config = load_config(TrainConfig, argv)
    settings = {key: value for key, value in asdict(config).items() if key not in NOT_INPUTS}
    data = None
    if has_token_files(config.dataset):
        dataset = open_dataset_spec(config.dataset, config.vocab_size)
        data = checksum([dataset.state(), dataset.identity('val')])
    return {'settings': settings, 'code': checksum_of(sorted(imported_files(ROOT / 'train.py'))),
            'data': data, 'weights': initial_weights(config), 'torch': torch.__version__,
            'device': machine_name(choose_device(config.device)[0])}


def imported_files(script):
    """The script and the files of its folder that it imports, at any depth."""
    files = set()
    pending = [script]
    while pending:
        path = pending.pop()
        if path in files or not path.is_file():
            continue
        files.add(path)
        for level, name in imported_names(path.read_bytes()):
            module = path.parents[level - 1] if level else script.parent
            for part in name.split('.'):
                module = module / part
                pending += [module.with_suffix('.py'), module / '__init__.py']
    return files


@cache  # by the source, because parsing all files takes half a second
def imported_names(source):
    """What a Python file may import: [(0, or the number of dots in front of a relative name; name)]
    """
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = f'{node.module}.' if node.module else ''
            names += [(node.level, prefix + alias.name) for alias in node.names]
    return names


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
    """Whether `folder` has a completed run whose logs have what summarize() needs."""
    rows = read_rows(Path(folder, 'metrics.jsonl'))
    run = read_run(folder)
    return run.get('ending', '').startswith((FINISHED, FINISHED_1_0, TIME_UP, 'patience')) \
        and any('val_loss' in row for row in rows) and rows[-1]['iter'] > 0


def run_python(args, folder=None):
    """Run Python in a new process → its stdout. Raises UserError if it fails."""
    done = subprocess.run([sys.executable, *args], capture_output=True, encoding='utf-8',
                          errors='replace', cwd=folder)
    if done.returncode:
        raise UserError(error_line(done.stderr) or f'exit code {done.returncode}')
    return done.stdout


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


def train_all(variants, folder, is_judge=False):
    """Train all variants in subfolders of `folder` → [a dict per run]. All variants of a seed are
    trained before the next seed, in alternating order, so that a drift in the machine's speed
    affects them equally. A failed run has None for its results. Raises RunFailed if the first run
    fails. is_judge: any failure and any loss that is not finite raises, and no run is reused"""
    order = []
    for i in range(len(variants[0].seeds)):
        row = [(variant, variant.seeds[i]) for variant in variants]
        order += reversed(row) if i % 2 else row
    print(f'{count_of(len(order), "run")} in {folder}', file=sys.stderr)
    runs = []
    for variant, seed in tqdm(order, 'training', disable=None):
        # Characters that file systems may reject are percent-encoded.
        escaped = re.sub(r'[^\w =,.+×-]', lambda match: f'%{ord(match[0]):02x}', variant.name)
        run = {'variant': variant.name, 'seed': seed, 'problem': '',
               'folder': str(Path(folder, f'{escaped},seed={seed}'))}
        argv = [*variant.argv, f'--seed={seed}']
        try:
            if is_judge:
                run |= train_once(argv, run['folder'], variant.tree)
            else:
                run |= train_or_reuse(argv, run['folder'])
            if is_judge and run['final_loss'] is None:
                raise UserError('the last validation loss is not finite')
        except UserError as problem:
            if not runs or is_judge:
                raise RunFailed(variant.name, seed, problem) from None
            warn(f'{variant.name}, seed {seed}: {problem}')
            run |= {**dict.fromkeys(runs[0].keys() - run.keys()), 'problem': str(problem)}
        tqdm.write(f'{variant.name}, seed {seed}: {format_number(".4f", run["final_loss"])}',
                   file=sys.stderr)
        runs.append(run)
    return runs
