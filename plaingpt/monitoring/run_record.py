"""run.json (settings, data, versions) and metrics.jsonl: all that a report or a plot needs.

docs/monitoring.md lists the keys of a row. Losses are in nats per token, averaged over all
micro-batches and processes; unknown values are null.
"""

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from plaingpt.system.errors import warn
from plaingpt.system.files import read_json
from plaingpt.system.formatting import count_of, one_line

RUN_FILES = ('metrics.jsonl', 'anomalies.jsonl', 'film.jsonl', 'run.json', 'report.md', 'loss.png',
             'film.html', 'tensorboard',  # in out_dir, besides checkpoints
             'trained_on.npz')  # of version 1.0

# -----------------------------------------------------------------------------
# rows of metrics.jsonl

# Types of the values that are not numbers.
TYPES = {'sample': str, 'passages': list, 'maps': str, 'maps_shape': list}


def parse_row(line):
    """A line → dict, or None if it is not a row, e.g. cut off by a kill."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line, parse_constant=lambda name: None)  # NaN, Infinity
        return row if isinstance(row, dict) and type(row.get('iter')) is int else None


def is_usable(row):
    """Whether a row of metrics.jsonl or film.jsonl has the required keys and types."""
    required = ('passages',) if 'passages' in row else ('iter', 'tokens', 'elapsed_s')
    if any(row.get(key) is None for key in required):
        return False
    for key, value in row.items():
        if value is None:
            continue
        if not isinstance(value, TYPES.get(key, int | float)):
            return False
        if key not in TYPES and not abs(value) < sys.float_info.max:
            return False
    return True


def read_rows(path, on_damage=warn):
    """The rows of a metrics.jsonl or film.jsonl, in order; [] if there is no file. `on_damage` is
    called with a message if damaged lines were skipped."""
    rows = []
    skipped = 0
    with suppress(FileNotFoundError, NotADirectoryError), open(path, 'rb') as f:
        for line in f:
            row = parse_row(line)
            if row and is_usable(row):
                rows.append(row)
            elif line.strip() and line.endswith(b'\n'):  # else it is still being written
                skipped += 1
    if skipped:
        on_damage(f'{path}: skipped {count_of(skipped, "damaged line")}')
    return rows


def trim_rows(path, last_iter, evaluated=True):
    """Drop the rows after iteration `last_iter` from a file of rows, and an incomplete last line.
    evaluated=False: also drop the evaluation at last_iter, whose rows come last."""
    end = position = 0
    with open(path, 'rb+') as f:
        for line in f:
            position += len(line)
            row = parse_row(line)
            if row:
                is_evaluation = 'loss' not in row and not any('health/' in key for key in row)
                if row['iter'] > last_iter or (
                        row['iter'] == last_iter and is_evaluation and not evaluated):
                    break
            if row or line.endswith(b'\n'):
                end = position
        f.truncate(end)


def trim_logs(out_dir, iter_num, evaluated):
    """Drop the rows after iteration `iter_num` from the logs. evaluated: whether its evaluation is
    in the checkpoint; if not, it is evaluated and logged again"""
    for name in RUN_FILES:
        path = Path(out_dir, name)
        if path.suffix == '.jsonl' and path.exists():
            trim_rows(path, iter_num, evaluated)


def rows_with(rows, *keys):
    """The rows in which no value of these keys is missing or null."""
    return [row for row in rows if all(row.get(key) is not None for key in keys)]


def column(rows, key):
    """All non-null values of `key`."""
    return [row[key] for row in rows_with(rows, key)]


# -----------------------------------------------------------------------------
# run.json


def describe_run(run):
    """The contents of run.json for a train.Run."""
    import torch  # here, so that plot.py starts without it

    from plaingpt.system.devices import machine_name
    from plaingpt.system.distributed import launched_world
    config, dataset = run.config, run.dataset
    if run.start.resumed:
        from_scratch = read_run(config.out_dir).get('from_scratch', True)
    else:
        from_scratch = config.init_from in ('scratch', 'auto')
    return {
        'config': asdict(config), 'changed': changed_settings(config),
        'data': {'folder': str(dataset.folder), 'source': dataset.meta.get('source', {})},
        'vocab_size': dataset.vocab_size, 'train_tokens': run.train_data.epoch_tokens(),
        'val_bytes_per_token': dataset.bytes_per_token('val'),
        'from_scratch': from_scratch,
        'machine': {'device': machine_name(run.step.device), 'processes': launched_world().size},
        'dtype': run.step.dtype, 'compile': run.step.compile,
        'versions': {'torch': torch.__version__},
        'command': ' '.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def changed_settings(config):
    """The resolved() settings of a TrainConfig that differ from the defaults."""
    defaults = type(config)().resolved()
    return {key: value for key, value in config.resolved().items() if value != defaults[key]}


# Types of the values that reports and plot.py read from run.json and its settings.
RUN_TYPES = {'from_scratch': bool, 'train_tokens': int, 'warmup_iters': int, 'dataset': str,
             'dtype': str, 'ending': str, 'val_bytes_per_token': int | float | None}


def read_run(out_dir, on_damage=warn, required=frozenset()):
    """The run.json of a folder, or {} if there is none. If it is damaged or lacks `required` keys,
    `on_damage` is called with a message, and the result is {}."""
    path = Path(out_dir, 'run.json')
    try:
        run = read_json(path)
        values = run['config'] | run
        bad_keys = [key for key in required | (RUN_TYPES.keys() & values.keys())
                    if not isinstance(values[key], RUN_TYPES[key])]
        if 'end' in run and not is_usable(run['end']):
            bad_keys.append('end')
        if bad_keys:
            raise TypeError(', '.join(bad_keys))
        return run
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as e:  # whatever the file contains
        on_damage(f'{path} is damaged: {type(e).__name__}: {one_line(e)}')
    return {}
