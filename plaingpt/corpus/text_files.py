"""People's own files as a source of documents."""

import copy
import glob
import hashlib
import math
import os
import sysconfig
from datetime import UTC, datetime
from pathlib import Path

from plaingpt.corpus import documents
from plaingpt.corpus.documents import Piece
from plaingpt.corpus.rows import file_type, inner_suffix, name_of, read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of

ONE_TEXT_FILES = 100  # fewer text files than this are one text
LISTED_FILES = 1000  # more input files than this are not listed in meta.json
SUFFIXES = {  # of the files that are read in a folder
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.html', '.css', '.xml',
    '.json', '.yaml', '.yml', '.toml', '.jsonl', '.parquet'}
STANDARD_LIBRARY = sysconfig.get_paths()['stdlib']


class Files:
    """Documents of files: text, .jsonl, .json, .csv, .tsv and .parquet, also .gz and .zst.

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
        before = self.nulls = self.replaced = 0
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
                        continue
                    text, replaced = documents.replace_surrogates(text, self.errors)
                    self.replaced += replaced
                    if text.strip() or file_type(path) == 'text':  # a blank row is no document
                        yield Piece(text, new_document, at)
            if has_middle:  # of a .parquet file only a column was read: it is read once more
                again = span or file_type(path) == 'parquet'
                self._inputs.append({
                    'name': str(path).encode('utf-8', 'backslashreplace').decode(), 'bytes': size,
                    'sha256': sha256_of(path) if again else digest.hexdigest()})
            before += size

    def _can_be_cut(self, path):
        if path.suffix.lower() in documents.COMPRESSED_BLOCK_BYTES:
            return False
        kind = file_type(path)  # the rows of other files may go over several lines
        return kind in ('jsonl', 'parquet') or (kind == 'text' and self.form == 'line')

    def _documents(self, path, digest, span):
        try:
            yield from self._read(path, digest, span)
        except documents.TooLong as e:
            raise UserError(f'{name_of(path, span)}{e}') from None

    def _read(self, path, digest, span):
        if file_type(path) != 'text':
            return read_rows(path, self.text_field, self.errors, digest, span)
        blocks = documents.read_text(path, self.errors, digest, span)
        return documents.DOCUMENT_FORMS[self.form](
            blocks if self.form == 'file' else documents.split_lines(blocks))

    def place_of(self, character):
        for path in self.paths:
            if file_type(path) == 'text':
                line = 1
                for text, _ in documents.read_text(path, self.errors):
                    before, found, _ = text.partition(character)
                    line += before.count('\n')
                    if found:
                        return f'{path}, line {line}'
            else:
                for row, (text, *_) in enumerate(self._documents(path, None, None), 1):
                    if character in documents.replace_surrogates(text or '', self.errors)[0]:
                        return f'{path}, row {row}'
        return self.name

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
