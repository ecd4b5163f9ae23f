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
    source.extractor       what reads the text of HTML pages, with its version, or ''
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
from functools import lru_cache
from pathlib import Path

from plaingpt.data import readers
from plaingpt.data.dataset import TOKEN_FILES, UNFINISHED
from plaingpt.data.html_pages import PAGE_CHARS, choose_extractor, is_html, page_text
from plaingpt.data.hub import HubDataset
from plaingpt.data.readers import UTF8, Piece, WrongEncoding, file_type, inner_suffix
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of
from plaingpt.system.formatting import count_of, shown
from plaingpt.system.streams import ProgressBar

NAME_SHOWN = 100  # characters of --input in messages
ONE_TEXT_FILES = 100  # fewer text files than this are one text
SMALL_PIECE_CHARS = 2**15  # of a file, what goes into one split
DOWNLOAD_TIMEOUT = 30  # seconds without a byte
BLOCK_CHARS = 4096  # of a sample
SUFFIXES = {  # of the files that are read in a folder, in any case
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.html', '.htm', '.css',
    '.xml', '.yaml', '.yml', '.toml', '.jsonl', '.ndjson', '.parquet'}
TABLES = {'.json', '.csv', '.tsv'}  # read in a folder without texts: beside code they are settings
CONVERTERS = {  # ending → the tool that makes text of such files, or files of such archives
    '.pdf': 'pdftotext', '.djvu': 'djvutxt', '.doc': 'libreoffice --convert-to txt',
    **dict.fromkeys(('.docx', '.odt', '.rtf', '.epub'), 'pandoc -t plain'),
    **dict.fromkeys(('.xls', '.xlsx', '.ods'), 'libreoffice --convert-to csv'),
    **dict.fromkeys(('.ppt', '.pptx', '.odp'), 'libreoffice --convert-to pdf and pdftotext'),
    '.zip': 'unzip', '.tar': 'tar xf', '.tgz': 'tar xf', '.7z': '7z x', '.rar': 'unrar x'}
SIGNATURES = {b'%PDF-': '.pdf', b'PK\3\4': '.zip', b'{\\rtf': '.rtf', b'7z\xbc\xaf': '.7z',
              b'Rar!': '.rar', b'\xd0\xcf\x11\xe0': '.doc'}  # first bytes → ending
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
        data = download(corpus.url, corpus.sha256, 'name a local copy with --input=FILE')
        return DownloadedText(data.decode(), corpus.url)
    paths = corpus.find(where, print)
    rows = [path for path in paths if file_type(path) != 'text']
    if rows and config.documents != 'auto':
        raise UserError(f'{shown(rows[0])}: each row is a document, so '
                        f'--documents={config.documents} cannot be: leave it out, or name text '
                        'files alone with --input')
    if config.text_field and not rows:
        raise UserError(f'text_field={config.text_field}: {shown(paths[0])} is text and has no '
                        'fields: leave it out')
    files = Files(paths, config.input or name, form, text_field, errors, config.encoding)
    files.extractor = choose_extractor(paths, config.html)
    files.is_one_text &= config.documents == 'auto'  # few files are, unless each was said to be one
    return files


class Files:
    """Documents of files of text and of rows. Few text files are one text together, with a line
    break between two where the first does not end with one."""

    unit = 'B'

    extractor = ''  # of the text of HTML pages, and its version; '': they are read with their tags

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
                for text, new_document in self.documents_or_faults(self._file):
                    if file_type(path) != 'text':
                        text = readers.replace_surrogates(text)
                    if self.is_one_text:
                        # by itself: what a tokenizer learns from does not depend on the order
                        if line_open and new_document:
                            yield Piece('\n', False)
                        line_open = not text.endswith(('\n', '\r'))
                    yield Piece(text, new_document)
            self._done += size

    def documents_or_faults(self, file):
        """`documents` of an open file. WrongEncoding of one file names all others of the kind."""
        try:
            yield from self.documents(file)
        except WrongEncoding as e:
            others = [(path, readers.wrong_line(path, self.encoding)) for path in self.paths
                      if str(path) != file.name and file_type(path) != 'parquet']
            raise WrongEncoding(e.places + [f'{shown(path)}, line {line}' for path, line in others
                                            if line], self.encoding) from None

    def documents(self, file):
        """Yield (text, whether it begins a document) of an open file."""
        path = Path(file.name)
        if file_type(path) == 'text':
            with readers.open_text(file, self.errors, self.encoding) as text:
                if self.extractor and is_html(path):
                    text = io.StringIO(page_text(text.read(PAGE_CHARS + 1), shown(path)))
                yield from readers.whole_file(text, self.piece_chars) if self.form == 'file' \
                    else readers.DOCUMENT_FORMS[self.form](text)
            return
        # Rows are text for the byte tokenizer too.
        errors = 'strict' if self.errors == 'surrogateescape' else self.errors
        for where, row in readers.iter_rows(file, self.text_field, errors, self.encoding):
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

    unit, is_one_text, nulls, extractor = 'B', True, 0, ''

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


def find_files(wanted, tell=None, suffixes=SUFFIXES):
    """'a.txt,~/notes/,logs/*.gz' → sorted paths, each file once. Where folders or globs are among
    them, `tell` gets a line that says what is read and what is left out. Raises UserError.
    suffixes: of the files that are read in a folder"""
    paths, left_out, searched = {}, Counter(), False
    for name in split_names(wanted):
        matches = [name] if os.path.lexists(name) else expand(name)
        if not matches:
            raise UserError(f'{shown(name)}: ' + (
                'URLs are not read: download it, and name the file' if '://' in name else
                'no such file or folder' if not glob.has_magic(name) else 'no file of that form'))
        found, reasons = [], Counter()
        for path in map(Path, matches):
            if path.is_dir():
                found += search(path, reasons, suffixes)
            elif ending := needs_conversion(path):
                if path == Path(name):
                    raise UserError(f'{shown(path)}: no text, but a {ending} file: convert it with '
                                    f'{CONVERTERS[ending]}, and name the text')
                reasons[with_converter(ending)] += 1
            elif path == Path(name) or not why_no_text(path):
                found.append(path)
        if not found:
            raise UserError(f'{shown(name)}: nothing is read: {list_counts(reasons) or "no files"}:'
                            ' name the files that hold the text, each or with a glob such as '
                            'notes/*.txt')
        searched |= matches != [name] or os.path.isdir(name)
        for path in found:  # links lead to one file
            paths[os.path.realpath(path)] = path
        left_out += reasons
    if not paths:
        raise UserError(f'input={shown(wanted)!r}: it names no file')
    found = sorted(paths.values())
    if tell and searched:
        tell(f'reading {count_of(len(found), "file")}: {list_counts(map(inner_suffix, found))}'
             + (f'; left out: {list_counts(left_out)}' if left_out else ''))
    return found


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
    are no texts. left_out: a Counter of the reasons for which others are left out. UserError."""
    found = []
    for at, folders, files in os.walk(root, onerror=not_listed):
        for path in [Path(at, name) for name in folders]:
            reason = 'hidden' if path.name.startswith('.') else 'link to a folder' \
                if path.is_symlink() else path.name if path.name in NO_TEXTS else ''
            if reason:
                folders.remove(path.name)
                left_out[reason] += 1
        for path in [Path(at, name) for name in files]:
            reason = 'hidden' if path.name.startswith('.') else why_no_text(path)
            if not reason and inner_suffix(path) not in {*suffixes, *TABLES, *CONVERTERS}:
                reason = inner_suffix(path) or 'without an ending'
            if not reason and (ending := needs_conversion(path)):
                reason = with_converter(ending)
            if reason:
                left_out[reason] += 1
            else:
                found.append(path)
    texts = [path for path in found if file_type(path) == 'text']
    tables = [path for path in found if inner_suffix(path) in TABLES]
    # A README beside tables is about them, and tables beside other texts are settings.
    is_about = all(path.stem.upper() == 'README' for path in texts)
    for path in (texts if is_about else tables) if texts and tables else []:
        found.remove(path)
        left_out[f'{inner_suffix(path)} beside {"tables" if is_about else "texts"}'] += 1
    return found


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


def needs_conversion(path):
    """The ending, in CONVERTERS, of a file that a tool has to make text of; '' for others. Its
    first bytes say so where its name does not."""
    if (ending := inner_suffix(path)) in CONVERTERS:
        return ending
    if not path.is_file():  # a pipe would be waited for; it is refused where the file is read
        return ''
    try:
        with open(path, 'rb') as file:
            begin = file.read(8)
    except OSError:  # is told where the file is read
        return ''
    return next((SIGNATURES[first] for first in SIGNATURES if begin.startswith(first)), '')


def with_converter(ending):
    return f'{ending} ({CONVERTERS[ending]} makes text of it)'


def list_counts(reasons):
    """['.md', '.txt', '.md'] → '2 .md, 1 .txt'"""
    counts = Counter(reasons).most_common()
    named = [f'{n:,} {shown(reason) or "without an ending"}' for reason, n in counts[:8]]
    rest = sum(n for _, n in counts[8:])
    return ', '.join(named + [f'{rest:,} others'] * (rest > 0))


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
