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

from plaingpt.data.readers import ROWS, file_type, iter_rows
from plaingpt.data.sources import Files, find_files
from plaingpt.system.errors import UserError

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
    columns: those of the user and of the assistant, or () where the fields of a row tell"""

    def __init__(self, paths, name, columns=(), errors='strict', encoding='utf-8'):
        for path in paths:
            if file_type(path) == 'text':
                raise UserError(f'{path}: conversations are read from {", ".join(ROWS)} files: '
                                'write them as a table, or as JSON, one conversation a line')
        super().__init__(paths, name, errors=errors, encoding=encoding)
        self.columns, self.printed, self.as_text = columns, set(), False

    def texts(self):
        """The same source, whose pieces are what the messages say, to learn a tokenizer from."""
        found = copy.copy(self)
        found.as_text = True
        return found

    def documents(self, file):
        for where, row in iter_rows(file, errors=self.errors, encoding=self.encoding):
            fields = self.columns or find_fields(row, where)
            messages = parse_row(row, fields, where)
            if len(fields) > 1:
                self.print_once(f'{file.name}: {" and ".join(map(repr, fields[::2]))} is what the '
                                f'user says, {fields[1]!r} what the assistant says (others: '
                                '--prompt and --completion)', fields)
            others = [name for name in row if name not in fields]
            said = [message['content'] for message in messages]  # a field may repeat one of these
            for name in () if self.columns else others:
                if name.strip().lower() in TOLD and row[name] and row[name] not in said:
                    raise UserError(f'{where}: the field {name!r} would be lost: make it a message '
                                    '(of role system, or of user), or leave it out with '
                                    '--prompt=… --completion=…')
            if others:
                self.print_once(f'{where}: left out, as no part of the conversation: '
                                f'{as_json(others)}', *others)
            text = '\n'.join(said) if self.as_text else json.dumps(messages, ensure_ascii=False)
            yield text, True

    def print_once(self, line, *keys):
        """Print a line where one of `keys` is new."""
        if not self.printed >= {*keys}:
            print(line)
            self.printed |= {*keys}


def open_conversations(config):
    """The source of the files that a PrepareConfig names. Raises UserError."""
    columns = (config.prompt, config.completion) if config.prompt else ()
    return Conversations(find_files(config.input, ROWS), config.input, columns, config.errors,
                         config.encoding)


def find_fields(row, where):
    """The fields of a row that say what was said: ('messages',), ('conversations',), or those of
    the user, of the assistant, and perhaps one with which the user goes on. Raises UserError."""
    names = row.keys() if isinstance(row, dict) else ()
    for field in ('messages', 'conversations'):
        if field in names:
            return (field,)
    by_name = {name.strip().lower(): name for name in names}
    more = [by_name.pop('input')] if {'instruction', 'input'} <= by_name.keys() else []
    for prompt, answer in ('prompt', 'completion'), ('instruction', 'output'):
        if {prompt, answer} <= by_name.keys():
            return by_name[prompt], by_name[answer], *(more if prompt == 'instruction' else [])
    prompts = [by_name[name] for name in PROMPTS if name in by_name]
    answers = [by_name[name] for name in ANSWERS if name in by_name]
    if len(prompts) == len(answers) == 1:
        return *prompts, *answers, *more
    if prompts and answers:
        raise UserError(f'{where}: the user may speak in {", ".join(prompts)}, the assistant in '
                        f'{", ".join(answers)}: name the columns with --prompt=… --completion=…')
    raise UserError(f'{where}: no conversation, it is {as_json(row)}: leave this file out, or name '
                    'its columns with --prompt=… --completion=… (found by themselves: messages, '
                    f'conversations, or one of {", ".join(PROMPTS)} and one of '
                    f'{", ".join(ANSWERS)}; a table begins with their line)')


def parse_row(row, fields, where):
    """A row → messages. Raises UserError."""
    if not isinstance(row, dict) or not row.keys() >= {*fields}:
        raise UserError(f'{where}: no fields {", ".join(fields)}, it is {as_json(row)}: name its '
                        'columns with --prompt and --completion')
    if fields == ('messages',):
        messages = parse_messages(row['messages'], where)
    elif fields == ('conversations',):
        messages = parse_messages(row['conversations'], where, 'from', 'value', SHAREGPT_ROLES)
    else:
        prompt, answer, *more = (content_of(row[name], f'{where}: field {name!r}')
                                 for name in fields if row[name] not in (None, '')
                                 or name in fields[:2])
        messages = [{'role': 'user', 'content': '\n\n'.join([prompt, *more])},
                    {'role': 'assistant', 'content': answer}]
    if all(message['role'] != 'assistant' for message in messages):
        raise UserError(f'{where}: the assistant says nothing, so nothing is learned: leave this '
                        'conversation out')
    return messages


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
