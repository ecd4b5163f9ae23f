"""Commands in forks whose standard streams are closed, broken or full; and small disks."""

import ctypes
import io
import os
import pty
import subprocess
import sys
import traceback
from pathlib import Path

from plaingpt.system.errors import run_script


def connect(number, kind, log):
    """Make a descriptor of this process closed, broken, full, gone (a terminal), or a log."""
    if kind == 'closed':
        os.close(number)
        return
    if kind == 'broken':
        reader, fd = os.pipe()
        os.close(reader)
    elif kind == 'gone':
        master, fd = pty.openpty()
        os.close(master)
    else:
        fd = os.open('/dev/full' if kind == 'full' else log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, number)


def python_streams(encoding):
    """Make sys.stdin, stdout and stderr as Python does when it starts."""
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        try:
            raw = io.FileIO(number, 'w' if number else 'r', closefd=False)
        except OSError:
            setattr(sys, name, None)
        else:
            buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
            setattr(sys, name, io.TextIOWrapper(buffer, encoding, errors='strict'))


def start(main, argv, log, kinds=('log', 'log', 'log'), encoding='utf-8'):
    """Run a command in a fork, as a script of its own → process id. kinds: of its streams."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            # those that are closed come last, or the next file that is opened is one of them
            for number in sorted(range(3), key=lambda number: kinds[number] == 'closed'):
                connect(number, kinds[number], log)
            python_streams(encoding)
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
