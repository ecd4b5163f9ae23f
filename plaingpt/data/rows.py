"""Rows of .jsonl, .json, .csv, .tsv and .parquet files, and their text fields."""

import csv
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from plaingpt.data.text_files import ENCODING_ADVICE, Separators, open_text
from plaingpt.data.unusable import Unusable
from plaingpt.system.errors import needs
from plaingpt.system.formatting import command_for, join_surrogates, one_line, shown

FORMATS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'csv',
           '.parquet': 'parquet'}  # ending → format; all other files are text
DELIMITERS = ',', ';', '\t', '|'  # Excel writes ';' in most of Europe
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
    """'text', 'jsonl', 'json', 'csv' or 'parquet', by the file name."""
    return FORMATS.get(extension_of(path), 'text')


def extension_of(path):
    """The lower-case extension without .gz: '.txt' for a.TXT.gz."""
    return Path(path.name.lower().removesuffix('.gz')).suffix


def read_rows(file, encoding='utf-8', is_needed=None):
    """Yield ('FILE, line N' or 'FILE, row N', row) from an open file of rows. A row is a JSON
    value, a dict of columns, or an Unusable. Raises Unusable if the file cannot be read.
    is_needed: column name → whether to read it (Parquet)"""
    file_type, name = file_format(Path(file.name)), shown(file.name)
    if file_type == 'parquet':
        yield from parquet_rows(file, name, is_needed)
        return
    # With surrogateescape, invalid UTF-8 makes only its own row unusable.
    errors = 'surrogateescape' if encoding == 'utf-8' else 'strict'
    with open_text(file, encoding, errors) as text:
        if file_type == 'csv':
            yield from csv_rows(text, name)
        elif file_type == 'json' and text.buffer.peek(1).lstrip()[:1] == b'[':  # one array
            array = parse_json(text.read(), name)
            if isinstance(array, Unusable):
                raise array
            for number, row in enumerate(array, 1):
                yield f'{name}, row {number}', row
        else:
            for number, line in enumerate(text, 1):
                if line.strip():
                    where = f'{name}, line {number}'
                    yield where, parse_json(line, where)


def parse_json(text, where):
    """→ the JSON value, or an Unusable"""
    if not text.isascii() and NOT_UTF8.search(text):
        return Unusable(where, *NOT_UTF8_PROBLEM)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        return Unusable(where, 'not JSON', f': {one_line(e)}')


def csv_rows(text, name):
    csv.field_size_limit(2**31 - 1)
    header = text.readline()
    lines_before = 0  # the header
    declaration = re.fullmatch('sep=(.)\\s*', header)  # Excel may write it as the first line
    if declaration:
        delimiter = declaration[1]
        header = text.readline()
        lines_before = 1
    else:
        delimiter = max(DELIMITERS, key=lambda candidate: count_columns(header, candidate))
    reader = csv.reader(chain([header], text), delimiter=delimiter, strict=True)
    names = next(reader, [])
    duplicates = [column for column, n in Counter(names).items() if n > 1]
    if duplicates:
        raise Unusable(f'{name}, line {lines_before + 1}', f'two columns named {duplicates[0]!r}',
                       ': rename one')
    while True:
        start = reader.line_num + lines_before + 1
        try:
            values = next(reader)
            problem = csv_problem(values, names, delimiter)
        except StopIteration:
            return
        except csv.Error as e:
            if 'end of data' in str(e):
                raise Unusable(f'{name}, line {start}', 'unclosed quote',
                               ': close it, or double it if it is part of the text') from None
            problem = 'a quote within a field', ': double it, and quote the whole field'
        end = reader.line_num + lines_before
        if problem:  # for each line of this row: a quote may have joined several rows
            for line in range(start, end + 1):
                where = f'{name}, line {line}'
                yield where, Unusable(where, *problem)
        elif values:  # not a blank line
            yield f'{name}, line {end}', dict(zip(names, values, strict=True))


def csv_problem(values, names, delimiter):
    """(reason, details) of an Unusable if the values of a row cannot be used, or None."""
    if values and len(values) != len(names):
        return 'number of columns differs from the header', \
            f' ({len(values)} instead of {len(names)}): quote text that contains {delimiter!r}'
    if any(not value.isascii() and NOT_UTF8.search(value) for value in values):
        return NOT_UTF8_PROBLEM
    return None


def count_columns(header, delimiter):
    return len(next(csv.reader([header], delimiter=delimiter), ()))


def parquet_rows(file, name, is_needed):
    with needs('pyarrow', 'a .parquet file'):
        import pyarrow.parquet
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = None  # all
        if is_needed:
            columns = list(filter(is_needed, table.schema_arrow.names)) or None
        for batch in table.iter_batches(256, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f'{name}, row {number}', row
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise Unusable(name, 'cannot be read', f' ({one_line(e)})') from None


# -----------------------------------------------------------------------------
# text fields


def field_advice():
    return f'--text_field, or for conversations run {command_for("prepare")} chat'


@dataclass(frozen=True)
class TextReader:
    """Reads the documents in a field of a row. text_field: its name, or '' for the first of
    TEXT_FIELDS"""

    text_field: str = ''
    separators: Separators = field(default_factory=Separators)

    def restart(self):
        self.separators.restart()

    def describe(self):
        return self.separators.describe()

    def names(self):
        return [self.text_field] if self.text_field else TEXT_FIELDS

    def may_read(self, column):
        """Whether a column may be the one with the text."""
        return first_match(self.names(), [column]) is not None

    def columns(self, row, where):
        """The columns to read from a table with this row. Raises Unusable."""
        return [self.find_field(row, where)]

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
        return [document for document in self.separators.split(text) if document.strip()]
