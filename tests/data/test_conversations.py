"""Files of conversations → messages → tokens and their loss mask, and what is refused."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from plaingpt.data import conversations
from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS, ChatTokenizer
from plaingpt.data.conversations import Conversations
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.system.errors import UserError

BYTES = ChatTokenizer(ByteTokenizer())
SPECIAL = dict(zip(range(257, 262), SPECIAL_TOKENS, strict=True))


def read(path, columns=()):
    return [json.loads(piece.text)
            for piece in Conversations([path], str(path), columns).pieces()]


def written(path, *rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def refusal(path):
    """The one line that says why a file is not read."""
    with pytest.raises(UserError) as found:
        read(path)
    assert '\n' not in str(found.value)
    return str(found.value)


def marked(messages):
    """Messages as one text of their tokens; ^ below those in the loss."""
    ids, loss_mask = BYTES.encode_conversation(messages)
    names = [SPECIAL[i][2].upper() if i in SPECIAL else chr(i) for i in ids.tolist()]
    return ''.join(names), ''.join(' ^'[in_loss] for in_loss in loss_mask.tolist())


# The special tokens by their second letters: C opens a conversation, S, U and A a message; E ends
# one. A row in its form, its tokens, and below them what is in the loss.
FORMS = [
    ('messages', {'messages': [{'role': 'system', 'content': 'be'},
                               {'role': 'user', 'content': 'hi'},
                               {'role': 'assistant', 'content': 'yo'},
                               {'role': 'user', 'content': 'so'},
                               {'role': 'assistant', 'content': 'no'}]},
     'CSbeEUhiEAyoEUsoEAnoE',
     '          ^^^     ^^^'),
    ('messages', {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'a'},
                                                            {'type': 'text', 'text': 'b'}]},
                               {'role': 'assistant', 'content': 'c', 'tool_calls': None}]},
     'CUabEAcE',
     '      ^^'),
    ('sharegpt', {'conversations': [{'from': 'system', 'value': 'be'},
                                    {'from': 'human', 'value': 'hi'},
                                    {'from': 'gpt', 'value': 'yo'}]},
     'CSbeEUhiEAyoE',
     '          ^^^'),
    ('alpaca', {'instruction': 'add', 'input': '1 2', 'output': '3'},
     'CUadd\n\n1 2EA3E',
     '            ^^'),
    ('alpaca', {'instruction': 'add', 'input': '', 'output': '3'}, 'CUaddEA3E', '       ^^'),
    ('alpaca', {'instruction': 'add', 'output': '3'}, 'CUaddEA3E', '       ^^'),
    ('completion', {'prompt': 'add', 'completion': ' 3'}, 'CUaddEA 3E', '       ^^^'),
]


def test_each_form_is_known_and_its_answers_are_the_loss(tmp_path):
    for _, row, tokens, loss_mask in FORMS:
        [messages] = read(written(tmp_path / 'a.jsonl', row))
        assert marked(messages) == (tokens, loss_mask), row


PAIRS = [['What is 1 + 1?', '2'], ['Say "hi",\nplease', '"Hi", he said'], ['a\tb', 'ü']]


@pytest.mark.parametrize('names', conversations.PAIRS)
def test_questions_and_answers_are_rows_of_a_table_whose_columns_have_usual_names(names, tmp_path):
    columns = dict(zip(names, zip(*PAIRS, strict=True), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / 'a.parquet')
    found = read(tmp_path / 'a.parquet')
    assert [[message['content'] for message in messages] for messages in found] == PAIRS


def test_columns_can_be_named(tmp_path):
    path = tmp_path / 'a.csv'
    path.write_text('q,prompt,context,a\nhi,x,y,yo\n')
    [messages] = read(path, ('q', 'a'))
    assert [message['content'] for message in messages] == ['hi', 'yo']
    path.write_text('q,b\nhi,yo\n')
    with pytest.raises(UserError, match=r'a\.csv, line 2: no conversation, it is'):
        read(path, ('q', 'a'))


def test_fields_that_are_no_part_of_the_conversation_are_named_once(tmp_path, capsys):
    row = {'id': 1, 'prompt': 'a', 'completion': 'b', 'source': 'web'}
    assert len(read(written(tmp_path / 'a.jsonl', row, row))) == 2
    [line] = capsys.readouterr().out.splitlines()
    assert line.endswith('line 1: left out, as no part of the conversation: id, source')


def user(content='hi'):
    return {'role': 'user', 'content': content}


def assistant(content='yo', **others):
    return {'role': 'assistant', 'content': content, **others}


def shared(*pairs):
    return {'conversations': [{'from': name, 'value': value} for name, value in pairs]}


def said(*messages):
    return {'messages': list(messages)}


SYSTEM = {'role': 'system', 'content': 'be'}
CALL = {'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}
IMAGE = {'type': 'image_url', 'image_url': {'url': 'x'}}
BAD = [  # a second row, and what is said of it
    (said({'content': 'hi'}, assistant()), 'message 1 is {"content": "hi"}: an object'),
    (said(user(), assistant(), {'role': 'tool', 'content': 'x'}), 'message 3 is {"role": "tool"'),
    (said(user(' \n\t')), 'message 1 is " \\n\\t": text is expected'),
    (said(user()), 'the assistant says nothing'),
    (said(), 'no messages'), (said('hi', 'yo'), 'message 1 is "hi": an object with role'),
    (said(user([IMAGE]), assistant()), 'message 1 is [{"type": "image_url"'),
    (said(user(), assistant(None)), 'message 2 is {"role": "assistant", "content": null}'),
    (said(user(), assistant(tool_calls=[CALL])), 'role and content alone is expected'),
    (said(SYSTEM, SYSTEM, user(), assistant()), 'one system message may stand first'),
    (said(assistant(), user(), assistant()), 'and then the user speaks'),
    ({'prompt': 'a', 'completion': None}, "field 'completion' is null: text is expected"),
    (shared(('bing', 'hi')), 'as from expected one of human, gpt'),
    ({'instruction': 'a', 'input': 'b'}, 'no conversation, it is {"instruction": "a"'),
    ({'instruction': 'a', 'output': 7}, 'is 7: text is expected'),
    ([user(), assistant()], 'no conversation'), (None, 'no conversation'),
]
GOOD = [{'conversations': [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]},
        {'instruction': 'a', 'output': 'b'}, {'prompt': 'a', 'completion': 'b'},
        said(user(), assistant())]


def test_a_row_that_is_not_wholly_understood_is_named_with_its_line(tmp_path):
    for row, what in BAD:
        fields = row if isinstance(row, dict) else {}
        good = next((good for good in GOOD if set(good) & set(fields)), GOOD[-1])
        path = written(tmp_path / 'a.jsonl', good, row)
        assert refusal(path).startswith(f'{path}, line 2: '), row
        assert what in refusal(path), row
