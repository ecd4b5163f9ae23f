"""The download of a text, from a server on loopback."""

import hashlib
import http.server
import threading
import time

import pytest
from helpers import fails

import prepare
from plaingpt.data import sources
from plaingpt.data.corpora import CORPORA, Corpus
from plaingpt.data.dataset import open_dataset


class Server(http.server.BaseHTTPRequestHandler):
    text = b'To be, or not to be. ' * 100
    trouble = ''  # 404, wrong, truncates, stalls

    def do_GET(self):
        self.send_response(404 if self.trouble == '404' else 200)
        self.send_header('Content-Length', str(len(self.text)))
        self.end_headers()
        if self.trouble in ('truncates', 'stalls'):
            self.wfile.write(self.text[:1000])
            if self.trouble == 'stalls':
                time.sleep(2)  # longer than the client waits
        else:
            self.wfile.write(bytes(len(self.text)) if self.trouble else self.text)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """(a class whose `trouble` can be set, its address)"""
    handler = type('ThisServer', (Server,), {})
    here = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=here.serve_forever, args=(0.01,), daemon=True).start()
    yield handler, f'http://127.0.0.1:{here.server_port}'
    here.shutdown()
    here.server_close()


def test_a_text_that_does_not_arrive_or_is_another_is_refused(
        server, tmp_path, capsys, monkeypatch):
    handler, address = server
    text = handler.text
    monkeypatch.setitem(CORPORA, 'plays', Corpus(
        'plays', 'char', url=f'{address}/plays.txt',
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
