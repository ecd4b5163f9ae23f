"""Downloads, from a server on loopback that speaks as much of the hub's language as they need."""

import hashlib
import http.server
import json
import logging
import threading
import time
from functools import partial

import huggingface_hub
import numpy as np
import pytest
from helpers import SHARED, fails

import prepare
from plaingpt.data import sources
from plaingpt.data.corpora import CORPORA, Corpus
from plaingpt.data.dataset import open_dataset


def shard(n, first=0):
    header = np.zeros(256, dtype='<i4')
    header[:3] = 20240520, 1, n
    return header.tobytes() + (np.arange(first, first + n) % 50257).astype('<u2').tobytes()


SHARDS = {'fineweb_train_000001.bin': shard(5000), 'fineweb_train_000002.bin': shard(4000, 5000),
          'fineweb_val_000000.bin': shard(3000, 9000)}


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    trouble = ''  # with the second training shard: 404, wrong, truncates, stalls
    served = ()

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        name = self.path.rsplit('/', 1)[-1]
        if self.path.startswith('/api/'):
            files = [{'rfilename': name, 'size': len(data),
                      'lfs': {'sha256': hashlib.sha256(data).hexdigest(), 'size': len(data),
                              'pointerSize': 130}} for name, data in SHARDS.items()]
            self.answer(json.dumps({'id': 'kjj0/fineweb10B-gpt2', 'sha': 'a' * 40,
                                    'siblings': files}).encode())
            return
        data, trouble = SHARDS[name], self.trouble if name == 'fineweb_train_000002.bin' else ''
        if trouble == '404':
            self.answer(b'', 404)
        elif trouble == 'wrong':
            self.answer(bytes(len(data)))
        elif trouble and self.command == 'GET':
            self.answer(data[:1000], length=len(data))
            if trouble == 'stalls':
                time.sleep(2)  # longer than the client waits
            self.close_connection = True
        else:
            self.answer(data)

    def answer(self, data, status=200, length=None):
        self.send_response(status)
        self.send_header('Content-Length', str(length or len(data)))
        self.send_header('ETag', f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header('X-Repo-Commit', 'a' * 40)
        self.end_headers()
        if self.command == 'GET':
            type(self).served += (self.path,)
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """(a class whose `trouble` can be set, its address)"""
    handler = type('ThisHub', (Hub,), {})
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield handler, f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    server.server_close()


@pytest.fixture
def gpt2(monkeypatch):
    if not (SHARED / 'tiktoken_cache').exists():
        pytest.skip("tiktoken's files are not there (PLAINGPT_SHARED)")
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(SHARED / 'tiktoken_cache'))


@pytest.mark.parametrize('trouble', [
    '404', pytest.param('truncates', marks=pytest.mark.slow)])  # the library tries five times
def test_a_download_that_fails_is_one_line_and_goes_on_later(
        trouble, hub, gpt2, tmp_path, capsys, monkeypatch):
    handler, address = hub
    for name in ('HfApi', 'hf_hub_download'):
        monkeypatch.setattr(huggingface_hub, name,
                            partial(getattr(huggingface_hub, name), endpoint=address))
    monkeypatch.setattr(logging.getLogger('huggingface_hub.file_download'), 'disabled', True)
    argv = ['fineweb10B-gpt2', f'--data_dir={tmp_path}/d']
    handler.trouble = trouble
    message = fails(capsys, monkeypatch, prepare.main, *argv)
    assert 'kjj0/fineweb10B-gpt2' in message
    assert not list((tmp_path / 'd').glob('*.bin')) and not (tmp_path / 'd/meta.json').exists()
    assert not (tmp_path / 'd/unfinished/fineweb_train_000002.bin').exists()
    handler.trouble, handler.served = '', ()
    prepare.main(argv)
    assert not any('000001' in path for path in handler.served)  # it was there already
    assert {name: (tmp_path / 'd' / name).read_bytes() for name in SHARDS} == SHARDS
    stream = open_dataset(tmp_path / 'd').split('train')
    assert stream.sequences(np.array([4998]), 4).tolist() == [[4998, 4999, 5000, 5001]]


def test_shards_are_used_where_they_lie(gpt2, tmp_path, monkeypatch, capsys):
    (tmp_path / 'mine').mkdir()
    for name, data in SHARDS.items():
        (tmp_path / 'mine' / name).write_bytes(data)
    argv = ['fineweb10B-gpt2', f'--input={tmp_path}/mine', f'--data_dir={tmp_path}/d']
    prepare.main([*argv, '--max_shards=1'])
    dataset = open_dataset(tmp_path / 'd')
    assert len(dataset.split('train')) == 5000 and len(dataset.split('val')) == 3000
    assert dataset.bytes_per_token('train') is None
    argv.append('--overwrite')
    prepare.main(argv)
    assert len(open_dataset(tmp_path / 'd').split('train')) == 9000
    assert (tmp_path / 'd/fineweb_val_000000.bin').is_symlink()
    prepare.main(['inspect', str(tmp_path / 'd')])
    assert '9,000 tokens in 2 files' in capsys.readouterr().out
    (tmp_path / 'mine/fineweb_val_000000.bin').unlink()
    assert 'val split would be empty' in fails(capsys, monkeypatch, prepare.main, *argv)


def test_a_text_that_does_not_arrive_or_is_another_is_refused(hub, tmp_path, capsys, monkeypatch):
    handler, address = hub
    text = b'To be, or not to be. ' * 100
    monkeypatch.setitem(SHARDS, 'fineweb_train_000002.bin', text)
    monkeypatch.setitem(CORPORA, 'plays', Corpus(
        'plays', 'char', url=f'{address}/fineweb_train_000002.bin',
        sha256=hashlib.sha256(text).hexdigest()))
    argv = ['plays', f'--data_dir={tmp_path}/d']
    for trouble in ('404', 'truncates', 'stalls', 'wrong'):
        handler.trouble = trouble
        monkeypatch.setattr(sources, 'DOWNLOAD_TIMEOUT', 0.5 if trouble == 'stalls' else 30)
        message = fails(capsys, monkeypatch, prepare.main, *argv)
        assert address in message and '--input=FILE' in message, trouble
        assert ('checksum' in message) == (trouble == 'wrong')
        assert not (tmp_path / 'd').exists()
    handler.trouble = ''
    prepare.main(argv)
    assert len(open_dataset(tmp_path / 'd').split('train')) == 0.9 * len(text)
