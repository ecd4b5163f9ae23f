"""Rows of conversations in common formats → messages.

    messages   {"messages": [{"role": "user", "content": "Hi!"}, …]}, also under "conversations",
               with from and value (ShareGPT), as a bare list, or as a JSON string
    pairs      {"prompt": "Hi!", "completion": "Hello."}, also under other names in PAIRS or those
               of --prompt and --completion; each a text or a list of messages
    alpaca     {"instruction": "Translate.", "input": "Hallo!", "output": "Hello!"}, also with
               history

Each row of a JSON file or a table is one conversation. A column named system is its system message.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace

from plaingpt.data.rows import first_match, list_columns, match_name
from plaingpt.data.unusable import Unusable
from plaingpt.system.errors import UserError

LISTS = 'messages', 'conversations'
PAIRS = (('instruction', 'output'), ('prompt', 'completion'), ('question', 'answer'),
         ('query', 'response'), ('input', 'output'))
ROLES = {'system': 'system', 'developer': 'system', 'user': 'user', 'human': 'user',
         'assistant': 'assistant', 'gpt': 'assistant', 'model': 'assistant', 'bot': 'assistant'}
CALLS = 'tool_calls', 'function_call'  # keys of messages


@dataclass(frozen=True)
class ConversationReader:
    """Reads the conversation in a row.

    pair_columns: the columns of the user and of the assistant, or () to find them by name
    plain: return the plain text instead of the messages as JSON
    tokenizer: a ChatTokenizer, whose template may refuse some roles, or None
    """

    is_divisible = False
    pair_columns: tuple = ()
    plain: bool = False
    tokenizer: object = None
    unused: set = field(default_factory=set)  # columns of rows and keys of messages

    def restart(self):
        self.unused.clear()

    def describe(self):
        """A line that lists the columns and keys that were ignored."""
        if self.unused:
            yield f'ignored fields: {", ".join(sorted(self.unused))}'

    @property
    def by_number(self):
        """Whether the columns are numbers, from 1, of a table without a header."""
        return bool(self.pair_columns) and all(name.isdecimal() for name in self.pair_columns)

    def columns(self, names):
        return names

    def is_row(self, value):
        """Whether a JSON object is a conversation."""
        with suppress(Unusable):
            replace(self, unused=set()).read_messages(value, '')
            return True
        return False

    def texts(self, row, where):
        """[the conversation]. Raises Unusable."""
        messages = self.read_messages(row, where)
        check_order(messages, where)
        if not any(map(is_in_loss, messages)):
            raise Unusable(where, 'no assistant reply to learn from')
        if self.tokenizer:
            roles = tuple(message['role'] for message in messages)
            try:
                self.tokenizer.check_roles(roles)
            except UserError as problem:
                raise Unusable(where, str(problem), f': {", ".join(roles)}') from None
        if self.plain:
            return ['\n'.join(message['content'] for message in messages)]
        return [json.dumps(messages, ensure_ascii=False)]

    def read_messages(self, row, where):
        if isinstance(row, list):
            return parse_list(row, where, self.unused)
        if not isinstance(row, dict):
            raise Unusable(where, 'not a conversation', f': {as_json(row)}')
        fields = self.find_fields(row, where)
        self.unused.update(key for key, value in row.items()
                           if key not in fields.values() and has_content(value))
        values = {role: row[name] for role, name in fields.items() if name is not None}
        if 'messages' in values:
            messages = parse_list(values['messages'], where, self.unused)
        else:
            messages = self.read_pair(values, fields, where)
        if has_content(values.get('system')):
            messages.insert(0, message_of('system', values['system'], where, 'system'))
        return messages

    def find_fields(self, row, where):
        """{'messages', or 'prompt', 'completion' and their optional fields: the name of that field
        in a row, or None}. Raises Unusable."""
        if self.pair_columns:
            prompt, completion = (match_name(name, row) for name in self.pair_columns)
            if prompt is None or completion is None:
                raise Unusable(where, f'no columns {" and ".join(self.pair_columns)}', ' among '
                               f'{list_columns(row)}: choose with --prompt and --completion')
            return {'prompt': prompt, 'completion': completion}
        system, messages = match_name('system', row), first_match(LISTS, row)
        if messages:
            return {'messages': messages, 'system': system}
        for names in PAIRS:
            prompt, completion = (match_name(name, row) for name in names)
            if prompt is None or completion is None:
                continue
            fields = {'prompt': prompt, 'completion': completion, 'system': system}
            if names == ('instruction', 'output'):
                fields |= {name: match_name(name, row) for name in ('input', 'history')}
            return fields
        raise Unusable(where, 'cannot find question and answer columns',
                       f' among {list_columns(row)}: set them with --prompt and --completion')

    def read_pair(self, values, fields, where):
        """The user's and the assistant's text in separate fields → messages."""
        history = []
        if has_content(values.get('history')):
            for turn in as_list(values['history'], where):
                if not isinstance(turn, list) or len(turn) != 2:
                    raise Unusable(where, 'history is not a list of turns',
                                   f': expected [question, answer], got {as_json(turn)}')
                history += [message_of('user', turn[0], where, 'history'),
                            message_of('assistant', turn[1], where, 'history')]
        prompt, completion = values['prompt'], values['completion']
        if isinstance(prompt, list):
            context = parse_list(prompt, where, self.unused)
        else:
            context = [message_of('user', prompt, where, fields['prompt'])]
            if has_content(values.get('input')):
                more = message_of('user', values['input'], where, fields['input'])
                context[0]['content'] += f"\n\n{more['content']}"
        if isinstance(completion, list):
            replies = parse_list(completion, where, self.unused)
            if replies[:len(context)] == context:  # the completion repeats the prompt
                replies = replies[len(context):]
        else:
            replies = [message_of('assistant', completion, where, fields['completion'])]
        for message in context:
            if message['role'] == 'assistant':  # not learned, as in TRL
                message['weight'] = 0
        return [*history, *context, *replies]


def has_content(value):
    return value not in (None, '', [], {}) and not (isinstance(value, str) and value.isspace())


def is_in_loss(message):
    """Whether a message counts in the loss: OpenAI's `weight` of 0 excludes it."""
    return message['role'] == 'assistant' and message.get('weight') != 0


def parse_messages(value, where):
    """Messages from JSON → [{'role', 'content'}, …]. Raises UserError."""
    messages = parse_list(value, where, set())
    check_order(messages, where)
    return messages


def parse_list(value, where, unused):
    """The same for a part of a conversation. unused: set to which ignored keys are added"""
    messages = []
    for number, row in enumerate(as_list(value, where), 1):
        messages += parse_message(row, f'{where}: message {number}', unused)
    return messages


def as_list(value, where):
    """A list, or JSON of a list → list. Raises Unusable."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list):
        raise Unusable(where, 'no messages', f': expected a list, got {as_json(value)}')
    return value


def parse_message(row, where, unused):
    """→ [message], or [] for an empty system message. Raises Unusable."""
    if not isinstance(row, dict):
        raise Unusable(where, 'not a message', f': expected an object, got {as_json(row)}')
    role_key = first_match(('role', 'from'), row) or 'role'
    content_key = first_match(('content', 'value'), row) or 'content'
    if any(has_content(row.get(key)) for key in CALLS):
        raise Unusable(where, 'tool calls, which train.py does not support',
                       ': remove these conversations, or write the calls as text')
    role = ROLES.get(str(row.get(role_key)).casefold())
    if role is None:
        raise Unusable(where, 'unknown role',
                       f' {as_json(row.get(role_key))}: expected one of {", ".join(ROLES)}')
    weight = row.get('weight')
    if weight not in (None, 0, 1):
        raise Unusable(where, 'a weight that is neither 0 nor 1', f': {as_json(weight)}')
    unused.update(key for key, value in row.items() if has_content(value)
                  and key not in (role_key, content_key, 'weight'))
    content = join_text(row.get(content_key))
    if role == 'system' and not has_content(content):
        return []
    message = message_of(role, content, where, content_key)
    if role == 'assistant' and weight == 0:
        message['weight'] = 0
    return [message]


def check_order(messages, where):
    """Raises Unusable unless the user speaks first, or right after one system message."""
    roles = [message['role'] for message in messages]
    speakers = roles[1:] if roles[:1] == ['system'] else roles
    if not roles:
        raise Unusable(where, 'no messages')
    if 'system' in speakers:
        raise Unusable(where, 'a system message that is not the first message')
    if speakers[:1] == ['assistant']:
        raise Unusable(where, 'the assistant speaks first', ': expected the user')


def message_of(role, value, where, key):
    """A message. Raises Unusable if a value has no text; key: its name"""
    value = join_text(value)
    if not isinstance(value, str) or not value.strip():
        raise Unusable(where, 'no text', f': {key} is {as_json(value)}')
    return {'role': role, 'content': value}


def join_text(value):
    """OpenAI's list of content parts, [{'type': 'text', 'text': …}, …] → text; other values are
    unchanged."""
    if isinstance(value, list) and all(map(is_text_part, value)):
        return ''.join(part['text'] for part in value)
    return value


def is_text_part(value):
    return isinstance(value, dict) and value.keys() == {'type', 'text'} \
        and isinstance(value['text'], str)


def as_json(value):
    """A value as (abbreviated) JSON, for error messages."""
    text = json.dumps(value, ensure_ascii=False, default=str)  # Parquet has dates
    return text if len(text) <= 100 else text[:100] + '…'
