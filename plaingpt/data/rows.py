"""Rows of .jsonl, .json, .csv, .tsv and .parquet files, and the text in them."""

import csv
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from plaingpt.data.left_out import Unusable
from plaingpt.data.text_files import Separators, open_text
from plaingpt.system.errors import needs
from plaingpt.system.formatting import join_halves, one_line, shown

FORMATS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'csv',
           '.parquet': 'parquet'}  # ending → format; all other files are text
DELIMITERS = ',;\t|'  # ';' is that of Excel in most of Europe
NOT_UTF8 = re.compile('[\udc80-\udcff]')  # bytes that surrogateescape could not decode
NOT_UTF8_PROBLEM = 'not UTF-8', ': save the file as UTF-8'  # reason and details of an Unusable
TEXT_FIELDS = ('text', 'content')  # where no field is named, the first of these that a row has


# -----------------------------------------------------------------------------
# columns


def match_name(name, names):
    """The one of `names` that is `name`, in any case; None if there is none."""
    if name in names:
        return name
    return next((each for each in names
                 if isinstance(each, str) and each.strip().casefold() == name.casefold()), None)


def first_match(wanted, names):
    """What match_name finds for the first of `wanted` that is there; None if none is."""
    return next(filter(None, (match_name(name, names) for name in wanted)), None)


def list_columns(row):
    """The names of the columns of a row, for a message."""
    names = ', '.join(map(repr, row)) if isinstance(row, dict) else ''
    return shown(names[:200]) or 'no columns'


# -----------------------------------------------------------------------------
# files


def file_format(path):
    """'text', 'jsonl', 'json', 'csv' or 'parquet', by the name."""
    return FORMATS.get(ending_of(path), 'text')


def ending_of(path):
    """The ending without that of the compression, in lower case: '.txt' of a.TXT.gz."""
    return Path(path.name.lower().removesuffix('.gz')).suffix


def read_rows(file, encoding='utf-8', wanted=None):
    """Yield ('FILE, line N' or 'FILE, row N', row) of an open file of rows. A row is a JSON value
    or a dict of columns, or an Unusable. Raises Unusable where the file cannot be read.
    wanted: name of a column → whether it is read (Parquet)"""
    file_kind, name = file_format(Path(file.name)), shown(file.name)
    if file_kind == 'parquet':
        yield from parquet_rows(file, name, wanted)
        return
    # A byte that is not UTF-8 spoils its row alone.
    errors = 'surrogateescape' if encoding == 'utf-8' else 'strict'
    with open_text(file, encoding, errors) as text:
        if file_kind == 'csv':
            yield from csv_rows(text, name)
        elif file_kind == 'json' and text.buffer.peek(1).lstrip()[:1] == b'[':  # one array
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
    """→ the value, or an Unusable"""
    if not text.isascii() and NOT_UTF8.search(text):
        return Unusable(where, *NOT_UTF8_PROBLEM)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        return Unusable(where, 'not JSON', f': {one_line(e)}')


def csv_rows(text, name):
    csv.field_size_limit(2**31 - 1)
    header, before = text.readline(), 0  # lines before the header
    delimiter = max(DELIMITERS, key=lambda each: count_columns(header, each))
    if declared := re.fullmatch('sep=(.)\\s*', header):  # Excel's first line
        header, before, delimiter = text.readline(), 1, declared[1]
    reader = csv.reader(chain([header], text), delimiter=delimiter, strict=True)
    names = next(reader, [])
    if twice := [column for column, n in Counter(names).items() if n > 1]:
        raise Unusable(f'{name}, line {before + 1}', f'two columns are called {twice[0]!r}',
                       ': rename one')
    while True:
        begin = reader.line_num + before + 1
        try:
            values = next(reader)
            problem = csv_problem(values, names, delimiter)
        except StopIteration:
            return
        except csv.Error as e:
            if 'end of data' in str(e):
                raise Unusable(f'{name}, line {begin}', 'a quote that is not closed',
                               ': close it, or double it where it is part of the text') from None
            problem = 'a quote within a field', ': double it, and quote the whole field'
        end = reader.line_num + before
        if problem:  # of all lines that were read as this row: a quote may have joined them
            for where in (f'{name}, line {line}' for line in range(begin, end + 1)):
                yield where, Unusable(where, *problem)
        elif values:  # not a blank line
            yield f'{name}, line {end}', dict(zip(names, values, strict=True))


def csv_problem(values, names, delimiter):
    """Why the values of a row cannot be used → (reason, details) of an Unusable, or None."""
    if values and len(values) != len(names):
        return 'another number of columns than the header', \
            f', which has {len(names)}: quote text that contains {delimiter!r}'
    if any(not value.isascii() and NOT_UTF8.search(value) for value in values):
        return NOT_UTF8_PROBLEM
    return None


def count_columns(header, delimiter):
    return len(next(csv.reader([header], delimiter=delimiter), ()))


def parquet_rows(file, name, wanted):
    with needs('pyarrow', 'a .parquet file'):
        import pyarrow.parquet
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = [column for column in table.schema_arrow.names if wanted and wanted(column)]
        for batch in table.iter_batches(256, columns=columns or None):
            for row in batch.to_pylist():
                number += 1
                yield f'{name}, row {number}', row
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise Unusable(name, 'cannot be read', f' ({one_line(e)})') from None


# -----------------------------------------------------------------------------
# text in rows


@dataclass(frozen=True)
class TextReader:
    """Reads the documents in a field of a row. text_field: its name, or '' for the first of
    TEXT_FIELDS that is there"""

    text_field: str = ''
    separators: Separators = field(default_factory=Separators)

    def restart(self):
        self.separators.restart()

    def describe(self):
        return self.separators.describe()

    def names(self):
        return [self.text_field] if self.text_field else TEXT_FIELDS

    def may_read(self, column):
        """Whether it may be the column of a table that is read."""
        return first_match(self.names(), [column]) is not None

    def columns(self, row, where):
        """Those that are read of a table with this row. Raises Unusable."""
        return [self.find_field(row, where)]

    def find_field(self, row, where):
        """Its name in a row. Raises Unusable where there is none."""
        match = first_match(self.names(), row if isinstance(row, dict) else ())
        if match is not None:
            return match
        raise Unusable(where, f'no field {self.names()[0]!r}', f', it has {list_columns(row)}: '
                       'choose with --text_field=…')

    def texts(self, row, where):
        """The documents in a row, none where its text is blank. Raises Unusable."""
        if not isinstance(row, str):  # or one of a list of texts
            name = self.find_field(row, where)
            row = row[name]
            if row is None:
                raise Unusable(where, f'field {name!r} is null')
            if not isinstance(row, str):
                raise Unusable(where, f'field {name!r} is {type(row).__name__} and not text',
                               ': choose another with --text_field=…')
        text, _ = join_halves(row)  # JSON can hold half a character
        return [document for document in self.separators.split(text) if document.strip()]
