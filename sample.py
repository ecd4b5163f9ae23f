"""Generate text with a trained model.

    python sample.py out
    python sample.py out --start="To be" --num_samples=3 --temperature=0.7 --stream
    python sample.py out --start=FILE:prompt.txt
    python sample.py --init_from=gpt2-xl --start="What is the answer to life?"
    python sample.py out --chat
"""

import ast
import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from configurator import load_config
from plaingpt.data.tokenizers import is_chat
from plaingpt.inference.text_generator import Sampling, list_stops, print_text
from plaingpt.system.errors import UserError, run_script
from plaingpt.training.open_weights import GeneratorChoice, open_generator


def unescape(text):
    r"""Text as it was typed → with its escapes read: \n \r \t \\ \x41 \u00e9. Any other backslash
    stays as it is."""
    return re.sub(r'\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})',
                  lambda found: ast.literal_eval(f"'{found[0]}'"), text)


def read_start(text):
    return text if text.startswith('FILE:') else unescape(text)


def read_stop(text):
    return text if text.startswith('[') else unescape(text)  # JSON has escapes of its own


@dataclass
class SampleConfig(Sampling, GeneratorChoice):
    # prompts
    start: Annotated[str, read_start] = '\n'  # the prompt, with \n, \t, \x41; or FILE:path of one
    stop: Annotated[str, read_stop] = ''  # end before this text; or a JSON list: ["\n\n", "User:"]
    num_samples: int = 10  # samples to draw
    chat: bool = False  # talk with the model at the terminal instead
    system: Annotated[str, unescape] = ''  # what a chat's assistant is told at the start
    # system
    stream: bool = False  # print each sample as it is written
    batch_size: int = 8  # samples at a time; changes the speed alone
    compile: Literal['auto'] | bool = False  # torch.compile the model for single tokens

    above_0 = (*Sampling.above_0, 'num_samples', 'batch_size')

    def conflicts(self):
        found = []
        if self.system and not self.chat:
            found.append(f'system={self.system}: goes with --chat')
        try:
            self.stops()
        except (UserError, ValueError):
            found.append(f'stop={self.stop}: not a JSON list of texts, as ["\\n\\n", "User:"]')
        return found

    def stops(self):
        """The stop strings as a list. Raises UserError or ValueError where they are not one."""
        return list_stops(json.loads(self.stop) if self.stop.startswith('[') else self.stop)


def write_samples(generator, config):
    start = config.start
    if start.startswith('FILE:'):
        from plaingpt.data.text_files import read_text
        start = read_text(start.removeprefix('FILE:'))
    prompt = generator.encode(start, 'start')
    at_a_time = 1 if config.stream else config.batch_size
    for first in range(0, config.num_samples, at_a_time):
        numbers = range(config.num_samples)[first:first + at_a_time]
        if config.stream:
            write_now = partial(print_text, end='')
            write_now(f'---------------\n{start}')
            generator.write([prompt], numbers, config, config.stops(), write_now)
            print()
            continue
        texts = generator.write([prompt] * len(numbers), numbers, config, config.stops())
        for text in texts:
            print_text(f'---------------\n{start}{text}')


# -----------------------------------------------------------------------------
# a chat at the terminal


def run_chat(generator, settings):
    """Read messages and answer them until /quit or the end of input.

    settings: a SampleConfig of sample.py
    Raises UserError for a model that was not tuned on conversations.
    """
    if not is_chat(generator.tokenizer):
        raise UserError('this model was not tuned on conversations: --start="A text" lets it go on '
                        'from a text, and docs/chat.md says how to tune it')
    with suppress(ImportError):  # Windows' terminal edits lines itself
        import readline  # noqa: F401  (gives input() line editing and history)
    print('/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer')
    messages = start = [{'role': 'system', 'content': settings.system}]
    while True:
        try:
            line = input('> ')
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print('\n/quit or Ctrl-D leaves')
            continue
        if line == '/quit':
            return
        if line == '/reset':
            messages = start
        elif line.strip():
            asked = [*messages, {'role': 'user', 'content': line}]
            try:
                answer = write_answer(generator, asked, settings)
            except UserError as problem:  # the message is forgotten
                print(problem)
            else:
                messages = [*asked, {'role': 'assistant', 'content': answer}]


def write_answer(generator, messages, settings):
    """Print the answer to the last of `messages` as it comes; Ctrl-C ends it → the answer. Raises
    UserError where the model cannot read the messages."""
    ids, sampling = generator.prepare_answer(messages, settings)
    pieces = []

    def show(piece):
        pieces.append(piece)
        print_text(piece, end='')

    try:  # each answer draws random numbers of its own
        generator.write([ids], [len(messages)], sampling, settings.stops(), show)
    except KeyboardInterrupt:
        print(' …', end='')
    print()
    return ''.join(pieces)


def main(argv):
    config = load_config(SampleConfig, argv, __doc__, positional='out_dir')
    generator = open_generator(config, config.compile)
    if config.chat:
        run_chat(generator, config)
    else:
        write_samples(generator, config)
    if generator.tokens:
        print(f'{generator.tokens:,} tokens in {generator.seconds:.1f} s: '
              f'{generator.tokens / generator.seconds:,.0f} tokens/s', file=sys.stderr)


if __name__ == '__main__':
    run_script(main)
