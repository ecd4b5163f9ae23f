"""One process at a time in a folder."""

import os
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = '.lock'  # holds the host, process id and start of the process that made it


@contextmanager
def locked(folder, refusal='in use'):
    """Hold the lock of `folder` in here: the system's, which ends with the process however that
    ends, or a file in it where there is none (Windows, some network file systems).

    Raises UserError(refusal) where another process holds it.
    """
    try:
        handle = system_lock(folder)
    except BlockingIOError:
        raise UserError(refusal) from None
    if handle is None:
        with lock_file(Path(folder, LOCK_FILE), refusal):
            yield
        return
    try:
        yield
    finally:
        os.close(handle)


def in_use(folder):
    """Whether a process holds the lock of `folder`."""
    try:
        handle = system_lock(folder)
    except BlockingIOError:
        return True
    if handle is None:
        return holder(Path(folder, LOCK_FILE)) is not None
    os.close(handle)
    return False


def system_lock(folder):
    """→ a file descriptor that holds the lock as long as it is open, or None where the system has
    no locks for this folder. Raises BlockingIOError where another process holds it."""
    if fcntl is None or not os.path.isdir(folder):
        return None
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except OSError as e:  # ENOLCK, ENOTSUP, or EBADF of NFS, which locks no folders
        if handle is not None:
            os.close(handle)
        if isinstance(e, BlockingIOError):
            raise
        return None


# -----------------------------------------------------------------------------
# where the system has no locks


@contextmanager
def lock_file(path, refusal):
    """Hold a file that names its holder in here. That of a process which is gone is taken over."""
    me = f'{socket.gethostname()} {os.getpid()} {started(os.getpid())}'
    while True:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            break
        except FileExistsError:
            refuse_unless_stale(path, path, refusal)
        # Two may have seen that it is stale: what is renamed can be the other's new one.
        taken = path.with_name(f'{path.name}-{os.getpid()}')
        with suppress(FileNotFoundError):
            os.rename(path, taken)
            refuse_unless_stale(taken, path, refusal)
            taken.unlink()
    try:
        os.write(handle, me.encode())
        yield
    finally:
        os.close(handle)
        with suppress(OSError):
            if path.read_text() == me:
                path.unlink()


def refuse_unless_stale(found, path, refusal):
    """Raises UserError where the lock `found`, which belongs at `path`, has a holder."""
    if who := holder(found):
        if found != path:
            os.rename(found, path)
        raise UserError(f'{refusal}; {who} holds it: if that is gone, delete {path}')


def holder(path):
    """Who holds a lock file, or None where it is not there or its process is gone."""
    for _ in range(5):
        try:
            host, pid, start = path.read_text(errors='replace').split()
            break
        except ValueError:
            time.sleep(0.1)  # it is made, and written in a moment
        except FileNotFoundError:
            return None
        except OSError as e:
            return f'somebody ({e.strerror})'
    else:
        return 'somebody'
    if host == socket.gethostname() and not (
            is_open(path) if os.name == 'nt' else is_running(pid, start)):
        return None
    return f'process {pid} on {host}'


def is_open(path):
    """Windows: whether a process has the file open, which its holder does; then nobody renames."""
    try:
        os.rename(path, path)
    except PermissionError:
        return True
    return False


def started(pid):
    """When a process started, as text: two with the same number differ in it. '-': not known."""
    try:
        state, *rest = Path(f'/proc/{pid}/stat').read_bytes().rpartition(b')')[2].decode().split()
    except OSError:
        return '-'  # no Linux, or another user's
    return 'never' if state in 'ZX' else rest[18]  # dead, and not waited for; field 22


def is_running(pid, start):
    """False where the process of this host that `started` at `start` is gone. (No Windows: kill
    would end it there.)"""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    return '-' in (start, now := started(pid)) or start == now


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
