"""Time a training step, compare settings over seeds, or test whether a code change helps.

    python bench.py config/gpt2_124m.py                 time a training step
    python bench.py config/quickstart.py --sweep=learning_rate=3e-3,9e-3,3e-2
                                                        train each value with --seeds seeds
    python bench.py config/quickstart.py --sweep='conv=0,4 n_layer=4,6'
                                                        train all combinations
    python bench.py config/quickstart.py --variants=mine.py
                                                        variants = {'name': {'key': value}, …}
    python bench.py config/quickstart.py --judge --seeds=8
                                                        is the working tree better than HEAD?
    python bench.py config/quickstart.py --judge --minutes=1
                                                        the same, with one-minute runs
"""

import datetime
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from configurator import load_config, options_of
from plaingpt.core.dataset import open_data
from plaingpt.core.settings import TrainConfig
from plaingpt.core.start import StartingPoint, resolve_minutes
from plaingpt.experiments import runs
from plaingpt.experiments.runs import (
    EXIT_STATUS,
    NOT_RECORDED,
    WARM_UP,
    RunFailed,
    append_result,
    changed_files,
    copy_sides,
    in_tree,
    judge_runs,
    judged_options,
)
from plaingpt.experiments.speed import measure_speed, planned_gpt_config
from plaingpt.monitoring.run_record import read_rows, read_run
from plaingpt.monitoring.run_report import draw_runs
from plaingpt.system import devices
from plaingpt.system.distributed import launched_world
from plaingpt.system.errors import UserError, run_script, warn
from plaingpt.system.files import make_writable
from plaingpt.system.formatting import count_of
from train import build


@dataclass
class BenchConfig(TrainConfig):
    # benchmark: what to measure; by default the time of a step
    variants: str = ''  # list of variants to train: grid, ablation, ladder, or a file (mine.py)
    sweep: str = ''  # settings and values to train: 'learning_rate=1e-3,3e-3 conv=0,4'
    judge: bool = False  # compare the code of the working tree with that of a commit
    # benchmark: how
    against: str = 'HEAD'  # judge: the commit to compare with
    steps: int = 10  # number of steps to time; the median is reported
    seeds: int = 3  # variants, sweep, judge: runs per variant
    save: str = ''  # folder for results; default of variants, sweep, judge: out-experiments

    above_0 = (*TrainConfig.above_0, 'steps', 'seeds')

    def supports_minutes(self):
        return self.judge

    def conflicts(self):
        problems = super().conflicts()
        if self.batch_size == 'auto':
            problems.append('batch_size=auto: a benchmark needs a number')
        if self.world_size() > 1:
            problems.append('a benchmark measures one process: start it without torchrun')
        modes = [key for key in ('variants', 'sweep', 'judge') if getattr(self, key)]
        if len(modes) > 1:
            problems.append(f'{" and ".join(modes)} cannot be combined: choose one')
        if self.judge and self.seeds == 1:
            problems.append('seeds=1: judge needs at least two, to estimate the variance')
        return problems


def training_args(argv):
    """Arguments of bench.py → the config files and settings for train.py"""
    train_keys = {field.name for field in fields(TrainConfig)} - {'out_dir'}
    bench_keys = {field.name for field in fields(BenchConfig)} - train_keys
    return [arg for arg in argv
            if not arg.startswith('--') or arg[2:].partition('=')[0] not in bench_keys]


def measure_step(config, start, device):
    """Time a training step → (a row of results, their Markdown)."""
    print(f'timing {count_of(config.steps, "step")} after a few warmup steps …', file=sys.stderr)
    devices.prepare_device(device)
    torch.manual_seed(config.seed)
    compile, _ = devices.choose_compile(config.compile, device)
    gpt_config, _, _ = planned_gpt_config(config, start)
    dtype, _ = devices.choose_dtype(config.dtype, device, gpt_config.n_embd, training=True)
    return measure_speed(build, gpt_config, config, device, dtype, compile)


def variant_args(variants, config, argv):
    """{name: settings} → {name: {seed: arguments of train.py}}: the command line, then the
    settings, so that 'auto' values follow them. Raises UserError if they are invalid."""
    args_by_variant = {}
    for name, changes in variants.items():
        if 'out_dir' in changes or ('seed' in changes and config.seeds > 1):
            raise UserError(f'variant {name!r}: remove seed and out_dir: --seeds sets the number '
                            'of seeds, and each run has its own folder')
        options = [f'--{key}={value}' for key, value in changes.items()]
        args_by_variant[name] = {}
        for seed in range(config.seed, config.seed + config.seeds):
            args = [*training_args(argv), f'--seed={seed}', *options]
            try:
                variant = load_config(TrainConfig, args)
            except UserError as problem:
                raise UserError(f'variant {name!r}: {problem}') from None
            log_interval = max(1, min(variant.log_interval, variant.max_iters))
            args_by_variant[name][seed] = [*args, f'--log_interval={log_interval}']
    return args_by_variant


def measure_variants(config, argv, folder):
    """Train all variants in `folder` and draw them → (a row per run, their table)."""
    if config.sweep:
        variants = runs.sweep_variants(config.sweep)
    else:
        variants = runs.read_variants(config.variants, config)
    variants = {name: {**NOT_RECORDED, **changes} for name, changes in variants.items()}
    rows = runs.train_all(variant_args(variants, config, argv), folder)
    curves = [(run['variant'], read_rows(Path(run['folder'], 'metrics.jsonl')),
               read_run(run['folder'])) for run in rows if run['final_loss'] is not None]
    try:
        if note := draw_runs(curves, f'{folder}.png'):
            warn(note)
    except UserError as problem:  # matplotlib is not installed
        warn(problem)
    return rows, runs.format_comparison(runs.compare(rows))


def judge(config, argv, results):
    """Train the code of a commit and of the working tree, and append the verdict to the file
    `results` → (a row per run, table and verdict, exit status)."""
    start = StartingPoint(verifies=False)
    resolve_minutes(config, start, options_of(TrainConfig, argv))  # raises UserError
    length = {'minutes': config.minutes} if config.minutes else {}
    args_by_side = variant_args({'base': length, 'change': length}, config, argv)
    start_time = datetime.datetime.now(datetime.UTC)
    with tempfile.TemporaryDirectory(prefix='plaingpt-judge-') as folder:
        trees, commit = copy_sides(config.against, Path(folder))
        judgment = {'date (UTC)': start_time, 'base commit': commit,
                    'change': changed_files(trees), 'settings': shlex.join(training_args(argv)),
                    'seeds': f'{config.seed} to {config.seed + config.seeds - 1}'}
        for side, args_by_seed in args_by_side.items():
            for seed, args in args_by_seed.items():
                args_by_seed[seed] = [in_tree(trees[side], arg) for arg in args]
        open_data(config, launched_world())  # prepares a small corpus once for both sides
        try:
            warm_up = [*WARM_UP, '--minutes=0'] if config.minutes else WARM_UP
            warm_ups = {side: {config.seed: args_by_seed[config.seed] + warm_up}
                        for side, args_by_seed in args_by_side.items()}
            options = judged_options(runs.train_all(warm_ups, f'{folder}/warm-up', trees),
                                     config.minutes)
            for args_by_seed in args_by_side.values():
                for args in args_by_seed.values():
                    args += options
            rows = runs.train_all(args_by_side, f'{folder}/runs', trees)
        except RunFailed as failure:
            if failure.variant == 'change':  # else the command, the recipe or the base is wrong
                append_result(results, judgment, problem=failure)
            raise
    comparison = runs.compare(rows)
    verdict, explanation = judge_runs(comparison, config.minutes)
    append_result(results, judgment, comparison, verdict)
    return rows, f'{runs.format_comparison(comparison)}\n\n{verdict}: {explanation}', \
        EXIT_STATUS[verdict]


def main(argv):
    start = StartingPoint(verifies=False)
    status = 0
    config = load_config(BenchConfig, argv, __doc__, read_saved=start.read)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the run in progress
    device, _ = devices.choose_device(config.device)
    compares_variants = bool(config.variants or config.sweep)
    folder = config.save
    if not folder and (compares_variants or config.judge):
        folder = 'out-experiments'
    if folder:
        make_writable(folder, 'save')  # fail now, not after hours of training
    name = results_name(config)
    if compares_variants:
        rows, text = measure_variants(config, argv, f'{folder}/{name}')
    elif config.judge:
        rows, text, status = judge(config, argv, f'{folder}/results.tsv')
    else:
        row, text = measure_step(config, start, device)
        rows = [row]
    machine = devices.machine_name(device)
    today = datetime.date.today().isoformat()
    command = shlex.join(['python', 'bench.py', *argv])
    rows = [{'date': today, 'machine': machine, 'torch': torch.__version__, 'command': command,
             **row} for row in rows]
    dates = sorted({row['date'] for row in rows if row['date']})  # a failed run has none
    period = dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'
    print(f'{machine}, torch {torch.__version__}, {period}:\n\n{text}')
    if folder:
        runs.save_csv(f'{folder}/{name}.csv', rows)
        print(f'\nwrote {folder}/{name}.csv')
        if compares_variants:
            print(f'{folder}/{name}/ has the folders of the runs')
        if config.judge:
            print(f'appended the verdict to {folder}/results.tsv')
    if status:
        sys.exit(status)


def results_name(config):
    """The name of the files with the results."""
    if config.judge:
        return 'judge'
    if config.variants:
        return Path(config.variants).stem
    if config.sweep:
        return f'sweep-{config.sweep.partition("=")[0]}'
    return 'speed'


if __name__ == '__main__':
    run_script(main)
