"""Rows of conversations in common formats → messages.

    messages   {"messages": [{"role": "user", "content": "Hi!"}, …]}, also under the other names in
               LISTS, with from and value (ShareGPT), as a bare list, or as a JSON string
    pairs      {"prompt": "Hi!", "completion": "Hello."}, also under the other names in PROMPTS and
               COMPLETIONS or those of --prompt and --completion; each a text or a list of messages
    alpaca     {"instruction": "Translate.", "input": "Hallo!", "output": "Hello!"}, also with
               system and history

Each row of a JSON file or a table is one conversation.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace

from plaingpt.data.rows import first_match, list_columns, match_name
from plaingpt.data.unusable import Unusable
from plaingpt.system.errors import UserError

LISTS = 'messages', 'conversations', 'conversation', 'dialogue', 'dialog', 'chat', 'turns', 'data'
PROMPTS = 'prompt', 'instruction', 'question', 'query', 'input', 'user', 'human'
COMPLETIONS = 'completion', 'output', 'answer', 'response', 'reply', 'assistant', 'gpt', 'target'
CONTEXT = {'instruction': ('input', 'context'), 'question': ('context',), 'query': ('context',)}
SYSTEM = 'system', 'system_prompt'
ROLES = {'system': ('system', 'developer'), 'user': ('user', 'human', 'prompter'),
         'assistant': ('assistant', 'gpt', 'model', 'bot', 'ai', 'chatbot', 'chatgpt', 'bing',
                       'bard')}  # our name → common names
TOOL_ROLES = ('tool', 'tools', 'function', 'tool_call', 'tool_calls', 'function_call',
              'tool_response', 'function_response', 'observation', 'ipython')
CALLS = 'tool_calls', 'tool_call', 'function_call'  # keys of messages
THINKING = 'reasoning_content', 'reasoning', 'thinking'


@dataclass(frozen=True)
class ConversationReader:
    """Reads the conversation in a row.

    pair_columns: the columns of the user and of the assistant, or () to detect them by name
    plain: return the plain text instead of the messages as JSON
    tokenizer: a ChatTokenizer, whose template may refuse some roles, or None
    """

    is_divisible = False
    pair_columns: tuple = ()
    plain: bool = False
    tokenizer: object = None
    unused: set = field(default_factory=set)  # columns of rows and keys of messages
    accepted_roles: set = field(default_factory=set)  # those of conversations, by the template

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

    def may_read(self, column):
        return True

    def is_row(self, value):
        """Whether a JSON object is a conversation."""
        with suppress(Unusable):
            replace(self, unused=set()).read_messages(value, '')
            return True
        return False

    def columns(self, row, where):
        return list(row)

    def texts(self, row, where):
        """[the conversation]. Raises Unusable."""
        messages = self.read_messages(row, where)
        check_order(messages, where)
        if not any(map(is_in_loss, messages)):
            raise Unusable(where, 'no assistant reply to learn from')
        self.check_template(messages, where)
        if self.plain:
            return ['\n'.join(message['content'] for message in messages)]
        return [json.dumps(messages, ensure_ascii=False)]

    def check_template(self, messages, where):
        """Raises Unusable if the template refuses the roles of a conversation."""
        roles = tuple(message['role'] for message in messages)
        if self.tokenizer and roles not in self.accepted_roles:
            try:
                self.tokenizer.check_roles(roles)
            except UserError as problem:
                raise Unusable(where, str(problem), f': {", ".join(roles)}') from None
            self.accepted_roles.add(roles)

    def read_messages(self, row, where):
        if isinstance(row, list):
            return parse_list(row, where, self.unused)
        fields = self.find_fields(row, where)
        self.unused.update(key for key, value in row.items()
                           if key not in fields.values() and has_content(value))
        values = {role: row[name] for role, name in fields.items() if name is not None}
        if 'messages' in values:
            messages = parse_list(values['messages'], where, self.unused)
        else:
            messages = self.read_pair(values, fields, where)
        system = values.get('system')
        if has_content(system) and messages:
            if messages[0]['role'] == 'system':
                self.unused.add(fields['system'])
            else:
                content = content_of(system, where, fields['system'])
                messages.insert(0, {'role': 'system', 'content': content})
        return messages

    def read_pair(self, values, fields, where):
        """The user's and the assistant's text in separate fields → messages."""
        messages = []
        if has_content(values.get('history')) and values['history'] != '[]':
            for turn in as_list(values['history'], where):  # [question, answer], or a message
                turn = [turn] if isinstance(turn, dict) else turn
                messages += parse_list(turn, where, self.unused)
        if isinstance(values['prompt'], list):
            messages += parse_list(values['prompt'], where, self.unused)
        else:
            roles = [role for role in ('prompt', 'context') if has_content(values.get(role))]
            contents = [content_of(values[role], where, fields[role])
                        for role in roles or ['prompt']]
            messages.append({'role': 'user', 'content': '\n\n'.join(contents)})
        completion = values['completion']
        if not isinstance(completion, list):
            content = content_of(completion, where, fields['completion'])
            return [*messages, {'role': 'assistant', 'content': content}]
        replies = parse_list(completion, where, self.unused)
        if replies[:len(messages)] == messages:  # the completion repeats the prompt
            return replies
        for message in messages:
            if message['role'] == 'assistant':  # not learned, as in TRL
                message['weight'] = 0
        return messages + replies

    def find_fields(self, row, where):
        """{'messages', or 'prompt', 'completion' and their optional fields: the name of that field
        in a row}. Raises Unusable."""
        if not isinstance(row, dict):
            raise Unusable(where, 'not a conversation', f': {as_json(row)}')
        if self.pair_columns:
            return self.find_pair_columns(row, where)
        message_list = find_message_list(row)
        prompt, completion = first_match(PROMPTS, row), first_match(COMPLETIONS, row)
        is_pair = prompt is not None and completion is not None
        if message_list and (has_content(row[message_list]) or not is_pair):
            return {'messages': message_list, 'system': first_match(SYSTEM, row)}
        if 'chosen' in row and 'rejected' in row:
            advice = 'set --prompt=prompt --completion=chosen'
            if 'prompt' not in row:
                advice = 'convert them to messages'
            raise Unusable(where, 'a preference pair, which train.py does not support',
                           f': to learn the chosen replies, {advice}')
        if not is_pair:
            name = first_match(LISTS, row)
            if name:
                raise Unusable(where, f'{name} is not a list of messages',
                               f': {as_json(row[name])}; for two columns of text, set --prompt '
                               'and --completion')
            raise Unusable(where, 'cannot find question and answer columns',
                           f' among {list_columns(row)}: set them with --prompt and --completion')
        if row.get('label') is False:
            raise Unusable(where, 'labeled false (a rejected reply)')
        return {'prompt': prompt, 'completion': completion,
                'context': first_match(CONTEXT.get(prompt.strip().casefold(), ()), row),
                'system': first_match(SYSTEM, row), 'history': match_name('history', row)}

    def find_pair_columns(self, row, where):
        prompt, completion = (match_name(name, row) for name in self.pair_columns)
        for name, match in zip(self.pair_columns, (prompt, completion), strict=True):
            if match is None:
                raise Unusable(where, f'no column {name!r}', f' among {list_columns(row)}: choose '
                               'with --prompt and --completion')
        return {'prompt': prompt, 'completion': completion}


def find_message_list(row):
    """The name of the field with the list of messages, preferably not an empty one; or None."""
    names = [match_name(name, row) for name in LISTS]
    names = [name for name in names if name and is_list(row[name])]
    for name in names:
        if has_content(row[name]):
            return name
    return names[0] if names else None


def is_list(value):
    """Whether a field may contain messages: a list, a table of columns, or JSON of a list."""
    return value is None or isinstance(value, list | dict) or (
        isinstance(value, str) and value.lstrip()[:1] == '[')


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
    rows = as_list(value, where)
    if all(isinstance(row, str) for row in rows):  # the user and the assistant alternate
        rows = [{'role': 'assistant' if i % 2 else 'user', 'content': text}
                for i, text in enumerate(rows)]
    messages = []
    for number, row in enumerate(rows, 1):
        messages += parse_message(row, f'{where}: message {number}', unused)
    return messages


def as_list(value, where):
    """A list, JSON of a list, or the dict of columns that `datasets` returns → list. Raises
    Unusable."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict) and value \
            and all(isinstance(column, list) for column in value.values()):
        if len({len(column) for column in value.values()}) > 1:
            raise Unusable(where, 'columns of different lengths', f': {as_json(value)}')
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not isinstance(value, list) or not value:
        raise Unusable(where, 'no messages', f': expected a list, got {as_json(value)}')
    return value


def parse_message(row, where, unused):
    """→ [message], or [] for an empty system message. Raises Unusable."""
    if not isinstance(row, dict):
        raise Unusable(where, 'not a message', f': expected an object, got {as_json(row)}')
    role_key = first_match(('role', 'from'), row) or 'role'
    content_key = first_match(('content', 'value', 'text'), row) or 'content'
    role_name, content = str(row.get(role_key)).casefold(), join_text(row.get(content_key))
    if role_name in TOOL_ROLES or any(has_content(row.get(key)) for key in CALLS):
        raise Unusable(where, 'tool calls, which train.py does not support',
                       ': remove these conversations, or write the calls as text')
    role = None
    for name, aliases in ROLES.items():
        if role_name in aliases:
            role = name
    if role is None:
        raise Unusable(where, 'unknown role', f' {as_json(row.get(role_key))}: expected '
                       f'{", ".join(ROLES)}, or a common name for one of them')
    if content_key not in row and role != 'system':
        raise Unusable(where, 'no content', f' among {list_columns(row)}')
    unused.update(key for key, value in row.items() if has_content(value)
                  and key not in (role_key, content_key, 'weight'))
    if role == 'system' and not has_content(content):
        return []
    if not has_content(content) and any(has_content(row.get(key)) for key in THINKING):
        raise Unusable(where, 'thinking without a reply, which train.py does not support',
                       ': make it part of the content')
    message = {'role': role, 'content': content_of(content, where, content_key)}
    if row.get('weight') not in (None, 0, 1):
        raise Unusable(where, 'a weight that is neither 0 nor 1', f': {as_json(row["weight"])}')
    if role == 'assistant' and row.get('weight') == 0:
        message['weight'] = 0
    return [message]


def check_order(messages, where):
    """Raises Unusable unless the user speaks first, or right after one system message."""
    if not messages:
        raise Unusable(where, 'no messages')
    roles = [message['role'] for message in messages]
    speakers = roles[1:] if roles[:1] == ['system'] else roles
    if 'system' in speakers:
        raise Unusable(where, 'a system message that is not the first message')
    if speakers[:1] == ['assistant']:
        raise Unusable(where, 'the assistant speaks first', ': expected the user')


def join_text(value):
    """OpenAI's list of content parts, [{'type': 'text', 'text': …}, …] → text; other values are
    unchanged."""
    if isinstance(value, list) and all(map(is_text_part, value)):
        return ''.join(part['text'] for part in value)
    return value


def is_text_part(value):
    return isinstance(value, dict) and value.keys() == {'type', 'text'} \
        and isinstance(value['text'], str)


def content_of(value, where, key):
    """The text of a message. Raises Unusable."""
    value = join_text(value)
    if value is None:
        raise Unusable(where, f'{key} is null')
    if not isinstance(value, str):
        raise Unusable(where, 'not text', f': {key} is {as_json(value)}')
    if not value.strip():
        raise Unusable(where, 'blank text', f': {key} is {as_json(value)}')
    return value


def as_json(value):
    """A value as (abbreviated) JSON, for error messages."""
    text = json.dumps(value, ensure_ascii=False, default=str)  # Parquet has dates
    return text if len(text) <= 100 else text[:100] + '…'
