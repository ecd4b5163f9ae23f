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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from configurator import load_config
from plaingpt.corpus.documents import json_rows
from plaingpt.inference.chat import Chat, show, talk
from plaingpt.inference.generation import for_generation
from plaingpt.inference.text_generator import TextGenerator
from plaingpt.system.devices import choose_compile, choose_device, choose_dtype, use_fast_matmul
from plaingpt.system.errors import UserError, run_script
from plaingpt.training import checkpoint as checkpoints


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
    author = TextGenerator(model, tokenizer, context, compiled)
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
