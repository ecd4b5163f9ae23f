"""What training/film.py wrote of runs → one page that a browser shows without any network."""

import json
from pathlib import Path

from plaingpt.monitoring.run_record import read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_atomically


def write_page(runs, path):
    """runs: [(name, out_dir)]. Raises UserError where one has no film."""
    found = []
    for name, out_dir in runs:
        moments = read_rows(Path(out_dir, 'film.jsonl'))
        if not moments:
            raise UserError(f'{out_dir} has no film: train with --film=True')
        found.append({'name': name, 'moments': moments})
    page = Path(__file__).with_name('film.html').read_text(encoding='utf-8')
    data = json.dumps(found).replace('<', r'\u003c')  # what a model wrote ends no script
    write_atomically(path, page.replace('DATA', data))
