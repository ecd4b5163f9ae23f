"""What training/film.py wrote of runs → one page that a browser shows without any network."""

import json
from pathlib import Path

from plaingpt.monitoring.run_record import read_rows, rows_with
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_atomically


def write_page(runs, path):
    """runs: [(name, out_dir, rows of its metrics.jsonl)]. Raises UserError where one has no film,
    OSError where the page cannot be written."""
    found = []
    for name, out_dir, rows in runs:
        moments = read_rows(Path(out_dir, 'film.jsonl'))
        if not moments:
            raise UserError(f'{out_dir} has no film: train with --film=True')
        train, val = ([(row['iter'], row[key]) for row in rows_with(rows, key)]
                      for key in ('loss', 'val_loss'))
        found.append({'name': name, 'moments': moments, 'train': train, 'val': val})
    page = Path(__file__).with_name('film.html').read_text(encoding='utf-8')
    data = json.dumps(found).replace('<', r'\u003c')  # what a model wrote ends no script
    write_atomically(path, page.replace('DATA', data))
