"""Measure the speed of a step, what other settings gain, and whether a change of the code helps.

    python bench.py config/gpt2_124m.py                 the speed of a step
    python bench.py config/quickstart.py --sweep=learning_rate=3e-3,9e-3,3e-2
                                                        whole trainings, each with --seeds seeds
    python bench.py config/quickstart.py --sweep='conv=0,4 n_layer=4,6'
                                                        all pairs of their values
    python bench.py config/quickstart.py --variants=mine.py
                                                        variants = {'name': {'key': value}, …}
    python bench.py config/quickstart.py --judge --seeds=8
                                                        is the code as it is here better than HEAD?
    python bench.py config/quickstart.py --judge --minutes=1
                                                        the same, with one minute per run
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
from plaingpt.data.dataset import open_data
from plaingpt.experiments import runs
from plaingpt.experiments.runs import (
    EXIT_STATUS,
    WARM_UP,
    append_result,
    changed_files,
    copy_sides,
    of_side,
    verdict,
)
from plaingpt.experiments.speed import measure_speed, planned_shape
from plaingpt.monitoring.run_record import read_rows
from plaingpt.monitoring.run_report import draw_runs
from plaingpt.system import devices
from plaingpt.system.distributed import launched_world
from plaingpt.system.errors import UserError, run_script, warn
from plaingpt.system.files import make_writable
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import StartingPoint, resolve_minutes


@dataclass
class BenchConfig(TrainConfig):
    # benchmark: what to measure; the speed of a step if nothing else
    variants: str = ''  # trainings that differ: grid, ablation, ladder, or a file such as mine.py
    sweep: str = ''  # a setting and its values, as learning_rate=1e-3,3e-3; several with spaces
    judge: bool = False  # whether the code as it is here trains better than that of a commit
    # benchmark: how
    against: str = 'HEAD'  # judge: the commit
    steps: int = 10  # speed: to time; a figure is their median
    seeds: int = 3  # variants, sweep, judge: runs of each training
    save: str = ''  # folder for the results; trainings have out-experiments by default

    above_0 = (*TrainConfig.above_0, 'steps', 'seeds')

    def supports_minutes(self):
        return self.judge

    def conflicts(self):
        found = super().conflicts()
        if self.batch_size == 'auto':
            found.append('batch_size=auto: a benchmark needs a number')
        if self.world_size() > 1:
            found.append('a benchmark measures one process: start it without torchrun')
        chosen = [key for key in ('variants', 'sweep', 'judge') if getattr(self, key)]
        if len(chosen) > 1:
            found.append(f'one at a time: {", ".join(chosen)}')
        if self.judge and self.seeds == 1:
            found.append('judge takes two seeds or more: one says nothing of chance')
        return found


def training_words(argv):
    """A command line of bench.py → the config files and settings that train.py takes"""
    own = {field.name for field in fields(BenchConfig)} - {
        field.name for field in fields(TrainConfig)} | {'out_dir'}
    return [word for word in argv
            if not word.startswith('--') or word[2:].partition('=')[0] not in own]


def measure_step(config, start, device):
    """Speed of a step → (a row of numbers, its Markdown)."""
    print(f'timing {config.steps} steps, after a few that are not counted …', file=sys.stderr)
    devices.prepare_device(device)
    torch.manual_seed(config.seed)
    compile, _ = devices.choose_compile(config.compile, device)
    shape, _, _ = planned_shape(config, start)
    dtype, _ = choose_training_dtype(config, shape, device)
    return measure_speed(config, shape, device, dtype, compile)


def words_of(variants, config, argv):
    """{name: settings} → {name: {seed: words of train.py}}: the command line with the settings
    at its end, so that 'auto' follows them. Raises UserError where they cannot be read."""
    found = {}
    for name, changes in variants.items():
        if 'out_dir' in changes or ('seed' in changes and config.seeds > 1):
            raise UserError(f'variant {name!r}: --seeds says how many seeds each has, and each run '
                            'has a folder of its own: leave seed and out_dir out')
        options, found[name] = [f'--{key}={value}' for key, value in changes.items()], {}
        for seed in range(config.seed, config.seed + config.seeds):
            words = [*training_words(argv), f'--seed={seed}', *options]
            try:
                read = load_config(TrainConfig, words)
            except UserError as problem:
                raise UserError(f'variant {name!r}: {problem}') from None
            found[name][seed] = [*words, '--log_interval='
                                 f'{max(1, min(read.log_interval, read.max_iters))}']
    return found


def measure_variants(config, argv, folder):
    """Train all variants in `folder` and draw them → (a row for each run, their table)."""
    variants = runs.sweep_variants(config.sweep) if config.sweep \
        else runs.read_variants(config.variants, config)
    rows = runs.train_all(words_of(variants, config, argv), folder)
    try:
        draw_runs([(run['variant'], read_rows(Path(run['folder'], 'metrics.jsonl')))
                   for run in rows if run['final_loss'] is not None], f'{folder}.png')
    except UserError as problem:  # matplotlib is absent
        warn(problem)
    return rows, runs.format_comparison(runs.compare(rows))


def judge(config, argv, results):
    """Train the code of a commit and the code as it is here, and append what they show to the file
    `results` → (a row for each run, their table and the verdict, the exit status)."""
    start = StartingPoint(verifies=False)
    resolve_minutes(config, start, options_of(TrainConfig, argv))  # or UserError
    words = words_of({side: {'report': False} for side in ('base', 'change')}, config, argv)
    began = datetime.datetime.now(datetime.UTC)
    with tempfile.TemporaryDirectory(prefix='plaingpt-judge-') as folder:
        trees, commit = copy_sides(config.against, Path(folder))
        judged = {'date (UTC)': began, 'base commit': commit, 'change': changed_files(trees),
                  'settings': shlex.join(training_words(argv)),
                  'seeds': f'{config.seed} to {config.seed + config.seeds - 1}'}
        words = {side: {seed: [of_side(trees[side], word) for word in told]
                        for seed, told in words[side].items()} for side in words}
        open_data(config, launched_world())  # prepares a small corpus, where both find it
        try:
            if config.minutes:
                runs.train_all({side: {config.seed: words[side][config.seed] + WARM_UP}
                                for side in words}, f'{folder}/warm-up', trees)
            rows = runs.train_all(words, f'{folder}/runs', trees)
            compared = runs.compare(rows)
            said, when = verdict(rows, compared)
        except UserError as problem:
            append_result(results, judged, problem=problem)
            raise
    append_result(results, judged, compared, said)
    return rows, f'{runs.format_comparison(compared)}\n\n{said}, {when}', EXIT_STATUS[said]


def main(argv):
    start, status = StartingPoint(verifies=False), 0
    config = load_config(BenchConfig, argv, __doc__, read_saved=start.read)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no training outlives this process
    device, _ = devices.choose_device(config.device)
    trains = config.variants or config.sweep
    folder = config.save or ('out-experiments' if trains or config.judge else '')
    name = 'judge' if config.judge else Path(config.variants).stem if config.variants \
        else f'sweep-{config.sweep.partition("=")[0]}' if config.sweep else 'speed'
    if folder:
        make_writable(folder, 'save')  # fail now, and not after hours of measuring
    if trains:
        rows, text = measure_variants(config, argv, f'{folder}/{name}')
    elif config.judge:
        rows, text, status = judge(config, argv, f'{folder}/results.tsv')
    else:
        row, text = measure_step(config, start, device)
        rows = [row]
    facts = {'date': datetime.date.today().isoformat(), 'machine': devices.machine_name(device),
             'torch': torch.__version__, 'command': shlex.join(['python', 'bench.py', *argv])}
    rows = [facts | row for row in rows]
    dates = sorted({row['date'] for row in rows if row['date']})  # of a run that failed: none
    print(f'{facts["machine"]}, torch {facts["torch"]}, '
          f'{" to ".join(dates[:1] + dates[1:][-1:])}:\n\n{text}')
    if folder:
        runs.save_csv(f'{folder}/{name}.csv', rows)
        print(f'\n{folder}/{name}.csv has all numbers'
              + (f', {folder}/{name}/ the runs' if trains else '')
              + (f', {folder}/results.tsv all verdicts' if config.judge else ''))
    if status:
        sys.exit(status)


if __name__ == '__main__':
    run_script(main)
