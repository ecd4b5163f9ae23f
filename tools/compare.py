"""Compare with other programs on the same machine, one program at a time.

    python tools/compare.py race --nanogpt=FOLDER     train the CPU recipes, including startup
    python tools/compare.py race-gpu --nanogpt=FOLDER --save=FOLDER
                                                      train GPT-2 124M on Python source: nanoGPT,
                                                      the plain recipe and the fast one
    python tools/compare.py equality --nanogpt=FOLDER
                                                      losses of nanoGPT and the plain recipe over
                                                      --rounds seeds
    python tools/compare.py picture                   draw docs/loss-over-time.png from the
                                                      races in docs/results/
    python tools/compare.py own-text notes.txt --minutes=5 --nanogpt=FOLDER
                                                      train on your own text: xz, transformers and
                                                      the programs whose folder is given
    python tools/compare.py own-text-picture          draw docs/own-text-peers.png from
                                                      docs/results/
    python tools/compare.py prepare                   tokenize, against nanoGPT's recipe
    python tools/compare.py generation                sample, against transformers

race also takes settings of train.py, for plainGPT: --batch_size=16 --dtype=float32. race-gpu and
equality take settings that both programs have: --max_iters=300.
"""

import os
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
from own_text import own_text, own_text_picture
from races import equality, picture, race, race_gpu, run_and_watch

from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.core.settings import TrainConfig
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.inference.generation import CompiledStep, generate, prepare_for_generation
from plaingpt.inference.hf_export import write_hf
from plaingpt.system.devices import choose_device, synchronize
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import ROOT, make_writable


@dataclass
class CompareConfig(TrainConfig):
    dataset: str = 'pypackages'  # race-gpu, equality
    # comparison
    nanogpt: str = ''  # folder of nanoGPT
    rounds: int = 3  # runs of each program
    save: str = ''  # races: folder for race.csv; own-text: for own-text-peers.csv
    # own-text
    text: str = ''  # text file
    peers: str = ''  # programs: xz,plainGPT,nanoGPT,transformers,…; empty: all available
    nanochat: str = ''  # folder of nanochat
    minimind: str = ''  # folder of minimind
    litgpt: str = ''  # virtual environment with the packages litgpt and litdata
    n_layer: int = 4  # of the other programs' models, except nanoGPT's
    n_head: int = 4  # their attention heads
    n_embd: int = 256  # their channels
    # prepare
    megabytes: int = 500  # size of the text


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
    """Write a Parquet file of real text: the source of Python and of all installed packages, in
    documents as long as a web page. A leading number makes repeated documents differ."""
    import pyarrow
    import pyarrow.parquet
    paths = []
    for name in ('stdlib', 'purelib'):
        paths += sorted(Path(sysconfig.get_paths()[name]).rglob('*.py'))
    texts = []
    for number, path in enumerate(cycle(paths)):
        text = path.read_bytes().decode('utf-8', 'ignore')
        texts += [f'{number} {text[i:i + 5000]}' for i in range(0, len(text), 5000)]
        if 5000 * len(texts) >= megabytes * 1e6:
            break
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({'text': texts}), folder / 'train.parquet',
                                row_group_size=1000)


def prepare(config, _):
    """Text → GPT-2 tokens with all cores: the recipe of nanoGPT's openwebtext/prepare.py, and ours.
    """
    cores = len(os.sched_getaffinity(0))
    times = {"nanoGPT's recipe": [], 'prepare.py': [], 'prepare.py without gigatoken': []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, 'corpus')
        write_corpus(corpus, config.megabytes)
        for i in range(config.rounds):
            recipe_dir, data_dir = Path(folder, f'recipe-{i}'), Path(folder, f'prepare-{i}')
            recipe_dir.mkdir()
            argv = ['prepare.py', 'hf', corpus, '--val_fraction=0.0005', '--separators=False']
            for name, command in (
                    ("nanoGPT's recipe", ['-c', RECIPE, corpus, recipe_dir, str(cores)]),
                    ('prepare.py', [*argv, f'--data_dir={data_dir}']),
                    ('prepare.py without gigatoken',
                     ['-c', WITHOUT_GIGATOKEN, *argv, f'--data_dir={data_dir}-without'])):
                times[name].append(run_and_watch(command, ROOT).seconds)
        tokens, recipe_tokens = (sum(path.stat().st_size for path in place.glob('*.bin')) // 2
                                 for place in (data_dir, recipe_dir))
    if tokens != recipe_tokens:
        sys.exit(f'prepare.py wrote {tokens:,} tokens, the recipe {recipe_tokens:,}')
    print(f'{config.megabytes} MB of text, {cores} cores')
    for name, seconds in times.items():
        print(f'{median(seconds):8.2f} s {tokens / median(seconds) / 1e6:6.2f}M tokens/s  {name}  '
              f'({", ".join(f"{s:.2f}" for s in seconds)})')


# -----------------------------------------------------------------------------
# generation

PROMPT_TOKENS, NEW_TOKENS = 64, 256
MODELS = {'124M': GPTConfig(), 'baby': GPTConfig(256, 65, 6, 6, 384, bias=False)}


def build_generators(gpt_config, device, batch_size, folder):
    """→ ({name: function that generates}, new tokens per row). All use the same weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    torch.manual_seed(0)
    model = GPT(gpt_config).eval()
    write_hf(folder, model, ByteTokenizer())
    prompt = torch.randint(0, gpt_config.vocab_size, (batch_size, PROMPT_TOKENS))
    n = min(NEW_TOKENS, gpt_config.block_size - PROMPT_TOKENS)
    sampling = GenerationConfig(max_new_tokens=n, min_new_tokens=n, do_sample=True, top_k=200,
                                temperature=0.8, pad_token_id=0)

    def generate_hf(hf_model):
        hf_model.generate(prompt.to(device), attention_mask=torch.ones_like(prompt).to(device),
                          generation_config=sampling)

    def generate_plain(gpt, context, compiled=None):
        with context:
            generate(gpt, prompt.tolist(), n, temperature=0.8, top_k=200, compiled=compiled)

    generators = {}
    for dtype in ('float32', 'bfloat16'):
        hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        generators[f'transformers {dtype}'] = partial(generate_hf, hf_model.to(device).eval())
        gpt = deepcopy(model).to(device)
        context = prepare_for_generation(gpt, device, dtype)
        generators[f'plainGPT {dtype}'] = partial(generate_plain, gpt, context)
        if device.type == 'cuda' and dtype == 'bfloat16':  # the best time excludes compilation
            generators[f'plainGPT {dtype} compiled'] = partial(generate_plain, gpt, context,
                                                               CompiledStep(gpt))
    return generators, n


def generation(config, _):
    """The best time of each program, including the prompt."""
    device, _ = choose_device(config.device)
    for (model_name, gpt_config), batch_size in product(MODELS.items(), (1, 8)):
        with tempfile.TemporaryDirectory() as folder:
            generators, n = build_generators(gpt_config, device, batch_size, Path(folder))
            times = {name: [] for name in generators}
            for _ in range(config.rounds):
                for name, generate_once in generators.items():
                    start_time = time.perf_counter()
                    generate_once()
                    synchronize(device)
                    times[name].append(time.perf_counter() - start_time)
        print(f'{model_name}, batch {batch_size}: {n} tokens after {PROMPT_TOKENS}')
        base = min(times['transformers float32'])
        for name, seconds in times.items():
            best = min(seconds)
            print(f'  {name:<24}{1e3 * best / n:8.2f} ms per token '
                  f'{batch_size * n / best:9.1f} tokens/s {base / best:6.2f}x', flush=True)


COMPARISONS = {'race': race, 'race-gpu': race_gpu, 'equality': equality, 'picture': picture,
               'own-text': own_text, 'own-text-picture': own_text_picture, 'prepare': prepare,
               'generation': generation}


def main(argv):
    names = [arg for arg in argv if arg in COMPARISONS]
    options = [arg for arg in argv if arg not in names]
    config = load_config(CompareConfig, options, __doc__, positional='text')
    if len(names) != 1:
        raise UserError(f'choose one comparison: {", ".join(COMPARISONS)}')
    if names[0] in ('race', 'race-gpu', 'equality') and not config.nanogpt:
        raise UserError(f'{names[0]} needs the code of nanoGPT: add --nanogpt=FOLDER')
    if names[0] == 'own-text' and not (config.text and config.minutes):
        raise UserError('own-text needs a text and a time, such as: notes.txt --minutes=5')
    if config.save:
        make_writable(config.save, 'save')
    own_options = ('--nanogpt=', '--rounds=', '--save=', '--dataset=')
    train_options = [arg for arg in options if not arg.startswith(own_options)]
    COMPARISONS[names[0]](config, train_options)


if __name__ == '__main__':
    run_script(main)
