"""A conversation at the terminal."""

import builtins
import shutil
import sys
from itertools import product

import pytest
from chat_model import ANSWERS
from sample_data import CHAT, ask
from test_docs import after_readme, follow  # noqa: F401  (a fixture)

import plaingpt
import sample
from plaingpt.data.chat_tokenizer import ChatTokenizer
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
        return capsys.readouterr().out.partition('Ctrl-C stops an answer\n')[2].splitlines()
    return talk


@pytest.fixture(scope='module')
def generator(chat_model):
    return plaingpt.load(chat_model, checkpoint='latest')


def answered(generator, *contents, system=False):
    """What is answered to a conversation of a user and the assistant, in turns."""
    return generator.answer([SYSTEM] * system + ask(*contents, '')[:-1], temperature=0,
                            max_new_tokens=70)


def test_an_answer_ends_with_the_turn(generator):
    for question, answer in ANSWERS.items():
        assert answered(generator, question) == answer
    assert CHAT.ends == set(range(256, 262))  # the base's end of text, and the five


def test_what_was_said_and_the_system_go_before_the_next_answer(talk, chat_model, generator):
    first, second, _ = talk(chat_model, 'hi', 'hi', options=[GREEDY])
    assert (first, second) == (ANSWERS['hi'], answered(generator, 'hi', first, 'hi'))
    told = talk(chat_model, 'hi', 'x' * 200, 'hi', '/reset', 'hi', '/quit', 'hi',
                options=[GREEDY, '--system=Be kind.'])
    assert 'at most 96' in told.pop(1)  # it is forgotten
    assert told == [first := answered(generator, 'hi', system=True),
                    answered(generator, 'hi', first, 'hi', system=True), first]


def test_a_full_context_loses_the_oldest_turns_and_keeps_the_system(generator):
    said = [SYSTEM, *ask(*['hi', 'Hello there.'] * 9, 'hi', '')[:-1]]
    ids, sampling = generator.prepare_answer(said, Sampling(max_new_tokens=70))
    assert 96 // 4 < sampling.max_new_tokens <= 97 - len(ids)
    assert CHAT.decode(ids).startswith('<|conversation|><|system|>Be kind.<|end|><|user|>hi<|end|>')


def test_a_long_history_is_tokenized_a_few_times_only(generator, monkeypatch):
    lengths = []

    def encode_prompt(messages):
        ids = ChatTokenizer.encode_prompt(generator.tokenizer, messages)
        lengths.append(len(ids))
        return ids
    monkeypatch.setattr(generator.tokenizer, 'encode_prompt', encode_prompt)
    said = ask(*['hi', 'Hello there.'] * 1000, 'hi', '')[:-1]
    ids, _ = generator.prepare_answer(said, Sampling(max_new_tokens=70))
    turn = len(CHAT.encode_prompt(said[:3])) - len(CHAT.encode_prompt(said[:1]))
    assert 96 * 3 // 4 - turn < len(ids) <= 96 * 3 // 4  # one more turn has no room
    assert len(lengths) < 20


def test_a_history_is_read_as_openais_clients_send_it(generator):
    def ids(*messages):
        return generator.prepare_answer([*messages], Sampling(max_new_tokens=1))[0]

    hi, answer = ask('hi', 'Hello there.')
    assert ids(SYSTEM | {'role': 'developer'}, hi) == ids(SYSTEM, hi)
    assert ids(hi | {'name': 'Bob'}) == ids(hi)
    silent = ids(hi, answer | {'content': ''}, hi)
    assert len(silent) == len(ids(hi, answer, hi)) - len(answer['content'])
    for nothing in ' \n', None, [], [{'type': 'text', 'text': ''}]:
        assert ids({'role': 'system', 'content': nothing}, hi) == ids(hi)
        assert ids(hi, answer | {'content': nothing}, hi) == silent
        with pytest.raises(UserError, match='message 1'):
            ids(hi | {'content': nothing})
    with pytest.raises(UserError, match='no messages'):
        ids(SYSTEM | {'content': ''})
    with pytest.raises(UserError, match='message 2'):
        ids(hi, answer | {'content': None, 'tool_calls': [{}]}, hi)


def test_messages_that_cannot_be_answered_are_refused(generator, trained):
    for messages, words in (
            ([], 'no messages'), (ask('hi', 'a'), 'must be of the user'),
            ([{'role': 'robot', 'content': 'a'}], 'expected one of system, user, assistant'),
            (ask('x' * 200, '')[:1], 'at most 96')):
        with pytest.raises(UserError, match=words):
            generator.answer(messages)
    with pytest.raises(UserError, match='was not tuned on conversations'):
        plaingpt.load(trained).answer(ask('hi', '')[:1])


def test_escape_codes_that_a_model_writes_do_not_reach_the_terminal(talk, chat_model, monkeypatch):
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    answer, _ = talk(chat_model, 'html', options=[GREEDY])
    assert answer.endswith('b</b>\\x1b[31m')


def test_ctrl_c_stops_the_answer_and_not_the_chat(talk, chat_model, monkeypatch):
    def interrupted(self, prompts, numbers, sampling, stop, show):
        show('half')
        raise KeyboardInterrupt
    monkeypatch.setattr(TextGenerator, 'write', interrupted)
    assert talk(chat_model, 'def', KeyboardInterrupt, 'x') == [
        'half …', '', '/quit or Ctrl-D leaves', 'half …', '']


def test_a_chat_goes_on_after_an_empty_answer(talk, chat_model, generator):
    told = talk(chat_model, 'hi', 'long', options=[GREEDY, '--stop=Hello', '--system= '])
    assert told == ['', answered(generator, 'hi', '', 'long').partition('Hello')[0], '']


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
    assert sum(right) >= 8, right
