"""What the tests of the preflight change: the settings of a run, its model and its batches."""

import torch

import model
from plaingpt.data.batches import BatchLoader

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, total_batch_size=0,
             gradient_accumulation_steps=2, device='cpu', dtype='float32', vocab_size=0,
             compile=False, max_iters=300, eval_iters=2, eval_interval=10,
             warmup_iters=2, lr_decay_iters=300, check=True)


def after_init(patch, change):
    """change(model) happens to each GPT that is made."""
    def changed(init):
        def __init__(self, config):
            init(self, config)
            with torch.no_grad():
                change(self)
        return __init__
    patch(model.GPT, '__init__', changed)


def change_batches(patch, change):
    """Each batch becomes change(idx, targets)."""
    patch(BatchLoader, '_on_host', lambda on_host: lambda self, starts: change(
        *on_host(self, starts)))
