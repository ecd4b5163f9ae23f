"""Rows of conversations, in the forms that people have them → messages.

    messages   {"messages": [{"role": "user", "content": "Hi!"}, …]}, also as conversations and
               others of LISTS, with from and value, as a bare list, and as a string of JSON
    pairs      {"prompt": "Hi!", "completion": "Hello."}, or another of PROMPTS and COMPLETIONS, or
               what --prompt and --completion name; each a text or a list of messages
    alpaca     {"instruction": "Translate.", "input": "Hallo!", "output": "Hello!"}, also with
               system and history

Each row, of JSON or of a table, is a conversation.
"""

import json
from dataclasses import dataclass, field

from plaingpt.data.left_out import Unusable
from plaingpt.data.rows import first_match, list_columns, match_name

LISTS = 'messages', 'conversations', 'conversation', 'dialogue', 'dialog', 'chat', 'turns', 'data'
PROMPTS = 'prompt', 'instruction', 'question', 'query', 'input', 'user', 'human'
COMPLETIONS = 'completion', 'output', 'answer', 'response', 'reply', 'assistant', 'gpt', 'target'
CONTEXT = {'instruction': ('input', 'context'), 'question': ('context',), 'query': ('context',)}
SYSTEM = 'system', 'system_prompt'
ROLES = {'system': ('system', 'developer'), 'user': ('user', 'human', 'prompter'),
         'assistant': ('assistant', 'gpt', 'model', 'bot', 'ai', 'chatbot', 'chatgpt', 'bing',
                       'bard')}  # our name → others'
TOOL_ROLES = ('tool', 'tools', 'function', 'tool_call', 'tool_calls', 'function_call',
              'tool_response', 'function_response', 'observation', 'ipython')
CALLS = 'tool_calls', 'tool_call', 'function_call'  # keys of messages
THINKING = 'reasoning_content', 'reasoning', 'thinking'


@dataclass(frozen=True)
class ConversationReader:
    """Reads the conversation in a row. named: the columns of the user and of the assistant, or ()
    where the names of the fields tell; plain: read its text and not its messages as JSON"""

    named: tuple = ()
    plain: bool = False
    unused: set = field(default_factory=set)  # columns of rows and keys of messages

    def restart(self):
        self.unused.clear()

    def describe(self):
        """A line that names what is in the rows and not in the conversations."""
        if self.unused:
            yield f'not part of the conversations: {", ".join(sorted(self.unused))}'

    def may_read(self, column):
        return True

    def columns(self, row, where):
        return list(row)

    def texts(self, row, where):
        """[the conversation]. Raises Unusable."""
        messages = self.read_messages(row, where)
        check_order(messages, where)
        if not any(map(is_in_loss, messages)):
            raise Unusable(where, 'no reply of the assistant to learn')
        if self.plain:
            return ['\n'.join(message['content'] for message in messages)]
        return [json.dumps(messages, ensure_ascii=False)]

    def read_messages(self, row, where):
        if isinstance(row, list):
            return parse_list(row, where, self.unused)
        fields = self.find_fields(row, where)
        self.unused.update(key for key, value in row.items()
                           if key not in fields.values() and has_content(value))
        values = {use: row[name] for use, name in fields.items() if name is not None}
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
        """What the user and the assistant say in fields of their own → messages."""
        messages = []
        if has_content(values.get('history')) and values['history'] != '[]':
            for turn in as_list(values['history'], where):  # [question, answer], or a message
                turn = [turn] if isinstance(turn, dict) else turn
                messages += parse_list(turn, where, self.unused)
        prompt, completion = values['prompt'], values['completion']
        if isinstance(prompt, list):
            messages += parse_list(prompt, where, self.unused)
        else:
            uses = ['prompt'] if has_content(prompt) else []
            uses += ['context'] if has_content(values.get('context')) else []
            content = '\n\n'.join(content_of(values[use], where, fields[use])
                                  for use in uses or ['prompt'])
            messages.append({'role': 'user', 'content': content})
        if isinstance(completion, list):
            replies = parse_list(completion, where, self.unused)
            if replies[:len(messages)] == messages:  # the whole conversation
                return replies
            # Of a list of messages, the prompt is read alone, as in TRL.
            return [{**message, 'weight': 0} if message['role'] == 'assistant' else message
                    for message in messages] + replies
        content = content_of(completion, where, fields['completion'])
        return [*messages, {'role': 'assistant', 'content': content}]

    def find_fields(self, row, where):
        """{'messages', or 'prompt' and 'completion' and what may come with them: the name of that
        field in a row}. Raises Unusable."""
        if not isinstance(row, dict):
            raise Unusable(where, 'not a conversation', f': it is {as_json(row)}')

        lists = [match_name(name, row) for name in LISTS]
        lists = [name for name in lists if name and is_list(row[name])]
        lists.sort(key=lambda name: not has_content(row[name]))  # stable
        prompt, completion = first_match(PROMPTS, row), first_match(COMPLETIONS, row)
        if self.named:
            prompt, completion = (match_name(name, row) for name in self.named)
        elif lists and (has_content(row[lists[0]]) or prompt is None or completion is None):
            return {'messages': lists[0], 'system': first_match(SYSTEM, row)}
        elif 'chosen' in row and 'rejected' in row:
            raise Unusable(where, 'a preference pair, which train.py cannot learn from',
                           ': to learn the chosen replies alone, ' + (
                               'give --prompt=prompt --completion=chosen' if 'prompt' in row else
                               'write them as messages'))
        for name in self.named:
            if match_name(name, row) is None:
                raise Unusable(where, f'no column {name!r}', f', it has {list_columns(row)}: '
                               'choose with --prompt and --completion')
        if prompt is None or completion is None:
            raise Unusable(where, 'no question and answer columns',
                           f' among {list_columns(row)}: name them with --prompt and --completion')
        fields = {'prompt': prompt, 'completion': completion}
        if self.named:
            return fields
        fields['context'] = first_match(CONTEXT.get(prompt.strip().casefold(), ()), row)
        if row.get('label') is False:
            raise Unusable(where, 'labeled false, as a reply that is not wanted')
        return {**fields, 'system': first_match(SYSTEM, row),
                'history': match_name('history', row)}


def is_list(value):
    """Whether a field may hold messages: a list, a table of them, or JSON of a list."""
    return value is None or isinstance(value, list | dict) or (
        isinstance(value, str) and value.lstrip()[:1] == '[')


def has_content(value):
    return value not in (None, '', [], {}) and not (isinstance(value, str) and value.isspace())


def is_in_loss(message):
    """Whether a message counts in the loss: OpenAI's `weight` of 0 takes it out."""
    return message['role'] == 'assistant' and message.get('weight') != 0


def parse_messages(value, where):
    """Messages as JSON has them → [{'role', 'content'}, …]. Raises UserError."""
    messages = parse_list(value, where, set())
    check_order(messages, where)
    return messages


def parse_list(value, where, unused):
    """The same of a part of a conversation. unused: a set that gets the keys that are not read"""
    rows = as_list(value, where)
    if all(isinstance(row, str) for row in rows):  # the user and the assistant in turn
        rows = [{'role': ('user', 'assistant')[i % 2], 'content': row}
                for i, row in enumerate(rows)]
    messages = []
    for number, row in enumerate(rows, 1):
        messages += parse_message(row, f'{where}: message {number}', unused)
    return messages


def as_list(value, where):
    """A list, also of a string of JSON, or of a table as `datasets` has it. Raises Unusable."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise Unusable(where, 'messages are not JSON', f': {e}') from None
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, row, strict=True))
                 for row in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not value:
        raise Unusable(where, 'no messages', f': expected a list of them, got {as_json(value)}')
    return value


def parse_message(row, where, unused):
    """→ [message], or [] where the system says nothing. Raises Unusable."""
    if not isinstance(row, dict):
        raise Unusable(where, 'not a message', f': expected an object, got {as_json(row)}')
    role_key = first_match(('role', 'from'), row) or 'role'
    content_key = first_match(('content', 'value', 'text'), row) or 'content'
    name, content = str(row.get(role_key)).casefold(), join_text(row.get(content_key))
    if name in TOOL_ROLES or any(has_content(row.get(key)) for key in CALLS):
        raise Unusable(where, 'tool calls and their results, which train.py cannot learn',
                       ': leave out these conversations, or write the calls as text')
    role = next((role for role, names in ROLES.items() if name in names), None)
    if role is None:
        raise Unusable(where, 'unknown role', f' {as_json(row.get(role_key))}: expected one of '
                       f'{", ".join(names[0] for names in ROLES.values())}, or a name that is '
                       'common for it')
    unused.update(key for key, value in row.items() if has_content(value)
                  and key not in (role_key, content_key, 'weight'))
    if role == 'system' and not has_content(content):
        return []
    if not has_content(content) and any(has_content(row.get(key)) for key in THINKING):
        raise Unusable(where, 'thinking without a reply, which train.py cannot learn',
                       ': write it as a part of the content')
    message = {'role': role, 'content': content_of(content, where, content_key)}
    if row.get('weight') not in (None, 0, 1):
        raise Unusable(where, 'a weight that is neither 0 nor 1', f': {as_json(row["weight"])}')
    if role == 'assistant' and row.get('weight') == 0:
        message['weight'] = 0
    return [message]


def check_order(messages, where):
    """Raises Unusable unless the user speaks first, or after one message of the system."""
    if not messages:
        raise Unusable(where, 'no messages')
    roles = [message['role'] for message in messages]
    speakers = roles[1:] if roles[:1] == ['system'] else roles
    if 'system' in speakers:
        raise Unusable(where, 'a system message that is not the first')
    if speakers[:1] == ['assistant']:
        raise Unusable(where, 'the assistant speaks first', ': expected the user')


def join_text(value):
    """The text of a message in OpenAI's form, [{'type': 'text', 'text': …}, …]; others as they are.
    """
    if isinstance(value, list) and all(isinstance(part, dict) and part.keys() == {'type', 'text'}
                                       and isinstance(part['text'], str) for part in value):
        return ''.join(part['text'] for part in value)
    return value


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
    """A JSON value in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)  # Parquet has dates
    return text if len(text) <= 100 else text[:100] + '…'
