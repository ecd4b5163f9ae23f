"""What a benchmark found → a table, JSON or CSV, with the machine, the command and the day."""

import csv
import datetime
import re
from pathlib import Path

import torch

from plaingpt.system.errors import UserError
from plaingpt.system.hardware import machine_name


def about(device, script, argv):
    """What a figure means nothing without: {'date', 'machine', 'torch', 'command'}."""
    return {'date': datetime.date.today().isoformat(), 'machine': machine_name(device),
            'torch': torch.__version__, 'command': ' '.join(['python', script, *argv])}


def markdown(header, rows):
    """A Markdown table: header and rows of text; the first column is left, the others right."""
    cells = [header, *rows]
    widths = [max(3, *(len(row[k]) for row in cells)) for k in range(len(header))]

    def line(row):
        aligned = [row[0].ljust(widths[0]),
                   *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return f'| {" | ".join(aligned)} |'

    rule = ['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])]
    return '\n'.join(line(row) for row in (header, rule, *rows))


def described(found, text):
    """A Markdown page: the tables, under what they were measured on, when and how."""
    return f'{found["machine"]}, torch {found["torch"]}, {found["date"]}:\n' \
           f'`{found["command"]}`\n\n{text}\n'


def make_folder(folder):
    """See that a folder to save in is there, before hours of measuring. Raises UserError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f'save={folder}: cannot write there: {e.strerror}') from None


def save(folder, name, found, rows, text):
    """Write NAME.csv (a line for each row, what it was measured on among the columns, lists left
    out) and NAME.md into a folder → their path without the ending. Raises UserError."""
    path = Path(folder, name)
    rows = [{key: value for key, value in {**row, **found}.items() if not isinstance(value, list)}
            for row in rows]
    try:
        with open(f'{path}.csv', 'w', newline='', encoding='utf-8') as f:
            writer = csv.DictWriter(f, list(rows[0]), lineterminator='\n')
            writer.writeheader()
            writer.writerows(rows)
        Path(f'{path}.md').write_text(described(found, text), encoding='utf-8')
    except OSError as e:
        raise UserError(f'save={folder}: cannot write there: {e.strerror}') from None
    return path


def slug(text):
    """'AMD EPYC, 2 cores' → 'amd-epyc-2-cores', for a file's name."""
    return re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')
