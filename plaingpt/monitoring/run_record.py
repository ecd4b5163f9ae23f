"""run.json (settings, data, versions) and metrics.jsonl: all that a report or a plot needs.

docs/monitoring.md lists the keys of a row. Losses are in nats per token, averaged over all
micro-batches and processes; unknown values are null.
"""

import json
from contextlib import suppress
from pathlib import Path

from plaingpt.system.errors import warn
from plaingpt.system.files import read_json
from plaingpt.system.formatting import count_of

RUN_FILES = ('metrics.jsonl', 'anomalies.jsonl', 'film.jsonl', 'run.json', 'report.md', 'loss.png',
             'film.html', 'tensorboard',  # in out_dir, besides checkpoints
             'trained_on.npz')  # of version 1.0

# -----------------------------------------------------------------------------
# rows of metrics.jsonl


def parse_row(line):
    """A line → dict, or None if it is not a row, e.g. cut off by a kill."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line, parse_constant=lambda name: None)  # NaN, Infinity
        return row if isinstance(row, dict) and type(row.get('iter')) is int else None


def read_rows(path):
    """The rows of a metrics.jsonl or film.jsonl, in order; [] if there is no file. Damaged lines
    are skipped with one warning."""
    rows = []
    skipped = 0
    with suppress(FileNotFoundError, NotADirectoryError), open(path, 'rb') as f:
        for line in f:
            row = parse_row(line)
            if row:
                rows.append(row)
            elif line.strip() and line.endswith(b'\n'):  # else it is still being written
                skipped += 1
    if skipped:
        warn(f'{path}: skipped {count_of(skipped, "damaged line")}')
    return rows


def trim_rows(path, last_iter, evaluated):
    """Drop the rows after iteration `last_iter` from a file of rows, and an incomplete last line.
    evaluated: whether the checkpoint has the evaluation at last_iter; if not, its rows, the last
    ones, are dropped too, since it is evaluated and logged again."""
    end = position = 0
    with open(path, 'rb+') as f:
        for line in f:
            position += len(line)
            row = parse_row(line)
            if row:
                is_evaluation = 'loss' not in row and not any('health/' in key for key in row)
                if row['iter'] > last_iter or (
                        row['iter'] == last_iter and is_evaluation and not evaluated):
                    break
            if row or line.endswith(b'\n'):
                end = position
        f.truncate(end)


def is_number(value):
    return isinstance(value, int | float)


def rows_with(rows, *keys):
    """The rows in which the values of all these keys are numbers, not null."""
    return [row for row in rows if all(is_number(row.get(key)) for key in keys)]


def column(rows, key):
    """All numbers logged as `key`."""
    return [row[key] for row in rows_with(rows, key)]


# -----------------------------------------------------------------------------
# run.json


def read_run(out_dir):
    """The run.json of a folder; {} if there is none, or with a warning if it is damaged."""
    path = Path(out_dir, 'run.json')
    try:
        run = read_json(path)
        if 'config' in run:
            return run
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError):
        pass
    warn(f'{path} is damaged')
    return {}
