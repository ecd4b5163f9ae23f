"""A file → its text, cut into documents; a file of rows → the text in one of their fields. Both are
read a block or a row at a time, also where they are compressed as .gz, .bz2, .xz or .zst."""

import bz2
import codecs
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
from plaingpt.system.formatting import shown

COMPRESSED = ('.gz', '.bz2', '.xz', '.zst')
ROWS = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.json': 'json', '.csv': 'csv',
        '.parquet': 'parquet'}  # ending → type; all others are text
UNREAD = {'.tsv': 'save it as .csv',  # ending → what to do with such a file, which is not read
          **dict.fromkeys(('.html', '.htm'), 'make text of it with trafilatura or pandoc')}
BLOCK_CHARS = 2**20  # that are read at a time
PIECE_CHARS = 2**18  # a longer document comes in pieces
JSON_CHARS = 2**28  # of a .json file, which is in memory whole
NAMES_SHOWN = 200  # characters of the names of fields in a message
UTF8 = 'utf-8'
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what a compressed file may raise


class Piece(NamedTuple):
    """What a source yields: a document, or a part of one."""

    text: str
    new_document: bool  # False where the document of the piece before continues
    split: str = ''  # 'train', 'val' or 'test' where the corpus itself says so


def inner_suffix(path):
    """The ending without that of the compression, in small letters: '.txt' of a.TXT.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def file_type(path):
    """'text', 'jsonl', 'json', 'csv' or 'parquet', by the name."""
    return ROWS.get(inner_suffix(path), 'text')


# -----------------------------------------------------------------------------
# text


def open_bytes(path):
    try:
        return open(path, 'rb')
    except OSError as e:
        raise UserError(f'{shown(path)}: {e.strerror}') from None


class NotText(UserError):
    """A file is no text in an encoding. place: the file and perhaps the line; what: why, and the
    fix, which may be that of many files"""

    def __init__(self, place, what):
        super().__init__(f'{place}: {what}')
        self.place, self.what = place, what


def find_unread(path):
    """The NotText of a file whose ending says that it is not read, or None."""
    ending = inner_suffix(path)
    if ending in UNREAD:
        return NotText(shown(path), f'{ending} is not read: {UNREAD[ending]}, and name that')
    return None


def find_fault(path, errors='strict', encoding=UTF8):
    """The NotText that a file ends with somewhere, or None."""
    if file_type(path) == 'parquet':
        return None
    try:
        with open_bytes(path) as file, open_text(file, errors, encoding) as text:
            while text.read(BLOCK_CHARS):
                pass
    except NotText as fault:
        return fault


@contextmanager
def open_text(file, errors='strict', encoding=UTF8):
    """A context of the text of an open file of bytes, unpacked. Its lines end with \\n alone, and
    are as they are. Raises UserError, also for what goes wrong while it is read.
    errors: as of bytes.decode; with 'surrogateescape' a file of text may be any bytes
    encoding: of those files that are no UTF-8"""
    path = Path(file.name)
    if errors == 'surrogateescape' and file_type(path) != 'text':
        errors = 'strict'
    if encoding != UTF8 and is_utf8(path):
        encoding = UTF8
    try:
        with unpack(file, path.suffix.lower()) as data:
            is_wide = b'\0' in 'a'.encode(encoding)  # as UTF-16
            if errors != 'surrogateescape' and not is_wide and b'\0' in data.peek(1):
                raise NotText(shown(path), f'no {encoding.upper()} text, it has NUL bytes: where '
                              'it is UTF-16, give prepare.py --encoding=utf-16')
            yield io.TextIOWrapper(data, with_bom(encoding), errors, newline='\n')
    except UnicodeError:
        raise NotText(f'{shown(path)}, line {wrong_line(path, encoding)}',
                      f'not {encoding.upper()}: save it as UTF-8 text, or tell prepare.py what '
                      'it is with --encoding=latin-1, or put U+FFFD there with '
                      '--errors=replace') from None
    except BROKEN as e:
        what = getattr(e, 'strerror', None) or e
        raise UserError(f'{shown(path)}: cannot be read ({what})') from None


def read_text(path):
    """The whole text of a UTF-8 file, as it is prepared. Raises UserError."""
    with open_bytes(path) as file, open_text(file) as text:
        return text.read()


def unpack(file, suffix):
    """A file of bytes → its bytes without the compression, as a buffered reader."""
    if suffix == '.zst':
        with needs('pyarrow', 'a .zst file'):
            import pyarrow
        return io.BufferedReader(pyarrow.CompressedInputStream(file, 'zstd'), 2**18)
    if suffix == '.gz':
        return gzip.open(file)
    decompressor = {'.bz2': bz2.BZ2Decompressor, '.xz': lzma.LZMADecompressor}.get(suffix)
    return io.BufferedReader(Unpacked(file, decompressor), 2**18) if decompressor else file


class Unpacked(io.RawIOBase):
    """What the streams of a .bz2 or .xz file hold. Python's own readers take a damaged one behind
    the first for something that does not belong to the file, and end in silence."""

    def __init__(self, file, decompressor):
        self.file, self.decompressor = file, decompressor
        self.stream = decompressor()

    def readable(self):
        return True

    def readinto(self, buffer):
        data = b''
        while not data:
            packed = b''
            if self.stream.eof:  # null bytes may follow, and another stream
                packed = self.stream.unused_data.lstrip(b'\0')
                while not packed:
                    if not (block := self.file.read(2**16)):
                        return 0
                    packed = block.lstrip(b'\0')
                self.stream = self.decompressor()
            elif self.stream.needs_input:
                packed = self.file.read(2**16)
                if not packed:
                    raise EOFError('it ends within a stream')
            data = self.stream.decompress(packed, len(buffer))
        buffer[:len(data)] = data
        return len(data)


def is_utf8(path):
    """Whether a file has characters beyond ASCII, and all are UTF-8. What is ASCII may be an
    encoding of 7 bits."""
    decoder, has_more = codecs.getincrementaldecoder(UTF8)(), False
    try:
        with open(path, 'rb') as file, unpack(file, path.suffix.lower()) as data:
            while block := data.read(BLOCK_CHARS):
                if b'\0' in block:
                    return False
                has_more |= not decoder.decode(block).isascii()
            decoder.decode(b'', final=True)
    except (UnicodeError, *BROKEN):  # of which the last are told when it is read
        return False
    return has_more


def wrong_line(path, encoding):
    """The number of the first line that is no text in this encoding; None where there is none."""
    number, decoder = 1, codecs.getincrementaldecoder(encoding)()
    try:
        with open(path, 'rb') as file, unpack(file, path.suffix.lower()) as data:
            while line := data.readline(BLOCK_CHARS):
                number += decoder.decode(line).count('\n')
            decoder.decode(b'', final=True)
    except (UnicodeError, *BROKEN):
        return number


def with_bom(encoding):
    """The encoding that also takes UTF-8's byte order mark."""
    return 'utf-8-sig' if encoding == UTF8 else encoding


def find_encoding(name):
    """Python's own name of a text encoding, whatever its spelling; None for what is none."""
    try:
        data = 'a\nb'.encode(name)
        decoder = codecs.getincrementaldecoder(name)()  # some decode wholes alone, as punycode
        in_parts = ''.join(decoder.decode(data[i:i + 1]) for i in range(len(data)))
        return codecs.lookup(name).name if in_parts == 'a\nb' else None
    except (LookupError, ValueError):
        return None


# The beginning of a text up to the last white space that follows something else.
CUT = re.compile(r'(?s:.*\S)(?=[ \n])')


def place_to_cut(text, start, characters):
    """Where to cut a text at most so many characters after `start`, at white space if possible."""
    if len(text) - start <= characters:
        return len(text)
    cut = CUT.match(text, start, start + characters + 1)
    return cut.end() if cut else start + characters


def whole_file(text, piece_chars=PIECE_CHARS):
    """A file is one document, or none where it is blank. Long files are cut where GPT-2's pattern
    also cuts (at white space that follows something else), so that the tokens are those of the
    uncut file."""
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


# What a document of a text can be → a function from an open file, or lines, to (text, whether it
# begins a document).
DOCUMENT_FORMS = {'file': whole_file, 'line': each_line, 'paragraph': paragraphs,
                  'title': articles}


# -----------------------------------------------------------------------------
# rows


def iter_rows(file, field=None, errors='strict', encoding=UTF8):
    """Yield ('FILE, line N' or 'FILE, row N', row) of an open file of rows, each a JSON value or a
    dict of columns. field: that which is wanted; only its column of Parquet is read. UserError."""
    path = Path(file.name)
    kind, name = file_type(path), shown(path)
    if kind == 'parquet':
        yield from parquet_rows(file, name, field)
        return
    with open_text(file, errors, encoding) as text:
        if kind == 'csv':
            yield from csv_rows(text, name)
        elif kind == 'json' and text.buffer.peek(1).decode(
                text.encoding, 'ignore').lstrip()[:1] == '[':
            yield from json_array(text, name)
        else:
            yield from json_lines(text, name)


def read_jsonl(path):
    """The same of the lines of a file, whatever its name."""
    with open_bytes(path) as file, open_text(file) as text:
        yield from json_lines(text, shown(path))


def json_lines(text, name):
    for number, line in enumerate(text, 1):
        if line.strip():
            where = f'{name}, line {number}'
            yield where, json_value(line, where)


def json_array(text, name):
    content = text.read(JSON_CHARS + 1)
    if len(content) > JSON_CHARS:
        raise UserError(f'{name}: an array of more than {JSON_CHARS:,} characters is not read: '
                        'write its rows as .jsonl, one a line')
    rows = json_value(content, name)
    yield from ((f'{name}, row {number}', row) for number, row in enumerate(rows, 1))


def json_value(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        what = f'{e.msg} at column {e.colno}' if getattr(e, 'lineno', 0) == 1 else e
        raise UserError(f'{where}: not JSON: {what}') from None


def csv_rows(text, name):
    csv.field_size_limit(2**31 - 1)
    first = text.readline()
    delimiter = ';' if ';' in first and ',' not in first else ','  # as Excel has it
    table = csv.DictReader(itertools.chain([first], text), delimiter=delimiter, strict=True)
    while True:
        try:
            row = next(table, None)
        except csv.Error as e:
            raise UserError(f'{name}, line {table.reader.line_num}: {e}') from None
        if row is None:
            return
        where = f'{name}, line {table.reader.line_num}'  # DictReader's stays behind
        names = table.fieldnames
        if None in row or None in row.values() or len({*names}) < len(names):
            raise UserError(f'{where}: the first line names {len(names)} columns, each of which a '
                            'row has once: quote text that has separators in it')
        yield where, row


def parquet_rows(file, name, field):
    with needs('pyarrow', 'a .parquet file'):
        import pyarrow.parquet
    try:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        names = [column.path for column in table.schema]
        wanted = [column for column in names if column == field] if field else None
        if wanted == []:
            text_of(dict.fromkeys(names, ''), field, name)  # raises
        batches = table.iter_batches(256, columns=wanted)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f'{name}, row {number}', row) for number, row in enumerate(rows, 1))
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f'{name}: cannot be read ({str(e).splitlines()[0]})') from None


def text_of(row, field, where):
    """The text in a field of a row, None where it is null. 'a.b' is b in a, unless it is a field
    itself. Raises UserError."""
    value = row
    for key in [field] if isinstance(row, dict) and field in row else field.split('.'):
        if value is None:
            return None
        if not isinstance(value, dict) or key not in value:
            names = ', '.join(map(repr, row)) if isinstance(row, dict) and row else 'no fields'
            names = names[:NAMES_SHOWN] + '…' * (len(names) > NAMES_SHOWN)
            raise UserError(f'{where}: no field {field!r}, it has {names}: choose with '
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
