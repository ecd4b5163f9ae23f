"""What several test files use."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plaingpt.system.errors import run_script

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get('PLAINGPT_SHARED', ROOT.parent / 'shared'))


def shared_file(name):
    """A file of real text that is beside the checkout on some machines; skips where absent."""
    path = SHARED / 'data' / name
    if not path.exists():
        pytest.skip(f'{path} is not there (PLAINGPT_SHARED names its folder)')
    return path


def options(**values):
    return [f'--{key}={value}' for key, value in values.items()]


def fails(capsys, monkeypatch, main, *argv):
    """Run a script's main, expect exit code 2 and one `error:` line → that line."""
    monkeypatch.setattr(sys, 'argv', ['script', *map(str, argv)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        run_script(main)
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: '), lines
    return lines[0]


def size_of_png(path):
    """(width, height) in pixels."""
    data = path.read_bytes()
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    return int.from_bytes(data[16:20], 'big'), int.from_bytes(data[20:24], 'big')


def run(*command, cwd=ROOT, **env):
    """Run a script of the project as a user would → its stdout. Fails the test if it fails."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, text=True,
                          capture_output=True, env={**os.environ, **env}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(processes, *command, cwd=ROOT, check=True):
    """Run a script under torchrun on a free loopback port."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    done = subprocess.run(
        [sys.executable, '-m', 'torch.distributed.run', f'--nproc_per_node={processes}',
         '--master_addr=127.0.0.1', f'--master_port={port}', *map(str, command)],
        cwd=cwd, text=True, capture_output=True, timeout=300,
        env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


class ForkServer:
    """Runs scripts of any copy of the project, without importing torch anew for each."""

    def __init__(self):
        server = Path(__file__).with_name('fork_server.py')
        self.process = subprocess.Popen([sys.executable, server], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def run(self, folder, script, *argv):
        """→ (exit code, all that it printed)"""
        log = Path(folder, 'log')
        log.unlink(missing_ok=True)
        self.process.stdin.write(json.dumps([script, argv, str(folder), str(log)]) + '\n')
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), log.read_text()

    def close(self):
        self.process.stdin.close()
        self.process.wait()
