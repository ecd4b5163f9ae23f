"""How a script runs, and what it says: results, warnings, how far long work is, and, for a mistake
that the user can fix, one line and exit code 2."""

import os
import re
import signal
import sys
import time
from contextlib import contextmanager

from tqdm import tqdm

from plaingpt.system.formatting import one_line
from plaingpt.system.machine import cores_shared, limit_threads


class UserError(Exception):
    """A mistake that the user can fix. The message names what, where and the fix.

    A message of several lines is several problems found at once, one a line.
    """


@contextmanager
def needs(package, what):
    """Import an optional package in here. Where it is absent, UserError says how to get it."""
    try:
        yield
    except ImportError:
        raise UserError(f'{what} needs {package}: pip install {package}') from None


def print_line(line, file=None):
    """Print a line above the progress bars. It is no error if the terminal was closed:
    SIGHUP comes next, and the run saves."""
    file = file or sys.stdout
    try:
        tqdm.write(line, file=file)
    except OSError:
        discard(file)


def discard(stream):
    """Drop all that is printed on a stream from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(line):
    """Print a warning on stderr."""
    print_line(f'warning: {line}', sys.stderr)


def progress_bar(what, total, unit, start=0):
    """A bar that shows how far long work is; in the log of a job, every half a minute.
    total: in `unit`, or None where it is unknown; start: what an earlier run has done"""
    how = {} if sys.stderr.isatty() else dict(ncols=0, delay=30, mininterval=30)
    return tqdm(desc=what, total=total, initial=start, unit_scale=True, miniters=0, leave=False,
                unit=unit if unit == 'B' else f' {unit.strip()}', **how)


def run_script(main):
    """Run `main(argv)`. A UserError, or an error of the operating system, is printed as `error: …`
    on stderr, and the exit code is 2."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, 'reconfigure'):  # a notebook's have none
                stream.reconfigure(errors='replace', line_buffering=True)
        limit_threads()
        with cores_shared():
            main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of one more there would be a traceback
        print_line('interrupted', sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output went away, as in `| head`
        discard(sys.stdout)
        sys.exit(1)
    except Exception as e:
        message = explain(e)
        if message is None:  # our own bug
            raise
        # If all processes fail alike, the first one prints; torchrun stops the others meanwhile.
        time.sleep(0 if os.environ.get('LOCAL_RANK', '0') == '0' else 3)
        for line in '; '.join([message, *getattr(e, '__notes__', [])]).split('\n'):
            print_line(f'error: {line}', sys.stderr)
        sys.exit(2)


def explain(error):
    """The message for an exception that the user can do something about; None for another."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f'{error.filename}: {error.strerror}' if error.filename else str(error)
    if any(kind.__name__ == 'BackendCompilerFailed' for kind in type(error).__mro__):
        return f'torch.compile failed: {one_line(error)}: give --compile=False'
    if isinstance(error, ValueError) and 'embedded null' in str(error):
        return 'the name of a file has a NUL character in it: take it out'
    if is_out_of_memory(error):
        # CUDA's own message is a paragraph: its second sentence says how much.
        tried = re.search(r'[Tt]ried to allocate \S+ \w+', str(error))
        size = f': {tried[0]}' if tried else ''
        if not hasattr(error, 'phase'):
            return f'out of memory{size}: choose smaller sizes, such as --batch_size, or another ' \
                   '--device'
        return f'out of memory ({error.phase}){size}: set a smaller --batch_size (and as many ' \
               'times more --gradient_accumulation_steps, where --total_batch_size does not ' \
               'decide them), --activation_checkpointing=full, or a smaller --block_size or model'
    return None


@contextmanager
def phase(name):
    """A part of a training run, which an error that comes from in here is told to be from."""
    try:
        yield
    except Exception as e:
        e.phase = getattr(e, 'phase', name)  # the innermost
        raise


def is_out_of_memory(error):
    """Whether an error says that a GPU or the machine has no memory left."""
    return isinstance(error, MemoryError) or type(error).__name__ == 'OutOfMemoryError' or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in (
            "can't allocate memory", 'not enough memory', 'out of memory',
            'Storage size calculation over')))
