"""Standard streams that work wherever a script runs: closed or broken ones, a log on a full disk, a
terminal that lacks a character, text that would command the terminal."""

import codecs
import io
import os
import sys
from contextlib import suppress

from plaingpt.system.formatting import printable

PLAIN = {'→': '->', '…': '...', '×': 'x', '±': '+-', '━': '#', '─': '-'}  # in ASCII


class StdoutError(Exception):
    """Standard output failed in a script whose work it is. `errno` and `strerror` say why."""

    def __init__(self, error):
        super().__init__(error)
        self.errno, self.strerror = error.errno, error.strerror


class Descriptor(io.RawIOBase):
    """Writes to the file of a stream. What the file refuses is lost, and nobody stops; later text
    arrives where it can. Where it is `required`, the first refusal raises StdoutError."""

    def __init__(self, stream):
        self.stream = stream  # which would close its file if nobody held it
        self.raw = getattr(stream.buffer, 'raw', stream.buffer)  # python -u has no buffer
        self.name = self.raw.name
        self.required = False

    def write(self, data):
        try:
            return self.raw.write(data) or len(data)
        except OSError as e:
            if self.required:
                self.required = False  # what is in the buffers must not fail again at the exit
                raise StdoutError(e) from None
            return len(data)

    def writable(self):
        return True

    def fileno(self):
        return self.raw.fileno()

    def isatty(self):
        return self.raw.isatty()


class Printer(io.TextIOWrapper):
    """Shows control characters instead of passing them on, unless told to be `verbatim`."""

    verbatim = False

    def write(self, text):
        return super().write(text if self.verbatim else printable(text))


def prepare_streams():
    """Make print, warnings and progress bars safe: from here on they neither raise nor write into
    a file that happens to have the number of a closed stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: open() would give its number to the next file
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    codecs.register_error('plain', lambda e: (
        ''.join(PLAIN.get(c, '?') for c in e.object[e.start:e.end]), e.end))
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding='utf-8')
    sys.stdout = protected(sys.stdout, Printer)
    sys.stderr = protected(sys.stderr, io.TextIOWrapper)  # progress bars go back over their line


def protected(stream, kind):
    """A stream of this kind to the same file; a notebook's own or one in memory stays as it is."""
    if stream is None:
        stream = open(os.devnull, 'w', encoding='utf-8')
    raw = getattr(stream, 'buffer', None)
    raw = getattr(raw, 'raw', raw)
    if not isinstance(raw, io.RawIOBase) or isinstance(raw, Descriptor):
        return stream
    with suppress(OSError):
        stream.flush()
    return kind(io.BufferedWriter(Descriptor(stream)), encoding=stream.encoding, errors='plain',
                line_buffering=True)


def require_stdout(verbatim=False):
    """Say that what the script prints is its work: it ends where stdout fails.

    verbatim: keep control characters where stdout is no terminal
    """
    if isinstance(sys.stdout, Printer):
        sys.stdout.buffer.raw.required = True
        sys.stdout.verbatim = verbatim and not sys.stdout.isatty()


def warn(line):
    """Print a warning on stderr."""
    print(printable(f'warning: {line}'), file=sys.stderr, flush=True)
