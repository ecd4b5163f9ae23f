"""Files of conversations, in the forms that people have them → messages.

    messages     {"messages": [{"role": "user", "content": "Hi!"}, …]}
    sharegpt     {"conversations": [{"from": "human", "value": "Hi!"}, …]}
    alpaca       {"instruction": "Translate.", "input": "Hallo!", "output": "Hello!"}
    completion   {"prompt": "Hi!", "completion": "Hello."}, or with other names: --prompt and
                 --completion tell them, or they are one of PROMPTS and one of ANSWERS

One row, of JSON or of a table, is a conversation. What it says is neither changed nor dropped: a
row that is not wholly understood ends the command.
"""

import copy
import json
from typing import NamedTuple

from plaingpt.data.readers import ROWS, file_type, iter_rows
from plaingpt.data.sources import Files, find_files
from plaingpt.system.errors import UserError


class Form(NamedTuple):
    """What the rows of a file look like."""

    name: str
    fields: tuple  # by which it is known; where there are two, what the user and the assistant say
    more: str = ''  # a field with which the user goes on, or ''
    is_asked: bool = False  # the options name its fields, and no others are wanted


FORMS = {form.name: form for form in (
    Form('messages', ('messages',)), Form('sharegpt', ('conversations',)),
    Form('alpaca', ('instruction', 'output'), 'input'),
    Form('completion', ('prompt', 'completion')))}
PROMPTS = ('question', 'prompt', 'instruction', 'user', 'query', 'input')  # usual names, any case
ANSWERS = ('answer', 'completion', 'response', 'output', 'assistant')
ROLES = ('system', 'user', 'assistant')
SHAREGPT_ROLES = {'human': 'user', 'gpt': 'assistant', **{role: role for role in ROLES}}
# Fields beside a conversation that say what the assistant was told: without them it is another one.
TOLD = ('system', 'system_prompt', 'instruction', 'prompt', 'history', 'context', 'documents',
        'input', 'tools', 'functions')
SHOWN = 100  # characters of a value in a message


class Conversations(Files):
    """Conversations of files of rows as a source: each text is the messages as JSON.
    form: a Form, or None where the first row of each file tells"""

    def __init__(self, paths, name, form=None, errors='strict', encoding='utf-8'):
        for path in paths:
            if file_type(path) == 'text':
                raise UserError(f'{path}: conversations are read from {", ".join(ROWS)} files: '
                                'write them as a table, or as JSON, one conversation a line')
        super().__init__(paths, name, errors=errors, encoding=encoding)
        self.form, self.printed, self.as_text = form, set(), False

    def texts(self):
        """The same source, whose pieces are what the messages say, to learn a tokenizer from."""
        found = copy.copy(self)
        found.as_text = True
        return found

    def documents(self, file):
        form = self.form
        for where, row in iter_rows(file, errors=self.errors, encoding=self.encoding):
            if form is None:
                form = find_form(row, where)
                self.print_columns(form, file.name)
            messages, left_out = parse_conversation(row, form, where)
            if new := [name for name in left_out if name not in self.printed]:
                self.printed.update(new)
                print(f'{where}: left out, as no part of the conversation: {as_json(new)}')
            if self.as_text:
                yield '\n'.join(message['content'] for message in messages), True
            else:
                yield json.dumps(messages, ensure_ascii=False), True

    def print_columns(self, form, name):
        """Say once which columns were found."""
        if len(form.fields) == 2 and form.fields not in self.printed:
            self.printed.add(form.fields)
            prompt, answer = map(repr, form.fields)
            and_more = f' and {form.more!r}' if form.more else ''
            print(f'{name}: {prompt}{and_more} is what the user says, {answer} what the assistant '
                  'says (others: --prompt and --completion)')


def open_conversations(config):
    """The source of the files that a PrepareConfig names. Raises UserError."""
    form = FORMS.get(config.format) if not config.prompt else \
        Form('completion', (config.prompt, config.completion), is_asked=True)
    return Conversations(find_files(config.input, ROWS), config.input, form, config.errors,
                         config.encoding)


def find_form(row, where):
    """The form of a row, by its fields. Raises UserError."""
    fields = row.keys() if isinstance(row, dict) else ()
    found = [form for form in FORMS.values() if set(form.fields) <= set(fields)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f'{where}: fields of several forms '
                        f'({", ".join(form.name for form in found)}): say which with --format=…')
    by_name = {name.strip().lower(): name for name in fields}
    more = by_name.pop('input', '') if 'instruction' in by_name else ''
    prompts = [by_name[name] for name in PROMPTS if name in by_name]
    answers = [by_name[name] for name in ANSWERS if name in by_name]
    if len(prompts) == len(answers) == 1:
        return Form('completion', (*prompts, *answers), more)
    if prompts and answers:
        raise UserError(f'{where}: the user may speak in {", ".join(prompts)}, the assistant in '
                        f'{", ".join(answers)}: name the columns with --prompt=… --completion=…')
    forms = '; '.join(f'{name}: {", ".join(sorted(form.fields))}' for name, form in FORMS.items())
    raise UserError(f'{where}: no conversation, it is {as_json(row)}: leave this file out, or name '
                    'its columns with --prompt=… --completion=… (found by themselves: one of '
                    f'{", ".join(PROMPTS)}, and one of {", ".join(ANSWERS)}; a table begins with '
                    f'their line), or write one of the forms with these fields ({forms})')


def parse_conversation(row, form, where):
    """A row in a form → (messages, names of fields that are no part of them). Raises UserError."""
    if not isinstance(row, dict) or not row.keys() >= set(form.fields):
        fix = 'name its columns with --prompt and --completion' if form.is_asked else \
            'one file has one form: put other rows into a file of their own'
        raise UserError(f'{where}: not of the form {form.name}, which has the fields '
                        f'{", ".join(sorted(form.fields))}: it is {as_json(row)}: {fix}')
    if form.name == 'messages':
        messages = parse_messages(row['messages'], where)
    elif form.name == 'sharegpt':
        messages = parse_messages(row['conversations'], where, 'from', 'value', SHAREGPT_ROLES)
    else:
        prompt, answer = (content_of(row[name], f'{where}: field {name!r}')
                          for name in form.fields)
        if form.more and row.get(form.more) not in (None, ''):
            more = content_of(row[form.more], f'{where}: field {form.more!r}')
            prompt = f'{prompt}\n\n{more}'
        messages = [{'role': 'user', 'content': prompt}, {'role': 'assistant', 'content': answer}]
    if all(message['role'] != 'assistant' for message in messages):
        raise UserError(f'{where}: the assistant says nothing, so nothing is learned: leave this '
                        'conversation out')
    said = [message['content'] for message in messages]  # a field may repeat one of these
    left_out = [name for name in row if name not in (*form.fields, form.more)]
    for name in () if form.is_asked else left_out:
        if name.lower() in TOLD and row[name] and row[name] not in said:
            raise UserError(f'{where}: the field {name!r} would be lost, and the assistant was '
                            f'told it: make it a part of a message (of role system, or of user)'
                            + ', or leave it out with --prompt=… --completion=…'
                            * (len(form.fields) == 2))
    return messages, left_out


def parse_messages(found, where, role_key='role', content_key='content', roles=None):
    """Messages as JSON has them → [{'role', 'content'}, …]. Raises UserError.

    roles: {what the file calls them: one of ROLES}; where None, they have these names
    """
    roles = roles or {role: role for role in ROLES}
    if not isinstance(found, list) or not found:
        raise UserError(f'{where}: no messages: a list of them is expected')
    messages = []
    for number, message in enumerate(found, 1):
        here = f'{where}: message {number}'
        if not isinstance(message, dict) or not {role_key, content_key} <= message.keys():
            raise UserError(f'{here} is {as_json(message)}: an object with {role_key} and '
                            f'{content_key} is expected')
        role, content = message[role_key], message[content_key]
        if others := [key for key, value in message.items()
                      if key not in (role_key, content_key) and value not in (None, [])]:
            raise UserError(f'{here} has {as_json(others)}, which would be lost: leave it out or '
                            f'make it text of the {content_key}')
        if not isinstance(role, str) or role not in roles:
            raise UserError(f'{here}: {role_key} is {as_json(role)}: expected one of '
                            f'{", ".join(roles)}')
        if roles[role] == 'system' and messages:
            raise UserError(f'{here}: a system message stands first, and there is one at most: put '
                            'their texts together')
        messages.append({'role': roles[role], 'content': content_of(content, here)})
    said = [message['role'] for message in messages if message['role'] != 'system']
    if said[:1] == ['assistant']:
        raise UserError(f'{where}: the assistant speaks before the user: leave its first message '
                        'out, or put what it answers before it')
    return messages


def content_of(value, where):
    """The text of a message, also of OpenAI's parts, [{'type': 'text', 'text': …}]. UserError."""
    parts = value if isinstance(value, list) else [{'type': 'text', 'text': value}]
    for part in parts:
        match part:
            case {'type': 'text', 'text': str(), **more} if not more:
                pass
            case _:
                raise UserError(f'{where} is {as_json(value)}: text is expected: leave this '
                                'conversation out, or describe it as text')
    text = ''.join(part['text'] for part in parts)
    if not text.strip():
        raise UserError(f'{where} is empty: write its text, or leave it out')
    return text


def as_json(value):
    """A JSON value in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)  # Parquet has dates
    return text if len(text) <= SHOWN else text[:SHOWN] + '…'
