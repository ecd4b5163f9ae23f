"""Files of conversations, in the forms that people have them → messages.

    messages     {"messages": [{"role": "user", "content": "Hi!"}, …]}
    sharegpt     {"conversations": [{"from": "human", "value": "Hi!"}, …]}
    alpaca       {"instruction": "Translate.", "input": "Hallo!", "output": "Hello!"}
    completion   {"prompt": "Hi!", "completion": "Hello."}, or another of PAIRS, or what --prompt
                 and --completion name

One row, of JSON or of a table, is a conversation. A row that is not understood ends the command.
"""

import copy
import json

from plaingpt.data.documents import ROWS, Files, file_type, find_files, read_rows
from plaingpt.system.errors import UserError

PAIRS = (('prompt', 'completion'), ('instruction', 'output'), ('question', 'answer'),
         ('query', 'response'), ('input', 'output'))  # what the user and what the assistant says
ROLES = {role: role for role in ('system', 'user', 'assistant')}
SHAREGPT_ROLES = {'human': 'user', 'gpt': 'assistant', **ROLES}


class Conversations(Files):
    """Conversations of files of rows as a source: each text is the messages as JSON.
    columns: those of the user and of the assistant, or () where the fields of a row tell"""

    def __init__(self, paths, name, columns=(), encoding='utf-8'):
        for path in paths:
            if file_type(path) == 'text':
                raise UserError(f'{path}: conversations are read from {", ".join(ROWS)} files: '
                                'write them as a table, or as JSON, one conversation a line')
        super().__init__(paths, name, encoding=encoding)
        self.columns, self.left_out, self.as_text = columns, set(), False

    def texts(self):
        """The same source as plain text of the messages, to learn a tokenizer from."""
        found = copy.copy(self)
        found.as_text = True
        return found

    def documents(self, file):
        for where, row in read_rows(file, self.encoding):
            fields = find_fields(row, where, self.columns)
            messages = parse_row(row, fields, where)
            if others := row.keys() - {*fields} - self.left_out:
                print(f'{where}: left out, as no part of the conversation: '
                      f'{", ".join(sorted(others))}')
                self.left_out |= others
            yield '\n'.join(message['content'] for message in messages) if self.as_text \
                else json.dumps(messages, ensure_ascii=False), True


def open_conversations(config):
    """The source of the files that a PrepareConfig names. Raises UserError."""
    columns = (config.prompt, config.completion) if config.prompt else ()
    return Conversations(find_files(config.input, ROWS), config.input, columns, config.encoding)


def find_fields(row, where, columns=()):
    """The fields of a row that say what was said: `columns`, ('messages',), ('conversations',), or
    those of the user, of the assistant, and perhaps one with which the user goes on. UserError."""
    names = row.keys() if isinstance(row, dict) else ()
    for fields in [columns] if columns else (('messages',), ('conversations',), *PAIRS):
        if all(field in names for field in fields):
            is_alpaca = fields[0] == 'instruction' and row.get('input') and not columns
            return (*fields, 'input') if is_alpaca else fields
    raise UserError(f'{where}: no conversation, it is {as_json(row)}: leave this file out, or name '
                    'its columns with --prompt=… --completion=… (found by themselves: messages, '
                    f'conversations, {", ".join(map(" and ".join, PAIRS))})')


def parse_row(row, fields, where):
    """A row → messages. Raises UserError."""
    if fields == ('messages',):
        messages = parse_messages(row['messages'], where)
    elif fields == ('conversations',):
        messages = parse_messages(row['conversations'], where, 'from', 'value', SHAREGPT_ROLES)
    else:
        prompt, answer, *more = (content_of(row[name], f'{where}: field {name!r}')
                                 for name in fields)
        messages = [{'role': 'user', 'content': '\n\n'.join([prompt, *more])},
                    {'role': 'assistant', 'content': answer}]
    if all(message['role'] != 'assistant' for message in messages):
        raise UserError(f'{where}: the assistant says nothing, so nothing is learned: leave this '
                        'conversation out')
    return messages


def parse_messages(found, where, role_key='role', content_key='content', roles=ROLES):
    """Messages as JSON has them → [{'role', 'content'}, …]. Raises UserError.

    roles: {what the file calls them: one of ROLES}
    """
    if not isinstance(found, list) or not found:
        raise UserError(f'{where}: no messages: a list of them is expected')
    messages = []
    for number, message in enumerate(found, 1):
        here = f'{where}: message {number}'
        said = {key: value for key, value in message.items() if value not in (None, [])} \
            if isinstance(message, dict) else {}
        if said.keys() != {role_key, content_key} or said[role_key] not in [*roles]:
            raise UserError(f'{here} is {as_json(message)}: an object with {role_key} and '
                            f'{content_key} alone is expected; as {role_key} expected one of '
                            f'{", ".join(roles)}')
        messages.append({'role': roles[said[role_key]],
                         'content': content_of(said[content_key], here)})
    said_by = [message['role'] for message in messages]
    speaking = said_by[1:] if said_by[0] == 'system' else said_by
    if 'system' in speaking or speaking[:1] == ['assistant']:
        raise UserError(f'{where}: one system message may stand first, and then the user speaks: '
                        'put these messages in order')
    return messages


def content_of(value, where):
    """The text of a message, also of OpenAI's parts, [{'type': 'text', 'text': …}]. UserError."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.keys() == {'type', 'text'}
                                       and isinstance(part['text'], str) for part in value):
        value = ''.join(part['text'] for part in value)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f'{where} is {as_json(value)}: text is expected: leave this conversation '
                        'out, or describe it as text')
    return value


def as_json(value):
    """A JSON value in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)  # Parquet has dates
    return text if len(text) <= 100 else text[:100] + '…'
