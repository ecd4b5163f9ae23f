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
from plaingpt.training.optimizers import ema_weights


def evaluate(run, monitor, is_last):
    """Measure and log the losses of both splits, the benchmarks and a sample, and record whether
    the validation loss is below all earlier ones. If a signal arrives, Stopped is raised before
    anything is logged, and the resumed run evaluates again."""
    step, progress = run.step, run.progress
    # The first evaluation of a new run reads one step's sequences only: enough to see that the loss
    # is about ln(vocab_size). A timed run evaluates in full, to measure how long that takes.
    sequences = progress.eval_sequences
    if run.is_new and not is_last and not run.config.minutes:
        sequences = min(sequences, run.config.step_sequences())

    def evaluate_split(loader):
        return mean_loss(step.model, loader, sequences, step.autocast, run.stop)

    # with average_decay, evaluate the EMA of the weights
    with ema_weights(step.optimizer):
        train_loss, _ = evaluate_split(run.train_data)
        # one result per corpus of a mixture, usually one in all
        results = [evaluate_split(loader) for loader in run.val_data.components]
        losses = [loss for loss, _ in results]
        scores, sample = monitor.score_and_sample(train_loss, *losses)
    run.stop.raise_if_stopped()
    val_loss = run.dataset.mean(losses)
    val_stderr = mixture_stderr(run.dataset, [stderr for _, stderr in results])
    # the initial loss is one to beat, but is not called the best: there is no checkpoint of it
    is_best = progress.record_evaluation(val_loss, val_stderr) and progress.iter_num > 0
    monitor.metrics.evaluation(progress.iter_num, train_loss, val_loss, val_stderr, is_best, sample)
    monitor.log_scores(scores)


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
    stats = []  # (weight, loss) of each batch or sequence; weight: targets, in sequences
    for starts in tqdm(loader.eval_batches(sequences), label, leave=False,
                       disable=None if label and launched_world().is_main else True):
        if stop:
            stop.raise_if_stopped()
        # may be empty, but all processes must run a sharded model
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
    from plaingpt.parallel.sharding import gathered
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


def check_tasks(config):
    """Check that the benchmarks of a run can be loaded. Raises UserError."""
    if config.eval_tasks and launched_world().local_rank == 0:
        from plaingpt.inference.lm_eval_model import load_tasks
        load_tasks(config.eval_tasks)


def mixture_stderr(dataset, stderrs):
    """The standard error of a mixture's loss, from those of its corpora; None if one is unknown."""
    if None in stderrs:
        return None
    return math.sqrt(sum((corpus.weight * stderr)**2
                         for corpus, stderr in zip(dataset.components, stderrs, strict=True)))
