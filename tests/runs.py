"""Settings of small runs, changes to how they train, and what is left of them."""

import itertools
import json
from types import SimpleNamespace

import torch
from processes import options
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core import progress, start
from plaingpt.core.batches import BatchLoader

TINY = options(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, max_iters=6,
               gradient_accumulation_steps=2, eval_interval=3, eval_iters=2, warmup_iters=2,
               lr_decay_iters=6, device='cpu', dtype='float32', report=False)

# of runs that the preflight checks
CHECKED = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, total_batch_size=0,
               gradient_accumulation_steps=2, device='cpu', dtype='float32', vocab_size=0,
               compile=False, max_iters=300, eval_iters=2, eval_interval=10,
               warmup_iters=2, lr_decay_iters=300, check=True)


def rounding(logits, n_layer, n_embd):
    """How far logits may lie apart from others that are computed in another order in float32: each
    block adds sums of n_embd products. Eight times what is typical; a mistake makes far more."""
    return 8 * torch.finfo(torch.float32).eps * n_embd**0.5 * n_layer * logits.abs().max().item()


@torch.no_grad()
def same_logits(ours, theirs, idx):
    """Whether our model and one of transformers compute the same, but for rounding."""
    ours, c = ours.eval(), ours.config
    expected = theirs.eval()(idx).logits
    apart = (ours(idx)[0] - expected).abs().max().item()
    return apart < rounding(expected, c.n_layer, c.n_embd)


class HostReads(TorchDispatchMode):
    """Notes the operators whose result the host has to know before it can go on: on a GPU it waits
    there for all work before."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        by_number = func is torch.ops.aten.index.Tensor and not any(
            i is not None and i.dtype == torch.bool for i in args[1])  # its size is known
        if tags & set(func.tags) and not by_number:
            self.found.append(str(func))
        return func(*args, **kwargs or {})


def set_clock(patch, perf_counter):
    """A run of minutes looks at this clock. patch: a MonkeyPatch"""
    clock = SimpleNamespace(perf_counter=perf_counter)
    patch.setattr(progress, 'time', clock)
    patch.setattr(start, 'time', clock)


def tick(patch):
    """Each look at the clock takes a run of minutes a tenth of a second, on any machine."""
    ticks = itertools.count()
    set_clock(patch, lambda: next(ticks) / 10)


def in_background(Saver, *arguments, **how):
    """A Saver that writes while training goes on, as on CUDA."""
    return Saver(*arguments, **{**how, 'background': True})


def after_init(patch, change):
    """change(model) happens to each GPT that is made. patch: a fixture of tests/checks"""
    def changed(init):
        def __init__(self, config):
            init(self, config)
            with torch.no_grad():
                change(self)
        return __init__
    patch(GPT, '__init__', changed)


def change_batches(patch, change):
    """Each batch becomes change(idx, targets)."""
    patch(BatchLoader, '_on_host', lambda on_host: lambda self, starts: change(
        *on_host(self, starts)))


def lines(out_dir, key):
    """The lines of a run's metrics.jsonl that have `key`."""
    text = (out_dir / 'metrics.jsonl').read_text()
    return [line for line in map(json.loads, text.splitlines()) if key in line]


def model_of(checkpoint):
    """The model that a Checkpoint holds, without dropout."""
    model = GPT(checkpoint.config)
    checkpoint.load_into(model)
    return model


def weights(out_dir, which='latest'):
    """The parameters in a checkpoint of a run."""
    return list(model_of(checkpoints.find(out_dir, which)).parameters())


def same(a, b):
    """Whether the tensors of two lists have the same bits."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def change_steps(patch, change):
    """The loss of the n-th step, counted from 1, is change(n, model, loss) from when the loop
    begins: the preflight makes steps before. patch: a MonkeyPatch"""
    import train
    loop, forward_backward = train.train, train.Step.forward_backward
    count = itertools.count(1)

    def changed(step, batches):
        step.loss = change(next(count), step.model, forward_backward(step, batches))
        return step.loss

    def begin(run, monitor):
        patch.setattr(train.Step, 'forward_backward', changed)
        return loop(run, monitor)
    patch.setattr(train, 'train', begin)


def size_of_png(path):
    """(width, height) in pixels."""
    data = path.read_bytes()
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    return int.from_bytes(data[16:20], 'big'), int.from_bytes(data[20:24], 'big')
