"""A chat with a model at the terminal."""

import math
import sys
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
    """A conversation, and the settings of its next answer.

    answer: (text so far, settings, stop strings, show): generates an answer and calls `show` with
        each new piece of it
    template: for a model tuned on dialogue: the text around each message, with {user} in its
        place, as in 'User: {user}\\nAssistant:'. Empty: the model continues what is typed
    """

    def __init__(self, answer, settings, template=''):
        self.answer, self.settings = answer, settings
        self.template = template.replace('\\n', '\n')
        self.transcript = ''

    def turn(self, message, show):
        """Add a message and the model's answer to it; `show` gets the answer in pieces."""
        before = self.transcript
        if self.template:
            message = ('\n' if before else '') + self.template.replace('{user}', message)
        self.transcript += message
        # The answer ends where the model begins to write the user's next message.
        user_prefix = self.template.partition('{user}')[0].strip()
        pieces = []

        def keep_and_show(piece):
            pieces.append(piece)
            show(piece)

        try:
            self.answer(self.transcript, self.settings, [user_prefix] if user_prefix else [],
                        keep_and_show)
        except UserError:  # the model cannot read the message: forget it
            self.transcript = before
            raise
        finally:  # after Ctrl-C, the pieces shown so far stay in the transcript
            text = ''.join(pieces)
            self.transcript += text.rstrip() if self.template else text

    def command(self, line):
        """Carry out a line that begins with / → the line to print, or None to leave."""
        name, _, value = line.partition(' ')
        value = value.strip()
        match name:
            case '/quit' | '/exit':
                return None
            case '/help':
                return HELP
            case '/reset':
                self.transcript = ''
                return 'forgotten'
            case '/temperature' | '/top_k':
                return self.change_setting(name[1:], value)
            case '/save':
                return self.save(value)
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
        return f'{name} {getattr(self.settings, name)}'

    def save(self, name):
        if not name:
            return 'name a file: /save FILE'
        try:
            with open(Path(name).expanduser(), 'x', encoding='utf-8') as f:
                f.write(self.transcript + '\n')
        except OSError as e:
            return f'{name}: {e.strerror}'
        return f'saved to {name}'


def run_chat(chat):
    """Read lines and answer them until /quit or the end of input."""
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
