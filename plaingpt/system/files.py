"""Files that are whole or absent: atomic writes, checksums, lines of a log; JSON; one process at a
time in a folder."""

import hashlib
import json
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path

from plaingpt.system.errors import UserError, warn
from plaingpt.system.formatting import shown

ROOT = Path(__file__).resolve().parents[2]  # where train.py, config/ and docs/references/ are


def is_hub_name(name):
    """True for OWNER/NAME, which may be on the Hugging Face hub."""
    return re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name) is not None and not Path(name).exists()


def write_atomically(path, data):
    """Write text or bytes under a temporary name, sync, rename: `path` is whole or as it was.

    Raises OSError where the disk refuses, and nothing is left behind then.
    """
    path = Path(path)
    temporary = path.with_name(path.name + '.tmp')
    if isinstance(data, str):
        data = data.encode(errors='backslashreplace')  # a name in it may be no UTF-8
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
    """Raise UserError for names in a file of plainGPT that this version does not know, if any."""
    if names:
        raise UserError(f'{path} is from another version of plainGPT: it has '
                        f'{", ".join(sorted(names))}, which this one does not know: use the '
                        'version that wrote it')


def append_line(path, value):
    """Add a JSON object to a .jsonl file, as append_text does."""
    append_text(path, json.dumps(value))


def append_text(path, line, header=''):
    """Add a line to a file, in a line of its own even if a kill left half a line. A file that is
    empty gets the header first. Where the disk refuses, this warns, and the program continues."""
    try:
        with open(path, 'ab+') as f:
            f.seek(max(0, f.tell() - 1))
            last = f.read(1)
            if header and not last:
                line = f'{header}\n{line}'
            if last not in (b'', b'\n'):
                line = f'\n{line}'
            f.write(f'{line}\n'.encode(errors='backslashreplace'))  # a file name may be no UTF-8
    except OSError as e:
        warn(f'a line of {path} is lost: {e.strerror}')


def sync(path):
    """Wait until a file or folder is on the disk: a crash then leaves no renamed empty file."""
    if os.name == 'nt' and path.is_dir():
        return  # Windows cannot sync a directory
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of(path):
    """Checksum of a file, as hexadecimal text. Raises OSError."""
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def make_writable(folder, key='out_dir'):
    """Make the folder that `key` names, and see that files can be made in it. Raises UserError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder, '.writable')
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise UserError(f'{key}={shown(folder)}: cannot write there: '
                        f'{getattr(e, "strerror", e)}') from None


# -----------------------------------------------------------------------------
# one process at a time in a folder


@contextmanager
def locked(folder, refusal):
    """Keep other processes out of `folder` while in here. The system frees the lock of a killed
    process. Raises UserError(refusal) where another process has the lock. Where the file system
    has no locks, this warns and goes on."""
    from filelock import FileLock, Timeout
    # A soft lock, which is a file, would outlive a process that was killed on another machine.
    lock = FileLock(Path(folder, '.lock'), blocking=False, mode=0o666, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(refusal) from None
    except OSError as e:
        if e.filename:  # the file cannot be opened
            raise
        warn(f'{folder}: this file system has no locks ({e.strerror}): let no other process write '
             'there')
    try:
        yield
    finally:
        with suppress(OSError):  # it is gone, or Windows keeps an open file
            os.unlink(lock.lock_file)
        with suppress(OSError):  # the connection is lost
            lock.release()


@contextmanager
def lock_output_dir(folder):
    """Make out_dir, see that files can be made in it, and keep other runs out while in here.
    Raises UserError."""
    make_writable(folder)
    with locked(folder, f'out_dir={folder}: a run is writing there: wait until it is done, '
                        'stop it, or choose another --out_dir'):
        yield
