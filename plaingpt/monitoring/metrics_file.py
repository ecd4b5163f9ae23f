"""metrics.jsonl: what a row may hold, and reading, checking and trimming the file."""

import math
import os

from plaingpt.system.errors import UserError
from plaingpt.system.files import is_count, is_dict, open_regular, parse_json


def finite(x):
    """x, or None where x is None or not finite: JSON has no NaN and no infinity."""
    return x if x is not None and math.isfinite(x) else None


def parse_row(line):
    """A line of metrics.jsonl → dict. Raises ValueError where train.py cannot have written it."""
    row = parse_json(line)
    if not isinstance(row, dict) or not is_count(row.get('iter')) \
            or not is_count(row.get('tokens')) or row.get('elapsed_s') is None:
        raise ValueError('no object with iter, tokens and elapsed_s')
    if type(row.get('sample', '')) is not str:
        raise ValueError('sample is no text')
    for key, value in row.items():
        if value is not None and key != 'sample' \
                and (type(value) not in (int, float) or not abs(value) < 1e300):
            raise ValueError(f'{key} is no number')
    return row


def read_rows(path, print_line):
    """The rows of a metrics.jsonl, in order; [] where there is no file.

    Other lines are skipped, and one printed line names them. Raises UserError where the file
    cannot be read.
    """
    try:
        with open_regular(path) as f:
            text = f.read().decode(errors='replace')
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f'{path} cannot be read: {e.strerror}') from None
    rows, skipped = [], []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(parse_row(line))
        except ValueError:
            skipped.append(number)
    if skipped:
        shown = ', '.join(map(str, skipped[:5])) + (', …' if skipped[5:] else '')
        print_line(f'warning: {path}: skipped {len(skipped)} of {len(rows) + len(skipped)} lines '
                   f'that are no rows of a run: line {shown}')
    return rows


def rows_end(path, last_iter, evaluated=True):
    """Where the rows up to iteration `last_iter` end in a file of rows: a number of bytes. Those of
    the evaluation there come last, and count unless it is not `evaluated`. Lines that are no rows,
    such as one that a crash cut, count as the end where no row follows them."""
    end = position = 0
    with open_regular(path) as f:
        for line in f:
            position += len(line)
            row = parse_iteration(line)
            if row is not None and row['iter'] + (not evaluated and not of_step(row)) > last_iter:
                break
            if row is not None:
                end = position
    return end


def of_step(row):
    """Whether a row tells of a step, and not of an evaluation between two."""
    return 'loss' in row or any(key.startswith('health/') for key in row)


def parse_iteration(line):
    """A line of metrics.jsonl or anomalies.jsonl → dict; None where it is no row."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if is_dict(row) and is_count(row.get('iter')) else None


def trim_rows(path, last_iter, evaluated=True):
    """Drop what rows_end says lies after `last_iter`. It takes no room on the disk."""
    with open(path, 'rb+') as f:
        f.truncate(rows_end(path, last_iter, evaluated))
        if f.seek(0, os.SEEK_END) and f.seek(-1, os.SEEK_END) and f.read() != b'\n':
            f.write(b'\n')  # the newline did not make it to the disk


def rows_with(rows, *keys):
    """The rows that have a value of each key."""
    return [row for row in rows if all(row.get(key) is not None for key in keys)]


def column(rows, key):
    """The values of a key, of the rows that have one."""
    return [row[key] for row in rows_with(rows, key)]


def step_tokens(rows):
    """Tokens in a step, or None before the first."""
    return next((round(row['tokens'] / row['iter']) for row in rows if row['iter']), None)
