"""Run the commands: in this process, in forks of it, in jobs, in a copy of the project."""

import faulthandler
import itertools
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
from tqdm import tqdm

from plaingpt.system.errors import run_script

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 600  # with a process that takes seconds: other programs may use the cores


def tracked_files():
    """The files that git tracks; [] where it is missing, or does not trust whose folder this is."""
    if not shutil.which('git'):
        return []
    return subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True,
                          text=True).stdout.splitlines()


needs_git = pytest.mark.skipif(not tracked_files(), reason='git has no checkout here')


def copy_project(folder):
    """Copy what a checkout has of code → the folder, which must not exist."""
    for name in ('plaingpt', 'tests', 'tools', 'config', 'docs/references'):
        shutil.copytree(ROOT / name, folder / name,
                        ignore=shutil.ignore_patterns('__pycache__'))
    for path in (*ROOT.glob('*.py'), *ROOT.glob('*.toml'), ROOT / 'README.md', ROOT / 'LICENSE'):
        shutil.copy(path, folder)
    return folder


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


def run(*command, cwd=None, typed=''):
    """Run a command as a user would, who types text into it → its stdout. Fails the test if it
    fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, input=typed, text=True,
                          capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fork(main, *argv, log, before=None, **env):
    """Run a command's `main` in a fork of this process, as a user would run its script → the
    process id. log: file of all that it prints; before: called first; env: added variables."""
    pid = os.fork()
    if pid:
        return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (open(fd, 'w', buffering=1, closefd=False) for fd in (1, 2))
    sys.argv = ['script.py', *map(str, argv)]
    os.environ.update(env)
    # Also where the tests run under nohup, and after a library has set a handler in this process.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # No process outlives a test that fails; one that hangs says where.
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=2)
    tqdm.set_lock(threading.RLock())  # its own is shared with forks, which may be killed with it
    code = 0
    try:
        if before:
            before()
        run_script(main)
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def fork_job(main, processes, folder, *argv, before=None, missing=()):
    """As fork, in the processes of one job, or in one that is no job; `missing` ones never come
    → {rank: process id}, {rank: file of all that it prints, folder/log0, …}"""
    envs = ranks(processes) if processes > 1 else [{}]
    logs = {rank: folder / f'log{rank}' for rank in range(processes) if rank not in missing}
    return {rank: fork(main, *argv, log=log, before=before, **envs[rank])
            for rank, log in logs.items()}, logs


def launch(main, processes, folder, *argv, before=None):
    """The same, to the end → what rank 0 printed. Fails the test where one fails."""
    pids, logs = fork_job(main, processes, folder, *argv, before=before)
    codes = [exit_code(pid) for pid in pids.values()]
    assert codes == [0] * processes, [log.read_text() for log in logs.values()]
    return logs[0].read_text()


def die_before_change(n, within):
    """End this process with exit code 9 before its n-th change of a path that has `within` in it.
    """
    count = itertools.count(1)

    def hook(event, arguments):
        changes = event in ('os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.link') or (
            event == 'open' and type(arguments[2]) is int and arguments[2] & os.O_CREAT)
        if changes and within in str(arguments[0]) and next(count) == n:
            os._exit(9)
    sys.addaudithook(hook)


def run_copy(folder, script, *argv):
    """Run a script of a copy of the project in a fork of this process, which saves importing torch
    → (exit code, all that it printed)"""
    def main(argv):
        for name in list(sys.modules):
            if str(ROOT) in (getattr(sys.modules[name], '__file__', None) or '') \
                    and 'site-packages' not in sys.modules[name].__file__:
                del sys.modules[name]
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if path != str(ROOT))]
        runpy.run_path(script, run_name='__main__')
    log = Path(folder, 'log')
    return exit_code(fork(main, *argv, log=log)), log.read_text()


def exit_code(pid):
    """Wait for a process of `fork` → its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(condition):
    """Wait for another process to bring it about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ranks(size):
    """The environment of each process of a job that is started without torchrun."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]  # which is free
    return [dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                 LOCAL_WORLD_SIZE=str(size), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
            for rank in range(size)]
