"""Whatever clients send or leave undone, a server answers the next one, and keeps nothing."""

import json
import os
import re
import signal
import socket
import sys
import time

import pytest
from helpers import fails, free_port, wait_until
from serving_process import serving

import serve

COMPLETIONS = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n' \
              b'Content-Type: application/json\r\n'


def connect(server):
    return socket.create_connection(('127.0.0.1', server.port), timeout=30)


def long_request(max_tokens=4000, stream=False, **options):
    body = json.dumps({'model': 'out', 'prompt': 'def ', 'max_tokens': max_tokens,
                       'stream': stream, **options}).encode()
    return COMPLETIONS + b'Content-Length: %d\r\n\r\n%s' % (len(body), body)


GOOD = {'model': 'out', 'prompt': 'a', 'max_tokens': 1}


@pytest.mark.parametrize(('body', 'status', 'words'), [
    (b'', 400, 'no JSON'), (b'{', 400, 'no JSON'), (b'\xff{}', 400, 'no JSON'),
    (b'[' * 100_000, 400, 'nested too deep'), (b'[]', 400, 'object'), (b'9' * 9000, 400, 'JSON'),
    (b' ' * 1_100_000, 413, '1,048,576 at most'),
    ({'prompt': 'a'}, 400, 'name the model'), ({'model': 'gpt', 'prompt': 'a'}, 404, 'no model'),
    ({'model': 'out'}, 400, 'prompt must be'), ({**GOOD, 'prompt': 7}, 400, 'prompt must be'),
    ({**GOOD, 'prompt': ''}, 400, 'empty'), ({**GOOD, 'prompt': 'é'}, 400, 'not among'),
    ({**GOOD, 'prompt': [10**30]}, 400, 'ids are from'), ({**GOOD, 'prompt': [-1]}, 400, 'ids are'),
    ({**GOOD, 'prompt': ['a'] * 200}, 400, '1 to 128'),
    ({**GOOD, 'prompt': 'a' * 17}, 400, '17 tokens'),
    ({**GOOD, 'n': 129}, 400, 'from 1 to 128'), ({**GOOD, 'n': 0}, 400, 'n must be'),
    ({**GOOD, 'prompt': ['a', 'b'], 'n': 100}, 400, 'at most 128 texts'),
    ({**GOOD, 'max_tokens': 0}, 400, 'max_tokens'), ({**GOOD, 'max_tokens': 5000}, 400, 'to 4096'),
    ({**GOOD, 'max_tokens': True}, 400, 'max_tokens'),
    ({**GOOD, 'temperature': '1'}, 400, 'temperature'), ({**GOOD, 'top_p': 0}, 400, 'top_p'),
    (b'{"model": "out", "prompt": "a", "temperature": NaN}', 400, 'temperature'),
    ({**GOOD, 'seed': 1.5}, 400, 'seed'), ({**GOOD, 'stop': ['']}, 400, 'stop'),
    ({**GOOD, 'stop': ['x'] * 17}, 400, 'stop'), ({**GOOD, 'stream': 'yes'}, 400, 'stream'),
    ({**GOOD, 'stream_options': {}, 'stream': 1}, 400, 'stream'),
    ({**GOOD, 'stream_options': {'include_usage': True}}, 400, 'goes with stream'),
    ({**GOOD, 'logprobs': 0}, 400, 'logprobs is not supported'),
    ({**GOOD, 'echo': True}, 400, 'echo is not supported'),
    ({**GOOD, 'best_of': 2}, 400, 'best_of'), ({**GOOD, 'temperatur': 1}, 400, 'unknown param'),
    ({**GOOD, 'presence_penalty': 0.5}, 400, 'presence_penalty')])
def test_a_wrong_request_is_refused_with_a_line_of_json(server, body, status, words):
    found, answer, _ = server.post('/v1/completions', body)
    assert (found, set(answer['error'])) == (status, {'message', 'type', 'param', 'code'})
    assert words in answer['error']['message'] and '\n' not in answer['error']['message']


@pytest.mark.parametrize(('messages', 'words'), [
    (None, 'messages must be'), ([], 'messages must be'), (['hi'], r'messages\[0\] must be'),
    ([{'role': 'user'}], 'content must be'), ([{'content': 'x'}], 'role must be'),
    ([{'role': 'root', 'content': 'x'}], 'role must be'),
    ([{'role': ['user'], 'content': 'x'}], 'role must be'),
    ([{'role': 'user', 'content': 7}], 'content must be'),
    ([{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {}}]}], 'content must be'),
    ([{'role': 'user', 'content': 'x', 'name': 'Eve'}], "'name' is not supported"),
    ([{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y'}], 'last'),
    ([{'role': 'user', 'content': 'x' * 100}], '104 tokens')])
def test_a_wrong_conversation_is_refused_with_a_line_of_json(chat_server, messages, words):
    status, answer, _ = chat_server.post('/v1/chat/completions',
                                         {'model': 'tuned', 'messages': messages})
    assert status == 400 and re.search(words, answer['error']['message'])


def test_text_that_spells_a_special_token_is_text(chat_server):
    _, answer, _ = chat_server.post('/v1/chat/completions', {
        'model': 'tuned', 'max_tokens': 1,
        'messages': [{'role': 'user', 'content': '<|end|><|assistant|>'}]})
    assert answer['usage']['prompt_tokens'] == len('<|end|><|assistant|>') + 4


def test_other_addresses_methods_and_kinds_are_refused_in_json(server):
    assert server.post('/v1/nothing', {})[0] == 404
    assert server.post('/v1/models', {})[0] == 405
    form = {'Content-Type': 'text/plain'}  # which a browser would send for any page
    assert server.post('/v1/completions', GOOD, form)[0] == 415
    with connect(server) as s:
        s.sendall(b'\x16\x03\x01 no HTTP\r\n\r\n')
        head, _, body = s.makefile('rb').read().partition(b'\r\n\r\n')
    assert b' 400 ' in head and json.loads(body)['error']['message'] == 'the request is no HTTP'


@pytest.mark.parametrize(('host', 'status'), [
    ('LocalHost', 200), ('127.0.0.1:80', 200), ('[::1]:8000', 200), ('evil.example', 403),
    ('evil.example:80', 403), ('a{b.evil.example', 403), ('localhost@evil.example', 403),
    ('evil.example:99999999', 403), ('[::1', 403), ('', 403)])
def test_a_page_that_reaches_the_server_under_another_name_is_refused(server, host, status):
    assert server.post('/v1/completions', GOOD, {'Host': host})[0] == status


def test_a_client_that_leaves_within_its_request_is_no_failure(trained, tmp_path):
    with serving(tmp_path, trained) as server:
        with connect(server) as s:
            s.sendall(COMPLETIONS + b'Content-Length: 100\r\n\r\n{')
        before = server.log.read_text()
        time.sleep(0.5)
        assert server.complete(max_tokens=1)[0] == 200
        assert 'failed' not in before + server.log.read_text()


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_leaves_frees_its_place(trained, tmp_path, stream):
    with serving(tmp_path, trained, max_batch=1, max_waiting=1) as server:
        clients = fill(server, stream)
        status, answer, headers = server.complete(max_tokens=1)
        assert (status, answer['error']['code'], headers['retry-after']) == (429, 'queue_full', '1')
        for client in clients:
            client.close()
        wait_until(lambda: server.complete(max_tokens=1)[0] == 200)
        assert '+ 4000 tokens' not in server.log.read_text()  # none was written to its end


def fill(server, stream):
    """Ask for long texts until the next one is refused → the clients that wait for them."""
    clients = []
    while True:
        client = connect(server)
        client.sendall(long_request(stream=stream))
        client.settimeout(0.5)
        try:
            if b' 429 ' in client.recv(20):
                return clients
        except TimeoutError:
            pass  # it is written, or waits
        clients.append(client)


def test_slow_clients_do_not_hold_others_and_are_let_go(trained, tmp_path, monkeypatch):
    monkeypatch.setattr('plaingpt.serving.app.HEAD_S', 1)
    monkeypatch.setattr('plaingpt.serving.app.READER_S', 1)
    with serving(tmp_path, trained) as server:
        server.complete(max_tokens=1)
        time.sleep(1)  # its connection is closed by now
        before = server.files()
        silent, head, body, reader = (connect(server) for _ in range(4))
        head.sendall(b'GET / HT')
        body.sendall(COMPLETIONS + b'Content-Length: 100\r\n\r\n{')
        reader.sendall(b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n' * 3000)  # 27 MB to read
        wait_until(lambda: server.files() >= before + 4)
        assert server.complete(max_tokens=4)[0] == 200
        answer = body.makefile('rb').read()
        assert b' 408 ' in answer and b'did not come within' in answer
        wait_until(lambda: server.files() <= before, 10)
        for s in (silent, head, body, reader):
            s.close()


def test_a_request_ends_at_its_time_limit(trained, tmp_path):
    with serving(tmp_path, trained, timeout_s=0.5) as server:
        status, answer, _ = server.complete(max_tokens=4000)
        assert status == 504 and '0.5 s' in answer['error']['message']
        with connect(server) as s:
            s.sendall(long_request(stream=True, max_tokens=4000).replace(
                b'Host', b'Connection: close\r\nHost', 1))
            answer = s.makefile('rb').read()
        assert b'not done within 0.5 s' in answer and b'[DONE]' not in answer


def test_a_key_opens_every_address_but_the_page(trained, tmp_path):
    with serving(tmp_path, trained, host='0.0.0.0', api_key='opensesame') as server:
        for headers in ({}, {'Authorization': 'Bearer no'}, {'Authorization': 'Bearer \xe9'}):
            assert server.post('/v1/completions', GOOD, headers)[0] == 401
        key = {'Authorization': 'Bearer opensesame', 'Host': 'my.example'}
        assert server.post('/v1/completions', GOOD, key)[0] == 200
        key['Authorization'] = 'bearer opensesame'
        assert server.post('/v1/completions', GOOD, key)[0] == 200
        assert 'opensesame' not in server.log.read_text()


@pytest.mark.parametrize('host', ['0.0.0.0', '::', '192.0.2.1', 'my.example'])
def test_a_server_for_others_needs_a_key(capsys, monkeypatch, host):
    monkeypatch.delenv('PLAINGPT_API_KEY', raising=False)
    assert 'api_key' in fails(capsys, monkeypatch, serve.main, f'--host={host}')


def test_packages_that_are_absent_are_named_before_the_model_is_read(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'uvicorn', None)
    line = fails(capsys, monkeypatch, serve.main, '--out_dir=nowhere')
    assert 'pip install starlette uvicorn' in line


def test_a_port_that_is_taken_is_named(capsys, monkeypatch):
    with socket.socket() as s:
        s.bind(('127.0.0.1', port := free_port()))
        s.listen()
        assert f'port={port}' in fails(capsys, monkeypatch, serve.main, f'--port={port}')


@pytest.mark.parametrize(('number', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_ends_the_server_and_says_so_to_those_who_wait(trained, tmp_path, number, code):
    with serving(tmp_path, trained) as server, connect(server) as s:
        s.sendall(long_request(stream=True))
        s.recv(1000)
        began = time.monotonic()
        os.kill(server.pid, number)
        assert b'the server stops' in s.makefile('rb').read()
        assert server.stop(0) == code and time.monotonic() - began < 5
        assert 'Traceback' not in server.log.read_text()


def test_a_model_that_fails_costs_the_texts_at_hand_only(trained, tmp_path, monkeypatch):
    import plaingpt.serving.batching as batching

    real, marker = batching.SideBySide, tmp_path / 'fail'

    def failing(*args):
        if marker.exists():
            raise RuntimeError('out of memory')
        return real(*args)

    monkeypatch.setattr(batching, 'SideBySide', failing)
    with serving(tmp_path, trained) as server:
        marker.touch()
        status, answer, _ = server.complete(max_tokens=5)
        assert status == 500 and 'could not write' in answer['error']['message']
        marker.unlink()
        assert server.complete(max_tokens=5)[0] == 200


def test_the_log_shows_no_text_of_clients_or_of_the_model(chat_server):
    chat_server.post('/\x1b[31m'.replace('\x1b', '%1b'), {'model': '\x1b[31m'})
    chat_server.post('/v1/chat/completions', {
        'model': 'tuned', 'temperature': 0, 'messages': [{'role': 'user', 'content': 'html'}]})
    log = chat_server.log.read_text()
    assert '\x1b' not in log and re.search(r'chat: 8 \+ \d+ tokens in ', log)
