"""What training/film.py wrote of a run → a page that a browser shows without any network."""

import html
import json
from pathlib import Path

from plaingpt.monitoring.run_record import read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_atomically


def write_page(name, out_dir, path):
    """Raises UserError where there is no film in out_dir."""
    moments = read_rows(Path(out_dir, 'film.jsonl'))
    if not moments:
        raise UserError(f'{out_dir} has no film: train with --film=True')
    page = Path(__file__).with_name('film.html').read_text(encoding='utf-8')
    data = json.dumps(moments).replace('<', r'\u003c')  # what a model wrote ends no script
    page = page.replace('NAME', html.escape(name)).replace('>DATA<', f'>{data}<')
    write_atomically(path, page)
