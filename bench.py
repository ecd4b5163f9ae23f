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
    python bench.py config/quickstart.py --judge --minutes=1 --my_flag=2
                                                        the same, with one-minute runs; a setting
                                                        that HEAD lacks goes to the change only
"""

import datetime
import shlex
import signal
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from configurator import load_config
from plaingpt.core.settings import TrainConfig
from plaingpt.core.start import StartingPoint
from plaingpt.experiments import runs
from plaingpt.experiments.comparison import compare, format_comparison, save_csv
from plaingpt.experiments.judge import judge
from plaingpt.experiments.speed import measure_speed, planned_gpt_config
from plaingpt.monitoring.run_record import read_rows, read_run
from plaingpt.monitoring.run_report import draw_runs
from plaingpt.system import devices
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

    def conflicts(self):
        problems = super().conflicts()
        if self.batch_size == 'auto':
            problems.append('batch_size=auto: a benchmark needs a number')
        modes = [key for key in ('variants', 'sweep', 'judge') if getattr(self, key)]
        if len(modes) > 1:
            problems.append(f'{" and ".join(modes)} cannot be combined: choose one')
        if self.minutes and not modes:
            problems.append(f'minutes={self.minutes:g} only works with --sweep, --variants or '
                            '--judge, which train')
        if self.judge and self.seeds == 1:
            problems.append('seeds=1: judge needs at least two, to estimate the variance')
        return problems


def training_args(argv):
    """Arguments of bench.py → the config files and settings for train.py"""
    train_keys = {field.name for field in fields(TrainConfig)} - {'out_dir'}
    bench_keys = {field.name for field in fields(BenchConfig)} - train_keys
    return [arg for arg in argv if not runs.option_names([arg]) & bench_keys]


def measure_step(config, start, device):
    """Time a training step → (a row of results, their Markdown)."""
    print(f'timing {count_of(config.steps, "step")} after a few warmup steps …', file=sys.stderr)
    devices.prepare_device(device)
    torch.manual_seed(config.seed)
    compile, _ = devices.choose_compile(config.compile, device)
    gpt_config, _, _ = planned_gpt_config(config, start)
    dtype, _ = devices.choose_dtype(config.dtype, device, gpt_config.n_embd, training=True)
    return measure_speed(build, gpt_config, config, device, dtype, compile)


def measure_variants(config, changes_by_name, argv, folder):
    """Train variants, {name: settings}, in `folder` and draw them → (a row per run, their table).
    """
    variants = [runs.make_variant(name, {**runs.NOT_RECORDED, **changes}, argv, config.seeds)
                for name, changes in changes_by_name.items()]
    before = runs.inputs_of(argv)
    rows = runs.train_all(variants, folder)
    after = runs.inputs_of(argv)
    if any(before[key] != after[key] for key in ('settings', 'code')):
        warn('the code or a config file changed during these runs: run the same command again')
    curves = [(run['variant'], read_rows(Path(run['folder'], 'metrics.jsonl')),
               read_run(run['folder'])) for run in rows if run['final_loss'] is not None]
    try:
        if note := draw_runs(curves, f'{folder}.png'):
            warn(note)
    except UserError as problem:  # matplotlib is not installed
        warn(problem)
    return rows, format_comparison(compare(rows))


def main(argv):
    start = StartingPoint(verifies=False)
    status = 0
    config = load_config(BenchConfig, argv, __doc__, read_saved=start.read)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the run in progress
    device, _ = devices.choose_device(config.device)
    folder = config.save
    if not folder and (config.variants or config.sweep or config.judge):
        folder = 'out-experiments'
    if folder:
        make_writable(folder, 'save')  # fail now, not after hours of training
    if config.judge:
        name = 'judge'
        rows, text, status = judge(config, training_args(argv), f'{folder}/results.tsv')
    elif config.variants or config.sweep:
        if config.variants:
            name = Path(config.variants).stem
            variants = runs.read_variants(config.variants, config)
        else:
            name = f'sweep-{config.sweep.partition("=")[0]}'
            variants = runs.sweep_variants(config.sweep)
        rows, text = measure_variants(config, variants, training_args(argv), f'{folder}/{name}')
    else:
        name = 'speed'
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
        save_csv(f'{folder}/{name}.csv', rows)
        print(f'\nwrote {folder}/{name}.csv')
        if config.judge:
            print(f'appended the verdict to {folder}/results.tsv')
        elif name != 'speed':
            print(f'{folder}/{name}/ has the folders of the runs')
    if status:
        sys.exit(status)


if __name__ == '__main__':
    run_script(main)
