"""One process at a time in a folder."""

import os
from contextlib import contextmanager

from errors import UserError

try:
    import fcntl
except ImportError:  # Windows: nothing stops a second one there
    fcntl = None


@contextmanager
def locked(folder, refusal='in use'):
    """Hold the lock of `folder` in here → False where the system has none (Windows, some network
    file systems). It ends with the process, however that ends.

    Raises UserError(refusal) where another process holds it.
    """
    if fcntl is None:
        yield False
        return
    lock, held = None, False
    try:
        try:
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            raise UserError(refusal) from None
        except OSError:
            pass
        yield held
    finally:
        if lock is not None:
            os.close(lock)


def in_use(folder):
    """True when a process holds the lock of `folder`, None where the system cannot tell."""
    try:
        with locked(folder) as held:
            return False if held else None
    except UserError:
        return True
