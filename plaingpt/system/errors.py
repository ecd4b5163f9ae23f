"""How a script begins and ends. A mistake that the user can fix ends it with one line."""

import errno
import os
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress

from plaingpt.system.formatting import printable
from plaingpt.system.machine import crowded_cores, limit_threads
from plaingpt.system.streams import StdoutError, prepare_streams, status

# what to do where the system refuses a file
FIXES = {**dict.fromkeys((errno.ENOSPC, errno.EDQUOT), 'make room and start again'),
         **dict.fromkeys((errno.EACCES, errno.EPERM), 'allow it, or name another place')}


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


def begin_script(loading='loading torch'):
    """Call this before the imports, which take seconds: a terminal says so, and Ctrl-C ends them.
    run_script follows. loading: what a terminal shows, '' where nothing large is imported"""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: nohup
        signal.signal(signal.SIGINT, leave_at_once)
    limit_threads()
    prepare_streams()
    status.start()
    if not {'--help', '-h'} & set(sys.argv):
        status.show(loading)


def leave_at_once(*_):
    """Ctrl-C while modules are imported. Nothing is open yet, and a KeyboardInterrupt in there ends
    in whatever the module that is loaded just then makes of it."""
    with suppress(OSError):
        os.write(2, b'\r\x1b[Kinterrupted\n' if status.is_shown else b'interrupted\n')
    os._exit(130)


def run_script(main):
    """Run `main(argv)` → exit code 2, and `error: …` on stderr, for a `UserError` and for what the
    system refuses. What cannot be printed stops no script but one that called `require_stdout`.
    """
    prepare_streams()
    status.start()
    try:
        if signal.getsignal(signal.SIGINT) is leave_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status.show('')
        crowded_cores.start()
        try:
            main(sys.argv[1:])
        finally:
            crowded_cores.stop()
            status.stop()
            sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one must not end in a traceback
        print('\n' * sys.stderr.isatty() + 'interrupted', file=sys.stderr)  # below the ^C
        sys.exit(130)
    except StdoutError as e:
        if e.error.errno != errno.EPIPE:  # the reader went away, as in `| head`: it wants no more
            print_error(f'standard output: {e.error.strerror}')
        sys.exit(1)
    except Exception as e:
        message = explain(e)
        if message is None:  # our own bug
            raise
        print_error(message)
        sys.exit(2)


def explain(error):
    """The message for an exception that the user can do something about; None for another."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        parts = [error.filename, error.strerror or error, FIXES.get(error.errno)]
        return ': '.join(os.fsdecode(part) if isinstance(part, bytes) else str(part)
                         for part in parts if part is not None)
    if is_out_of_memory(error):
        # CUDA's own message is a paragraph: its second sentence says how much.
        tried = re.search(r'[Tt]ried to allocate \S+ \w+', str(error))
        what = tried[0] if tried else ' '.join(str(error).split())[:200]
        return f'out of memory{f": {what}" if what else ""}: choose smaller sizes, such as ' \
               '--batch_size, or another --device'
    return None


def is_out_of_memory(error):
    """Whether an error says that a GPU or the machine has no memory left."""
    return isinstance(error, MemoryError) or type(error).__name__ == 'OutOfMemoryError' or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in (
            "can't allocate memory", 'Storage size calculation over')))


def print_error(message):
    """Print `error: …` on stderr for each line of a message."""
    # Where every process fails alike, one speaks for its host: torchrun stops the others meanwhile.
    time.sleep(0 if os.environ.get('LOCAL_RANK', '0') == '0' else 3)
    for line in message.split('\n'):
        print(printable(f'error: {line}'), file=sys.stderr, flush=True)
