"""Files of conversations → messages → tokens and their loss mask, and what is refused."""

import json

import pytest
from corpus_files import write_parquet
from sample_data import CHAT

from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS
from plaingpt.data.conversations import ConversationReader
from plaingpt.data.documents import Files, ReadOptions
from plaingpt.system.errors import UserError

SPECIAL = dict(zip(range(257, 262), SPECIAL_TOKENS, strict=True))


def read(path, columns=(), strict=True):
    source = Files([path], str(path), ConversationReader(columns), ReadOptions(strict=strict))
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


SYSTEM, HI, YO = {'role': 'system', 'content': 'be'}, user(), assistant()


def test_the_loss_is_over_the_replies_that_count():
    ids, loss_mask = CHAT.encode_conversation([SYSTEM, HI, assistant('no', weight=0), HI, YO])
    # The special tokens by their second letters: C opens a conversation, S, U and A a message.
    names = [SPECIAL[i][2].upper() if i in SPECIAL else chr(i) for i in ids.tolist()]
    assert ''.join(names) == 'CSbeEUhiEAnoEUhiEAyoE'
    assert ''.join(' ^'[in_loss] for in_loss in loss_mask.tolist()) == '                  ^^^'


PLAIN, WITH_SYSTEM = [HI, YO], [SYSTEM, HI, YO]
# rows as people write them → the conversation in them
AS_WRITTEN = [
    (said(HI, YO, key='Messages'), PLAIN),
    ({'conversations': [{'from': 'human', 'value': 'hi'}, {'from': 'gpt', 'value': 'yo'}]}, PLAIN),
    *(({prompt: 'hi', ' ' + completion.upper(): 'yo', 'id': 7}, PLAIN) for prompt, completion in (
        ('prompt', 'completion'), ('question', 'answer'), ('query', 'response'),
        ('input', 'output'), ('instruction', 'output'))),
    ([HI, YO], PLAIN), ({'messages': json.dumps([HI, YO])}, PLAIN),
    (said(user([{'type': 'text', 'text': 'h'}, {'type': 'text', 'text': 'i'}]), YO), PLAIN),
    (said({'role': 'Human', 'content': 'hi'}, {'role': 'bot', 'content': 'yo'}), PLAIN),
    (said({'role': 'developer', 'content': 'be'}, HI, {'role': 'model', 'content': 'yo'}),
     WITH_SYSTEM),
    (said({'role': 'system', 'content': ''}, HI, {**YO, 'weight': 1, 'tool_calls': []}), PLAIN),
    ({'system': 'be', 'conversations': [HI, YO]}, WITH_SYSTEM),
    ({'prompt': [SYSTEM, HI], 'completion': [YO]}, WITH_SYSTEM),
    ({'instruction': 'so', 'input': 'x', 'output': 'no', 'history': [['hi', 'yo']]},
     [*PLAIN, user('so\n\nx'), assistant('no')]),
    ({'system': 'be', 'instruction': 'hi', 'input': '', 'output': 'yo', 'history': '[]'},
     WITH_SYSTEM),
    *(({'prompt': [HI, YO, HI], 'completion': reply}, [HI, {**YO, 'weight': 0}, HI, YO])
      for reply in ('yo', [YO], [HI, YO, HI, YO]))]


@pytest.mark.parametrize(('row', 'conversation'), AS_WRITTEN, ids=range(len(AS_WRITTEN)))
def test_conversations_are_read_as_others_write_them(row, conversation, tmp_path):
    assert read(written(tmp_path / 'a.jsonl', row)) == [conversation]


def test_a_parquet_column_of_messages_is_read(tmp_path):
    rows = [[{**HI, 'tool_calls': None}, {**YO, 'tool_calls': None}]]
    write_parquet(tmp_path / 'a.parquet', rows, field='messages', columns={'id': [1]})
    assert read(tmp_path / 'a.parquet') == [PLAIN]


@pytest.mark.parametrize(('row', 'columns'), [
    ({'Q': 'hi', 'prompt': 'x', 'context': 'y', 'a': 'yo'}, ('q', 'A')),
    ({'prompt': 'hi', 'chosen': [HI, YO], 'rejected': [HI, assistant('no')]},
     ('prompt', 'chosen'))])
def test_columns_can_be_named_in_any_case(row, columns, tmp_path):
    assert read(written(tmp_path / 'a.jsonl', row), columns) == [PLAIN]


CALL = {'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}
IMAGE = {'type': 'image_url', 'image_url': {'url': 'x'}}
COLUMNS = '--prompt and --completion'
UNUSABLE = [  # a second row, and the word by which its author finds the problem
    *(({names: 'a', 'more': 'b'}, COLUMNS) for names in ('prompt', 'text', 'dialogue', 'output')),
    ({'prompt': 'hi', 'chosen': 'yo', 'rejected': 'no'}, COLUMNS),
    ({'instruction': 'a', 'response': 'b'}, COLUMNS), ({'user': 'a', 'assistant': 'b'}, COLUMNS),
    (said({'content': 'hi'}, YO), 'message 1'), (said({'role': 'user'}, YO), 'message 1'),
    (said(HI, {'role': 'narrator', 'content': 'x'}), 'narrator'),
    (said(HI, YO, {'role': 'tool', 'content': 'x'}), 'message 3'),
    (said(HI, assistant(tool_calls=[CALL])), 'tool'),
    (said(HI, assistant('', reasoning_content='why')), 'message 2'),
    (said(user(' \n\t'), YO), 'message 1'), (said(user([IMAGE]), YO), 'message 1'),
    (said(HI, 'yo'), 'message 2'), (said(HI, assistant(weight=0.5)), 'message 2'),
    (said(HI, assistant(weight=0)), 'reply'), (said(HI), 'reply'), (said(), 'messages'),
    *(({'messages': value}, 'list') for value in ('hi', None, 5, {}, HI)),
    (said(SYSTEM, SYSTEM, HI, YO), 'system'), (said(YO, HI, YO), 'assistant'), ('hi', '"hi"'),
    ({'instruction': 'a', 'output': 7}, 'output'),
    *(({'instruction': 'a', 'output': 'b', 'history': history}, 'history')
      for history in (['hi', 'yo'], [['hi']], [['hi', None]]))]


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
    rows = [said(HI, YO)] * 996 + [said(HI, {'role': 'tool', 'content': 'x'})] * 4
    assert len(read(written(tmp_path / 'a.jsonl', *rows), strict=False)) == 996
    line, = capsys.readouterr().out.splitlines()
    for word in ('4 of 1,000', 'line 997', 'line 999'):
        assert word in line
