"""OpenAI's own client talks to a real server process."""

import http.client
import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from chat_model import ANSWERS, save
from processes import exit_code, fails, fork, wait_until

import plaingpt
import sample
import serve
from model import GPT, GPTConfig
from plaingpt.data.tokenizers import BPETokenizer
from plaingpt.inference.text_generator import TextGenerator

openai = pytest.importorskip('openai', reason='needs openai: pip install openai')
pytest.importorskip('uvicorn', reason='needs uvicorn: pip install uvicorn')
ENDLESS = 10**9  # new tokens of a text: none is written to its end
UNFINISHED = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{'


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
    assert 'Traceback' not in log.read_text()


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


def request(client, method, path='/v1/chat/completions', body=None, **headers):
    """What a browser can send → the response. Of headers, _ is written for -."""
    headers = {name.replace('_', '-'): value for name, value in headers.items()}
    connection = http.client.HTTPConnection('127.0.0.1', client.base_url.port)
    connection.request(method, path, body, headers)
    return connection.getresponse()


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
    *chunks, last = complete(client, **options, stream=True)
    assert ''.join(chunk.choices[0].text for chunk in chunks) == text and len(chunks) > 30
    assert last.choices[0].finish_reason == 'length' and not last.usage
    *chunks, last = complete(client, **options, stream=True, stream_options={'include_usage': True})
    assert not last.choices and last.usage.completion_tokens == 30
    assert chunks[-1].choices[0].finish_reason and not any(chunk.usage for chunk in chunks)
    for stream in False, True:
        found = complete(client, **options, stop=['\x00\x01', text[10:13]], stream=stream)
        choices = [part.choices[0] for part in (found if stream else [found])]
        assert ''.join(choice.text for choice in choices) == text[:text.index(text[10:13])]
        assert choices[-1].finish_reason == 'stop'


def test_a_chat_is_answered_to_the_end_of_the_turn_whole_and_in_pieces(chat_client):
    create, stream = chat_client.chat.completions.create, chat_client.chat.completions.stream
    for question, answer in ANSWERS.items():
        found = create(**asked(question), temperature=0)
        with stream(**asked(question), temperature=0,
                    stream_options={'include_usage': True}) as pieces:
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
    ({'stop': ['']}, 'stop'), ({'stop': 'x' * 1001}, 'stop'), ({'stop': ['x'] * 1001}, 'stop'),
    ({'n': 2}, "'n'"), ({'logprobs': 3}, 'logprobs'), ({'stream': 'yes'}, 'stream'),
    ({'stream_options': 5}, 'stream_options'), ({'seed': 10**999}, 'seed'),
    ({'temperatur': 0}, 'did you mean temperature'), ({'x' * 10**5: 0}, 'unknown key')])
def test_a_wrong_request_is_an_error_of_openai(client, wrong, words):
    with pytest.raises(openai.BadRequestError, match=words) as error:
        complete(client, extra_body=wrong)
    assert error.value.type == 'invalid_request_error'


def test_what_is_no_request_is_refused(client, chat_client):
    with socket.create_connection(('127.0.0.1', client.base_url.port)) as connection:
        connection.sendall(UNFINISHED)  # the client leaves: serving() looks for a traceback
    halves = [{'model': '\udfff'}, {'prompt': '\udfff'}, {'stop': ['\udfff']}, {'\udfff': None},
              {'messages': [{'role': '\udfff', 'content': 'hi'}]}]
    for body in (b'', b'{', b'[]', b'\xff{}', b'[' * 100_000, b'{"prompt":"\xed\xa0\x80"}',
                 *(json.dumps(half).encode() for half in halves)):
        with pytest.raises(openai.BadRequestError, match='JSON object'):
            client.post('/completions', content=body, cast_to=object)
    with pytest.raises(openai.APIStatusError, match='bytes') as error:
        complete(client, stop='x' * 5_000_000, timeout=30)
    assert error.value.status_code == 413
    with pytest.raises(openai.NotFoundError) as error:
        client.get('/nothing', cast_to=object)
    assert error.value.type == 'invalid_request_error'
    for model, conversation, words in ((client, asked('Hi'), 'not fine-tuned'),
                                       (chat_client, asked('x' * 96), 'shorten it'),
                                       (chat_client, asked(), 'no messages')):
        with pytest.raises(openai.BadRequestError, match=words):
            model.chat.completions.create(**conversation)


def test_options_that_ask_for_nothing_are_accepted_and_others_refused(chat_client):
    create = chat_client.chat.completions.create
    for options in (
            {'n': 1, 'presence_penalty': 0, 'frequency_penalty': 0.0, 'logit_bias': {}},
            {'logprobs': False, 'top_logprobs': 0, 'response_format': {'type': 'text'}},
            {'tools': [], 'tool_choice': 'auto', 'functions': [], 'parallel_tool_calls': True},
            {'stop': None, 'seed': None, 'max_tokens': None, 'stream': None, 'stream_options': {}},
            {'user': 'me', 'metadata': {'a': 'b'}, 'store': True, 'service_tier': 'auto'}):
        found = create(**asked('hi'), temperature=0, extra_body=options)
        assert found.choices[0].message.content == ANSWERS['hi']
    for option in ({'n': 2}, {'tools': [{'type': 'function'}]}, {'logprobs': True},
                   {'presence_penalty': 0.5}, {'response_format': {'type': 'json_object'}},
                   {'tool_choice': 'required'}, {'logit_bias': {'5': 1}}):
        with pytest.raises(openai.BadRequestError, match=f"'{next(iter(option))}'"):
            create(**asked('hi'), extra_body=option)


def test_deeply_nested_values_are_refused(chat_client):
    for depth in range(900, 1000, 7):  # about Python's limit
        nested = '[' * depth + ']' * depth
        for body in f'{{"messages": {nested}}}', f'{{"messages": [{{"role": {nested}}}]}}':
            with pytest.raises(openai.BadRequestError):
                chat_client.post('/chat/completions', content=body.encode(), cast_to=object)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [complete(client, max_tokens=1).model]


def test_a_web_page_of_others_is_refused_and_a_local_one_is_not(client):
    body = b'{"prompt": "def ", "max_tokens": 1}'
    path = '/v1/completions'
    json_ = 'application/json; charset=utf-8'
    for kind in 'text/plain', 'application/x-www-form-urlencoded', 'text/plain;application/json':
        assert request(client, 'POST', path, body, Content_Type=kind).status == 415
    for origin, ours in (('http://evil.example', False), ('http://localhost.evil.example', False),
                         ('null', False), ('https://127.0.0.1', True),
                         ('http://localhost:3000', True), ('http://[::1]:80', True)):
        found = request(client, 'POST', path, body, Content_Type=json_, Origin=origin)
        preflight = request(client, 'OPTIONS', path, Origin=origin,
                            Access_Control_Request_Method='POST',
                            Access_Control_Request_Headers='authorization,content-type,x-any')
        assert (found.status, preflight.status) == ((200, 200) if ours else (403, 400)), origin
        allowed = {answer.getheader('Access-Control-Allow-Origin') for answer in (found, preflight)}
        assert allowed == {origin if ours else None}


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

    write = TextGenerator.generate_texts
    expected = plaingpt.load(trained, 'latest').generate('def ', temperature=0, max_new_tokens=9)
    monkeypatch.setattr(serve, 'MAX_QUEUED', 1)
    monkeypatch.setattr(TextGenerator, 'generate_texts', told)
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
        complete(client, max_tokens=1, extra_headers={'Host': 'host.docker.internal:8000',
                                                      'Origin': 'https://my.example'})
        for wrong in 'Bearer no', 'none':
            for ask in complete, lambda client, **options: client.models.list(**options):
                with pytest.raises(openai.AuthenticationError, match='API key'):
                    ask(client, extra_headers={'Authorization': wrong})
        preflight = request(client, 'OPTIONS', Origin='https://my.example',
                            Access_Control_Request_Method='POST')
        assert preflight.status == 200  # a browser sends no key with it
        assert 'sesame' not in log.read_text()


def test_a_key_that_no_header_can_hold_is_refused(capsys, monkeypatch):
    for key in 'schlüssel', 'ключ', 'two words', 'line\n', ' ':
        monkeypatch.setenv('PLAINGPT_API_KEY', key)
        assert 'PLAINGPT_API_KEY' in fails(capsys, monkeypatch, serve.main, 'missing')


def test_a_request_that_does_not_arrive_is_given_up(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, 'REQUEST_TIMEOUT', 0.2)
    with serving(tmp_path, trained) as (client, _, _):
        for sent, answer in ((b'', b''), (UNFINISHED[:20], b''),
                             (UNFINISHED, b'invalid_request_error')):
            with socket.create_connection(('127.0.0.1', client.base_url.port)) as connection:
                connection.sendall(sent)
                received = b''.join(iter(lambda: connection.recv(1000), b''))  # to its end
                assert answer in received and bool(answer) == bool(received)


def test_a_text_that_nobody_reads_ends(trained, monkeypatch):
    monkeypatch.setattr(serve, 'MAX_UNREAD', 5)
    body = json.dumps({'prompt': 'def ', 'max_tokens': ENDLESS, 'stream': True})
    completion = serve.Completion(plaingpt.load(trained, 'latest'), False, body)
    at_once = SimpleNamespace(call_soon_threadsafe=lambda call, piece: call(piece))
    assert completion.generate(at_once, SimpleNamespace(should_exit=False))
    completion.stop = ['def' * 300]
    assert completion.generate(at_once, SimpleNamespace(should_exit=False)) == ''  # it has left


def test_a_text_of_a_million_spaces_is_continued(tmp_path):
    tokenizer = BPETokenizer([bytes([i]) for i in range(256)])
    model = GPT(GPTConfig(16, tokenizer.vocab_size, 1, 1, 8))
    out_dir = save(model, tokenizer, tmp_path / 'out')
    with serving(tmp_path, out_dir) as (client, _, _):
        assert complete(client, prompt=' ' * 10**6).usage.prompt_tokens > 0
