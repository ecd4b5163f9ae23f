"""Files → text → documents: UTF-8, .gz, .zst, .jsonl, .parquet, one block in memory at a time."""

import codecs
import json
import re
import zlib

from plaingpt.system.errors import UserError

PIECE = 2**18  # characters: longer files come in several pieces
BLOCK = 2**20  # bytes read at a time


def read_bytes(path):
    """Yield (bytes, bytes of the file read so far); .gz and .zst decompressed. UserError."""
    new = {'.gz': lambda: zlib.decompressobj(31), '.zst': zstd_decompressor}.get(path.suffix)
    done, stream = 0, None
    try:
        with open(path, 'rb') as f:
            # compressed text grows: smaller blocks keep memory the same
            while block := f.read(BLOCK if new is None else BLOCK // 16):
                done += len(block)
                while new and block:  # a file may be several compressed streams in a row
                    stream = new() if stream is None or stream.eof else stream
                    data = stream.decompress(block)
                    block = stream.unused_data
                    yield data, done
                if not new:
                    yield block, done
    except OSError as e:
        raise UserError(f'{path}: {e.strerror}') from None
    except Exception as e:
        if isinstance(e, zlib.error) or type(e).__name__ == 'ZstdError':
            raise UserError(f'{path}: damaged after {done:,} bytes ({e}): get it again') from None
        raise
    if stream is not None and not stream.eof:
        raise UserError(f'{path}: cut short after {done:,} bytes: get it again')


def zstd_decompressor():
    try:
        import zstandard
    except ImportError:
        raise UserError('.zst files need zstandard: pip install zstandard') from None
    return zstandard.ZstdDecompressor().decompressobj()


def read_text(path, errors):
    """Yield (text, bytes of the file read so far) of a UTF-8 file. Raises UserError."""
    decoder = codecs.getincrementaldecoder('utf-8')(errors)
    before = done = 0  # decoded bytes, without those of a character that is not complete yet
    try:
        for data, done in read_bytes(path):
            yield decoder.decode(data), done
            before += len(data)
        yield decoder.decode(b'', final=True), done
    except UnicodeDecodeError as e:
        at = before - len(decoder.getstate()[0]) + e.start
        raise UserError(f'{path}: not UTF-8 at byte {at}: convert it, for example with iconv -t '
                        'utf-8 (prepare.py can go on with --errors=replace)') from None


def lines(blocks):
    """(text, at) in blocks → (line with its end, at)."""
    rest, at = '', 0
    for text, at in blocks:
        *whole, rest = (rest + text).split('\n')
        for line in whole:
            yield line + '\n', at
    if rest:
        yield rest, at


def whole_files(blocks):
    """The whole file is one document, in pieces. Cut so that GPT-2's pattern would cut there too
    (white space after something else): the tokens are those of the file in one piece."""
    rest, opens, at = '', True, 0
    for text, at in blocks:
        rest += text
        while len(rest) > PIECE:
            cut = next((i for i in range(PIECE, 0, -1)
                        if rest[i] in ' \n' and not rest[i - 1].isspace()), PIECE)
            yield rest[:cut], opens, at
            rest, opens = rest[cut:], False
    if rest.strip() or (rest and not opens):
        yield rest, opens, at


def each_line(placed_lines):
    for line, at in placed_lines:
        if line.strip():
            yield line.rstrip('\r\n'), True, at


def paragraphs(placed_lines):
    """Lines between blank ones."""
    group, at = [], 0
    for line, at in placed_lines:
        if line.strip():
            group.append(line)
        elif group:
            yield ''.join(group).rstrip('\r\n'), True, at
            group = []
    if group:
        yield ''.join(group).rstrip('\r\n'), True, at

TITLE = re.compile(r' = (?!= )[^\n]+(?<! =) = \n?')  # and not ' = = Section = = '


def articles(placed_lines):
    """WikiText's form: each line ' = Title = ' begins a document."""
    group, at = [], 0
    for line, at in placed_lines:
        if TITLE.fullmatch(line) and any(map(str.strip, group)):
            yield ''.join(group), True, at
            group = []
        group.append(line)
    if any(map(str.strip, group)):
        yield ''.join(group), True, at

FORMS = {'file': whole_files, 'line': each_line, 'paragraph': paragraphs, 'title': articles}


def json_lines(path, text_field, errors):
    for row, where, at in json_rows(path, errors):
        yield field_of(row, text_field, where), True, at


def json_rows(path, errors='strict'):
    """Yield (a line's value, 'FILE, line N', bytes read so far) of a .jsonl file. UserError."""
    for number, (line, at) in enumerate(lines(read_text(path, errors)), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UserError(f'{path}, line {number}: not JSON: {e}') from None
            yield row, f'{path}, line {number}', at


def parquet_rows(path, text_field):
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError('.parquet files need pyarrow: pip install pyarrow') from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                field_of(dict.fromkeys(names), text_field, path)
            done, size = 0, path.stat().st_size
            for batch in table.iter_batches(256, columns=[text_field]):
                for row in batch.to_pylist():
                    done += 1
                    yield (field_of(row, text_field, f'{path}, row {done}'), True,
                           size * done // table.metadata.num_rows)
    except (OSError, pyarrow.ArrowException) as e:
        raise UserError(f'{path}: cannot be read ({str(e).splitlines()[0]}): get it again') \
            from None


def field_of(row, name, where):
    """The text in a row's field, or None where it is null. Raises UserError."""
    if not isinstance(row, dict) or name not in row:
        has = ', '.join(row) if isinstance(row, dict) else 'no fields'
        raise UserError(f'{where}: no field {name!r}, it has {has}: choose with --text_field=…')
    if not isinstance(row[name], str | None):
        raise UserError(f'{where}: field {name!r} is {type(row[name]).__name__} and not text: '
                        'choose another with --text_field=…')
    return row[name]
