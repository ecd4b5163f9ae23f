"""A stand-in of the Hugging Face hub: a server on this machine, which the hub's own clients ask.

    def test_…(hub):                                             # the fixture of conftest.py
        save_model(hub.model('OWNER/NAME'), 'qwen')              # write files into its folder
        (hub.dataset('OWNER/NAME') / 'train.jsonl').write_text(…)
        sample.main(['--init_from=OWNER/NAME'])

conftest.py starts one hub for all tests of a process, before any client is imported, and sets
HF_ENDPOINT and HF_HOME. So main(argv) in this process, forks and processes that it starts all ask
this hub, and no test meets the internet. It begins each test that takes `hub` with no repository
and an empty cache; `with HUB.emptied():` does the same for a fixture of many tests.

    hub.model(name), hub.dataset(name)  the folder of a repository, which is made at the first call;
                                        'OWNER/NAME@REVISION' is one of another branch than main
    hub.url, hub.home                   HF_ENDPOINT and HF_HOME
    hub.requests                        ['GET /OWNER/NAME/resolve/…/config.json', …]
    hub.gate(name, token)               give its files to those alone who send this token
    hub.fail_after(size, times, within) reset the connection when it sent `size` more bytes of files
                                        with `within` in their path, and all connections from then
                                        on, or `times` in all
    hub.failures                        how many connections it reset
    hub.recover()                       answer again
    hub.forget()                        empty the cache of the clients, as on another machine

gpt2 is at 'openai-community/gpt2'. A name without a repository is answered as the hub answers one
who is not logged in: 401, because it may be private.
"""

import hashlib
import json
import math
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

# the API: /api/models/OWNER/NAME/tree/REVISION/PATH; files: /OWNER/NAME/resolve/REVISION/PATH
URL = re.compile('/(?:api/)?(?:(models|datasets)/)?([^/]+/[^/]+)'
                 '(?:/(revision|tree|paths-info|resolve)/([^/]+)/?(.*))?')


class Hub:
    """The server, with its repositories in a temporary folder."""

    def __init__(self):
        self._temporary = tempfile.TemporaryDirectory(prefix='hub-')  # removed at the end
        self.root, self.home = Path(self._temporary.name, 'repos'), Path(self._temporary.name, 'hf')
        self._server = Server(('127.0.0.1', 0), Handler)
        self._server.hub = self
        self.url = f'http://127.0.0.1:{self._server.server_port}'
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._empty()

    def _empty(self):
        shutil.rmtree(self.root, ignore_errors=True)
        self.folders, self.tokens, self.requests, self.failures = {}, {}, [], 0
        self.recover()
        self.forget()

    @contextmanager
    def emptied(self):
        self._empty()
        try:
            yield self
        finally:
            self._empty()

    def model(self, name):
        return self._folder('models', name)

    def dataset(self, name):
        return self._folder('datasets', name)

    def _folder(self, kind, name):
        name, _, revision = name.partition('@')
        folder = self.root / kind / name / (revision or 'main').replace('/', '-')
        folder.mkdir(parents=True, exist_ok=True)
        self.folders[kind, name, revision or 'main'] = folder
        return folder

    def find(self, kind, name, revision):
        """The folder of a branch or a commit of a repository, or None."""
        branches = {branch: folder for (*repo, branch), folder in self.folders.items()
                    if repo == [kind, name]}
        commits = {commit_of(folder): folder for folder in branches.values()}
        return (branches | commits).get(revision)

    def gate(self, name, token):
        self.tokens[name] = f'Bearer {token}'

    def fail_after(self, size, times=math.inf, within=''):
        self.size_left, self.failures_left, self.within = size, times, within

    def recover(self):
        self.fail_after(math.inf)

    def forget(self):
        shutil.rmtree(self.home, ignore_errors=True)
        if client := sys.modules.get('huggingface_hub'):
            client.HfFileSystem.clear_instance_cache()  # what it knows of folders


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client may close a connection whenever it has read enough."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'  # which keeps connections

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.hub = self.server.hub
        sent = self.rfile.read(int(self.headers.get('Content-Length', 0))).decode()
        self.hub.requests.append(f'{self.command} {self.path}')
        if self.hub.size_left <= 0 and self.hub.failures_left > 0:
            return self.reset()
        url = urlsplit(self.path)
        if not (parts := URL.fullmatch(url.path)):
            return self.answer(404, {'error': 'Not found'})
        kind, name, what, revision, path = (unquote(part or '') for part in parts.groups())
        folder = self.hub.find(kind or 'models', name, revision or 'main')
        if not folder:
            is_known = self.hub.find(kind or 'models', name, 'main')
            self.answer(404 if is_known else 401, {'error': 'Invalid username or password.'},
                        {'X-Error-Code': 'RevisionNotFound' if is_known else 'RepoNotFound'})
        elif what == 'resolve':
            self.answer_file(folder, path, name)
        elif what == 'tree' and not (folder / path).is_dir():
            self.answer(404, {'error': 'Not found'}, {'X-Error-Code': 'EntryNotFound'})
        elif what == 'tree':
            deep = parse_qs(url.query.lower()).get('recursive') == ['true']
            found = sorted((folder / path).rglob('*') if deep else (folder / path).iterdir())
            self.answer(200, [entry_of(each, folder) for each in found])
        elif what == 'paths-info':
            asked = [folder / each for each in parse_qs(sent).get('paths', ())]
            self.answer(200, [entry_of(each, folder) for each in asked if each.exists()])
        else:
            files = [{'rfilename': each['path']} for each in
                     (entry_of(path, folder) for path in sorted(folder.rglob('*')))
                     if each['type'] == 'file']
            self.answer(200, {'id': name, 'sha': commit_of(folder), 'siblings': files})

    do_HEAD = do_POST = do_GET

    def answer_file(self, folder, path, name):
        headers = {'X-Repo-Commit': commit_of(folder)}
        if (token := self.hub.tokens.get(name)) and token != self.headers.get('Authorization'):
            code = 403 if 'Authorization' in self.headers else 401
            return self.answer(code, {}, headers | {'X-Error-Code': 'GatedRepo'})
        if not (folder / path).is_file():
            return self.answer(404, {}, headers | {'X-Error-Code': 'EntryNotFound'})
        data = (folder / path).read_bytes()
        headers |= {'ETag': f'"{oid_of(folder / path)}"', 'Accept-Ranges': 'bytes'}
        if not (asked := re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))):
            return self.answer(200, data, headers)
        start, size = int(asked[1]), len(data)
        data = data[start:int(asked[2]) + 1 if asked[2] else size]
        self.answer(206, data, headers | {
            'Content-Range': f'bytes {start}-{start + len(data) - 1}/{size}'})

    def answer(self, code, content, headers=()):
        """content: the bytes of a file, or what becomes JSON"""
        is_file = isinstance(content, bytes)
        body = content if is_file else json.dumps(content).encode()
        self.send_response(code)
        for key, value in {'Content-Length': len(body), **dict(headers)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == 'HEAD':
            return
        if not is_file or self.hub.within not in self.path:
            self.wfile.write(body)
        elif len(body) <= self.hub.size_left:
            self.wfile.write(body)
            self.hub.size_left -= len(body)
        else:
            self.wfile.write(body[:self.hub.size_left])
            self.hub.size_left = 0
            self.reset()

    def reset(self):
        """Close the connection as a machine that dies does."""
        self.hub.failures += 1
        self.hub.failures_left -= 1
        if self.hub.failures_left <= 0:
            self.hub.recover()
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        self.connection.close()


def entry_of(path, folder):
    is_file = path.is_file()
    return {'type': 'file' if is_file else 'directory', 'oid': oid_of(path),
            'size': path.stat().st_size if is_file else 0,
            'path': path.relative_to(folder).as_posix()}


def oid_of(path):
    """What changes when a file does."""
    status = path.stat()
    return hashlib.sha1(f'{path} {status.st_size} {status.st_mtime_ns}'.encode()).hexdigest()


def commit_of(folder):
    return hashlib.sha1(''.join(map(oid_of, sorted(folder.rglob('*')))).encode()).hexdigest()


HUB = Hub()
assert not {'huggingface_hub', 'datasets'} & sys.modules.keys()  # which read this when imported
os.environ.update(HF_ENDPOINT=HUB.url, HF_HOME=str(HUB.home), HF_HUB_DISABLE_TELEMETRY='1',
                  HF_UPDATE_DOWNLOAD_COUNTS='0', HF_HUB_DISABLE_PROGRESS_BARS='1',
                  NO_PROXY='127.0.0.1', no_proxy='127.0.0.1')  # no proxy between it and them
