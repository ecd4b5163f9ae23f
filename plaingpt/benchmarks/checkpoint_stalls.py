"""How long training stands still for a checkpoint."""

import tempfile
import time
from pathlib import Path

from plaingpt.system.devices import rng_state
from plaingpt.training.checkpoint import checkpoint_paths, open_checkpoint
from plaingpt.training.checkpoint_writer import Saver
from plaingpt.training.memory_trace import one_step


def timed_step(shape, step, device):
    """→ (seconds of a step, model, optimizer)."""
    times = []
    for _, gpt, optimizer in one_step(shape, step, device):
        times.append(time.perf_counter())
    _, began, _, ended = times
    return (ended - began) * step.micro_steps, gpt, optimizer


def measure_checkpoints(shape, step, config, device):
    """Print how long a save stops training, and which share that is of the time between saves."""
    timed_step(shape, step, device)  # warms up
    step_s, gpt, optimizer = timed_step(shape, step, device)
    print(f'{gpt.num_parameters():,} parameters, {device}: {step_s:.2f} s a step of '
          f'{step.batch_size * step.micro_steps} sequences, a save every '
          f'{config.checkpoint_interval} steps')
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
    for background in (False, True):
        with tempfile.TemporaryDirectory(dir=config.out_dir) as folder:
            saver = Saver(folder, chunk_mb=config.checkpoint_chunk_mb, background=background)
            began = time.perf_counter()
            saver.save(gpt, optimizer, {'iter_num': 1}, rng_state(device))
            stall_s = time.perf_counter() - began
            saver.wait()
            written_s = time.perf_counter() - began
            chunks = open_checkpoint(checkpoint_paths(folder)[0]).state['chunks']
        size = sum(chunk['bytes'] for chunk in chunks)
        share = stall_s / (config.checkpoint_interval * step_s + stall_s)
        print(f'checkpoint_async={background!s:<6} stands still {stall_s:.2f} s ({share:.3%} of '
              f'the time), written after {written_s:.2f} s: {size / 1e9:.2f} GB in {len(chunks)} '
              'files')
