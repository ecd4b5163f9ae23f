"""Measurements as Markdown and CSV, with the machine, the command and the date."""

import csv
import datetime
import io
import re
import shlex
from pathlib import Path

import torch

from plaingpt.system.devices import device_name, machine_name
from plaingpt.system.files import write_atomically


def describe_measurement(device, argv):
    """What a figure means nothing without: {'date', 'machine', 'torch', 'command'}."""
    return {'date': datetime.date.today().isoformat(), 'machine': machine_name(device),
            'torch': torch.__version__, 'command': shlex.join(['python', 'bench.py', *argv])}


def markdown(header, rows):
    """A Markdown table: header and rows of text; the first column is left, the others right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    forms = [f'<{widths[0]}', *(f'>{width}' for width in widths[1:])]

    def line(row):
        return f'| {" | ".join(map(format, row, forms))} |'

    rule = ['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])]
    return '\n'.join(line(row) for row in (header, rule, *rows))


def number(form, value):
    """format(value, form), and a dash where there is no number."""
    return '–' if value is None else format(value, form)


def format_page(facts, text):
    """A Markdown page: the facts of the measurement, then its tables."""
    return f'{facts["machine"]}, torch {facts["torch"]}, {facts["date"]}:\n' \
           f'`{facts["command"]}`\n\n{text}\n'


def result_path(folder, name, device):
    """Path of a measurement's files without their endings: results/grid-nvidia-h100."""
    return str(Path(folder, f'{name}-' + re.sub(
        r'[^a-z0-9]+', '-', device_name(device).lower()).strip('-')))


def save(path, facts, rows, text):
    """Write PATH.csv, a line for each row with the facts as columns, without lists; and PATH.md."""
    columns = [key for key, value in {**rows[0], **facts}.items() if not isinstance(value, list)]
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, extrasaction='ignore', lineterminator='\n')
    writer.writeheader()
    writer.writerows({**row, **facts} for row in rows)
    write_atomically(f'{path}.csv', table.getvalue())
    write_atomically(f'{path}.md', format_page(facts, text))
