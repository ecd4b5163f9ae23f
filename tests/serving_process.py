"""A server in a process of its own."""

import json
import os
import re
import signal
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

import pytest
from helpers import exit_code, fork, wait_until

import serve


class Running:
    """A server in a process of its own."""

    def __init__(self, pid, log):
        self.pid, self.log = pid, log
        wait_until(lambda: 'Ctrl-C' in log.read_text())
        self.port = int(re.search(r'http://[^/]*:(\d+)/', log.read_text())[1])
        self.url = f'http://127.0.0.1:{self.port}'

    def post(self, path, body, headers=None):
        """→ (status, JSON, headers). body: bytes as they are, or a value"""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {
            'Content-Type': 'application/json', **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response), dict(response.headers)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e), dict(e.headers)

    def complete(self, prompt='def ', model='out', **options):
        return self.post('/v1/completions', {'model': model, 'prompt': prompt, **options})

    def files(self):
        return len(os.listdir(f'/proc/{self.pid}/fd'))

    def stop(self, number=signal.SIGINT):
        os.kill(self.pid, number)
        return exit_code(self.pid)


@contextmanager
def serving(folder, out_dir, **options):
    pytest.importorskip('starlette', reason='needs starlette: pip install starlette')
    pytest.importorskip('uvicorn', reason='needs uvicorn: pip install uvicorn')
    log = folder / 'server.log'
    options = {'out_dir': out_dir, 'checkpoint': 'latest', 'port': 0, 'device': 'cpu', **options}
    (folder / 'server.log').touch()
    running = Running(fork(serve.main, *(f'--{key}={value}' for key, value in options.items()),
                           log=log, before=lambda: signal.alarm(300)), log)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            running.stop(signal.SIGKILL)
