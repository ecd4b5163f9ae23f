"""Commands in forks, as scripts of their own; streams that are closed, broken or full; small disks.
"""

import ctypes
import io
import os
import subprocess
import sys
import traceback
from pathlib import Path

from plaingpt.system.errors import run_script


def connect(number, kind, log):
    """Make a descriptor of this process closed, broken, full, or a log."""
    if kind == 'closed':
        os.close(number)
        return
    if kind == 'broken':
        reader, fd = os.pipe()
        os.close(reader)
    else:
        fd = os.open('/dev/full' if kind == 'full' else log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, number)


def python_streams():
    """Make sys.stdin, stdout and stderr as Python does when it starts."""
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        raw = io.FileIO(number, 'w' if number else 'r', closefd=False)
        buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        setattr(sys, name, io.TextIOWrapper(buffer, 'utf-8', errors='strict'))


def start(main, argv, log):
    """Run a command in a fork, as a script of its own → process id. log: of its streams"""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            for number in range(3):
                connect(number, 'log', log)
            python_streams()
            sys.argv = ['script', *argv]
            run_script(main)
            code = 0
        except SystemExit as e:
            code = e.code or 0
        except BaseException:
            traceback.print_exc()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            code = 120  # as Python exits then
        os._exit(code)
    return pid


def small_disk(size_kb, folder):
    """Mount a disk of this size that only this process and its children see. Raises OSError."""
    users, groups = f'0 {os.getuid()} 1', f'0 {os.getgid()} 1'
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x20000):  # CLONE_NEWUSER | NEWNS
        raise OSError(ctypes.get_errno(), 'no namespaces')
    for name, text in (('uid_map', users), ('setgroups', 'deny'), ('gid_map', groups)):
        Path('/proc/self', name).write_text(text)
    folder.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size_kb}k', 'none', folder], check=True)
