"""A chat with a model at the terminal."""

import json
from contextlib import suppress
from pathlib import Path

from plaingpt.data.tokenizers import is_chat
from plaingpt.system.errors import UserError, print_text
from plaingpt.system.formatting import count_of

BASE_MODEL = 'this model was not tuned on conversations: it goes on from what you type'
HELP = '''/retry        answer the last message again
/system TEXT  what the assistant is told before all messages; alone, nothing
/reset        forget the conversation
/save FILE    write the conversation to a new file
/help         this
/quit         leave, as Ctrl-D does; Ctrl-C stops an answer'''


class Chat:
    """What a user and a TextGenerator say in turns. A model that was tuned on conversations reads
    messages in its form. Another one continues the text of all that was said.

    settings: a SampleConfig of sample.py
    """

    def __init__(self, generator, settings):
        self.generator, self.settings, self.system = generator, settings, settings.system
        self.is_tuned = is_chat(generator.tokenizer)
        self.messages, self.turns = [], 0

    def reply(self, messages):
        """Print the answer to the last of `messages`, which is the user's, as it comes; Ctrl-C ends
        it. They are the conversation then. Raises UserError where the model cannot read them."""
        if self.is_tuned:
            ids, sampling, unseen = self.generator.prepare_answer(self.told(messages),
                                                                  self.settings)
        else:
            ids, sampling, unseen = self.generator.encode(text_of(messages), 'your message'), \
                self.settings, 0
        if unseen:
            print(f'(the context is full: the model does not see the oldest {unseen} messages)')
        self.turns += 1  # each answer draws random numbers of its own
        before, pieces = self.generator.tokens, []

        def show(piece):
            pieces.append(piece)
            print_text(piece, end='')

        try:
            self.generator.write([ids], [self.turns], sampling, self.settings.stops(), show)
        except KeyboardInterrupt:
            print(' …', end='')
        print()
        if self.is_tuned and self.generator.tokens - before == sampling.max_new_tokens:
            print(f'(cut after {count_of(sampling.max_new_tokens, "token")})')
        self.messages = [*messages, {'role': 'assistant', 'content': ''.join(pieces)}]

    def told(self, messages):
        """The messages, and before them what the assistant is told."""
        return [*([{'role': 'system', 'content': self.system}] if self.system else []), *messages]

    def command(self, line):
        """Carry out a line that begins with / → the line to print, or None to leave."""
        name, _, value = line.partition(' ')
        match name:
            case '/quit' | '/exit':
                return None
            case '/help':
                return HELP
            case '/retry' if self.messages:
                return self.reply(self.messages[:-1]) or ''
            case '/reset':
                self.messages = []
                return 'forgotten'
            case '/system' if self.is_tuned:
                self.system = value.strip()
                return f'the assistant is told {self.system or "nothing"}'
            case '/save' if value:
                return self.save(Path(value).expanduser())
        return f'{line} cannot be done: /help lists the commands'

    def save(self, path):
        """Write the conversation as prepare.py chat reads it, or as a text → the line to print."""
        text = json.dumps({'messages': self.told(self.messages)}, ensure_ascii=False) \
            if self.is_tuned else text_of(self.messages)
        try:
            with open(path, 'x', encoding='utf-8', errors='backslashreplace') as f:
                f.write(text + '\n')
        except OSError as e:
            return f'{path}: {e.strerror}'
        return f'saved to {path}'


def text_of(messages):
    return ''.join(message['content'] for message in messages)


def run_chat(generator, settings):
    """Read messages and answer them until /quit or the end of input. Raises UserError."""
    chat = Chat(generator, settings)
    if settings.system and not chat.is_tuned:
        raise UserError(f'system={settings.system}: {BASE_MODEL}, so leave it out')
    with suppress(ImportError):  # Windows' terminal edits lines itself
        import readline  # noqa: F401  (gives input() line editing and history)
    print('/help lists the commands')
    if not chat.is_tuned:
        print(BASE_MODEL)
    while True:
        try:
            line = input('> ')
            if line.startswith('/'):
                reply = chat.command(line)
                if reply is None:
                    return
                if reply:
                    print(reply)
            elif line.strip():
                chat.reply([*chat.messages, {'role': 'user', 'content': line}])
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print('\n/quit or Ctrl-D leaves')
        except UserError as problem:
            print(problem)
