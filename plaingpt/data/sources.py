"""Where text comes from: people's own files, a text behind a URL, datasets of the Hugging Face hub.

A source yields its text in pieces, in an order that is always the same, one in memory at a time:

    source.pieces(mark)    yields Piece; starts at `mark` where one is given
    source.mark()          the place after the last piece, as JSON; None where a source cannot
                           start there and has to read everything again
    source.position()      how much of source.total is read, in source.unit
    source.total           how much there is, or None where that is unknown
    source.identity()      JSON that changes when the input changes
    source.is_one_text     True where few files are one text, which is not cut into documents
    source.nulls           how many rows were left out because their text is null
    source.inputs()        {name, bytes and sha256 of each file: a list}
"""

import glob
import hashlib
import http.client
import io
import os
import stat
import sysconfig
import urllib.request
from collections import Counter
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path

from plaingpt.data import readers
from plaingpt.data.dataset import TOKEN_FILES, UNFINISHED
from plaingpt.data.hub import HubDataset
from plaingpt.data.readers import (
    UTF8,
    NotText,
    Piece,
    file_type,
    find_fault,
    find_unread,
    inner_suffix,
)
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of
from plaingpt.system.formatting import count_of, quoted, shown
from plaingpt.system.streams import ProgressBar

NAME_SHOWN = 100  # characters of --input in messages
FILES_SHOWN = 10  # in a message
NAMED_FILES = 3  # more of them in one folder are a glob, such as notes/*, that a shell expanded
ONE_TEXT_FILES = 100  # fewer text files than this are one text
SMALL_PIECE_CHARS = 2**15  # of a file, what goes into one split
DOWNLOAD_TIMEOUT = 30  # seconds without a byte
BLOCK_CHARS = 4096  # of a sample
SUFFIXES = {  # of the files that are read in a folder, in any case
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.css', '.xml',
    '.yaml', '.yml', '.toml', '.jsonl', '.ndjson', '.parquet'}
TABLES = {'.json', '.csv'}  # read in a folder without texts: beside code they are settings
NO_TEXTS = {'node_modules', '__pycache__', UNFINISHED}
STANDARD_LIBRARY = sysconfig.get_paths()['stdlib']


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
        own = {split: getattr(config, f'{split}_split') for split in ('val', 'test')}
        splits = {**splits, **{split: theirs for split, theirs in own.items() if theirs}}
        if config.max_tokens:  # when there are so many to train on, nothing else is left to read
            splits = dict(sorted(splits.items(), key=lambda item: item[0] == 'train'))
        is_other = config.path or config.input or config.subset  # than that of the table
        return HubDataset(where, config.subset or corpus.subset, splits, text_field, form,
                          0 if is_other else corpus.documents)
    if corpus.url and not config.input:
        data = download(corpus.url, corpus.sha256, 'prepare a copy of it: '
                        f'python prepare.py {name} {corpus.url.split("/")[-1]}')
        return DownloadedText(data.decode(), corpus.url)
    paths = corpus.find(where, print, partial(find_fault, errors=errors, encoding=config.encoding))
    rows = [path for path in paths if file_type(path) != 'text']
    if rows and config.documents != 'auto':
        raise UserError(f'{shown(rows[0])}: each row is a document, so '
                        f'--documents={config.documents} cannot be: leave it out, or name text '
                        'files alone with --input')
    if config.text_field and not rows:
        raise UserError(f'text_field={config.text_field}: {shown(paths[0])} is text and has no '
                        'fields: leave it out')
    files = Files(paths, config.input or name, form, text_field, errors, config.encoding)
    files.is_one_text &= config.documents == 'auto'  # few files are, unless each was said to be one
    return files


class Files:
    """Documents of files of text and of rows. Few text files are one text together, with a line
    break between two where the first does not end with one."""

    unit = 'B'

    def __init__(self, paths, name, form='file', text_field='text', errors='strict',
                 encoding=UTF8):
        self.paths, self.name = paths, name if len(name) < NAME_SHOWN else f'{name[:NAME_SHOWN]}…'
        self.form, self.text_field, self.errors, self.encoding = form, text_field, errors, encoding
        self.sizes = [size_of(path) for path in paths]
        self.total = sum(self.sizes)
        # Of few large files each split gets its share; of many, most stay whole.
        self.piece_chars = min(max(self.total // 100, SMALL_PIECE_CHARS), readers.PIECE_CHARS)
        self.is_one_text = form == 'file' and len(paths) < ONE_TEXT_FILES and \
            all(file_type(path) == 'text' for path in paths)

    def pieces(self, mark=None):
        self.nulls = self._done = 0
        line_open = False  # the file before ends within a line
        for path, size in zip(self.paths, self.sizes, strict=True):
            with readers.open_bytes(path) as self._file:
                for text, new_document in self.documents(self._file):
                    if file_type(path) != 'text':
                        text = readers.replace_surrogates(text)
                    if self.is_one_text:
                        # by itself: what a tokenizer learns from does not depend on the order
                        if line_open and new_document:
                            yield Piece('\n', False)
                        line_open = not text.endswith(('\n', '\r'))
                    yield Piece(text, new_document)
            self._done += size

    def documents(self, file):
        """Yield (text, whether it begins a document) of an open file."""
        path = Path(file.name)
        if file_type(path) == 'text':
            with readers.open_text(file, self.errors, self.encoding) as text:
                yield from readers.whole_file(text, self.piece_chars) if self.form == 'file' \
                    else readers.DOCUMENT_FORMS[self.form](text)
            return
        for where, row in readers.iter_rows(file, self.text_field, self.errors, self.encoding):
            text = readers.text_of(row, self.text_field, where)
            self.nulls += text is None
            if text and text.strip():
                yield text, True

    def position(self):
        return self._done + (0 if self._file.closed else self._file.tell())

    def mark(self):
        return None

    def identity(self):
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self.sizes, strict=True):
            status = f'\0{size}\0{status_of(path).st_mtime_ns}\n'
            digest.update(os.fsencode(path) + status.encode())
        return digest.hexdigest()

    def inputs(self):
        return [{'name': str(path).encode('utf-8', 'backslashreplace').decode(), 'bytes': size,
                 'sha256': sha256_of(path)}
                for path, size in zip(self.paths, self.sizes, strict=True)]


def status_of(path):
    """os.stat of a file. Raises UserError."""
    try:
        return os.stat(path)
    except OSError as e:
        raise UserError(f'{shown(path)}: {e.strerror}') from None


def size_of(path):
    """Bytes of a file. Raises UserError, also for what is not a regular file."""
    status = status_of(path)
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f'{shown(path)} is a pipe, a socket or a device, and text is read more '
                        'than once: write it to a file, and name that with --input')
    return status.st_size


class DownloadedText:
    """A text that was downloaded."""

    unit, is_one_text, nulls = 'B', True, 0

    def __init__(self, text, name):
        self.text, self.name = text, name
        self.total = len(text.encode())

    def pieces(self, mark=None):
        for text, new_document in readers.whole_file(io.StringIO(self.text), readers.PIECE_CHARS):
            yield Piece(text, new_document)

    def position(self):
        return self.total

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


# -----------------------------------------------------------------------------
# which files --input names


def find_files(wanted, tell=None, fault=lambda path: None, suffixes=SUFFIXES):
    """'a.txt,~/notes/,logs/*.gz' → sorted paths, each file once. Where folders or globs are among
    them, `tell` gets lines that say what is read and what is left out. Raises UserError.
    fault: a path → the NotText that it would end with, or None; of a named file it is not asked
    suffixes: of the files that are read in a folder"""
    paths, left_out, searched = {}, {}, False
    for name, matches in group_names(split_names(wanted)).items():
        found, files, apart = [], [], {}
        for path in map(Path, matches):
            if path.is_dir():
                inside = search(path, apart, suffixes)
                apart |= {each: wrong for each in inside if (wrong := fault(each))}
                found += inside
            elif reason := find_unread(path) or (
                    path != Path(name) and (why_no_text(path) or fault(path))):
                apart[path] = reason
            else:
                files.append(path)
        found += without_tables(files, os.path.dirname(name), apart)
        if not set(found) - set(apart):
            raise UserError('\n'.join(list_faults(apart)) or (
                f'{shown(name)}: nothing is read: {list_counts(apart) or "no files"}: name the '
                'files that hold the text, each or with a glob such as notes/*.txt'))
        searched |= matches != [name] or os.path.isdir(name)
        for path in found:  # links lead to one file
            if path not in apart:
                paths[os.path.realpath(path)] = path
        left_out |= apart
    if not paths:
        raise UserError(f'input={shown(wanted)!r}: it names no file')
    found = sorted(paths.values())
    if tell and searched:
        left_out = {path: reason for path, reason in left_out.items()
                    if os.path.realpath(path) not in paths}
        counts = list_counts(left_out)
        tell(f'reading {count_of(len(found), "file")}: '
             f'{list_counts({path: inner_suffix(path) for path in found})}'
             + f'; left out: {counts}' * bool(counts))
        for line in list_faults(left_out):
            tell(f'left out: {line}')
    return found


def group_names(names):
    """{what is named: its paths}: a file, a folder, the matches of a glob, which a shell may have
    expanded. Raises UserError."""
    def is_file(name):
        return os.path.lexists(name) and not os.path.isdir(name)

    beside = Counter(os.path.dirname(name) for name in names if is_file(name))
    groups = {}
    for name in names:
        matches = [name] if os.path.lexists(name) else expand(name)
        if not matches:
            raise UserError(f'{shown(name)}: ' + (
                'URLs are not read: download it, and name the file' if '://' in name else
                'no such file or folder' if not glob.has_magic(name) else 'no file of that form'))
        folder = os.path.dirname(name)
        is_of_glob = is_file(name) and beside[folder] > NAMED_FILES
        groups.setdefault(os.path.join(folder, '*') if is_of_glob else name, []).extend(matches)
    return groups


def split_names(wanted):
    """'a.txt, b, c.txt,~/d' → ['a.txt', 'b, c.txt', '/home/me/d'] where 'b, c.txt' is a file."""
    if os.path.exists(wanted):
        return [wanted]
    parts, names = wanted.split(','), []
    while parts:
        begins = [','.join(parts[:n]).strip() for n in range(1, min(len(parts), 9) + 1)]
        begins = [os.path.expanduser(begin) for begin in begins]
        n = next((n for n, begin in enumerate(begins) if os.path.exists(begin)), 0)
        names.append(begins[n])
        parts = parts[n + 1:]
    return list(filter(None, names))


def expand(pattern):
    """The paths of a glob; its last '**' is the folder itself. Links, which may go round in
    circles, are not followed below '**'."""
    top, stars, rest = pattern.removesuffix('**').partition('**/')
    if not stars:
        return glob.glob(top)
    return [path for folder in glob.glob(top or '.') for path in Path(folder).glob(stars + rest)
            if not any(part.startswith('.') or part in NO_TEXTS
                       for part in path.relative_to(folder).parts)]


def search(root, left_out, suffixes):
    """The files with these suffixes in a folder and those below it → paths, also tables where there
    are no texts. left_out: gets {path: why} of the others. Raises UserError."""
    found = []
    for at, folders, files in os.walk(root, onerror=not_listed):
        for path in [Path(at, name) for name in folders]:
            reason = 'hidden' if path.name.startswith('.') else 'link to a folder' \
                if path.is_symlink() else path.name if path.name in NO_TEXTS else ''
            if reason:
                folders.remove(path.name)
                left_out[path] = reason
        for path in [Path(at, name) for name in files]:
            reason = 'hidden' if path.name.startswith('.') else why_no_text(path)
            if not reason and inner_suffix(path) not in {*suffixes, *TABLES}:
                reason = find_unread(path) or inner_suffix(path) or 'without an ending'
            if reason:
                left_out[path] = reason
            else:
                found.append(path)
    return without_tables(found, root, left_out)


def without_tables(found, root, left_out):
    """Without tables beside texts, which are settings, or without a README beside tables, which is
    about them. root: the folder; left_out: as of search"""
    texts = [path for path in found if file_type(path) == 'text']
    tables = [path for path in found if inner_suffix(path) in TABLES]
    is_about = all(path.stem.upper() == 'README' for path in texts)
    apart = (texts if is_about else tables) if texts and tables else []
    for path in apart:
        every = quoted(f'{root or "."}/**/*{inner_suffix(path)}')
        left_out[path] = f'{inner_suffix(path)} beside {"tables" if is_about else "texts"} ' \
            f'(add {every} to read them too)'
    return [path for path in found if path not in left_out]


def not_listed(e):
    raise UserError(f'{shown(e.filename)}: {e.strerror}: allow it, or name the files in it that '
                    'you want')


def why_no_text(path):
    """Why a file is no text that a person has there, whatever its ending, or ''."""
    if not path.is_file():
        return 'pipe, device or broken link'
    is_ours = TOKEN_FILES.fullmatch(path.name) or (
        path.name == 'meta.json' and any(path.parent.glob('train*.bin')))
    return 'of a prepared dataset' if is_ours else ''


def list_counts(reasons):
    """{path: why, or what it is} → '2 .md, 1 .txt'; NotTexts are apart"""
    counts = Counter(each for each in reasons.values() if isinstance(each, str)).most_common()
    named = [f'{n:,} {shown(reason) or "without an ending"}' for reason, n in counts[:8]]
    rest = sum(n for _, n in counts[8:])
    return ', '.join(named + [f'{rest:,} others'] * (rest > 0))


def list_faults(reasons):
    """A line for each fix of the NotTexts in {path: why}, with the first of the files."""
    faults = [reasons[path] for path in sorted(reasons) if isinstance(reasons[path], NotText)]
    lines = []
    for what in dict.fromkeys(fault.what for fault in faults):
        places = [fault.place for fault in faults if fault.what == what]
        rest = len(places) - FILES_SHOWN
        lines.append('; '.join(places[:FILES_SHOWN]) + f'; and {rest:,} more files' * (rest > 0)
                     + f': {what}')
    return lines


def find_standard_library(folder, tell=None, _=None):
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
# what a tokenizer learns from


def read_texts(source, what):
    """Yield the texts of a source, and show how far it is read."""
    with closing(source.pieces()) as pieces, \
            ProgressBar(what, source.total, source.unit) as progress:
        for piece in pieces:
            yield piece.text
            progress.advance_to(source.position())


@lru_cache(1)  # of a running text they are asked for twice
def count_characters(source):
    return sum(map(len, read_texts(source, 'counting characters')))


def sample(source, characters):
    """Yield texts of about so many characters, spread evenly over files, in whatever order they
    are; all of them where there are no more. Of a dataset of the hub, which is too large to be read
    whole, the first ones."""
    if source.unit != 'B':
        for text in read_texts(source, 'learning from its beginning'):
            yield text
            characters -= len(text)
            if characters <= 0:
                break
        return
    total = count_characters(source)
    if total <= characters:
        yield from read_texts(source, 'learning from it')
        return
    print(f'learning from {100 * characters / total:.3g}% of the text, which is spread evenly')
    for text in read_texts(source, 'learning from it'):
        start = 0
        while start < len(text):
            block = text[start:readers.place_to_cut(text, start, BLOCK_CHARS)]
            start += len(block)
            # not the hash that decides the split: a sample is no more of the one than of the other
            digest = hashlib.blake2b(block.encode('utf-8', 'replace'), digest_size=8,
                                     person=b'sample').digest()
            if int.from_bytes(digest, 'big') < characters / total * 2**64:
                yield block
