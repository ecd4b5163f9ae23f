"""Rows of .jsonl, .json, .csv, .tsv, .parquet and .arrow files, and their text fields."""

import csv
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from plaingpt.data.text_files import ENCODING_ADVICE, Separators, open_text
from plaingpt.data.unusable import Unusable
from plaingpt.system.errors import UserError, needs
from plaingpt.system.formatting import command_for, join_surrogates, one_line, shown

FORMATS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'tsv',
           '.parquet': 'parquet', '.arrow': 'arrow'}  # ending → format; all other files are text
DELIMITERS = ',', ';', '\t', '|'  # Excel writes ';' in most of Europe
QUOTED = re.compile('"[^"]*"')
CSV_ADVICE = 'quote a text with quotes or line breaks, and double the quotes in it'
NOT_UTF8 = re.compile('[\udc80-\udcff]')  # undecodable bytes, as surrogateescape maps them
NOT_UTF8_PROBLEM = 'not UTF-8', f': {ENCODING_ADVICE}'  # reason and details of an Unusable
TEXT_FIELDS = ('text', 'content')  # the default: the first of these in a row


# -----------------------------------------------------------------------------
# columns


def match_name(name, names):
    """The element of `names` that equals `name`, ignoring case; None if there is none."""
    if name in names:
        return name
    for candidate in names:
        if isinstance(candidate, str) and candidate.strip().casefold() == name.casefold():
            return candidate
    return None


def first_match(preferred, names):
    """match_name of the first of the `preferred` names that matches; None if none does."""
    for name in preferred:
        match = match_name(name, names)
        if match:
            return match
    return None


def list_columns(row):
    """The column names of a row, for error messages."""
    names = ', '.join(map(repr, row)) if isinstance(row, dict) else ''
    return shown(names[:200]) or 'no columns'


# -----------------------------------------------------------------------------
# files


def file_format(path):
    """'text', or a value of FORMATS, by the file name."""
    return FORMATS.get(extension_of(path), 'text')


def extension_of(path):
    """The lower-case extension without .gz: '.txt' for a.TXT.gz."""
    return Path(path.name.lower().removesuffix('.gz')).suffix


def read_rows(file, reader, encoding, notes):
    """Yield ('FILE, line N' or 'FILE, row N', row) from an open file of rows. A row is a JSON
    value, a dict of columns, or an Unusable. Raises Unusable if the file cannot be read.
    notes: see Source"""
    file_type, name = file_format(Path(file.name)), shown(file.name)
    if file_type in ('parquet', 'arrow'):
        yield from table_rows(file, file_type, name, reader)
        return
    # With surrogateescape, invalid UTF-8 makes only its own row unusable.
    errors = 'surrogateescape' if encoding == 'utf-8' else 'strict'
    with open_text(file, encoding, errors) as text:
        if file_type in ('csv', 'tsv'):
            delimiters = DELIMITERS if file_type == 'csv' else '\t'
            yield from csv_rows(text, name, delimiters, reader.by_number)
        elif file_type == 'json':
            yield from json_rows(text, name, reader, notes)
        else:
            yield from json_lines(text, name)


def json_lines(lines, name):
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f'{name}, line {number}'
            yield where, parse_json(line, where)


def json_rows(text, name, reader, notes):
    """The rows of a .json file: one per line, or those of a list, or of an object that holds one
    list of objects."""
    lines, filled = [], []
    while len(filled) < 2 and (line := text.readline()):
        lines.append(line)
        if line.strip():
            filled.append(line)
    if len(filled) == 2 and not isinstance(parse_json(filled[0], name), Unusable):
        yield from json_lines(chain(lines, text), name)
        return
    value = parse_json(''.join(lines) + text.read(), name)
    if isinstance(value, Unusable):
        raise value
    for number, row in enumerate(find_list(value, name, reader, notes), 1):
        yield f'{name}, row {number}', row


def find_list(value, name, reader, notes):
    """The rows in the JSON value of a file. Raises Unusable if it holds several lists."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or reader.is_row(value):
        return [value]
    lists = [key for key, rows in value.items() if isinstance(rows, list) and rows
             and all(isinstance(row, dict) for row in rows)]
    if len(lists) > 1:
        raise Unusable(name, f'holds several lists ({", ".join(map(repr, lists))[:100]})',
                       ': save each list that you need in its own file')
    if not lists:
        return [value]
    notes.setdefault(f'read the rows of {lists[0]!r}', set()).add(name)
    return value[lists[0]]


def parse_json(text, where):
    """→ the JSON value, or an Unusable"""
    if not text.isascii() and NOT_UTF8.search(text):
        return Unusable(where, *NOT_UTF8_PROBLEM)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        return Unusable(where, 'not JSON', f': {one_line(e)}')


def csv_rows(text, name, delimiters, by_number):
    """The rows of a table with a header; by_number: without one, the columns are '1', '2', …
    delimiters: of which the first line has the most"""
    csv.field_size_limit(2**31 - 1)
    first = text.readline()
    delimiter = max(delimiters, key=QUOTED.sub('', first).count)
    reader = csv.reader(chain([first], text), delimiter=delimiter, strict=True)
    try:
        names = None if by_number else next(reader, [])
    except csv.Error as e:
        raise Unusable(f'{name}, line 1', 'not CSV', f' ({e}): {CSV_ADVICE}') from None
    duplicates = [column for column, n in Counter(names or ()).items() if n > 1]
    if duplicates:
        raise Unusable(f'{name}, line 1', f'two columns named {duplicates[0]!r}', ': rename one')
    while True:
        start = reader.line_num + 1
        try:
            values = next(reader)
            if names is None and values:
                names = [str(number) for number, _ in enumerate(values, 1)]
            problem = csv_problem(values, names, delimiter)
        except StopIteration:
            return
        except csv.Error as e:
            if 'end of data' in str(e):
                raise Unusable(f'{name}, line {start}', 'unclosed quote',
                               ': close it, or double it if it is part of the text') from None
            problem = 'not CSV', f' ({e}): {CSV_ADVICE}'
        if problem:  # for each line of this row: a quote may have joined several rows
            for line in range(start, reader.line_num + 1):
                where = f'{name}, line {line}'
                yield where, Unusable(where, *problem)
        elif values:  # not a blank line
            yield f'{name}, line {reader.line_num}', dict(zip(names, values, strict=True))


def csv_problem(values, names, delimiter):
    """(reason, details) of an Unusable if the values of a row cannot be used, or None."""
    if values and len(values) != len(names):
        return 'number of columns differs from the header', \
            f' ({len(values)} instead of {len(names)}): quote text that contains {delimiter!r}'
    if any(not value.isascii() and NOT_UTF8.search(value) for value in values):
        return NOT_UTF8_PROBLEM
    return None


def table_rows(file, file_type, name, reader):
    """The rows of a Parquet file, or of an Arrow file as `datasets` and pyarrow.ipc write it."""
    with needs('pyarrow', f'a .{file_type} file'):
        import pyarrow.parquet
    number = 0
    try:
        if file_type == 'parquet':
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
        else:
            is_file = file.peek(6)[:6] == b'ARROW1'  # otherwise a stream
            table = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
            names = table.schema.names
        columns = reader.columns(names)
        if file_type == 'parquet':
            batches = table.iter_batches(256, columns=columns)
        elif is_file:
            batches = map(table.get_batch, range(table.num_record_batches))
        else:
            batches = table
        for batch in batches:
            for start in range(0, batch.num_rows, 256):
                for row in batch.select(columns).slice(start, 256).to_pylist():
                    number += 1
                    yield f'{name}, row {number}', row
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise Unusable(name, 'cannot be read', f' ({one_line(e)})') from None


# -----------------------------------------------------------------------------
# text fields


def field_advice():
    return '--text_field (a number if the table has no header), or prepare conversations with ' \
        f'{command_for("prepare")} chat'


@dataclass(frozen=True)
class TextReader:
    """Reads the documents in a field of a row. text_field: its name, or '' for the first of
    TEXT_FIELDS"""

    is_divisible = True  # whether the end of one long document can be held out
    text_field: str = ''
    separators: Separators = field(default_factory=Separators)

    def restart(self):
        self.separators.restart()

    def describe(self):
        return self.separators.describe()

    @property
    def by_number(self):
        """Whether --text_field is the number of a column, from 1, of a table without a header."""
        return self.text_field.isdecimal()

    def names(self):
        return [self.text_field] if self.text_field else TEXT_FIELDS

    def is_row(self, value):
        """Whether a JSON object is a row with text."""
        name = first_match(self.names(), value)
        return name is not None and isinstance(value[name], str)

    def columns(self, names):
        """The columns to read of a table: those that may have the text, or all, to list them."""
        return [name for name in names if first_match(self.names(), [name])] or names

    def find_field(self, row, where):
        """The name of the text field in a row. Raises Unusable if there is none."""
        match = first_match(self.names(), row if isinstance(row, dict) else ())
        if match is not None:
            return match
        raise Unusable(where, f'no field {self.names()[0]!r}',
                       f' among {list_columns(row)}: choose one with {field_advice()}')

    def texts(self, row, where):
        """The documents in a row, none if its text is blank. Raises Unusable."""
        text = row
        if not isinstance(row, str):  # a JSON file may be a list of strings
            name = self.find_field(row, where)
            text = row[name]
            if text is None:
                raise Unusable(where, f'field {name!r} is null')
            if not isinstance(text, str):
                raise Unusable(where, f'field {name!r} is not text but {type(text).__name__}',
                               f': choose another with {field_advice()}')
        text, _ = join_surrogates(text)  # JSON may contain lone surrogates
        documents, _ = self.separators.split(text)
        return [document for document in documents if document.strip()]


@dataclass(frozen=True)
class IdsReader(TextReader):
    """Reads the token ids in a field of a row as text that `tokenizer`, an IdsTokenizer, encodes.
    Its end-of-text id separates documents within a row, too."""

    is_divisible = False
    tokenizer: object = None

    def is_row(self, value):
        return first_match(self.names(), value) is not None

    def texts(self, row, where):
        """The documents in a row. Raises Unusable, and UserError for an id beyond the vocabulary.
        """
        name = self.find_field(row, where)
        ids, vocab_size = row[name], self.tokenizer.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise Unusable(where, f'field {name!r} is not a list of integers')
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise UserError(f'{where}: ids from {min(ids)} to {max(ids)}, but vocab_size is '
                            f'{vocab_size}: set another --vocab_size')
        documents = [[]]
        for i in ids:
            if i == self.tokenizer.end_of_text:
                documents.append([])
            else:
                documents[-1].append(i)
        return [','.join(map(str, document)) for document in documents if document]
