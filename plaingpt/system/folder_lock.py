"""One process at a time in a folder."""

import os
from contextlib import contextmanager

from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable

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


@contextmanager
def lock_output_dir(folder, wanted=True):
    """Make out_dir, see that files can be made in it, and keep other runs out while in here.

    Raises UserError.
    """
    if not wanted:
        yield
        return
    make_writable(folder)
    with locked(folder, f'out_dir={folder}: a run is writing there: wait until it is done, stop '
                        'it, or choose another --out_dir'):
        yield
