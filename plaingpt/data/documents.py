"""Where documents come from: files of text, files of rows, datasets of the Hugging Face hub.

A source yields its text in pieces, in an order that is always the same, one in memory at a time:

    source.pieces()        yields Piece
    source.position()      how much of source.total is read, in source.unit
    source.total           how much there is, or None where that is unknown
    source.identity()      text that changes when the input changes
    source.is_continuous     True where few files are one text, which is not split into documents
    source.report()        prints what the last pass left out
"""

import copy
import glob
import hashlib
import http.client
import os
import urllib.request
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from plaingpt.data import text_files
from plaingpt.data.left_out import Tally, Unusable
from plaingpt.data.rows import FORMATS, ending_of, file_format, read_rows
from plaingpt.data.text_files import documents_of, holds_utf8, lines_of, open_text
from plaingpt.system.errors import UserError, needs, progress_bar
from plaingpt.system.files import is_hub_name, write_atomically
from plaingpt.system.formatting import count_of, one_line, shown

IN_FOLDERS = {  # the endings of the files that are read in a folder
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.css', '.xml',
    '.yaml', '.yml', '.toml', '.jsonl', '.ndjson', '.parquet'}
COMPRESSED = {'.zst', '.bz2', '.xz', '.zip', '.7z', '.rar', '.tar', '.tgz', '.lz4'}
KINDS_NAMED = 8  # endings of files that a folder leaves out
ONE_TEXT_FILES = 100  # fewer text files than this are one text
SMALL_PIECE_CHARS = 2**15  # the least of a file that goes into one split
MAX_NUL = 0.05  # share of NUL bytes in text; UTF-16 and binary files have more
DOWNLOAD_TIMEOUT = 30  # seconds without a byte


class Piece(NamedTuple):
    """What a source yields: a document, or a part of one."""

    text: str
    new_document: bool  # False if the last piece's document continues
    split: str = ''  # 'train' or 'val' if the dataset says so


def open_source(name, corpus, config, folder, reader):
    """The source of a corpus of this name and a PrepareConfig. folder: of the dataset, which keeps
    what is downloaded; reader: what turns a row into documents. Raises UserError."""
    is_chat = corpus.kind == 'chat'
    on_hub = config.subset or config.split or config.val_split or is_hub_name(config.input)
    if corpus.kind == 'hub' or (is_chat and (on_hub or holds_parquet_alone(config.input))):
        subset = config.subset or ('' if config.input else corpus.subset)
        splits = {'train': config.split or 'train'}
        if val := config.val_split or ('' if config.split else corpus.val_split):
            # Reading ends when max_tokens to train on are full, so they come last.
            splits = {'val': val, **splits} if config.max_tokens else {**splits, 'val': val}
        return HubDataset(config.input or corpus.hub, subset, splits, reader, config.strict)
    if config.input:
        paths, named = find_files(config.input, FORMATS if is_chat else IN_FOLDERS)
    elif corpus.url:
        paths, named = [download(corpus.url, corpus.sha256, folder)], ()
    elif callable(corpus.files):
        paths, named = corpus.files(), ()
    else:
        paths, named = find_files(corpus.files)
    files = Files(paths, config.input or corpus.url or name, reader, config.documents,
                  config.encoding, config.strict, named)
    if is_chat:
        for path in paths:
            if file_format(path) == 'text':
                raise UserError(f'{shown(path)}: conversations are read from {", ".join(FORMATS)} '
                                'files: write them as a table, or as JSON, one per line')
    elif files.has_rows and config.documents != 'auto':
        raise UserError(f'documents={config.documents}: each row of {files.name} is a document: '
                        'leave it out, or name only text files')
    elif config.text_field and not files.has_rows:
        raise UserError(f'text_field={config.text_field}: {files.name} is text and has no fields: '
                        'leave it out')
    return files


def holds_parquet_alone(name):
    """Whether it is a folder of a dataset of the hub: all rows in Parquet, perhaps described by a
    .json file."""
    endings = {ending_of(path) for path in search(name)} & FORMATS.keys()
    return endings - {'.json'} == {'.parquet'}


class Source:
    """What sources have in common: rows, of which a few may be unusable."""

    is_continuous = False

    def __init__(self, name, reader, strict):
        """reader: its texts(row, where) are the documents in a row; strict: each row or file that
        cannot be used is an error"""
        self.name, self.reader, self.rows = shown(name[:100]), reader, Tally('row', strict)

    def as_plain_text(self):
        """The same source, whose conversations are the text in them, to learn a tokenizer from."""
        plain = copy.copy(self)
        plain.reader = replace(self.reader, plain=True)
        return plain

    def read_row(self, where, row):
        """The documents in a row; none if it cannot be used, which is counted."""
        self.rows.total += 1
        try:
            if isinstance(row, Unusable):
                raise row
            return self.reader.texts(row, where)
        except Unusable as problem:
            self.rows.skip(problem, self.estimate_rows())
            return ()

    def report(self):
        """Print what the last pass left out. Raises UserError where that is too much."""
        self.rows.check(self.rows.total)
        for line in (*self.rows.describe(), *self.reader.describe()):
            print(line)


class Files(Source):
    """Documents of files of text and of rows. A few text files are one running text, unless they
    contain end-of-text tokens: a line break is put between two where the first does not end with
    one. named: those of the paths that were named by themselves, and are never left out"""

    unit = 'B'

    def __init__(self, paths, name, reader, documents='auto', encoding='utf-8', strict=False,
                 named=()):
        super().__init__(name, reader, strict)
        self.paths, self.form, self.encoding, self.named = paths, documents, encoding, named
        self.files, self.problems = Tally('file', strict), {}
        self.sizes = [path.stat().st_size for path in paths]
        self.total = sum(self.sizes)
        # A few large files are cut, so that each split gets its share. Most of many stay whole.
        self.piece_chars = min(max(self.total // 100, SMALL_PIECE_CHARS),
                               text_files.PIECE_CHARS)
        self.has_rows = any(file_format(path) != 'text' for path in paths)
        self._done = 0

    @property
    def is_continuous(self):
        return self.file_chars is not None

    @cached_property
    def file_chars(self):
        """The number of characters of each file of one running text, blank files left out; None
        where a file is a document, or holds several."""
        if self.form != 'auto' or self.has_rows or len(self.paths) >= ONE_TEXT_FILES:
            return None
        counts = []
        with progress_bar('counting characters', self.total, self.unit) as bar:
            for text, new_file in self.read_files():
                if self.reader.separators.count:
                    return None
                if new_file:
                    counts.append(0)
                counts[-1] += len(text)
                bar.update(self.position() - bar.n)
        return counts

    def pieces(self):
        line_open = False  # the file before ends within a line
        for text, new_document in self.read_files():
            if self.is_continuous:
                # A piece of its own: a tokenizer's sample hashes the text of the pieces, and would
                # else depend on the order of the files.
                if line_open and new_document:
                    yield Piece('\n', False)
                line_open = not text.endswith(('\n', '\r'))
            yield Piece(text, new_document)

    def read_files(self):
        """Yield (text, whether it begins a document) of all files that can be used."""
        self._done = 0
        self.reader.restart()
        self.rows.restart()
        self.files.restart()
        self.files.total = len(self.paths)
        for path, size in zip(self.paths, self.sizes, strict=True):
            try:
                yield from self.read_file(path, size)
            except Unusable as problem:
                if path in self.named or len(self.paths) == 1:
                    raise UserError(f'{problem}{self.encoding_advice(problem)}') from None
                self.files.skip(problem)
                if len(self.paths) >= ONE_TEXT_FILES:  # else all are named at the end
                    self.files.check(len(self.paths), self.encoding_advice)
            self._done += size
        self.files.check(len(self.paths), self.encoding_advice)
        self.rows.check(self.rows.total, self.encoding_advice)

    def read_file(self, path, size):
        """Yield the same of one file. Raises Unusable."""
        if ending_of(path) in COMPRESSED:
            raise Unusable(shown(path), 'compressed', ': unpack it first')
        try:
            self._file = open(path, 'rb')
        except OSError as e:
            raise Unusable(shown(path), 'cannot be read', f' ({e.strerror})') from None
        with self._file:
            if file_format(path) != 'text':
                for where, row in read_rows(self._file, self.encoding, self.reader.may_read):
                    for text in self.read_row(where, row):
                        yield text, True
                return
            is_plain = self.encoding == 'utf-8' and not path.name.lower().endswith('.gz')
            head = self._file.peek()
            if is_plain and head.count(0) > MAX_NUL * len(head):
                raise Unusable(shown(path), 'not UTF-8 text', ': it is full of NUL bytes')
            if path not in self.named and (size > text_files.BLOCK_CHARS or self.form == 'line'):
                self.read_to_end(path)
            with open_text(self._file, self.encoding) as text:
                if self.form == 'line':
                    yield from lines_of(text, self.reader.separators)
                else:
                    yield from documents_of(text, self.reader.separators, self.piece_chars)

    def read_to_end(self, path):
        """See that a file can be read to its end before any of it is used. Raises Unusable."""
        if path not in self.problems:
            self.problems[path] = None
            try:
                with open(path, 'rb') as file, open_text(file, self.encoding) as text:
                    while text.read(text_files.BLOCK_CHARS):
                        pass
            except Unusable as problem:
                self.problems[path] = problem
        if self.problems[path]:
            raise self.problems[path]

    def encoding_advice(self, problem):
        """What else to do about text in another encoding, unless it would break the other files."""
        if not problem.reason.startswith('not UTF-8') or any(map(holds_utf8, self.paths[:100])):
            return ''
        return ', or name its encoding, such as --encoding=latin-1, cp1252 or utf-16-le'

    def estimate_rows(self):
        """About how many rows there are in all, by what is read; 0 if unknown."""
        is_parquet = file_format(Path(self._file.name)) == 'parquet'  # is not read in order
        done = self._done if is_parquet else self.position()
        return int(self.rows.total * self.total / done) if done else 0

    def position(self):
        return self._done + (0 if self._file.closed else self._file.tell())

    def identity(self):
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self.sizes, strict=True):
            digest.update(os.fsencode(path) + f'\0{size}\0{path.stat().st_mtime_ns}\n'.encode())
        return digest.hexdigest()

    def report(self):
        for line in self.files.describe():
            print(line)
        super().report()


# -----------------------------------------------------------------------------
# which files --input names


def find_files(wanted, suffixes=IN_FOLDERS):
    """'a.txt,~/notes/,logs/*.gz' → (sorted paths, each once; those of them that are named by
    themselves). A line says what is read of folders and globs, and another what is not. Raises
    UserError. suffixes: of what is read in a folder"""
    paths, named, left_out = set(), set(), set()
    words = [wanted] if os.path.lexists(wanted) else map(str.strip, wanted.split(','))
    names = [os.path.expanduser(word) for word in words if word]
    for name in names:
        matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        if not matches:
            raise UserError(f'{shown(name)}: no such file or folder')
        for path in map(Path, matches):
            if path.is_dir():
                for inside in search(path):
                    (paths if ending_of(inside) in suffixes else left_out).add(inside)
            elif path.is_file():
                paths.add(path)
            else:
                raise UserError(f'{shown(path)} is not a file: text is read more than once, so '
                                'write it to a file, and name that with --input')
        if os.path.isfile(name):
            named.add(Path(name))
    left_out -= paths
    if len(named) < len(paths) or left_out:
        if paths:
            print(f'reading {count_of(len(paths), "file")}: {count_endings(paths)}')
        if left_out:
            packed = any(ending_of(path) in COMPRESSED for path in left_out)
            print(f'not read: {count_endings(left_out)} (to read some of them, name them, or use a '
                  'glob such as notes/*.csv' + ('; unpack compressed files first)' if packed else
                                                ')'))
    if not paths:
        raise UserError(f'{shown(wanted)}: no text files there: name the files that hold the '
                        'text, each or with a glob such as notes/*.org')
    return sorted(paths), named


def count_endings(paths):
    """'20 .md, 3 .txt', the most common ones first."""
    endings = Counter(ending_of(path) or 'without an ending' for path in sorted(paths))
    kinds = [f'{n:,} {shown(ending)}' for ending, n in endings.most_common(KINDS_NAMED)]
    others = len(paths) - sum(n for _, n in endings.most_common(KINDS_NAMED))
    return ', '.join(kinds + [f'{others:,} others'] * (others > 0))


def search(root):
    """The files in a folder and those below it; nothing that is hidden or a cache."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders
                      if not name.startswith('.') and name != '__pycache__']
        for path in (Path(folder, name) for name in files if not name.startswith('.')):
            if path.is_file():
                yield path


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
# text


# -----------------------------------------------------------------------------
# the hub


class HubDataset(Source):
    """Rows of a dataset of the hub, or of a folder laid out like one, as a source. The library
    `datasets` streams them: nothing of them is kept on disk or in memory."""

    unit = ' documents'

    def __init__(self, path, subset, splits, reader, strict=False):
        """path: may end with @REVISION; splits: our name of a split → theirs"""
        super().__init__(path, reader, strict)
        self.splits = splits
        with needs('datasets', path):
            import datasets
            from huggingface_hub.utils import logging as hub_logging
        # Each attempt to connect would be a warning of its own before our one line.
        datasets.logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
        with explain_hub_errors(self.name):
            path, _, revision = path.partition('@')
            if Path(path).is_dir():
                path = os.path.abspath(path)  # `datasets` does not take '.' for a folder
            self.builder = datasets.load_dataset_builder(path, subset or None,
                                                         revision=revision or None)
            self.streams = {split: self.builder.as_streaming_dataset(hub_split)
                            for split, hub_split in splits.items()}
            for split, rows in self.streams.items():
                for row in rows.take(1):
                    columns = self.reader.columns(row, f'{self.name}, split {splits[split]}')
                    self.streams[split] = rows.select_columns(columns)
        known = self.builder.info.splits or {}
        counts = [known[split].num_examples for split in splits.values() if split in known]
        self.total = sum(counts) if len(counts) == len(splits) else None

    def pieces(self):
        self._position = 0
        self.reader.restart()
        self.rows.restart()
        with explain_hub_errors(self.name):
            for split, rows in self.streams.items():
                own = '' if split == 'train' and 'val' not in self.splits else split
                for number, row in enumerate(rows, 1):
                    self._position += 1
                    where = f'{self.name}, split {self.splits[split]}, row {number}'
                    for text in self.read_row(where, row):
                        yield Piece(text, True, own)
        self.rows.check(self.rows.total)

    def estimate_rows(self):
        return self.total or 0

    def position(self):
        return self._position

    def identity(self):
        return self.builder.hash


@contextmanager
def explain_hub_errors(name, local='name a local copy with --input=FOLDER'):
    """Turns what the hub's libraries raise, a wide family, into a UserError of one line.
    local: what to do without the hub"""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        raise UserError(f'{name} cannot be read ({type(e).__name__}: {one_line(e)[:200]}): '
                        f'{advise(e)}, or {local}') from None


def advise(error):
    """What to do about an error of the hub's libraries."""
    cause = error.__cause__ or error
    status = getattr(getattr(cause, 'response', None), 'status_code', None)
    if status in (401, 403) or type(error).__name__ == 'DatasetNotFoundError':
        return 'check the name; if it is private or gated, ask for access on its page and log in ' \
               'with hf auth login'
    if status == 404 or isinstance(cause, ValueError | FileNotFoundError):
        return 'check the name'
    return 'check the connection and run the same command again'
