"""What a file holds, by its name; rows of .jsonl, .json, .csv, .tsv and .parquet files → the text
in one of their fields."""

import csv
import itertools
import json
import re
from pathlib import Path

from plaingpt.data import documents
from plaingpt.data.documents import check_expansion, check_length, read_text, split_lines
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import utf8_name
from plaingpt.system.formatting import shown

ROWS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv', '.tsv': 'tsv',
        '.parquet': 'parquet'}  # ending → type; all others are text
# Archives, and compressions that are not read. What is in a file of another name is seen when it is
# read: documents.check_text.
PACKED = {'.zip', '.tar', '.tgz', '.tbz', '.tbz2', '.txz', '.tzst', '.7z', '.rar',
          '.bz2', '.xz', '.lzma', '.lz4'}
NAMES_SHOWN = 200  # characters of the names of fields in a message


def file_type(path):
    """'text', 'jsonl', 'json', 'csv', 'tsv' or 'parquet', by the name in any case. Raises UserError
    for what has to be unpacked first."""
    inner, outer = inner_suffix(path), path.suffix.lower()
    if inner in PACKED or (inner == '.parquet' and outer != inner):
        raise UserError(f'{shown(path)}: {inner}{outer * (inner != outer)} files are not read: '
                        'unpack it, and name what was in it with --input')
    return ROWS.get(inner, 'text')


def inner_suffix(path):
    """The ending without that of the compression, in small letters: '.txt' of a.TXT.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in documents.COMPRESSED_BLOCK_BYTES else suffix


def read_rows(path, text_field, errors='strict', digest=None, span=None):
    """Yield (text or None, True, position) of each row of a file. Raises UserError, TooLong.
    span: (start, end) in bytes, of .jsonl and .parquet files alone"""
    kind = file_type(path)
    if kind == 'parquet':
        yield from parquet_rows(path, text_field, errors, span)
        return
    if kind == 'jsonl':
        rows = json_rows(path, errors, digest, span)
    elif kind == 'json':
        rows = json_values(path, errors, digest)
    else:
        rows = csv_rows(path, kind, text_field, errors, digest)
    for row, where, position in rows:
        yield get_text(row, text_field, where), True, position


# -----------------------------------------------------------------------------
# JSON


def json_rows(path, errors='strict', digest=None, span=None):
    """Yield (value of a line, 'FILE, line N', position) of a .jsonl file. Raises UserError."""
    lines = split_lines(read_text(path, errors, digest, span, of_rows=True))
    name = name_of(path, span)
    for number, (line, position) in enumerate(lines, 1):
        if line.strip():
            where = f'{name}, line {number}'
            try:
                value, end = decode(line, BLANK.match(line).end(), errors)
            except json.JSONDecodeError as e:
                raise UserError(f'{where}: not JSON: {describe(e)} at column {e.colno}') from None
            except RecursionError:
                raise UserError(f'{where}: {TOO_DEEP}') from None
            except KeyTwice as e:
                raise UserError(f'{where}: {e}') from None
            if BLANK.match(line, end).end() < len(line):
                raise UserError(f'{where}: not JSON: more than one value, from column {end + 1} on')
            yield value, where, position


def name_of(path, span=None):
    """A file in messages that count its lines, which in a span are not those of the whole file."""
    return shown(path) + (f' from byte {span[0]:,} on' if span and span[0] else '')


TOO_DEEP = 'nested too deep to be read: leave it out'


class KeyTwice(Exception):
    """An object of JSON has a key twice, of which a dict keeps the last."""


def without_loss(pairs):
    """What json makes of the keys and values of an object. Raises KeyTwice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise KeyTwice(f'an object has the key {shown(twice)!r} twice: leave one out')
    return found


DECODER = json.JSONDecoder(object_pairs_hook=without_loss)
DECODER_OF_LONG = json.JSONDecoder(object_pairs_hook=without_loss, parse_int=float)
BYTE = re.compile(r'\\u[dD][cC][89a-fA-F]')
# An escape, which can be that of a pair; group 1: half of one, with the number of a byte.
ESCAPE = re.compile(r'\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][cC][89a-fA-F].)|.)', re.S)


def decode(text, at, errors):
    """→ (the JSON value that begins at a place of `text`, where it ends). Raises JSONDecodeError,
    RecursionError, KeyTwice."""
    decoder = DECODER
    try:
        value, end = decoder.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more digits than Python converts; no text in any case
        decoder = DECODER_OF_LONG
        value, end = decoder.raw_decode(text, at)
    # There, U+DC80 to U+DCFF stand for bytes: what the file writes as \udc80 is another half.
    if errors == 'surrogateescape' and BYTE.search(text, at, end):
        value = decoder.decode(ESCAPE.sub(
            lambda found: r'\udc00' if found[1] else found[0], text[at:end]))
    return value, end


def describe(problem):
    """What a JSONDecodeError says, without the place."""
    return problem.msg.removesuffix(' at').removesuffix(' starting')


BLANK = re.compile(r'[ \t\n\r]*')
CUT_CHARS = 16  # a value that is cut fails so near to the end: '-Infinit', '\\ud83d\\ude0'


class Unread:
    """The text of a file from `at` on, as far as it is in memory."""

    def __init__(self, blocks):
        self.blocks, self.text, self.at, self.position = blocks, '', 0, 0
        self.lines = 1  # number of the line where `text` begins

    def read(self, characters):
        """Read at least so many characters more, or all that there are → False at the end."""
        self.lines, parts, found = self.line(self.at), [self.text[self.at:]], 0
        for block, position in self.blocks:
            self.position = position
            parts.append(block)
            found += len(block)
            if found >= characters:
                break
        self.text, self.at = ''.join(parts), 0
        return found > 0

    def next(self):
        """The next character that is not white space, '' at the end."""
        self.at = BLANK.match(self.text, self.at).end()
        while self.at == len(self.text) and self.read(1):
            self.at = BLANK.match(self.text).end()
        return self.text[self.at:self.at + 1]

    def line(self, at):
        return self.lines + self.text.count('\n', 0, at)


def json_values(path, errors='strict', digest=None):
    """Yield (value, 'FILE, row N', position) of a .json file: the elements of an array, or values
    one after another, such as one object or JSON lines. One is in memory at a time. UserError."""
    unread, number = Unread(read_text(path, errors, digest, of_rows=True)), 0
    name = name_of(path)
    is_array = unread.next() == '['
    unread.at += is_array
    more = unread.next() != (']' if is_array else '')
    while more:
        number += 1
        yield read_value(unread, name, number, errors), f'{name}, row {number}', unread.position
        more = unread.next()
        if is_array:
            if more not in (',', ']'):
                raise UserError(f'{name}, line {unread.line(unread.at)}: not JSON: the array has '
                                f"no {'comma' if more else 'end'} after row {number}")
            more = more == ','
            unread.at += more
    unread.at += is_array
    if unread.next():
        raise UserError(f'{name}, line {unread.line(unread.at)}: not JSON: the array has ended')


def read_value(unread, name, number, errors):
    """The JSON value at unread.at, which is its end afterwards. Raises UserError, TooLong."""
    unread.next()
    while True:
        try:
            value, end = decode(unread.text, unread.at, errors)
            check_length(end - unread.at, f', row {number}')
            unread.at = end
            return value
        except json.JSONDecodeError as e:
            # Text that is cut fails where it begins, all else near the end.
            is_cut = e.msg.startswith('Unterminated string') or \
                e.pos + CUT_CHARS >= len(unread.text)
            held, line = len(unread.text) - unread.at, unread.line(e.pos)
            if is_cut:
                check_length(held, f', row {number}')
            # Twice as much: what is decoded in vain is then no more than the value itself.
            if not (is_cut and unread.read(held)):
                raise UserError(f'{name}, line {line}: not JSON: {describe(e)}') from None
        except RecursionError:
            raise UserError(f'{name}, row {number}: {TOO_DEEP}') from None
        except KeyTwice as e:
            raise UserError(f'{name}, row {number}: {e}') from None


# -----------------------------------------------------------------------------
# .csv and .tsv


CARRIAGE_RETURN = r'a carriage return (\r) within a line: quote its field, or end lines with \n'
SEPARATORS = (  # of files of which ending, what, its name, what to do
    (('csv',), '\t', 'tabs', 'name it .tsv'),
    (('csv', 'tsv'), ';', 'semicolons', 'write it with commas, as .csv'),
    (('tsv',), ',', 'commas', 'name it .csv'))


def csv_rows(path, kind, text_field, errors='strict', digest=None):
    """Yield ({text_field: its value}, 'FILE, line N', position) of the rows of a file that begins
    with the names of its columns. Raises UserError, TooLong."""
    position = characters = number = 0
    file, blocks = name_of(path), read_text(path, errors, digest, of_rows=True)

    def lines():
        nonlocal position, characters
        for line, position in split_lines(blocks):  # noqa: B007
            characters += len(line)
            check_length(characters, f', the row from line {number} on')
            yield line

    csv.field_size_limit(documents.MAX_DOCUMENT_CHARS)
    reader, names = csv.reader(lines(), 'excel' if kind == 'csv' else 'excel-tab', strict=True), []
    while True:
        number, characters = reader.line_num + 1, 0
        where = f'{file}, line {number}'
        try:
            row = next(reader, None)
        except csv.Error as e:
            problem = CARRIAGE_RETURN if 'new-line' in str(e) else e
            raise UserError(f'{where}: not {kind.upper()}: {problem}') from None
        if row is None:
            return
        if not names:
            names = row
            check_names(names, text_field, kind, where)
        elif len(row) not in (0, len(names)):  # a blank line is no row
            raise UserError(f'{where}: not {kind.upper()}: {len(row)} '
                            f'column{"s" * (len(row) > 1)}, and {len(names)} in the first line')
        elif row:
            yield {text_field: row[names.index(text_field)]}, where, position


def check_names(names, text_field, kind, where):
    """Raises UserError where not one of the columns has that name."""
    if len(names) == 1 and names[0] != text_field:
        for kinds, separator, what, advice in SEPARATORS:
            if kind in kinds and separator in names[0]:
                raise UserError(f'{where}: the columns are separated by {what} and not by '
                                f'{dict(csv="commas", tsv="tabs")[kind]}: {advice}')
    get_text(dict.fromkeys(names), text_field, where)
    check_once(names, text_field, where)


def check_once(names, name, where):
    """Raises UserError where several columns have a name."""
    if names.count(name) > 1:
        raise UserError(f'{where}: {names.count(name)} columns are called {name!r}: name them '
                        'apart')


# -----------------------------------------------------------------------------
# Parquet


def parquet_rows(path, text_field, errors='strict', span=None):
    """As read_rows. span: (start, end) in bytes: only the row groups whose middle lies there,
    taking all rows to be of one size"""
    with needs('pyarrow', 'a .parquet file'):
        import pyarrow.parquet
    file = name_of(path)
    try:
        with utf8_name(path) as name:
            metadata = pyarrow.parquet.read_metadata(name)
        size, expanded = path.stat().st_size, 0
        keys = check_parquet(path, size, metadata, text_field)
        groups, number, last = choose_groups(metadata, size, span)
        for value in parquet_values(path, metadata, groups, keys):
            number += 1
            where = f'{file}, row {number}'
            text = get_text({text_field: as_python(value, errors, where)}, text_field, where)
            expanded += len(text or '')
            check_length(len(text or ''), f', row {number}')
            check_expansion(path, size, expanded)
            yield text, True, size * number // max(number, metadata.num_rows)
        if number != last:
            raise pyarrow.ArrowInvalid(f'{number:,} rows where {last:,} were written')
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f'{file}: cannot be read ({str(e).splitlines()[0]}): get it again') \
            from None


def check_parquet(path, size, metadata, field):
    """The keys that lead to a field. Raises UserError where there is no such field, where a row has
    several values of it, or where what the file declares is too much for its size."""
    level = metadata.schema.to_arrow_schema()
    names = nested_names(level)
    keys = find_keys(names, field)
    if not keys:
        get_text(names, field, shown(path))  # raises
    for key in keys:
        check_once([each.name for each in level], key, shown(path))
        level = level.field(key).type
    if field not in [metadata.schema.column(i).path for i in range(metadata.num_columns)]:
        raise UserError(f'{shown(path)}: field {field!r} is nested and not text: choose another '
                        'with --text_field=…')
    # Not the sizes of a column: pyarrow aborts the process where damage is among those.
    declared = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    # A null takes no space, and the time of about 20 bytes of text.
    check_expansion(path, size, max(declared, 20 * metadata.num_rows))
    return keys


def nested_names(fields):
    """Fields of a schema or of a struct → {name: '', or those of a struct}."""
    from pyarrow.types import is_struct
    return {field.name: nested_names(field.type) if is_struct(field.type) else ''
            for field in fields}


def choose_groups(metadata, size, span):
    """The row groups in `span` → (their numbers, rows before them, rows up to their end)."""
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if not span:
        return range(len(rows)), 0, metadata.num_rows
    ends = list(itertools.accumulate(rows, initial=0))
    chosen = [i for i in range(len(rows))
              if span[0] <= size * (ends[i] + ends[i + 1]) / (2 * max(1, ends[-1])) < span[1]]
    return chosen, *((ends[chosen[0]], ends[chosen[-1] + 1]) if chosen else (0, 0))


def as_python(value, errors, where):
    """A pyarrow scalar → its value in Python. Raises UserError where it is text and no UTF-8."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        value = getattr(value, 'value', value)  # of one that is in a dictionary
        try:
            return value.as_buffer().to_pybytes().decode('utf-8', errors)
        except UnicodeDecodeError as e:
            raise UserError(f'{where}: not UTF-8 at byte {e.start} of the text: write the file '
                            'anew, or give prepare.py --errors=replace') from None


def parquet_values(path, metadata, groups, keys):
    """Yield the values of a column in some row groups, of which few are in memory at once: as
    pyarrow's scalars."""
    import pyarrow.compute
    import pyarrow.parquet
    field = '.'.join(keys)

    def read(group, rows, dictionary=()):
        with utf8_name(path) as name, pyarrow.parquet.ParquetFile(
                name, metadata=metadata, read_dictionary=dictionary,
                page_checksum_verification=True) as table:
            for batch in table.iter_batches(rows, [group], [field]):
                column = batch.column(keys[0])  # besides 'a.b', there may be 'b' in 'a'
                yield from pyarrow.compute.struct_field(column, keys[1:]) if keys[1:] else column

    for group in groups:
        done = 0
        try:
            # A value that many rows share is stored once: in a dictionary it is in memory once.
            for value in read(group, 256, [field]):
                yield value
                done += 1
        except (OSError, pyarrow.ArrowException):
            # It cannot be one where values share their beginnings. Damage is an error here, too.
            yield from itertools.islice(read(group, 1), done, None)


# -----------------------------------------------------------------------------
# fields


def find_keys(row, field):
    """The keys that lead to a field: ['a.b'], or ['a', 'b'] where 'a.b' is no key of the row; those
    up to a null; [] where there is no such field."""
    if field in row:
        return [field]
    for at in (found.start() for found in re.finditer(r'\.', field)):
        outer = field[:at]
        if outer in row and row[outer] is None:
            return [outer]
        if isinstance(row.get(outer), dict) and (keys := find_keys(row[outer], field[at + 1:])):
            return [outer, *keys]
    return []


def get_text(row, field, where):
    """The text in a field of a row, or None where it is null. Raises UserError."""
    keys = find_keys(row, field) if isinstance(row, dict) else []
    if not keys:
        names = ', '.join(map(repr, row)) if isinstance(row, dict) and row else 'no fields'
        names = names[:NAMES_SHOWN] + '…' * (len(names) > NAMES_SHOWN)
        raise UserError(f'{where}: no field {field!r}, it has {names}: choose with '
                        '--text_field=…')
    value = row
    for key in keys:
        value = value[key]
    if not isinstance(value, str | None):
        raise UserError(f'{where}: field {field!r} is {type(value).__name__} and not text: '
                        'choose another with --text_field=…')
    return value
