"""A conversation at the terminal."""

import builtins
import io
import shutil
import sys
from itertools import product

import pytest
from chat_model import ANSWERS
from processes import fails
from sample_data import CHAT, ask
from test_docs import after_readme, follow  # noqa: F401  (a fixture)

import plaingpt
import sample
from plaingpt.inference.text_generator import Sampling, TextGenerator
from plaingpt.system.errors import UserError

SYSTEM = {'role': 'system', 'content': 'Be kind.'}
GREEDY = '--temperature=0'


@pytest.fixture
def talk(capsys, monkeypatch):
    """Type lines to sample.py → the lines that it printed after its first ones. A KeyboardInterrupt
    among them is Ctrl-C."""
    def talk(out_dir, *lines, options=()):
        typed = iter(lines)

        def answer(_):
            if (line := next(typed, EOFError)) in (EOFError, KeyboardInterrupt):
                raise line
            return line
        monkeypatch.setattr(builtins, 'input', answer)
        sample.main([f'--out_dir={out_dir}', '--checkpoint=latest', '--device=cpu', '--chat',
                     '--max_new_tokens=70', *options])
        return capsys.readouterr().out.partition('Ctrl-C stops the answer\n')[2].splitlines()
    return talk


@pytest.fixture(scope='module')
def generator(chat_model):
    return plaingpt.load(chat_model, checkpoint='latest')


def answered(generator, *contents, system=False):
    """The answer to a conversation whose turns alternate between the user and the assistant."""
    return generator.answer([SYSTEM] * system + ask(*contents, '')[:-1], temperature=0,
                            max_new_tokens=70)


def prompt_ids(generator, *messages, max_new_tokens=70):
    return generator.prepare_answer([*messages], Sampling(max_new_tokens))[0]


def test_an_answer_ends_with_the_turn(generator):
    for question, answer in ANSWERS.items():
        assert answered(generator, question) == answer


def test_an_answer_follows_from_the_turns_before_it(talk, chat_model, generator):
    first, second, _ = talk(chat_model, 'hi', 'hi', options=[GREEDY])
    assert first == ANSWERS['hi']
    assert second == answered(generator, 'hi', first, 'hi')


def test_a_chat_is_reset_to_its_system_message(talk, chat_model, generator):
    printed = talk(chat_model, 'hi', 'hi', '/reset', 'hi', '/quit', 'hi',
                   options=[GREEDY, '--system=Be kind.'])
    first = answered(generator, 'hi', system=True)
    assert printed == [first, answered(generator, 'hi', first, 'hi', system=True), first]


def test_a_question_that_is_too_long_is_forgotten(talk, chat_model, generator):
    first, problem, second, _ = talk(chat_model, 'hi', 'x' * 200, 'hi', options=[GREEDY])
    assert '96' in problem
    assert second == answered(generator, 'hi', first, 'hi')


def test_a_full_context_loses_the_oldest_turns_but_not_the_system_message(generator):
    messages = [SYSTEM, *ask(*['hi', 'Hello there.'] * 9, 'hi', '')[:-1]]
    ids, sampling = generator.prepare_answer(messages, Sampling(max_new_tokens=70))
    assert len(ids) + sampling.max_new_tokens <= 97
    assert sampling.max_new_tokens > 96 // 4
    assert CHAT.decode(ids).startswith('<|conversation|><|system|>Be kind.<|end|><|user|>hi<|end|>')


def test_messages_are_read_as_clients_of_openai_send_them(generator):
    hi, answer = ask('hi', 'Hello there.')
    expected = prompt_ids(generator, hi)
    assert prompt_ids(generator, hi | {'name': 'Bob'}) == expected
    assert prompt_ids(generator, SYSTEM | {'role': 'developer'}, hi) == prompt_ids(
        generator, SYSTEM, hi)
    silent = prompt_ids(generator, hi, answer | {'content': ''}, hi)
    for nothing in ' \n', None, [{'type': 'text', 'text': ''}]:
        assert prompt_ids(generator, {'role': 'system', 'content': nothing}, hi) == expected
        assert prompt_ids(generator, hi, answer | {'content': nothing}, hi) == silent


def test_messages_that_cannot_be_answered_are_refused(generator):
    hi, answer = ask('hi', 'Hello there.')
    for messages, words in (
            ([], 'no messages'), ([SYSTEM | {'content': ''}], 'no messages'),
            ([hi, answer], 'user'), ([hi | {'content': None}], 'message 1'),
            ([hi, answer | {'content': None, 'tool_calls': [{}]}, hi], 'message 2'),
            ([{'role': 'robot', 'content': 'a'}], 'assistant'), (ask('x' * 200, '')[:1], '96')):
        with pytest.raises(UserError, match=words):
            generator.answer(messages)


def test_escape_codes_that_a_model_writes_do_not_reach_the_terminal(talk, chat_model, monkeypatch):
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    answer, _ = talk(chat_model, 'html', options=[GREEDY])
    assert answer.endswith('b</b>\\x1b[31m')


def test_messages_that_are_not_utf8_are_refused(chat_model, capsys, monkeypatch):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'gr\xf6\xdfer\n'), 'utf-8'))
    assert 'UTF-8' in fails(capsys, monkeypatch, sample.main, chat_model, '--chat')


def test_ctrl_c_stops_the_answer_but_not_the_chat(talk, chat_model, monkeypatch):
    def interrupted(self, prompts, numbers, sampling, stop, show):
        show('half')
        raise KeyboardInterrupt
    monkeypatch.setattr(TextGenerator, 'generate_texts', interrupted)
    printed = talk(chat_model, 'def', KeyboardInterrupt, 'x')
    assert [line for line in printed if 'half' in line] == 2 * ['half …']


@pytest.mark.slow
def test_the_page_on_chats_leads_to_a_model_that_adds(
        after_readme, trained, tmp_path):  # noqa: F811
    folder = tmp_path / 'plaingpt'
    shutil.copytree(after_readme, folder, symlinks=True)
    follow('docs/chat.md', folder, trained)
    # out-chat was the README's before, and is the one of other models after
    model = plaingpt.load(folder / 'out-chat/old-002')
    right = [model.answer(ask(f'How much is {a} plus {b}?', '')[:1], temperature=0)
             == f'It is {a + b}.' for a, b in product((2, 5, 7), (3, 4, 8))]
    assert sum(right) >= 8
