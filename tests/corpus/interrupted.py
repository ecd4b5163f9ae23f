"""prepare.py killed while it works, by SIGKILL in a process of its own or by an exception here."""

import multiprocessing
import os
import signal
import sys

import pytest

import prepare
from plaingpt.corpus import encoding


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(*argv, calls=0):
    """Start prepare.py as a fork, which kills itself in the place of the `calls`-th change of the
    disk, if not 0. Not with bpe: the threads of its training do not live on in a fork."""
    process = multiprocessing.get_context('fork').Process(target=run, args=(calls, *argv))
    process.start()
    return process


def exit_code(*argv, calls=0):
    """Run `start` to its end → its exit code."""
    process = start(*argv, calls=calls)
    process.join()
    return process.exitcode


def run(calls, *argv):
    signal.alarm(100)  # no process outlives a test that fails
    left = [calls]
    for name in ('replace', 'fsync', 'truncate', 'unlink'):
        setattr(os, name, dying(getattr(os, name), left))
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    encoding.BATCH_CHARS = 2**13  # so that few documents are many batches
    prepare.main(list(argv))


def dying(function, left):
    def call(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call


def stop_early(monkeypatch, argv):
    """Run `argv` here until its second journal, as if killed there."""
    class Killed(BaseException):
        pass

    real, written = encoding.write_journal, []

    def write_journal(path, value):
        real(path, value)
        written.append(path)
        if len(written) == 2:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(encoding, 'write_journal', write_journal)
        patch.setattr(encoding, 'BATCH_CHARS', 2**13)
        prepare.main(argv)
