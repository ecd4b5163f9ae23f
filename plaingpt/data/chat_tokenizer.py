"""Conversations ↔ token ids: a tokenizer of text with five special tokens more.

    <|conversation|> <|user|> Hi! <|end|> <|assistant|> Hello. <|end|>

The model learns what it is to write itself: the text of the assistant and the <|end|> after it.
"""

from itertools import groupby

import numpy as np

NAMES = ('<|conversation|>', '<|system|>', '<|user|>', '<|assistant|>', '<|end|>')
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


def is_chat(tokenizer):
    """True for the tokenizer of a model that was tuned on conversations."""
    return isinstance(tokenizer, ChatTokenizer)


def ends_of(tokenizer):
    """The ids that are no text: each ends what the model writes."""
    ends = {tokenizer.end_of_text}
    if is_chat(tokenizer):
        ends |= {tokenizer.end_of_turn, *tokenizer.roles.values(), tokenizer.base.end_of_text}
    return frozenset(ends - {None})


class ChatTokenizer:
    """The ids of `base`, a tokenizer of text, and after them those of NAMES.

    No text becomes one of these: text that spells a name is encoded as text.
    """

    def __init__(self, base):
        self.base = base
        first = base.vocab_size
        self.conversation, self.end_of_turn = first, first + 4
        self.roles = {'system': first + 1, 'user': first + 2, 'assistant': first + 3}
        self.end_of_text = self.conversation  # each conversation is a document
        self.vocab_size = first + len(NAMES)

    def encode(self, text):
        return self.base.encode(text)

    def encode_conversation(self, messages):
        """[{'role': …, 'content': …}, …] → (ids, bool array: which of them are learned)"""
        ids, learned = [[self.conversation]], [[False]]
        for message in messages:
            content = self.encode(message['content'])
            ids += [[self.roles[message['role']]], content, [self.end_of_turn]]
            learned += [[False], np.full(len(content) + 1, message['role'] == 'assistant')]
        return np.concatenate(ids, dtype=np.int64, casting='unsafe'), \
            np.concatenate(learned, dtype=bool)

    def encode_prompt(self, messages):
        """The ids after which the answer to `messages` comes."""
        return np.append(self.encode_conversation(messages)[0], self.roles['assistant'])

    def decode(self, ids):
        return ''.join(self.base.decode(run) if name is None else name
                       for name, run in self._runs(ids))

    def decode_bytes(self, ids):
        return b''.join(self.base.decode_bytes(run) if name is None else name.encode()
                        for name, run in self._runs(ids))

    def _runs(self, ids):
        """Yield (the name of a special token, None) and (None, the ids of text) in their order."""
        first = self.base.vocab_size
        for is_text, run in groupby(map(int, ids), lambda i: i < first):
            if is_text:
                yield None, list(run)
            else:
                yield from ((NAMES[i - first], None) for i in run)

    @property
    def encoders(self):
        return self.base.encoders

    def choose_encoder(self, name):
        self.base.choose_encoder(name)

    def verify(self, text, ids):
        self.base.verify(text, ids)

    def to_json(self):
        return {'kind': 'chat', 'base': self.base.to_json()}
