"""Rows of .jsonl and .parquet files → the text in one of their fields."""

import itertools
import json

from plaingpt.corpus.documents import check_expansion, check_length, read_text, split_lines
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import utf8_name


def json_rows(path, errors='strict', digest=None, span=None):
    """Yield (value of a line, 'FILE, line N', position) of a .jsonl file. Raises UserError."""
    lines = split_lines(read_text(path, errors, digest, span))
    for number, (line, position) in enumerate(lines, 1):
        if line.strip():
            where = f'{name_of(path, span)}, line {number}'
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UserError(f'{where}: not JSON: {e}') from None
            yield row, where, position


def name_of(path, span):
    """A file in messages that count its lines, which in a span are not those of the whole file."""
    return f'{path} from byte {span[0]:,} on' if span and span[0] else path


def parquet_rows(path, text_field, span=None):
    """span: (start, end) in bytes: only the row groups whose middle lies there, taking all rows to
    be of one size"""
    with needs('pyarrow', 'a .parquet file'):
        import pyarrow.parquet
    try:
        with utf8_name(path) as name:
            metadata = pyarrow.parquet.read_metadata(name)
        size, expanded = path.stat().st_size, 0
        check_parquet(path, size, metadata, text_field)
        groups, number, last = choose_groups(metadata, size, span)
        for value in parquet_values(path, metadata, groups, text_field):
            number += 1
            text = get_text({text_field: value.as_py()}, text_field, f'{path}, row {number}')
            expanded += len(text or '')
            check_length(len(text or ''), f', row {number}')
            check_expansion(path, size, expanded)
            yield text, True, size * number // max(number, metadata.num_rows)
        if number != last:
            raise pyarrow.ArrowInvalid(f'{number:,} rows where {last:,} were written')
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f'{path}: cannot be read ({str(e).splitlines()[0]}): get it again') \
            from None


def check_parquet(path, size, metadata, field):
    """Raises UserError where there is no such field, where a row has several values of it, or
    where what the file declares is too much for its size."""
    names = metadata.schema.to_arrow_schema().names
    if field not in names:
        get_text(dict.fromkeys(names), field, path)  # raises
    if field not in [metadata.schema.column(i).path for i in range(metadata.num_columns)]:
        raise UserError(f'{path}: field {field!r} is nested and not text: choose another with '
                        '--text_field=…')
    # Not the sizes of a column: pyarrow aborts the process where damage is among those.
    declared = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    # A null takes no space, and the time of about 20 bytes of text.
    check_expansion(path, size, max(declared, 20 * metadata.num_rows))


def choose_groups(metadata, size, span):
    """The row groups in `span` → (their numbers, rows before them, rows up to their end)."""
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if not span:
        return range(len(rows)), 0, metadata.num_rows
    ends = list(itertools.accumulate(rows, initial=0))
    chosen = [i for i in range(len(rows))
              if span[0] <= size * (ends[i] + ends[i + 1]) / (2 * max(1, ends[-1])) < span[1]]
    return chosen, *((ends[chosen[0]], ends[chosen[-1] + 1]) if chosen else (0, 0))


def parquet_values(path, metadata, groups, field):
    """Yield the values of a column in some row groups, of which few are in memory at once: as
    pyarrow's scalars."""
    import pyarrow.parquet

    def read(group, rows, dictionary=()):
        with utf8_name(path) as name, pyarrow.parquet.ParquetFile(
                name, metadata=metadata, read_dictionary=dictionary,
                page_checksum_verification=True) as table:
            for batch in table.iter_batches(rows, [group], [field]):
                yield from batch.column(0)

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
