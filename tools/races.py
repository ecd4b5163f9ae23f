"""Races with nanoGPT, for compare.py: whole programs on the same tokens, one after the other."""

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

from plaingpt.data.dataset import dataset_folder, open_dataset
from plaingpt.system.files import ROOT, write_atomically

# nanoGPT's recipe for a CPU, from its README, "I only have a macbook"
CPU_RECIPE = [
    'train.py', 'config/train_shakespeare_char.py', '--device=cpu', '--compile=False',
    '--eval_iters=20', '--log_interval=50', '--block_size=64', '--batch_size=12', '--n_layer=4',
    '--n_head=4', '--n_embd=128', '--max_iters=2000', '--lr_decay_iters=2000', '--dropout=0.0']


class Watched(NamedTuple):
    """What a training program printed."""

    seconds: float  # the whole program
    curve: list  # (seconds since it was started, iteration, validation loss)
    step_ms: list  # milliseconds of a step, where it logged them


def run_and_watch(command, folder):
    """Run a Python script → Watched."""
    started, curve, step_ms = time.perf_counter(), [], []
    process = subprocess.Popen([sys.executable, '-u', *command], cwd=folder, text=True,
                               stdout=subprocess.PIPE)
    for line in process.stdout:
        if evaluation := re.search(r'(?:step|iter) +(\d+).* val loss ([\d.]+)', line):
            curve.append((time.perf_counter() - started, int(evaluation[1]), float(evaluation[2])))
        elif step := re.search(r'(?:time|\|) ([\d.]+) ?ms', line):
            step_ms.append(float(step[1]))
    if process.wait():
        sys.exit(f'{" ".join(map(str, command))} failed')
    return Watched(time.perf_counter() - started, curve, step_ms)


def score_whole_split(model, output, dataset='shakespeare_char', checkpoint='latest'):
    """The scores of a trained model over all of the validation text. output: a new file"""
    command = [sys.executable, 'evaluate.py', model, f'--checkpoint={checkpoint}',
               f'--dataset={dataset}', f'--tokenizer={dataset}', f'--output={output}']
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return json.loads(Path(output).read_text())['results']['val']


def race(config, options):
    """When ours reaches nanoGPT's last loss, and where both end. nanoGPT's loss is that of its best
    checkpoint over the whole validation text. Our evaluations read the same sequences each time:
    their loss is corrected by its difference from that of the whole text, known at the end."""
    settings = ['config/shakespeare_char_cpu_best.py', '--device=cpu', *options]
    subprocess.run([sys.executable, 'data/shakespeare_char/prepare.py'], cwd=config.nanogpt,
                   check=True, stdout=subprocess.DEVNULL)
    curves = {}
    for number in range(1, config.rounds + 1):
        with tempfile.TemporaryDirectory() as out:
            theirs = run_and_watch([*CPU_RECIPE, f'--out_dir={out}'], config.nanogpt)
            ours = run_and_watch(['train.py', *settings, f'--out_dir={out}/ours'], ROOT)
            curves |= {('nanoGPT', number): theirs.curve, ('plainGPT', number): ours.curve}
            goal, end = (score_whole_split(model, f'{out}/{i}.json')['loss'] for i, model in
                         enumerate((f'--init_from={out}/ckpt.pt', f'--out_dir={out}/ours')))
        correction = end - ours.curve[-1][2]
        reached = next((seconds for seconds, _, loss in ours.curve if loss + correction <= goal),
                       math.nan)
        print(f'nanoGPT ends at {goal:.4f} after {theirs.seconds:.1f} s; plainGPT is below that '
              f'after {reached:.1f} s, and ends at {end:.4f} after {ours.seconds:.1f} s',
              flush=True)
    save_curves(config, curves)


def save_curves(config, curves):
    """Write race.csv, if config.save is a folder. curves: {(program, round): Watched.curve}"""
    if not config.save:
        return
    lines = ['program,round,seconds,iteration,val_loss\n']
    for (program, number), points in curves.items():
        lines += [f'{program},{number},{seconds:.2f},{iteration},{loss}\n'
                  for seconds, iteration, loss in points]
    write_atomically(Path(config.save, 'race.csv'), ''.join(lines))


# -----------------------------------------------------------------------------
# on a GPU: race-gpu, equality

# the same for all programs: 2^16 tokens a step
GPU_SETTINGS = ['--max_iters=600', '--lr_decay_iters=600', '--eval_interval=100', '--eval_iters=8',
                '--log_interval=20', '--batch_size=64']
NANOGPT_GPU = ['config/train_gpt2.py', '--wandb_log=False', '--gradient_accumulation_steps=1',
               '--warmup_iters=60', '--learning_rate=6e-4', '--min_lr=6e-5']
PLAIN = ['train.py', 'config/gpt2_124m.py', '--total_batch_size=0',
         '--gradient_accumulation_steps=1', '--warmup_iters=60', '--report=False']
FAST = ['train.py', 'config/quickstart_gpu.py', '--total_batch_size=0',
        '--gradient_accumulation_steps=1', '--report=False']
# nanoGPT's train.py has one seed; this adds another to it
SEEDED = """
import runpy, sys, torch
seed, manual_seed = int(sys.argv.pop(1)), torch.manual_seed
torch.manual_seed = lambda number: manual_seed(number + seed)
sys.path.insert(0, '')
runpy.run_path('train.py', run_name='__main__')
"""


def share_with_nanogpt(folder, name):
    """Let nanoGPT read the two files of tokens of a dataset. folder: a new one for it"""
    if name == 'pypackages':
        subprocess.run([sys.executable, 'prepare.py', name], cwd=ROOT, check=True)
    dataset = open_dataset(ROOT / dataset_folder(name))
    folder.mkdir()
    for file in ('train.bin', 'val.bin'):
        (folder / file).symlink_to(dataset.folder / file)
    with open(folder / 'meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': dataset.vocab_size}, f)


def gpu_programs(config, options, out):
    """{name: (function of a seed that trains → Watched, how evaluate.py is told of its model)}
    out: a folder for all"""
    share_with_nanogpt(out / 'data', config.dataset)

    def theirs(seed):
        return run_and_watch(
            ['-c', SEEDED, str(seed), *NANOGPT_GPU, *GPU_SETTINGS, f'--dataset={out}/data',
             f'--out_dir={out}/nanoGPT', *options], config.nanogpt)

    def ours(command, folder, seed):
        return run_and_watch(
            [*command, *GPU_SETTINGS, f'--dataset={config.dataset}', f'--seed={1337 + seed}',
             f'--out_dir={folder}', *options], ROOT)

    programs = {'nanoGPT': (theirs, f'--init_from={out}/nanoGPT/ckpt.pt')}
    for name, command in ('gpt2_124m', PLAIN), ('quickstart_gpu', FAST):
        programs[name] = partial(ours, command, out / name), f'--out_dir={out / name}'
    return programs


def race_gpu(config, options):
    """Whole programs of 600 steps, one after the other: their time, that of a step, and the loss of
    the whole validation split."""
    with tempfile.TemporaryDirectory() as out:
        curves = {}
        for name, (train, model) in gpu_programs(config, options, Path(out)).items():
            watched = train(0)
            curves[name, 1] = watched.curve
            score = score_whole_split(model, f'{out}/{name}.json', config.dataset)
            print(f'{name}: loss {score["loss"]:.4f} ± {score["loss_stderr"]:.4f} after '
                  f'{watched.seconds:.1f} s; {median(watched.step_ms):.1f} ms a step; first '
                  f'evaluation after {watched.curve[0][0]:.1f} s', flush=True)
    save_curves(config, curves)


def equality(config, options):
    """Whether the plain recipe and nanoGPT's reach the same loss: the mean difference."""
    differences = []
    for seed in range(config.rounds):
        with tempfile.TemporaryDirectory() as out:
            programs, losses = gpu_programs(config, options, Path(out)), {}
            for name in ('nanoGPT', 'gpt2_124m'):
                train, model = programs[name]
                train(seed)
                score = score_whole_split(model, f'{out}/{name}.json', config.dataset)
                losses[name] = score['loss']
        differences.append(losses['gpt2_124m'] - losses['nanoGPT'])
        print(f'seed {seed}: ' + ', '.join(f'{name} {loss:.4f}' for name, loss in losses.items()),
              flush=True)
    error = stdev(differences) / math.sqrt(config.rounds)
    print(f'gpt2_124m - nanoGPT: {mean(differences):+.4f} ± {error:.4f}, which is '
          + ('' if abs(mean(differences)) <= 2 * error else 'not ') + 'within two standard errors')


# -----------------------------------------------------------------------------
# picture

COLORS = {'nanoGPT': '#e69f00', 'gpt2_124m': '#009e73'}
OURS = '#0072b2'
PANELS = (  # file in docs/results/, title, highest loss shown, x axis, y axis
    ('race-cpu', 'tiny Shakespeare, two CPU cores', 4.5, 'seconds since the program was started',
     'validation loss (nats per character)'),
    ('race-h100', 'GPT-2 124M on Python source, one H100', 5.0, 'seconds of training steps',
     'validation loss (nats per token)'))


def picture(config, _):
    """Draw the races of docs/results/ beside each other: docs/loss-over-time.png."""
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
            color = COLORS.get(program, OURS)
            ax.plot(seconds, losses, '.-', color=color)
            if number == '1':
                below = -14 if program == 'gpt2_124m' else 3  # its curve is next to nanoGPT's
                ax.annotate(program, (seconds[-1], losses[-1]), xytext=(4, below), color=color,
                            textcoords='offset points', annotation_clip=False)
        ax.set(title=title, xlabel=x_axis, ylabel=y_axis, ylim=(1, limit))
        ax.spines[['top', 'right']].set_visible(False)
        ax.grid(axis='y', alpha=0.3)
    figure.tight_layout()
    figure.savefig(ROOT / 'docs/loss-over-time.png', dpi=120)
