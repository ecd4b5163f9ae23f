"""A chat with a model at the terminal."""

from contextlib import suppress

from plaingpt.data.tokenizers import is_chat
from plaingpt.inference.text_generator import print_text
from plaingpt.system.errors import UserError


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
