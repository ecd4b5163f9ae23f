"""Generate text with a trained model.

    python sample.py out
    python sample.py out --start="To be" --num_samples=3 --temperature=0.7 --stream
    python sample.py out --start=FILE:prompt.txt
    python sample.py --init_from=gpt2-xl --start="What is the answer to life?"
    python sample.py out --chat

If the training data has documents, each sample is a new one that begins with --start. With
--continue_text, --start is the middle of a document instead.
"""

import ast
import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Literal

from configurator import load_config
from plaingpt.data.tokenizers import IdsTokenizer, is_chat
from plaingpt.inference.open_weights import GeneratorChoice, open_generator
from plaingpt.inference.text_generator import Sampling, list_stop_strings, print_text
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import count_of, shown

ESCAPE = re.compile(r'\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})')


@cache  # a command line is read again for each config file in it, but says this once
def unescape(text):
    r"""Decode the escapes \n \r \t \\ \x41 \u00e9 in a command-line value, and print those that it
    has. Any other backslash stays."""
    # in an ASCII locale, Python passes other letters on as undecoded bytes
    text = text.encode('utf-8', 'surrogateescape').decode('utf-8', 'replace')
    if escapes := dict.fromkeys(ESCAPE.findall(text)):
        print(f'decoded {" ".join(escapes)} in {shown(text):.60}; for a literal backslash, '
              'write \\\\', file=sys.stderr)
    return ESCAPE.sub(lambda match: ast.literal_eval(f"'{match[0]}'"), text)


def parse_start(text):
    return text if text.startswith('FILE:') else unescape(text)


def parse_stop(text):
    return text if text.startswith('[') else unescape(text)  # JSON has its own escapes


@dataclass
class SampleConfig(Sampling, GeneratorChoice):
    # prompts (escapes such as \n are decoded)
    start: Annotated[str, parse_start] = '\n'  # prompt, or FILE:path; \n: no prompt
    stop: Annotated[str, parse_stop] = ''  # stop string, or a JSON list: ["\n\n", "User:"]
    num_samples: int = 10  # number of samples
    chat: bool = False  # chat with the model in the terminal
    system: Annotated[str, unescape] = ''  # system prompt of the chat
    # system
    stream: bool = False  # print each sample as it is generated
    batch_size: int = 8  # samples per batch; affects speed only
    compile: Literal['auto'] | bool = False  # use torch.compile for single-token steps

    above_0 = (*Sampling.above_0, 'num_samples', 'batch_size')

    def conflicts(self):
        conflicts = []
        if self.system and not self.chat:
            conflicts.append(f'system={self.system}: has no effect without --chat')
        try:
            self.stop_strings()
        except (UserError, ValueError):
            conflicts.append(f'stop={self.stop}: expected a string or a JSON list of strings, '
                             'such as ["\\n\\n", "User:"]')
        return conflicts

    def stop_strings(self):
        """The stop strings as a list. Raises UserError or ValueError if they are malformed."""
        stop = self.stop
        if stop.startswith('['):
            stop = json.loads(stop)
        return list_stop_strings(stop)


def print_samples(generator, config):
    start = config.start
    if start.startswith('FILE:'):
        from plaingpt.data.text_files import read_text
        start = read_text(start.removeprefix('FILE:'))
    prompt = generator.encode(start, 'start', config.continue_text)
    if prompt == [generator.document_start]:
        start = ''
    if isinstance(generator.tokenizer, IdsTokenizer):
        start = f'IDS:{generator.tokenizer.decode(prompt)}'  # blank text is the id 0
    stop = config.stop_strings()
    if config.stream:
        for i in range(config.num_samples):
            print_text(f'---------------\n{start}', end='')
            generator.generate_texts([prompt], [i], config, stop, partial(print_text, end=''))
            print()
        return
    for first in range(0, config.num_samples, config.batch_size):
        indices = range(first, min(first + config.batch_size, config.num_samples))
        texts = generator.generate_texts([prompt] * len(indices), indices, config, stop)
        for text in texts:
            print_text(f'---------------\n{start}{text}')


# -----------------------------------------------------------------------------
# chat in the terminal


def run_chat(generator, config):
    """Answer messages from the terminal until /quit or Ctrl-D. Raises UserError if the model was
    not fine-tuned on conversations."""
    if not is_chat(generator.tokenizer):
        raise UserError('--chat: this model was not fine-tuned on conversations; use --start="Some '
                        'text" to continue a text, or see docs/chat.md for fine-tuning')
    with suppress(ImportError):  # not on Windows, whose terminal has line editing
        import readline  # noqa: F401  (gives input() line editing and history)
    print('/reset clears the conversation, /quit exits, Ctrl-C stops the answer')
    system = {'role': 'system', 'content': config.system}
    messages = [system]
    while True:
        try:
            line = input('> ')
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print('\ntype /quit or press Ctrl-D to exit')
            continue
        except UnicodeDecodeError:
            raise UserError('stdin: the messages are not UTF-8: convert them, for example with '
                            'iconv') from None
        if line == '/quit':
            return
        if line == '/reset':
            messages = [system]
        elif line.strip():
            conversation = [*messages, {'role': 'user', 'content': line}]
            try:
                answer = print_answer(generator, conversation, config)
            except UserError as e:  # the message is dropped
                print(e)
            else:
                messages = [*conversation, {'role': 'assistant', 'content': answer}]


def print_answer(generator, messages, config):
    """Print the answer to `messages` as it is generated → the answer; Ctrl-C ends it early. Raises
    UserError if the messages are too long."""
    ids, sampling = generator.prepare_answer(messages, config)
    pieces = []

    def on_text(piece):
        pieces.append(piece)
        print_text(piece, end='')

    try:
        indices = [len(messages)]  # each answer draws its own random numbers
        generator.generate_texts([ids], indices, sampling, config.stop_strings(), on_text)
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
        print_samples(generator, config)
    if generator.tokens:
        tokens_per_s = generator.tokens / generator.seconds
        print(f'{count_of(generator.tokens, "token")} in {generator.seconds:.1f} s: '
              f'{tokens_per_s:,.0f} tokens/s', file=sys.stderr)


if __name__ == '__main__':
    run_script(main)
