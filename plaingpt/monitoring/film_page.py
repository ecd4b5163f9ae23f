"""What training/film.py wrote of runs → one page that a browser shows without any network."""

import base64
import gzip
import json
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from plaingpt.monitoring.metrics_file import parse_iteration, rows_with
from plaingpt.system.errors import UserError
from plaingpt.system.files import check_keys, is_number, open_regular, write_atomically

INSTANT = {'seconds': is_number, 'passages': bool, 'lens': bool}


def read_instants(path):
    """The rows of a film.jsonl, in order; [] where there is no file. What is no row is left out, as
    half of a line that a kill cut."""
    rows = []
    with suppress(FileNotFoundError), open_regular(path) as f:
        for line in f:
            with suppress(ValueError):
                row = parse_iteration(line)
                check_keys(row, INSTANT)
                rows.append(row)
    return rows


def write_page(runs, path):
    """runs: [(name, out_dir, rows of its metrics.jsonl)]. Raises UserError where one has no film,
    OSError where the page cannot be written."""
    found, maps = [], bytearray()
    for name, out_dir, rows in runs:
        instants = read_instants(Path(out_dir, 'film.jsonl'))
        if not instants:
            raise UserError(f'{out_dir} has no film: train it with --film=True')
        for row in instants:
            row['maps'] = append_maps(maps, Path(out_dir, 'film', f'iter-{row["iter"]:08d}'))
        curves = {kind: [(row['iter'], row[key]) for row in rows_with(rows, key)]
                  for kind, key in (('train', 'loss'), ('val', 'val_loss'))}
        found.append({'name': name, 'instants': instants, **curves})
    text = json.dumps(found).encode()
    data = gzip.compress(struct.pack('<I', len(text)) + text + maps)
    page = Path(__file__).with_name('film.html').read_text(encoding='utf-8')
    write_atomically(path, page.replace('DATA', base64.b64encode(data).decode()))


def append_maps(maps, path):
    """Add the lower triangles of an instant's attention (L, H, T, T) to the bytes `maps` → where
    they begin, L, H and T; None where there is no such file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file
    try:
        attention = load_file(path.with_suffix('.safetensors'))['attention']
    except (OSError, SafetensorError, KeyError):
        return None
    begin, (L, H, T, _) = len(maps), attention.shape
    maps += attention[:, :, *np.tril_indices(T)].tobytes()
    return begin, L, H, T
