"""run.json, the facts of a run, and metrics.jsonl, its numbers: all that a report or a plot needs.

docs/monitoring.md has the keys of a row. Losses are means in nats per token over all micro-steps
and processes; unknown values are null.
"""

import json
import math
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from plaingpt.system.files import read_json

# -----------------------------------------------------------------------------
# rows of metrics.jsonl


def finite(x):
    """x, or None where x is None or not finite: JSON has no NaN and no infinity."""
    return x if x is not None and math.isfinite(x) else None


def parse_row(line):
    """A line → dict; None for what is no row, such as half a line that a kill left."""
    with suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) and 'iter' in row else None


def read_rows(path):
    """The rows of a metrics.jsonl or film.jsonl, in order; [] where there is no file."""
    with suppress(FileNotFoundError), open(path, 'rb') as f:
        return list(filter(None, map(parse_row, f)))
    return []


def trim_rows(path, last_iter, evaluated=True):
    """Drop the rows after iteration `last_iter` from a file of rows, and what is no row at its end.
    evaluated=False: also those of the evaluation at last_iter, which come last there."""
    kept = position = 0
    with open(path, 'rb+') as f:
        for line in f:
            position += len(line)
            if row := parse_row(line):
                is_evaluation = 'loss' not in row and not any('health/' in key for key in row)
                if row['iter'] + (is_evaluation and not evaluated) > last_iter:
                    break
                kept = position
        f.truncate(kept)


def rows_with(rows, *keys):
    """The rows with a non-null value of each key."""
    return [row for row in rows if all(row.get(key) is not None for key in keys)]


def column(rows, key):
    """All non-null values of `key`."""
    return [row[key] for row in rows_with(rows, key)]


# -----------------------------------------------------------------------------
# run.json


def describe_run(config, dataset, loader, device, dtype, compile, world, resumed):
    """The facts of a run, as run.json keeps them. loader: of its training tokens"""
    import torch  # here, so that plot.py starts without it

    from plaingpt.system.devices import machine_name
    from_scratch = read_run(config.out_dir).get('from_scratch', True) if resumed \
        else config.init_from in ('scratch', 'auto')
    return {
        'config': asdict(config), 'changed': changed_settings(config),
        'data': {'folder': str(dataset.folder),
                 **{key: dataset.meta[key] for key in ('corpus', 'source') if key in dataset.meta}},
        'vocab_size': dataset.vocab_size, 'train_tokens': loader.epoch_tokens(),
        'val_bytes_per_token': dataset.bytes_per_token('val'),
        'from_scratch': from_scratch,
        'machine': {'device': machine_name(device), 'processes': world.size},
        'dtype': dtype, 'compile': compile, 'versions': {'torch': torch.__version__},
        'command': ' '.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def changed_settings(config):
    """{key: value} of a dataclass where it is not the default."""
    defaults = asdict(type(config)())
    return {key: value for key, value in asdict(config).items() if value != defaults[key]}


def read_run(out_dir):
    """run.json of a folder, with the settings of an earlier version as this one has them; {} where
    there is none."""
    try:
        run = read_json(Path(out_dir, 'run.json'))
    except (OSError, ValueError):
        return {}
    from plaingpt.system.removed import as_today
    config = as_today(run['config'])
    return {**run, 'config': config, 'changed': {
        key: value for key, value in config.items()
        if key in run['changed'] or key not in run['config']}}
