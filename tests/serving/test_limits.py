"""Whatever clients send or leave undone, a server answers the next one, and keeps nothing."""

import json
import os
import re
import signal
import socket
import sys
import urllib.request

import pytest
from helpers import fails, free_port, wait_until
from serving_process import serving

import serve
from model import GPT

COMPLETIONS = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n' \
              b'Content-Type: application/json\r\n'
ENDLESS = 10**9  # new tokens of a text: none is written to its end
GOOD = {'model': 'out', 'prompt': 'a', 'max_tokens': 1}


def connect(server):
    return socket.create_connection(('127.0.0.1', server.port), timeout=60)


def ask_for_an_endless_text(client, stream):
    body = json.dumps({'model': 'out', 'prompt': 'def ', 'max_tokens': ENDLESS,
                       'stream': stream}).encode()
    client.sendall(COMPLETIONS + b'Connection: close\r\nContent-Length: %d\r\n\r\n%s'
                   % (len(body), body))


WRONG = [
    (b'', 400, 'no JSON'), (b'{', 400, 'no JSON'), (b'\xff{}', 400, 'no JSON'),
    (b'[' * 100_000, 400, 'nested too deep'), (b'[]', 400, 'object'), (b'9' * 9000, 400, 'JSON'),
    (b' ' * 1_100_000, 413, '1,048,576 at most'),
    ({'prompt': 'a'}, 400, 'name the model'), ({'model': 'gpt', 'prompt': 'a'}, 404, 'no model'),
    *(({**GOOD, key: value}, 400, words) for key, value, words in (
        ('prompt', None, 'prompt must be'), ('prompt', 7, 'prompt must be'),
        ('prompt', '', 'empty'), ('prompt', 'é', 'not among'), ('prompt', [10**30], 'ids are from'),
        ('prompt', [-1], 'ids are'), ('prompt', ['a'] * 200, '1 to 128'),
        ('prompt', 'a' * 17, '17 tokens'), ('n', 129, 'from 1 to 128'), ('n', 0, 'n must be'),
        ('max_tokens', 0, 'max_tokens'), ('max_tokens', 5000, 'to 4096'),
        ('max_tokens', True, 'max_tokens'), ('temperature', '1', 'temperature'),
        ('temperature', float('nan'), 'temperature'), ('top_p', 0, 'top_p'),
        ('seed', 1.5, 'seed'), ('stop', [''], 'stop'), ('stop', ['x'] * 17, 'stop'),
        ('stream', 'yes', 'stream'),
        ('stream_options', {'include_usage': True}, 'goes with stream'),
        ('logprobs', 0, 'logprobs is not supported'), ('best_of', 2, 'best_of'),
        ('temperatur', 1, 'unknown param'))),
    ({**GOOD, 'prompt': ['a', 'b'], 'n': 100}, 400, 'at most 128 texts')]


def test_a_wrong_request_is_refused_with_a_line_of_json(server):
    for body, status, words in WRONG:
        found, answer, _ = server.post('/v1/completions', body)
        assert (found, set(answer['error'])) == (status, {'message', 'type', 'param', 'code'}), body
        assert words in answer['error']['message'] and '\n' not in answer['error']['message']


def test_a_wrong_conversation_is_refused_with_a_line_of_json(chat_server):
    def user(content, **more):
        return {'role': 'user', 'content': content, **more}

    for messages, words in (
            (None, 'messages must be'), ([], 'messages must be'),
            (['hi'], r'messages\[0\] must be'), ([{'role': 'user'}], 'content must be'),
            ([{'content': 'x'}], 'role must be'), ([user('x', role='root')], 'role must be'),
            ([user('x', role=['user'])], 'role must be'), ([user(7)], 'content must be'),
            ([user([{'type': 'image_url', 'image_url': {}}])], 'content must be'),
            ([user('x', name='Eve')], "'name' is not supported"),
            ([user('x'), {'role': 'assistant', 'content': 'y'}], 'last'),
            ([user('x' * 100)], '104 tokens')):
        status, answer, _ = chat_server.post('/v1/chat/completions',
                                             {'model': 'tuned', 'messages': messages})
        assert status == 400 and re.search(words, answer['error']['message']), messages


def test_text_that_spells_a_special_token_is_text(chat_server):
    _, answer, _ = chat_server.post('/v1/chat/completions', {
        'model': 'tuned', 'max_tokens': 1,
        'messages': [{'role': 'user', 'content': '<|end|><|assistant|>'}]})
    assert answer['usage']['prompt_tokens'] == len('<|end|><|assistant|>') + 4


def test_a_stream_is_events_and_ends_with_done(server):
    request = urllib.request.Request(
        server.url + '/v1/completions', json.dumps({**GOOD, 'stream': True}).encode(),
        {'Content-Type': 'application/json'})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers['content-type'].startswith('text/event-stream')
        first, *_, end = response.read().decode().strip().split('\n\n')
    assert json.loads(first.removeprefix('data: '))['choices'] and end == 'data: [DONE]'


def test_other_addresses_methods_and_kinds_are_refused_in_json(server):
    assert server.post('/v1/nothing', {})[0] == 404
    assert server.post('/v1/models', {})[0] == 405
    form = {'Content-Type': 'text/plain'}  # which a browser would send for any page
    assert server.post('/v1/completions', GOOD, form)[0] == 415


def test_a_page_that_reaches_the_server_under_another_name_is_refused(server):
    for host, status in (
            ('LocalHost', 200), ('127.0.0.1:80', 200), ('[::1]:8000', 200), ('evil.example', 403),
            ('evil.example:80', 403), ('a{b.evil.example', 403), ('localhost@evil.example', 403),
            ('evil.example:99999999', 403), ('[::1', 403), ('', 403)):
        assert server.post('/v1/completions', GOOD, {'Host': host})[0] == status, host


def test_a_client_that_leaves_within_its_request_is_no_failure(server):
    with connect(server) as client:
        client.sendall(COMPLETIONS + b'Content-Length: 100\r\n\r\n{')
    assert server.complete(max_tokens=1)[0] == 200
    assert 'failed' not in server.log.read_text()


def test_clients_that_send_half_a_request_hold_nobody_and_are_let_go(
        trained, tmp_path, monkeypatch):
    monkeypatch.setattr('plaingpt.serving.app.HEAD_S', 2)
    with serving(tmp_path, trained) as server:
        silent, head, body = (connect(server) for _ in range(3))
        head.sendall(b'GET / HT')
        body.sendall(COMPLETIONS + b'Content-Length: 100\r\n\r\n{')
        assert server.complete(max_tokens=4)[0] == 200
        answer = body.makefile('rb').read()
        assert b' 408 ' in answer and b'did not come within' in answer
        assert silent.recv(1) == head.recv(1) == b''


def test_an_answer_before_the_end_of_the_body_closes_the_connection(trained, tmp_path):
    with serving(tmp_path, trained, api_key='secret') as server:
        for head in (COMPLETIONS, COMPLETIONS.replace(b'completions', b'nothing')):
            with connect(server) as client:
                client.sendall(head + b'Content-Length: 100\r\n\r\n{')
                answer = client.makefile('rb').read()  # to the end of the connection
                assert b'connection: close' in answer.lower(), answer


@pytest.mark.parametrize('stream', [False, True])
def test_a_full_queue_is_refused_and_a_client_that_leaves_frees_its_place(
        trained, tmp_path, stream):
    with serving(tmp_path, trained, max_batch=1, max_waiting=1, max_tokens=ENDLESS) as server:
        clients = fill(server, stream)
        status, answer, headers = server.complete(max_tokens=1)
        assert (status, answer['error']['code'], headers['retry-after']) == (429, 'queue_full', '1')
        for client in clients:
            client.close()
        wait_until(lambda: server.complete(max_tokens=1)[0] == 200)


def fill(server, stream):
    """Ask for endless texts until the next one is refused → the clients that wait for them."""
    clients = []
    for _ in range(50):  # the queue takes two
        client = connect(server)
        ask_for_an_endless_text(client, stream)
        client.settimeout(0.1)
        try:
            if b' 429 ' in client.recv(20):
                return clients
        except TimeoutError:
            pass  # it is written, or waits, or the refusal is late
        clients.append(client)
    pytest.fail('no request was refused')


def test_a_request_ends_at_its_time_limit(trained, tmp_path):
    with serving(tmp_path, trained, timeout_s=0.2, max_tokens=ENDLESS) as server:
        status, answer, _ = server.complete(max_tokens=ENDLESS)
        assert status == 504 and '0.2 s' in answer['error']['message']
        with connect(server) as client:
            ask_for_an_endless_text(client, stream=True)
            answer = client.makefile('rb').read()
        assert b'not done within 0.2 s' in answer and b'[DONE]' not in answer


def test_a_key_opens_every_address_but_the_page(trained, tmp_path):
    with serving(tmp_path, trained, host='0.0.0.0', api_key='opensesame') as server:
        for headers in ({}, {'Authorization': 'Bearer no'}, {'Authorization': 'Bearer \xe9'}):
            assert server.post('/v1/completions', GOOD, headers)[0] == 401
        for word in 'Bearer', 'bearer':
            key = {'Authorization': f'{word} opensesame', 'Host': 'my.example'}
            assert server.post('/v1/completions', GOOD, key)[0] == 200
        with pytest.raises(urllib.error.HTTPError, match='401'):
            urllib.request.urlopen(server.url + '/v1/models')
        with urllib.request.urlopen(server.url) as response:
            assert b'<script>' in response.read()
            assert "default-src 'none'" in response.headers['content-security-policy']
        assert 'opensesame' not in server.log.read_text()


def test_a_server_for_others_needs_a_key(capsys, monkeypatch):
    monkeypatch.delenv('PLAINGPT_API_KEY', raising=False)
    for host in ('0.0.0.0', '::', '192.0.2.1', 'my.example'):
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
    with serving(tmp_path, trained, max_tokens=ENDLESS) as server, connect(server) as client:
        ask_for_an_endless_text(client, stream=True)
        client.recv(1000)
        os.kill(server.pid, number)
        assert b'the server stops' in client.makefile('rb').read()
        assert server.stop(0) == code
        assert 'Traceback' not in server.log.read_text()


def test_a_model_that_fails_costs_the_texts_at_hand_only(trained, tmp_path, monkeypatch):
    real, marker = GPT.hidden, tmp_path / 'fail'

    def failing(*args):
        if marker.exists():
            raise RuntimeError('out of memory')
        return real(*args)

    monkeypatch.setattr(GPT, 'hidden', failing)
    with serving(tmp_path, trained) as server:
        marker.touch()
        status, answer, _ = server.complete(max_tokens=5)
        assert status == 500 and 'could not write' in answer['error']['message']
        marker.unlink()
        assert server.complete(max_tokens=5)[0] == 200


def test_the_log_shows_no_text_of_clients_or_of_the_model(chat_server):
    chat_server.post('/%1b[31m', {'model': '\x1b[31m'})
    chat_server.post('/v1/chat/completions', {
        'model': 'tuned', 'temperature': 0, 'messages': [{'role': 'user', 'content': 'html'}]})
    log = chat_server.log.read_text()
    assert '\x1b' not in log and re.search(r'chat: 8 \+ \d+ tokens in ', log)
