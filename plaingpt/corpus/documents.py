"""Files → text → documents: UTF-8, .gz, .zst, .jsonl and .parquet, read a block at a time.

`position` is always the number of bytes of the file that have been read so far. The functions
that find documents yield (text, new_document, position). The text is None where a row's field is
null; a file longer than PIECE_CHARS comes in pieces, with new_document=True for the first.
"""

import codecs
import itertools
import json
import re
import zlib

from plaingpt.system.errors import UserError, needs

PIECE_CHARS = 2**18
BLOCK_BYTES = 2**20


def read_bytes(path):
    """Yield (bytes, position) of a file, .gz and .zst decompressed. Raises UserError."""
    new = {'.gz': lambda: zlib.decompressobj(31), '.zst': zstd_decompressor}.get(path.suffix)
    position, stream = 0, None
    try:
        with open(path, 'rb') as f:
            # Compressed text grows, so smaller blocks keep the memory the same.
            while block := f.read(BLOCK_BYTES if new is None else BLOCK_BYTES // 16):
                position += len(block)
                while new and block:  # a file may be several compressed streams in a row
                    stream = new() if stream is None or stream.eof else stream
                    data = stream.decompress(block)
                    block = stream.unused_data
                    yield data, position
                if not new:
                    yield block, position
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}') from None
    except Exception as e:
        if isinstance(e, zlib.error) or type(e).__name__ == 'ZstdError':
            raise UserError(f'{path}: damaged after {position:,} bytes ({e}): get it again') \
                from None
        raise
    if stream is not None and not stream.eof:
        raise UserError(f'{path}: cut short after {position:,} bytes: get it again')


def zstd_decompressor():
    with needs('zstandard', 'a .zst file'):
        import zstandard
    return zstandard.ZstdDecompressor().decompressobj()


def read_text(path, errors):
    """Yield (text, position) of a UTF-8 file; `errors` as in bytes.decode. Raises UserError."""
    decoder = codecs.getincrementaldecoder('utf-8')(errors)
    decoded = position = 0
    try:
        for data, position in read_bytes(path):
            yield decoder.decode(data), position
            decoded += len(data)
        yield decoder.decode(b'', final=True), position
    except UnicodeDecodeError as e:
        # The decoder holds back the bytes of a character that is not complete yet.
        byte = decoded - len(decoder.getstate()[0]) + e.start
        raise UserError(f'{path}: not UTF-8 at byte {byte}: convert it, for example with iconv -t '
                        'utf-8, or give prepare.py --errors=replace') from None


def split_lines(blocks):
    """(text, position) of blocks → (line with its line end, position)."""
    rest, position = '', 0
    for text, position in blocks:
        *complete, rest = (rest + text).split('\n')
        for line in complete:
            yield line + '\n', position
    if rest:
        yield rest, position


def whole_files(blocks):
    """A file is one document. Long files are cut where GPT-2's pattern also cuts (at white space
    that follows something else), so that the tokens are those of the uncut file."""
    rest, new_document, position = '', True, 0
    for text, position in blocks:
        rest += text
        while len(rest) > PIECE_CHARS:
            cut = next((i for i in range(PIECE_CHARS, 0, -1)
                        if rest[i] in ' \n' and not rest[i - 1].isspace()), PIECE_CHARS)
            yield rest[:cut], new_document, position
            rest, new_document = rest[cut:], False
    if rest.strip() or (rest and not new_document):
        yield rest, new_document, position


def each_line(lines):
    """Each line that is not blank is a document."""
    for line, position in lines:
        if line.strip():
            yield line.rstrip('\r\n'), True, position


def paragraphs(lines):
    """The lines between two blank lines are a document."""
    for blank, group in itertools.groupby(lines, lambda line: not line[0].strip()):
        if not blank:
            texts, positions = zip(*group, strict=True)
            yield ''.join(texts).rstrip('\r\n'), True, positions[-1]


TITLE = re.compile(r' = (?!= )[^\n]+(?<! =) = \n?')  # ' = Title = ', not ' = = Section = = '


def articles(lines):
    """WikiText's articles: each line ' = Title = ' begins a document."""
    group, position = [], 0
    for line, position in lines:
        if TITLE.fullmatch(line) and any(map(str.strip, group)):
            yield ''.join(group), True, position
            group = []
        group.append(line)
    if any(map(str.strip, group)):
        yield ''.join(group), True, position


# What a document can be. whole_files takes blocks of text, the others take lines.
DOCUMENT_FORMS = {'file': whole_files, 'line': each_line, 'paragraph': paragraphs,
                  'title': articles}


def json_rows(path, errors='strict'):
    """Yield (value of a line, 'FILE, line N', position) of a .jsonl file. Raises UserError."""
    for number, (line, position) in enumerate(split_lines(read_text(path, errors)), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UserError(f'{path}, line {number}: not JSON: {e}') from None
            yield row, f'{path}, line {number}', position


def parquet_rows(path, text_field):
    with needs('pyarrow', 'a .parquet file'):
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                get_text(dict.fromkeys(names), text_field, path)  # raises
            row_number, size = 0, path.stat().st_size
            for batch in table.iter_batches(256, columns=[text_field]):
                for row in batch.to_pylist():
                    row_number += 1
                    yield (get_text(row, text_field, f'{path}, row {row_number}'), True,
                           size * row_number // table.metadata.num_rows)
    except (OSError, pyarrow.ArrowException) as e:
        raise UserError(f'{path}: cannot be read ({str(e).splitlines()[0]}): get it again') \
            from None


def get_text(row, field, where):
    """The text in a field of a row, or None where it is null. Raises UserError."""
    if not isinstance(row, dict) or field not in row:
        names = ', '.join(row) if isinstance(row, dict) else 'no fields'
        raise UserError(f'{where}: no field {field!r}, it has {names}: choose with '
                        '--text_field=…')
    if not isinstance(row[field], str | None):
        raise UserError(f'{where}: field {field!r} is {type(row[field]).__name__} and not text: '
                        'choose another with --text_field=…')
    return row[field]
