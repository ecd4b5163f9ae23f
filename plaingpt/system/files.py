"""Files: atomic writes, checksums, JSON, appending to logs, and locks on folders."""

import hashlib
import json
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path

from plaingpt.system.errors import UserError, warn

ROOT = Path(__file__).resolve().parents[2]  # has train.py, config/ and docs/references/
RENAMED_SETTINGS = {'average_decay': 'ema_decay'}  # {name in version 1.0: name}


def is_hub_name(name):
    """Whether a name has the form OWNER/NAME of the Hugging Face hub, and is not a local path."""
    return re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name) is not None and not Path(name).exists()


def write_atomically(path, data):
    """Write text or bytes to a temporary file, sync, rename: `path` is complete or unchanged.

    Raises OSError, and then removes the temporary file.
    """
    path = Path(path)
    temporary = path.with_name(path.name + '.tmp')
    if isinstance(data, str):
        data = data.encode(errors='backslashreplace')  # file names may not be UTF-8
    try:
        temporary.write_bytes(data)
        sync(temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path, value):
    """Write a value as JSON, atomically. Raises OSError."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False))


def read_json(path):
    """The value in a JSON file. Raises OSError, ValueError."""
    return json.loads(Path(path).read_bytes())


def refuse_unknown(path, names):
    """Raise UserError if a file of plainGPT has `names` that this version does not know."""
    if names:
        raise UserError(f'{path}: written by another version of plainGPT: unknown '
                        f'{", ".join(sorted(names))}; use the version that wrote it')


def with_current_names(settings):
    """{setting: value}, possibly written by an earlier version, with the names of this version."""
    return {RENAMED_SETTINGS.get(name, name): value for name, value in settings.items()}


def append_line(path, value):
    """Append a JSON object to a .jsonl file, see append_text."""
    append_text(path, json.dumps(value))


def append_text(path, line, header=''):
    """Append a line to a file, starting a new line if the last one is incomplete after a kill. An
    empty file gets the header first. If writing fails, this warns and continues."""
    try:
        with open(path, 'ab+') as f:
            f.seek(max(0, f.tell() - 1))
            last = f.read(1)
            if header and not last:
                line = f'{header}\n{line}'
            if last not in (b'', b'\n'):
                line = f'\n{line}'
            f.write(f'{line}\n'.encode(errors='backslashreplace'))  # file names may not be UTF-8
    except OSError as e:
        warn(f'{path}: could not append a line: {e.strerror}')


def sync(path):
    """Flush a file or folder to disk, so that a crash does not leave a renamed but empty file."""
    if os.name == 'nt' and path.is_dir():
        return  # Windows cannot sync a directory
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of(path):
    """The SHA-256 of a file in hexadecimal. Raises OSError."""
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def make_writable(folder, key='out_dir'):
    """Create the folder of setting `key` and check that it is writable. Raises UserError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder, '.writable')
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise UserError(f'{key}={folder}: not writable: {e.strerror}') from None


# -----------------------------------------------------------------------------
# locks


@contextmanager
def locked(folder, refusal):
    """A context that locks `folder` against other processes. The system releases the lock of a
    killed process. Raises UserError(refusal) if another process holds it. On a file system without
    locks, this warns and continues."""
    from filelock import FileLock, Timeout
    # A soft lock is a file, which would outlive a process killed on another machine.
    lock = FileLock(Path(folder, '.lock'), blocking=False, mode=0o666, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(refusal) from None
    except OSError as e:
        if e.filename:  # the file cannot be opened
            raise
        warn(f'{folder}: this file system does not support locks ({e.strerror}): make sure that no '
             'other process writes there')
    try:
        yield
    finally:
        with suppress(OSError):  # already removed, or still open on Windows
            os.unlink(lock.lock_file)
        with suppress(OSError):  # the file system is disconnected
            lock.release()


@contextmanager
def lock_output_dir(folder):
    """A context that creates, checks and locks out_dir. Raises UserError."""
    make_writable(folder)
    with locked(folder, f'out_dir={folder}: a run is writing there: wait for it to finish, stop '
                        'it, or choose another --out_dir'):
        yield
