"""OpenAI's own client talks to a real server process."""

import http.client
import json
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from chat_model import ANSWERS
from processes import exit_code, fork, wait_until

import plaingpt
import sample
import serve

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


def choices_of(response):
    """The choices of a response, or of the chunks of a stream."""
    chunks = response if isinstance(response, openai.Stream) else [response]
    return [chunk.choices[0] for chunk in chunks]


def accepted(client):
    """A stream; None if too many requests are queued."""
    with suppress(openai.RateLimitError):
        return complete(client, stream=True, max_tokens=1)


def conversation(*contents):
    """Messages of a user and the assistant, in turns."""
    return {'model': 'any', 'messages': [
        {'role': ('user', 'assistant')[i % 2], 'content': text} for i, text in enumerate(contents)]}


def request(client, method, path='/v1/chat/completions', body=None, **headers):
    """What a browser can send → the response. Of headers, _ is written for -."""
    headers = {name.replace('_', '-'): value for name, value in headers.items()}
    connection = http.client.HTTPConnection('127.0.0.1', client.base_url.port)
    connection.request(method, path, body, headers)
    return connection.getresponse()


# -----------------------------------------------------------------------------
# answers


def test_a_completion_is_that_of_sample_py(client, trained, capsys):
    response = complete(client, temperature=0.7, top_p=0.9, seed=5, max_tokens=40, user='me',
                        extra_body={'top_k': 20})
    sample.main([str(trained), '--checkpoint=latest', '--start=def ', '--num_samples=1',
                 '--temperature=0.7', '--top_p=0.9', '--top_k=20', '--seed=5', '--device=cpu',
                 '--max_new_tokens=40'])
    [choice] = response.choices
    assert capsys.readouterr().out.endswith(f'---------------\ndef {choice.text}\n')
    assert choice.finish_reason == 'length'
    assert response.usage.to_dict() == {'prompt_tokens': 4, 'completion_tokens': 40,
                                        'total_tokens': 44}


def test_without_a_seed_each_completion_is_another(client):
    assert len({complete(client, max_tokens=40).choices[0].text for _ in range(3)}) == 3


def test_a_stream_is_the_text_in_pieces(client):
    text = complete(client, temperature=0, max_tokens=30).choices[0].text
    *chunks, last, usage = complete(client, temperature=0, max_tokens=30, stream=True,
                                    stream_options={'include_usage': True})
    assert ''.join(chunk.choices[0].text for chunk in chunks) == text
    assert len(chunks) > 30
    assert last.choices[0].finish_reason == 'length'
    assert usage.usage.completion_tokens == 30


@pytest.mark.parametrize('stream', [False, True])
def test_a_completion_ends_before_a_stop_string(client, stream):
    text = complete(client, temperature=0, max_tokens=30).choices[0].text
    choices = choices_of(complete(client, temperature=0, max_tokens=30, stream=stream,
                                  stop=['\x00\x01', text[10:13]]))
    assert ''.join(choice.text for choice in choices) == text[:text.index(text[10:13])]
    assert choices[-1].finish_reason == 'stop'


@pytest.mark.parametrize(('question', 'answer'), ANSWERS.items(), ids=ANSWERS)
def test_a_chat_is_answered_to_the_end_of_the_turn(chat_client, question, answer):
    create, stream = chat_client.chat.completions.create, chat_client.chat.completions.stream
    whole = create(**conversation(question), temperature=0)
    with stream(**conversation(question), temperature=0,
                stream_options={'include_usage': True}) as chunks:
        streamed = chunks.get_final_completion()
    for choice in whole.choices[0], streamed.choices[0]:
        assert (choice.message.role, choice.message.content) == ('assistant', answer)
        assert choice.finish_reason == 'stop'
    assert whole.usage.prompt_tokens == len(question.encode()) + 4  # and four special tokens
    assert whole.usage == streamed.usage


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [complete(client, max_tokens=1).model]


def test_options_that_ask_for_nothing_are_accepted(chat_client):
    response = chat_client.chat.completions.create(**conversation('hi'), temperature=0, extra_body={
        'n': 1, 'presence_penalty': 0, 'frequency_penalty': 0.0, 'logit_bias': {}, 'seed': None,
        'logprobs': False, 'top_logprobs': 0, 'response_format': {'type': 'text'}, 'tools': [],
        'tool_choice': 'auto', 'functions': [], 'parallel_tool_calls': True, 'stop': None,
        'max_tokens': None, 'stream_options': {}, 'user': 'me', 'metadata': {'a': 'b'},
        'store': True, 'service_tier': 'auto'})
    assert response.choices[0].message.content == ANSWERS['hi']


# -----------------------------------------------------------------------------
# log-probabilities


@pytest.fixture(scope='module')
def gpt(trained):
    return plaingpt.load(trained, 'latest', device='cpu')


def logprobs_of(gpt, text):
    """(T, V): of each character of `text` that follows the first."""
    ids = torch.from_numpy(gpt.tokenizer.encode(text))
    with torch.no_grad():
        return gpt.model(ids[None, :-1])[0][0].log_softmax(-1), ids[1:]


@pytest.mark.parametrize('stream', [False, True])
def test_logprobs_are_those_of_the_model_before_sampling(stream, client, gpt):
    response = complete(client, max_tokens=8, seed=4, temperature=0.7, logprobs=2, stream=stream,
                        extra_body={'top_k': 20, 'repetition_penalty': 1.5})
    choices = [choice for choice in choices_of(response) if choice.logprobs]
    tokens, logprobs, top, offsets = [
        [value for choice in choices for value in getattr(choice.logprobs, name)]
        for name in ('tokens', 'token_logprobs', 'top_logprobs', 'text_offset')]
    assert all(''.join(choice.logprobs.tokens) == choice.text for choice in choices)
    assert offsets == [*range(8)]
    expected, ids = logprobs_of(gpt, 'def ' + ''.join(tokens))
    for i in range(8):
        row = expected[3 + i]
        likely = {gpt.tokenizer.decode([j]): row[j].item()
                  for j in [*row.topk(2).indices, ids[3 + i]]}
        assert top[i] == pytest.approx(likely, abs=1e-4)
        assert logprobs[i] == top[i][tokens[i]]


@pytest.mark.parametrize('stream', [False, True])
def test_the_tokens_of_a_chat_are_its_answer(stream, chat_client):
    response = chat_client.chat.completions.create(
        **conversation('ä?'), temperature=0, logprobs=True, top_logprobs=2, stream=stream)
    entries = [entry for choice in choices_of(response) if choice.logprobs
               for entry in choice.logprobs.content]
    assert ''.join(entry.token for entry in entries) == ANSWERS['ä?']
    assert b''.join(bytes(entry.bytes) for entry in entries).startswith(ANSWERS['ä?'].encode())
    for entry in entries:  # each is the likeliest
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.top_logprobs[0].bytes == entry.bytes


# -----------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize(('option', 'named'), [
    ({'prompt': 7}, 'prompt'), ({'prompt': 'é'}, 'é'), ({'temperature': 'hot'}, 'temperature'),
    ({'stop': ['x'] * 1001}, 'stop'), ({'stream': 'yes'}, 'stream'), ({'seed': 10**999}, 'seed'),
    ({'temperatur': 0}, 'temperature'), ({'n': 2}, "'n'"), ({'logprobs': 21}, 'logprobs'),
    ({'top_logprobs': 1}, 'top_logprobs'), ({'prompt': ['a', 'b']}, 'prompt'),
    ({'prompt': [3]}, 'prompt'), ({'echo': True}, 'echo'),
    ({'tools': [{'type': 'function'}]}, 'tools')])
def test_a_wrong_option_is_an_error_of_openai_that_names_it(client, option, named):
    with pytest.raises(openai.BadRequestError, match=named) as error:
        complete(client, extra_body=option)
    assert error.value.type == 'invalid_request_error'


def test_top_logprobs_need_logprobs(chat_client):
    with pytest.raises(openai.BadRequestError, match='logprobs=true'):
        chat_client.chat.completions.create(**conversation('hi'), top_logprobs=2)


@pytest.mark.parametrize('body', [b'', b'[]', b'\xff{}', b'{"prompt": "\\udfff"}'])
def test_a_body_that_is_not_a_json_object_of_unicode_is_refused(client, body):
    with pytest.raises(openai.BadRequestError, match='JSON object'):
        client.post('/completions', content=body, cast_to=object)


def test_a_body_that_is_too_large_is_refused(client):
    with pytest.raises(openai.APIStatusError) as error:
        complete(client, stop='x' * 5_000_000, timeout=30)
    assert error.value.status_code == 413


def test_what_a_form_of_a_web_page_can_send_is_refused(client):
    body = b'{"prompt": "def ", "max_tokens": 1}'
    response = request(client, 'POST', '/v1/completions', body, Content_Type='text/plain')
    assert response.status == 415


@pytest.mark.parametrize(('origin', 'is_local'), [
    ('http://evil.example', False), ('http://localhost.evil.example', False), ('null', False),
    ('https://127.0.0.1', True), ('http://localhost:3000', True), ('http://[::1]:80', True)])
def test_a_web_page_is_answered_if_it_is_of_this_machine(client, origin, is_local):
    response = request(client, 'POST', '/v1/completions', b'{"prompt": "def ", "max_tokens": 1}',
                       Content_Type='application/json; charset=utf-8', Origin=origin)
    preflight = request(client, 'OPTIONS', '/v1/completions', Origin=origin,
                        Access_Control_Request_Method='POST',
                        Access_Control_Request_Headers='authorization,content-type,x-any')
    assert (response.status, preflight.status) == ((200, 200) if is_local else (403, 400))
    for answer in response, preflight:
        allowed = answer.getheader('Access-Control-Allow-Origin')
        assert allowed == (origin if is_local else None)


def test_a_page_that_reaches_the_server_under_another_name_is_refused(client):
    for host in 'LocalHost', '127.0.0.1:80', '[::1]:8000':
        complete(client, max_tokens=1, extra_headers={'Host': host})
    for host in 'evil.example', 'localhost.evil.example', 'evil.example:80':
        with pytest.raises(openai.BadRequestError):
            complete(client, max_tokens=1, extra_headers={'Host': host})


def test_other_machines_need_the_key(trained, tmp_path):
    with serving(tmp_path, trained, '--host=0.0.0.0', key='sesame', PLAINGPT_API_KEY='sesame') as (
            client, _, log):
        complete(client, max_tokens=1, extra_headers={'Host': 'host.docker.internal:8000',
                                                      'Origin': 'https://my.example'})
        for key in 'Bearer no', 'none':
            with pytest.raises(openai.AuthenticationError):
                complete(client, extra_headers={'Authorization': key})
            with pytest.raises(openai.AuthenticationError):
                client.models.list(extra_headers={'Authorization': key})
        preflight = request(client, 'OPTIONS', Origin='https://my.example',
                            Access_Control_Request_Method='POST')
        assert preflight.status == 200  # a browser sends no key with it
        assert 'sesame' not in log.read_text()


# -----------------------------------------------------------------------------
# several clients, and those that leave


def test_requests_wait_for_each_other(client):
    expected = complete(client, temperature=0, max_tokens=9).choices[0].text
    with ThreadPoolExecutor() as pool:
        first = complete(client, stream=True, max_tokens=ENDLESS)
        second = pool.submit(complete, client, temperature=0, max_tokens=9)
        for _ in range(50):
            next(iter(first))  # a token
        assert not second.done()
        first.close()  # a client that leaves ends its text
        assert second.result().choices[0].text == expected


def test_a_full_queue_is_refused_until_a_client_leaves(trained, tmp_path):
    with serving(tmp_path, trained) as (client, _, _):
        first = complete(client, stream=True, max_tokens=ENDLESS)
        waiting = [complete(client, stream=True, max_tokens=1) for _ in range(serve.MAX_QUEUED)]
        with pytest.raises(openai.RateLimitError):
            complete(client)
        waiting.pop().close()
        wait_until(lambda: accepted(client))
        first.close()
        assert all(list(stream) for stream in waiting)
def test_a_client_that_waits_for_the_whole_text_can_leave(client):
    with pytest.raises(openai.APITimeoutError):
        complete(client, max_tokens=ENDLESS, timeout=1)
    assert complete(client, max_tokens=1).choices


def test_a_request_that_does_not_arrive_and_a_response_that_is_not_read_are_given_up(
        trained, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, 'REQUEST_TIMEOUT', 0.2)
    monkeypatch.setattr(serve, 'UNREAD_TIMEOUT', 0.2)
    monkeypatch.setattr(serve, 'MAX_QUEUED', 0)
    with serving(tmp_path, trained) as (client, _, _):
        for sent, answer in ((b'', b''), (UNFINISHED[:20], b''),
                             (UNFINISHED, b'invalid_request_error')):
            with socket.create_connection(('127.0.0.1', client.base_url.port)) as connection:
                connection.sendall(sent)
                sent_back = received(connection)
                assert answer in sent_back
                assert bool(answer) == bool(sent_back)
        with send_stream(client, max_tokens=ENDLESS) as connection:
            wait_until(lambda: accepted(client))
            assert b'DONE' not in received(connection)


def send_stream(client, receive_buffer=4096, **options):
    """Ask for a stream → the connection, from which nothing is read."""
    body = json.dumps({'prompt': 'def ', 'stream': True, **options}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(('127.0.0.1', client.base_url.port))
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n'
                       b'Content-Type: application/json\r\n\r\n%b' % (len(body), body))
    return connection


def received(connection):
    """All bytes until the server closes the connection."""
    return b''.join(iter(lambda: connection.recv(100_000), b''))


def test_a_client_that_reads_nothing_or_sends_slowly_delays_no_other(client):
    with send_stream(client, max_tokens=ENDLESS), \
            socket.create_connection(('127.0.0.1', client.base_url.port)) as unfinished:
        unfinished.sendall(UNFINISHED)
        assert complete(client, max_tokens=9, timeout=5).choices


def test_a_stream_that_waits_for_its_reader_ends_when_the_reader_leaves(trained):
    body = json.dumps({'prompt': 'def ', 'max_tokens': ENDLESS, 'stream': True})
    completion = serve.Completion(plaingpt.load(trained, 'latest', device='cpu'), False, body)

    def call(put, piece):
        if completion.generator.cancelled:
            raise RuntimeError('the event loop is closed')
        put(piece)
    turn = threading.Lock()
    thread = threading.Thread(daemon=True, target=completion.generate, args=(
        turn, SimpleNamespace(call_soon_threadsafe=call), SimpleNamespace(should_exit=False)))
    thread.start()
    wait_until(lambda: completion.pieces.qsize() == serve.MAX_UNREAD and not turn.locked())
    completion.cancel()
    thread.join(5)
    assert not thread.is_alive()


def test_a_client_that_reads_late_gets_its_whole_text(client):
    options = {'max_tokens': 500, 'seed': 3}
    with send_stream(client, **options) as connection:
        expected = complete(client, **options).choices[0].text
        *lines, _, done = re.findall(rb'data: (.*)', received(connection))
    text = ''.join(json.loads(line)['choices'][0]['text'] for line in lines)
    assert (text, done) == (expected, b'[DONE]')
