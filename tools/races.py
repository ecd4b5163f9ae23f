"""Races against nanoGPT, for compare.py: whole programs on the same tokens, one at a time."""

import csv
import json
import math
import pickle
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

from plaingpt.core.dataset import dataset_folder, open_dataset
from plaingpt.system.files import ROOT, write_atomically

# nanoGPT's CPU recipe, from "I only have a macbook" in its README
CPU_RECIPE = [
    'train.py', 'config/train_shakespeare_char.py', '--device=cpu', '--compile=False',
    '--eval_iters=20', '--log_interval=50', '--block_size=64', '--batch_size=12', '--n_layer=4',
    '--n_head=4', '--n_embd=128', '--max_iters=2000', '--lr_decay_iters=2000', '--dropout=0.0']


class Watched(NamedTuple):
    """The output of a training program."""

    seconds: float  # of the whole program
    curve: list  # (seconds since the start of the program, iteration, validation loss)
    step_ms: list  # milliseconds of the logged steps


def run_and_watch(command, folder):
    """Run a Python script → Watched."""
    start_time = time.perf_counter()
    curve = []
    step_ms = []
    process = subprocess.Popen([sys.executable, '-u', *command], cwd=folder, text=True,
                               stdout=subprocess.PIPE)
    for line in process.stdout:
        evaluation = re.search(r'(?:step|iter) +(\d+).* val loss ([\d.]+)', line)
        step = re.search(r'(?:time|\|) ([\d.]+) ?ms', line)
        if evaluation:
            seconds = time.perf_counter() - start_time
            curve.append((seconds, int(evaluation[1]), float(evaluation[2])))
        elif step:
            step_ms.append(float(step[1]))
    if process.wait():
        sys.exit(f'{" ".join(map(str, command))} failed')
    return Watched(time.perf_counter() - start_time, curve, step_ms)


def score_whole_split(model, output, dataset='shakespeare_char', checkpoint='latest'):
    """The scores of a trained model over the whole validation split. output: a new JSON file"""
    command = [sys.executable, 'evaluate.py', model, f'--checkpoint={checkpoint}',
               f'--dataset={dataset}', f'--tokenizer={dataset}', f'--output={output}']
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return json.loads(Path(output).read_text())['results']['val']


def race(config, options):
    """When plainGPT reaches nanoGPT's final loss, and the final loss of both. nanoGPT's is that of
    its best checkpoint over the whole validation split. Each evaluation of plainGPT reads the same
    sequences: its losses are corrected by their difference from the whole split at the end."""
    settings = ['config/shakespeare_char_cpu_best.py', '--device=cpu', *options]
    subprocess.run([sys.executable, 'data/shakespeare_char/prepare.py'], cwd=config.nanogpt,
                   check=True, stdout=subprocess.DEVNULL)
    curves = {}
    for number in range(1, config.rounds + 1):
        with tempfile.TemporaryDirectory() as out:
            nanogpt = run_and_watch([*CPU_RECIPE, f'--out_dir={out}'], config.nanogpt)
            plaingpt = run_and_watch(['train.py', *settings, f'--out_dir={out}/plaingpt'], ROOT)
            curves['nanoGPT', number] = nanogpt.curve
            curves['plainGPT', number] = plaingpt.curve
            goal = score_whole_split(f'--init_from={out}/ckpt.pt', f'{out}/nanogpt.json')['loss']
            final = score_whole_split(f'--out_dir={out}/plaingpt', f'{out}/plaingpt.json')['loss']
        correction = final - plaingpt.curve[-1][2]
        reached_s = next((seconds for seconds, _, loss in plaingpt.curve
                          if loss + correction <= goal), math.nan)
        print(f'nanoGPT ends at {goal:.4f} after {nanogpt.seconds:.1f} s; plainGPT is below that '
              f'after {reached_s:.1f} s, and ends at {final:.4f} after {plaingpt.seconds:.1f} s',
              flush=True)
    save_curves(config, curves)


def save_curves(config, curves):
    """Write race.csv into config.save, if set. curves: {(program, round): Watched.curve}"""
    if not config.save:
        return
    lines = ['program,round,seconds,iteration,val_loss\n']
    for (program, number), points in curves.items():
        lines += [f'{program},{number},{seconds:.2f},{iteration},{loss}\n'
                  for seconds, iteration, loss in points]
    write_atomically(Path(config.save, 'race.csv'), ''.join(lines))


# -----------------------------------------------------------------------------
# on a GPU: race-gpu, equality

# for all programs: 2^16 tokens per step
GPU_SETTINGS = ['--max_iters=600', '--lr_decay_iters=600', '--eval_interval=100', '--eval_iters=8',
                '--log_interval=20', '--batch_size=64']
NANOGPT_GPU = ['config/train_gpt2.py', '--wandb_log=False', '--gradient_accumulation_steps=1',
               '--warmup_iters=60', '--learning_rate=6e-4', '--min_lr=6e-5']
PLAIN = ['train.py', 'config/gpt2_124m.py', '--total_batch_size=0',
         '--gradient_accumulation_steps=1', '--warmup_iters=60', '--report=False']
FAST = ['train.py', 'config/quickstart_gpu.py', '--total_batch_size=0',
        '--gradient_accumulation_steps=1', '--report=False']
# nanoGPT's train.py has a fixed seed; this adds an offset to it
SEEDED = """
import runpy, sys, torch
seed, manual_seed = int(sys.argv.pop(1)), torch.manual_seed
torch.manual_seed = lambda number: manual_seed(number + seed)
sys.path.insert(0, '')
runpy.run_path('train.py', run_name='__main__')
"""


def share_with_nanogpt(folder, name):
    """Make a dataset for nanoGPT with links to the token files of ours. folder: a new one"""
    if name == 'pypackages':
        subprocess.run([sys.executable, 'prepare.py', name], cwd=ROOT, check=True)
    dataset = open_dataset(ROOT / dataset_folder(name))
    folder.mkdir()
    for file in ('train.bin', 'val.bin'):
        (folder / file).symlink_to(dataset.folder / file)
    with open(folder / 'meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': dataset.vocab_size}, f)


def gpu_programs(config, options, out):
    """{name: (function of a seed that trains → Watched, argument of evaluate.py for the model)}
    out: a folder for all"""
    share_with_nanogpt(out / 'data', config.dataset)

    def train_nanogpt(seed):
        return run_and_watch(
            ['-c', SEEDED, str(seed), *NANOGPT_GPU, *GPU_SETTINGS, f'--dataset={out}/data',
             f'--out_dir={out}/nanoGPT', *options], config.nanogpt)

    def train_plaingpt(command, folder, seed):
        return run_and_watch(
            [*command, *GPU_SETTINGS, f'--dataset={config.dataset}', f'--seed={1337 + seed}',
             f'--out_dir={folder}', *options], ROOT)

    programs = {'nanoGPT': (train_nanogpt, f'--init_from={out}/nanoGPT/ckpt.pt')}
    for name, command in ('gpt2_124m', PLAIN), ('quickstart_gpu', FAST):
        train = partial(train_plaingpt, command, out / name)
        programs[name] = train, f'--out_dir={out / name}'
    return programs


def race_gpu(config, options):
    """Run whole programs of 600 steps one after the other: their time, the time per step, and the
    loss over the whole validation split."""
    with tempfile.TemporaryDirectory() as out:
        curves = {}
        for name, (train, model) in gpu_programs(config, options, Path(out)).items():
            watched = train(0)
            curves[name, 1] = watched.curve
            score = score_whole_split(model, f'{out}/{name}.json', config.dataset)
            print(f'{name}: loss {score["loss"]:.4f} ± {score["loss_stderr"]:.4f} after '
                  f'{watched.seconds:.1f} s; {median(watched.step_ms):.1f} ms per step; first '
                  f'evaluation after {watched.curve[0][0]:.1f} s', flush=True)
    save_curves(config, curves)


def equality(config, options):
    """The mean difference between the losses of the plain recipe and of nanoGPT."""
    differences = []
    for seed in range(config.rounds):
        with tempfile.TemporaryDirectory() as out:
            programs = gpu_programs(config, options, Path(out))
            losses = {}
            for name in ('nanoGPT', 'gpt2_124m'):
                train, model = programs[name]
                train(seed)
                score = score_whole_split(model, f'{out}/{name}.json', config.dataset)
                losses[name] = score['loss']
        differences.append(losses['gpt2_124m'] - losses['nanoGPT'])
        print(f'seed {seed}: ' + ', '.join(f'{name} {loss:.4f}' for name, loss in losses.items()),
              flush=True)
    error = stdev(differences) / math.sqrt(config.rounds)
    is_equal = abs(mean(differences)) <= 2 * error
    print(f'gpt2_124m - nanoGPT: {mean(differences):+.4f} ± {error:.4f}, which is '
          f'{"within" if is_equal else "outside"} two standard errors')


# -----------------------------------------------------------------------------
# picture

COLORS = {'nanoGPT': '#e69f00', 'gpt2_124m': '#009e73'}
OTHER_COLOR = '#0072b2'
PANELS = (  # file in docs/results/, title, highest loss shown, x axis, y axis
    ('race-cpu', 'tiny Shakespeare, two CPU cores', 4.5, 'seconds since the start of the program',
     'validation loss (nats per character)'),
    ('race-h100', 'GPT-2 124M on Python source, one H100', 5.0, 'seconds of training steps',
     'validation loss (nats per token)'))


def picture(config, _):
    """Draw the races of docs/results/ side by side: docs/loss-over-time.png."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6))
    for ax, (name, title, limit, x_axis, y_axis) in zip(axes, PANELS, strict=True):
        curves = {}
        with open(ROOT / f'docs/results/{name}.csv', newline='') as file:
            for row in csv.DictReader(file):
                points = curves.setdefault((row['program'], row['round']), [])
                points.append((float(row['seconds']), float(row['val_loss'])))
        for (program, number), points in curves.items():
            seconds, losses = zip(*points, strict=True)
            color = COLORS.get(program, OTHER_COLOR)
            ax.plot(seconds, losses, '.-', color=color)
            if number == '1':
                offset = -14 if program == 'gpt2_124m' else 3  # its curve is close to nanoGPT's
                ax.annotate(program, (seconds[-1], losses[-1]), xytext=(4, offset), color=color,
                            textcoords='offset points', annotation_clip=False)
        ax.set(title=title, xlabel=x_axis, ylabel=y_axis, ylim=(1, limit))
        ax.spines[['top', 'right']].set_visible(False)
        ax.grid(axis='y', alpha=0.3)
    figure.tight_layout()
    figure.savefig(ROOT / 'docs/loss-over-time.png', dpi=120)
