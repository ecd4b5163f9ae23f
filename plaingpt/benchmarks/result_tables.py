"""Results of a benchmark as a table, JSON or CSV, with the machine, the command and the date."""

import csv
import datetime
import io
import re
import shlex
from pathlib import Path

import torch

from plaingpt.system.devices import device_name, machine_name
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import gib, short


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


def format_times(row):
    """Texts of a row's median, fastest and slowest step in ms, and of its tokens/s."""
    return [*(f'{row[key]:.1f}' for key in ('step_ms', 'min_ms', 'max_ms')),
            short(row['tokens_per_s'])]


def format_memory(row):
    return gib(row['peak_memory_bytes']) if row['peak_memory_bytes'] else 'n/a'


def format_page(facts, text):
    """A Markdown page: the facts of the measurement, then its tables."""
    return f'{facts["machine"]}, torch {facts["torch"]}, {facts["date"]}:\n' \
           f'`{facts["command"]}`\n\n{text}\n'


def result_path(folder, benchmark, device):
    """Path of a benchmark's files without their endings: results/grid-nvidia-h100."""
    return named_path(folder, benchmark, device_name(device))


def named_path(folder, benchmark, name):
    """As `result_path`, of a device that may be elsewhere, by its name."""
    return Path(folder, f'{benchmark}-' + re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-'))


def save(path, facts, rows, text):
    """Write PATH.csv (a line for each row, with the facts as columns, without lists) and PATH.md.
    Raises UserError."""
    columns = [key for key, value in {**rows[0], **facts}.items() if not isinstance(value, list)]
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, extrasaction='ignore', lineterminator='\n')
    writer.writeheader()
    writer.writerows({**row, **facts} for row in rows)
    try:
        write_atomically(f'{path}.csv', table.getvalue())
        write_atomically(f'{path}.md', format_page(facts, text))
    except OSError as e:
        raise UserError(f'save={path.parent}: cannot write there: {e.strerror}') from None
