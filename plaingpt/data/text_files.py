"""People's own files as a source of documents."""

import copy
import glob
import hashlib
import itertools
import math
import os
import re
import stat
import sysconfig
from collections import Counter, deque
from datetime import UTC, datetime
from pathlib import Path

from plaingpt.data import documents
from plaingpt.data.documents import Piece
from plaingpt.data.rows import file_type, inner_suffix, name_of, read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import open_regular, sha256_of
from plaingpt.system.formatting import count_of, quoted, shown
from plaingpt.data.dataset import UNFINISHED

ONE_TEXT_FILES = 100  # fewer text files than this are one text
SMALL_PIECE_CHARS = 2**15  # of a file, what goes into one split
LISTED_FILES = 1000  # more input files than this are not listed in meta.json
SUFFIXES = {  # of the files that are read in a folder, in any case
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.html', '.css', '.xml',
    '.yaml', '.yml', '.toml', '.jsonl', '.ndjson', '.parquet'}
TABLES = {'.json', '.csv', '.tsv'}  # read in a folder without texts: beside code they are settings
NO_TEXTS = {'node_modules', '__pycache__'}  # folders that are left out
STANDARD_LIBRARY = sysconfig.get_paths()['stdlib']


class Files:
    """Documents of files: text, .jsonl, .json, .csv, .tsv and .parquet, also .gz and .zst.

    All bytes of all files in a row are cut into parts of one size. A part has the lines that begin
    in it, where these are documents, and the row groups and other files whose middle is in it."""

    unit, cut = 'B', None

    def __init__(self, paths, name, form='file', text_field='text', errors='strict'):
        self.paths, self.name = paths, name
        self.form, self.text_field, self.errors = form, text_field, errors
        self.sizes = [size_of(path) for path in paths]
        self.total = sum(self.sizes)
        # Of few large files each split gets its share; of many, most stay whole.
        self.piece_chars = min(max(self.total // 100, SMALL_PIECE_CHARS), documents.PIECE_CHARS)
        self.begin, self.end = 0, math.inf  # of the part, in bytes of all files
        self.is_one_text = form == 'file' and len(paths) < ONE_TEXT_FILES and \
            all(file_type(path) == 'text' for path in paths)

    def pieces(self, mark=None):
        before = self.nulls = self.replaced = 0
        line_open = False  # the file before ends within a line
        self._inputs = []
        for path, size in zip(self.paths, self.sizes, strict=True):
            span = max(0, self.begin - before), self.end - before
            has_middle, digest = span[0] <= size / 2 < span[1], hashlib.sha256()
            if not self._can_be_cut(path) or (span[0] == 0 and size <= span[1]):
                span = None  # all of it or nothing
            if has_middle or (span and span[0] < size and span[1] > 0):
                for text, new_document, position in self._wanted(path, digest, span):
                    at = min(max(before + position - self.begin, 0), self.total)
                    if self.is_one_text:
                        # by itself: what a tokenizer learns from does not depend on the order
                        if line_open and new_document:
                            yield Piece('\n', False, at)
                        line_open = not text.endswith(('\n', '\r'))
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

    def _wanted(self, path, digest, span):
        """The documents, but rows that are null, which are counted, and blank ones."""
        if file_type(path) == 'text':  # it was decoded, so it has no halves of characters
            yield from self._documents(path, digest, span)
            return
        for text, new_document, position in self._documents(path, digest, span):
            if text is None:
                self.nulls += 1
                continue
            if not text.isascii():  # which is known at once
                text, replaced = documents.replace_surrogates(text, self.errors)
                self.replaced += replaced
            if text.strip():
                yield text, new_document, position

    def _documents(self, path, digest, span):
        try:
            yield from self._read(path, digest, span)
        except documents.TooLong as e:
            raise UserError(f'{name_of(path, span)}{e}') from None

    def _read(self, path, digest, span):
        if file_type(path) != 'text':
            return read_rows(path, self.text_field, self.errors, digest, span)
        blocks = documents.read_text(path, self.errors, digest, span)
        if self.form == 'file':
            return documents.whole_files(blocks, self.piece_chars)
        return documents.DOCUMENT_FORMS[self.form](documents.split_lines(blocks))

    def place_of(self, character):
        for path in self.paths:
            if file_type(path) == 'text':
                line = 1
                for text, _ in documents.read_text(path, self.errors):
                    before, found, _ = text.partition(character)
                    line += before.count('\n')
                    if found:
                        return f'{name_of(path)}, line {line}'
            else:
                for row, (text, *_) in enumerate(self._documents(path, None, None), 1):
                    if character in documents.replace_surrogates(text or '', self.errors)[0]:
                        return f'{name_of(path)}, row {row}'
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


def size_of(path):
    """Bytes of a file. Raises UserError, also for what is not a regular file."""
    try:
        status = os.stat(path)
    except OSError as e:
        raise UserError(f'{shown(path)}: {e.strerror}') from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f'{shown(path)} is a pipe, a socket or a device, and text is read more '
                        'than once: write it to a file, and name that with --input')
    return status.st_size


def find_standard_library(folder, tell=None):
    """The source of Python's own standard library: text on every machine."""
    # no tests, nothing that was installed later, and no tables that are programs only in name
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
            'pydoc_data', 'encodings'}
    every = sorted(Path(folder).rglob('*.py'))
    found = [p for p in every if not skip & set(p.relative_to(folder).parts)
             and not p.name.startswith('_sysconfigdata')]
    if tell:
        tell(f'reading {len(found):,} .py files; left out: {len(every) - len(found):,} of tests, '
             'tables and packages that were installed later')
    return found


# -----------------------------------------------------------------------------
# which files are read


def find_files(wanted, tell=None):
    """'a.txt,~/notes/,logs/*.gz' → sorted paths, each file once. Where folders or globs are among
    them, `tell` gets the lines that say what is read and what is left out. Raises UserError."""
    paths, left_out, searched = set(), {}, False
    for one in [wanted] if os.path.exists(wanted) else wanted.split(','):
        if not one.strip():  # it would be the working directory
            continue
        one = os.path.expanduser(one if os.path.lexists(one) else one.strip())
        if re.match(r'[A-Za-z][\w+.-]*://', one) and not os.path.lexists(one):
            raise UserError(f'input={shown(one)}: URLs are not read: download it, and name the '
                            'file')
        pattern = glob.has_magic(one) and not os.path.lexists(one)
        if not pattern and not os.path.isdir(one):
            paths.add(Path(one))
            continue
        searched, reasons = True, match(one) if pattern else search(Path(one))
        found = {path for path, reason in reasons.items() if not reason}
        if not found:
            problem = 'nothing is read: ' + '; '.join(describe_left_out(reasons)) if reasons else \
                'no file of that form' if pattern else 'it is an empty folder'
            raise UserError(f'{shown(one)}: {problem}: name the files that hold the text, each or '
                            'with a glob such as notes/*.txt')
        paths |= found
        left_out.update((path, reason) for path, reason in reasons.items() if reason)
    if not paths:
        raise UserError(f'input={shown(wanted)!r}: it names no file')
    found = sorted({real_name(path): path for path in sorted(paths)}.values())
    if tell and searched:
        left_out = {path: reason for path, reason in left_out.items() if path not in paths}
        tell(f'reading {count_of(len(found), "file")}: '
             f'{count_endings(map(inner_suffix, found))}' + '; left out:' * bool(left_out))
        for line in describe_left_out(left_out):
            tell(f'  {line}')
    return found


def real_name(path):
    """What is the same for all names of a file: links of both kinds lead to one."""
    try:
        status = os.stat(path)
    except OSError:
        return path
    # Some file systems give two files one number.
    return (status.st_dev, status.st_ino) if status.st_nlink > 1 else os.path.realpath(path)


def search(root):
    """What is in a folder → {path: why it is left out, or ''}. Raises UserError."""
    reasons = {}
    for folder, files in walk(root, reasons):
        check_no_hub_folder(folder)
        for path in files:
            suffix = inner_suffix(path)
            reasons[path] = 'hidden' if path.name.startswith('.') else why_no_text(path) or (
                '' if suffix in SUFFIXES | TABLES else suffix or 'without an ending')
    found = [path for path, reason in reasons.items() if not reason]
    if any(file_type(path) == 'text' for path in found):
        for path in found:
            if inner_suffix(path) in TABLES:
                reasons[path] = f'{inner_suffix(path)} beside texts'
    return reasons


def match(pattern):
    """What a glob matches → {path: why it is left out, or ''}. Raises UserError."""
    parts, reasons, seen = Path(pattern).parts, {}, set()
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    for path in expand(pattern, reasons):
        if not path.is_dir():
            reasons[path] = why_no_text(path) or \
                ('card of a dataset' if is_card(path) else '')
            if not reasons[path] and path.parent not in seen:
                seen.add(path.parent)
                for folder in path.parents:
                    if folder.is_relative_to(root):
                        check_no_hub_folder(folder)
        elif '**' not in parts:
            reasons[path] = 'folder'
    return reasons


def expand(pattern, reasons):
    """Yield what a glob matches. A ** goes into the folders that walk() goes into."""
    parts = Path(pattern).parts
    if '**' not in parts:
        check_permissions(parts)
        yield from map(Path, glob.glob(pattern))
        return
    at = parts.index('**')
    check_permissions(parts[:at])
    for root in filter(os.path.isdir, glob.glob(str(Path(*parts[:at])))):
        for folder, _ in walk(Path(root), reasons):
            yield from expand(str(Path(glob.escape(str(folder)), *parts[at + 1:] or '*')), reasons)


def check_permissions(parts):
    """Raises UserError for a folder that a glob would have to look into and may not: glob.glob
    passes over it."""
    for end, part in enumerate(parts):
        for folder in filter(os.path.isdir, glob.glob(str(Path(*parts[:end]))) if end else ['.']):
            try:
                if glob.has_magic(part):
                    os.listdir(folder)
                else:
                    os.lstat(os.path.join(folder, part))
            except PermissionError as e:
                raise not_listed(folder, e) from None
            except OSError:
                pass  # there is no such file


def not_listed(folder, e):
    return UserError(f'{shown(folder)}: {e.strerror}: allow it, or name the files in it that you '
                     'want')


def walk(root, reasons):
    """Yield (folder, paths of its files) of a folder and those below it, each real one once: first
    those that are there, then those that links lead to. reasons: gets the folders that are left
    out, as {path: why}. Raises UserError."""
    folders, seen, top = deque([root]), set(), root.resolve()
    while folders:
        folder, files = folders.popleft(), []
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        try:
            names = sorted(os.listdir(folder))
        except OSError as e:
            raise not_listed(folder, e) from None
        for name in names:
            path = folder / name
            if not path.is_dir():
                files.append(path)
            elif name.startswith('.') or name in NO_TEXTS:
                reasons[path] = 'hidden' if name.startswith('.') else name
            elif not path.is_symlink():
                folders.appendleft(path)
            elif path.resolve() in top.parents:
                reasons[path] = 'link to a folder above'
            else:
                folders.append(path)
        yield folder, files


DATASET_FILES = re.compile(r'(train|val|test)(_\d{6})?(_mask)?\.bin|'
                           r'(meta|journal)\.json(\.tmp)?|duplicates')


def why_no_text(path):
    """Why a file is no text that a person has there, whatever its ending, or ''."""
    if not path.is_file():
        return 'pipe, socket, device or broken link'
    of_ours = DATASET_FILES.fullmatch(path.name) and (
        path.suffix == '.bin' or path.parent.name == UNFINISHED
        or b'"format_version"' in head(path, 2**10))
    return 'of a prepared dataset' if of_ours else ''


def head(path, size):
    try:
        with open_regular(path) as f:
            return f.read(size)
    except OSError:
        return b''


def count_endings(endings):
    """['.md', '.txt', '.md'] → '2 .md, 1 .txt'"""
    counts = Counter(endings).most_common()
    shown_counts = [f'{n:,} {shown(suffix) or "without an ending"}' for suffix, n in counts[:6]]
    if rest := counts[6:]:
        shown_counts.append(f'{sum(n for _, n in rest):,} of {len(rest):,} other endings')
    return ', '.join(shown_counts)


def describe_left_out(reasons):
    """{path: why} → '2 .png: a.png, b.png' for each reason, those of many files first."""
    groups = {}
    for path, reason in sorted(reasons.items()):
        if reason:
            groups.setdefault(reason, []).append(path)
    lines, groups = [], sorted(groups.items(), key=lambda group: -len(group[1]))
    for reason, paths in groups[:8]:
        names = [shown(path) + '/' * path.is_dir() for path in paths[:2]] + ['…'] * (len(paths) > 2)
        lines.append(f'{len(paths):,} {shown(reason)}: {", ".join(names)}')
    if rest := groups[8:]:
        others = [shown(reason) for reason, _ in rest[:12]] + ['…'] * (len(rest) > 12)
        lines.append(f'{sum(len(paths) for _, paths in rest):,} more: {", ".join(others)}')
    return lines


# -----------------------------------------------------------------------------
# folders laid out like a dataset of the Hugging Face hub

# What the README.md of a dataset says in its front matter, and that of a project does not.
CARD = re.compile(rb'^(dataset_info|configs|task_categories|task_ids|size_categories|'
                  rb'annotations_creators|language_creators|source_datasets) *:', re.M)


def is_hub_folder(folder):
    return any(map(is_card, (folder / 'README.md', folder / 'dataset_infos.json')))


def check_no_hub_folder(folder):
    """Raises UserError for such a folder where other files are read with it."""
    if is_hub_folder(folder):
        raise UserError(f'{shown(folder)} is laid out like a dataset of the Hugging Face hub, '
                        'which has splits of its own: prepare it alone, with python prepare.py '
                        f'hf --path={shown(quoted(folder))}')


def is_card(path):
    """Whether a file describes a dataset of the hub and is no document."""
    if path.name != 'README.md':
        return path.name == 'dataset_infos.json' and os.path.isfile(path)
    opening = re.match(rb'---\r?\n(.*?)(^---|\Z)', head(path, 2**20), re.S | re.M)
    return bool(opening and (CARD.search(opening[1]) or any(path.parent.glob('data/*.parquet'))))
