"""Let a trained model write.

    python sample.py --out_dir=out
    python sample.py --out_dir=out --start="To be" --num_samples=3 --temperature=0.7
    python sample.py --out_dir=out --start=FILE:prompt.txt
    python sample.py --init_from=gpt2-xl --start="What is the answer to life?"
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import checkpoint as checkpoints
from configurator import load_config
from errors import UserError, run_script
from runtime import (
    autocast,
    choose_compile,
    choose_device,
    choose_dtype,
    seed_everything,
    use_fast_matmul,
)


@dataclass
class SampleConfig:
    # which model
    init_from: str = 'resume'  # resume (from out_dir), gpt2…, a folder, or nanoGPT's ckpt.pt
    out_dir: str = 'out'  # the run to read
    checkpoint: str = 'best'  # best, latest, or an iteration
    tokenizer: str = 'auto'  # the model's own, or a prepared dataset whose to take
    # what to write
    start: str = '\n'  # text to go on from, or FILE:path of a file that holds it
    num_samples: int = 10  # samples to draw
    max_new_tokens: int = 500  # tokens in each
    temperature: float = 0.8  # below 1 safer, above 1 wilder, 0 always the likeliest token
    top_k: int = 200  # choose among this many of the likeliest tokens; 0 for all
    top_p: float = 1.0  # choose among the fewest tokens that together have this probability
    seed: int = 1337  # another seed, another text
    # system
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # precision of the matmuls
    compile: Literal['auto'] | bool = False  # torch.compile the model

    def problems(self):
        found = [f'{key}={getattr(self, key)}: must be at least 1'
                 for key in ('num_samples', 'max_new_tokens') if getattr(self, key) < 1]
        found += [f'{key}={getattr(self, key)}: must not be negative'
                  for key in ('temperature', 'top_k', 'seed') if getattr(self, key) < 0]
        if not 0 < self.top_p <= 1:
            found.append(f'top_p={self.top_p}: must be above 0 and at most 1')
        return found


def read_start(start):
    """The prompt itself, or the text of FILE:path."""
    if not start.startswith('FILE:'):
        return start
    try:
        return Path(start.removeprefix('FILE:')).read_text(encoding='utf-8')
    except OSError as e:
        raise UserError(f'start={start}: {e.strerror}') from None
    except UnicodeDecodeError:
        raise UserError(f'start={start}: not a UTF-8 text file') from None


def encode_start(start, tokenizer):
    """The prompt as ids (1, T). Raises UserError where the model never saw its characters."""
    try:
        ids = tokenizer.encode(start)
    except UserError as e:
        raise UserError(f'start: {e}; write with characters of the training text') from None
    if len(ids) == 0:
        if tokenizer.end_of_text is None:
            raise UserError('start is empty: give at least one character, such as --start=A')
        ids = [tokenizer.end_of_text]  # as at the beginning of a document
    return torch.tensor([[int(i) for i in ids]])


def main(argv):
    config = load_config(SampleConfig, argv, __doc__)
    device, _ = choose_device(config.device)
    use_fast_matmul()
    model, tokenizer, source, _ = checkpoints.load(config.init_from, config.out_dir,
                                                   config.checkpoint, config.tokenizer)
    model = model.to(device).eval()
    idx = encode_start(read_start(config.start), tokenizer).to(device)
    dtype, _ = choose_dtype(config.dtype, device, model.config.n_embd)
    if choose_compile(config.compile, device)[0]:
        model.compile()
    seed_everything(config.seed)
    print(f'{source} | {model.num_parameters():,} parameters | device {device} | dtype {dtype}')
    for _ in range(config.num_samples):
        print('---------------')
        with autocast(device, dtype):
            tokens = model.generate(idx, config.max_new_tokens, config.temperature, config.top_k,
                                    config.top_p)
        print(tokenizer.decode(tokens[0].tolist()))


if __name__ == '__main__':
    run_script(main)
