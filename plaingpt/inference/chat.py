"""A chat with a model at the terminal."""

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from plaingpt.system.errors import UserError

HELP = """/reset            forget the conversation
/temperature 0.8  below 1 safer, above 1 wilder, 0 always the likeliest token
/top_k 200        choose among this many tokens; 0 for all
/save FILE        write the conversation to a new file
/help             this
/quit             leave, as Ctrl-D does; Ctrl-C stops an answer"""


class Chat:
    """A conversation of a TextGenerator with a user.

    settings: a SampleConfig of sample.py. Without a template the model continues what is typed.
    """

    def __init__(self, generator, settings):
        self.generator, self.settings = generator, settings
        self.template = settings.template
        # The answer ends where the model begins to write the user's next message.
        user_prefix = self.template.partition('{user}')[0].strip()
        self.stops = settings.stops() + ([user_prefix] if user_prefix else [])
        self.transcript, self.turns = '', 0

    def turn(self, message):
        """Add a message and the answer to it, which is printed as it comes. Raises UserError, and
        forgets the message, where the model cannot read it."""
        self.turns += 1  # each answer draws random numbers of its own
        if self.template:
            message = ('\n' if self.transcript else '') + self.template.replace('{user}', message)
        ids = self.generator.encode(self.transcript + message, 'your message')
        self.transcript += message
        pieces = []

        def keep_and_show(piece):
            pieces.append(piece)
            show(piece)

        try:
            self.generator.write([ids[-self.generator.model.config.block_size:]], [self.turns],
                                 self.settings, self.stops, keep_and_show)
        finally:  # after Ctrl-C, the pieces shown so far stay in the transcript
            text = ''.join(pieces)
            self.transcript += text.rstrip() if self.template else text

    def command(self, line):
        """Carry out a line that begins with / → the line to print, or None to leave."""
        name, _, value = line.partition(' ')
        match name:
            case '/quit' | '/exit':
                return None
            case '/help':
                return HELP
            case '/reset':
                self.transcript = ''
                return 'forgotten'
            case '/temperature' | '/top_k':
                return self.change_setting(name[1:], value.strip())
            case '/save':
                return self.save(value.strip())
        return f'{name} is unknown: /help lists the commands'

    def change_setting(self, name, value):
        kind = type(getattr(self.settings, name))
        try:
            changed = replace(self.settings, **{name: kind(value)})
            if not math.isfinite(getattr(changed, name)):
                raise ValueError
            problems = changed.problems()
        except (ValueError, OverflowError):
            problems = [f'{value!r} is no number']
        if problems:
            return f'{problems[0]}: {name} stays {getattr(self.settings, name)}'
        self.settings = changed
        return f'{name} {getattr(changed, name)}'

    def save(self, name):
        if not name:
            return 'name a file: /save FILE'
        try:
            with open(Path(name).expanduser(), 'x', encoding='utf-8',
                      errors='backslashreplace') as f:  # lone surrogates too
                f.write(self.transcript + '\n')
        except OSError as e:
            return f'{name}: {e.strerror}'
        return f'saved to {name}'


def run_chat(generator, settings):
    """Read lines and answer them until /quit or the end of input."""
    chat = Chat(generator, settings)
    with suppress(ImportError):  # Windows' terminal edits lines itself
        import readline  # noqa: F401  (gives input() line editing and history)
    print('/help lists the commands')
    while True:
        try:
            line = input('> ')
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print('\n/quit or Ctrl-D leaves')
            continue
        if line.startswith('/'):
            reply = chat.command(line)
            if reply is None:
                return
            print(reply)
        elif line:
            try:
                chat.turn(line)
            except KeyboardInterrupt:
                print(' …', end='')
            except UserError as problem:
                print(problem, end='')
            print()


def show(piece):
    print(piece, end='', flush=True)
