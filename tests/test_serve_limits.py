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


def ask(client, max_tokens, stream):
    body = json.dumps({'model': 'out', 'prompt': 'def ', 'max_tokens': max_tokens,
                       'stream': stream}).encode()
    client.sendall(COMPLETIONS + b'Connection: close\r\nContent-Length: %d\r\n\r\n%s'
                   % (len(body), body))


WRONG = [
    (b'', 400, 'no JSON'), (b'{', 400, 'no JSON'), (b'\xff{}', 400, 'no JSON'),
    (b'[' * 100_000, 400, 'no JSON'), (b'[]', 400, 'object'), (b'9' * 9000, 400, 'JSON'),
    (b' ' * 10_000_000, 413, '1,048,576 bytes'),
    ({'prompt': 'a'}, 404, 'model must be'), ({'model': 'gpt', 'prompt': 'a'}, 404, 'model must'),
    *(({**GOOD, key: value}, 400, words) for key, value, words in (
        ('prompt', None, 'prompt is empty'), ('prompt', 7, 'prompt must be'),
        ('prompt', 'é', 'not among'), ('prompt', ['a'], 'prompt must be'), ('n', 2, 'n is not'),
        ('max_tokens', 0, 'max_tokens'), ('max_tokens', 5000, 'to 4096'),
        ('max_tokens', True, 'max_tokens'), ('temperature', '1', 'temperature'),
        ('temperature', float('nan'), 'temperature'), ('top_p', 0, 'top_p'),
        ('seed', 1.5, 'seed'), ('stop', [''], 'stop'), ('stop', ['x'] * 17, 'stop'),
        ('stream', 'yes', 'stream'), ('stream_options', 1, 'stream_options'),
        ('logprobs', 0, 'logprobs is not supported'), ('best_of', 2, 'best_of'),
        ('temperatur', 0, 'temperatur is not supported')))]


def test_a_wrong_request_is_refused_with_a_line_of_json(server):
    for body, status, words in WRONG:
        found, answer, _ = server.post('/v1/completions', body)
        assert (found, set(answer['error'])) == (status, {'message', 'type', 'param', 'code'}), body
        assert words in answer['error']['message'] and '\n' not in answer['error']['message']


def test_a_wrong_conversation_is_refused_with_a_line_of_json(chat_server):
    def user(content, **more):
        return {'role': 'user', 'content': content, **more}

    for messages, words in (
            (None, 'no messages'), ([], 'no messages'), ('hi', 'messages must be'),
            (['hi'], 'message 1 is'), ([{'role': 'user'}], 'message 1 is'),
            ([user('x', role='root')], 'role is'), ([user('x', role=['user'])], 'role is'),
            ([user(7)], 'text is expected'),
            ([user([{'type': 'image_url', 'image_url': {}}])], 'text is expected'),
            ([user('x', name='Eve')], '"name"'),
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
    for host in 'LocalHost', '127.0.0.1:80', '[::1]:8000':
        assert server.post('/v1/completions', GOOD, {'Host': host})[0] == 200, host
    for host in ('evil.example', 'evil.example:80', 'a{b.evil.example', 'localhost@evil.example',
                 'localhost.evil.example', 'evil.example:99999999', '[::1', ''):
        with connect(server) as client:
            client.sendall(f'GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n'.encode())
            assert b' 400 ' in client.makefile('rb').readline(), host


def test_a_client_that_leaves_within_its_request_is_no_failure(server):
    with connect(server) as client:
        client.sendall(COMPLETIONS + b'Content-Length: 100\r\n\r\n{')
    assert server.complete(max_tokens=1)[0] == 200
    assert 'failed' not in server.log.read_text()


def test_clients_that_send_half_a_request_hold_nobody_and_are_cut_off(
        trained, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, 'CLIENT_S', 1)
    with serving(tmp_path, trained) as server:
        head, body, refused, _ = clients = [connect(server) for _ in range(4)]
        head.sendall(b'GET / HT')
        body.sendall(COMPLETIONS + b'Content-Length: 100\r\n\r\n{')
        refused.sendall(COMPLETIONS.replace(b'completions', b'no') + b'Content-Length: 9\r\n\r\n{')
        assert server.complete(max_tokens=4)[0] == 200
        for client in clients:
            assert is_cut_off(client)


def is_cut_off(client):
    """→ True once the server has closed the connection"""
    try:
        while client.recv(10**6):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.slow
def test_a_client_that_does_not_read_its_stream_holds_nobody_and_is_cut_off(
        trained, tmp_path, monkeypatch):
    def bind_with_little_memory(*address):
        sock = bind(*address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections too
        return sock

    bind = serve.bind
    monkeypatch.setattr(serve, 'bind', bind_with_little_memory)
    monkeypatch.setattr(serve, 'CLIENT_S', 3)
    with serving(tmp_path, trained, max_waiting=0) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(('127.0.0.1', server.port))
        ask(client, 2000, stream=True)
        wait_until(lambda: '2000 tokens' in server.log.read_text())  # all of it is written
        files = server.files()
        assert server.complete(max_tokens=4)[0] == 200
        wait_until(lambda: server.files() < files)


@pytest.mark.parametrize('stream', [False, True])
def test_a_full_queue_is_refused_and_a_client_that_leaves_frees_its_place(
        trained, tmp_path, stream):
    with serving(tmp_path, trained, max_waiting=1, max_tokens=ENDLESS) as server:
        clients = fill(server, stream)
        status, answer, _ = server.complete(max_tokens=1)
        assert (status, answer['error']['code']) == (429, 'queue_full')
        for client in clients:
            client.close()
        wait_until(lambda: server.complete(max_tokens=1)[0] == 200)


def fill(server, stream):
    """Ask for endless texts until the next one is refused → the clients that wait for them."""
    clients = []
    for _ in range(50):  # the queue takes two
        client = connect(server)
        ask(client, ENDLESS, stream)
        client.settimeout(0.1)
        try:
            if b' 429 ' in client.recv(20):
                return clients
        except TimeoutError:
            pass  # it is written, or waits, or the refusal is late
        clients.append(client)
    pytest.fail('no request was refused')


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
        ask(client, ENDLESS, stream=True)
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
        assert status == 500 and 'out of memory' in answer['error']['message']
        assert server.log.read_text().count('RuntimeError: out of memory') == 1
        marker.unlink()
        assert server.complete(max_tokens=5)[0] == 200


def test_the_log_shows_no_text_of_clients_or_of_the_model(chat_server):
    chat_server.post('/%1b[31m', {'model': '\x1b[31m'})
    chat_server.post('/v1/chat/completions', {
        'model': 'tuned', 'temperature': 0, 'messages': [{'role': 'user', 'content': 'html'}]})
    log = chat_server.log.read_text()
    assert '\x1b' not in log and re.search(r'chat: 8 \+ \d+ tokens in ', log)
