"""Compare with the programs that people know, on the same machine, in turn.

    python tools/compare.py race --nanogpt=FOLDER     the CPU recipes, whole processes
    python tools/compare.py race-gpu --nanogpt=FOLDER --save=FOLDER
                                                      GPT-2 124M on Python source: nanoGPT, the
                                                      plain recipe and the fast one
    python tools/compare.py equality --nanogpt=FOLDER
                                                      nanoGPT and the plain recipe, --rounds seeds
    python tools/compare.py picture                   docs/loss-over-time.png, of the
                                                      races in docs/results/
    python tools/compare.py own-text notes.txt --nanogpt=FOLDER --minutes=5
                                                      a text of one's own, beside xz too
    python tools/compare.py prepare                   beside nanoGPT's recipe
    python tools/compare.py generation                beside transformers

race takes settings of train.py too, for plainGPT: --batch_size=16 --dtype=float32. race-gpu and
equality take settings that both programs have, for all: --max_iters=300.
"""

import lzma
import math
import os
import pickle
import sys
import sysconfig
import tempfile
import time
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from races import (
    CPU_RECIPE,
    equality,
    picture,
    race,
    race_gpu,
    run_and_watch,
    score_whole_split,
)

from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.data.dataset import open_dataset
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.experiments.runs import train_once
from plaingpt.inference.generation import CompiledStep, generate, prepare_for_generation
from plaingpt.inference.hf_export import write_hf
from plaingpt.system.devices import choose_device, synchronize
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import ROOT, make_writable
from plaingpt.training.settings import TrainConfig


@dataclass
class CompareConfig(TrainConfig):
    dataset: str = 'pypackages'  # race-gpu, equality
    # comparison
    nanogpt: str = ''  # nanoGPT's folder
    rounds: int = 3  # runs of each program
    save: str = ''  # races: a folder for race.csv
    text: str = ''  # own-text: a file
    megabytes: int = 500  # prepare: of text

    def supports_minutes(self):
        return True  # own-text


# -----------------------------------------------------------------------------
# own-text


def own_text(config, _):
    """Bits a byte over the validation text, of the best checkpoint after config.minutes: nanoGPT's
    CPU recipe on characters, with as many iterations as fit; config/own_text.py; and what xz -9e
    takes for the validation text after the training text."""
    with tempfile.TemporaryDirectory() as folder:
        for name, *options in (['ours'], ['theirs', '--tokenizer=char']):
            run_and_watch(['prepare.py', 'text', Path(config.text).resolve(), *options,
                           f'--data_dir={folder}/{name}'], ROOT)
        data = open_dataset(f'{folder}/ours')
        train, val = (data.tokenizer().decode(stream.read(0, len(stream)).tolist()).encode()
                      for stream in (data.split('train'), data.split('val')))
        before, after = (len(lzma.compress(given, preset=9 | lzma.PRESET_EXTREME))
                         for given in (train, train + val))
        print(f'xz -9e: {8 * (after - before) / len(val):.4f} bits a byte', flush=True)
        theirs = train_nanogpt(config, f'{folder}/theirs', f'{folder}/nanogpt')
        began = time.perf_counter()
        train_once(['config/own_text.py', f'--dataset={folder}/ours', '--device=cpu',
                    f'--minutes={config.minutes}'], f'{folder}/out')
        ours = time.perf_counter() - began
        for name, seconds, model in (
                ('theirs', theirs, f'--init_from={folder}/nanogpt/ckpt.pt'),
                ('ours', ours, f'--out_dir={folder}/out')):
            score = score_whole_split(model, f'{folder}/{name}.json', f'{folder}/{name}', 'best')
            print(f'{name}: {score["bits_per_byte"]:.4f} bits a byte after {seconds:.0f} s')


def train_nanogpt(config, dataset, out):
    """Train nanoGPT's CPU recipe for config.minutes → seconds."""
    with open(Path(dataset, 'meta.pkl'), 'wb') as f:
        pickle.dump({'vocab_size': open_dataset(dataset).vocab_size}, f)

    def run(iters):
        return run_and_watch([*CPU_RECIPE, f'--dataset={dataset}', f'--out_dir={out}',
                              f'--max_iters={iters}', f'--lr_decay_iters={iters}'], config.nanogpt)
    curve = run(500).curve  # it evaluates every 250
    begin, step = curve[0][0], (curve[2][0] - curve[0][0]) / 500
    return run(math.floor((60 * config.minutes - begin) / step)).seconds


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

WITHOUT_GIGATOKEN = '''
import runpy, sys
sys.modules['gigatoken'] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, '')
runpy.run_path(sys.argv[0], run_name='__main__')
'''


def write_corpus(folder, megabytes):
    """A Parquet file of real text: the source of Python and of all installed packages, in parts as
    long as a web page. A number in front makes repeated parts differ."""
    import pyarrow
    import pyarrow.parquet
    texts, paths = [], [path for name in ('stdlib', 'purelib') for path in
                        sorted(Path(sysconfig.get_paths()[name]).rglob('*.py'))]
    for number, path in enumerate(cycle(paths)):
        text = path.read_bytes().decode('utf-8', 'ignore')
        texts += [f'{number} {text[i:i + 5000]}' for i in range(0, len(text), 5000)]
        if 5000 * len(texts) >= megabytes * 1e6:
            break
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({'text': texts}), folder / 'train.parquet',
                                row_group_size=1000)


def prepare(config, _):
    """Text → GPT-2 tokens on the same cores: the recipe that nanoGPT's openwebtext/prepare.py made
    known, and prepare.py."""
    cores = len(os.sched_getaffinity(0))
    times = {"nanoGPT's recipe": [], 'prepare.py': [], 'prepare.py without gigatoken': []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, 'corpus')
        write_corpus(corpus, config.megabytes)
        for i in range(config.rounds):
            theirs, ours = Path(folder, f'recipe-{i}'), Path(folder, f'prepare-{i}')
            theirs.mkdir()
            argv = ['prepare.py', 'hf', corpus, '--val_fraction=0.0005']
            for name, command in (
                    ("nanoGPT's recipe", ['-c', RECIPE, corpus, theirs, str(cores)]),
                    ('prepare.py', [*argv, f'--data_dir={ours}']),
                    ('prepare.py without gigatoken',
                     ['-c', WITHOUT_GIGATOKEN, *argv, f'--data_dir={ours}-without'])):
                times[name].append(run_and_watch(command, ROOT).seconds)
        tokens, same = (sum(path.stat().st_size for path in place.glob('*.bin')) // 2
                        for place in (ours, theirs))
    if tokens != same:
        sys.exit(f'{tokens:,} tokens, but {same:,} by the recipe')
    print(f'{config.megabytes} MB of text, {cores} cores')
    for name, seconds in times.items():
        print(f'{median(seconds):8.2f} s {tokens / median(seconds) / 1e6:6.2f}M tokens/s  {name}  '
              f'({", ".join(f"{t:.2f}" for t in seconds)})')


# -----------------------------------------------------------------------------
# generation

PROMPT, NEW = 64, 256  # tokens
SHAPES = {'124M': GPTConfig(), 'baby': GPTConfig(256, 65, 6, 6, 384, bias=False)}


def build_generators(shape, device, batch, folder):
    """→ {name: function that generates}, tokens in each row. All have the same weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    torch.manual_seed(0)
    model = GPT(shape).eval()
    write_hf(folder, model, ByteTokenizer())
    prompt = torch.randint(0, shape.vocab_size, (batch, PROMPT))
    n = min(NEW, shape.block_size - PROMPT)
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
    return found, n


def generation(config, _):
    """The best time of each program, reading the prompt included."""
    device, _ = choose_device(config.device)
    for (name, shape), batch in product(SHAPES.items(), (1, 8)):
        with tempfile.TemporaryDirectory() as folder:
            functions, n = build_generators(shape, device, batch, Path(folder))
            times = {who: [] for who in functions}
            for _, (who, function) in product(range(config.rounds), functions.items()):
                began = time.perf_counter()
                function()
                synchronize(device)
                times[who].append(time.perf_counter() - began)
        print(f'{name}, batch {batch}: {n} tokens after {PROMPT}')
        base = min(times['transformers float32'])
        for who, seconds in times.items():
            best = min(seconds)
            print(f'  {who:<24}{1e3 * best / n:8.2f} ms a token {batch * n / best:9.1f} tokens/s '
                  f'{base / best:6.2f}x', flush=True)


COMPARISONS = {'race': race, 'race-gpu': race_gpu, 'equality': equality, 'picture': picture,
               'own-text': own_text, 'prepare': prepare, 'generation': generation}


def main(argv):
    names = [arg for arg in argv if arg in COMPARISONS]
    options = [arg for arg in argv if arg not in names]
    config = load_config(CompareConfig, options, __doc__, positional='text')
    if len(names) != 1:
        raise UserError(f'name one comparison: {", ".join(COMPARISONS)}')
    if names[0] in ('race', 'race-gpu', 'equality', 'own-text') and not config.nanogpt:
        raise UserError("say where nanoGPT's code is: --nanogpt=FOLDER")
    if names[0] == 'own-text' and not (config.text and config.minutes):
        raise UserError('say which text, and for how long: notes.txt --minutes=5')
    if config.save:
        make_writable(config.save, 'save')
    own = ('--nanogpt=', '--rounds=', '--save=', '--dataset=')
    COMPARISONS[names[0]](config, [arg for arg in options if not arg.startswith(own)])


if __name__ == '__main__':
    run_script(main)
