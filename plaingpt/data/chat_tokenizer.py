"""Conversations ↔ token ids: a tokenizer of text, with the control tokens of a chat template.

    <|conversation|> <|user|> Hi! <|end|> <|assistant|> Hello. <|end|>

The assistant's text and the <|end|> after it count in the loss, the other tokens do not. This is
our template, which adds five tokens. A pretrained model's template is rendered as in transformers.
"""

import re
from functools import lru_cache
from itertools import pairwise

import numpy as np

from plaingpt.core.token_files import CONTEXT, CONVERSATION, IN_LOSS, TURN
from plaingpt.data.conversations import is_in_loss
from plaingpt.data.foreign_tokenizer import (
    TEMPLATE_FILE,
    ForeignTokenizer,
    find_template,
    parse_object,
)
from plaingpt.system.errors import UserError, warn
from plaingpt.system.formatting import one_line

SPECIAL_TOKENS = ('<|conversation|>', '<|system|>', '<|user|>', '<|assistant|>', '<|end|>')
# The same in Jinja, for exports. Without Jinja, llama.cpp guesses a template by the names in its
# text, and would take this one for Phi-3's: so '<|end|>' and '<|assistant|>' are split.
TEMPLATE = (
    "<|conversation|>"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the role of a message must be system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|' + 'end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|' + 'assistant|>' }}{% endif %}")
PLAIN_TEMPLATES = {  # replace a template that cannot be used; selected by its control tokens
    'chatml': (  # SmolLM2, Qwen
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"),
    'llama3': (
        "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")}
MARK = '\ufdd0'  # a Unicode noncharacter, reserved for internal use: it is in no text
USER, ANSWER = {'role': 'user', 'content': MARK}, {'role': 'assistant', 'content': MARK}


def as_chat(description, where):
    """The JSON of a ForeignTokenizer → the JSON of a ChatTokenizer with its chat template. A
    template that cannot be used is replaced by a plain one with the same control tokens, with a
    warning. If there is none either, the JSON is unchanged."""
    template, base = find_template(description['files']), ForeignTokenizer(description)
    if template is None:
        return description
    try:
        ChatTokenizer(base, template).check_roles(('user', 'assistant', 'user', 'assistant'))
    except UserError as problem:
        template = plain_template(base)
        if not template:
            warn(f'{where}: {problem}; using its tokenizer without a chat template')
            return description
        warn(f'{where}: {problem}; using a plain template instead')
        files = {**description['files'], TEMPLATE_FILE: template}
        description = {**description, 'files': files}
    return {'kind': 'chat', 'base': description, 'template': template}


def plain_template(base):
    """The plain template for the control tokens of a tokenizer, or ''."""
    if isinstance(base, ForeignTokenizer):
        for template in PLAIN_TEMPLATES.values():
            if base.control_tokens.keys() >= {*re.findall(r'<\|\w+\|>', template)}:
                return template
    return ''


@lru_cache(4)
def compile_template(template):
    """As in transformers, in a sandbox: a template cannot execute Python code."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # a dependency of torch

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} around a reply, for the loss masks of
        transformers. We find replies by rendering prompts, so it has no effect here."""

        tags = frozenset({'generation'})

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(['name:endgeneration'], drop_needle=True)

    def fail(message):
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, 'jinja2.ext.loopcontrols'])
    environment.globals['raise_exception'] = fail
    return environment.from_string(template)


class ChatTokenizer:
    """`base` with a chat template, or with ours and its SPECIAL_TOKENS after base's vocabulary.

    Text never becomes a control token: text that spells one is encoded as text.
    """

    def __init__(self, base, template=''):
        """template: a pretrained model's, in Jinja. Raises UserError if it cannot be used."""
        self.base, self.template, self.vocab_size = base, template, base.vocab_size
        self.template_variables, self.accepted_roles = {}, set()
        if self.has_own_template():
            self.ids = {name: self.vocab_size + i for i, name in enumerate(SPECIAL_TOKENS)}
            self.vocab_size += len(SPECIAL_TOKENS)
        else:
            self.ids = base.control_tokens
            config = parse_object(base.to_json()['files'], 'tokenizer_config.json')
            for key in 'bos_token', 'eos_token':
                if token := config.get(key):
                    self.template_variables[key] = \
                        token['content'] if isinstance(token, dict) else token
        self.arrays = {name: np.array([i]) for name, i in self.ids.items()}
        names = '|'.join(map(re.escape, self.ids)) or '(?!)'  # '(?!)' never matches
        self.control = re.compile(f'({names})')
        self._find_turn_tokens()
        self.stop_ids = base.stop_ids | {self.bos_id, self.end_of_turn, *self.roles.values()}
        if self.has_own_template():
            self.stop_ids |= {*self.ids.values()}

    def _find_turn_tokens(self):
        """Find the tokens that begin and end a conversation and its turns, by rendering one."""
        question, prompt = self.render([USER]), self.render([USER], True)
        one_turn, two_turns = self.render([USER, ANSWER]), self.render([USER, ANSWER, USER], True)
        end = self.control.search(one_turn, one_turn.rfind(MARK) + 1)
        if not end:
            raise UserError('its chat template does not end a reply with a control token')
        self.end_token, self.end_of_turn = end[0], self.ids[end[0]]
        turn = one_turn[:end.end()]  # EOS may follow
        check_extends(prompt, turn, two_turns)
        reply_header = turn[len(prompt):].partition(MARK)[0]
        if prompt == question and self.control.search(reply_header):
            raise UserError('its chat template ignores add_generation_prompt')
        self.reply_space = reply_header if reply_header.isspace() else ''
        self.prompt_end = self.ids_of(prompt.partition(MARK)[2]).tolist()
        user_header = two_turns[len(turn):].partition(MARK)[0].lstrip('\n')
        self._find_bos(two_turns, user_header)
        # Data of version 1.0 does not mark where users speak, but these ids do. Without line breaks
        # at the end, which may merge with the text.
        self.user_ids = self.ids_of(user_header.rstrip('\n')).tolist()
        self.roles = {}  # the control tokens of the headers
        for role, text in ('user', user_header), ('assistant', prompt.partition(MARK)[2]):
            controls = [name for name in self.control.findall(text) if name != self.end_token]
            if controls:
                self.roles[role] = self.ids[controls[0]]

    def _find_bos(self, two_turns, user_header):
        """Find the token in front of each conversation: the template's BOS token, or where it has
        none a token that is in no conversation."""
        controls = self.control.findall(two_turns)
        opening = two_turns.partition(MARK)[0].removesuffix(user_header)
        has_text = self.control.sub('', opening).strip()  # a default system message
        is_bos = opening.startswith(controls[0]) and controls.count(controls[0]) == 1 and (
            not has_text or controls[0] == self.template_variables.get('bos_token'))
        self.adds_bos = not is_bos  # the model does not read it at the start of a sequence
        self.bos_id = self.ids[controls[0]] if is_bos else self.base.end_of_text
        if self.adds_bos and self.bos_id in [None, *(self.ids[name] for name in controls)]:
            self.bos_id = self.base.unused_id
        if self.bos_id is None:
            raise UserError('its tokenizer has no token to put between conversations')
        self.end_of_text = self.bos_id  # each conversation is a document

    def has_own_template(self):
        """Whether it uses TEMPLATE rather than a pretrained model's."""
        return not self.template

    def render(self, messages, add_generation_prompt=False):
        """The text of messages in the template. Raises UserError."""
        try:
            return compile_template(self.template or TEMPLATE).render(
                messages=messages, tools=None, documents=None,
                add_generation_prompt=add_generation_prompt, **self.template_variables)
        except Exception as e:  # a template can raise anything
            raise UserError(f'its chat template cannot be used ({one_line(e)[:100]})') from None

    def check_roles(self, roles):
        """Raises UserError if the template cannot express a conversation with these roles."""
        if self.has_own_template() or roles in self.accepted_roles:
            return
        messages = [{'role': role, 'content': MARK} for role in roles]
        if self.render(messages).count(MARK) < len(messages):
            raise UserError('its chat template leaves out messages')
        self.mark_conversation(messages)
        self.accepted_roles.add(roles)

    def ids_of(self, text):
        """The ids of rendered text."""
        arrays = [np.array([], np.int64)]
        for i, piece in enumerate(self.control.split(text)):  # alternates: text, control token
            if i % 2:
                arrays.append(self.arrays[piece])
            elif piece:
                arrays.append(self.encode(piece.replace(MARK, '')))
        return np.concatenate(arrays).astype(np.int64)

    def escape(self, messages):
        """Messages with a MARK inside each spelled-out control token, so that it stays text."""
        def insert_mark(match):
            return match[0][0] + MARK + match[0][1:]

        return [{**message, 'content': self.control.sub(insert_mark, message['content'])}
                for message in messages]

    def encode(self, text):
        return self.base.encode(text)

    def encode_conversation(self, messages):
        """[{'role': …, 'content': …}, …] → (ids, loss mask: True for each id in the loss).
        Raises UserError if a pretrained model's template cannot express the conversation."""
        ids, marks = self.mark_conversation(messages)
        return ids, marks == IN_LOSS

    def mark_conversation(self, messages):
        """The same → (ids, the mark of each): IN_LOSS, or CONVERSATION for the first, TURN for the
        first of each user turn after a reply, and CONTEXT for the others."""
        if self.has_own_template():  # the same as rendering TEMPLATE, in half the time
            segments, user_mark = [(self.arrays['<|conversation|>'], CONVERSATION)], CONTEXT
            for message in messages:
                role, mark = message['role'], mark_of(message)
                segments += [(self.arrays[f'<|{role}|>'], user_mark if role == 'user' else CONTEXT),
                             (self.encode(message['content']), mark),
                             (self.arrays['<|end|>'], mark)]
                user_mark = TURN if role == 'assistant' else CONTEXT
        else:
            segments = self._rendered_segments(self.escape(messages))
        ids = np.concatenate([ids for ids, _ in segments]).astype(np.int64)
        marks = np.repeat([mark for _, mark in segments], [len(ids) for ids, _ in segments])
        marks[0] = CONVERSATION
        return ids, marks

    def _rendered_segments(self, messages):
        """[(ids, their mark)]. A reply is what the template adds to a prompt, up to the
        end-of-turn token."""
        text, end = self.render(messages), 0  # end: of the last reply
        segments = [(np.array([self.bos_id]), CONTEXT)] if self.adds_bos else []
        for i, message in enumerate(messages):
            if message['role'] != 'assistant':
                continue
            prompt, with_reply = self.render(messages[:i], True), self.render(messages[:i + 1])
            reply_end = text.find(self.end_token, len(prompt)) + len(self.end_token)
            check_extends(prompt, text[:reply_end], with_reply)
            segments += self._context_segments(text[end:len(prompt)], TURN if end else CONTEXT)
            segments.append((self.ids_of(text[len(prompt):reply_end]), mark_of(message)))
            end = reply_end
        return [*segments, (self.ids_of(text[end:]), CONTEXT)]

    def _context_segments(self, text, mark):
        """The segments of what precedes a reply. mark: of its first token, or of a control token
        that only white space precedes"""
        start = len(text) - len(text.lstrip())
        if not self.control.match(text, start):
            start = 0
        ids = self.ids_of(text[start:])
        return [(self.ids_of(text[:start]), CONTEXT), (ids[:1], mark), (ids[1:], CONTEXT)]

    def encode_prompt(self, messages):
        """The ids of `messages` and of the header of the assistant's reply."""
        return self.ids_of(self.render(self.escape(messages), True))

    def space_after(self, prompt):
        """The white space that the template writes between this prompt (ids) and the reply."""
        is_complete = prompt[-len(self.prompt_end):] == self.prompt_end
        return self.reply_space if is_complete else ''

    def decode(self, ids):
        """Invalid UTF-8, such as an incomplete character, becomes U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def decode_bytes(self, ids):
        first_special = self.base.vocab_size  # a pretrained model's control tokens are in base
        tokens = []
        for i in map(int, ids):
            if i >= first_special:
                tokens.append(SPECIAL_TOKENS[i - first_special].encode())
            else:
                tokens.append(self.base.decode_bytes([i]))
        return b''.join(tokens)

    def to_json(self):
        description = {'kind': 'chat', 'base': self.base.to_json()}
        if not self.has_own_template():
            description['template'] = self.template
        return description


def check_extends(*texts):
    """Raises UserError unless each text begins with the one before it."""
    for text, longer in pairwise(texts):
        if not longer.startswith(text):
            raise UserError('its chat template rewrites earlier turns')


def mark_of(message):
    return IN_LOSS if is_in_loss(message) else CONTEXT
