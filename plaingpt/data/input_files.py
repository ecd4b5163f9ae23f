"""The setting `input`: which files are read, and a text that is downloaded."""

import glob
import hashlib
import http.client
import os
import urllib.request
from collections import Counter
from pathlib import Path

from plaingpt.data.rows import extension_of
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import count_of, shown

TEXT_EXTENSIONS = {  # of the files that are read in a folder
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.css', '.xml',
    '.yaml', '.yml', '.toml', '.abc', '.fasta', '.fa', '.jsonl', '.ndjson', '.parquet', '.arrow'}
COMPRESSED = {'.zst', '.bz2', '.xz', '.zip', '.7z', '.rar', '.tar', '.tgz', '.lz4'}
DOWNLOAD_TIMEOUT = 30  # seconds without a byte


def find_files(names, extensions=TEXT_EXTENSIONS):
    """['a.txt', '~/notes/', 'logs/*.gz'] → (sorted paths, those that were named one by one). Prints
    which files of folders and globs are read and which are not. extensions: of the files to read in
    folders. Raises UserError."""
    paths, explicit, skipped = set(), set(), set()
    for name in map(os.path.expanduser, names):
        matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        if not matches:
            raise UserError(f'{shown(name)}: no such file or folder')
        for path in map(Path, matches):
            if path.is_dir():
                for inside in search(path):
                    if extension_of(inside) in extensions:
                        paths.add(inside)
                    else:
                        skipped.add(inside)
            elif path.is_file():
                paths.add(path)
            else:
                raise UserError(f'{shown(path)}: not a regular file (a pipe?); the input is read '
                                'more than once, so save it to a file first')
        if os.path.isfile(name):
            explicit.add(Path(name))
    skipped -= paths
    if len(explicit) < len(paths) or skipped:
        report_files(paths, skipped)
    if not paths:
        raise UserError(f'{shown(", ".join(names))}: no text files found; pass the files with the '
                        'text, or use a glob such as notes/*.org')
    return sorted(paths), explicit


def report_files(paths, skipped):
    if paths:
        print(f'reading {count_of(len(paths), "file")}: {count_extensions(paths)}')
    if skipped:
        advice = 'to read some of them, pass them by name or use a glob such as notes/*.csv'
        if any(extension_of(path) in COMPRESSED for path in skipped):
            advice += '; unpack compressed files first'
        print(f'skipped: {count_extensions(skipped)} ({advice})')


def count_extensions(paths):
    """'20 .md, 3 .txt', the most common ones first."""
    extensions = Counter(extension_of(path) or 'without extension' for path in sorted(paths))
    return ', '.join(f'{n:,} {shown(extension)}' for extension, n in extensions.most_common(20))


def search(root):
    """The files in a folder and its subfolders, except hidden files and caches."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders
                      if not name.startswith('.') and name != '__pycache__']
        for path in (Path(folder, name) for name in files if not name.startswith('.')):
            if path.is_file():
                yield path


def download(url, sha256, folder):
    """Download the text at `url` to `folder`, unless it is there → its path. Raises UserError."""
    path = folder / 'input.txt'
    if not path.exists():
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT) as response:
                data = response.read()
        except (OSError, http.client.HTTPException) as e:
            raise UserError(f'cannot download {url} ({getattr(e, "reason", e)}); try again, or '
                            'pass a local copy with --input=FILE') from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise UserError(f'{url}: the downloaded file has a wrong checksum; try again, or pass '
                            'a local copy with --input=FILE')
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return path
