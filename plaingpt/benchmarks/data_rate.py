"""Batches a second of each way to read them, beside what training needs."""

from contextlib import closing
from itertools import count
from statistics import median

import numpy as np
import torch

from plaingpt.benchmarks.ladder import stack_slices
from plaingpt.benchmarks.result_tables import markdown
from plaingpt.benchmarks.step_speed import make_step, random_batches
from plaingpt.benchmarks.timing import step_seconds
from plaingpt.data.dataset import open_named
from plaingpt.system.formatting import short

BATCHES = 200  # that are timed of each reader


def measure_data(work):
    """→ (a row for each reader, their table)."""
    config = work.config
    dataset = open_named(config.dataset)
    with closing(random_batches(work)) as batches:
        _, _, step = make_step(work, batches)
        step_s = median(step_seconds(step, config.steps, config.warmup_steps, work.device))
    needed, rows = config.accumulation() / step_s, []
    for name, read in make_readers(dataset, config, work.device).items():
        per_s = 1 / median(step_seconds(read, BATCHES, BATCHES // 10, torch.device('cpu')))
        rows.append({'reader': name, 'batches_per_s': per_s,
                     'tokens_per_s': per_s * config.batch_size * config.block_size,
                     'needed_batches_per_s': needed, 'times_need': per_s / needed})
    what = f'{dataset.folder}, {config.batch_size} × {config.block_size} tokens a batch; ' \
           f'training takes {needed:.3g} a second'
    return rows, f'{what}\n\n' + markdown(
        ['batches', 'a second', 'tokens/s', '× the need'],
        [[row['reader'], f'{row["batches_per_s"]:,.0f}', short(row['tokens_per_s']),
          f'{row["times_need"]:,.0f}'] for row in rows])


def make_readers(dataset, config, device):
    """{name: a function that reads the next batch}. No batch is read twice."""
    disk, ram = (dataset.loader('train', in_ram, config.block_size, config.batch_size,
                                seed=config.seed, device=device) for in_ram in (False, True))
    first, length = disk.stream.files[0], config.block_size + 1
    steps = count()

    def read_mapped():
        tokens = np.memmap(first.path, first.dtype, 'r', first.offset)
        starts = disk.sequence_starts(disk.sequence_ids(next(steps), 0))
        sequences = stack_slices(tokens, starts % max(1, first.tokens - length), length)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    return {'from disk': lambda: disk.train_batch(next(steps), 0),
            'memory-mapped, as nanoGPT': read_mapped,
            'from memory': lambda: ram.train_batch(next(steps), 0)}
