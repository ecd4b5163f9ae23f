"""Measure the loss of a model, also while it trains."""

import math
from contextlib import nullcontext

import torch
from tqdm import tqdm

from plaingpt.system.distributed import (
    all_gather,
    gloo_group,
    is_sharded,
    launched_world,
    print0,
)
from plaingpt.system.errors import UserError


@torch.no_grad()
def mean_loss(model, loader, sequences, context, stop=None, label=None, use_train_graph=False):
    """→ (mean loss in nats a token, its standard error). sequences: how many to read, evenly spaced
    over the split. model returns (logits or None, the loss of a batch, or those of its sequences).
    The standard error is that of the mean of these losses, None if there is one.
    Each process evaluates its share. stop: a StopRequest, checked between batches.
    label: of a progress bar; use_train_graph: call the model as a training step does, with the same
    graph if it is compiled: another one for evaluations would take as long to compile. Raises
    Stopped.
    """
    model.train(use_train_graph)
    parts = []  # (targets, in sequences; loss) of each batch, or of each sequence
    for starts in tqdm(loader.eval_batches(sequences), label, leave=False,
                       disable=None if label and launched_world().is_main else True):
        if stop:
            stop.raise_if_stopped()
        idx, targets = loader.eval_batch(starts)  # even an empty one: all gather a sharded model
        with context, torch.set_grad_enabled(use_train_graph):
            loss = model(idx, targets)[1].detach()
        counts = (targets != -1).sum(1) / targets.size(1)  # (B,)
        counts = counts if loss.dim() else counts.sum()
        parts.append(torch.stack((counts, loss.float())).view(2, -1))
    model.train()
    shares = all_gather(torch.cat(parts, dim=1).tolist(), gloo_group())
    n, losses = torch.cat([torch.tensor(share, dtype=torch.float64) for share in shares], dim=1)
    loss = (n * losses).sum() / n.sum()
    variance, num = (n * (losses - loss)**2).sum() / n.sum(), int((n > 0).sum())
    return loss.item(), math.sqrt(variance / (num - 1)) if num > 1 else None


def full_model(model, context):
    """A context with a GPT that a process can use by itself: the model, or, where it is sharded, a
    copy that is gathered from all processes."""
    if not is_sharded(model.lm_head.weight):
        return nullcontext(model)
    from plaingpt.parallel.sharding import gathered
    return gathered(model, context)


def val_bytes_per_token(run):
    """UTF-8 bytes of text a token: the mean over the validation tokens that each evaluation reads
    (for a mixture the weighted mean), or None where it is not known."""
    try:
        sizes = run.dataset.token_bytes('val')
    except UserError as problem:  # the tokenizer could not be downloaded
        print0(f'no bits per byte: {problem}')
        return None
    return None if sizes is None else run.dataset.mean(
        part.mean_target(sizes, run.progress.eval_sequences)
        for part in run.val_data.parts)


def check_tasks(config):
    """See that the benchmarks of a run can be loaded. Raises UserError."""
    if config.eval_tasks and launched_world().local_rank == 0:
        from plaingpt.inference.lm_eval_model import load_tasks
        load_tasks(config.eval_tasks)


def mixture_stderr(dataset, errors):
    """Standard errors of a loss in each corpus of a mixture → that of their weighted mean, or None
    where one is not known."""
    if any(error is None for error in errors):
        return None
    return math.sqrt(sum((part.weight * error)**2
                         for part, error in zip(dataset.parts, errors, strict=True)))
