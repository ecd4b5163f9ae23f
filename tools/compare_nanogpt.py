"""Train beside nanoGPT, on the same machine and text, in turn.

    git clone https://github.com/karpathy/nanoGPT
    python tools/compare_nanogpt.py race nanoGPT      the CPU recipes, whole processes
    python tools/compare_nanogpt.py speed nanoGPT     steps of the baby GPT, eager and compiled
    python tools/compare_nanogpt.py loss nanoGPT      the baby GPT's loss after 200 steps

speed and loss take settings of train.py too: --batch_size=16 --dropout=0.0

Needs data/shakespeare_char here and nanoGPT/data/shakespeare_char/input.txt there.
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
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import load_config
from model import GPT
from plaingpt.corpus.batches import BatchLoader
from plaingpt.corpus.dataset import open_dataset
from plaingpt.system import cpu_kernels
from plaingpt.system.devices import autocast, choose_dtype
from plaingpt.system.files import ROOT
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import TrainConfig

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


def race(nanogpt, config, rounds):
    """Whole processes in turn: when ours reaches nanoGPT's last loss, and where both end.

    nanoGPT's loss is that of its best checkpoint over the whole validation text; ours on the way is
    that of the evaluations in training."""
    subprocess.run([sys.executable, 'data/shakespeare_char/prepare.py'], cwd=nanogpt, check=True,
                   stdout=subprocess.DEVNULL)
    shares = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as out:
            theirs, _ = run_and_watch(['train.py', 'config/train_shakespeare_char.py', *CPU_RECIPE,
                                       f'--out_dir={out}'], nanogpt)
            ours, curve = run_and_watch(['train.py', config, f'--out_dir={out}/ours'], ROOT)
            goal = score_whole_split(f'--init_from={out}/ckpt.pt', out)
            end = score_whole_split(f'--out_dir={out}/ours', out)
        reached = next((seconds for seconds, loss in curve if loss <= goal), None)
        shares.append(reached / theirs if reached else float('inf'))
        print(f'nanoGPT {theirs:.1f} s, val loss {goal:.4f} | plainGPT there after '
              f'{reached or float("nan"):.1f} s ({shares[-1]:.2f} of the time), ends after '
              f'{ours:.1f} s at {end:.4f}', flush=True)
    print(f'median share of the time to the same loss: {statistics.median(shares):.2f}')


class Trainer:
    """A model with its optimizer, trained by the same plain loop whoever wrote the model."""

    def __init__(self, model, optimizer, config, compile, context):
        self.raw, self.optimizer, self.config, self.context = model, optimizer, config, context
        self.model = torch.compile(model) if compile else model

    def step(self, idx, targets, it):
        """→ seconds"""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group['lr'] = get_lr(it, self.config)
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
    model = GPT(config.gpt_config(vocab_size))
    model.loss_chunk_tokens = config.loss_chunk_tokens
    cpu = torch.device('cpu')
    context = autocast(cpu, choose_dtype(config.dtype, cpu, config.n_embd)[0])
    return Trainer(model, build_optimizer(model, config, 'cpu'), config, compile, context)


def nanogpt_trainer(folder, weights, config, vocab_size, compile):
    """weights: a state dict of our model, to start from the same place"""
    spec = importlib.util.spec_from_file_location('nanogpt_model', Path(folder) / 'model.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.GPT(module.GPTConfig(
        block_size=config.block_size, vocab_size=vocab_size, n_layer=config.n_layer,
        n_head=config.n_head, n_embd=config.n_embd, dropout=config.dropout, bias=config.bias))
    weights = {name: p[:vocab_size] if 'wte' in name or 'lm_head' in name else p
               for name, p in weights.items()}
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    optimizer = model.configure_optimizers(config.weight_decay, config.learning_rate,
                                           (config.beta1, config.beta2), 'cpu')
    return Trainer(model, optimizer, config, compile, nullcontext())


def make_trainers(nanogpt, config, compile):
    """→ {name: Trainer}, both with the same weights, and the loaders of both splits."""
    dataset = open_dataset(ROOT / 'data' / 'shakespeare_char')
    ours = our_trainer(config, dataset.vocab_size, compile)
    theirs = nanogpt_trainer(nanogpt, ours.raw.state_dict(), config, dataset.vocab_size, compile)
    loaders = [BatchLoader(dataset.split(split), config.block_size, config.batch_size)
               for split in ('train', 'val')]
    return {'nanoGPT': theirs, 'plainGPT': ours}, loaders


def compare_speed(nanogpt, config, rounds):
    """Seconds a step, in turn; the better of eager and compiled counts."""
    best = {}
    for compile in (False, True):
        both, (loader, _) = make_trainers(nanogpt, config, compile)
        times = {name: [] for name in both}
        for it in range(rounds + 1):
            idx, targets = loader.train_batch(it, 0)
            for name, trainer in both.items():
                times[name].append(trainer.step(idx, targets, it))
        for name, seconds in times.items():
            median = statistics.median(seconds[1:])  # the first compiles, and warms up
            best[name] = min(best.get(name, median), median)
            print(f'{name:9} {"compiled" if compile else "eager":9} {median * 1e3:.0f} ms a step, '
                  f'{idx.numel() / median:,.0f} tokens/s', flush=True)
    print(f'plainGPT {best["nanoGPT"] / best["plainGPT"]:.2f} times as fast')


@contextmanager
def torch_dropout():
    """In here our model drops out by torch, so that one seed gives it nanoGPT's masks."""
    ours = cpu_kernels.attention_gains, cpu_kernels.Dropout.forward
    cpu_kernels.attention_gains = lambda q: False
    cpu_kernels.Dropout.forward = torch.nn.Dropout.forward
    try:
        yield
    finally:
        cpu_kernels.attention_gains, cpu_kernels.Dropout.forward = ours


def compare_loss(nanogpt, config, rounds):
    """The validation loss of both up to step 200, on the same batches from the same weights.

    With dropout each round draws other masks, and so does each program: a difference between the
    programs has to be compared with the difference between two rounds of one program. A third
    trainer is ours with nanoGPT's masks: it differs from nanoGPT by the precision alone."""
    ends = {}
    for seed in range(rounds):
        trainers, (loader, val) = make_trainers(nanogpt, config, False)
        if config.dropout:
            trainers["plainGPT, nanoGPT's masks"] = our_trainer(
                config, trainers['plainGPT'].raw.config.vocab_size, False)
        batches = [val.eval_batch(starts) for starts in val.eval_batches(config.eval_iters)]
        for it in range(200):
            batch = loader.train_batch(it, 0)
            for name, trainer in trainers.items():
                torch.manual_seed(200 * seed + it)
                with torch_dropout() if 'masks' in name else nullcontext():
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


def parse_args(argv=None):
    """→ (arguments, settings of train.py)"""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=('race', 'speed', 'loss'))
    parser.add_argument('nanogpt', help='folder of nanoGPT')
    parser.add_argument('--config', help='of ours (default: config/shakespeare_char.py, and for '
                                         'race config/shakespeare_char_cpu_fast.py)')
    parser.add_argument('--rounds', type=int, default=3, help='race, loss: runs of each; speed: '
                                                              'steps (default: 3)')
    return parser.parse_known_args(argv)


def main():
    args, overrides = parse_args()
    if args.what == 'race':
        race(args.nanogpt, args.config or 'config/shakespeare_char_cpu_fast.py', args.rounds)
        return
    recipe = args.config or ROOT / 'config' / 'shakespeare_char.py'
    config = load_config(TrainConfig, [str(recipe), *overrides])
    {'speed': compare_speed, 'loss': compare_loss}[args.what](args.nanogpt, config, args.rounds)


if __name__ == '__main__':
    main()
