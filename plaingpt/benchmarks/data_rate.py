"""Batches a second of each way to read, beside what a training step takes."""

from itertools import count

import numpy as np
import torch

from plaingpt.benchmarks import ladder
from plaingpt.benchmarks import step_speed as speed
from plaingpt.benchmarks.result_tables import markdown
from plaingpt.benchmarks.timing import spread, step_seconds
from plaingpt.corpus.batches import BatchLoader
from plaingpt.corpus.dataset import dataset_folder, open_dataset
from plaingpt.system.formatting import short


def measure_data(config, shape, dtype, compile, device, batches=200):
    """→ (rows, their table): batches a second of each way to read, beside what a step takes."""
    dataset = open_dataset(dataset_folder(config.dataset))
    row, _ = speed.measure(config, shape, dtype, compile, device, steps=config.steps,
                           warmup=config.warmup_steps)
    need = config.accumulation() / row['step_ms'] * 1e3
    disk, ram = (BatchLoader(dataset.split('train', in_ram), config.block_size, config.batch_size,
                             seed=config.seed, device=device) for in_ram in (False, True))
    first, length = disk.stream.files[0], config.block_size + 1

    def mapped(step):
        tokens = np.memmap(first.path, first.dtype, 'r', first.offset)
        starts = disk.sequence_starts(disk.sequence_ids(step, 0)) % max(1, first.tokens - length)
        sequences = ladder.stacked(tokens, starts, length)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    ways = {'from disk': lambda: disk.train_batch(next(steps), 0),
            'memory-mapped, as nanoGPT': lambda: mapped(next(steps)),
            'from memory': lambda: ram.train_batch(next(steps), 0)}
    steps, rows = count(), []  # no way reads what another has read
    for name, read in ways.items():
        times = step_seconds(read, batches, batches // 10, torch.device('cpu'))
        per_s = 1 / spread(times)['median']
        rows.append({'way': name, 'batches_per_s': per_s,
                     'tokens_per_s': per_s * config.batch_size * config.block_size,
                     'needed_batches_per_s': need, 'times_need': per_s / need})
    what = f'{dataset.folder}, {config.batch_size} × {config.block_size} tokens a batch; ' \
           f'training takes {need:.3g} a second'
    return rows, f'{what}\n\n' + markdown(
        ['batches', 'a second', 'tokens/s', '× the need'],
        [[row['way'], f'{row["batches_per_s"]:,.0f}', short(row['tokens_per_s']),
          f'{row["times_need"]:,.0f}'] for row in rows])
