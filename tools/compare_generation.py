"""Compare the tokens/s of generation with those of transformers and, if named, nanoGPT.

    python tools/compare_generation.py [--nanogpt=PATH_TO_NANOGPT] [--json]

All use the same random weights. The programs take turns, and the best time of each counts. It
includes reading the prompt.
"""

import json
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from compare_nanogpt import load_nanogpt

from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.inference.generation import generate
from plaingpt.inference.hf_export import write_hf
from plaingpt.inference.weight_layout import prepare_for_generation
from plaingpt.system.devices import choose_device
from plaingpt.system.errors import run_script


@dataclass
class CompareConfig:
    prompt_tokens: int = 64  # tokens of the prompt
    max_new_tokens: int = 256  # tokens to generate
    rounds: int = 3  # times that each program runs
    nanogpt: str = ''  # nanoGPT's folder; it is slow, since it has no cache
    device: str = 'auto'  # auto, cpu, cuda
    shapes: str = '124M,baby'  # 124M, baby (10.7M), tiny (0.03M)
    json: bool = False  # print JSON


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

        def ours_generates(ours=ours, context=context):
            with context:
                generate(ours, prompt.tolist(), n, temperature=0.8, top_k=200)
        found[f'plainGPT {dtype}'] = ours_generates
    if config.nanogpt and batch == 1:
        theirs = load_nanogpt(config.nanogpt, model).eval().to(device)
        found['nanoGPT float32'] = lambda: theirs.generate(
            prompt.to(device), n, temperature=0.8, top_k=min(200, shape.vocab_size))
    return found, n


def best_times(functions, rounds, device):
    times = dict.fromkeys(functions, float('inf'))
    for round_ in range(rounds):
        for name, function in functions.items():
            if round_ and name.startswith('nanoGPT'):
                continue  # once is enough: it takes a minute
            began = time.perf_counter()
            function()
            if device.type == 'cuda':
                torch.cuda.synchronize()
            times[name] = min(times[name], time.perf_counter() - began)
    return times


def main(argv):
    config = load_config(CompareConfig, argv, __doc__)
    with redirect_stdout(sys.stderr) if config.json else nullcontext():
        rows = compare(config)
    if config.json:
        print(json.dumps({'rows': rows}, indent=1))


def compare(config):
    """→ a row for each shape, batch and program"""
    device, why = choose_device(config.device)
    print(f'device {device} ({why}), {torch.get_num_threads()} threads')
    rows = []
    for name, batch in product(config.shapes.split(','), (1, 8)):
        with tempfile.TemporaryDirectory() as folder:
            functions, n = build_generators(SHAPES[name], device, config, batch, Path(folder))
            times = best_times(functions, config.rounds, device)
        print(f'{name}, batch {batch}: {n} tokens after {config.prompt_tokens}')
        base = times['transformers float32']
        for who, seconds in times.items():
            rows.append({'shape': name, 'batch': batch, 'program': who, 'tokens': n,
                         'token_ms': 1e3 * seconds / n, 'tokens_per_s': batch * n / seconds,
                         'times_transformers': base / seconds})
            print(f'  {who:<24}{1000 * seconds / n:8.2f} ms a token '
                  f'{batch * n / seconds:9.1f} tokens/s {base / seconds:6.2f}x')
    return rows


if __name__ == '__main__':
    run_script(main)
