"""Measurements as Markdown, CSV and TSV."""

import csv

from plaingpt.system.files import append_text


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


def save_csv(path, rows):
    """Write a list of dicts with the same keys."""
    with open(path, 'w', newline='', encoding='utf-8') as table:
        writer = csv.DictWriter(table, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def append_tsv(path, row):
    """Append the values of a dict to a .tsv file, whose header is the keys. White space in a value
    becomes a space."""
    header, line = ('\t'.join(' '.join(str(cell).split()) for cell in cells)
                    for cells in (row, row.values()))
    append_text(path, line, header)
