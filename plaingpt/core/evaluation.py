"""Evaluation: the mean loss over a split, its standard error, and bits per byte."""

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


def evaluate(run, sequences):
    """Measure the mean losses of both splits of a Run, on this many sequences of each. Raises
    Stopped if a signal arrives.

    → {'train_loss', 'val_loss', 'val_stderr': the standard error of val_loss}"""
    model, context = run.step.model, run.step.autocast
    train_loss, _ = mean_loss(model, run.train_data, sequences, context, run.stop)
    # one result per corpus; a plain dataset is one corpus
    results = [mean_loss(model, loader, sequences, context, run.stop)
               for loader in run.val_data.components]
    losses, stderrs = zip(*results, strict=True)
    return {'train_loss': train_loss, 'val_loss': run.dataset.mean(losses),
            'val_stderr': mixture_stderr(run.dataset, stderrs)}


@torch.no_grad()
def mean_loss(model, loader, sequences, context, stop=None, label=None):
    """Return the mean loss over a split in eval mode, in nats per token, and its standard error.

    model: returns (logits or None, the loss of the batch or of each of its sequences). The standard
    error is computed from these losses, and is None if there is only one.
    sequences: how many to read, evenly spaced over the split; each process reads its share
    stop: a StopRequest, checked between batches. Raises Stopped.
    label: of a progress bar
    """
    model.eval()
    stats = []  # (weight, loss) of each batch or sequence; weight: number of targets / T
    for starts in tqdm(loader.eval_batches(sequences), label, leave=False,
                       disable=None if label and launched_world().is_main else True):
        if stop:
            stop.raise_if_stopped()
        # The last batch may be empty, but all processes must run a sharded model.
        idx, targets = loader.eval_batch(starts)
        with context:
            loss = model(idx, targets)[1]
        weight = (targets != -1).sum(1) / targets.size(1)  # (B,)
        if not loss.dim():  # one loss for the batch; evaluate.py's models return one per sequence
            weight = weight.sum()
        stats.append(torch.stack((weight, loss.float())).view(2, -1))
    model.train()
    gathered = all_gather(torch.cat(stats, dim=1).tolist(), gloo_group())
    gathered = [torch.tensor(rank_stats, dtype=torch.float64) for rank_stats in gathered]
    weights, losses = torch.cat(gathered, dim=1)
    loss = (weights * losses).sum() / weights.sum()
    variance = (weights * (losses - loss)**2).sum() / weights.sum()
    count = int((weights > 0).sum())
    # standard error of the weighted mean of `count` losses
    stderr = math.sqrt(variance / (count - 1)) if count > 1 else None
    return loss.item(), stderr


def full_model(model, context):
    """A context with a GPT that a process can run on its own: the model itself, or a copy gathered
    from all processes if it is sharded."""
    if not is_sharded(model.lm_head.weight):
        return nullcontext(model)
    from plaingpt.core.sharding import gathered
    return gathered(model, context)


def val_bytes_per_token(run):
    """UTF-8 bytes per token, averaged over the validation tokens that each evaluation reads (for a
    mixture, the weighted mean over its corpora). None if unknown."""
    try:
        token_bytes = run.dataset.token_bytes('val')
    except UserError as problem:  # the tokenizer could not be downloaded
        print0(f'no bits per byte: {problem}')
        return None
    if token_bytes is None:
        return None
    return run.dataset.mean(loader.mean_target(token_bytes, run.progress.eval_sequences)
                            for loader in run.val_data.components)


def mixture_stderr(dataset, stderrs):
    """The standard error of a mixture's loss, from those of its corpora; None if one is unknown."""
    if None in stderrs:
        return None
    return math.sqrt(sum((corpus.weight * stderr)**2
                         for corpus, stderr in zip(dataset.components, stderrs, strict=True)))
