"""What training/film.py wrote of runs → one page that a browser shows without any network."""

import base64
import gzip
import json
import struct
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from plaingpt.monitoring.metrics_file import parse_iteration, rows_with
from plaingpt.system.errors import UserError
from plaingpt.system.files import write_atomically


def read_instants(out_dir):
    """The rows of film.jsonl, in order; [] where there is no file. What is no row is left out, as
    half of a line that a kill cut."""
    rows = []
    with suppress(FileNotFoundError), open(Path(out_dir, 'film.jsonl'), 'rb') as f:
        for line in f:
            with suppress(ValueError):
                rows.append(parse_iteration(line))
    return rows_with(rows, 'seconds', 'passages', 'lens', 'norms')


def write_page(runs, path):
    """runs: [(name, out_dir, rows of its metrics.jsonl)]. Raises UserError where one has no film,
    OSError where the page cannot be written."""
    found, maps = [], bytearray()
    for name, out_dir, rows in runs:
        instants = read_instants(out_dir)
        if not instants:
            raise UserError(f'{out_dir} has no film: train with --film=True')
        for row in instants:
            with suppress(OSError, SafetensorError, KeyError):
                attention = load_file(Path(out_dir, f'film/iter-{row["iter"]:08d}.safetensors'))[
                    'attention']  # (L, H, T, T)
                row['maps'] = len(maps), *attention.shape[:3]
                maps += attention.tobytes()
        curves = {kind: [(row['iter'], row[key]) for row in rows_with(rows, key)]
                  for kind, key in (('train', 'loss'), ('val', 'val_loss'))}
        found.append({'name': name, 'instants': instants, **curves})
    text = json.dumps(found).encode()
    data = base64.b64encode(gzip.compress(struct.pack('<I', len(text)) + text + maps))
    page = Path(__file__).with_name('film.html').read_text(encoding='utf-8')
    write_atomically(path, page.replace('DATA', data.decode()))
