"""How long training stands still for a checkpoint."""

import tempfile
import time
from pathlib import Path

from plaingpt.system.devices import rng_state
from plaingpt.training.checkpoint import checkpoint_paths, open_checkpoint
from plaingpt.training.checkpoint_writer import Saver
from plaingpt.training.memory_planner import one_step


def measure_checkpoints(model, run, config, device):
    """Print how long a save stops training, and which share that is of the time between saves."""
    stages = [(time.perf_counter(), gpt, optimizer)
              for _, gpt, optimizer in one_step(model, run, device)]
    ended, gpt, optimizer = stages[-1]
    step_s = ended - stages[run.micro_steps + 1][0]  # the second: the first makes the states
    print(f'{gpt.num_parameters():,} parameters, {device}: {step_s:.2f} s a step of '
          f'{run.batch_size * run.micro_steps} sequences, a save every '
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
