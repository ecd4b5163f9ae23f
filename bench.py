"""Measure what training takes, and what changes of its settings gain.

    python bench.py config/gpt2_124m.py                 speed of a step, beside a bare matmul
    python bench.py config/gpt2_124m.py --profile       and where its time goes
    python bench.py config/quickstart.py --sweep=learning_rate=3e-3,9e-3,3e-2
                                                        whole trainings, each with --seeds seeds
    python bench.py config/quickstart.py --variants=mine.py
                                                        variants = {'name': {'key': value}, …}
    python bench.py --variants=grid                     4 models × 6 ways to train them
    python bench.py config/quickstart.py --variants=ablation
                                                        what each part of the recipe gains
    python bench.py config/gpt2_124m.py --variants=ladder --max_iters=50
                                                        the step, faster one change at a time
    python bench.py --judge config/quickstart.py --patch=mine.diff
                                                        is a change really better? docs/hacking.md

Without a config: GPT-2 124M on a GPU, config/bench_cpu.py or config/grid_cpu.py on a CPU.
Trainings are kept in the folder of --save, and the same command goes on after a stop.
"""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from configurator import load_config
from plaingpt.data.corpora import find_dataset_size
from plaingpt.data.dataset import open_data, open_named
from plaingpt.experiments import runs, tables
from plaingpt.experiments.judge import judge
from plaingpt.experiments.speed import measure_speed
from plaingpt.monitoring.run_record import read_rows
from plaingpt.monitoring.run_report import draw_runs
from plaingpt.system import devices
from plaingpt.system.distributed import launched_world
from plaingpt.system.errors import UserError, run_script, warn
from plaingpt.system.files import ROOT, make_writable
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.settings import TrainConfig


@dataclass
class BenchConfig(TrainConfig):
    # benchmark: what to measure; the speed of a step if nothing else
    variants: str = ''  # trainings that differ: grid, ablation, ladder, or a file such as mine.py
    sweep: str = ''  # a setting and its values: learning_rate=1e-3,3e-3; repeat it for all pairs
    # benchmark: judge whether a change is better than the code as it is here
    judge: bool = False  # train both in pairs until that is clear
    patch: str = ''  # the change: this diff
    set: str = ''  # the change: settings, such as conv=0, and config files; repeat it for more
    change: str = ''  # the change: the code in this clone
    against: str = ''  # compare the code as it is here with this commit
    pairs: Annotated[int, 'at least 1'] = 8  # at most; --minutes limits them, too
    least: Annotated[float, 'at least 0'] = 0.0  # a difference that matters; stop if it is smaller
    split: Literal['val', 'test'] = 'val'  # test: decide at the end, by text that no run looked at
    # benchmark: how
    steps: Annotated[int, 'at least 1'] = 10  # to time; a figure is their median
    warmup_steps: Annotated[int, 'at least 0'] = 3  # before them, not counted
    profile: bool = False  # speed: where the time goes, and a trace in out_dir
    real_data: bool = False  # speed: batches from the dataset, not one of random tokens
    seeds: Annotated[int, 'at least 1'] = 3  # variants, sweep: runs of each training
    save: str = ''  # folder for the results; trainings have out-experiments by default

    def problems(self):
        found = super().problems()
        changes = [key for key in ('patch', 'set', 'change', 'against') if getattr(self, key)]
        if self.judge != bool(changes):
            found.append('judge takes a change: --patch, --set, --change or --against, which are '
                         'for judge alone')
        if self.batch_size == 'auto':
            found.append('batch_size=auto: a benchmark needs a number')
        if self.world_size() > 1:
            found.append('a benchmark measures one process: start it without torchrun')
        chosen = [key for key in ('variants', 'sweep', 'profile', 'judge')
                  if getattr(self, key)]
        if len(chosen) > 1:
            found.append(f'one at a time: {", ".join(chosen)}')
        return found

    def takes_minutes(self):
        return self.judge


def gathered(argv, key):
    """Every '--sweep', 'conv=0,4' and '--sweep=conv=0,4' as one '--sweep=conv=0,4 …' at the end."""
    rest, values, words = [], [], iter(argv)
    for word in words:
        if word == f'--{key}':
            values.append(next(words, ''))
        elif word.startswith(f'--{key}='):
            values.append(word.removeprefix(f'--{key}='))
        else:
            rest.append(word)
    return [*rest, f'--{key}={" ".join(values)}'] if values else rest


def read_config(argv):
    """→ (BenchConfig, device, the words it was read from). Without a config file a CPU gets a
    smaller model than GPT-2."""
    config = load_config(BenchConfig, argv, __doc__)
    device, _ = devices.choose_device(config.device)
    named = any(not arg.startswith('-') for arg in argv)
    if device.type == 'cuda' or named or config.judge:
        return config, device, argv
    small = 'grid_cpu.py' if config.variants or config.sweep else 'bench_cpu.py'
    argv = [str(ROOT / 'config' / small), *argv]
    return load_config(BenchConfig, argv), device, argv


def measure_step(config, device):
    """Speed of a step → (rows of numbers, their Markdown)."""
    devices.prepare_device(device)
    torch.manual_seed(config.seed)
    compile, _ = devices.choose_compile(config.compile, device)
    shape = config.gpt_config(find_dataset_size(config.dataset, config.vocab_size)[0])
    dtype, _ = choose_training_dtype(config, shape, device)
    return measure_speed(config, shape, device, dtype, compile)


def words_of(variants, config, words):
    """{name: settings} → {name: {seed: words of train.py}}: the command line with the settings
    at its end, so that 'auto' follows them. Raises UserError where they cannot be read."""
    found, seeds = {}, range(config.seed, config.seed + config.seeds)
    if any('seed' in changes for changes in variants.values()):
        seeds = seeds[:1]  # the variants name their seeds
    for name, changes in variants.items():
        options, found[name] = [f'--{key}={value}' for key, value in changes.items()], {}
        for seed in seeds:
            changed = [*words, f'--seed={seed}', *options]
            try:
                read = load_config(BenchConfig, changed)
            except UserError as problem:
                raise UserError(f'variant {name!r}: {problem}') from None
            found[name][read.seed] = [*runs.training_words(changed), '--log_interval='
                                      f'{min(read.log_interval, read.max_iters)}']
    return found


def measure_variants(config, words, folder):
    """Train all variants in `folder` and draw them → (a row for each run, their table)."""
    variants = runs.sweep_variants(config.sweep) if config.sweep \
        else runs.read_variants(config.variants, config)
    rows = runs.train_all(words_of(variants, config, words), folder)
    try:
        draw_runs([(run['variant'], read_rows(Path(run['folder'], 'metrics.jsonl')))
                   for run in rows if not run['failed']], f'{folder}.png')
    except UserError as problem:  # matplotlib is absent
        warn(problem)
    return rows, runs.format_comparison(rows, runs.compare(rows))


def judge_change(config, words):
    """Find mistakes of the command before anything is trained, and judge → as judge() does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: pairs so far count
    added = [word if word.endswith('.py') else f'--{word}' for word in config.set.split()]
    for clone in (ROOT, config.change or ROOT):
        if not Path(clone, 'plaingpt', '__init__.py').is_file():
            raise UserError(f'{clone}: no clone of plainGPT, and --judge takes one')
    if not config.patch and not config.change:
        load_config(BenchConfig, [*words, *added])
    if config.split == 'test':
        open_named(config.dataset).split('test')
    devices.choose_device(config.device)
    open_data(config, launched_world())  # a small corpus is prepared where both sides find it
    words = runs.training_words(words)
    return judge(config, words, [*words, *added])


def main(argv):
    config, device, words = read_config(gathered(gathered(argv, 'sweep'), 'set'))
    trains = config.variants or config.sweep
    if trains and any(word.startswith('--out_dir=') for word in argv):
        raise UserError('--out_dir: each training has a folder of its own: name the folder of all '
                        'with --save')
    folder = config.save or ('out-experiments' if trains else '')
    name = 'judge' if config.judge else Path(config.variants).stem if config.variants \
        else f'sweep-{config.sweep.partition("=")[0]}' if config.sweep else 'speed'
    if folder:
        make_writable(folder, 'save')  # fail now, and not after hours of measuring
    path = tables.result_path(folder, name, device)
    facts = tables.describe_measurement(device, argv)
    if trains:
        rows, text = measure_variants(config, words, path)
    elif config.judge:
        rows, text, status = judge_change(config, words)
    else:
        rows, text = measure_step(config, device)
    print(tables.format_page(facts, text))
    if folder:
        tables.save(path, facts, rows, text)
    if trains:
        print(f'{path}/ has the runs, {path}.png their picture')
    if config.judge:
        sys.exit(status)


if __name__ == '__main__':
    run_script(main)
