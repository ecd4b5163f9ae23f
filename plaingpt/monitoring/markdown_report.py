"""What a run is, written down when it starts (run.json), and what came of it (report.md).

run.json and metrics.jsonl are all that a report needs: run_report.write makes it of any out_dir.
"""

import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from plaingpt.monitoring.diagnosis import diagnose, overfit_check
from plaingpt.monitoring.metrics import read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.formatting import duration, short
from plaingpt.system.hardware import cpu_name

SAMPLES = 5  # that a report shows, evenly spread over the run
UNIGRAM_TOKENS = 2**20  # that the entropy of single tokens is taken of

# Without these a run.json is none of ours, or of a version too old to be diagnosed.
FACTS = {'config', 'changed', 'data', 'vocab_size', 'train_tokens', 'unigram_loss', 'parameters',
         'from_scratch', 'code', 'machine', 'dtype', 'compile', 'versions', 'command', 'started'}
SETTINGS = {'decay_lr', 'grad_clip', 'max_iters', 'n_embd', 'overfit_batches', 'warmup_iters',
            'weight_decay'}
MACHINE = {'device', 'cpu', 'cores', 'processes', 'system'}


# -----------------------------------------------------------------------------
# the facts


def describe(config, dataset, stream, model, device_name, dtype, compile, world, resumed):
    """The facts of a run, as run.json keeps them. stream: its training tokens."""
    import torch
    origin = {key: value for key, value in dataset.meta.items() if key in ('corpus', 'source')}
    scratch = config.init_from in ('scratch', 'auto')
    if resumed:
        scratch = read_run(config.out_dir).get('from_scratch', True)
    return {
        'config': asdict(config),
        'changed': {f.name: getattr(config, f.name) for f in fields(config)
                    if getattr(config, f.name) != f.default},
        'data': {'folder': str(dataset.folder), **origin,
                 'tokenizer': dataset.tokenizer_json()['kind']},
        'vocab_size': dataset.vocab_size, 'train_tokens': len(stream),
        'unigram_loss': unigram_loss(stream),
        'parameters': model.num_parameters(), 'from_scratch': scratch,
        'code': code_version(),
        'machine': {'device': device_name, 'cpu': cpu_name(), 'cores': os.cpu_count(),
                    'processes': world.size, 'system': platform.platform()},
        'dtype': dtype, 'compile': compile,
        'versions': {'python': platform.python_version(), 'torch': torch.__version__,
                     'numpy': np.__version__},
        'command': ' '.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        'started': time.strftime('%Y-%m-%d %H:%M:%S %z'),
    }


def unigram_loss(stream):
    """Entropy of single tokens in nats: the loss of knowing how frequent each is, and no more."""
    starts = np.linspace(0, max(0, len(stream) - 1024), UNIGRAM_TOKENS // 1024).astype(np.int64)
    counts = np.bincount(stream.sequences(starts, min(1024, len(stream))).ravel())
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def code_version():
    """The commit that the scripts are of, with -dirty where they were changed, or None."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(['git', 'describe', '--always', '--dirty', '--abbrev=12'], text=True,
                              cwd=ROOT, capture_output=True, timeout=10)
        return done.stdout.strip() or None
    return None


def write_run(out_dir, run):
    """Write run.json. A disk that refuses stops no training."""
    with suppress(OSError):
        Path(out_dir, 'run.json').write_text(json.dumps(run, indent=1), encoding='utf-8')


def read_run(out_dir):
    """run.json of a folder, or {} where there is none of ours."""
    try:
        run = json.loads(Path(out_dir, 'run.json').read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError):
        return {}
    return run if is_run(run) else {}


def is_run(value):
    """True when a value holds all that a report, a diagnosis and a comparison read."""
    return isinstance(value, dict) and value.keys() >= FACTS \
        and all(isinstance(value[key], dict) for key in ('config', 'data', 'machine', 'versions')) \
        and value['config'].keys() >= SETTINGS and value['machine'].keys() >= MACHINE \
        and isinstance(value['data'].get('source', {}), dict)


# -----------------------------------------------------------------------------
# the report


def write(out_dir, say, ended=True):
    """Write out_dir/loss.png and report.md. What cannot be drawn is said in a line.

    ended: the run will not go on
    """
    out_dir = Path(out_dir)
    rows, run = read_rows(out_dir / 'metrics.jsonl', warn=say), read_run(out_dir)
    if not rows or not run:
        return
    try:
        from plaingpt.monitoring.figures import draw
        draw([(out_dir.name, rows)], out_dir / 'loss.png')
    except (UserError, OSError) as problem:
        say(f'no loss.png: {problem}')
    if verdict := overfit_check(rows, run):
        say(verdict)
    try:
        (out_dir / 'report.md').write_text(text_of(out_dir, rows, run, ended),
                                           encoding='utf-8')
    except OSError as e:
        say(f'no report.md: {e.strerror}')
        return
    say(f'{out_dir}/report.md says what the run was and what came of it')


def text_of(out_dir, rows, run, ended):
    """report.md of a run's rows and facts."""
    found = diagnose(rows, run, ended)
    parts = [f'# {out_dir.name}', outcome(rows, run),
             '## Diagnosis', '\n'.join(f'- {each}' for each in found) or 'Nothing looks wrong.']
    if verdict := overfit_check(rows, run):
        parts.append(verdict)
    if (out_dir / 'loss.png').exists():
        parts += ['## Curves', '![loss](loss.png)']
    parts += ['## What was run', f'```\n{run["command"]}\n```', facts(run)]
    if run['changed']:
        lines = '\n'.join(f'{key} = {value!r}' for key, value in sorted(run['changed'].items()))
        parts += ['Settings that are not the defaults:', f'```python\n{lines}\n```']
    samples = [row for row in rows if row.get('sample')]
    if samples:
        parts.append('## What it wrote')
        chosen = {round(i * (len(samples) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)}
        for row in (samples[i] for i in sorted(chosen)):
            parts += [f'After {row["iter"]:,} iterations:', fenced(row['sample'])]
    return '\n\n'.join(parts) + '\n'


def fenced(text):
    """A text as a code block, whatever fences it contains."""
    fence = '```'
    while fence in text:
        fence += '`'
    return f'{fence}\n{text}\n{fence}'


def outcome(rows, run):
    """What came out, as a table."""
    steps = [row for row in rows if row.get('loss') is not None]
    evaluations = [row for row in rows if row.get('val_loss') is not None]
    last = rows[-1]
    table = [('ended', run['ending'])] if run.get('ending') else []
    if evaluations:
        best = min(evaluations, key=lambda row: row['val_loss'])
        for name, row in (('best', best), ('last', evaluations[-1])):
            bits = f', {row["val_bpb"]:.3f} bits a byte' if row.get('val_bpb') else ''
            table += [(f'validation loss, {name}',
                       f'{row["val_loss"]:.4f}{bits}, iteration {row["iter"]:,}')]
        if evaluations[-1].get('train_loss') is not None:
            table += [('training loss, last', f'{evaluations[-1]["train_loss"]:.4f}')]
    table += [('iterations', f'{last["iter"]:,}'),
              ('tokens', f'{last["tokens"]:,}, {last["tokens"] / run["train_tokens"]:.3g} epochs, '
                         f'{last["tokens"] / run["parameters"]:.3g} a parameter'),
              ('time', duration(last['elapsed_s']))]
    speeds = sorted(row['tokens_per_s'] for row in steps if row.get('tokens_per_s'))
    if speeds:
        mfus = sorted(row['mfu'] for row in steps if row.get('mfu'))
        mfu = f', MFU {mfus[len(mfus) // 2]:.1%}' if mfus else ''
        table += [('speed, median', f'{short(speeds[len(speeds) // 2])} tokens/s{mfu}')]
    peaks = [row['peak_memory_bytes'] for row in steps if row.get('peak_memory_bytes')]
    if peaks:
        table += [('memory, most', f'{max(peaks) / 2**20:,.0f} MiB')]
    return '\n'.join(['| | |', '|---|---|', *(f'| {name} | {value} |' for name, value in table)])


def facts(run):
    """Data, model, code and machine, a line each."""
    data, machine = run['data'], run['machine']
    device = machine['device'] if machine['device'] != 'cpu' else machine['cpu']
    return '\n'.join([
        f'- data: {data["folder"]}, {run["train_tokens"]:,} training tokens ({data["tokenizer"]}, '
        f'vocabulary {run["vocab_size"]:,})',
        f'- model: {run["parameters"]:,} parameters',
        f'- code: {run["code"] or "unknown"}',
        f'- machine: {device}, {machine["cores"]} cores, {machine["processes"]} process(es), '
        f'{run["dtype"]}, compile {run["compile"]}, {machine["system"]}',
        '- versions: ' + ', '.join(f'{name} {version}'
                                   for name, version in run['versions'].items()),
        f'- started: {run["started"]}'])
