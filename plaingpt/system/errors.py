"""Running a script and its console output: results, warnings, progress bars, and for a mistake that
the user can fix, one line and exit code 2."""

import gc
import math
import os
import re
import signal
import sys
import time
from contextlib import contextmanager

from tqdm import tqdm

from plaingpt.system.formatting import one_line
from plaingpt.system.machine import cores_shared, limit_threads, use_huge_pages


class UserError(Exception):
    """A mistake that the user can fix. The message says what is wrong, where, and how to fix it.

    A message may report several problems, one per line.
    """


@contextmanager
def needs(package, feature):
    """A context to import an optional package in. If it is not installed, UserError says how to
    install it."""
    try:
        yield
    except ImportError:
        raise UserError(f'{feature} needs {package}: pip install {package}') from None


def print_line(line, file=None):
    """Print a line above the progress bars. A closed terminal is not an error: SIGHUP follows, and
    the run saves a checkpoint."""
    file = file or sys.stdout
    try:
        tqdm.write(line, file=file)
    except OSError:
        discard(file)


def discard(stream):
    """Discard further output to a stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(line):
    """Print a warning on stderr."""
    print_line(f'warning: {line}', sys.stderr)


def progress_bar(description, total, unit, start=0):
    """A progress bar; in a log file, a line every 30 seconds. total: in `unit`, or None if unknown;
    start: the progress of an earlier run"""
    options = {} if sys.stderr.isatty() else dict(ncols=0, delay=30, mininterval=30)
    return tqdm(desc=description, total=total, initial=start, unit_scale=True, miniters=0,
                leave=False, unit=unit if unit == 'B' else f' {unit.strip()}', **options)


def run_script(main):
    """Run `main(argv)`. A UserError or an OSError is printed as `error: …` on stderr, with exit
    code 2. Ctrl-C ends with exit code 130."""
    interrupted_at = -math.inf

    def interrupt(*_):
        nonlocal interrupted_at
        interrupted_at = time.monotonic()
        raise KeyboardInterrupt

    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        use_utf8()
        limit_threads()
        gc.freeze()  # scanning the imported modules for garbage takes 0.1 s, at exit 0.3 s
        use_huge_pages()
        with cores_shared():
            main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        exit_interrupted()
    except BrokenPipeError:  # the output was closed, as by `| head`
        discard(sys.stdout)
        sys.exit(1)
    except Exception as e:
        message = explain(e)
        if message is None:
            if time.monotonic() - interrupted_at < 1:
                exit_interrupted()  # C code, such as torch.Tensor.copy_, raised it for Ctrl-C
            raise  # our own bug
        # If all processes fail alike, only rank 0 prints: torchrun stops the others meanwhile.
        if os.environ.get('LOCAL_RANK', '0') != '0':
            time.sleep(3)
        for line in '; '.join([message, *getattr(e, '__notes__', [])]).split('\n'):
            print_line(f'error: {line}', sys.stderr)
        sys.exit(2)


def use_utf8():
    """Read and write UTF-8, whatever the code page, except at a terminal, which shows a letter that
    it lacks as '?'."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if not hasattr(stream, 'reconfigure'):  # in a notebook
            continue
        if not stream.isatty():
            stream.reconfigure(encoding='utf-8')
        if stream is not sys.stdin:
            stream.reconfigure(errors='replace', line_buffering=True)


def exit_interrupted():
    """Exit as after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would print a traceback
    print_line('interrupted', sys.stderr)
    sys.exit(130)


def explain(error):
    """The message for an exception that the user can act on, else None."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f'{error.filename}: {error.strerror}' if error.filename else str(error)
    if any(kind.__name__ == 'BackendCompilerFailed' for kind in type(error).__mro__):
        return f'torch.compile failed: {one_line(error)}: use --compile=False'
    if is_out_of_memory(error):
        # The second sentence of CUDA's message says how much was requested.
        tried = re.search(r'[Tt]ried to allocate \S+ \w+', str(error))
        size = f': {tried[0]}' if tried else ''
        if not hasattr(error, 'phase'):
            return f'out of memory{size}: use smaller sizes, such as --batch_size, or another ' \
                   '--device'
        return f'out of memory ({error.phase}){size}: use a smaller --batch_size (and multiply ' \
               '--gradient_accumulation_steps by the same factor, unless --total_batch_size is ' \
               'set), --activation_checkpointing=full, or a smaller --block_size or model'
    return None


@contextmanager
def phase(name):
    """A context that names a phase of training in the errors raised in it."""
    try:
        yield
    except Exception as e:
        e.phase = getattr(e, 'phase', name)  # the innermost phase
        raise


def is_out_of_memory(error):
    """Whether an error says that the GPU or the machine is out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == 'OutOfMemoryError':
        return True
    messages = ("can't allocate memory", 'not enough memory', 'out of memory',
                'Storage size calculation over')
    return isinstance(error, RuntimeError) and any(text in str(error) for text in messages)
