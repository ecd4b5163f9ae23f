"""Where documents come from: files of text, files of rows, datasets of the Hugging Face hub.

A source yields its text in pieces, in an order that is always the same, one in memory at a time:

    source.pieces()        yields Piece
    source.position()      how much of source.total is read, in source.unit
    source.total           how much there is, or None where that is unknown
    source.identity()      text that changes when the input changes
    source.is_one_text     True where few files are one text, which is not cut into documents
"""

import csv
import glob
import gzip
import hashlib
import http.client
import io
import json
import os
import re
import urllib.request
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import count_of, join_halves, one_line, shown

ROWS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'csv',
        '.parquet': 'parquet'}  # ending → type; all other files are text
IN_FOLDERS = {  # the endings of the files that are read in a folder
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.css', '.xml',
    '.yaml', '.yml', '.toml', '.jsonl', '.ndjson', '.parquet'}
TEXT_FIELDS = ('text', 'content')  # where no field is named, the first of these that a row has
ONE_TEXT_FILES = 100  # fewer text files than this are one text
BLOCK_CHARS = 2**20  # of a file of text to read at a time
PIECE_CHARS = 2**18  # a longer document comes in pieces
SMALL_PIECE_CHARS = 2**15  # the least of a file that goes into one split
DOWNLOAD_TIMEOUT = 30  # seconds without a byte


class Piece(NamedTuple):
    """What a source yields: a document, or a part of one."""

    text: str
    new_document: bool  # False if the last piece's document continues
    split: str = ''  # 'train' or 'val' if the dataset says so


def open_source(name, corpus, config, folder):
    """The source of a corpus of this name and a PrepareConfig. folder: of the dataset, which keeps
    what is downloaded. Raises UserError."""
    text_field = config.text_field or corpus.text_field
    if corpus.kind == 'hub':
        subset = config.subset or ('' if config.input else corpus.subset)
        splits = {'train': config.split or 'train'}
        if val := config.val_split or ('' if config.split else corpus.val_split):
            # Reading ends when max_tokens to train on are full, so they come last.
            splits = {'val': val, **splits} if config.max_tokens else {**splits, 'val': val}
        return HubDataset(config.input or corpus.hub, subset, splits, text_field)
    if config.input:
        paths = find_files(config.input)
    elif corpus.url:
        paths = [download(corpus.url, corpus.sha256, folder)]
    else:
        paths = corpus.files() if callable(corpus.files) else find_files(corpus.files)
    files = Files(paths, config.input or corpus.url or name, config.documents, text_field,
                  config.encoding)
    if files.has_rows and config.documents != 'auto':
        raise UserError(f'documents={config.documents}: of {files.name} each row is a document: '
                        'leave it out, or name text files alone with --input')
    if config.text_field and not files.has_rows:
        raise UserError(f'text_field={config.text_field}: {files.name} is text and has no fields: '
                        'leave it out')
    return files


class Files:
    """Documents of files of text and of rows. A few text files are one running text: a line break
    is put between two where the first does not end with one."""

    unit = 'B'

    def __init__(self, paths, name, documents='auto', text_field='', encoding='utf-8'):
        self.paths, self.name = paths, shown(name[:100])
        self.form, self.text_field, self.encoding = documents, text_field, encoding
        self.sizes = [path.stat().st_size for path in paths]
        self.total = sum(self.sizes)
        # A few large files are cut, so that each split gets its share. Most of many stay whole.
        self.piece_chars = min(max(self.total // 100, SMALL_PIECE_CHARS), PIECE_CHARS)
        self.has_rows = any(file_type(path) != 'text' for path in paths)
        self.is_one_text = \
            documents == 'auto' and len(paths) < ONE_TEXT_FILES and not self.has_rows

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
            with open_text(file, self.encoding) as text:
                if self.form == 'line':
                    yield from ((line.rstrip('\r\n'), True) for line in text if line.strip())
                else:
                    yield from whole_file(text, self.piece_chars)
            return
        columns = [self.text_field] if self.text_field else TEXT_FIELDS
        for where, row in read_rows(file, self.encoding, columns):
            text = text_of(row, self.text_field, where)
            if text.strip():
                yield join_halves(text)[0], True  # JSON can hold half a character

    def position(self):
        return self._done + (0 if self._file.closed else self._file.tell())

    def identity(self):
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self.sizes, strict=True):
            digest.update(os.fsencode(path) + f'\0{size}\0{path.stat().st_mtime_ns}\n'.encode())
        return digest.hexdigest()


# -----------------------------------------------------------------------------
# which files --input names


def find_files(wanted, suffixes=IN_FOLDERS):
    """'a.txt,~/notes/,logs/*.gz' → sorted paths, each once. A line says what is read of folders and
    globs. Raises UserError. suffixes: of what is read in a folder"""
    found = set()
    parts = [wanted] if os.path.lexists(wanted) else map(str.strip, wanted.split(','))
    names = [os.path.expanduser(part) for part in parts if part]
    for name in names:
        matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        if not matches:
            raise UserError(f'{shown(name)}: no such file or folder')
        for path in map(Path, matches):
            if not path.is_file() and not path.is_dir():
                raise UserError(f'{shown(path)} is no file: text is read more than once, so write '
                                'it to a file, and name that with --input')
            found |= set(search(path, suffixes)) if path.is_dir() else {path}
    paths = sorted(found)
    if not paths:
        raise UserError(f'{shown(wanted)}: no text files there: name the files that hold the '
                        'text, each or with a glob such as notes/*.org')
    if any(not os.path.isfile(name) for name in names):
        endings = Counter(ending_of(path) or 'without an ending' for path in paths)
        kinds = ', '.join(f'{n:,} {shown(ending)}' for ending, n in endings.most_common())
        print(f'reading {count_of(len(paths), "file")}: {kinds}')
    return paths


def search(root, suffixes):
    """The files with these endings in a folder and those below it; nothing that is hidden."""
    for at, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith('.')]
        for path in (Path(at, name) for name in files if not name.startswith('.')):
            if ending_of(path) in suffixes and path.is_file():
                yield path


def ending_of(path):
    """The ending without that of the compression, in small letters: '.txt' of a.TXT.gz."""
    return Path(path.name.lower().removesuffix('.gz')).suffix


def file_type(path):
    """'text', 'jsonl', 'json', 'csv' or 'parquet', by the name."""
    return ROWS.get(ending_of(path), 'text')


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


@contextmanager
def open_text(file, encoding='utf-8'):
    """A context: an open file of bytes → its text, unpacked if it is a .gz. Only \\n ends a line,
    and line endings are not changed. Raises UserError, also where reading fails later."""
    with_mark = 'utf-8-sig' if encoding == 'utf-8' else encoding  # of the byte order
    try:
        with gzip.open(file) if file.name.lower().endswith('.gz') else file as data:
            yield io.TextIOWrapper(data, with_mark, newline='\n')
    except UnicodeError as e:
        raise UserError(f'{shown(file.name)}: not {encoding.upper()} ({e}): save it as UTF-8 text, '
                        'or tell prepare.py what it is, such as --encoding=utf-16 or latin-1, or '
                        'name other files') from None
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f'{shown(file.name)}: cannot be read ({one_line(e)})') from None


def read_text(path):
    """The whole text of a UTF-8 file, as prepare.py reads it. Raises UserError, OSError."""
    with open(path, 'rb') as file, open_text(file) as text:
        return text.read()


# The beginning of a text up to the last white space that follows something else.
CUT = re.compile(r'(?s:.*\S)(?=[ \n])')


def place_to_cut(text, start, characters):
    """Where to cut a text, at most `characters` after `start`, at white space if possible."""
    if len(text) - start <= characters:
        return len(text)
    cut = CUT.match(text, start, start + characters + 1)
    return cut.end() if cut else start + characters


def whole_file(text, piece_chars=PIECE_CHARS):
    """A file is one document, and a blank file is none. Long files are cut where GPT-2's pattern
    also cuts, at white space that follows something else. So the tokens are those of the uncut
    file."""
    rest, is_new = '', True
    while block := text.read(BLOCK_CHARS):
        rest, start = rest + block, 0
        if is_new and rest.isspace():  # perhaps that is all there is
            continue
        while len(rest) - start > piece_chars:
            end = place_to_cut(rest, start, piece_chars)
            yield rest[start:end], is_new
            start, is_new = end, False
        rest = rest[start:]
    if rest.strip() or (rest and not is_new):
        yield rest, is_new


# -----------------------------------------------------------------------------
# rows


def read_rows(file, encoding='utf-8', columns=()):
    """Yield ('FILE, line N' or 'FILE, row N', row) of an open file of rows. A row is a JSON value
    or a dict of columns. columns: those that are read of Parquet, if there. Raises UserError."""
    kind, name = file_type(Path(file.name)), shown(file.name)
    if kind == 'parquet':
        yield from parquet_rows(file, name, columns)
        return
    with open_text(file, encoding) as text:
        if kind == 'csv':
            yield from csv_rows(text, name, '\t' if '.tsv' in file.name.lower() else ',')
        elif kind == 'json' and text.buffer.peek(1).lstrip()[:1] == b'[':  # one array, or lines
            for number, row in enumerate(json_value(text.read(), name), 1):
                yield f'{name}, row {number}', row
        else:
            yield from json_lines(text, name)


def json_lines(lines, name):
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f'{name}, line {number}'
            yield where, json_value(line, where)


def json_value(text, where):
    try:
        return json.loads(text)
    except ValueError as e:
        raise UserError(f'{where}: not JSON: {e}') from None


def csv_rows(text, name, delimiter):
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        for row in table:
            where = f'{name}, line {table.reader.line_num}'  # DictReader's stays behind
            if None in row or None in row.values():
                raise UserError(f'{where}: it has not the {len(table.fieldnames)} columns that the '
                                'first line names: quote text that has separators in it')
            yield where, row
    except csv.Error as e:
        raise UserError(f'{name}, line {table.reader.line_num}: {e}') from None


def parquet_rows(file, name, columns):
    with needs('pyarrow', 'a .parquet file'):
        import pyarrow.parquet
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = [column for column in table.schema_arrow.names if column in columns] or None
        for batch in table.iter_batches(256, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f'{name}, row {number}', row
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f'{name}: cannot be read ({one_line(e)})') from None


def find_field(names):
    """The first of TEXT_FIELDS that a row has."""
    return next((usual for usual in TEXT_FIELDS if usual in names), TEXT_FIELDS[0])


def text_of(row, field, where):
    """The text in a field of a row, '' where it is null. Raises UserError."""
    names = row if isinstance(row, dict) else ()
    field = field or find_field(names)
    if field not in names:
        found = ', '.join(map(repr, names))[:200] or 'no fields'
        raise UserError(f'{where}: no field {field!r}, it has {found}: choose with --text_field=…')
    if not isinstance(row[field], str | None):
        raise UserError(f'{where}: field {field!r} is {type(row[field]).__name__} and not text: '
                        'choose another with --text_field=…')
    return row[field] or ''


# -----------------------------------------------------------------------------
# the hub


class HubDataset:
    """Rows of a dataset of the hub, or of a folder laid out like one, as a source. The library
    `datasets` streams them: nothing of them is kept on disk or in memory."""

    unit, is_one_text = ' documents', False

    def __init__(self, path, subset, splits, text_field=''):
        """path: may end with @REVISION; splits: our name of a split → theirs"""
        self.name, self.splits, self.text_field = path, splits, text_field
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
            self.rows = {split: self.builder.as_streaming_dataset(hub_split)
                         for split, hub_split in splits.items()}
            for split, rows in self.rows.items():
                for row in rows.take(1):
                    text_of(row, text_field, f'{self.name}, split {splits[split]}')
                    self.rows[split] = rows.select_columns([text_field or find_field(row)])
        known = self.builder.info.splits or {}
        counts = [known[split].num_examples for split in splits.values() if split in known]
        self.total = sum(counts) if len(counts) == len(splits) else None

    def pieces(self):
        self._position = 0
        with explain_hub_errors(self.name):
            for split, rows in self.rows.items():
                own = '' if split == 'train' and 'val' not in self.splits else split
                for row in rows:
                    self._position += 1
                    text = text_of(row, self.text_field, self.name)
                    if text.strip():
                        yield Piece(text, True, own)

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
