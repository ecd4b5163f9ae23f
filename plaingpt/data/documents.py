"""Sources of documents: text files, files of rows, datasets on the Hugging Face Hub.

A source streams its text in pieces, always in the same order:

    source.pieces()        yields Piece
    source.position()      how much of source.total has been read, in source.unit
    source.total           the size, or None if unknown
    source.identity()      a fingerprint, which changes when the input changes
    source.is_continuous   whether the files form one long text without documents
    source.has_val_split   whether the pieces say which split they are for
    source.survey          the sizes of its documents, of a hundred if there are more
    source.document_end    what ends a document if the tokenizer has no end-of-text token
    source.report()        prints what the last pass skipped
"""

import copy
import hashlib
import os
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from plaingpt.data import text_files
from plaingpt.data.input_files import COMPRESSED, TEXT_EXTENSIONS, download, find_files
from plaingpt.data.rows import FORMATS, extension_of, file_format, read_rows
from plaingpt.data.text_files import (
    ENCODING_ADVICE,
    UTF16_MARKS,
    open_text,
    read_documents,
    read_lines,
)
from plaingpt.data.unusable import Tally, Unusable
from plaingpt.system.errors import UserError, needs, progress_bar
from plaingpt.system.files import is_hub_name
from plaingpt.system.formatting import count_of, one_line, shown

CONTINUOUS_FILES = 100  # fewer text files form one continuous text
SURVEYED_DOCUMENTS = 100  # with so many documents, a tenth of them is about a tenth of the text
MAX_NUL = 0.05  # fraction of NUL bytes in text; UTF-16 and binary files have more


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    new_document: bool  # False: continues the document of the previous piece
    split: str = ''  # 'train' or 'val': of a dataset on the Hub, or from splits.assign_splits


class ReadOptions(NamedTuple):
    """How files are read."""

    documents: str = 'auto'  # auto, file, line or paragraph: of text files
    encoding: str = 'utf-8'
    strict: bool = False  # an unusable row or file is an error


DEFAULT_OPTIONS = ReadOptions()


class Survey(NamedTuple):
    """The first documents of a source."""

    documents: dict  # hash of the beginning → characters; those with the same text are one
    is_complete: bool  # whether the source has no more


def hash_of(text):
    """A uint64 that selects the split of a document by the first piece of its text. Texts that
    differ only in trailing white space have the same."""
    data = (text.rstrip() + '\n').encode('utf-8', 'replace')
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'big')


def open_source(name, corpus, config, folder, reader):
    """The source of a corpus and a PrepareConfig. folder: the dataset's, for downloaded text;
    reader: converts a row to documents. Raises UserError."""
    inputs = config.inputs()
    is_on_hub = config.subset or config.split or config.val_split or (
        corpus.kind == 'chat' and any(map(is_hub_name, inputs)))
    if corpus.kind == 'hub' or is_on_hub:
        return open_hub_dataset(corpus, config, reader)
    explicit = ()
    if inputs:
        paths, explicit = find_files(inputs, TEXT_EXTENSIONS if corpus.kind == 'text' else FORMATS)
    elif corpus.url:
        paths = [download(corpus.url, corpus.sha256, folder)]
    elif callable(corpus.files):
        paths = corpus.files()
    else:
        paths, explicit = find_files([corpus.files])
    options = ReadOptions(config.documents, config.encoding, config.strict)
    files = Files(paths, ', '.join(inputs) or corpus.url or name, reader, options, explicit)
    if corpus.kind != 'text':
        for path in paths:
            if file_format(path) == 'text':
                raise UserError(f'{shown(path)}: rows must be in {", ".join(FORMATS)} files: '
                                'convert it to a table, or to JSON with one row per line')
    elif files.has_rows and config.documents != 'auto':
        raise UserError(f'documents={config.documents}: each row of {files.name} is a document; '
                        'remove --documents, or pass only text files')
    elif config.text_field and not files.has_rows:
        raise UserError(f'text_field={config.text_field}: {files.name} is plain text without '
                        'fields; remove --text_field')
    return files


def open_hub_dataset(corpus, config, reader):
    subset, val_split = config.subset, config.val_split
    if not subset and not config.input:
        subset = corpus.subset
    if not val_split and not config.split:
        val_split = corpus.val_split
    splits = {'train': config.split or 'train'}
    if val_split and config.max_tokens:
        splits = {'val': val_split, **splits}  # reading stops at max_tokens of the training split
    elif val_split:
        splits['val'] = val_split
    path = ', '.join(config.inputs()) or corpus.hub
    return HubDataset(path, subset, splits, reader, config.strict)


class Source:
    """Base class: reads rows, a few of which may be unusable."""

    is_continuous = has_val_split = False
    document_end = '\n'

    def __init__(self, name, reader, strict):
        """reader: reader.texts(row, where) are the documents in a row; strict: an unusable row or
        file is an error"""
        self.name, self.reader, self.rows = shown(name[:100]), reader, Tally('row', strict)
        self.notes = {}  # line for the report → files that it is about

    @cached_property
    def survey(self):
        documents = {}
        with closing(self.read_pieces()) as pieces, \
                progress_bar('measuring the documents', self.total, self.unit) as bar:
            for piece in pieces:
                if piece.new_document:
                    text_hash = hash_of(piece.text)
                documents[text_hash] = documents.get(text_hash, 0) + len(piece.text)
                if len(documents) == SURVEYED_DOCUMENTS:
                    return Survey(documents, False)
                bar.update(self.position() - bar.n)
        return Survey(documents, True)

    def pieces(self):
        return self.read_pieces()

    def as_plain_text(self):
        """The same source with conversations as plain text, to train a tokenizer on."""
        plain = copy.copy(self)
        plain.reader = replace(self.reader, plain=True)
        return plain

    def read_row(self, where, row):
        """The documents in a row. An unusable row is counted and has none."""
        self.rows.total += 1
        try:
            if isinstance(row, Unusable):
                raise row
            return self.reader.texts(row, where)
        except Unusable as problem:
            self.rows.skip(problem)
            return ()

    def report(self):
        """Print what the last pass skipped. Raises UserError if it was too much."""
        self.rows.check()
        for line in (*self.rows.describe(), *self.reader.describe()):
            print(line)
        for line, files in self.notes.items():
            print(f'{line} in {count_of(len(files), "file")}')


class Files(Source):
    """Documents in files of text and of rows. A few text files form one continuous text, joined by
    line breaks, unless they contain end-of-text tokens.

    explicit: paths that the user named one by one; these are never skipped
    """

    unit = 'B'

    def __init__(self, paths, name, reader, options=DEFAULT_OPTIONS, explicit=()):
        super().__init__(name, reader, options.strict)
        self.paths, self.explicit = paths, explicit
        self.documents, self.encoding = options.documents, options.encoding
        self.files, self.problems = Tally('file', options.strict), {}
        self.sizes = [path.stat().st_size for path in paths]
        self.total = sum(self.sizes)
        formats = [file_format(path) for path in paths]
        self.has_rows = any(file_type != 'text' for file_type in formats)
        self.has_text = 'text' in formats
        if self.documents == 'paragraph':
            self.document_end = '\n\n'
        self._bytes_before = 0  # in the files before the open one

    @cached_property
    def is_continuous(self):
        if self.documents != 'auto' or self.has_rows or len(self.paths) >= CONTINUOUS_FILES:
            return False
        return self.survey.is_complete and not self.reader.separators.count

    def pieces(self):
        if not self.is_continuous:
            yield from self.read_pieces()
            return
        within_line = False  # the previous piece does not end with a line break
        for piece in self.read_pieces():
            # A separate piece, since a tokenizer's sample hashes the text of the pieces and must
            # not depend on the order of the files.
            if within_line and piece.new_document:
                yield Piece('\n', False)
            within_line = not piece.text.endswith(('\n', '\r'))
            yield piece

    def read_pieces(self):
        """The pieces of all usable files."""
        self._bytes_before = 0
        self.reader.restart()
        self.rows.restart()
        self.files.restart()
        self.files.total = len(self.paths)
        for path, size in zip(self.paths, self.sizes, strict=True):
            try:
                for text, new_document in self.read_file(path, size):
                    yield Piece(text, new_document)
            except Unusable as problem:
                if path in self.explicit or len(self.paths) == 1:
                    raise UserError(str(problem)) from None
                self.files.skip(problem)
            self._bytes_before += size
        self.files.check()
        self.rows.check()

    def read_file(self, path, size):
        """Yield (text, whether it begins a document) for one file. Raises Unusable."""
        if extension_of(path) in COMPRESSED:
            raise Unusable(shown(path), 'compressed', ': unpack it first')
        try:
            self._file = open(path, 'rb')
        except OSError as e:
            raise Unusable(shown(path), 'cannot be read', f' ({e.strerror})') from None
        with self._file:
            file_type = file_format(path)
            is_packed = path.name.lower().endswith('.gz')
            head = self._file.peek()
            is_utf8 = self.encoding == 'utf-8' and head[:2] not in UTF16_MARKS
            is_binary = is_packed or file_type in ('parquet', 'arrow')
            if is_utf8 and not is_binary and head.count(0) > MAX_NUL * len(head):
                raise Unusable(shown(path), 'not UTF-8 text',
                               f' (it is full of NUL bytes): {ENCODING_ADVICE}')
            if file_type != 'text':
                for where, row in read_rows(self._file, self.reader, self.encoding, self.notes):
                    for text in self.read_row(where, row):
                        yield text, True
                return
            by_line = self.documents == 'line'
            is_long = is_packed or size > text_files.BLOCK_CHARS
            if path not in self.explicit and (is_long or by_line):
                self.check_readable(path)
            with open_text(self._file, self.encoding) as text:
                if by_line:
                    yield from read_lines(text, self.reader.separators)
                else:
                    yield from read_documents(text, self.reader.separators)

    def check_readable(self, path):
        """Read a file to its end before any of it is used. Raises Unusable."""
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

    def position(self):
        if self._file.closed:
            return self._bytes_before
        return self._bytes_before + self._file.tell()

    def identity(self):
        digest = hashlib.sha256()
        for path, size in zip(self.paths, self.sizes, strict=True):
            digest.update(os.fsencode(path) + f'\0{size}\0{path.stat().st_mtime_ns}\n'.encode())
        return digest.hexdigest()

    def report(self):
        for line in self.files.describe():
            print(line)
        if self.is_continuous:
            print(f'read {count_of(len(self.paths), "file")} as one text (alternatives: '
                  '--documents=file, line or paragraph)')
        elif self.documents == 'auto' and self.has_text:
            print('read each text file as a document (alternatives: --documents=line or paragraph)')
        super().report()


# -----------------------------------------------------------------------------
# the Hugging Face Hub


class HubDataset(Source):
    """Rows of a dataset on the Hub, or of a folder laid out like one. The library `datasets`
    streams them: nothing is kept on disk or in memory."""

    unit = ' documents'

    def __init__(self, path, subset, splits, reader, strict=False):
        """path: may end with @REVISION; splits: our name of a split → its name in the dataset"""
        super().__init__(path, reader, strict)
        self.splits, self.has_val_split = splits, 'val' in splits
        with needs('datasets', path):
            import datasets
            from huggingface_hub.utils import logging as hub_logging
        # Otherwise each attempt to connect prints a warning before our error.
        datasets.logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
        with explain_hub_errors(self.name):
            if is_saved_dataset(path):
                datasets_of_splits = open_saved_dataset(path, splits)
                self.total = sum(map(len, datasets_of_splits.values()))
                self.fingerprint = [rows._fingerprint for rows in datasets_of_splits.values()]
                self.streams = {split: rows.to_iterable_dataset()
                                for split, rows in datasets_of_splits.items()}
            else:
                self.open_stream(datasets, path, subset)
            for split, rows in self.streams.items():
                for row in rows.take(1):
                    self.streams[split] = rows.select_columns(self.reader.columns([*row]))

    def open_stream(self, datasets, path, subset):
        path, _, revision = path.partition('@')
        if Path(path).is_dir():
            path = os.path.abspath(path)  # `datasets` does not accept '.'
        builder = datasets.load_dataset_builder(path, subset or None, revision=revision or None)
        self.streams = {split: builder.as_streaming_dataset(hub_split)
                        for split, hub_split in self.splits.items()}
        infos = builder.info.splits or {}
        data_files = getattr(builder.config, 'data_files', None) or {}
        print_other_splits(infos or data_files, self.splits)
        self.total = None
        if all(hub_split in infos for hub_split in self.splits.values()):
            self.total = sum(infos[hub_split].num_examples for hub_split in self.splits.values())
        self.fingerprint = builder.hash

    def read_pieces(self):
        self._position = 0
        self.reader.restart()
        self.rows.restart()
        with explain_hub_errors(self.name):
            for split, rows in self.streams.items():
                for number, row in enumerate(rows, 1):
                    self._position += 1
                    where = f'{self.name}, split {self.splits[split]}, row {number}'
                    for text in self.read_row(where, row):
                        yield Piece(text, True, split)
        self.rows.check()

    def position(self):
        return self._position

    def identity(self):
        return self.fingerprint


def is_saved_dataset(folder):
    """Whether a folder was written by save_to_disk of `datasets`."""
    is_split = all(Path(folder, name).exists() for name in ('dataset_info.json', 'state.json'))
    return is_split or Path(folder, 'dataset_dict.json').exists()


def open_saved_dataset(folder, splits):
    """A folder written by save_to_disk → {our name of a split: datasets.Dataset}. splits: our name
    → its name in the folder. Raises UserError."""
    import datasets
    saved = datasets.load_from_disk(folder)
    if not isinstance(saved, dict):  # a single split
        saved = {'train': saved}
    for name in splits.values():
        if name not in saved:
            raise UserError(f'{shown(folder)}: no split {name!r} among {", ".join(saved)}: choose '
                            'with --split and --val_split')
    print_other_splits(saved, splits)
    return {split: saved[name] for split, name in splits.items()}


def print_other_splits(names, splits):
    """Print which splits of a dataset are not read."""
    others = [str(name) for name in names if name not in splits.values()]
    if others and not any('[' in name for name in splits.values()):  # train[:10%]
        print(f'read {" and ".join(splits.values())}; other splits: {", ".join(others)} (choose '
              'with --split and --val_split)')


@contextmanager
def explain_hub_errors(name, alternative='pass a local copy with --input=FOLDER'):
    """Turns the many exceptions of the Hub's libraries into a UserError of one line.
    alternative: what to do without the Hub"""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        raise UserError(f'{name} cannot be read ({type(e).__name__}: {one_line(e)[:200]}): check '
                        'the name and the connection, log in with hf auth login if it is private '
                        f'or gated, or {alternative}') from None
