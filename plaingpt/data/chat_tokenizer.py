"""Conversations ↔ token ids: a tokenizer of text with five special tokens more.

    <|conversation|> <|user|> Hi! <|end|> <|assistant|> Hello. <|end|>

The text of the assistant and the <|end|> after it count in the loss, the other tokens do not.
"""

from itertools import groupby

import numpy as np

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


def is_chat(tokenizer):
    """True for the tokenizer of a model that was tuned on conversations."""
    return isinstance(tokenizer, ChatTokenizer)


def ends_of(tokenizer):
    """The ids that end a generated text or answer: those of special tokens."""
    ends = {tokenizer.end_of_text}
    if is_chat(tokenizer):
        ends |= {tokenizer.end_of_turn, *tokenizer.roles.values(), tokenizer.base.end_of_text}
    return frozenset(ends - {None})


class ChatTokenizer:
    """`base`'s vocabulary plus the five SPECIAL_TOKENS.

    Text never becomes a special token: text that spells a name is encoded as text.
    """

    def __init__(self, base):
        self.base = base
        first = base.vocab_size
        self.conversation, self.end_of_turn = first, first + 4
        self.roles = {'system': first + 1, 'user': first + 2, 'assistant': first + 3}
        self.end_of_text = self.conversation  # each conversation is a document
        self.vocab_size = first + len(SPECIAL_TOKENS)

    def encode(self, text):
        return self.base.encode(text)

    def encode_conversation(self, messages):
        """[{'role': …, 'content': …}, …] → (ids, loss mask: True for each that is in the loss)"""
        ids, loss_mask = [[self.conversation]], [[False]]
        for message in messages:
            content = self.encode(message['content'])
            ids += [[self.roles[message['role']]], content, [self.end_of_turn]]
            loss_mask += [[False], np.full(len(content) + 1, message['role'] == 'assistant')]
        return np.concatenate(ids, dtype=np.int64, casting='unsafe'), \
            np.concatenate(loss_mask, dtype=bool)

    def encode_prompt(self, messages):
        """The ids of `messages` and of the beginning of the answer that the model is to write."""
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
                yield from ((SPECIAL_TOKENS[i - first], None) for i in run)

    @property
    def encoders(self):
        return self.base.encoders

    def verify(self, text, ids):
        self.base.verify(text, ids)

    def to_json(self):
        return {'kind': 'chat', 'base': self.base.to_json()}
