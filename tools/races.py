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
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

import torch

import evaluate
from evaluate import WholeLoader
from model import GPT
from plaingpt.core.checkpoint import checkpoint_paths, iteration_of
from plaingpt.core.dataset import dataset_folder, open_dataset
from plaingpt.system.devices import choose_device
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


# Both programs, with the checkpoints of all evaluations kept. nanoGPT's fixed seed gets an offset.
NANOGPT = """
import runpy, sys, torch
seed, manual_seed, save = int(sys.argv.pop(1)), torch.manual_seed, torch.save
torch.manual_seed = lambda number: manual_seed(number + seed)
torch.save = lambda checkpoint, path: save(
    checkpoint, path.replace('ckpt.pt', f'{checkpoint["iter_num"]}.pt'))
sys.path.insert(0, '')
runpy.run_path('train.py', run_name='__main__')
"""
PLAINGPT = 'import sys, train; train.KEEP_NEWEST = 10**6; train.main(sys.argv[1:])'


def train_nanogpt(config, options, out, seed=0):
    """→ (Watched, {iteration: checkpoint})"""
    watched = run_and_watch(['-c', NANOGPT, str(seed), *options, '--always_save_checkpoint=True',
                             f'--out_dir={out}'], config.nanogpt)
    return watched, {iteration: f'{out}/{iteration}.pt' for _, iteration, _ in watched.curve[1:]}


def train_plaingpt(options, out):
    """→ (Watched, {iteration: checkpoint})"""
    watched = run_and_watch(['-c', PLAINGPT, *options, '--always_save_checkpoint=True',
                             f'--out_dir={out}'], ROOT)
    return watched, {iteration_of(path): path for path in checkpoint_paths(out)}


def score(checkpoint, dataset, device, block_size=0):
    """The loss of a checkpoint over the whole validation split, as evaluate.py computes it: windows
    of the model's block_size tile the split. block_size: cut the model to this context first"""
    model = GPT.from_pretrained(checkpoint).to(device)
    model.crop_block_size(block_size or model.config.block_size)
    stream = open_dataset(ROOT / dataset_folder(dataset)).split('val')
    loader = WholeLoader(stream, model.config.block_size, 8, device=device)
    return evaluate.score(model, str(checkpoint), loader, None, nullcontext())['loss']


def score_curve(watched, checkpoints, dataset, device):
    """→ Watched.curve with the scores of these checkpoints. The initial model has none."""
    return [(seconds, iteration, score(checkpoints[iteration], dataset, device))
            for seconds, iteration, _ in watched.curve if iteration in checkpoints]


def race(config, options):
    """When plainGPT reaches nanoGPT's lowest loss, and the final loss of both. After a program has
    ended, the checkpoints of its evaluations are scored over the whole validation split."""
    settings = ['config/shakespeare_char_cpu_best.py', '--device=cpu', *options]
    device = torch.device('cpu')
    subprocess.run([sys.executable, 'data/shakespeare_char/prepare.py'], cwd=config.nanogpt,
                   check=True, stdout=subprocess.DEVNULL)
    curves = {}
    for number in range(1, config.rounds + 1):
        with tempfile.TemporaryDirectory() as out:
            nanogpt, nanogpt_checkpoints = train_nanogpt(config, CPU_RECIPE[1:], f'{out}/nanoGPT')
            plaingpt, checkpoints = train_plaingpt(settings, f'{out}/plainGPT')
            nanogpt_curve = score_curve(nanogpt, nanogpt_checkpoints, 'shakespeare_char', device)
            curve = score_curve(plaingpt, checkpoints, 'shakespeare_char', device)
            _, last, final = curve[-1]
            cut = score(checkpoints[last], 'shakespeare_char', device, block_size=64)
        curves['nanoGPT', number] = nanogpt_curve
        curves['plainGPT', number] = curve
        save_curves(config, curves)
        goal = min(loss for _, _, loss in nanogpt_curve)
        reached_s = next((seconds for seconds, _, loss in curve if loss <= goal), math.nan)
        print(f'nanoGPT reaches {goal:.4f} and ends after {nanogpt.seconds:.1f} s; plainGPT is '
              f'below that after {reached_s:.1f} s, and ends at {final:.4f} after '
              f'{plaingpt.seconds:.1f} s ({cut:.4f} in windows of 64, as nanoGPT)', flush=True)


def save_curves(config, curves):
    """Write race.csv into config.save, if set. curves: {(program, round): Watched.curve}"""
    if not config.save:
        return
    lines = ['program,round,seconds,iteration,val_loss\n']
    for (program, number), points in curves.items():
        lines += [f'{program},{number},{seconds:.2f},{iteration},{loss:.4f}\n'
                  for seconds, iteration, loss in points]
    write_atomically(Path(config.save, 'race.csv'), ''.join(lines))


# -----------------------------------------------------------------------------
# on a GPU: race-gpu, equality

# for all programs: 2^16 tokens per step
GPU_SETTINGS = ['--max_iters=600', '--lr_decay_iters=600', '--eval_interval=100', '--eval_iters=8',
                '--log_interval=20', '--batch_size=64']
NANOGPT_GPU = ['config/train_gpt2.py', '--wandb_log=False', '--gradient_accumulation_steps=1',
               '--warmup_iters=60', '--learning_rate=6e-4', '--min_lr=6e-5']
PLAIN = ['config/gpt2_124m.py', '--total_batch_size=0',
         '--gradient_accumulation_steps=1', '--warmup_iters=60', '--report=False']
FAST = ['config/quickstart_gpu.py', '--total_batch_size=0',
        '--gradient_accumulation_steps=1', '--report=False']


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
    """{name: function of a seed that trains → (Watched, {iteration: checkpoint})}. out: a folder
    for all"""
    share_with_nanogpt(out / 'data', config.dataset)

    def nanogpt(seed):
        return train_nanogpt(config, [*NANOGPT_GPU, *GPU_SETTINGS, f'--dataset={out}/data',
                                      *options], out / 'nanoGPT', seed)

    def plaingpt(recipe, name, seed):
        return train_plaingpt([*recipe, *GPU_SETTINGS, f'--dataset={config.dataset}',
                               f'--seed={1337 + seed}', *options], out / name)

    return {'nanoGPT': nanogpt, 'gpt2_124m': partial(plaingpt, PLAIN, 'gpt2_124m'),
            'quickstart_gpu': partial(plaingpt, FAST, 'quickstart_gpu')}


def race_gpu(config, options):
    """Run whole programs of 600 steps one after the other: their time, the time per step, and the
    loss over the whole validation split."""
    device, _ = choose_device(config.device)
    with tempfile.TemporaryDirectory() as out:
        curves = {}
        for name, train in gpu_programs(config, options, Path(out)).items():
            watched, checkpoints = train(0)
            curves[name, 1] = score_curve(watched, checkpoints, config.dataset, device)
            save_curves(config, curves)
            print(f'{name}: loss {curves[name, 1][-1][2]:.4f} after '
                  f'{watched.seconds:.1f} s; {median(watched.step_ms):.1f} ms per step; first '
                  f'evaluation after {watched.curve[0][0]:.1f} s', flush=True)


def equality(config, options):
    """The mean difference between the losses of the plain recipe and of nanoGPT."""
    device, _ = choose_device(config.device)
    differences = []
    for seed in range(config.rounds):
        with tempfile.TemporaryDirectory() as out:
            programs = gpu_programs(config, options, Path(out))
            losses = {}
            for name in ('nanoGPT', 'gpt2_124m'):
                _, checkpoints = programs[name](seed)
                losses[name] = score(checkpoints[max(checkpoints)], config.dataset, device)
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
PANELS = (  # file in docs/results/, title, highest loss shown, x axis, y axis, {program: its label}
    ('race-cpu', 'tiny Shakespeare, two CPU cores', 3.0, 'seconds since the start of the program',
     'validation loss (nats per character)',
     {'nanoGPT': 'nanoGPT\ncontext 64\nAdamW', 'plainGPT': 'plainGPT\ncontext 256\nNorMuon'}),
    ('race-h100', 'Python source, one H100, 26 November', 5.0, 'seconds of training steps',
     'validation loss (nats per token)\nas each program estimates it',
     {'nanoGPT': 'nanoGPT', 'gpt2_124m': 'gpt2_124m',
      'gpt2_124m_fast': 'gpt2_124m_fast\n162M, NorMuon'}))


def picture(config, _):
    """Draw the races of docs/results/ side by side: docs/loss-over-time.png."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6))
    for ax, (name, title, limit, x_axis, y_axis, labels) in zip(axes, PANELS, strict=True):
        curves = {}
        with open(ROOT / f'docs/results/{name}.csv', newline='') as file:
            for row in csv.DictReader(file):
                points = curves.setdefault((row['program'], row['round']), [])
                points.append((float(row['seconds']), float(row['val_loss'])))
        longest = {program: points for (program, _), points in
                   sorted(curves.items(), key=lambda item: item[1][-1])}
        for (program, _), points in curves.items():
            seconds, losses = zip(*points, strict=True)
            color = COLORS.get(program, OTHER_COLOR)
            ax.plot(seconds, losses, '.-', color=color)
            if points is longest[program]:
                offset = -14 if program == 'gpt2_124m' else 3  # its curve is close to nanoGPT's
                ax.annotate(labels.get(program, program), (seconds[-1], losses[-1]), color=color,
                            xytext=(4, offset), textcoords='offset points', annotation_clip=False)
        ax.set(title=title, xlabel=x_axis, ylabel=y_axis, ylim=(1, limit))
        ax.spines[['top', 'right']].set_visible(False)
        ax.grid(axis='y', alpha=0.3)
    figure.tight_layout()
    figure.savefig(ROOT / 'docs/loss-over-time.png', dpi=120)
