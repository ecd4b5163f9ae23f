"""A conversation at the terminal."""

import builtins
import json
import os
import pty
import shutil
import sys
from contextlib import suppress
from itertools import product

import pytest
from chat_model import ANSWERS
from helpers import CHAT, ask, exit_code, fails, fork
from test_docs import after_readme, follow  # noqa: F401  (a fixture)

import plaingpt
import sample
from plaingpt.data.conversations import Conversations
from plaingpt.data.tokenizers import ends_of
from plaingpt.inference.text_generator import Sampling, TextGenerator
from plaingpt.system.errors import UserError

SYSTEM = {'role': 'system', 'content': 'Be kind.'}
GREEDY = '--temperature=0'


@pytest.fixture
def talk(capsys, monkeypatch):
    """Type lines to sample.py → what it printed after its first lines. A KeyboardInterrupt among
    them is Ctrl-C."""
    def talk(out_dir, *lines, options=()):
        typed = iter(lines)

        def answer(_):
            if (line := next(typed, EOFError)) in (EOFError, KeyboardInterrupt):
                raise line
            return line
        monkeypatch.setattr(builtins, 'input', answer)
        sample.main([f'--out_dir={out_dir}', '--checkpoint=latest', '--device=cpu', '--chat',
                     *options])
        return capsys.readouterr().out.partition('/help lists the commands\n')[2]
    return talk


@pytest.fixture
def chat(talk, chat_model):
    """Type lines to a model that was tuned on conversations → the lines that it printed."""
    def chat(*lines, options=(GREEDY,)):
        return talk(chat_model, *lines, options=['--max_new_tokens=70', *options]).splitlines()
    return chat


@pytest.fixture
def base_chat(talk, trained):
    """Type lines to a model that was not → what it printed, answers of 20 characters."""
    def chat(*lines, options=()):
        return talk(trained, *lines, options=['--max_new_tokens=20', *options])
    return chat


@pytest.fixture(scope='module')
def generator(chat_model):
    return plaingpt.load(chat_model, checkpoint='latest')


def saved(path):
    return json.loads(path.read_text())['messages']


def test_an_answer_ends_with_the_turn(chat, generator):
    for question, answer in ANSWERS.items():
        assert generator.answer(ask(question, '')[:1], temperature=0) == answer
    assert chat('hi')[0] == ANSWERS['hi']


def test_any_special_token_ends_an_answer():
    assert ends_of(CHAT) == set(range(256, 262))  # the base's end of text, and the five


def test_what_was_said_and_the_system_go_before_the_next_answer(chat, generator, tmp_path):
    _, second, *_ = chat('hi', '/system Be kind.', 'hi', f'/save {tmp_path}/said.jsonl')[0::2]
    messages = saved(tmp_path / 'said.jsonl')
    piece, = Conversations([tmp_path / 'said.jsonl'], 'said').pieces()  # as prepare.py reads them
    assert json.loads(piece.text) == messages
    assert messages == [SYSTEM, *ask('hi', ANSWERS['hi'], 'hi', second)]
    assert second == generator.answer(messages[:-1], temperature=0, max_new_tokens=70)
    assert second != chat('hi', 'hi')[1]  # without a system


def test_reset_forgets_the_messages_and_keeps_what_the_system_says(chat, tmp_path):
    out = chat('hi', '/reset', 'hi', f'/save {tmp_path}/said',
               options=[GREEDY, '--system=Be kind.'])
    assert out[0] == out[2]
    assert saved(tmp_path / 'said') == [SYSTEM, *ask('hi', out[0])]


def test_a_message_that_is_too_long_is_refused_and_the_chat_goes_on(chat, tmp_path):
    out = chat('x' * 200, 'hi', f'/save {tmp_path}/said')
    assert 'the message has 204 tokens' in out[0] and 'at most 96' in out[0]
    assert saved(tmp_path / 'said') == ask('hi', ANSWERS['hi'])


def test_retry_answers_the_last_message_again(chat, tmp_path):
    out = chat('/retry', 'hi', '/retry', '/retry', f'/save {tmp_path}/said',
               options=['--temperature=3', '--seed=1'])
    assert '/retry cannot be done' in out[0]
    assert [m['role'] for m in saved(tmp_path / 'said')] == ['user', 'assistant']
    assert len(set(out[1:-1])) > 2


def test_a_full_context_loses_the_oldest_turns_and_says_so(chat, generator, tmp_path):
    out = chat(*['hi'] * 9, f'/save {tmp_path}/said', options=[GREEDY, '--system=Be kind.'])
    assert sum('context is full' in line for line in out) > 1
    messages = saved(tmp_path / 'said')
    ids, sampling, dropped = generator.prepare_answer(messages[:-1], Sampling(max_new_tokens=70))
    assert dropped > 0 and len(ids) + sampling.max_new_tokens <= 97
    assert sampling.max_new_tokens > 96 // 4
    assert CHAT.decode(ids).startswith('<|conversation|><|system|>Be kind.<|end|><|user|>hi<|end|>')
    assert messages[-1]['content'] == generator.answer(messages[:-1], temperature=0,
                                                       max_new_tokens=70)


def test_what_cannot_be_done_is_told_and_the_chat_goes_on(chat, tmp_path):
    out = chat('/nonsense', '/save /nowhere/a', f'/system {"x" * 200}', 'hi', '/system', 'hi',
               f'/save {tmp_path}/said')
    for words, line in zip(('/help lists', 'No such file', 'told xxx', 'write less', 'nothing',
                            ANSWERS['hi'], 'saved to'), out, strict=False):
        assert words in line
    assert saved(tmp_path / 'said') == ask('hi', ANSWERS['hi'])


def test_messages_that_cannot_be_answered_are_refused(generator, trained):
    for messages, words in (
            ([], 'no messages'), (ask('hi', 'a'), 'must be of the user'),
            ([{'role': 'robot', 'content': 'a'}], 'expected one of system, user, assistant'),
            (ask('x' * 200, '')[:1], 'at most 96')):
        with pytest.raises(UserError, match=words):
            generator.answer(messages)
    with pytest.raises(UserError, match='was not tuned on conversations'):
        plaingpt.load(trained).answer(ask('hi', '')[:1])


def test_an_answer_that_was_cut_says_so(chat):
    out = chat('long', options=[GREEDY, '--max_new_tokens=5'])
    assert out[:2] == ['la la', '(cut after 5 tokens)']


def test_escape_codes_that_a_model_writes_do_not_reach_the_terminal(chat_model, tmp_path):
    terminal, end = pty.openpty()

    def use_the_terminal():
        for fd in (0, 1, 2):
            os.dup2(end, fd)
        sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, closefd=False)
                                             for fd, mode in enumerate(('r', 'w', 'w')))

    pid = fork(sample.main, f'--out_dir={chat_model}', '--checkpoint=latest', '--device=cpu',
               '--chat', GREEDY, log=tmp_path / 'log', before=use_the_terminal)
    os.close(end)
    os.write(terminal, b'html\n/quit\n')
    shown = b''
    with suppress(OSError):  # the other end is closed
        while True:
            shown += os.read(terminal, 4096)
    assert exit_code(pid) == 0
    assert b'b</b>\\x1b[31m' in shown and b'\x1b[31m' not in shown


# -----------------------------------------------------------------------------
# with a model that was not tuned on conversations


def test_a_chat_with_a_base_model_says_so_and_goes_on_from_all_that_was_said(
        base_chat, tmp_path, capsys, monkeypatch, trained):
    out = base_chat('naïve', KeyboardInterrupt, 'def main', '(self)', '/retry',
                    f'/save {tmp_path}/said', '/quit', 'more')
    lines = out.splitlines()
    assert 'was not tuned on conversations' in lines[0] and "character 'ï'" in lines[1]
    assert '/quit or Ctrl-D leaves' in lines[3]
    text = (tmp_path / 'said').read_text()
    assert text.startswith('def main') and text[28:34] == '(self)' and len(text) == 55
    assert text[:28].removeprefix('def main') in out and text[34:-1] in out
    assert out.endswith('said\n')  # and no answer after /quit
    assert 'was not tuned on conversations' in fails(
        capsys, monkeypatch, sample.main, f'--out_dir={trained}', '--device=cpu', '--chat',
        '--system=Be kind.')


def test_ctrl_c_stops_the_answer_and_not_the_chat(base_chat, monkeypatch, tmp_path):
    def interrupted(self, prompts, numbers, sampling, stop, show):
        show('half')
        raise KeyboardInterrupt
    monkeypatch.setattr(TextGenerator, 'write', interrupted)
    out = base_chat('def', f'/save {tmp_path}/said')
    assert 'half …' in out and (tmp_path / 'said').read_text() == 'defhalf\n'


@pytest.mark.slow
def test_the_page_on_chats_leads_to_a_model_that_adds(
        after_readme, tmp_path, monkeypatch):  # noqa: F811
    folder = tmp_path / 'plaingpt'
    shutil.copytree(after_readme, folder, symlinks=True)
    assert not follow('docs/chat.md', folder, monkeypatch, slow=True)
    model = plaingpt.load(folder / 'out-chat')
    right = [model.answer(ask(f'How much is {a} plus {b}?', '')[:1], temperature=0)
             == f'It is {a + b}.' for a, b in product((2, 5, 7), (3, 4, 8))]
    assert sum(right) >= 8, right
