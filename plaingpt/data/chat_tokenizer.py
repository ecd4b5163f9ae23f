"""Conversations ↔ token ids: a tokenizer of text, with the control tokens of a chat template.

    <|conversation|> <|user|> Hi! <|end|> <|assistant|> Hello. <|end|>

The text of the assistant and the <|end|> after it count in the loss, the other tokens do not. This
is our template, with five tokens more. The template of another model is rendered as transformers
renders it.
"""

import re
from functools import lru_cache
from itertools import pairwise

import numpy as np

from plaingpt.data.conversations import is_learned
from plaingpt.data.foreign_tokenizer import (
    TEMPLATE_FILE,
    ForeignTokenizer,
    find_template,
    parse_object,
)
from plaingpt.system.errors import UserError, warn
from plaingpt.system.formatting import one_line

SPECIAL_TOKENS = ('<|conversation|>', '<|system|>', '<|user|>', '<|assistant|>', '<|end|>')
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
MARK = '\ufdd0'  # no character of any text: Unicode leaves it to programs
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
    except UserError as problem:
        template = plain_template(base)
        warn(f'{where}: {problem}, so ' + ('conversations are written in a plain form' if template
                                           else 'it is read as a model of text'))
        if not template:
            return description
        files = {**description['files'], TEMPLATE_FILE: template}
        description = {**description, 'files': files}
    return {'kind': 'chat', 'base': description, 'template': template}


def plain_template(base):
    """The plain template whose control tokens a tokenizer has, or ''."""
    if isinstance(base, ForeignTokenizer) and base.end_of_text is not None:
        for template in PLAIN_TEMPLATES.values():
            if base.control_ids.keys() >= {*re.findall(r'<\|\w+\|>', template)}:
                return template
    return ''


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

    def __init__(self, base, template=''):
        """template: another model's, in Jinja. Raises UserError where it cannot be used."""
        self.base, self.template, self.vocab_size = base, template, base.vocab_size
        self.names = {}  # that a template may use
        if self.is_ours():
            self.ids = {name: self.vocab_size + i for i, name in enumerate(SPECIAL_TOKENS)}
            self.vocab_size += len(SPECIAL_TOKENS)
        else:
            self.ids = base.control_ids
            names = parse_object(base.to_json()['files'], 'tokenizer_config.json')
            self.names = {key: value['content'] if isinstance(value, dict) else value
                          for key, value in names.items() if key in ('bos_token', 'eos_token')}
        self.arrays = {name: np.array([i]) for name, i in self.ids.items()}
        self.control = re.compile('(' + '|'.join(map(re.escape, self.ids)) + ')')

        # Find the tokens that begin and end a conversation and its turns.
        asked, prompt = self.render([USER]), self.render([USER], True)
        answered, again = self.render([USER, ANSWER]), self.render([USER, ANSWER, USER])
        check_extends(asked, prompt, answered, again)
        controls = self.control.findall(again)
        ends = self.control.findall(answered[len(prompt):])
        if not controls or not ends:
            raise UserError('its chat template writes no control tokens')
        self.end_of_turn = self.ids[ends[-1]]
        # What opens all is no part of a turn; else the token between documents opens it in data,
        # and the model does not read it.
        self.keeps_bos = again.startswith(controls[0]) and controls.count(controls[0]) == 1
        self.conversation = self.ids[controls[0]] if self.keeps_bos else self.base.end_of_text
        self.end_of_text = self.conversation  # each conversation is a document
        self.answer_ids = self.ids_of(prompt[len(asked):]).tolist()
        opening = again[len(answered):].partition(MARK)[0].rstrip('\n')  # which no text changes
        self.user_ids = self.ids_of(opening).tolist()
        self.roles = {'user': self.user_ids[0], 'assistant': self.answer_ids[0]}
        self.ends = base.ends | {self.conversation, self.end_of_turn, *self.roles.values(),
                                 *(self.ids.values() if self.is_ours() else ())}

    def is_ours(self):
        return not self.template

    def render(self, messages, prompting=False):
        """The text that the template writes of messages, with the beginning of an answer where
        `prompting`. Raises UserError."""
        try:
            return compile_template(self.template or TEMPLATE).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompting,
                **self.names)
        except Exception as e:  # a template can raise anything
            raise UserError(f'its chat template cannot be used ({one_line(e)[:100]})') from None

    def encode_parts(self, text):
        """What the template wrote → [ids of a text, or of one control token]."""
        parts = enumerate(self.control.split(text))  # texts and control tokens in turn
        return [self.arrays[part] if i % 2 else self.encode(part.replace(MARK, ''))
                for i, part in parts if part]

    def ids_of(self, text):
        return np.concatenate([[], *self.encode_parts(text)]).astype(np.int64)

    def guard(self, messages):
        """Messages in whose texts MARK breaks the names of control tokens."""
        return [{**message, 'content': self.control.sub(
            lambda name: name[0][0] + MARK + name[0][1:], message['content'])}
            for message in messages]

    def encode(self, text):
        return self.base.encode(text)

    def encode_conversation(self, messages):
        """[{'role': …, 'content': …}, …] → (ids, loss mask: True for each that is in the loss).
        Raises UserError where a template of others writes no such conversation."""
        if self.is_ours():  # what TEMPLATE writes, without rendering it, which takes as long again
            parts = [(self.arrays['<|conversation|>'], False)]
            for message in messages:
                learned = is_learned(message)
                parts += [(self.arrays[f'<|{message["role"]}|>'], False),
                          (self.encode(message['content']), learned),
                          (self.arrays['<|end|>'], learned)]
        else:
            parts = self.rendered_parts(self.guard(messages))
        return np.concatenate([ids for ids, _ in parts]).astype(np.int64), \
            np.repeat([learned for _, learned in parts], [len(ids) for ids, _ in parts])

    def rendered_parts(self, messages):
        """[(ids, whether they are in the loss)]: the assistant's are what its turn adds to what the
        template writes up to there, to the last control token."""
        parts, text, done = [], '', 0  # done: characters of the text that are in parts
        for i, message in enumerate(messages):
            if message['role'] == 'assistant':
                prompt, through = self.render(messages[:i], True), self.render(messages[:i + 1])
                check_extends(text, prompt, through)
                parts.append((through[done:len(prompt)], False))
                text, done = through, len(prompt)
                for control in self.control.finditer(through, done):
                    done = control.end()
                parts.append((through[len(prompt):done], is_learned(message)))
        whole = self.render(messages)
        check_extends(text, whole)
        parts.append((whole[done:], False))
        opening = [] if self.keeps_bos else [(np.array([self.conversation]), False)]
        return opening + [(ids, learned) for text, learned in parts
                          for ids in self.encode_parts(text)]

    def encode_prompt(self, messages):
        """The ids of `messages` and of the beginning of the answer that the model is to write."""
        return self.ids_of(self.render(self.guard(messages), True))

    def decode(self, ids):
        """Bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def decode_bytes(self, ids):
        first = self.base.vocab_size  # of our control tokens; a template's are the base's own
        return b''.join(SPECIAL_TOKENS[i - first].encode() if i >= first else
                        self.base.decode_bytes([i]) for i in map(int, ids))

    def to_json(self):
        made = {'kind': 'chat', 'base': self.base.to_json()}
        return made if self.is_ours() else {**made, 'template': self.template}


def check_extends(*texts):
    """Raises UserError where a text does not begin with the one before it."""
    for text, longer in pairwise(texts):
        if not longer.startswith(text):
            raise UserError('its chat template writes earlier turns anew at later ones')
