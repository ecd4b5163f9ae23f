"""What checkpoints cost: how long a save stops training, and how far a run that was stopped and
resumed ends from one that was not."""

import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from plaingpt.benchmarks.grid import train_in
from plaingpt.benchmarks.result_tables import markdown
from plaingpt.benchmarks.step_speed import make_step, random_batches
from plaingpt.benchmarks.timing import step_seconds
from plaingpt.system.devices import rng_state
from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable
from plaingpt.training.checkpoint import checkpoint_paths, find, open_checkpoint
from plaingpt.training.checkpoint_writer import Saver


def measure_checkpoints(work):
    """Save once while training waits and once in the background → (a row for each, their table)."""
    config = work.config
    with closing(random_batches(work)) as batches:
        gpt, optimizer, step = make_step(work, batches)
        [step_s] = step_seconds(step, 1, 1, work.device)
    make_writable(config.out_dir)
    rows = [{'checkpoint_async': background, 'step_s': step_s,
             **time_save(gpt, optimizer, background, config, work.device)}
            for background in (False, True)]
    for row in rows:
        row['share'] = row['stall_s'] / (config.checkpoint_interval * step_s + row['stall_s'])
    what = f'{gpt.num_parameters():,} parameters, {step_s:.2f} s a step of ' \
           f'{config.step_tokens():,} tokens, a save every {config.checkpoint_interval:,} steps'
    return rows, f'{what}\n\n' + markdown(
        ['checkpoint_async', 'training stops for', 'share of the time', 'written after', 'size',
         'files'],
        [[str(row['checkpoint_async']), f'{row["stall_s"]:.2f} s', f'{row["share"]:.3%}',
          f'{row["written_s"]:.2f} s', f'{row["bytes"] / 1e9:.2f} GB', str(row['files'])]
         for row in rows])


def time_save(gpt, optimizer, background, config, device):
    """Save into a folder inside out_dir, which is removed again → its figures."""
    with tempfile.TemporaryDirectory(dir=config.out_dir) as folder:
        chars = ''.join(map(chr, range(gpt.config.vocab_size)))  # some vocabulary of its size
        state = {'iter_num': 1, 'sequences': 0, 'evaluated': False, 'best_val_loss': None,
                 'evals_since_best': 0, 'config': {}, 'data': [], 'scaler': {},
                 'tokenizer': {'kind': 'char', 'chars': chars}}
        saver = Saver(folder, chunk_mb=config.checkpoint_chunk_mb, background=background)
        began = time.perf_counter()
        saver.save(gpt, optimizer, state, rng_state(device))
        stall_s = time.perf_counter() - began
        saver.wait()
        written_s = time.perf_counter() - began
        chunks = open_checkpoint(checkpoint_paths(folder)[0]).state['chunks']
    return {'stall_s': stall_s, 'written_s': written_s, 'files': len(chunks),
            'bytes': sum(chunk['bytes'] for chunk in chunks)}


# -----------------------------------------------------------------------------
# resuming


def measure_resuming(work):
    """Train to max_iters twice, and once with a stop half-way → (a row for each pair, their table).
    Each is a run of train.py. On a CPU all end with the same bits. On a GPU some sums are made in
    any order, so two whole runs differ too: what resuming adds is seen beside their difference."""
    config = replace(work.config, compile=work.compile, init_from='scratch')
    if config.max_iters < 2:
        raise UserError(f'max_iters={config.max_iters}: a run takes two steps to be resumed')
    with tempfile.TemporaryDirectory() as folder:
        whole, again, stopped = (Path(folder, name) for name in ('whole', 'again', 'stopped'))
        lines = train_in(whole, config)
        train_in(again, config)
        train_in(stopped, replace(config, max_iters=config.max_iters // 2))
        train_in(stopped, replace(config, init_from='resume'))
        rows = [{'runs': name, 'compile': work.compile, 'dtype': work.dtype,
                 'iters': config.max_iters, **differences(whole, other)}
                for name, other in (('both whole', again), ('one of them resumed', stopped))]
    loss = [line['val_loss'] for line in lines if 'val_loss' in line][-1]
    what = f'{config.max_iters} steps, {work.dtype}, ' \
           f'{"compiled" if work.compile else "eager"}; the first run ends at a validation loss ' \
           f'of {loss:.4f}'
    return rows, f'{what}\n\n' + markdown(
        ['last weights of two runs', 'largest difference', 'weights that differ', 'largest weight'],
        [[row['runs'], f'{row["largest_difference"]:.3g}', f'{row["differing"]:.2%}',
          f'{row["largest_weight"]:.3g}'] for row in rows])


def differences(one, other):
    """Compare the last weights of two runs, given their folders → dict."""
    first, second = (find(folder).load_model().state_dict() for folder in (one, other))
    apart = {name: (weight - second[name]).abs() for name, weight in first.items()}
    return {'largest_difference': max(x.max().item() for x in apart.values()),
            'differing': sum((x > 0).sum().item() for x in apart.values())
            / sum(x.numel() for x in apart.values()),
            'largest_weight': max(weight.abs().max().item() for weight in first.values())}
