"""Files of conversations, in the forms that people have them → messages.

    messages     {"messages": [{"role": "user", "content": "Hi!"}, …]}
    sharegpt     {"conversations": [{"from": "human", "value": "Hi!"}, …]}
    alpaca       {"instruction": "Translate.", "input": "Hallo!", "output": "Hello!"}
    completion   {"prompt": "Hi!", "completion": "Hello."}

One row is a conversation. What it says is neither changed nor dropped: a row that is not wholly
understood ends the command.
"""

import copy
import json

from plaingpt.data.readers import file_type, iter_rows
from plaingpt.data.sources import Files, find_files
from plaingpt.system.errors import UserError

FORMS = {  # form → the fields by which it is known
    'messages': {'messages'}, 'sharegpt': {'conversations'},
    'alpaca': {'instruction', 'output'}, 'completion': {'prompt', 'completion'}}
ROLES = ('system', 'user', 'assistant')
SHAREGPT_ROLES = {'human': 'user', 'gpt': 'assistant', **{role: role for role in ROLES}}
# Fields beside a conversation that say what the assistant was told: without them it is another one.
TOLD = ('system', 'system_prompt', 'instruction', 'prompt', 'history', 'context', 'documents',
        'input', 'tools', 'functions')
SHOWN = 100  # characters of a value in a message


class Conversations(Files):
    """Conversations of .jsonl and .json files as a source: each text is the messages as JSON."""

    def __init__(self, paths, name, form='auto', errors='strict'):
        for path in paths:
            if file_type(path) not in ('jsonl', 'json'):
                raise UserError(f'{path}: conversations are read from .jsonl and .json files: '
                                'write them as JSON, one conversation a line')
        super().__init__(paths, name, errors=errors)
        self.form, self.left_out, self.as_text = form, set(), False

    def texts(self):
        """The same source, whose pieces are what the messages say, to learn a tokenizer from."""
        found = copy.copy(self)
        found.as_text = True
        return found

    def documents(self, file):
        form = self.form
        for where, row in iter_rows(file, errors=self.errors):
            form = find_form(row, where) if form == 'auto' else form
            messages, left_out = parse_conversation(row, form, where)
            if new := [name for name in left_out if name not in self.left_out]:
                self.left_out.update(new)
                print(f'{where}: left out, as no part of the conversation: {as_json(new)}')
            if self.as_text:
                yield '\n'.join(message['content'] for message in messages), True
            else:
                yield json.dumps(messages, ensure_ascii=False), True


def open_conversations(config, name):
    """The source of the files that a PrepareConfig names. Raises UserError."""
    if not config.input:
        raise UserError(f'{name} needs --input=FILES_OR_FOLDERS')
    return Conversations(find_files(config.input, print), config.input, config.format,
                         config.errors)


def find_form(row, where):
    """The form of a row, by its fields. Raises UserError."""
    fields = row.keys() if isinstance(row, dict) else ()
    found = [form for form, needed in FORMS.items() if needed <= set(fields)]
    if len(found) == 1:
        return found[0]
    forms = '; '.join(f'{form}: {", ".join(sorted(needed))}' for form, needed in FORMS.items())
    raise UserError(f'{where}: fields of several forms ({", ".join(found)}): say which with '
                    '--format=…' if found else
                    f'{where}: no conversation, it is {as_json(row)}: the forms are known by these '
                    f'fields ({forms})')


def parse_conversation(row, form, where):
    """A row in a form → (messages, names of fields that are no part of them). Raises UserError."""
    if not isinstance(row, dict) or not FORMS[form] <= row.keys():
        raise UserError(f'{where}: not of the form {form}, which has the fields '
                        f'{", ".join(sorted(FORMS[form]))}: it is {as_json(row)}')
    taken = FORMS[form] | ({'input'} if form == 'alpaca' else set())
    if form == 'messages':
        messages = parse_messages(row['messages'], where)
    elif form == 'sharegpt':
        messages = parse_messages(row['conversations'], where, 'from', 'value', SHAREGPT_ROLES)
    else:
        names = ('prompt', 'completion') if form == 'completion' else ('instruction', 'output')
        prompt, answer = (content_of(row[name], f'{where}: field {name!r}') for name in names)
        if form == 'alpaca' and row.get('input') not in (None, ''):
            more = content_of(row['input'], f"{where}: field 'input'")
            prompt = f'{prompt}\n\n{more}'
        messages = [{'role': 'user', 'content': prompt}, {'role': 'assistant', 'content': answer}]
    if all(message['role'] != 'assistant' for message in messages):
        raise UserError(f'{where}: the assistant says nothing, so nothing is learned: leave this '
                        'conversation out')
    said = [message['content'] for message in messages]  # a field may repeat one of these
    left_out = [name for name in row if name not in taken]
    for name in left_out:
        if name.lower() in TOLD and row[name] and row[name] not in said:
            raise UserError(f'{where}: the field {name!r} would be lost, and the assistant was '
                            f'told it: make it a part of a message (of role system, or of user)')
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
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[:SHOWN] + '…'
