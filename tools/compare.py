"""Compare with the programs that people know, on the same machine, in turn.

    python tools/compare.py race --nanogpt=FOLDER     the CPU recipes, whole processes
    python tools/compare.py speed --nanogpt=FOLDER    steps of the baby GPT, eager and compiled
    python tools/compare.py loss --nanogpt=FOLDER     the baby GPT's loss after 200 steps
    python tools/compare.py prepare                   beside nanoGPT's recipe and tiktoken
    python tools/compare.py generation                beside transformers (and --nanogpt=FOLDER)

race, speed and loss take settings of train.py too, for plainGPT: --batch_size=16
--dtype=float32. They need data/shakespeare_char here, and race nanoGPT's text there. On a GPU
nanoGPT takes bfloat16, as its own train.py.
"""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.data.batches import BatchLoader
from plaingpt.data.dataset import dataset_folder, open_dataset
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.experiments.tables import markdown
from plaingpt.inference.generation import CompiledStep, generate
from plaingpt.inference.hf_export import write_hf
from plaingpt.inference.weight_layout import prepare_for_generation
from plaingpt.monitoring.drawing import COLOURS, GREY, Line, Panel, save_figure
from plaingpt.system.devices import (
    autocast,
    choose_device,
    machine_name,
    synchronize,
    use_fast_matmul,
)
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import ROOT, make_writable, write_atomically
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import TrainConfig


@dataclass
class CompareConfig(TrainConfig):
    # comparison
    nanogpt: str = ''  # nanoGPT's folder
    rounds: int = 3  # runs of each program; speed: steps
    json: bool = False  # speed, generation: print JSON
    save: str = ''  # race: a folder for race.csv and loss-over-time.png
    megabytes: int = 500  # prepare: of text
    prompt_tokens: int = 64  # generation: tokens of the prompt
    max_new_tokens: int = 256  # generation: tokens to generate
    shapes: str = '124M,baby'  # generation: 124M, baby (10.7M), tiny (0.03M)


# nanoGPT's recipe for a CPU, from its README, "I only have a macbook"
CPU_RECIPE = [
    'train.py', 'config/train_shakespeare_char.py', '--device=cpu', '--compile=False',
    '--eval_iters=20', '--log_interval=50', '--block_size=64', '--batch_size=12', '--n_layer=4',
    '--n_head=4', '--n_embd=128', '--max_iters=2000', '--lr_decay_iters=2000', '--dropout=0.0']


ON_A100 = 1.4697  # validation loss of its GPU recipe, from the same README


# -----------------------------------------------------------------------------
# whole processes: race


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


def score_whole_split(model, output, dataset='shakespeare_char', score='loss',
                      checkpoint='latest'):
    """A score of a trained model over all of the validation text. output: a new file"""
    command = [sys.executable, 'evaluate.py', model, f'--checkpoint={checkpoint}',
               f'--dataset={dataset}', f'--tokenizer={dataset}', f'--output={output}']
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return json.loads(Path(output).read_text())['results']['val'][score]


def race(config, options):
    """When ours reaches nanoGPT's last loss, and where both end. nanoGPT's loss is that of its best
    checkpoint over the whole validation text; ours on the way is that of its evaluations."""
    settings = ['config/shakespeare_char_cpu_best.py', '--device=cpu', *options]
    subprocess.run([sys.executable, 'data/shakespeare_char/prepare.py'], cwd=config.nanogpt,
                   check=True, stdout=subprocess.DEVNULL)
    shares, rows = [], []
    for number in range(1, config.rounds + 1):
        with tempfile.TemporaryDirectory() as out:
            theirs, their_curve = run_and_watch([*CPU_RECIPE, f'--out_dir={out}'], config.nanogpt)
            ours, curve = run_and_watch(['train.py', *settings, f'--out_dir={out}/ours'], ROOT)
            goal = score_whole_split(f'--init_from={out}/ckpt.pt', f'{out}/goal.json')
            end = score_whole_split(f'--out_dir={out}/ours', f'{out}/end.json')
        reached = next((seconds for seconds, loss in curve if loss <= goal), float('nan'))
        shares.append(reached / theirs)
        print(f'nanoGPT {theirs:.1f} s, val loss {goal:.4f} | plainGPT there after {reached:.1f} s '
              f'({shares[-1]:.2f} of the time), ends after {ours:.1f} s at {end:.4f}', flush=True)
        rows += [(name, number, *point) for name, points in
                 (('nanoGPT', their_curve), ('plainGPT', curve)) for point in points]
        if config.save:
            write_atomically(Path(config.save, 'race.csv'), 'program,round,seconds,val_loss\n'
                             + ''.join(f'{name},{n},{seconds:.2f},{loss}\n'
                                       for name, n, seconds, loss in rows))
            draw_race(rows, Path(config.save, 'loss-over-time.png'),
                      machine_name(torch.device('cpu')))
    print(f'median share of the time to the same loss: {median(shares):.2f}')


def draw_race(rows, path, machine):
    """Draw rows of race.csv, (program, round, seconds, loss), into a PNG: a line for each round."""
    curves = {}
    for program, number, *point in rows:
        curves.setdefault((program, number), []).append(point)
    lines = [Line(*zip(*points, strict=True), program if number == 1 else '',
                  COLOURS[program == 'nanoGPT'], style={'marker': 'o'})
             for (program, number), points in curves.items()]
    seconds, goal = curves['nanoGPT', 1][-1]
    end = max(points[-1][0] for points in curves.values())
    lines.append(Line([0, end], [ON_A100] * 2, 'nanoGPT, A100', GREY, style={'ls': '--'}))
    reached = next((at for at, loss in curves['plainGPT', 1] if loss <= goal), math.inf)
    save_figure([Panel(
        f'nanoGPT ends at {goal:.2f} after {seconds:.0f} s; plainGPT is below that after '
        f'{reached:.0f} s', lines, f'Validation loss over time, tiny Shakespeare, {machine}',
        'seconds since the program was started', 'loss, nats a character')], path)


# -----------------------------------------------------------------------------
# the same loop in one process: speed, loss


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
        return mean(losses)


def our_trainer(config, vocab_size, compile):
    torch.manual_seed(0)
    device, _ = choose_device(config.device)
    shape = config.gpt_config(vocab_size)
    model = GPT(shape).to(device)
    model.loss_chunk_tokens = config.loss_chunk_tokens
    context = autocast(device, choose_training_dtype(config, shape, device)[0])
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


def make_trainers(config, compile):
    """→ {name: Trainer}, both with the same weights, and the loaders of both splits."""
    device, _ = choose_device(config.device)
    use_fast_matmul()
    dataset = open_dataset(dataset_folder(config.dataset))
    ours = our_trainer(config, dataset.vocab_size, compile)
    model = load_nanogpt(config.nanogpt, ours.raw).to(device)
    optimizer = model.configure_optimizers(config.weight_decay, config.learning_rate,
                                           (config.beta1, config.beta2), device.type)
    context = autocast(device, 'bfloat16') if device.type == 'cuda' else nullcontext()
    loaders = [BatchLoader(dataset.split(split), config.block_size, config.batch_size,
                           device=device) for split in ('train', 'val')]
    return {'nanoGPT': Trainer(model, optimizer, config, compile, context),
            'plainGPT': ours}, loaders


def speed(config, _):
    """Seconds a step, in turn → a row for each program, eager and compiled."""
    rows = []
    for compile in (False, True):
        both, (loader, _) = make_trainers(config, compile)
        times = {name: [] for name in both}
        for it in range(config.rounds + 1):
            idx, targets = loader.train_batch(it, 0)
            for name, trainer in both.items():
                times[name].append(trainer.step(idx, targets, it))
        for name, seconds in times.items():
            step_s = median(seconds[1:])  # the first compiles, and warms up
            rows.append({'program': name, 'compile': compile, 'step_ms': 1e3 * step_s,
                         'tokens_per_s': idx.numel() / step_s})
            print(f'{name:9} {"compiled" if compile else "eager":9} {step_s * 1e3:.0f} ms a step, '
                  f'{idx.numel() / step_s:,.0f} tokens/s', flush=True)
    return rows


def loss(config, _):
    """The validation loss of both up to step 200, on the same batches from the same weights. With
    dropout each round draws other masks: a difference between the programs has to be compared with
    the difference between two rounds of one program."""
    ends = {'nanoGPT': [], 'plainGPT': []}
    for seed in range(config.rounds):
        trainers, (loader, val) = make_trainers(config, False)
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
            ends[name].append(value)
    for name, values in ends.items():
        print(f'{name}: {mean(values):.4f} after 200 steps, the rounds are '
              f'{max(values) - min(values):.4f} apart')


# -----------------------------------------------------------------------------
# prepare


RECIPE = '''
import sys, numpy as np, tiktoken
from datasets import load_dataset
folder, out, cores = sys.argv[1], sys.argv[2], int(sys.argv[3])
encoding = tiktoken.get_encoding('gpt2')

def process(row):
    ids = encoding.encode_ordinary(row['text'])
    ids.append(encoding.eot_token)
    return {'ids': ids, 'len': len(ids)}

rows = load_dataset(folder, split='train', num_proc=cores, cache_dir=out + '/cache')
splits = rows.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
for split, rows in splits.map(process, remove_columns=['text'], num_proc=cores).items():
    length = int(np.sum(rows['len'], dtype=np.uint64))
    tokens = np.memmap(f'{out}/{split}.bin', dtype=np.uint16, mode='w+', shape=(length,))
    at, parts = 0, min(1024, len(rows))
    for part in range(parts):
        batch = rows.shard(num_shards=parts, index=part, contiguous=True).with_format('numpy')
        ids = np.concatenate(batch['ids'])
        tokens[at:at + len(ids)] = ids
        at += len(ids)
    tokens.flush()
'''

ALONE = '''
import sys, time, pyarrow.parquet, tiktoken
texts = pyarrow.parquet.read_table(sys.argv[1])['text'].to_pylist()
encoding = tiktoken.get_encoding('gpt2')
encoding.encode_ordinary('warm')
start = time.perf_counter()
encoding.encode_ordinary_batch(texts, num_threads=int(sys.argv[2]))
print(time.perf_counter() - start)
'''


def write_corpus(folder, megabytes):
    """A Parquet file of real text: the source of Python and of all installed packages, in parts as
    long as a web page. A number in front makes repeated parts differ."""
    import pyarrow
    import pyarrow.parquet
    paths = [path for name in ('stdlib', 'purelib')
             for path in sorted(Path(sysconfig.get_paths()[name]).rglob('*.py'))]
    texts, size = [], 0
    for number, path in enumerate(cycle(paths)):
        text = path.read_bytes().decode('utf-8', 'ignore')
        texts += [f'{number} {text[i:i + 5000]}' for i in range(0, len(text), 5000)]
        size += len(text)
        if size >= megabytes * 1e6:
            break
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({'text': texts}), folder / 'train.parquet',
                                row_group_size=1000)


def measure(*command):
    """Run a Python command → (seconds, most memory, its output). Memory is that of the process and
    its descendants, whose shared pages count once."""
    import psutil
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile('w+') as out:
        process = psutil.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=out,
                               stderr=subprocess.STDOUT)
        while process.poll() is None:
            memory = 0
            try:
                for one in (process, *process.children(recursive=True)):
                    memory += one.memory_full_info().pss
            except psutil.Error:  # it ended meanwhile
                pass
            peak = max(peak, memory)
            time.sleep(0.1)
        out.seek(0)
        if process.returncode:
            sys.exit(out.read())
        return time.perf_counter() - started, peak, out.read()


def prepare(config, _):
    """Text → GPT-2 tokens on the same cores: the recipe that nanoGPT's openwebtext/prepare.py made
    known, prepare.py, and tiktoken.encode_ordinary_batch alone on texts in memory."""
    cores = len(os.sched_getaffinity(0))
    times = {'recipe of nanoGPT': [], 'prepare.py': [], 'tiktoken alone': []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, 'corpus')
        write_corpus(corpus, config.megabytes)
        for i in range(config.rounds):
            theirs, ours = Path(folder, f'recipe-{i}'), Path(folder, f'prepare-{i}')
            theirs.mkdir()
            seconds, recipe_peak, _ = measure('-c', RECIPE, corpus, theirs, cores)
            times['recipe of nanoGPT'].append(seconds)
            printed = measure('-c', ALONE, corpus, cores)[2]
            times['tiktoken alone'].append(float(printed.split()[-1]))
            seconds, peak, _ = measure('prepare.py', 'hf', f'--path={corpus}',
                                       '--val_fraction=0.0005', f'--data_dir={ours}')
            times['prepare.py'].append(seconds)
        tokens, same = (sum(path.stat().st_size for path in place.glob('*.bin')) // 2
                        for place in (ours, theirs))
    if tokens != same:
        sys.exit(f'{tokens:,} tokens, but {same:,} by the recipe')
    print(f'{config.megabytes} MB of text, {cores} cores, most memory: prepare.py '
          f'{peak / 1e6:,.0f} MB, the recipe {recipe_peak / 1e6:,.0f} MB')
    for name, seconds in times.items():
        print(f'{median(seconds):8.2f} s {tokens / median(seconds) / 1e6:6.2f}M tokens/s  {name}  '
              f'({", ".join(f"{t:.2f}" for t in seconds)})')


# -----------------------------------------------------------------------------
# generation

SHAPES = {'124M': GPTConfig(), 'baby': GPTConfig(256, 65, 6, 6, 384, bias=False),
          'tiny': GPTConfig(128, 65, 2, 2, 32)}


def build_generators(shape, device, config, batch, folder):
    """→ {name: function that generates}, tokens in each row. All have the same weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = GPT(shape).eval()
    write_hf(folder, model, ByteTokenizer(), '')
    prompt = torch.randint(0, shape.vocab_size, (batch, config.prompt_tokens))
    n = min(config.max_new_tokens, shape.block_size - config.prompt_tokens)
    sampling = GenerationConfig(max_new_tokens=n, min_new_tokens=n, do_sample=True, top_k=200,
                                temperature=0.8, pad_token_id=0)
    found = {}
    for dtype in ('float32', 'bfloat16'):
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        theirs.to(device).eval()
        found[f'transformers {dtype}'] = lambda theirs=theirs: theirs.generate(
            prompt.to(device), attention_mask=torch.ones_like(prompt).to(device),
            generation_config=sampling)
        ours = deepcopy(model).to(device)
        context = prepare_for_generation(ours, device, dtype)

        def ours_generates(ours=ours, context=context, compiled=None):
            with context:
                generate(ours, prompt.tolist(), n, temperature=0.8, top_k=200, compiled=compiled)
        found[f'plainGPT {dtype}'] = ours_generates
        if device.type == 'cuda' and dtype == 'bfloat16':  # the round that compiles is not the best
            found[f'plainGPT {dtype} compiled'] = partial(ours_generates,
                                                          compiled=CompiledStep(ours))
    if config.nanogpt and batch == 1:  # it is slow, since it has no cache
        slow = load_nanogpt(config.nanogpt, model).eval().to(device)
        found['nanoGPT float32'] = lambda: slow.generate(
            prompt.to(device), n, temperature=0.8, top_k=min(200, shape.vocab_size))
    return found, n


def generation(config, _):
    """The best time of each program, reading the prompt included → a row for each."""
    device, _ = choose_device(config.device)
    rows = []
    for name, batch in product(config.shapes.split(','), (1, 8)):
        with tempfile.TemporaryDirectory() as folder:
            functions, n = build_generators(SHAPES[name], device, config, batch, Path(folder))
            times = {who: [] for who in functions}
            for _, (who, function) in product(range(config.rounds), functions.items()):
                began = time.perf_counter()
                function()
                synchronize(device)
                times[who].append(time.perf_counter() - began)
        print(f'{name}, batch {batch}: {n} tokens after {config.prompt_tokens}')
        base = min(times['transformers float32'])
        for who, seconds in times.items():
            best = min(seconds)
            rows.append({'shape': name, 'batch': batch, 'program': who,
                         'token_ms': 1e3 * best / n, 'tokens_per_s': batch * n / best,
                         'times_transformers': base / best})
            print(f'  {who:<24}{1e3 * best / n:8.2f} ms a token {batch * n / best:9.1f} tokens/s '
                  f'{base / best:6.2f}x', flush=True)
    return rows


COMPARISONS = {function.__name__: function
               for function in (race, speed, loss, prepare, generation)}


def main(argv):
    names = [arg for arg in argv if arg in COMPARISONS]
    options = [arg for arg in argv if arg not in names]
    recipe = [str(ROOT / 'config/shakespeare_char.py')] if {'speed', 'loss'} & {*names} else []
    config = load_config(CompareConfig, [*recipe, *options], __doc__)
    if len(names) != 1:
        raise UserError(f'name one comparison: {", ".join(COMPARISONS)}')
    if names[0] not in ('prepare', 'generation') and not config.nanogpt:
        raise UserError("say where nanoGPT's code is: --nanogpt=FOLDER")
    if config.save:
        make_writable(config.save, 'save')
    own = ('--nanogpt=', '--rounds=', '--json', '--save=')
    with redirect_stdout(sys.stderr) if config.json else nullcontext():
        rows = COMPARISONS[names[0]](config, [arg for arg in options if not arg.startswith(own)])
    if config.json:
        table = markdown([*rows[0]], [[f'{value:.4g}' if isinstance(value, float) else str(value)
                                       for value in row.values()] for row in rows])
        print(json.dumps({'rows': rows, 'table': table}, indent=1))


if __name__ == '__main__':
    run_script(main)
