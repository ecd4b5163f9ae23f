"""Conversations ↔ token ids: a tokenizer of text, with the control tokens of a chat template.

    <|conversation|> <|user|> Hi! <|end|> <|assistant|> Hello. <|end|>

The text of the assistant and the <|end|> after it count in the loss, the other tokens do not. This
is our template, with five tokens more. The template of another model is rendered as transformers
renders it.
"""

import re
from functools import lru_cache
from itertools import groupby, pairwise

import numpy as np

from plaingpt.data.foreign_tokenizer import (
    TEMPLATE_FILE,
    ForeignTokenizer,
    find_template,
    parse_object,
)
from plaingpt.system.errors import UserError, warn
from plaingpt.system.formatting import one_line

SPECIAL_TOKENS = ('<|conversation|>', '<|system|>', '<|user|>', '<|assistant|>', '<|end|>')
ROLES = ('system', 'user', 'assistant')
# The same as Jinja, for programs of others. llama.cpp's programs can go without Jinja and then look
# for names in this text, by which they would take it for Phi-3's template: so they are in pieces.
TEMPLATE = (
    "<|conversation|>"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the role of a message must be system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|' + 'end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|' + 'assistant|>' }}{% endif %}")
PLAIN_TEMPLATES = {  # for models whose own template cannot be used, by the tokens that it writes
    'chatml': (  # SmolLM2, Qwen
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"),
    'llama3': (
        "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")}
MARK = '\ue000'  # a private character that stands for a text
USER, ANSWER = {'role': 'user', 'content': MARK}, {'role': 'assistant', 'content': MARK}


def as_chat(description, where):
    """The description of a ForeignTokenizer → that of a chat tokenizer. It uses the chat template
    of the files if it can, or else a plain template with the same control tokens. If there is
    neither, the description does not change. A warning says what is not used."""
    template, base = find_template(description['files']), ForeignTokenizer(description)
    if template is None:
        return description
    try:
        ChatTokenizer(base, template).encode_conversation([USER, ANSWER, USER, ANSWER])
        return {'kind': 'chat', 'base': description, 'template': template}
    except UserError as problem:
        name = find_plain(base)
        if name is None:
            warn(f'{where}: {problem}, so it is read as a model of text')
            return description
        warn(f'{where}: {problem}, so conversations are written in plain {name}')
    plain = PLAIN_TEMPLATES[name]
    files = {**description['files'], TEMPLATE_FILE: plain}
    return {'kind': 'chat', 'base': {**description, 'files': files}, 'template': plain}


def find_plain(base):
    """The name of the plain template whose control tokens a tokenizer has, or None."""
    for name, template in PLAIN_TEMPLATES.items():
        if isinstance(base, ForeignTokenizer) and base.end_of_text is not None \
                and all(base.special(control) is not None
                        for control in re.findall(r'<\|\w+\|>', template)):
            return name
    return None


@lru_cache(4)
def compile_template(template):
    """Like transformers, in a sandbox: a template cannot reach Python."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # torch brings it

    def fail(message):
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals['raise_exception'] = fail
    return environment.from_string(template)


class ChatTokenizer:
    """`base`'s vocabulary and a template; without one our SPECIAL_TOKENS come behind it.

    Text never becomes a control token: text that spells a name is encoded as text.
    """

    def __init__(self, base, template='', told=''):
        """template: another model's, in Jinja; told: the system message where there is none"""
        self.base, self.template, self.told = base, template, told
        self.vocab_size = first = base.vocab_size
        if self.is_ours():
            self.ids = {name: first + i for i, name in enumerate(SPECIAL_TOKENS)}
            self.vocab_size += len(SPECIAL_TOKENS)
            self.roles = {role: self.ids[f'<|{role}|>'] for role in ROLES}
            self.conversation, self.end_of_turn = first, self.ids['<|end|>']
            self.user_ids, self.answer_ids = [self.roles['user']], [self.roles['assistant']]
        else:
            self.ids = base.control_names()
            names = parse_object(base.to_json()['files'], 'tokenizer_config.json')
            self.names = {key: value['content'] if isinstance(value, dict) else value
                          for key, value in names.items() if key in ('bos_token', 'eos_token')}
            self.read_template()
        self.end_of_text = self.conversation  # each conversation is a document

    def is_ours(self):
        return not self.template

    def read_template(self):
        """Find the tokens that begin and end a conversation and its turns. Raises UserError."""
        asked, prompt = self.render([USER]), self.render([USER], True)
        answered, again = self.render([USER, ANSWER]), self.render([USER, ANSWER, USER])
        self.check_extends([asked, prompt, answered, again])
        controls = self.split(again)[1::2]
        ends = self.split(answered[len(prompt):])[1::2]
        if not controls or not ends:
            raise UserError('its chat template writes no control tokens')
        self.end_of_turn = self.ids[ends[-1]]
        # What opens all is no part of a turn; else the token between documents opens it in data.
        self.keeps_bos = again.startswith(controls[0]) and controls.count(controls[0]) == 1
        self.conversation = self.ids[controls[0]] if self.keeps_bos else self.base.end_of_text
        self.answer_ids = self.encode_parts(prompt[len(asked):])
        # as far as no text changes them
        self.user_ids = self.encode_parts(again[len(answered):].partition(MARK)[0].rstrip('\n'))
        self.roles = {'user': self.user_ids[0], 'assistant': self.answer_ids[0]}

    keeps_bos = True  # whether the model reads the token that opens a conversation in data

    def render(self, messages, prompting=False):
        """The text that the template writes of messages, with the beginning of an answer where
        `prompting`. Raises UserError."""
        if self.told and (not messages or messages[0]['role'] != 'system'):
            messages = [{'role': 'system', 'content': self.told}, *messages]
        try:
            return compile_template(self.template).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompting,
                **self.names)
        except Exception as e:  # a template can raise anything
            raise UserError(f'its chat template cannot be used ({one_line(e)[:100]})') from None

    def check_extends(self, texts):
        for text, longer in pairwise(texts):
            if not longer.startswith(text):
                raise UserError('its chat template writes earlier turns anew at later ones')

    def split(self, text):
        """A text → texts and names of control tokens in turn; the first and last are texts."""
        return re.split('(' + '|'.join(map(re.escape, self.ids)) + ')', text)

    def encode_parts(self, text, mark=''):
        """The ids of what the template wrote; the text is without `mark`."""
        found = []
        for i, part in enumerate(self.split(text)):
            if part:
                found += [self.ids[part]] if i % 2 else self.encode(part.replace(mark, '')).tolist()
        return found

    def guard(self, messages):
        """→ (messages in whose texts a mark breaks the names of control tokens, the mark)"""
        texts = ''.join(message['content'] for message in messages)
        mark = next(char for char in map(chr, range(0xe000, 0xf8ff)) if char not in texts)

        def guarded(text):
            parts = self.split(text)
            parts[1::2] = [name[0] + mark + name[1:] for name in parts[1::2]]
            return ''.join(parts)

        return [{**message, 'content': guarded(message['content'])} for message in messages], mark

    def encode(self, text):
        return self.base.encode(text)

    def encode_conversation(self, messages):
        """[{'role': …, 'content': …}, …] → (ids, loss mask: True for each that is in the loss).
        Raises UserError where a template of others writes no such conversation."""
        parts = [([self.conversation], False)] if self.is_ours() or not self.keeps_bos else []
        if self.is_ours():
            for message in messages:
                learned = message['role'] == 'assistant'
                parts += [([self.roles[message['role']]], False),
                          (self.encode(message['content']), learned),
                          ([self.end_of_turn], learned)]
        else:
            parts += self.rendered_parts(*self.guard(messages))
        return np.concatenate([ids for ids, _ in parts], dtype=np.int64, casting='unsafe'), \
            np.concatenate([np.full(len(ids), learned) for ids, learned in parts])

    def rendered_parts(self, messages, mark):
        """[(ids, whether they are in the loss)]: the assistant's are what its turn adds to what the
        template writes up to there, to the last control token."""
        parts, done = [], ''
        for i, message in enumerate(messages):
            if message['role'] == 'assistant':
                prompt, through = self.render(messages[:i], True), self.render(messages[:i + 1])
                self.check_extends([done, prompt, through])
                *answer, after = self.split(through[len(prompt):])
                parts += [(self.encode_parts(prompt[len(done):], mark), False),
                          (self.encode_parts(''.join(answer), mark), True),
                          (self.encode_parts(after), False)]
                done = through
        whole = self.render(messages)
        self.check_extends([done, whole])
        return [*parts, (self.encode_parts(whole[len(done):], mark), False)]

    def encode_prompt(self, messages):
        """The ids of `messages` and of the beginning of the answer that the model is to write."""
        if self.is_ours():
            return np.append(self.encode_conversation(messages)[0], self.answer_ids)
        messages, mark = self.guard(messages)
        return np.array(self.encode_parts(self.render(messages, True), mark), dtype=np.int64)

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def decode_bytes(self, ids):
        first = self.base.vocab_size
        return b''.join(
            self.base.decode_bytes(list(run)) if is_text else
            ''.join(SPECIAL_TOKENS[i - first] for i in run).encode()
            for is_text, run in groupby(map(int, ids), lambda i: i < first))

    def to_json(self):
        made = {'kind': 'chat', 'base': self.base.to_json()}
        return made if self.is_ours() else {
            **made, 'template': self.template, **({'system': self.told} if self.told else {})}
