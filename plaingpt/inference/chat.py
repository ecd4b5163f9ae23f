"""A model at the terminal: type, and it goes on from there."""

import math
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from plaingpt.system.errors import UserError

HELP = """/reset            forget what was said
/temperature 0.8  below 1 safer, above 1 wilder, 0 always the likeliest token
/top_k 200        choose among this many tokens; 0 for all
/save FILE        write what was said to a new file
/help             this
/quit             leave, as Ctrl-D does; Ctrl-C stops an answer"""


class Chat:
    """What was said so far, and what the model is asked to go on from.

    answer: (text so far, settings, stop strings, show) → the model's new text; `show` gets pieces
    template: how a message is put to a model tuned on dialogue, with {user} where it goes, as in
    'User: {user}\\nAssistant:'; empty: what is typed is text, and the model goes on from it
    """

    def __init__(self, answer, settings, template=''):
        self.answer, self.settings = answer, settings
        self.template = template.replace('\\n', '\n')
        self.said = ''

    def turn(self, message, show):
        """Put a message to the model; `show` gets its answer in pieces."""
        opening = self.template.partition('{user}')[0].strip()
        said = message
        if self.template:
            said = ('\n' if self.said else '') + self.template.replace('{user}', message)
        before = self.said
        self.said += said
        heard = []

        def hear(piece):
            heard.append(piece)
            show(piece)

        try:
            # A model that begins to speak for the user is at its end.
            self.answer(self.said, self.settings, [opening] if opening else [], hear)
        except UserError:  # it could not be put to the model, so it was not said
            self.said = before
            raise
        finally:  # what was heard before Ctrl-C was said, too
            self.said += ''.join(heard).rstrip() if self.template else ''.join(heard)

    def command(self, line):
        """Do what a line with / in front asks for → the line to print, or None to leave."""
        name, _, value = line.partition(' ')
        value = value.strip()
        match name:
            case '/quit' | '/exit':
                return None
            case '/help':
                return HELP
            case '/reset':
                self.said = ''
                return 'forgotten'
            case '/temperature' | '/top_k':
                return self.set(name[1:], value)
            case '/save':
                return self.save(value)
        return f'{name} is unknown: /help lists the commands'

    def set(self, name, value):
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
        return f'{name} {getattr(self.settings, name)}'

    def save(self, name):
        if not name:
            return 'name a file: /save FILE'
        try:
            with open(Path(name).expanduser(), 'x', encoding='utf-8') as f:
                f.write(self.said + '\n')
        except OSError as e:
            return f'{name}: {e.strerror}'
        return f'saved to {name}'


def talk(chat):
    """Read lines and answer them until the end of input or /quit."""
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
                chat.turn(line, show)
            except KeyboardInterrupt:
                print(' …', end='')
            except UserError as problem:
                print(problem, end='')
            print()


def show(piece):
    sys.stdout.write(piece)
    sys.stdout.flush()
