"""A mistake that the user can fix, and the one place that turns it into one line."""

import os
import sys
import time
from contextlib import contextmanager


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


def run_script(main):
    """Run `main(argv)`; a `UserError` becomes `error: …` on stderr and exit code 2."""
    try:
        main(sys.argv[1:])
    except UserError as problem:
        # When every rank fails alike, rank 0 speaks for all: torchrun stops the others meanwhile.
        time.sleep(0 if os.environ.get('RANK', '0') == '0' else 3)
        for line in str(problem).splitlines():
            print(f'error: {line}', file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print('\ninterrupted', file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader went away, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
