"""Files of conversations → messages → tokens and their loss mask, and what is refused."""

import json

import pytest
from corpus_files import write_parquet
from sample_data import CHAT

from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS
from plaingpt.data.conversations import ConversationReader
from plaingpt.data.documents import Files
from plaingpt.system.errors import UserError

SPECIAL = dict(zip(range(257, 262), SPECIAL_TOKENS, strict=True))


def read(path, columns=(), strict=True):
    source = Files([path], str(path), ConversationReader(columns), strict=strict)
    messages = [json.loads(piece.text) for piece in source.pieces()]
    source.report()
    return messages


def written(path, *rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def user(content='hi'):
    return {'role': 'user', 'content': content}


def assistant(content='yo', **others):
    return {'role': 'assistant', 'content': content, **others}


def said(*messages, key='messages'):
    return {key: list(messages)}


def marked(messages):
    """Messages as one text of their tokens; ^ below those in the loss."""
    ids, loss_mask = CHAT.encode_conversation(messages)
    names = [SPECIAL[i][2].upper() if i in SPECIAL else chr(i) for i in ids.tolist()]
    return ''.join(names), ''.join(' ^'[in_loss] for in_loss in loss_mask.tolist())


# The special tokens by their second letters: C opens a conversation, S, U and A a message; E ends
# one. A row, its tokens, and below them what is in the loss.
FORMS = {
    'messages': ({'messages': [{'role': 'system', 'content': 'be'},
                               {'role': 'user', 'content': 'hi'},
                               {'role': 'assistant', 'content': 'yo'},
                               {'role': 'user', 'content': 'so'},
                               {'role': 'assistant', 'content': 'no'}]},
                 'CSbeEUhiEAyoEUsoEAnoE',
                 '          ^^^     ^^^'),
    'sharegpt': ({'conversations': [{'from': 'system', 'value': 'be'},
                                    {'from': 'human', 'value': 'hi'},
                                    {'from': 'gpt', 'value': 'yo'}]},
                 'CSbeEUhiEAyoE',
                 '          ^^^'),
    'alpaca': ({'instruction': 'add', 'input': '1 2', 'output': '3'},
               'CUadd\n\n1 2EA3E',
               '            ^^'),
    'completion': ({'prompt': 'add', 'completion': ' 3'}, 'CUaddEA 3E', '       ^^^'),
    'weight 0': (said(user(), assistant('no', weight=0), user(), assistant()),
                 'CUhiEAnoEUhiEAyoE',
                 '              ^^^')}


@pytest.mark.parametrize('form', FORMS)
def test_the_loss_of_each_form_is_over_its_answers(form, tmp_path):
    row, tokens, loss_mask = FORMS[form]
    [messages] = read(written(tmp_path / 'a.jsonl', row))
    assert marked(messages) == (tokens, loss_mask)


SYSTEM, HI, YO = {'role': 'system', 'content': 'be'}, user(), assistant()
PLAIN, WITH_SYSTEM = [HI, YO], [SYSTEM, HI, YO]
# rows as people write them → the conversation in them
AS_WRITTEN = [
    (said(HI, YO, key='Messages'), PLAIN),
    ({'Question': 'hi', ' ANSWER': 'yo', 'id': 7}, PLAIN),
    ([HI, YO], PLAIN), ({'messages': ['hi', 'yo']}, PLAIN),
    ({'messages': json.dumps([HI, YO])}, PLAIN),
    (said(user([{'type': 'text', 'text': 'h'}, {'type': 'text', 'text': 'i'}]), YO), PLAIN),
    (said({'role': 'Human', 'content': 'hi'}, {'role': 'bot', 'content': 'yo'}), PLAIN),
    (said({'role': 'developer', 'content': 'be'}, HI, {'role': 'model', 'content': 'yo'}),
     WITH_SYSTEM),
    (said(HI, {**YO, 'weight': 1, 'reasoning_content': 'why', 'tool_calls': []}), PLAIN),
    ({'system': 'be', 'conversations': [HI, YO]}, WITH_SYSTEM),
    ({'prompt': [SYSTEM, HI], 'completion': [YO]}, WITH_SYSTEM),
    ({'prompt': [HI], 'completion': 'yo'}, PLAIN),
    ({'instruction': 'so', 'input': 'x', 'output': 'no', 'history': [['hi', 'yo']]},
     [*PLAIN, user('so\n\nx'), assistant('no')]),
    ({'system_prompt': 'be', 'instruction': 'hi', 'input': '', 'output': 'yo'}, WITH_SYSTEM),
    ({'question': 'so', 'context': 'x', 'answer': 'no'}, [user('so\n\nx'), assistant('no')]),
    ({'prompt': [HI, YO, HI], 'completion': [YO]}, [HI, {**YO, 'weight': 0}, HI, YO])]


@pytest.mark.parametrize(('row', 'conversation'), AS_WRITTEN, ids=range(len(AS_WRITTEN)))
def test_conversations_are_read_as_others_write_them(row, conversation, tmp_path):
    assert read(written(tmp_path / 'a.jsonl', row)) == [conversation]


def test_a_parquet_column_of_messages_is_read(tmp_path):
    rows = [[{**HI, 'tool_calls': None}, {**YO, 'tool_calls': None}]]
    write_parquet(tmp_path / 'a.parquet', rows, field='messages', columns={'id': [1]})
    assert read(tmp_path / 'a.parquet') == [PLAIN]


def test_columns_can_be_named_in_any_case(tmp_path):
    path = tmp_path / 'a.csv'
    path.write_text('Q,prompt,context,a\nhi,x,y,yo\n')
    assert read(path, ('q', 'A')) == [PLAIN]


CALL = {'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}
IMAGE = {'type': 'image_url', 'image_url': {'url': 'x'}}
UNUSABLE = [  # a second row, and the word by which its author finds the problem
    (said({'content': 'hi'}, YO), 'message 1'),
    (said(HI, {'role': 'narrator', 'content': 'x'}), 'narrator'),
    (said(HI, YO, {'role': 'tool', 'content': 'x'}), 'message 3'),
    (said(HI, assistant(tool_calls=[CALL])), 'tool'),
    (said(HI, assistant('', reasoning_content='why')), 'thinking'),
    ({'prompt': 'hi', 'chosen': 'yo', 'rejected': 'no'}, 'preference'),
    ({'prompt': 'hi', 'completion': 'yo', 'label': False}, 'label'),
    (said(user(' \n\t'), YO), 'message 1'),
    (said(user([IMAGE]), YO), 'message 1'),
    (said(HI, assistant(weight=0.5)), 'message 2'),
    (said(HI, assistant(weight=0)), 'reply'),
    (said(), 'messages'), ({'messages': 'hi'}, 'messages'), ({'messages': None}, 'messages'),
    ({'messages': 5}, 'messages'), ({'Conversation': 'hi'}, 'Conversation'),
    ({'messages': {'role': ['user', 'assistant'], 'content': ['hi']}}, 'role'),
    ({'messages': {}}, '{}'), ({'messages': HI}, 'list'), ({'messages': ['hi']}, 'reply'),
    (said({'role': 'user'}, YO), 'message 1: no content'), (said(HI, 'yo'), 'message 2'),
    (said(user(['h', 'i']), YO), 'message 1'),
    (said(SYSTEM, SYSTEM, HI, YO), 'system'),
    (said(YO, HI, YO), 'assistant'),
    ({'instruction': 'a', 'output': 7}, 'output'),
    ({'instruction': 'a', 'input': 'b'}, '--prompt'),
    ({'text': '### Human: hi'}, '--completion')]


@pytest.mark.parametrize(('row', 'word'), UNUSABLE, ids=range(len(UNUSABLE)))
def test_an_unusable_row_is_an_error_with_its_line(row, word, tmp_path):
    path = written(tmp_path / 'a.jsonl', said(HI, YO), row)
    with pytest.raises(UserError) as refused:
        read(path)
    message = str(refused.value)
    assert f'{path}, line 2: ' in message
    assert word in message
    assert '\n' not in message


def test_a_few_unusable_rows_are_left_out(tmp_path, capsys):
    rows = [said(HI, YO)] * 996 + [UNUSABLE[2][0]] * 4
    assert len(read(written(tmp_path / 'a.jsonl', *rows), strict=False)) == 996
    line, = capsys.readouterr().out.splitlines()
    for word in ('4 of 1,000', 'line 997', 'line 999'):
        assert word in line
