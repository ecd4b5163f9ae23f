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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import load_config
from model import GPT
from plaingpt.corpus.batches import BatchLoader
from plaingpt.corpus.dataset import open_dataset
from plaingpt.system import cpu_kernels as cpu
from plaingpt.system.devices import autocast, choose_dtype
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import TrainConfig

# The README of nanoGPT, "I only have a macbook"
RECIPE = [
    '--device=cpu', '--compile=False', '--eval_iters=20', '--log_interval=50', '--block_size=64',
    '--batch_size=12', '--n_layer=4', '--n_head=4', '--n_embd=128', '--max_iters=2000',
    '--lr_decay_iters=2000', '--dropout=0.0']


def watched(command, folder):
    """Run it → (seconds in all, [(seconds so far, validation loss)])."""
    started, curve = time.perf_counter(), []
    process = subprocess.Popen([sys.executable, '-u', *command], cwd=folder, text=True,
                               stdout=subprocess.PIPE)
    for line in process.stdout:
        if found := re.search(r'val loss ([\d.]+)', line):
            curve.append((time.perf_counter() - started, float(found[1])))
    if process.wait():
        sys.exit(f'{" ".join(map(str, command))} failed')
    return time.perf_counter() - started, curve


def whole_split(model, out):
    """Loss of a trained model over all of the validation text."""
    command = [sys.executable, 'evaluate.py', model, '--dataset=shakespeare_char',
               '--tokenizer=shakespeare_char', f'--output={out}/scores.json']
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return json.loads(Path(out, 'scores.json').read_text())['results']['val']['loss']


def race(nanogpt, config, rounds):
    """Whole processes in turn: when ours reaches nanoGPT's last loss, and where both end.

    nanoGPT's is its best checkpoint's, over the whole validation text; ours on the way is that of
    the evaluations in training."""
    subprocess.run([sys.executable, 'data/shakespeare_char/prepare.py'], cwd=nanogpt, check=True,
                   stdout=subprocess.DEVNULL)
    shares = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as out:
            theirs, _ = watched(['train.py', 'config/train_shakespeare_char.py', *RECIPE,
                                 f'--out_dir={out}'], nanogpt)
            ours, curve = watched(['train.py', config, f'--out_dir={out}/ours'], ROOT)
            goal = whole_split(f'--init_from={out}/ckpt.pt', out)
            end = whole_split(f'--out_dir={out}/ours', out)
        reached = next((seconds for seconds, loss in curve if loss <= goal), None)
        shares.append(reached / theirs if reached else float('inf'))
        print(f'nanoGPT {theirs:.1f} s, val loss {goal:.4f} | plainGPT there after '
              f'{reached or float("nan"):.1f} s ({shares[-1]:.2f} of the time), ends after '
              f'{ours:.1f} s at {end:.4f}', flush=True)
    print(f'median share of the time to the same loss: {statistics.median(shares):.2f}')


def two_models(nanogpt, config, vocab_size):
    """→ nanoGPT's model and ours, with the same weights."""
    spec = importlib.util.spec_from_file_location('nanogpt_model', Path(nanogpt) / 'model.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    ours = GPT(config.gpt_config(vocab_size))
    theirs = module.GPT(module.GPTConfig(
        block_size=config.block_size, vocab_size=vocab_size, n_layer=config.n_layer,
        n_head=config.n_head, n_embd=config.n_embd, dropout=config.dropout, bias=config.bias))
    weights = {name: p[:vocab_size] if 'wte' in name or 'lm_head' in name else p
               for name, p in ours.state_dict().items()}
    unknown = theirs.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    return theirs, ours


class Trainer:
    def __init__(self, model, config, compile, dtype):
        self.raw, self.config = model, config
        self.model = torch.compile(model) if compile else model
        self.context = autocast(torch.device('cpu'), dtype) if dtype else nullcontext()
        self.optimizer = model.configure_optimizers(
            config.weight_decay, config.learning_rate, (config.beta1, config.beta2), 'cpu')

    def step(self, idx, targets, it=0):
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


def trainers(nanogpt, config, compile):
    dataset = open_dataset(ROOT / 'data' / 'shakespeare_char')
    theirs, ours = two_models(nanogpt, config, dataset.vocab_size)
    ours.loss_chunk_tokens = config.loss_chunk_tokens
    dtype, _ = choose_dtype(config.dtype, torch.device('cpu'), config.n_embd)
    loaders = [BatchLoader(dataset.split(split), config.block_size, config.batch_size)
               for split in ('train', 'val')]
    return {'nanoGPT': Trainer(theirs, config, compile, None),
            'plainGPT': Trainer(ours, config, compile, dtype)}, loaders


def speed(nanogpt, config, rounds):
    """Seconds a step, in turn; the better of eager and compiled counts."""
    best = {}
    for compile in (False, True):
        both, (loader, _) = trainers(nanogpt, config, compile)
        times = {name: [] for name in both}
        for step in range(rounds + 1):
            idx, targets = loader.train_batch(step, 0)
            for name, trainer in both.items():
                times[name].append(trainer.step(idx, targets, step))
        for name, seconds in times.items():
            median = statistics.median(seconds[1:])  # the first compiles, and warms up
            best[name] = min(best.get(name, median), median)
            print(f'{name:9} {"compiled" if compile else "eager":9} {median * 1e3:.0f} ms a step, '
                  f'{idx.numel() / median:,.0f} tokens/s', flush=True)
    print(f'plainGPT {best["nanoGPT"] / best["plainGPT"]:.2f} times as fast')


@contextmanager
def torch_dropout():
    """In here our model drops out by torch, so that one seed gives it nanoGPT's masks."""
    ours = cpu.attention_gains, cpu.Dropout.forward
    cpu.attention_gains, cpu.Dropout.forward = lambda q: False, torch.nn.Dropout.forward
    try:
        yield
    finally:
        cpu.attention_gains, cpu.Dropout.forward = ours


def loss(nanogpt, config, rounds):
    """The validation loss of both up to step 200, on the same batches from the same weights.

    With dropout each round draws other masks, and so does each program: how far apart two rounds of
    one program lie is what a difference between the programs has to be seen against. A third
    trainer is ours with nanoGPT's masks: what is left between these two is the precision."""
    ends = {}
    for seed in range(rounds):
        both, (loader, val) = trainers(nanogpt, config, False)
        if config.dropout:
            both["plainGPT, nanoGPT's masks"] = trainers(nanogpt, config, False)[0]['plainGPT']
        batches = [val.eval_batch(starts) for starts in val.eval_batches(config.eval_iters)]
        for it in range(200):
            batch = loader.train_batch(it, 0)
            for name, trainer in both.items():
                torch.manual_seed(200 * seed + it)
                with torch_dropout() if 'masks' in name else nullcontext():
                    trainer.step(*batch, it)
            if it % 50 == 49:
                losses = {name: trainer.evaluate(batches) for name, trainer in both.items()}
                print(f'round {seed + 1}, step {it + 1}: ' + ', '.join(
                    f'{name} {value:.4f}' for name, value in losses.items()), flush=True)
        for name, value in losses.items():
            ends.setdefault(name, []).append(value)
    for name, values in ends.items():
        print(f'{name}: {statistics.mean(values):.4f} after 200 steps, '
              f'{statistics.mean(values) - statistics.mean(ends["nanoGPT"]):+.4f}; the rounds are '
              f'{max(values) - min(values):.4f} apart')


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=('race', 'speed', 'loss'))
    parser.add_argument('nanogpt', help='folder of nanoGPT')
    parser.add_argument('--config', default=None)
    parser.add_argument('--rounds', type=int, default=3)
    args, overrides = parser.parse_known_args()
    if args.what == 'race':
        race(args.nanogpt, args.config or 'config/shakespeare_char_cpu_fast.py', args.rounds)
        return
    config = load_config(TrainConfig, [args.config or 'config/shakespeare_char.py', *overrides])
    {'speed': speed, 'loss': loss}[args.what](args.nanogpt, config, args.rounds)


if __name__ == '__main__':
    main()
