"""How long a checkpoint stops training."""

import tempfile
import time
from contextlib import closing

from plaingpt.benchmarks.result_tables import markdown
from plaingpt.benchmarks.step_speed import make_step, random_batches
from plaingpt.benchmarks.timing import step_seconds
from plaingpt.system.devices import rng_state
from plaingpt.system.files import make_writable
from plaingpt.training.checkpoint import checkpoint_paths, open_checkpoint
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
