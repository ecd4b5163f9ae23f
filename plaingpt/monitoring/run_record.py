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

from plaingpt.system.errors import warn
from plaingpt.system.files import read_json
from plaingpt.system.formatting import count_of, one_line

TRAINED_ON = 'trained_on.npz'  # sketches of the texts that the weights were trained on
RUN_FILES = ('metrics.jsonl', 'anomalies.jsonl', 'film.jsonl', 'run.json', 'report.md', 'loss.png',
             'film.html', 'tensorboard', TRAINED_ON)  # in out_dir, besides checkpoints

# -----------------------------------------------------------------------------
# rows of metrics.jsonl

KINDS = {'sample': str, 'passages': list, 'maps': str, 'maps_shape': list}  # others are numbers


def finite(x):
    """x, or None where x is None or not finite: JSON has no NaN and no infinity."""
    return x if x is not None and math.isfinite(x) else None


def parse_row(line):
    """A line → dict; None for what is not a row, such as half a line that a kill left."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line, parse_constant=lambda name: None)  # NaN, Infinity
        return row if isinstance(row, dict) and type(row.get('iter')) is int else None


def is_usable(row):
    """Whether a row of metrics.jsonl or film.jsonl has what each has, and each value its kind."""
    always = ('passages',) if 'passages' in row else ('iter', 'tokens', 'elapsed_s')
    return all(row.get(key) is not None for key in always) and all(
        value is None or (isinstance(value, KINDS[key]) if key in KINDS
                          else isinstance(value, int | float) and abs(value) < sys.float_info.max)
        for key, value in row.items())


def read_rows(path, tell=warn):
    """The rows of a metrics.jsonl or film.jsonl, in order; [] where there is no file. `tell` is
    called with how many lines were skipped since they are damaged."""
    rows, skipped = [], 0
    with suppress(FileNotFoundError, NotADirectoryError), open(path, 'rb') as f:
        for line in f:
            if (row := parse_row(line)) and is_usable(row):
                rows.append(row)
            elif line.strip() and line.endswith(b'\n'):  # or it is being written
                skipped += 1
    if skipped:
        tell(f'{path}: skipped {count_of(skipped, "damaged line")}')
    return rows


def trim_rows(path, last_iter, evaluated=True):
    """Drop the rows after iteration `last_iter` from a file of rows, and half a line at its end.
    evaluated=False: also those of the evaluation at last_iter, which come last there."""
    kept = position = 0
    with open(path, 'rb+') as f:
        for line in f:
            position += len(line)
            if row := parse_row(line):
                is_evaluation = 'loss' not in row and not any('health/' in key for key in row)
                if row['iter'] + (is_evaluation and not evaluated) > last_iter:
                    break
            if row or line.endswith(b'\n'):
                kept = position
        f.truncate(kept)


def trim_logs(out_dir, iter_num, evaluated):
    """Drop the rows after iteration `iter_num` from the logs. evaluated: whether its evaluation is
    in the checkpoint; if not, it is evaluated and logged again"""
    for name in RUN_FILES:
        path = Path(out_dir, name)
        if path.suffix == '.jsonl' and path.exists():
            trim_rows(path, iter_num, evaluated)


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
        'data': {'folder': str(dataset.folder), 'source': dataset.meta.get('source', {})},
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


# What a report and plot.py read of run.json and its settings
FACTS = {'from_scratch': bool, 'train_tokens': int, 'warmup_iters': int, 'dataset': str,
         'dtype': str, 'ending': str, 'val_bytes_per_token': int | float | None}


def read_run(out_dir, tell=warn, needed=frozenset()):
    """run.json of a folder; {} where there is none. If it is damaged, or lacks some of FACTS that
    are needed, it counts as none, and `tell` is called."""
    path = Path(out_dir, 'run.json')
    try:
        run = read_json(path)
        facts = run['config'] | run
        wrong = [key for key in needed | (FACTS.keys() & facts.keys())
                 if not isinstance(facts[key], FACTS[key])]
        if wrong or ('end' in run and not is_usable(run['end'])):
            raise TypeError(', '.join(wrong) or 'end')
        return run
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as e:  # whatever it holds
        tell(f'{path} is damaged: {type(e).__name__}: {one_line(e)}')
    return {}
