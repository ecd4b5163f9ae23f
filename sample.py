"""Let a trained model write.

    python sample.py --out_dir=out
    python sample.py --out_dir=out --start="To be" --num_samples=3 --temperature=0.7 --stream
    python sample.py --out_dir=out --start=FILE:prompt.txt
    python sample.py --init_from=gpt2-xl --start="What is the answer to life?"
    python sample.py --out_dir=out --prompts=prompts.jsonl --output=texts.jsonl
    python sample.py --out_dir=out --chat

Each line of the prompts is an object with a field `prompt`; it comes back with a field `text`.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

import checkpoint as checkpoints
from chat import Chat, show, talk
from configurator import load_config
from corpora import json_rows
from errors import UserError, run_script
from generation import Writer, for_generation, generate
from runtime import choose_compile, choose_device, choose_dtype, use_fast_matmul


@dataclass
class SampleConfig(checkpoints.ModelChoice):
    # what to go on from
    start: str = '\n'  # text to go on from, or FILE:path of a file that holds it
    num_samples: int = 10  # samples to draw
    prompts: str = ''  # a .jsonl file of prompts, instead of start; one text for each
    output: str = ''  # the .jsonl file for their texts, which must not exist yet
    chat: bool = False  # talk at the terminal instead
    template: str = ''  # of a chat with a model tuned on dialogue, as User: {user}\nAssistant:
    # what to write
    max_new_tokens: int = 500  # tokens in each, at most
    temperature: float = 0.8  # below 1 safer, above 1 wilder, 0 always the likeliest token
    top_k: int = 200  # choose among this many of the likeliest tokens; 0 for all
    top_p: float = 1.0  # choose among the fewest tokens that together have this probability
    min_p: float = 0.0  # and among those at least this share as probable as the likeliest
    repetition_penalty: float = 1.0  # above 1 makes what was there already less likely
    stop: str = ''  # end before this text; several as a JSON list, as ["\n\n", "User:"]
    end_of_text: bool = True  # end where the model ends a document
    seed: int = 1337  # another seed, another text
    # how
    stream: bool = False  # print the text as it comes, a sample at a time
    batch_size: int = 8  # samples or prompts at a time; the texts are the same
    device: str = 'auto'  # auto, cpu, cuda, cuda:0, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of the matrices
    compile: Literal['auto'] | bool = False  # torch.compile the step of one token

    def problems(self):
        found = [f'{key}={getattr(self, key)}: must be at least 1'
                 for key in ('num_samples', 'max_new_tokens', 'batch_size')
                 if getattr(self, key) < 1]
        found += [f'{key}={getattr(self, key)}: must not be negative'
                  for key in ('temperature', 'top_k', 'seed') if getattr(self, key) < 0]
        if not 0 < self.top_p <= 1:
            found.append(f'top_p={self.top_p}: must be above 0 and at most 1')
        if not 0 <= self.min_p <= 1:
            found.append(f'min_p={self.min_p}: must be from 0 to 1')
        if self.repetition_penalty <= 0:
            found.append(f'repetition_penalty={self.repetition_penalty}: must be above 0')
        if bool(self.prompts) != bool(self.output):
            found.append('prompts and output go together: name both files')
        if self.template and '{user}' not in self.template:
            found.append(f'template={self.template}: say with {{user}} where a message goes')
        if self.stops() is None:
            found.append(f'stop={self.stop}: not a JSON list of texts, as ["\\n\\n", "User:"]')
        return found

    def stops(self):
        """The stop strings as a list; None where they are no list."""
        if not self.stop.startswith('['):
            return [self.stop] if self.stop else []
        try:
            stops = json.loads(self.stop)
        except ValueError:
            return None
        return stops if all(isinstance(stop, str) and stop for stop in stops) else None


class Author:
    """A model and its tokenizer, ready to write texts."""

    def __init__(self, model, tokenizer, context, compiled=None):
        self.model, self.tokenizer = model, tokenizer
        self.context, self.compiled = context, compiled
        self.tokens, self.seconds = 0, 0.0  # written so far, and how long it took

    def encode(self, text, where):
        """→ ids. Raises UserError where the model never saw a character of it."""
        try:
            ids = self.tokenizer.encode(text).tolist()
        except UserError as e:
            raise UserError(f'{where}: {e}; write with characters of the training text') from None
        if not ids:
            if self.tokenizer.end_of_text is None:
                raise UserError(f'{where} is empty: give at least one character, such as --start=A')
            ids = [self.tokenizer.end_of_text]  # as at the beginning of a document
        return ids

    def encode_prompt(self, text, where):
        """→ ids, and a line on stderr where the model reads only the last of them."""
        ids = self.encode(text, where)
        if len(ids) > self.model.config.block_size:
            print(f'{where} has {len(ids):,} tokens and the model reads at most '
                  f'{self.model.config.block_size:,}: only its end counts', file=sys.stderr)
        return ids

    def write(self, prompts, numbers, how, stop=(), show=None):
        """Go on from `prompts`, lists of ids → texts. numbers: of each, for its random numbers."""
        writers = [Writer(self.tokenizer, stop, show) for _ in prompts]
        generators = [torch.Generator().manual_seed((how.seed * 1_000_003 + n) % 2**63)
                      for n in numbers]
        began = time.perf_counter()

        def on_token(row, token):
            self.tokens += 1
            return writers[row].add(token)

        try:
            with self.context:
                generate(self.model, prompts, how.max_new_tokens, temperature=how.temperature,
                         top_k=how.top_k, top_p=how.top_p, min_p=how.min_p,
                         repetition_penalty=how.repetition_penalty, generators=generators,
                         end_of_text=self.tokenizer.end_of_text if how.end_of_text else None,
                         on_token=on_token, compiled=self.compiled)
        finally:
            self.seconds += time.perf_counter() - began
            texts = [writer.finish() for writer in writers]
        return texts

    def speed(self):
        return f'{self.tokens:,} tokens in {self.seconds:.1f} s: ' \
               f'{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s'


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


def read_prompts(path):
    """The lines of a .jsonl file → [(object, where it stands)]. Raises UserError."""
    rows = []
    for row, where, _ in json_rows(Path(path)):
        if not isinstance(row, dict) or not isinstance(row.get('prompt'), str):
            raise UserError(f'{where}: no object with a text under "prompt"')
        rows.append((row, where))
    if not rows:
        raise UserError(f'prompts={path} is empty: write an object with a "prompt" on each line')
    return rows


def write_samples(author, config):
    """Print num_samples texts that go on from start."""
    start = read_start(config.start)
    prompt = author.encode_prompt(start, 'start')
    at_a_time = 1 if config.stream else config.batch_size
    for first in range(0, config.num_samples, at_a_time):
        numbers = range(first, min(first + at_a_time, config.num_samples))
        if config.stream:
            show(f'---------------\n{start}')
            author.write([prompt], numbers, config, config.stops(), show)
            print()
            continue
        for text in author.write([prompt] * len(numbers), numbers, config, config.stops()):
            print(f'---------------\n{start}{text}')


def write_prompts(author, config):
    """Write the text that goes on from each of the prompts, in their order."""
    rows = read_prompts(config.prompts)
    prompts = [author.encode_prompt(row['prompt'], where) for row, where in rows]
    try:
        output = open(config.output, 'x', encoding='utf-8')
    except OSError as e:
        raise UserError(f'output={config.output}: {e.strerror}: name a new file') from None
    with output, tqdm(total=len(rows), desc='writing', disable=None) as bar:
        for first in range(0, len(rows), config.batch_size):
            numbers = range(first, min(first + config.batch_size, len(rows)))
            texts = author.write([prompts[i] for i in numbers], numbers, config, config.stops())
            for i, text in zip(numbers, texts, strict=True):
                output.write(json.dumps({**rows[i][0], 'text': text}, ensure_ascii=False) + '\n')
            output.flush()
            bar.update(len(numbers))
    print(f'{config.output}: {len(rows):,} texts')


def hold_chat(author, config):
    turns = 0

    def answer(text, how, stop, show):
        nonlocal turns
        turns += 1
        # The end of what was said is all that the model reads.
        ids = author.encode(text, 'your message')[-author.model.config.block_size:]
        author.write([ids], [turns], how, [*config.stops(), *stop], show)

    talk(Chat(answer, config, config.template))


def main(argv):
    config = load_config(SampleConfig, argv, __doc__)
    device, _ = choose_device(config.device)
    use_fast_matmul()
    model, tokenizer, source, _ = checkpoints.load(config.init_from, config.out_dir,
                                                   config.checkpoint, config.tokenizer)
    model = model.to(device).eval()
    dtype, _ = choose_dtype(config.dtype, device, model.config.n_embd)
    compile, _ = choose_compile(config.compile, device)
    print(f'{source} | {model.num_parameters():,} parameters | device {device} | dtype {dtype}')
    context = for_generation(model, device, dtype, pack=not compile)
    compiled = torch.compile(model.hidden) if compile else None
    author = Author(model, tokenizer, context, compiled)
    if config.chat:
        hold_chat(author, config)
    elif config.prompts:
        write_prompts(author, config)
    else:
        write_samples(author, config)
    if author.tokens:
        print(author.speed(), file=sys.stderr)


if __name__ == '__main__':
    run_script(main)
