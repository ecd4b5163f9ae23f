"""Conversations ↔ token ids: a tokenizer of text, with the control tokens of a form.

    <|conversation|> <|user|> Hi! <|end|> <|assistant|> Hello. <|end|>

The text of the assistant and the <|end|> after it count in the loss, the other tokens do not. This
is our form, of five tokens more; a tokenizer of others that has the control tokens of one of FORMS
keeps to that one.
"""

import re
from dataclasses import dataclass
from itertools import groupby

import numpy as np

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


@dataclass(frozen=True)
class Form:
    """How a conversation is written: begin, and for each message header, text, end, after."""

    controls: tuple  # its control tokens
    begin: str  # one of them, or ''
    header: str
    end: str  # one of them
    after: str
    template: str  # the same as Jinja
    trims: bool = False  # white space around a message


FORMS = {
    'plaingpt': Form(SPECIAL_TOKENS, '<|conversation|>', '<|{role}|>', '<|end|>', '', TEMPLATE),
    'chatml': Form(  # SmolLM2, Qwen
        ('<|im_start|>', '<|im_end|>'), '', '<|im_start|>{role}\n', '<|im_end|>', '\n',
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"),
    'llama3': Form(
        ('<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>'),
        '<|begin_of_text|>', '<|start_header_id|>{role}<|end_header_id|>\n\n', '<|eot_id|>', '',
        "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}", trims=True)}


def form_of(base):
    """The name of the form whose control tokens a tokenizer has; else ours."""
    for name, form in FORMS.items():
        if name != 'plaingpt' and hasattr(base, 'special') and base.end_of_text is not None \
                and all(base.special(control) is not None for control in form.controls):
            return name
    return 'plaingpt'


def is_chat(tokenizer):
    """True for the tokenizer of a model that was tuned on conversations."""
    return isinstance(tokenizer, ChatTokenizer)


def ends_of(tokenizer):
    """The ids that end a generated text or answer: those of control tokens."""
    if not is_chat(tokenizer):
        return getattr(tokenizer, 'ends', frozenset({tokenizer.end_of_text} - {None}))
    return ends_of(tokenizer.base) | {tokenizer.end_of_text, tokenizer.end_of_turn,
                                      *tokenizer.roles.values()}


class ChatTokenizer:
    """`base`'s vocabulary and a form; the five SPECIAL_TOKENS of ours come behind it.

    Text never becomes a control token: text that spells a name is encoded as text.
    """

    def __init__(self, base, form=None, system=''):
        """form: one of FORMS (None: what suits the base); system: what it says in a conversation
        that has no such message"""
        self.base, self.system, self.form_name = base, system, form or form_of(base)
        self.form = form = FORMS[self.form_name]
        self.vocab_size = first = base.vocab_size
        if self.is_ours():
            self.ids = {name: first + i for i, name in enumerate(SPECIAL_TOKENS)}
            self.vocab_size += len(SPECIAL_TOKENS)
        else:
            self.ids = {name: base.special(name) for name in form.controls}
        self.end_of_turn = self.ids[form.end]
        # What opens a conversation in data: each is a document.
        self.conversation = self.ids[form.begin] if form.begin else base.end_of_text
        self.end_of_text = self.conversation
        self._controls = re.compile('(' + '|'.join(map(re.escape, form.controls)) + ')')
        self.roles = {role: self.role_ids(role)[0] for role in ROLES}  # the first id of a turn

    def is_ours(self):
        return self.form_name == 'plaingpt'

    def encode(self, text):
        return self.base.encode(text)

    def encode_conversation(self, messages):
        """[{'role': …, 'content': …}, …] → (ids, loss mask: True for each that is in the loss)"""
        if self.system and messages[0]['role'] != 'system':
            messages = [{'role': 'system', 'content': self.system}, *messages]
        parts = [([self.conversation], False)]
        for message in messages:
            content = message['content'].strip() if self.form.trims else message['content']
            *controls, text = self._header(message['role'])
            learned = message['role'] == 'assistant'
            parts.append((self._encode(controls), False))
            if learned:  # it is written after a header that ends, so the two are not one text
                parts += [(self._encode([text]), False), (self.encode(content), True)]
            else:
                parts.append((self.encode(text + content), False))
            parts += [([self.end_of_turn], learned), (self._encode([self.form.after]), False)]
        return np.concatenate([ids for ids, _ in parts], dtype=np.int64, casting='unsafe'), \
            np.concatenate([np.full(len(ids), learned) for ids, learned in parts])

    def encode_prompt(self, messages):
        """The ids of `messages` and of the beginning of the answer that the model is to write."""
        ids = self.encode_conversation(messages)[0]
        return np.concatenate([ids if self.form.begin else ids[1:],
                               self._encode(self._header('assistant'))], dtype=np.int64)

    def role_ids(self, role):
        """The ids by which a message of this role begins, as far as no text changes them."""
        *controls, text = self._header(role)
        return self._encode([*controls, text.rstrip('\n')])

    def answer_ids(self):
        """All ids between what the user says and the answer, but the end of the user's turn."""
        return self._encode(self._header('assistant'))

    def _header(self, role):
        """→ control tokens and texts in turn; the last is a text."""
        return self._controls.split(self.form.header.format(role=role))

    def _encode(self, pieces):
        """Names of control tokens, and texts → ids"""
        return [i for piece in pieces if piece for i in (
            [self.ids[piece]] if piece in self.ids else map(int, self.encode(piece)))]

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def decode_bytes(self, ids):
        first = self.base.vocab_size
        return b''.join(
            self.base.decode_bytes(list(run)) if is_text else
            ''.join(SPECIAL_TOKENS[i - first] for i in run).encode()
            for is_text, run in groupby(map(int, ids), lambda i: i < first))

    def to_json(self):
        ours = {'kind': 'chat', 'base': self.base.to_json()}
        return ours if self.is_ours() else {**ours, 'form': self.form_name, 'system': self.system}
