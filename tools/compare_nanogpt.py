"""Train beside nanoGPT, on the same machine and text, in turn.

    git clone https://github.com/karpathy/nanoGPT
    python tools/compare_nanogpt.py race nanoGPT      the CPU recipes, whole processes
    python tools/compare_nanogpt.py speed nanoGPT     steps of the baby GPT, eager and compiled
                                                      (--json prints JSON)
    python tools/compare_nanogpt.py loss nanoGPT      the baby GPT's loss after 200 steps
    python tools/compare_nanogpt.py busy nanoGPT      steps of the CPU recipe, with another program

Each takes settings of train.py too, for plainGPT: --batch_size=16 --dtype=float32 --device=cpu
Needs data/shakespeare_char here and nanoGPT/data/shakespeare_char/input.txt there; speed and loss
need only the first, or another --dataset. On a GPU nanoGPT takes bfloat16, as its own train.py.
"""

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext, redirect_stdout
from itertools import product
from operator import itemgetter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import load_config
from model import GPT
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import dataset_folder, open_dataset
from plaingpt.monitoring.figures import COLOURS, cut_off_the_start
from plaingpt.system.devices import (
    autocast,
    choose_device,
    choose_dtype,
    machine_name,
    use_fast_matmul,
)
from plaingpt.system.errors import run_script
from plaingpt.system.files import ROOT, make_writable, write_atomically
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import TrainConfig

CPU = torch.device('cpu')

# nanoGPT's recipe for a CPU, from its README, "I only have a macbook"
CPU_RECIPE = [
    '--device=cpu', '--compile=False', '--eval_iters=20', '--log_interval=50', '--block_size=64',
    '--batch_size=12', '--n_layer=4', '--n_head=4', '--n_embd=128', '--max_iters=2000',
    '--lr_decay_iters=2000', '--dropout=0.0']


def run_and_watch(command, folder):
    """Run a Python script → (seconds in all, [(seconds so far, validation loss)])."""
    started, curve = time.perf_counter(), []
    process = subprocess.Popen([sys.executable, '-u', *command], cwd=folder, text=True,
                               stdout=subprocess.PIPE)
    for line in process.stdout:
        if found := re.search(r'val loss ([\d.]+)', line):
            curve.append((time.perf_counter() - started, float(found[1])))
    if process.wait():
        sys.exit(f'{" ".join(map(str, command))} failed')
    return time.perf_counter() - started, curve


def score_whole_split(model, out):
    """Loss of a trained model over all of the validation text."""
    command = [sys.executable, 'evaluate.py', model, '--dataset=shakespeare_char',
               '--tokenizer=shakespeare_char', f'--output={out}/scores.json']
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return json.loads(Path(out, 'scores.json').read_text())['results']['val']['loss']


def race(nanogpt, recipe, overrides, rounds, save):
    """Whole processes in turn: when ours reaches nanoGPT's last loss, and where both end.

    nanoGPT's loss is that of its best checkpoint over the whole validation text; ours on the way is
    that of the evaluations in training. save: a folder for race.csv, with each evaluation that a
    program printed, and loss-over-time.png; both are written anew after each round."""
    settings = [str(recipe), '--device=cpu', *overrides]
    config = load_config(TrainConfig, settings)
    dtype, _ = choose_dtype(config.dtype, CPU, config.n_embd)
    shown = [recipe.stem, *(option for option in overrides if not option.startswith('--dtype'))]
    legend = {'nanoGPT': 'nanoGPT: CPU recipe of its README, float32',
              'plainGPT': f'plainGPT: {" ".join(shown)}, {dtype}'}
    subprocess.run([sys.executable, 'data/shakespeare_char/prepare.py'], cwd=nanogpt, check=True,
                   stdout=subprocess.DEVNULL)
    shares, rows = [], []
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory() as out:
            theirs, their_curve = run_and_watch(
                ['train.py', 'config/train_shakespeare_char.py', *CPU_RECIPE, f'--out_dir={out}'],
                nanogpt)
            ours, curve = run_and_watch(['train.py', *settings, f'--out_dir={out}/ours'], ROOT)
            goal = score_whole_split(f'--init_from={out}/ckpt.pt', out)
            end = score_whole_split(f'--out_dir={out}/ours', out)
        reached = next((seconds for seconds, loss in curve if loss <= goal), None)
        shares.append(reached / theirs if reached else float('inf'))
        print(f'nanoGPT {theirs:.1f} s, val loss {goal:.4f} | plainGPT there after '
              f'{reached or float("nan"):.1f} s ({shares[-1]:.2f} of the time), ends after '
              f'{ours:.1f} s at {end:.4f}', flush=True)
        rows += [(name, number, *point) for name, points in
                 (('nanoGPT', their_curve), ('plainGPT', curve)) for point in points]
        if save:
            write_atomically(Path(save, 'race.csv'), 'program,round,seconds,val_loss\n' + ''.join(
                f'{name},{n},{seconds:.2f},{loss}\n' for name, n, seconds, loss in rows))
            draw_race(rows, legend, Path(save, 'loss-over-time.png'))
    print(f'median share of the time to the same loss: {statistics.median(shares):.2f}')


def compare_busy(nanogpt, config, rounds):
    """Milliseconds a step of the same CPU recipe, each trained by its own train.py, alone and
    beside another program that keeps a core busy. Rounds in turn; medians of steps."""
    shape = ['--log_interval=1', '--eval_interval=100000', '--eval_iters=1', '--max_iters=200']
    medians = {}
    with tempfile.TemporaryDirectory() as out:
        theirs = ['train.py', 'config/train_shakespeare_char.py', *CPU_RECIPE, *shape]
        ours = ['train.py', 'config/shakespeare_char_cpu.py', *shape, '--report=False']
        for number, busy in product(range(1, rounds + 1), (False, True)):
            for name, command, folder in (('nanoGPT', theirs, nanogpt), ('plainGPT', ours, ROOT)):
                command = [*command, f'--out_dir={out}/{name}{number}{busy}']
                with another_program() if busy else nullcontext():
                    printed = subprocess.run([sys.executable, '-u', *command], cwd=folder,
                                             capture_output=True, text=True, check=True).stdout
                times = [float(ms) for ms in re.findall(r'(?:time | )([\d.]+) ?ms', printed)]
                medians.setdefault((name, busy), []).append(statistics.median(times[100:]))
                print(f'round {number}: {name:8} {"busy " if busy else "quiet"} '
                      f'{medians[name, busy][-1]:.1f} ms a step', flush=True)
    for name in ('nanoGPT', 'plainGPT'):
        quiet, busy = (statistics.median(medians[name, busy]) for busy in (False, True))
        print(f'{name}: {quiet:.1f} ms quiet, {busy:.1f} ms busy, {busy / quiet:.1f} times')


@contextmanager
def another_program():
    """In here a program keeps one core busy."""
    process = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def draw_race(rows, legend, path):
    """Draw rows of race.csv, (program, round, seconds, loss), into a PNG: a line for each round.

    legend: {program: what the legend says of it}"""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.add_subplot()
    for (program, label), colour in zip(legend.items(), COLOURS[1::-1], strict=True):
        for number in sorted({row[1] for row in rows}):
            xs, ys = zip(*(row[2:] for row in rows if row[:2] == (program, number)), strict=True)
            axes.plot(xs, ys, '-o', ms=3.5, lw=1.2, color=colour, label=label)
            label = None  # once for all rounds
    cut_off_the_start(axes)
    axes.set_title(f'Validation loss over time, tiny Shakespeare\n{machine_name(CPU)}',
                   fontsize=11, loc='left')
    axes.set_xlabel('seconds since the program was started')
    axes.set_ylabel('validation loss, nats a character')
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(loc='upper right', framealpha=0.8, edgecolor='none')
    figure.savefig(path, dpi=110)


class Trainer:
    """A model with its optimizer, trained by the same plain loop whoever wrote the model."""

    def __init__(self, model, optimizer, config, compile, context):
        self.raw, self.optimizer, self.config, self.context = model, optimizer, config, context
        self.model = torch.compile(model) if compile else model

    def step(self, idx, targets, it):
        """→ seconds"""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group['lr'] = get_lr(it, self.config) * group.get('lr_scale', 1.0)
        with self.context:
            loss = self.model(idx, targets)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.raw.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - started

    @torch.no_grad()
    def evaluate(self, batches):
        self.raw.eval()
        with self.context:
            losses = [self.raw(idx, targets)[1].item() for idx, targets in batches]
        self.raw.train()
        return statistics.mean(losses)


def our_trainer(config, vocab_size, compile):
    torch.manual_seed(0)
    device, _ = choose_device(config.device)
    model = GPT(config.gpt_config(vocab_size)).to(device)
    model.loss_chunk_tokens = config.loss_chunk_tokens
    context = autocast(device, choose_dtype(config.dtype, device, config.n_embd)[0])
    return Trainer(model, build_optimizer(model, config, device.type), config, compile, context)


def load_nanogpt(folder, gpt):
    """→ nanoGPT's model, with the shape and the weights of a GPT of ours."""
    spec = importlib.util.spec_from_file_location('nanogpt_model', Path(folder, 'model.py'))
    module = sys.modules['nanogpt_model'] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {name: getattr(gpt.config, name) for name in vars(module.GPTConfig())}
    model = module.GPT(module.GPTConfig(**shape))
    weights = {name: p[:gpt.config.vocab_size] if 'wte' in name or 'lm_head' in name else p
               for name, p in gpt.state_dict().items()}
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    return model


def make_trainers(nanogpt, config, compile):
    """→ {name: Trainer}, both with the same weights, and the loaders of both splits."""
    device, _ = choose_device(config.device)
    use_fast_matmul()
    dataset = open_dataset(dataset_folder(config.dataset))
    ours = our_trainer(config, dataset.vocab_size, compile)
    model = load_nanogpt(nanogpt, ours.raw).to(device)
    optimizer = model.configure_optimizers(config.weight_decay, config.learning_rate,
                                           (config.beta1, config.beta2), device.type)
    context = autocast(device, 'bfloat16') if device.type == 'cuda' else nullcontext()
    theirs = Trainer(model, optimizer, config, compile, context)
    loaders = [BatchLoader(dataset.split(split), config.block_size, config.batch_size,
                           device=device) for split in ('train', 'val')]
    return {'nanoGPT': theirs, 'plainGPT': ours}, loaders


def compare_speed(nanogpt, config, rounds):
    """Seconds a step, in turn; the better of eager and compiled counts → a row for each."""
    rows = []
    for compile in (False, True):
        both, (loader, _) = make_trainers(nanogpt, config, compile)
        times = {name: [] for name in both}
        for it in range(rounds + 1):
            idx, targets = loader.train_batch(it, 0)
            for name, trainer in both.items():
                times[name].append(trainer.step(idx, targets, it))
        for name, seconds in times.items():
            median = statistics.median(seconds[1:])  # the first compiles, and warms up
            rows.append({'program': name, 'compile': compile, 'step_ms': 1e3 * median,
                         'tokens_per_s': idx.numel() / median})
            print(f'{name:9} {"compiled" if compile else "eager":9} {median * 1e3:.0f} ms a step, '
                  f'{idx.numel() / median:,.0f} tokens/s', flush=True)
    best = {row['program']: row['step_ms']
            for row in sorted(rows, key=itemgetter('step_ms'), reverse=True)}
    print(f'plainGPT {best["nanoGPT"] / best["plainGPT"]:.2f} times as fast')
    return rows


def compare_loss(nanogpt, config, rounds):
    """The validation loss of both up to step 200, on the same batches from the same weights.

    With dropout each round draws other masks: a difference between the programs has to be compared
    with the difference between two rounds of one program."""
    ends = {}
    for seed in range(rounds):
        trainers, (loader, val) = make_trainers(nanogpt, config, False)
        batches = [val.eval_batch(starts) for starts in val.eval_batches(config.eval_sequences())]
        for it in range(200):
            batch = loader.train_batch(it, 0)
            for trainer in trainers.values():
                torch.manual_seed(200 * seed + it)
                trainer.step(*batch, it)
            if it % 50 == 49:
                losses = {name: trainer.evaluate(batches) for name, trainer in trainers.items()}
                print(f'round {seed + 1}, step {it + 1}: ' + ', '.join(
                    f'{name} {value:.4f}' for name, value in losses.items()), flush=True)
        for name, value in losses.items():
            ends.setdefault(name, []).append(value)
    for name, values in ends.items():
        print(f'{name}: {statistics.mean(values):.4f} after 200 steps, '
              f'{statistics.mean(values) - statistics.mean(ends["nanoGPT"]):+.4f}; the rounds are '
              f'{max(values) - min(values):.4f} apart')


def parse_args(argv):
    """→ (arguments, settings of train.py)"""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=('race', 'speed', 'loss', 'busy'))
    parser.add_argument('nanogpt', help='folder of nanoGPT')
    parser.add_argument('--config', help='of ours (default: config/shakespeare_char.py, and for '
                                         'race config/shakespeare_char_cpu_fast.py)')
    parser.add_argument('--rounds', type=int, default=3, help='race, loss, busy: runs; speed: '
                                                              'steps (default: 3)')
    parser.add_argument('--json', action='store_true', help='speed: print JSON')
    parser.add_argument('--save', help='race: a folder for race.csv and loss-over-time.png')
    args, overrides = parser.parse_known_args(argv)
    if args.save and args.what != 'race':
        parser.error('--save is for race alone')
    if args.json and args.what != 'speed':
        parser.error('--json is for speed alone')
    return args, overrides


def main(argv):
    args, overrides = parse_args(argv)
    if args.save:
        make_writable(args.save, 'save')
    fast = '_cpu_fast' if args.what == 'race' else ''
    recipe = Path(args.config or ROOT / 'config' / f'shakespeare_char{fast}.py').resolve()
    if args.what == 'race':
        race(args.nanogpt, recipe, overrides, args.rounds, args.save)
        return
    config = load_config(TrainConfig, [str(recipe), *overrides])
    compare = {'speed': compare_speed, 'loss': compare_loss, 'busy': compare_busy}[args.what]
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        rows = compare(args.nanogpt, config, args.rounds)
    if args.json:
        print(json.dumps({'rows': rows}, indent=1))


if __name__ == '__main__':
    run_script(main)
