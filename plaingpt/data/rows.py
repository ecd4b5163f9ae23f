"""Rows of .jsonl, .json, .csv, .tsv and .parquet files, and what becomes of those that cannot be
used: a few are left out and counted, more than 1% are an error."""

import csv
import json
import re
from collections import Counter
from itertools import chain
from pathlib import Path

from plaingpt.system.errors import UserError, needs
from plaingpt.system.formatting import count_of, one_line, shown

FORMATS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'csv',
           '.parquet': 'parquet'}  # ending → format; all other files are text
DELIMITERS = ',;\t|'  # ';' is that of Excel in most of Europe
NOT_UTF8 = re.compile('[\udc80-\udcff]')  # bytes that surrogateescape could not decode
MAX_UNUSABLE = 0.01  # share of the files or rows; if there are more, something else is wrong
EARLY = 1000  # unusable rows before a pass over all rows is stopped
EXAMPLES = 3  # named for each reason


class Unusable(UserError):
    """A file or row that cannot be used. reason: the same words for all that are alike; details: of
    this one, and what to do"""

    def __init__(self, where, reason, details=''):
        super().__init__(f'{where}: {reason}{details}')
        self.where, self.reason = where, reason


class Tally:
    """Counts the files or rows that cannot be used, by reason. strict: each is an error"""

    def __init__(self, noun, strict=False):
        self.noun, self.strict = noun, strict
        self.restart()

    def restart(self):
        self.seen, self.counts, self.examples = 0, Counter(), {}

    def leave_out(self, problem, total=0):
        """Count an Unusable. total: about how many there are in all, 0 if unknown. Raises UserError
        where it is certain that too many are unusable."""
        if self.strict:
            raise problem
        self.counts[problem.reason] += 1
        self.examples.setdefault(problem.reason, [])
        if len(self.examples[problem.reason]) < EXAMPLES:
            self.examples[problem.reason].append(problem)
        count = self.counts.total()
        if count >= EARLY and (total or count == self.seen):
            self.check(max(total, self.seen))

    def check(self, total, advice=lambda problem: ''):
        """Raises UserError where more than 1% of `total` are unusable. advice: what else to do
        about an Unusable"""
        count = self.counts.total()
        if count > MAX_UNUSABLE * total:
            reason, number = self.counts.most_common(1)[0]
            example = self.examples[reason][0]
            why = '' if number == count else f', {number:,} for this reason'
            raise UserError(f'{example}{advice(example)} ({count:,} of '
                            f'{count_of(total, self.noun)} cannot be used{why})')

    def describe(self):
        """A line for each reason."""
        for reason, number in self.counts.most_common():
            places = '; '.join(problem.where for problem in self.examples[reason])
            more = '; …' if number > EXAMPLES else ''
            yield f'left out {number:,} of {count_of(self.seen, self.noun)}: {reason} ' \
                  f'({places}{more})'


# -----------------------------------------------------------------------------
# columns


def match_name(name, names):
    """The one of `names` that is `name`, in any case; None if there is none."""
    if name in names:
        return name
    return next((each for each in names
                 if isinstance(each, str) and each.strip().casefold() == name.casefold()), None)


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


def read_rows(file, open_text, encoding='utf-8', wanted=None):
    """Yield ('FILE, line N' or 'FILE, row N', row) of an open file of rows. A row is a JSON value
    or a dict of columns, or an Unusable. Raises Unusable where the file cannot be read.

    open_text: documents.open_text; wanted: name of a column → whether it is read (Parquet)
    """
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
        return Unusable(where, 'not UTF-8', ': save the file as UTF-8')
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        return Unusable(where, 'not JSON', f': {one_line(e)}')


def csv_rows(text, name):
    csv.field_size_limit(2**31 - 1)
    header = text.readline()
    delimiter = max(DELIMITERS, key=lambda each: count_columns(header, each))
    table = csv.DictReader(chain([header], text), delimiter=delimiter, strict=True)
    try:
        for row in table:
            where = f'{name}, line {table.reader.line_num}'  # DictReader's stays behind
            if None in row or None in row.values():
                row = Unusable(where, 'another number of columns than the header',
                               f', which has {len(table.fieldnames)}: quote text that contains '
                               f'{delimiter!r}')
            elif any(not value.isascii() and NOT_UTF8.search(value) for value in row.values()):
                row = Unusable(where, 'not UTF-8', ': save the file as UTF-8')
            yield where, row
    except csv.Error as e:
        raise Unusable(f'{name}, line {table.reader.line_num}', str(e)) from None


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
