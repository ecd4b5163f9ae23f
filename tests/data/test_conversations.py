"""Files of conversations → messages → tokens and their loss mask, and what is refused."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS, ChatTokenizer
from plaingpt.data.conversations import COMPLETIONS, LISTS, PROMPTS, ConversationReader
from plaingpt.data.documents import Files
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.system.errors import UserError

BYTES = ChatTokenizer(ByteTokenizer())
SPECIAL = dict(zip(range(257, 262), SPECIAL_TOKENS, strict=True))


def read(path, named=(), strict=True):
    source = Files([path], str(path), ConversationReader(named), strict=strict)
    messages = [json.loads(piece.text) for piece in source.pieces()]
    source.report()
    return messages


def written(path, *rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def refusal(path):
    """The one line that says why a row cannot be used."""
    with pytest.raises(UserError) as refused:
        read(path)
    assert '\n' not in str(refused.value)
    return str(refused.value)


def user(content='hi'):
    return {'role': 'user', 'content': content}


def assistant(content='yo', **others):
    return {'role': 'assistant', 'content': content, **others}


def said(*messages, key='messages'):
    return {key: list(messages)}


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


SYSTEM, HI, YO = {'role': 'system', 'content': 'be'}, user(), assistant()
PLAIN, WITH_SYSTEM = [HI, YO], [SYSTEM, HI, YO]
# rows as people have them → the conversation in them
AS_FOUND = [
    *((said(HI, YO, key=key), PLAIN) for key in (*LISTS, 'Messages')),
    *(({prompt: 'hi', completion: 'yo'}, PLAIN) for prompt in PROMPTS for completion in COMPLETIONS
      if (prompt, completion) != ('instruction', 'input')),
    ({'Question': 'hi', ' ANSWER': 'yo', 'id': 7}, PLAIN),
    ([HI, YO], PLAIN), (['hi', 'yo'], PLAIN), ({'messages': ['hi', 'yo']}, PLAIN),
    ({'messages': json.dumps([HI, YO])}, PLAIN),
    ({'messages': {'role': ['user', 'assistant'], 'content': ['hi', 'yo']}}, PLAIN),
    (said({'from': 'human', 'value': 'hi'}, {'from': 'gpt', 'value': 'yo'}), PLAIN),
    (said({'role': 'Human', 'content': 'hi'}, {'role': 'bot', 'content': 'yo'}), PLAIN),
    (said({'role': 'developer', 'content': 'be'}, HI, {'role': 'model', 'content': 'yo'}),
     WITH_SYSTEM),
    (said({'role': 'system', 'content': ' '}, HI, YO), PLAIN),
    (said({**HI, 'name': 'Ann'}, {**YO, 'weight': 1, 'reasoning_content': 'why', 'tool_calls': []}),
     PLAIN),
    (said(HI, {**YO, 'reasoning_content': None, 'tool_calls': None, 'function_call': {}}), PLAIN),
    ({'system': 'be', 'conversations': [HI, YO]}, WITH_SYSTEM),
    ({'prompt': [SYSTEM, HI], 'completion': [YO]}, WITH_SYSTEM),
    ({'prompt': [HI], 'completion': 'yo'}, PLAIN), ({'prompt': 'hi', 'completion': [YO]}, PLAIN),
    ({'prompt': [HI], 'completion': [HI, YO]}, PLAIN),
    ({'instruction': 'hi', 'input': '', 'output': 'yo', 'system': 'be', 'history': []},
     WITH_SYSTEM),
    ({'instruction': 'so', 'input': 'x', 'output': 'no', 'history': [['hi', 'yo']]},
     [*PLAIN, user('so\n\nx'), assistant('no')]),
    ({'instruction': 'so', 'context': 'x', 'response': 'no'}, [user('so\n\nx'), assistant('no')]),
    ({'system_prompt': 'be', 'question': 'hi', 'response': 'yo'}, WITH_SYSTEM),
    ({'id': 1, 'data': ['hi', 'yo']}, PLAIN),
    ({'Messages': [{'Role': 'User', 'Content': 'hi'}, {'Role': 'ASSISTANT', 'Content': 'yo'}]},
     PLAIN),
    ({'messages': None, 'prompt': 'hi', 'completion': 'yo'}, PLAIN),
    ({'instruction': '', 'input': 'hi', 'output': 'yo', 'history': '[]'}, PLAIN),
    ({'question': 'so', 'context': 'x', 'answer': 'no'}, [user('so\n\nx'), assistant('no')]),
    (said({'role': 'system', 'content': '', 'tools': '[{}]'}, HI, YO), PLAIN),
    ({'prompt': [HI, YO, HI], 'completion': [YO]}, [HI, {**YO, 'weight': 0}, HI, YO]),
]


def test_conversations_are_read_as_others_write_them(tmp_path):
    for row, conversation in AS_FOUND:
        assert read(written(tmp_path / 'a.jsonl', row)) == [conversation], row


def test_a_json_array_of_conversations_that_are_lists_is_read(tmp_path):
    (tmp_path / 'a.json').write_text(json.dumps([[HI, YO], [HI, YO]], indent=1))
    assert read(tmp_path / 'a.json') == [PLAIN, PLAIN]


def test_a_table_of_messages_is_read_from_parquet(tmp_path):
    rows = [[{**HI, 'tool_calls': None}, {**YO, 'tool_calls': None}]]
    table = pyarrow.table({'messages': rows, 'id': [1]})
    pyarrow.parquet.write_table(table, tmp_path / 'a.parquet')
    assert read(tmp_path / 'a.parquet') == [PLAIN]


def test_a_message_of_weight_0_is_not_in_the_loss(tmp_path):
    row = said(HI, assistant('no', weight=0), HI, YO)
    [messages] = read(written(tmp_path / 'a.jsonl', row))
    assert marked(messages) == ('CUhiEAnoEUhiEAyoE', '              ^^^')


def test_columns_can_be_named_in_any_case(tmp_path):
    path = tmp_path / 'a.csv'
    path.write_text('Q,prompt,context,a\nhi,x,y,yo\n')
    assert read(path, ('q', 'A')) == [PLAIN]
    path.write_text('q,b\nhi,yo\n')
    with pytest.raises(UserError) as refused:
        read(path, ('q', 'a'))
    assert all(word in str(refused.value) for word in ('a.csv, line 2', "'b'", '--completion'))


@pytest.mark.parametrize('delimiter', ',;\t|')
def test_the_separator_of_a_table_is_found(delimiter, tmp_path):
    (tmp_path / 'a.csv').write_text(f'Question{delimiter}Answer\n"h,;|i"{delimiter}yo\n')
    assert read(tmp_path / 'a.csv') == [[user('h,;|i'), YO]]


def test_what_is_no_part_of_the_conversations_is_named_once(tmp_path, capsys):
    row = {'id': 1, 'prompt': [{**HI, 'name': 'Ann'}], 'completion': 'b', 'empty': None}
    twice = {'system': 'or', 'messages': [SYSTEM, HI, YO]}
    assert len(read(written(tmp_path / 'a.jsonl', row, row, twice))) == 3
    assert capsys.readouterr().out.splitlines() == [
        'not part of the conversations: id, name, system']


CALL = {'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}
IMAGE = {'type': 'image_url', 'image_url': {'url': 'x'}}
BAD = [  # a second row, and what is said of it
    (said({'content': 'hi'}, YO), 'message 1: unknown role'),
    (said(HI, {'role': 'narrator', 'content': 'x'}), 'message 2: unknown role "narrator"'),
    (said(HI, YO, {'role': 'tool', 'content': 'x'}), 'message 3: tool calls'),
    (said(HI, assistant(None, tool_calls=[CALL])), 'message 2: tool calls'),
    (said(HI, assistant(tool_calls=[CALL])), 'message 2: tool calls'),
    (said({'from': 'human', 'value': 'hi'}, {'from': 'function_call', 'value': '{}'}),
     'message 2: tool calls'),
    (said(HI, assistant('', reasoning_content='why')), 'message 2: thinking'),
    ({'prompt': 'hi', 'chosen': 'yo', 'rejected': 'no'}, 'preference pair'),
    ({'prompt': 'hi', 'completion': 'yo', 'label': False}, 'labeled false'),
    (said(user(' \n\t'), YO), 'message 1: blank text'),
    (said(HI), 'no reply'), (said(HI, assistant(weight=0)), 'no reply'),
    (said(), 'no messages'), ({'messages': None}, 'no messages'),
    ({'messages': '[{'}, 'not JSON'), (said(7, YO), 'message 1: not a message'),
    (said(user([IMAGE]), YO), 'message 1: not text'),
    (said(HI, assistant(None)), 'message 2: content is null'),
    (said(SYSTEM, SYSTEM, HI, YO), 'a system message that is not the first'),
    (said(YO, HI, YO), 'the assistant speaks first'),
    ({'prompt': 'a', 'completion': None}, 'completion is null'),
    (said(HI, assistant(weight=0.5)), 'neither 0 nor 1'),
    ({'instruction': 'a', 'input': 'b'}, "'instruction', 'input': name them with --prompt"),
    ({'instruction': 'a', 'output': 7}, 'not text: output is 7'),
    ({'text': '### Human: hi'}, '--completion'), (None, 'not a conversation'),
]


def test_a_row_that_cannot_be_used_is_named_with_its_line_and_the_reason(tmp_path):
    for row, reason in BAD:
        path = written(tmp_path / 'a.jsonl', said(HI, YO), row)
        assert refusal(path).startswith(f'{path}, line 2: '), row
        assert reason in refusal(path), (row, refusal(path))


def test_few_of_them_are_left_out_and_counted_by_reason(tmp_path, capsys):
    rows = [said(HI, YO)] * 996 + [row for row, _ in BAD[2:6]]
    assert len(read(written(tmp_path / 'a.jsonl', *rows), strict=False)) == 996
    line, = capsys.readouterr().out.splitlines()
    assert line.startswith('left out 4 of 1,000 rows: tool calls') and 'line 997' in line
    assert 'line 999' in line and 'line 1000' not in line
    with pytest.raises(UserError, match='line 87: message 3: tool calls'):
        read(written(tmp_path / 'a.jsonl', *rows[910:]), strict=False)
