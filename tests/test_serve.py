"""OpenAI's own client talks to a real server process."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from chat_model import ANSWERS
from helpers import exit_code, fork, wait_until

import plaingpt
import sample
import serve
from plaingpt.inference.text_generator import TextGenerator

openai = pytest.importorskip('openai', reason='needs openai: pip install openai')
pytest.importorskip('uvicorn', reason='needs uvicorn: pip install uvicorn')
ENDLESS = 10**9  # new tokens of a text: none is written to its end


@contextmanager
def serving(folder, out_dir, *options, key='none', **env):
    """Yield a client of a server, its process id and its log."""
    log = folder / 'server.log'
    log.touch()
    pid = fork(serve.main, out_dir, '--checkpoint=latest', '--port=0', '--device=cpu', *options,
               log=log, **env)
    try:
        wait_until(lambda: 'Uvicorn running' in log.read_text())
        port = re.search(r'running on http://\S*:(\d+)', log.read_text())[1]
        with openai.OpenAI(base_url=f'http://127.0.0.1:{port}/v1', api_key=key,
                           max_retries=0) as client:
            yield client, pid, log
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            exit_code(pid)


@pytest.fixture(scope='module')
def client(trained, tmp_path_factory):
    """Of a model of characters, which knows no end of text."""
    with serving(tmp_path_factory.mktemp('server'), trained) as (client, _, _):
        yield client


@pytest.fixture(scope='module')
def chat_client(chat_model, tmp_path_factory):
    with serving(tmp_path_factory.mktemp('server'), chat_model) as (client, _, _):
        yield client


def complete(client, prompt='def ', **options):
    return client.completions.create(model='any', prompt=prompt, **options)


def asked(*contents):
    """The start of a conversation of a user and the assistant, in turns."""
    return {'model': 'any', 'messages': [
        {'role': ('user', 'assistant')[i % 2], 'content': text} for i, text in enumerate(contents)]}


def test_a_completion_is_that_of_sample_py(client, trained, capsys):
    found = complete(client, temperature=0.7, top_p=0.9, seed=5, max_tokens=40, user='me',
                     extra_body={'top_k': 20})
    sample.main([str(trained), '--checkpoint=latest', '--start=def ', '--num_samples=1',
                 '--temperature=0.7', '--top_p=0.9', '--top_k=20', '--seed=5', '--device=cpu',
                 '--max_new_tokens=40'])
    [choice] = found.choices
    assert capsys.readouterr().out.endswith(f'---------------\ndef {choice.text}\n')
    assert choice.finish_reason == 'length' and found.object == 'text_completion'
    assert found.usage.to_dict() == {'prompt_tokens': 4, 'completion_tokens': 40,
                                     'total_tokens': 44}
    assert len({complete(client, max_tokens=40).choices[0].text for _ in range(3)}) == 3


def test_a_stream_is_the_text_in_pieces_and_ends_before_a_stop_string(client):
    options = dict(temperature=0, max_tokens=30)
    text = complete(client, **options).choices[0].text
    *chunks, last = complete(client, **options, stream=True, stream_options={'include_usage': True})
    assert ''.join(chunk.choices[0].text for chunk in chunks) == text and len(chunks) > 30
    assert last.choices[0].finish_reason == 'length' and last.usage.completion_tokens == 30
    for stream in False, True:
        found = complete(client, **options, stop=['\x00\x01', text[10:13]], stream=stream)
        choices = [part.choices[0] for part in (found if stream else [found])]
        assert ''.join(choice.text for choice in choices) == text[:text.index(text[10:13])]
        assert choices[-1].finish_reason == 'stop'


def test_a_chat_is_answered_to_the_end_of_the_turn_whole_and_in_pieces(chat_client):
    create, stream = chat_client.chat.completions.create, chat_client.chat.completions.stream
    for question, answer in ANSWERS.items():
        found = create(**asked(question), temperature=0)
        with stream(**asked(question), temperature=0) as pieces:
            streamed = pieces.get_final_completion()
        for choice in found.choices[0], streamed.choices[0]:
            assert (choice.message.role, choice.message.content) == ('assistant', answer)
            assert choice.finish_reason == 'stop'
        assert found.usage.prompt_tokens == len(question.encode()) + 4  # and four special tokens
        assert found.usage == streamed.usage
    again = asked('hi', 'x', [{'type': 'text', 'text': 'hi'}])
    again['messages'][1] = found.choices[0].message  # as it came
    assert create(**again, max_completion_tokens=3).usage.completion_tokens <= 3


@pytest.mark.parametrize(('wrong', 'words'), [
    ({'prompt': 7}, 'prompt must be'), ({'prompt': ['a']}, 'prompt must be'),
    ({'prompt': 'é'}, 'not among'), ({'max_tokens': 0}, 'max_new_tokens'),
    ({'temperature': 'hot'}, 'temperature'), ({'temperature': -1}, 'temperature'),
    ({'stop': ['']}, 'stop'), ({'n': 2}, "'n'"), ({'logprobs': 3}, 'logprobs'),
    ({'temperatur': 0}, 'did you mean temperature')])
def test_a_wrong_request_is_an_error_of_openai(client, wrong, words):
    with pytest.raises(openai.BadRequestError, match=words) as error:
        complete(client, extra_body=wrong)
    assert error.value.type == 'invalid_request_error'


def test_what_is_no_request_is_refused(client, chat_client):
    for body in b'', b'{', b'[]', b'\xff{}', b'[' * 100_000:
        with pytest.raises(openai.BadRequestError, match='JSON object'):
            client.post('/completions', content=body, cast_to=object)
    for model, conversation, words in ((client, asked('Hi'), 'not tuned'),
                                       (chat_client, asked('x' * 96), 'write less'),
                                       (chat_client, asked(), 'no messages')):
        with pytest.raises(openai.BadRequestError, match=words):
            model.chat.completions.create(**conversation)


def test_a_page_that_reaches_the_server_under_another_name_is_refused(client):
    for host in 'LocalHost', '127.0.0.1:80', '[::1]:8000':
        complete(client, max_tokens=1, extra_headers={'Host': host})
    for host in 'evil.example', 'localhost.evil.example', 'evil.example:80':
        with pytest.raises(openai.BadRequestError):
            complete(client, max_tokens=1, extra_headers={'Host': host})


def test_requests_wait_for_each_other_and_a_full_queue_is_refused(trained, tmp_path, monkeypatch):
    def told(*arguments):
        print('text begins')
        text = write(*arguments)
        print('text ends')
        return text

    write = TextGenerator.write
    expected = plaingpt.load(trained, 'latest').generate('def ', temperature=0, max_new_tokens=9)
    monkeypatch.setattr(serve, 'WAITING', 1)
    monkeypatch.setattr(TextGenerator, 'write', told)
    with serving(tmp_path, trained) as (client, _, log), ThreadPoolExecutor() as pool:
        first = complete(client, stream=True, max_tokens=ENDLESS)
        second = pool.submit(complete, client, temperature=0, max_tokens=9)
        wait_until(lambda: log.read_text().count('"POST') == 2)
        with pytest.raises(openai.RateLimitError, match='try again later'):
            complete(client)
        assert log.read_text().count('text begins') == 1
        first.close()  # a client that leaves ends its text
        assert second.result().choices[0].text == expected
        with pytest.raises(openai.APITimeoutError):  # also where it waits for all of it
            complete(client, max_tokens=ENDLESS, timeout=1)
        wait_until(lambda: log.read_text().count('text ends') == 3)


def test_other_machines_need_the_key(trained, tmp_path):
    with serving(tmp_path, trained, '--host=0.0.0.0', key='sesame', PLAINGPT_API_KEY='sesame') as (
            client, _, log):
        complete(client, max_tokens=1, extra_headers={'Host': 'my.example'})
        for wrong in 'Bearer no', 'none':
            with pytest.raises(openai.AuthenticationError, match='API key'):
                complete(client, extra_headers={'Authorization': wrong})
        assert 'sesame' not in log.read_text()
