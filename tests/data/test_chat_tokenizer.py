import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plaingpt.data.chat_tokenizer import MARK, SPECIAL_TOKENS, ChatTokenizer
from plaingpt.data.tokenizers import ByteTokenizer, CharTokenizer, from_json

BYTES = ChatTokenizer(ByteTokenizer())  # 257 ids of the base, then the five
CONVERSATION, SYSTEM, USER, ASSISTANT, END = range(257, 262)
MESSAGES = [{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'ab'},
            {'role': 'assistant', 'content': 'cd'}, {'role': 'user', 'content': 'e'},
            {'role': 'assistant', 'content': 'f'}]


def test_what_the_assistant_says_and_its_end_are_in_the_loss_and_nothing_else():
    ids, loss_mask = BYTES.encode_conversation(MESSAGES)
    S, a, b, c, d, e, f = b'Sabcdef'
    expected = [(CONVERSATION, 0), (SYSTEM, 0), (S, 0), (END, 0), (USER, 0), (a, 0), (b, 0),
                (END, 0), (ASSISTANT, 0), (c, 1), (d, 1), (END, 1), (USER, 0), (e, 0), (END, 0),
                (ASSISTANT, 0), (f, 1), (END, 1)]
    assert list(zip(ids.tolist(), loss_mask.tolist(), strict=True)) == expected
    prompt = BYTES.encode_prompt(MESSAGES[:-1]).tolist()  # up to where the answer begins
    assert prompt == ids.tolist()[:-2] and prompt[-1] == BYTES.roles['assistant']
    assert BYTES.end_of_text == BYTES.conversation == CONVERSATION and BYTES.end_of_turn == END


@settings(max_examples=50)
@given(st.text(st.characters(codec='utf-8', exclude_characters=[MARK]))
       | st.sampled_from(SPECIAL_TOKENS).map(lambda name: f'a {name} b'))
def test_no_text_becomes_a_special_token_and_the_template_writes_what_is_encoded(text):
    messages = [{'role': 'user', 'content': text}, {'role': 'assistant', 'content': text}]
    ids, loss_mask = BYTES.encode_conversation(messages)
    size = len(text.encode('utf-8', 'surrogatepass'))
    assert np.flatnonzero(ids >= 257).tolist() == [0, 1, 2 + size, 3 + size, 4 + 2 * size]
    assert BYTES.decode(ids) == f'<|conversation|><|user|>{text}<|end|><|assistant|>{text}<|end|>'
    rendered = BYTES.rendered_parts(BYTES.guard(messages))
    assert np.concatenate([part for part, _ in rendered]).tolist() == ids.tolist()
    assert sum(len(part) for part, learned in rendered if learned) == size + 1 == loss_mask.sum()


def test_it_comes_back_from_its_json():
    for base in (ByteTokenizer(), CharTokenizer('abcdefS')):
        description = json.loads(json.dumps(ChatTokenizer(base).to_json()))
        made = from_json(description)
        assert made.to_json() == description and type(made.base) is type(base)
        assert made.vocab_size == base.vocab_size + 5
        assert made.decode(made.encode_conversation(MESSAGES)[0]).startswith('<|conversation|>')
