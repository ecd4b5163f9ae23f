"""Where text comes from: people's own files, a text behind a URL, datasets of the Hugging Face hub.

A source yields its text in pieces, in an order that is always the same, one in memory at a time:

    source.pieces(mark)    yields Piece; starts at `mark` where one is given
    source.mark()          the place after the last piece, as JSON; None where a source cannot
                           start there and has to read everything again
    source.total           how much text there is, in source.unit, or None where that is unknown
    source.identity()      JSON that changes when the input changes
    source.summary()       what tells the input from an earlier one, for people
    source.is_one_text     True where few files are one text, which is not cut into documents
    source.nulls           how many rows were left out because their text is null
    source.inputs()        after the last piece, {name, bytes and sha256 of each file: a list}
    source.part(k, n)      the k-th of n parts, from 1 on, as a source: together they have its
                           pieces, in its order; not where it is one text
    source.cut             JSON that is the same in all parts of n where they fit together
"""

import copy
import glob
import hashlib
import http.client
import math
import os
import sysconfig
import urllib.request
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from plaingpt.corpus import documents
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import sha256_of
from plaingpt.system.formatting import one_line

ONE_TEXT_FILES = 100  # fewer text files than this are one text
LISTED_FILES = 1000  # more input files than this are not listed in meta.json
DOWNLOAD_TIMEOUT = 30  # seconds without a byte
SUFFIXES = {  # of the files that are read in a folder
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.html', '.css', '.xml',
    '.json', '.yaml', '.yml', '.toml', '.jsonl', '.parquet'}
STANDARD_LIBRARY = sysconfig.get_paths()['stdlib']


class Piece(NamedTuple):
    text: str
    new_document: bool  # False where the document of the piece before continues
    position: int  # how far the input is read, in source.unit
    split: str = ''  # 'train' or 'val' where the corpus itself says so


def open_source(name, corpus, config, errors='strict'):
    """The source of a corpus and a PrepareConfig; `errors` as in bytes.decode. UserError."""
    where = config.input or (corpus.files or corpus.url if corpus.hub is None
                             else config.path or corpus.hub)
    if not where:
        raise UserError(f'{name} needs {corpus.required_option()}')
    form = corpus.document_form if config.documents == 'auto' else config.documents
    text_field = config.text_field or corpus.text_field
    if corpus.hub is not None:
        splits = {'train': config.split} if config.split else corpus.splits
        if config.val_split:
            splits = {**splits, 'val': config.val_split}
        own = config.path or config.input or config.subset  # then the table's count is not its
        return HubDataset(where, config.subset or corpus.subset, splits, text_field, form,
                          0 if own else corpus.documents)
    if corpus.url and not config.input:
        data = download(corpus.url, corpus.sha256, 'name a local copy with --input=FILE')
        return TextInMemory(data.decode(), corpus.url)
    paths = corpus.find(where)
    rows = [path for path in paths if file_type(path) != 'text']
    if rows and config.documents != 'auto':
        raise UserError(f'{rows[0]}: each row is a document, so --documents={config.documents} '
                        'cannot be: leave it out, or name text files alone with --input')
    return Files(paths, config.input or name, form, text_field, errors)


class Files:
    """Documents of files: text, .jsonl and .parquet, also .gz and .zst.

    All bytes of all files in a row are cut into parts of one size. A part has the lines that begin
    in it, where these are documents, and the row groups and other files whose middle is in it."""

    unit, cut = 'B', None

    def __init__(self, paths, name, form='file', text_field='text', errors='strict'):
        self.paths, self.name = paths, name
        self.form, self.text_field, self.errors = form, text_field, errors
        try:
            self.sizes = [path.stat().st_size for path in paths]
        except OSError as e:
            raise UserError(f'{e.filename}: {e.strerror}') from None
        self.total = sum(self.sizes)
        self.begin, self.end = 0, math.inf  # of the part, in bytes of all files
        self.is_one_text = form == 'file' and len(paths) < ONE_TEXT_FILES and \
            all(file_type(path) == 'text' for path in paths)

    def pieces(self, mark=None):
        before = self.nulls = 0
        self._inputs = []
        for path, size in zip(self.paths, self.sizes, strict=True):
            span = max(0, self.begin - before), self.end - before
            has_middle, digest = span[0] <= size / 2 < span[1], hashlib.sha256()
            if not self._can_be_cut(path) or (span[0] == 0 and size <= span[1]):
                span = None  # all of it or nothing
            if has_middle or (span and span[0] < size and span[1] > 0):
                for text, new_document, position in self._documents(path, digest, span):
                    at = min(max(before + position - self.begin, 0), self.total)
                    if text is None:
                        self.nulls += 1
                    elif text.strip() or not new_document:
                        yield Piece(text, new_document, at)
            if has_middle:  # of a .parquet file only a column was read: it is read once more
                again = span or file_type(path) == 'parquet'
                self._inputs.append({
                    'name': str(path).encode('utf-8', 'backslashreplace').decode(), 'bytes': size,
                    'sha256': sha256_of(path) if again else digest.hexdigest()})
            before += size

    def _can_be_cut(self, path):
        return path.suffix not in documents.COMPRESSED_BLOCK_BYTES and (
            self.form == 'line' or file_type(path) != 'text')

    def _documents(self, path, digest, span):
        try:
            yield from self._read(path, digest, span)
        except documents.TooLong as e:
            raise UserError(f'{documents.name_of(path, span)}{e}') from None

    def _read(self, path, digest, span):
        if file_type(path) == 'jsonl':
            rows = documents.json_rows(path, self.errors, digest, span)
            return ((documents.get_text(row, self.text_field, where), True, position)
                    for row, where, position in rows)
        if file_type(path) == 'parquet':
            return documents.parquet_rows(path, self.text_field, span)
        blocks = documents.read_text(path, self.errors, digest, span)
        return documents.DOCUMENT_FORMS[self.form](
            blocks if self.form == 'file' else documents.split_lines(blocks))

    def part(self, number, of):
        part = copy.copy(self)
        part.begin, part.end = self.total * (number - 1) // of, self.total * number // of
        part.total = part.end - part.begin
        if number == of:
            part.end = math.inf  # files without a byte may follow the last byte
        return part

    def mark(self):
        return None

    def identity(self):
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self.sizes, strict=True):
            status = f'\0{size}\0{path.stat().st_mtime_ns}\n'
            digest.update(os.fsencode(path) + status.encode())
        return digest.hexdigest()

    def summary(self):
        newest = max(self.paths, key=lambda path: path.stat().st_mtime_ns)
        changed = datetime.fromtimestamp(newest.stat().st_mtime, UTC)
        return (f'{f"{len(self.paths)} files, " * (len(self.paths) > 1)}{sum(self.sizes):,} bytes, '
                f'{newest} last changed at {changed}')

    def inputs(self):
        return self._inputs


def describe_inputs(files):
    """source.inputs() → JSON: all files together and, of up to LISTED_FILES, each. The checksum of
    all is that of what `sha256sum FILES` prints."""
    if not files:
        return {}
    lines = ''.join(f'{file["sha256"]}  {file["name"]}\n' for file in files)
    return {'count': len(files), 'bytes': sum(file['bytes'] for file in files),
            'sha256': hashlib.sha256(lines.encode()).hexdigest(),
            'files': files if len(files) <= LISTED_FILES else []}


def file_type(path):
    """'text', 'jsonl' or 'parquet', by the name."""
    suffix = inner_suffix(path)
    return suffix[1:] if suffix in ('.jsonl', '.parquet') else 'text'


def inner_suffix(path):
    return Path(path.stem).suffix if path.suffix in ('.gz', '.zst') else path.suffix


def find_files(wanted):
    """'a.txt,~/notes/,logs/*.gz' → sorted paths, each once. Raises UserError."""
    paths = set()
    for one in [wanted] if Path(wanted).exists() else wanted.split(','):
        if not one.strip():  # it would be the working directory
            continue
        root = Path(one).expanduser()
        if root.is_dir():
            found = {p for p in root.rglob('*')
                     if inner_suffix(p) in SUFFIXES and p.is_file()
                     and not any(part.startswith('.') for part in p.relative_to(root).parts)}
            if not found:
                raise UserError(f'{root}: no .txt, .md, .jsonl, .parquet or source file in it')
        elif glob.has_magic(one) and not root.exists():
            found = {Path(p) for p in glob.glob(str(root), recursive=True) if Path(p).is_file()}
            if not found:
                raise UserError(f'{one}: no file of that form')
        else:
            found = {root}
        paths |= found
    return sorted({os.path.realpath(path): path for path in sorted(paths)}.values())


def find_standard_library(folder):
    """The source of Python's own standard library: text on every machine."""
    # no tests, nothing that was installed later, and no tables that are programs only in name
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
            'pydoc_data', 'encodings'}
    return sorted(p for p in Path(folder).rglob('*.py')
                  if not skip & set(p.relative_to(folder).parts)
                  and not p.name.startswith('_sysconfigdata'))


class TextInMemory:
    """A text that was downloaded."""

    unit, is_one_text, nulls = 'B', True, 0

    def __init__(self, text, name):
        self.text, self.name = text, name
        self.total = len(text.encode())

    def pieces(self, mark=None):
        for text, new_document, _ in documents.whole_files([(self.text, 0)]):
            yield Piece(text, new_document, self.total)

    def mark(self):
        return None

    def identity(self):
        return hashlib.sha256(self.text.encode()).hexdigest()

    def inputs(self):
        return [{'name': self.name, 'bytes': self.total, 'sha256': self.identity()}]


def download(url, sha256, advice):
    """The bytes behind `url`. Raises UserError; `advice`: what to do with a copy instead."""
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT) as response:
            data = response.read()
    # URLError, timeouts and resets are OSErrors; what ends too early is an HTTPException
    except (OSError, http.client.HTTPException) as e:
        raise UserError(f'{url} could not be downloaded ({getattr(e, "reason", e)}): try again, or '
                        f'{advice}') from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f'{url}: what arrived has another checksum: try again, or {advice}')
    return data


class HubDataset:
    """Rows of a dataset of the Hugging Face hub, or of a folder laid out like one. They are
    streamed: nothing is kept on disk or in memory. A part has some files of each split or, where
    it has fewer files than there are parts and these are Parquet, some row groups."""

    unit, is_one_text = ' documents', False

    def __init__(self, path, subset, splits, text_field='text', form='file', count=0):
        """splits: our name of a split → theirs; count: of documents, if the hub does not say."""
        self.name, self.splits, self.form, self.text_field = path, splits, form, text_field
        with needs('datasets', path):
            import datasets
            from huggingface_hub.utils import logging as hub_logging
        # Each attempt to connect would be a warning of its own before our one line.
        datasets.logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
        with explain_hub_errors(self.name):
            if subset and Path(path).is_dir() and \
                    subset not in datasets.get_dataset_config_names(path):
                subset = ''  # a copy of the subset alone
            self.builder = load_builder(path, subset or None)
            self.rows = {split: self.builder.as_streaming_dataset(hub_split)
                         for split, hub_split in splits.items()}
            for split, hub_split in splits.items():
                for row in self.rows[split].take(1):
                    documents.get_text(row, text_field, f'{path}, split {hub_split}')
        known = self.builder.info.splits or {}
        counts = [known[split].num_examples for split in splits.values() if split in known]
        self.total = sum(counts) if len(counts) == len(splits) else count
        # Articles are made of many rows, so the number of rows does not give theirs.
        self.total = self.total if form == 'file' and self.total else None

    def pieces(self, mark=None):
        self._position, self.nulls = (mark['at'], mark['nulls']) if mark else (0, 0)
        names = list(self.splits)
        with explain_hub_errors(self.name):
            for split in names[names.index(mark['split']) if mark else 0:]:
                if self.rows[split] is None:
                    continue  # no files for this part
                rows = self.rows[split].select_columns([self.text_field])
                if mark and mark['split'] == split:
                    rows.load_state_dict(mark['rows'])
                self._rows, self._split = rows, split
                for text in self._documents(map(self._text, rows)):
                    self._position += 1
                    if text.strip():
                        yield Piece(text, True, self._position, split if len(names) > 1 else '')

    def _documents(self, texts):
        if self.form == 'file':
            return texts
        # a row is a line
        lines = ((text if text.endswith('\n') else text + '\n', 0) for text in texts)
        return (text for text, _, _ in documents.DOCUMENT_FORMS[self.form](lines))

    def _text(self, row):
        text = documents.get_text(row, self.text_field, self.name)
        self.nulls += text is None
        return text or ''

    def part(self, number, of):
        part = copy.copy(self)
        part.total = self.total and self.total // of  # about
        part.rows, part.cut = {}, {}
        with explain_hub_errors(self.name):
            for split, rows in self.rows.items():
                if self.form == 'file' and rows.num_shards < of and hasattr(rows, 'reshard'):
                    rows = rows.reshard()
                # An article is made of rows, which may be in two files.
                count = part.cut[split] = rows.num_shards if self.form == 'file' else 1
                if count >= of:
                    part.rows[split] = rows.shard(of, number - 1)
                else:
                    first, end = count * (number - 1) // of, count * number // of
                    part.rows[split] = rows.shard(count, first) if first < end else None
        return part

    def mark(self):
        if self.form != 'file':
            return None
        return {'split': self._split, 'rows': self._rows.state_dict(), 'at': self._position,
                'nulls': self.nulls}

    def identity(self):
        return self.builder.hash

    def summary(self):
        return f'{self.name} of version {self.builder.hash}'

    def inputs(self):
        return []  # its version is in the identity


def load_builder(path, subset):
    """A dataset's description. Where the dataset is a script, the hub's own Parquet copy of it."""
    import datasets
    try:
        return datasets.load_dataset_builder(path, subset)
    except RuntimeError as e:
        if 'scripts are no longer supported' not in str(e):
            raise
        print(f'{path} is a loading script, which is not run: reading the Parquet copy that the '
              'hub made of it, of a large dataset perhaps only the first part')
        return datasets.load_dataset_builder(path, subset, revision='refs/convert/parquet')


@contextmanager
def explain_hub_errors(name, advice='check the name and the connection, or name a local copy with '
                                    '--input=FOLDER'):
    """Turns what the hub's libraries raise, a wide family, into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        raise UserError(f'{name} cannot be read ({type(e).__name__}: {one_line(e)[:200]}): '
                        f'{advice}') from None
