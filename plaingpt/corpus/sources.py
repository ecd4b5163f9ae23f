"""Where text comes from: corpora by name, datasets of the Hugging Face hub, people's own files.

A source yields text in pieces, in an order that is always the same, and holds one at a time:

    source.pieces(mark)    yields Piece; from a mark of an earlier run where one is given
    source.mark()          where to go on after the last piece, as JSON; None: only by reading again
    source.total           how much there is, in source.unit, or None
    source.identity()      JSON that changes when the input does
    source.running         True where few files are one running text, without documents
    source.nulls           rows that were left out since their text is null
"""

import glob
import hashlib
import http.client
import sysconfig
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from plaingpt.corpus.corpora import CORPORA
from plaingpt.corpus.documents import (
    FORMS,
    field_of,
    json_lines,
    lines,
    parquet_rows,
    read_text,
    whole_files,
)
from plaingpt.system.errors import UserError

PIECE = 2**18  # characters: longer files come in several pieces
BLOCK = 2**20  # bytes read at a time
FEW = 100  # fewer files than this are one running text


class Piece(NamedTuple):
    text: str
    opens: bool  # a document begins here; otherwise the one before goes on
    at: int  # how far the input is read, in source.unit
    split: str = ''  # where the corpus itself says so


# -----------------------------------------------------------------------------
# the table


# -----------------------------------------------------------------------------
# bytes → text


# -----------------------------------------------------------------------------
# text → documents: each yields (text, opens, at)


# -----------------------------------------------------------------------------
# sources


class Files:
    """Documents of files: text, .jsonl and .parquet, also .gz and .zst."""

    unit = 'B'

    def __init__(self, paths, name, form='file', text_field='text', errors='strict'):
        self.paths, self.name = paths, name
        self.form, self.text_field, self.errors = form, text_field, errors
        try:
            self.sizes = [path.stat().st_size for path in paths]
        except OSError as e:
            raise UserError(f'{e.filename}: {e.strerror}') from None
        self.total = sum(self.sizes)
        self.running = form == 'file' and len(paths) < FEW and \
            all(kind(path) == 'text' for path in paths)

    def pieces(self, mark=None):
        before = self.nulls = 0
        for path, size in zip(self.paths, self.sizes, strict=True):
            for text, opens, at in self._documents(path):
                if text is None:
                    self.nulls += 1
                elif text.strip() or not opens:
                    yield Piece(text, opens, before + at)
            before += size

    def _documents(self, path):
        if kind(path) == 'jsonl':
            return json_lines(path, self.text_field, self.errors)
        if kind(path) == 'parquet':
            return parquet_rows(path, self.text_field)
        blocks = read_text(path, self.errors)
        return FORMS[self.form](blocks if self.form == 'file' else lines(blocks))

    def mark(self):
        return None

    def identity(self):
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self.sizes, strict=True):
            digest.update(f'{path}\0{size}\0{path.stat().st_mtime_ns}\n'.encode())
        return digest.hexdigest()


class Memory:
    """A text that was downloaded."""

    unit, running, nulls = 'B', True, 0

    def __init__(self, text, name):
        self.text, self.name = text, name
        self.total = len(text.encode())

    def pieces(self, mark=None):
        for text, opens, _ in whole_files([(self.text, 0)]):
            yield Piece(text, opens, self.total)

    def mark(self):
        return None

    def identity(self):
        return hashlib.sha256(self.text.encode()).hexdigest()


SUFFIXES = {
    '.txt', '.md', '.rst', '.tex', '.py', '.pyi', '.ipynb', '.c', '.h', '.cc', '.cpp', '.hpp',
    '.cu', '.rs', '.go', '.java', '.js', '.ts', '.jsx', '.tsx', '.rb', '.php', '.pl', '.lua', '.r',
    '.jl', '.hs', '.ml', '.scala', '.kt', '.swift', '.cs', '.sh', '.sql', '.html', '.css', '.xml',
    '.json', '.yaml', '.yml', '.toml', '.jsonl', '.parquet'}


def kind(path):
    """'text', 'jsonl' or 'parquet', by the name."""
    suffix = inner_suffix(path)
    return suffix[1:] if suffix in ('.jsonl', '.parquet') else 'text'


def inner_suffix(path):
    return Path(path.stem).suffix if path.suffix in ('.gz', '.zst') else path.suffix


def find_files(wanted):
    """'a.txt,notes/,logs/*.gz' → sorted paths, each once. Raises UserError."""
    paths = set()
    for one in [wanted] if Path(wanted).exists() else wanted.split(','):
        root = Path(one)
        if root.is_dir():
            found = {p for p in root.rglob('*')
                     if inner_suffix(p) in SUFFIXES and p.is_file()
                     and not any(part.startswith('.') for part in p.relative_to(root).parts)}
            if not found:
                raise UserError(f'{root}: no .txt, .md, .jsonl, .parquet or source file in it')
        elif glob.has_magic(one) and not root.exists():
            found = {Path(p) for p in glob.glob(one, recursive=True) if Path(p).is_file()}
            if not found:
                raise UserError(f'{one}: no file of that form')
        else:
            found = {root}
        paths |= found
    return sorted({path.resolve(): path for path in sorted(paths)}.values())


def standard_library(path=''):
    """The source of Python's own standard library: text on every machine."""
    root = Path(path or sysconfig.get_paths()['stdlib'])
    # no tests, nothing that was installed later, and no tables that are programs only in name
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
            'pydoc_data', 'encodings'}
    return sorted(p for p in root.rglob('*.py') if not skip & set(p.relative_to(root).parts)
                  and not p.name.startswith('_sysconfigdata'))


TINY_SHAKESPEARE = ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/'
                    'tinyshakespeare/input.txt')
TINY_SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
TIMEOUT = 30  # seconds without a byte


def tiny_shakespeare():
    """1.1 MB of Shakespeare's plays, downloaded. Raises UserError."""
    return download(TINY_SHAKESPEARE, TINY_SHAKESPEARE_SHA256, '--input').decode()


def download(url, sha256, option):
    """The bytes behind `url`. Raises UserError, which says that `option` names a local copy."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            data = response.read()
    # URLError, timeouts and resets are OSErrors; what ends too early is an HTTPException
    except (OSError, http.client.HTTPException) as e:
        raise UserError(f'{url} could not be downloaded ({getattr(e, "reason", e)}): try again, or '
                        f'name a local copy with {option}=FILE') from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f'{url}: what arrived has another checksum: try again, or name a local '
                        f'copy with {option}=FILE')
    return data


class Hub:
    """Rows of a Hugging Face dataset, or of a folder laid out like one, streamed: nothing is
    kept on disk or in memory."""

    unit, running = ' documents', False

    def __init__(self, path, subset, splits, text_field='text', form='file', documents=0):
        self.name, self.splits, self.form, self.text_field = path, splits, form, text_field
        self._rows = None
        try:
            import datasets
            from huggingface_hub.utils import logging as hub_logging
        except ImportError:
            raise UserError(f'{path} needs datasets: pip install datasets') from None
        # Each attempt to connect would be a warning of its own before our one line.
        datasets.logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
        with clear_errors(self.name):
            if subset and Path(path).is_dir() and \
                    subset not in datasets.get_dataset_config_names(path):
                subset = ''  # a copy of the subset alone
            self.builder = load_builder(path, subset or None)
            for theirs in splits.values():
                rows = self.builder.as_streaming_dataset(theirs)
                for row in rows.take(1):
                    field_of(row, text_field, f'{path}, split {theirs}')
        known = self.builder.info.splits or {}
        counts = [known[theirs].num_examples for theirs in splits.values() if theirs in known]
        self.total = sum(counts) if len(counts) == len(splits) else documents
        # articles are made of rows, so rows say nothing of their number
        self.total = self.total if form == 'file' and self.total else None

    def pieces(self, mark=None):
        at, self.nulls = (mark['at'], mark['nulls']) if mark else (0, 0)
        for split, theirs in self.splits.items():
            if mark and list(self.splits).index(mark['split']) > list(self.splits).index(split):
                continue
            with clear_errors(self.name):
                rows = self.builder.as_streaming_dataset(theirs).select_columns([self.text_field])
                if mark and mark['split'] == split:
                    rows.load_state_dict(mark['rows'])
                self._rows, self._split = rows, split
            for text in self._texts(rows):
                self._at = at = at + 1
                if text.strip():
                    yield Piece(text, True, at, split if len(self.splits) > 1 else '')

    def _texts(self, rows):
        with clear_errors(self.name):
            texts = map(self._text, rows)
            if self.form == 'file':
                yield from texts
            else:
                whole_lines = ((text if text.endswith('\n') else text + '\n', 0) for text in texts)
                for text, _, _ in FORMS[self.form](whole_lines):
                    yield text

    def _text(self, row):
        text = field_of(row, self.text_field, self.name)
        self.nulls += text is None
        return text or ''

    def mark(self):
        if self._rows is None or self.form != 'file':
            return None
        return {'split': self._split, 'rows': self._rows.state_dict(), 'at': self._at,
                'nulls': self.nulls}

    def identity(self):
        return self.builder.hash


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
def clear_errors(name):
    """Turns what the datasets library raises, a wide family, into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        reason = (str(e).strip().splitlines() or [''])[0][:200]
        raise UserError(f'{name} cannot be read ({type(e).__name__}: {reason}): check the name '
                        'and the connection, or name a local copy with --input=FOLDER') from None


def open_source(name, config, errors='strict'):
    """The source that a command line asks for; `errors` as decoding takes it. Raises UserError."""
    corpus = CORPORA[name]
    form = corpus.form if config.documents == 'auto' else config.documents
    if name == 'hf' or corpus.hub:
        path = config.path or corpus.hub
        if not path and not config.input:
            raise UserError('hf needs --path=OWNER/NAME or --path=FOLDER')
        splits = corpus.splits
        if config.split:
            splits = {'train': config.split}
        if config.val_split:
            splits = {**splits, 'val': config.val_split}
        own = config.path or config.input or config.subset  # then the table's count is not its
        return Hub(config.input or path, config.subset or corpus.subset, splits,
                   config.text_field, form, 0 if own else corpus.documents)
    if name == 'text' and not config.input:
        raise UserError('text needs --input=FILES_OR_FOLDERS')
    if name.startswith('shakespeare') and not config.input:
        return Memory(tiny_shakespeare(), TINY_SHAKESPEARE)
    paths = standard_library(config.input) if name == 'pystdlib' else find_files(config.input)
    rows = [path for path in paths if kind(path) != 'text']
    if rows and config.documents != 'auto':
        raise UserError(f'{rows[0]}: each row is a document, so --documents={config.documents} '
                        'cannot be: leave it out, or name text files alone with --input')
    return Files(paths, config.input or name, form, config.text_field, errors)
