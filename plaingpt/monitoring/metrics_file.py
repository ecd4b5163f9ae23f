"""metrics.jsonl: what a row may hold, and reading, checking and trimming the file."""

import math

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


def trim_rows(path, last_iter, evaluated=True):
    """Drop the rows after iteration `last_iter` from a file of rows, and lines at its end that are
    no rows, such as one that a crash cut. evaluated=False: also the rows of the evaluation at
    last_iter, which come last there. Takes no room on the disk."""
    end, position, last = 0, 0, b'\n'
    with open_regular(path) as f:
        for line in f:
            position += len(line)
            row = parse_iteration(line)
            if row is not None and row['iter'] + (not evaluated and not of_step(row)) > last_iter:
                break
            if row is not None:
                end, last = position, line
    with open(path, 'rb+') as f:
        f.truncate(end)
        f.seek(end)
        f.write(b'' if last.endswith(b'\n') else b'\n')  # it did not make it to the disk


def parse_iteration(line):
    """A line of metrics.jsonl or anomalies.jsonl → dict; None where it is no row."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if is_dict(row) and is_count(row.get('iter')) else None


def of_step(row):
    """Whether a row tells of a step, and not of an evaluation between two."""
    return 'loss' in row or any(key.startswith('health/') for key in row)


def rows_with(rows, *keys):
    """The rows with a non-null value of each key."""
    return [row for row in rows if all(row.get(key) is not None for key in keys)]


def column(rows, key):
    """All non-null values of `key`."""
    return [row[key] for row in rows_with(rows, key)]


def step_tokens(rows):
    """Tokens in a step, or None before the first."""
    return next((round(row['tokens'] / row['iter']) for row in rows if row['iter']), None)
