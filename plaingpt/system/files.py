"""Files that are whole or absent: atomic writes, checksums, lines that a full disk may refuse."""

import errno
import hashlib
import json
import os
from contextlib import contextmanager
from pathlib import Path

from plaingpt.system.errors import UserError
from plaingpt.system.streams import warn

ROOT = Path(__file__).resolve().parents[2]  # where train.py and config/ are


def write_atomically(path, data):
    """Write text or bytes under a temporary name, sync, rename: `path` is whole or as it was.

    Half a character, of a name that is no UTF-8, becomes \\udcXX, as JSON writes it too.
    Raises OSError where the disk refuses; nothing is left behind then.
    """
    path = Path(path)
    temporary = path.with_name(path.name + '.tmp')
    if isinstance(data, str):
        data = data.encode(errors='backslashreplace')
    try:
        with naming(path):
            temporary.write_bytes(data)
            sync(temporary)
            os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path):
    """An OSError that leaves this context names `path`: where a disk is full, Python does not."""
    try:
        yield
    except OSError as e:
        e.filename = str(path)
        raise


def write_json(path, value):
    """Write a value as JSON, atomically. Raises OSError."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False))


@contextmanager
def utf8_name(path):
    """A name of a file that is UTF-8 while in here: safetensors reads no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with open(path, 'rb') as f:
            yield f'/dev/fd/{f.fileno()}'
    else:
        yield path


def append_line(path, value):
    """Add a JSON object to a .jsonl file. Where the disk refuses, a warning names the line that is
    lost; those before it stay whole, and nobody stops."""
    line = (json.dumps(value) + '\n').encode()
    try:
        with open(path, 'ab', buffering=0) as f:
            end = f.tell()
            if f.write(line) < len(line):  # the next line must not continue half of this one
                f.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
    """Checksum of a file, as hexadecimal text."""
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def make_writable(folder, key='out_dir'):
    """Make the folder that `key` names, and see that files can be made in it. Raises UserError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder, '.writable')
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise UserError(f'{key}={folder}: cannot write there: {e.strerror}') from None
