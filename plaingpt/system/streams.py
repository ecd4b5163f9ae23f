"""What a script prints: standard streams that may be full or broken, text of others with control
characters, a terminal's last line, and progress bars."""

import io
import os
import select
import sys
import threading
from contextlib import contextmanager, suppress

from tqdm import tqdm

from plaingpt.system.formatting import printable, short

LOG_INTERVAL_S = 30  # between two lines of a ProgressBar, where stderr is no terminal

# -----------------------------------------------------------------------------
# standard streams


class StdoutError(Exception):
    """Standard output failed in a script that `require_stdout`. error: the OSError"""

    def __init__(self, error):
        self.error = error


class TolerantFile(io.FileIO):
    """A standard stream's file. What it refuses is lost, and the script goes on; later text arrives
    where it can. Where it is `required`, the first refusal raises StdoutError."""

    required = False

    def write(self, data):
        try:
            return super().write(data) or len(data)
        except OSError as e:
            if self.required:
                self.required = False  # what is in the buffers must not fail again at the exit
                raise StdoutError(e) from None
            return len(data)


class Printer(io.TextIOWrapper):
    """Shows control characters instead of passing them on, unless told to be `verbatim`."""

    verbatim = False

    def write(self, text):
        status.hide()  # until it is drawn anew
        return super().write(text if self.verbatim else printable(text))


def prepare_streams():
    """Let print, warnings and progress bars fail silently where a stream is full or broken, or
    lacks a character."""
    sys.stdout = tolerant(sys.stdout, Printer)
    sys.stderr = tolerant(sys.stderr, io.TextIOWrapper)  # progress bars go back over their line
    # tqdm's own lock is shared with forks, and stays locked where one of them is killed meanwhile.
    tqdm.set_lock(threading.RLock())


def tolerant(stream, kind):
    """A stream of this kind to the same file. A notebook's own, one in memory and a Windows
    console, which takes no UTF-8, stay as they are."""
    raw = getattr(stream.buffer, 'raw', stream.buffer) if type(stream) is io.TextIOWrapper else None
    if type(raw) is not io.FileIO:
        return stream
    with suppress(OSError):
        stream.flush()
    made = kind(io.BufferedWriter(TolerantFile(stream.fileno(), 'w', closefd=False)),
                encoding=stream.encoding, errors='replace', line_buffering=True)
    made.replaced = stream  # which would close its file if nobody held it
    return made


def require_stdout(verbatim=False):
    """Exit if stdout fails. verbatim: keep control characters where stdout is no terminal"""
    if isinstance(sys.stdout, Printer):
        sys.stdout.buffer.raw.required = True
        sys.stdout.verbatim = verbatim and not sys.stdout.isatty()


def discard_stalled_output():
    """Where nobody reads what this process prints (`| less`, a stopped terminal), a print would
    wait for ever. Discard this stream's output from now on, so that the run can save."""
    for fd in (1, 2):
        with suppress(OSError, ValueError):
            if not select.select([], [fd], [], 0)[1]:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)


# -----------------------------------------------------------------------------
# lines


def print_line(line):
    """Print a line above the progress bars, and draw the status line below it."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
    status.draw()


def warn(line):
    """Print a warning on stderr."""
    tqdm.write(printable(f'warning: {line}'), file=sys.stderr)


# -----------------------------------------------------------------------------
# what a script is doing


class StatusLine:
    """The last line of a terminal says what a script is doing. It is shown where stdout and stderr
    are both a terminal, by rank 0."""

    def __init__(self):
        self.is_shown = False
        self.bar = None  # of tqdm, while there is something to say
        self.is_drawn = False
        self.step = self.detail = ''
        self.tasks = []  # what is done now; the innermost is the last

    def start(self):
        self.is_shown = sys.stdout.isatty() and sys.stderr.isatty() \
            and os.environ.get('RANK', '0') == '0'

    def stop(self):
        """Remove the line."""
        self.show('')
        self.is_shown = False

    def show(self, step, detail=''):
        """Set what the line begins with, and what it ends with where nothing is `doing`."""
        self.step, self.detail = step, detail
        self.draw()

    @contextmanager
    def doing(self, task):
        """A context, or a decorator, in which the line ends with `task`."""
        self.tasks.append(task)
        self.draw()
        try:
            yield
        finally:
            self.tasks.remove(task)
            self.draw()

    def draw(self):
        if not self.is_shown:
            return
        now = ': '.join(self.tasks) or self.detail
        line = ' | '.join(filter(None, (self.step, now)))
        with tqdm.get_lock():  # a save in the background may print, too
            if self.bar is None and line:
                self.bar = tqdm(desc=line, bar_format='{desc}', leave=False, dynamic_ncols=True)
            elif self.bar is not None and line:
                self.bar.set_description_str(line, refresh=False)
                self.bar.display()
            elif self.bar is not None:
                self.bar.close()
                self.bar = None
            self.is_drawn = self.bar is not None

    def hide(self):
        if self.is_drawn:
            self.bar.clear()
            self.is_drawn = False


status = StatusLine()


class ProgressBar(tqdm):
    """How far a loop is: a bar on a terminal; elsewhere a line on stderr every LOG_INTERVAL_S, for
    the log of a job."""

    def __init__(self, what, total, unit, start=0):
        """total: in `unit`, or None where it is unknown; start: what an earlier run has done"""
        self.on_terminal = sys.stderr.isatty()
        layout = {} if self.on_terminal else dict(
            ncols=0, delay=LOG_INTERVAL_S, mininterval=LOG_INTERVAL_S)
        super().__init__(desc=what, total=total, initial=start, unit_scale=True, miniters=0,
                         unit='B' if unit == 'B' else f' {unit.strip()}', leave=False, **layout)

    def advance_to(self, position, tokens=None):
        """tokens: made since the start, where they are not what is counted"""
        if tokens is not None:
            self.set_postfix_str(f'{short(tokens)} tokens', refresh=False)
        self.update(position - self.n)

    def display(self, msg=None, pos=None):
        if self.on_terminal:
            return super().display(msg, pos)
        if msg is None:  # '' would clear a bar
            print(self, file=sys.stderr, flush=True)
        return False
