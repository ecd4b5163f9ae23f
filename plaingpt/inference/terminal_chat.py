"""A chat with a model at the terminal."""

import json
from contextlib import suppress
from pathlib import Path

from configurator import outside_limits, read_arguments
from plaingpt.data.tokenizers import is_chat
from plaingpt.inference.text_generator import answering
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of

HELP = '''/retry            answer the last message again
/reset            forget the conversation
/temperature 0.8  below 1 safer, above 1 wilder, 0 always the likeliest token
/top_k 200        choose among this many tokens; 0 for all
/save FILE        write the conversation to a new file
/help             this
/quit             leave, as Ctrl-D does; Ctrl-C stops an answer
"""               stands before and after a message of several lines'''
SYSTEM_HELP = '''
/system TEXT      what the assistant is told before all messages; alone, nothing'''


class Chat:
    """What a user and a TextGenerator say in turns. A model that was tuned on conversations reads
    messages in its form. Another one continues a text, without a template that of what is typed.

    settings: a SampleConfig of sample.py
    """

    def __init__(self, generator, settings):
        self.generator, self.settings, self.system = generator, settings, settings.system
        self.is_tuned = is_chat(generator.tokenizer)
        # The answer ends where the model begins to write the user's next message.
        user_prefix = settings.template.partition('{user}')[0].strip()
        self.stops = settings.stops() + ([user_prefix] if user_prefix else [])
        self.messages, self.turns, self.is_full = [], 0, False

    def reply(self, messages):
        """Print the answer to the last of `messages`, which is the user's, as it comes; Ctrl-C ends
        it. They are the conversation then. Raises UserError where the model cannot read them."""
        ids, sampling = self.prompt(messages)
        self.turns += 1  # each answer draws random numbers of its own
        before, pieces = self.generator.tokens, []

        def keep_and_show(piece):
            pieces.append(piece)
            show(piece)

        try:
            self.generator.write([ids], [self.turns], sampling, self.stops, keep_and_show)
        except KeyboardInterrupt:
            print(' …', end='')
        print()
        if self.is_tuned and self.generator.tokens - before == sampling.max_new_tokens:
            print(f'(cut after {count_of(sampling.max_new_tokens, "token")})')
        self.messages = [*messages, {'role': 'assistant', 'content': ''.join(pieces)}]

    def prompt(self, messages):
        """→ (the ids before an answer, how it is drawn)"""
        if not self.is_tuned:
            ids = self.generator.encode(self.as_text(messages), 'your message')
            return ids[-self.generator.model.config.block_size:], self.settings
        ids, unseen, room = self.generator.fit(self.told(messages), self.settings.max_new_tokens)
        if unseen and not self.is_full:
            print('(the context is full: from here on the model does not see the oldest messages)')
            self.is_full = True
        return ids, answering(self.settings, room)

    def told(self, messages):
        """The messages, and before them what the assistant is told."""
        return [{'role': 'system', 'content': self.system}] * bool(self.system) + messages

    def as_text(self, messages):
        """Messages as the text that a model continues."""
        template, text = self.settings.template, ''
        for message in messages:
            if not template:
                text += message['content']
            elif message['role'] == 'user':
                text += '\n' * bool(text) + template.replace('{user}', message['content'])
            else:
                text += message['content'].rstrip()
        return text

    def command(self, line):
        """Carry out a line that begins with / → the line to print, or None to leave."""
        name, _, value = line.partition(' ')
        match name:
            case '/quit' | '/exit':
                return None
            case '/help':
                return HELP + SYSTEM_HELP * self.is_tuned
            case '/retry' if not self.messages:
                return 'there is no message yet'
            case '/retry':
                self.reply(self.messages[:-1])
                return ''
            case '/reset':
                self.messages, self.is_full = [], False
                return 'forgotten'
            case '/system' if self.is_tuned:
                self.system = value.strip()
                return f'the assistant is told {self.system or "nothing"}'
            case '/temperature' | '/top_k':
                return self.change_setting(name[1:], value.strip())
            case '/save':
                return self.save(value.strip())
        return f'{name} is unknown: /help lists the commands'

    def change_setting(self, name, value):
        """Give a setting another value → the line to print."""
        kind = type(self.settings)
        values, problems = read_arguments(kind, [f'--{name}={value}'], vars(self.settings))
        changed = kind(**values)
        if problems := problems + outside_limits(changed):
            return f'{problems[0]}: it stays {getattr(self.settings, name)}'
        self.settings = changed
        return f'{name} {getattr(changed, name)}'

    def save(self, name):
        if not name:
            return 'name a file: /save FILE'
        if not (text := self.saved()):
            return 'nothing has been said yet'
        try:
            with open(Path(name).expanduser(), 'x', encoding='utf-8',
                      errors='backslashreplace') as f:  # lone surrogates too
                f.write(text + '\n')
        except (OSError, RuntimeError, ValueError) as e:  # '~nobody', a name with NUL
            return f'{name}: {getattr(e, "strerror", None) or e}'
        return f'saved to {name}'

    def saved(self):
        """The conversation as a file has it: a text, or as prepare.py chat reads it, which takes no
        turn without text."""
        if not self.is_tuned:
            return self.as_text(self.messages)
        turns = zip(self.messages[::2], self.messages[1::2], strict=True)
        said = [message for turn in turns if turn[1]['content'].strip() for message in turn]
        return json.dumps({'messages': self.told(said)}, ensure_ascii=False) if said else ''


def run_chat(generator, settings):
    """Read messages and answer them until /quit or the end of input. Raises UserError."""
    tuned = is_chat(generator.tokenizer)
    if tuned and settings.template:
        raise UserError(f'template={settings.template}: this model was tuned on conversations and '
                        'has a form of its own: leave it out')
    if settings.system and not tuned:
        raise UserError(f'system={settings.system}: this model was not tuned on conversations, so '
                        'it follows none: leave it out')
    chat = Chat(generator, settings)
    with suppress(ImportError):  # Windows' terminal edits lines itself
        import readline  # noqa: F401  (gives input() line editing and history)
    print('/help lists the commands')
    while True:
        try:
            message = input_message()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print('\n/quit or Ctrl-D leaves')
            continue
        try:
            if message.startswith('/'):
                reply = chat.command(message)
                if reply is None:
                    return
                print(reply, end='\n' * bool(reply))
            elif message.strip():
                chat.reply([*chat.messages, {'role': 'user', 'content': message}])
        except UserError as problem:
            print(problem)
        except KeyboardInterrupt:  # before the answer began
            print(' …')


def input_message():
    """A line, or the lines between two \"\"\", '' where these do not end. Raises EOFError."""
    line = input('> ')
    if not line.startswith('"""'):
        return line
    text = line[3:]
    while not text.endswith('"""'):
        try:
            text += '\n' + input('. ')
        except EOFError:
            print()
            return ''
    return text[:-3].strip('\n')


def show(piece):
    print(piece, end='', flush=True)
