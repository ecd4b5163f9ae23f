"""run.json: the facts of a run, written down when it starts, and how it ended.

run.json and metrics.jsonl are all that a report, a diagnosis and a comparison need.
"""

import math
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import numpy as np

from plaingpt.monitoring.metrics_file import rows_with
from plaingpt.system.files import ROOT, read_json, write_json
from plaingpt.system.formatting import duration, setting
from plaingpt.system.removed import as_today
from plaingpt.system.streams import warn

UNIGRAM_TOKENS = 2**20  # that the entropy of single tokens is computed from

# What every run.json has. One without these is not from train.py, or from a version too old to be
# diagnosed. Later versions have more.
KEYS = {'config', 'changed', 'data', 'vocab_size', 'train_tokens', 'unigram_loss', 'parameters',
        'from_scratch', 'code', 'machine', 'dtype', 'compile', 'versions', 'command', 'started'}


def describe_run(config, dataset, loader, model, device, dtype, compile, world, resumed):
    """The facts of a run, as run.json keeps them. loader: of its training tokens; resumed: whether
    it continues from a checkpoint."""
    import torch  # here, so that plot.py starts without it

    from plaingpt.system.devices import cpu_name, device_name
    from plaingpt.system.distributed import print0
    before = read_run(config.out_dir) if resumed else {}
    from_scratch = before.get('from_scratch', True) if resumed \
        else config.init_from in ('scratch', 'auto')
    text = {'vocab_size': dataset.vocab_size, 'train_tokens': loader.epoch_tokens(),
            'unigram_loss': unigram_loss(dataset.mean(
                token_frequencies(part.stream, dataset.vocab_size) for part in loader.parts))}
    bits = {'threads': torch.get_num_threads(),  # on which the last bits of a CPU's results depend
            'instructions': torch.backends.cpu.get_cpu_capability()}
    for key, value in bits.items() if device.type == 'cpu' else ():
        if (old := before.get('machine', {}).get(key, value)) != value:
            print0(f'  changed: {key} {old} → {value}: the same numbers, but for their last bits')
    return {
        'config': asdict(config), 'changed': changed_settings(config),
        'data': {'folder': str(dataset.folder),
                 **{key: dataset.meta[key] for key in ('corpus', 'source') if key in dataset.meta},
                 'tokenizer': dataset.tokenizer_json()['kind'],
                 'corpora': [{'name': part.name, 'folder': str(part.dataset.folder),
                              'weight': part.weight, 'train_tokens': len(each.stream)}
                             for part, each in zip(dataset.parts, loader.parts, strict=True)
                             if part.name]},
        **text, 'changed_data': changed_facts(before, text) or before.get('changed_data'),
        'train_bytes_per_token': dataset.bytes_per_token('train'),
        'val_bytes_per_token': dataset.bytes_per_token('val'),
        'val_in_train': dataset.split_entry('val').get('in_train'),
        'parameters': model.num_parameters(), 'from_scratch': from_scratch,
        'code': code_version(),
        'machine': {'device': device_name(device), 'cpu': cpu_name(), 'cores': os.cpu_count(),
                    'processes': world.size, 'system': platform.platform(), **bits},
        'dtype': dtype, 'compile': compile,
        'versions': {'python': platform.python_version(), 'torch': torch.__version__,
                     'numpy': np.__version__},
        'command': ' '.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        'started': time.strftime('%Y-%m-%d %H:%M:%S %z'),
    }


def changed_settings(config):
    """{key: value} of a dataclass where it is not the default."""
    defaults = asdict(type(config)())
    return {key: value for key, value in asdict(config).items() if value != defaults[key]}


def changed_facts(before, now):
    """'train_tokens 1000 → 2000' of the facts that were others before, or ''."""
    return ', '.join(f'{key} {setting(before[key])} → {setting(value)}'
                     for key, value in now.items()
                     if not math.isclose(before.get(key, value), value))


def token_frequencies(stream, vocab_size):
    """The share of each id among the tokens of a stream that are in the loss, or of many places."""
    starts = np.linspace(0, max(0, len(stream) - 1024), UNIGRAM_TOKENS // 1024).astype(np.int64)
    length = min(1024, len(stream))
    tokens = stream.sequences(starts, length).ravel()
    if stream.loss_mask is not None:
        tokens = tokens[stream.loss_mask.sequences(starts, length).ravel() == 1]
    counts = np.bincount(tokens, minlength=vocab_size)
    return counts / max(1, counts.sum())


def unigram_loss(shares):
    """Entropy of single tokens in nats: the loss of a model that knows their frequencies only."""
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


def code_version():
    """The commit of a clone's scripts, with -dirty where they were changed; of an installed wheel
    the version; or None."""
    if not (ROOT / '.git').exists():  # the wheel may lie in the folder of another repository
        with suppress(metadata.PackageNotFoundError):
            return metadata.version('plaingpt')
        return None
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(['git', 'describe', '--always', '--dirty', '--abbrev=12'], text=True,
                              cwd=ROOT, capture_output=True, timeout=10)
        return done.stdout.strip() or None
    return None


def write_run(out_dir, run):
    """Write run.json. A disk that refuses gets a warning, and stops no training."""
    try:
        write_json(Path(out_dir, 'run.json'), run)
    except OSError as e:
        warn(f'{out_dir}/run.json stays as it was: {e.strerror}')


def read_run(out_dir):
    """run.json of a folder, or {} where there is none of ours."""
    try:
        return check_run(read_json(Path(out_dir, 'run.json')))
    except (OSError, ValueError):
        return {}


def epochs(run, tokens):
    """How often a run has read its corpus after so many tokens, of a mixture each of them →
    {name: epochs}"""
    corpora = run.get('data', {}).get('corpora') or [
        {'name': '', 'weight': 1, 'train_tokens': run['train_tokens']}]
    return {corpus['name']: tokens * corpus['weight'] / corpus['train_tokens']
            for corpus in corpora}


def where_it_stands(rows, run):
    """{'iter', 'tokens', 'elapsed_s'} of the last known update: where the run ended, or the last
    row of a run that trains or was killed."""
    return max(rows[-1], run.get('end', rows[-1]), key=lambda place: place['iter'])


def run_summary(name, rows, run):
    """'out: iteration 2000, 1,536,000 tokens, 1m44s; validation 1.8997 at best, at iteration 2000;
    all iterations are done'."""
    last = where_it_stands(rows, run)
    line = f'{name}: iteration {last["iter"]}, {last["tokens"]:,} tokens, ' \
           f'{duration(last["elapsed_s"])}'
    if evaluations := rows_with(rows, 'val_loss'):
        best = min(evaluations, key=lambda row: row['val_loss'])
        line += f'; validation {best["val_loss"]:.4f} at best, at iteration {best["iter"]}'
    return f'{line}; {run["ending"]}' if run.get('ending') else line


def check_run(run):
    """The content of a run.json → the same, with the settings of an earlier version as this one has
    them. Raises ValueError."""
    if not isinstance(run, dict) or KEYS - run.keys():
        raise ValueError('these are no facts of a run')
    config = as_today(run['config'])
    changed = {key: config[key] for key in config
               if key in run['changed'] or key not in run['config']}
    return {**run, 'config': config, 'changed': changed}
