"""Standard streams that work wherever a script runs: closed or broken ones, a log on a full disk, a
terminal that lacks a character, text that would command the terminal. And a terminal's last line,
which says what a script does now, or lines of a log that say how far it is."""

import codecs
import io
import os
import select
import sys
import threading
import time
from contextlib import contextmanager, suppress

from tqdm import tqdm

from plaingpt.system.formatting import amount, duration, printable

PLAIN = {'→': '->', '…': '...', '×': 'x', '±': '+-', '━': '#', '─': '-'}  # in ASCII
REDRAW_S = 0.1  # between two counts in the status line
LINE_S = 30  # between two lines on how far a script is, where stderr is no terminal


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


class StatusLine:
    """The last line of a terminal: where the work stands. What is printed goes above it.

    It is shown where stdout and stderr are both a terminal, by rank 0. Elsewhere this does nothing.
    """

    def __init__(self):
        self.stream = None  # the terminal, where the line is shown
        self.base = self.detail = ''  # what `show` set
        self.parts = {}  # key → what is done now; the innermost is the last
        self.held = ''  # what `hold` set
        self.drawn = ''
        self.line_is_taken = False  # by text without a line end, such as a progress bar
        self.lock = threading.RLock()  # a save in the background may print, too

    def start(self):
        """Be shown from here on, where there is a terminal."""
        if sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get('RANK', '0') == '0' \
                and isinstance(sys.stderr, Stream):
            self.stream = sys.stderr

    def stop(self):
        """Leave the terminal without a status line for good."""
        with self.lock:
            self.clear()
            self.stream = None

    def show(self, text, detail=''):
        """Set what the line begins with, and what it ends with where nothing else is `doing`."""
        self.base, self.detail = text, detail
        self.draw()

    def hold(self, what):
        """Let the line begin with `what`, whatever else it says. For a signal handler."""
        self.held = what
        self.draw()

    @contextmanager
    def doing(self, what):
        """A context, or a decorator, in which the line ends with `what`."""
        key = object()  # a generator that uses this may be closed out of order
        self.parts[key] = what
        self.draw()
        try:
            yield
        finally:
            del self.parts[key]
            self.draw()

    @contextmanager
    def timed(self, what):
        """As `doing`, with the seconds so far."""
        key, over = object(), threading.Event()

        def tick():
            began = time.perf_counter()
            while True:
                self.parts[key] = f'{what}, {time.perf_counter() - began:.0f} s'
                self.draw()
                if over.wait(1):
                    return

        thread = threading.Thread(target=tick, name='status', daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            del self.parts[key]
            self.draw()

    def counted(self, items):
        """Yield the items of a sequence; meanwhile the line ends with how many are done."""
        key, drawn_at = object(), 0.0
        try:
            for n, item in enumerate(items):
                self.parts[key] = f'{n}/{len(items)}'
                if time.perf_counter() > drawn_at + REDRAW_S:
                    drawn_at = time.perf_counter()
                    self.draw()
                yield item
        finally:
            self.parts.pop(key, None)

    def draw(self):
        if self.stream is None:
            return
        with self.lock:
            if self.line_is_taken:
                return
            columns = 0
            with suppress(OSError):  # the terminal may be gone
                columns = os.get_terminal_size(self.stream.fileno()).columns
            # A line that reaches the last column may wrap, and could not be cleared then.
            now = ': '.join(list(self.parts.values())) or self.detail
            line = (self.held + ' | '.join(filter(None, (self.base, now))))[:(columns or 80) - 1]
            if line != self.drawn:
                self.stream.write_directly('\r\x1b[K' + line)
                self.drawn = line

    def clear(self):
        if self.drawn:
            self.stream.write_directly('\r\x1b[K')
            self.drawn = ''

    def print_above(self, write, text):
        """write(text), to the same terminal."""
        with self.lock:
            self.clear()
            written = write(text)
            if text:
                self.line_is_taken = not text.endswith(('\n', '\r'))
            self.draw()
            return written


status = StatusLine()


class Progress:
    """How far a loop is: a bar on a terminal; elsewhere a line on stderr every LINE_S seconds, for
    the log of a job. A context."""

    def __init__(self, what, total, unit, start=0):
        """total: in `unit`, or None where it is unknown; start: what an earlier run has done"""
        self.what, self.total, self.unit, self.start = what, total, unit.strip(), start
        self.began = self.printed = time.monotonic()
        self.bar = tqdm(total=total, initial=start, unit_scale=True, disable=None,
                        unit='B' if self.unit == 'B' else f' {self.unit}', leave=False, desc=what)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()

    def advance_to(self, position, tokens=None):
        """tokens: made since the start, where they are not what is counted"""
        if not self.bar.disable:
            self.bar.update(position - self.bar.n)
        elif time.monotonic() - self.printed >= LINE_S:
            self.printed = time.monotonic()
            print(self.line(position, tokens), file=sys.stderr, flush=True)

    def line(self, position, tokens=None):
        """'encoding: 34% of 1.20 GB, 5.30M tokens, 410k tokens/s, 5m10s left'"""
        seconds = max(time.monotonic() - self.began, 1e-9)
        done = position - self.start
        made, unit = (done, self.unit) if tokens is None else (tokens, 'tokens')
        return f'{self.what}: ' + ', '.join(filter(None, (
            f'{100 * position / self.total:.0f}% of {amount(self.total, self.unit)}'
            if self.total else amount(position, self.unit),
            tokens is not None and amount(tokens, 'tokens'),
            f'{amount(made / seconds, unit)}/s',
            self.total and done > 0 and
            f'{duration(seconds * max(self.total - position, 0) / done)} left')))


class Stream(io.TextIOWrapper):
    """Leaves the last line of a terminal to `status`."""

    def write(self, text):
        if status.stream is None:
            return super().write(text)
        return status.print_above(super().write, text)

    def write_directly(self, text):
        super().write(text)
        self.flush()


class Printer(Stream):
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
    sys.stderr = protected(sys.stderr, Stream)  # progress bars go back over their line


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


def print_marked(parts):
    """Print (text, is_marked) after each other, with control characters shown; what is marked is
    green on a terminal, and in brackets elsewhere."""
    begin, end = ('\x1b[32m', '\x1b[0m') if sys.stdout.isatty() else '[]'
    line = ''.join(begin + printable(text) + end if is_marked else printable(text)
                   for text, is_marked in parts)
    if isinstance(sys.stdout, Printer):  # whose own write() would show the colours too
        Stream.write(sys.stdout, line + '\n')
    else:
        print(line)


def warn(line):
    """Print a warning on stderr."""
    print(printable(f'warning: {line}'), file=sys.stderr, flush=True)


def let_go_of_stalled_output():
    """Where nobody reads what this process prints (`| less`, a stopped terminal), a print waits for
    ever. Its output, and all that follows, goes nowhere from now on, so that the run can save."""
    for fd in (1, 2):
        with suppress(OSError, ValueError):
            if not select.select([], [fd], [], 0)[1]:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)
