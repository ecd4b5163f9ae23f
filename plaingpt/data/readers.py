"""Files of text → documents; files of rows → the text in one field of each row. A block or a row is
in memory at a time. Compressed files are read as well: .gz, .bz2, .xz and .zst."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from plaingpt.system.errors import UserError, needs
from plaingpt.system.formatting import one_line, shown

ROWS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'csv',
        '.parquet': 'parquet'}  # ending → type; all other files are text
TEXT_FIELDS = ('text', 'content')  # where no field is named, the first of these that a row has
BLOCK_CHARS = 2**20  # to read at a time
PIECE_CHARS = 2**18  # a longer document comes in pieces


class Piece(NamedTuple):
    """What a source yields: a document, or a part of one."""

    text: str
    new_document: bool  # False if the last piece's document continues
    split: str = ''  # 'train', 'val' or 'test' if the corpus says so


def open_zst(file):
    with needs('pyarrow', 'a .zst file'):
        import pyarrow
    return io.BufferedReader(pyarrow.CompressedInputStream(file, 'zstd'), 2**18)


COMPRESSED = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open, '.zst': open_zst}


def inner_suffix(path):
    """The ending without that of the compression, in small letters: '.txt' of a.TXT.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def file_type(path):
    """'text', 'jsonl', 'json', 'csv' or 'parquet', by the name."""
    return ROWS.get(inner_suffix(path), 'text')


# -----------------------------------------------------------------------------
# text


@contextmanager
def open_text(file, errors='strict', encoding='utf-8'):
    """A context: an open file of bytes → its text, unpacked. Only \\n ends a line, and line endings
    are not changed. Raises UserError, also where reading fails later."""
    unpack = COMPRESSED.get(Path(file.name).suffix.lower(), lambda same: same)
    with_mark = 'utf-8-sig' if encoding == 'utf-8' else encoding  # of the byte order
    try:
        with unpack(file) as data:
            yield io.TextIOWrapper(data, with_mark, errors, newline='\n')
    except UnicodeError as e:
        raise UserError(f'{shown(file.name)}: not {encoding.upper()} ({e}): save it as UTF-8 text, '
                        'or tell prepare.py what it is with --encoding=latin-1, or put U+FFFD '
                        'there with --errors=replace, or name other files') from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as e:
        raise UserError(f'{shown(file.name)}: cannot be read ({one_line(e)})') from None


def read_text(path):
    """The whole text of a UTF-8 file, as prepare.py reads it. Raises UserError, OSError."""
    with open(path, 'rb') as file, open_text(file) as text:
        return text.read()


# The beginning of a text up to the last white space that follows something else.
CUT = re.compile(r'(?s:.*\S)(?=[ \n])')


def place_to_cut(text, start, characters):
    """Where to cut a text, at most `characters` after `start`, at white space if possible."""
    if len(text) - start <= characters:
        return len(text)
    cut = CUT.match(text, start, start + characters + 1)
    return cut.end() if cut else start + characters


def whole_file(text, piece_chars=PIECE_CHARS):
    """A file is one document, and a blank file is none. Long files are cut where GPT-2's pattern
    also cuts, at white space that follows something else. So the tokens are those of the uncut
    file."""
    blank, rest, is_new = [], '', True  # blank: white space at the beginning, perhaps all there is
    while block := text.read(BLOCK_CHARS):
        if is_new and not rest and block.isspace():
            blank.append(block)
            continue
        rest, blank, start = ''.join([*blank, rest, block]), [], 0
        while len(rest) - start > piece_chars:
            end = place_to_cut(rest, start, piece_chars)
            yield rest[start:end], is_new
            start, is_new = end, False
        rest = rest[start:]
    if rest.strip() or (rest and not is_new):
        yield rest, is_new


def each_line(lines):
    """Each line that is not blank is a document."""
    return ((line.rstrip('\r\n'), True) for line in lines if line.strip())


def paragraphs(lines):
    """The lines between two blank lines are a document."""
    for has_text, group in itertools.groupby(lines, lambda line: bool(line.strip())):
        if has_text:
            yield ''.join(group).rstrip('\r\n'), True


TITLE = re.compile(r' = (?!= )[^\n]+(?<! =) = \r?\n?')  # ' = Title = ', not ' = = Section = = '


def articles(lines):
    """WikiText's articles: each line ' = Title = ' begins a document."""
    group = []
    for line in lines:
        if TITLE.fullmatch(line) and any(map(str.strip, group)):
            yield ''.join(group), True
            group = []
        group.append(line)
    if any(map(str.strip, group)):
        yield ''.join(group), True


# What a document can be → a function that takes an open file, or lines, and yields (text, whether
# it begins a document).
DOCUMENT_FORMS = {'file': whole_file, 'line': each_line, 'paragraph': paragraphs,
                  'title': articles}


# -----------------------------------------------------------------------------
# rows


def iter_rows(file, field='', errors='strict', encoding='utf-8'):
    """Yield ('FILE, line N' or 'FILE, row N', row) of an open file of rows. A row is a JSON value
    or a dict of columns. field: the only column that is read of Parquet. Raises UserError."""
    kind, name = file_type(Path(file.name)), shown(file.name)
    if kind == 'parquet':
        yield from parquet_rows(file, name, field)
        return
    with open_text(file, errors, encoding) as text:
        if kind == 'csv':
            yield from csv_rows(text, name, '\t' if '.tsv' in file.name.lower() else ',')
        elif kind == 'json' and text.buffer.peek(1).lstrip()[:1] == b'[':  # one array, or lines
            for number, row in enumerate(json_value(text.read(), name), 1):
                yield f'{name}, row {number}', row
        else:
            yield from json_lines(text, name)


def read_jsonl(path):
    """The same for a file of JSON lines with any name."""
    with open(path, 'rb') as file, open_text(file) as text:
        yield from json_lines(text, shown(path))


def json_lines(lines, name):
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f'{name}, line {number}'
            yield where, json_value(line, where)


def json_value(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f'{where}: not JSON: {e}') from None


def csv_rows(text, name, delimiter):
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        for row in table:
            where = f'{name}, line {table.reader.line_num}'  # DictReader's stays behind
            if None in row or None in row.values():
                raise UserError(f'{where}: it has not the {len(table.fieldnames)} columns that the '
                                'first line names: quote text that has separators in it')
            yield where, row
    except csv.Error as e:
        raise UserError(f'{name}, line {table.reader.line_num}: {e}') from None


def parquet_rows(file, name, field):
    with needs('pyarrow', 'a .parquet file'):
        import pyarrow.parquet
    try:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        names = table.schema_arrow.names
        column = find_field(names, field)
        columns = [column] if column in names else None
        batches = table.iter_batches(256, columns=columns)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f'{name}, row {number}', row) for number, row in enumerate(rows, 1))
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f'{name}: cannot be read ({one_line(e)})') from None


def find_field(names, field):
    """The column that holds `field`: for '' the first of TEXT_FIELDS, for 'a.b' it is a."""
    if not field:
        return next((usual for usual in TEXT_FIELDS if usual in names), TEXT_FIELDS[0])
    return field if field in names else field.split('.')[0]


def text_of(row, field, where):
    """The text in a field of a row, None where it is null. 'a.b' is b in a, unless it is a field
    itself. Raises UserError."""
    names = row if isinstance(row, dict) else ()
    field = field or find_field(names, field)
    value = row
    for key in [field] if field in names else field.split('.'):
        if value is None:
            return None
        if not isinstance(value, dict) or key not in value:
            found = ', '.join(map(repr, names))[:200] or 'no fields'
            raise UserError(f'{where}: no field {field!r}, it has {found}: choose with '
                            '--text_field=…')
        value = value[key]
    if not isinstance(value, str | None):
        raise UserError(f'{where}: field {field!r} is {type(value).__name__} and not text: '
                        'choose another with --text_field=…')
    return value


LONE_SURROGATES = re.compile('[\ud800-\udfff]')  # halves of characters, which JSON can hold


def replace_surrogates(text):
    """U+FFFD for each half of a character."""
    return text if text.isascii() else LONE_SURROGATES.sub('\ufffd', text)
