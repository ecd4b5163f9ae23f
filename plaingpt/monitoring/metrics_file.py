"""metrics.jsonl: what a row may hold, and how the file is read and trimmed."""

import json
import math
from contextlib import suppress
from pathlib import Path

from plaingpt.system.errors import UserError


def finite(x):
    """x, or None where x is None or not finite: JSON has no NaN and no infinity."""
    return x if x is not None and math.isfinite(x) else None


def parse_iteration(line):
    """A line of metrics.jsonl or anomalies.jsonl → dict. Raises ValueError where it is no row."""
    row = json.loads(line)
    if not isinstance(row, dict) or 'iter' not in row:
        raise ValueError('no object with iter')
    return row


def parse_row(line):
    """A line of metrics.jsonl → dict. Raises ValueError where train.py cannot have written it."""
    row = parse_iteration(line)
    if not row.keys() >= {'tokens', 'elapsed_s'}:
        raise ValueError('no object with iter, tokens and elapsed_s')
    return row


def read_rows(path, print_line):
    """The rows of a metrics.jsonl, in order; [] where there is no file.

    Other lines are skipped, and one printed line names them. Raises UserError where the file
    cannot be read.
    """
    try:
        text = Path(path).read_text(encoding='utf-8', errors='replace')
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
    with open(path, 'rb') as f:
        lines = f.readlines()
    kept = 0
    for i, line in enumerate(lines):
        with suppress(ValueError):
            row = parse_iteration(line)
            if row['iter'] + (not evaluated and not of_step(row)) > last_iter:
                break
            kept = i + 1
    text = b''.join(lines[:kept])
    with open(path, 'rb+') as f:
        f.truncate(len(text))
        if text and not text.endswith(b'\n'):  # the newline did not make it to the disk
            f.seek(len(text))
            f.write(b'\n')


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
