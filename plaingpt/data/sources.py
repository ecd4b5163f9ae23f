"""Where text comes from: people's own files, or a dataset of the Hugging Face hub (hub.py).

A source yields its text in pieces, in an order that is always the same, one in memory at a time:

    source.pieces()        yields Piece
    source.position()      how much of source.total is read, in source.unit
    source.total           how much there is, or None where that is unknown
    source.identity()      text that changes when the input changes
    source.is_one_text     True where few files are one text, which is not cut into documents
"""

import glob
import hashlib
import http.client
import os
import sysconfig
import urllib.request
from collections import Counter
from pathlib import Path

from plaingpt.data import readers
from plaingpt.data.dataset import TOKEN_FILES, UNFINISHED
from plaingpt.data.hub import HubDataset
from plaingpt.data.readers import Piece, file_type, inner_suffix
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import count_of, shown

ONE_TEXT_FILES = 100  # fewer text files than this are one text
SMALL_PIECE_CHARS = 2**15  # the least of a file that goes into one split
DOWNLOAD_TIMEOUT = 30  # seconds without a byte
SUFFIXES = {  # of the files that are read in a folder, in any case
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.css', '.xml',
    '.yaml', '.yml', '.toml', '.jsonl', '.ndjson', '.parquet'}
TABLES = {'.json', '.csv', '.tsv'}  # read if a folder has no other: beside code, settings
NO_TEXTS = {'node_modules', '__pycache__', UNFINISHED}
STANDARD_LIBRARY = sysconfig.get_paths()['stdlib']


def open_source(corpus, config, errors, folder):
    """The source of a corpus and a PrepareConfig. errors: as in bytes.decode; folder: of the
    dataset, which keeps what is downloaded. Raises UserError."""
    form = corpus.document_form if config.documents == 'auto' else config.documents
    text_field = config.text_field or corpus.text_field
    if corpus.kind == 'hub':
        splits = {'train': config.split} if config.split else corpus.splits
        own = {'val': config.val_split, 'test': config.test_split}
        splits = {**splits, **{split: theirs for split, theirs in own.items() if theirs}}
        if config.max_tokens:  # train comes last: reading ends when it is full
            splits = dict(sorted(splits.items(), key=lambda item: item[0] == 'train'))
        where = config.input or config.path or corpus.hub
        return HubDataset(where, config.subset or corpus.subset, splits, text_field, form)
    name = config.input or corpus.files
    paths = corpus.find(name) if name else [download(corpus.url, corpus.sha256, folder)]
    files = Files(paths, name or corpus.url, form, text_field, errors, config.encoding)
    if files.has_rows and config.documents != 'auto':
        raise UserError(f'documents={config.documents}: of {files.name} each row is a document: '
                        'leave it out, or name text files alone with --input')
    if config.text_field and not files.has_rows:
        raise UserError(f'text_field={config.text_field}: {files.name} is text and has no fields: '
                        'leave it out')
    files.is_one_text &= config.documents == 'auto'  # --documents=file keeps them apart
    return files


class Files:
    """Documents of files of text and of rows. A few text files are one running text: a line break
    is put between two where the first does not end with one."""

    unit = 'B'

    def __init__(self, paths, name, form='file', text_field='', errors='strict',
                 encoding='utf-8'):
        self.paths, self.name = paths, shown(name[:100])
        self.form, self.text_field, self.errors, self.encoding = form, text_field, errors, encoding
        self.sizes = [path.stat().st_size for path in paths]
        self.total = sum(self.sizes)
        # A few large files are cut, so that each split gets its share. Most of many stay whole.
        self.piece_chars = min(max(self.total // 100, SMALL_PIECE_CHARS), readers.PIECE_CHARS)
        self.has_rows = any(file_type(path) != 'text' for path in paths)
        self.is_one_text = form == 'file' and len(paths) < ONE_TEXT_FILES and not self.has_rows

    def pieces(self):
        self._done = 0
        line_open = False  # the file before ends within a line
        for path, size in zip(self.paths, self.sizes, strict=True):
            with open(path, 'rb') as self._file:
                for text, new_document in self.documents(self._file):
                    if self.is_one_text:
                        # A piece of its own: a tokenizer's sample hashes the text of the pieces,
                        # and would else depend on the order of the files.
                        if line_open and new_document:
                            yield Piece('\n', False)
                        line_open = not text.endswith(('\n', '\r'))
                    yield Piece(text, new_document)
            self._done += size

    def documents(self, file):
        """Yield (text, whether it begins a document) of an open file."""
        if file_type(Path(file.name)) == 'text':
            with readers.open_text(file, self.errors, self.encoding) as text:
                yield from readers.whole_file(text, self.piece_chars) if self.form == 'file' \
                    else readers.DOCUMENT_FORMS[self.form](text)
            return
        for where, row in self.rows(file, self.text_field):
            text = readers.text_of(row, self.text_field, where)
            if text and text.strip():
                yield readers.replace_surrogates(text), True

    def rows(self, file, field=''):
        errors = 'replace' if self.errors == 'replace' else 'strict'  # a file of text may be bytes
        return readers.iter_rows(file, field, errors, self.encoding)

    def position(self):
        return self._done + (0 if self._file.closed else self._file.tell())

    def identity(self):
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self.sizes, strict=True):
            digest.update(os.fsencode(path) + f'\0{size}\0{path.stat().st_mtime_ns}\n'.encode())
        return digest.hexdigest()


def download(url, sha256, folder):
    """Fetch the text behind `url` into `folder`, where it is not there yet → its path. UserError"""
    path = folder / 'input.txt'
    if not path.exists():
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT) as response:
                data = response.read()
        except (OSError, http.client.HTTPException) as e:
            raise UserError(f'{url} could not be downloaded ({getattr(e, "reason", e)}): try '
                            'again, or name a copy of it with --input=FILE') from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise UserError(f'{url}: what arrived has another checksum: try again, or name a copy '
                            'of it with --input=FILE')
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return path


# -----------------------------------------------------------------------------
# which files --input names


def find_files(wanted, suffixes=SUFFIXES):
    """'a.txt,~/notes/,logs/*.gz' → sorted paths, each file once. A line says what is read of
    folders and globs. Raises UserError. suffixes: of what is read in a folder"""
    found = {}
    parts = [wanted] if os.path.lexists(wanted) else map(str.strip, wanted.split(','))
    names = [os.path.expanduser(part) for part in parts if part]
    for name in names:
        matches = [name] if os.path.lexists(name) else glob.glob(name, recursive=True)
        if not matches:
            raise UserError(f'{shown(name)}: no such file or folder')
        for path in map(Path, matches):
            for each in search(path, suffixes) if path.is_dir() else [path]:
                if not each.is_file():
                    raise UserError(f'{shown(each)} is no file: text is read more than once, so '
                                    'write it to a file, and name that with --input')
                if not is_ours(each):
                    found[os.path.realpath(each)] = each  # links lead to one file
    if not found:
        raise UserError(f'{shown(wanted)}: no text files there: name the files that hold the '
                        'text, each or with a glob such as notes/*.org')
    paths = sorted(found.values())
    if any(not os.path.isfile(name) for name in names):
        endings = Counter(inner_suffix(path) or 'without an ending' for path in paths)
        kinds = ', '.join(f'{n:,} {shown(ending)}' for ending, n in endings.most_common())
        print(f'reading {count_of(len(paths), "file")}: {kinds}')
    return paths


def search(root, suffixes):
    """The files with these suffixes in a folder and those below it → paths, or tables where there
    are no others; nothing that is hidden. OSError"""
    texts, tables = [], []
    for at, folders, files in os.walk(root, onerror=raise_error):
        folders[:] = [name for name in folders if not name.startswith('.') and name not in NO_TEXTS]
        for path in (Path(at, name) for name in files if not name.startswith('.')):
            if path.is_file() and inner_suffix(path) in suffixes:
                texts.append(path)
            elif path.is_file() and inner_suffix(path) in TABLES and not is_ours(path):
                tables.append(path)
    return texts or tables


def raise_error(e):
    raise e


def is_ours(path):
    """Whether prepare.py wrote a file."""
    return bool(TOKEN_FILES.fullmatch(path.name)) or (
        path.name == 'meta.json' and any(path.parent.glob('train*.bin')))


def find_standard_library(folder):
    """The source of Python's own standard library: text on every machine."""
    # no tests, nothing that was installed later, and no tables that are programs only in name
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
            'pydoc_data', 'encodings'}
    return [p for p in sorted(Path(folder).rglob('*.py'))
            if not skip & set(p.relative_to(folder).parts)
            and not p.name.startswith('_sysconfigdata')]
