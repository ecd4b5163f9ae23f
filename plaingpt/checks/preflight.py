"""Preflight: before the first step, is what is about to train still sound?

People change this code. A mistake that raises no error shows here in a second, and otherwise after
hours, or never. A new check is a function and its entry in a table below: train.Run → None,
or in a line what it found and what that usually means. All processes make all checks together.
"""

import time
from dataclasses import replace

import torch

from plaingpt.checks import data_checks, learning_checks, model_checks
from plaingpt.checks.model_checks import NotChecked
from plaingpt.system.devices import exact_matmul
from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import one_line
from plaingpt.training.optimizers import build_optimizer

# What must hold → the check.
BEFORE = {  # settings, data and weights as they are
    'every weight may move': learning_checks.weights_may_move,
    'a checkpoint has every weight': learning_checks.checkpoints_fit,
    'batches are what the files hold': data_checks.batches_are_of_the_files,
    'an epoch reads every sequence once': data_checks.epoch_reads_all,
    'an evaluation reads every sequence once': data_checks.evaluation_reads_all,
    'the data is text': data_checks.data_is_text,
    'the learning rate lasts': data_checks.rate_lasts,
    'the first loss is usual': learning_checks.loss_is_usual}
LATER = {'the future is hidden': model_checks.future_is_hidden}  # also when a run continues
INSIDE = {  # the code, with a small network that has the run's flags
    **LATER,
    'sequences and documents are apart': model_checks.texts_are_apart,
    'the order of tokens matters': model_checks.order_matters,
    'each block passes its input on': model_checks.blocks_pass_on,
    'every weight gets a gradient': learning_checks.every_weight_learns,
    'the gradient is true': learning_checks.gradient_is_true,
    'the loss is that of the logits': learning_checks.loss_is_of_the_logits,
    'a saved model comes back': learning_checks.checkpoints_come_back}


@exact_matmul()  # the rounding of TF32 would hide mistakes
def preflight(run, forward_backward, update):
    """Check a run that is about to begin, on all processes, and say what came of it in a line; with
    check=True a line for each check. The run is left as it was. Where a run continues or only
    evaluates, the one check is that the future is hidden.

    run: train.Run; the two functions make its steps: train.py's
    Raises UserError with a line for each check that fails."""
    config, began = run.config, time.perf_counter()
    if not config.check:
        return
    brief = config.check is not True and bool(run.start.resumed or config.eval_only)
    inside = LATER if brief else {
        'a step follows the gradient': lambda run: learning_checks.step_follows_the_gradient(
            run, forward_backward, update), **INSIDE}
    with torch.random.fork_rng([run.device] if run.device.type == 'cuda' else []):
        found = {} if brief else make(BEFORE, run)
        if not any(found.values()):  # else what is inside would say the same once more
            found |= make(inside, with_small_model(run))
    if run.device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(run.device)  # what is logged is the run's
    lines = [f'preflight: {what}: no, {problem}' for what, problem in found.items() if problem]
    if lines:
        raise UserError('\n'.join([*lines, 'nothing was trained: fix this, or give --check=False '
                                   'if it is intended']))
    if not brief:
        print0(f'preflight: {len(found)} checks passed in {time.perf_counter() - began:.2f} s'
               f'{data_checks.first_text(run)}')


def with_small_model(run):
    """→ the run with a small model, and with an optimizer that moves each weight a little"""
    config = replace(run.config, learning_rate=1e-3, weight_decay=0.0)
    model = model_checks.small_model(run.model.config).to(run.device)
    model.loss_chunk_tokens = run.model.loss_chunk_tokens
    model.activation_checkpointing = config.activation_checkpointing
    return replace(run, config=config, model=model, optimizer=build_optimizer(model, config))


def make(checks, run):
    """→ {what is checked: what does not hold, or None}, the same on all processes."""
    found = {}
    for what, check in checks.items():
        skipped = problem = None
        try:
            problem = check(run)
        except (NotChecked, OSError, torch.OutOfMemoryError) as reason:
            skipped = f'not checked: {what} ({one_line(reason)})'
        except Exception:  # raised by the code that is checked: earlier findings tell more
            if not any(found.values()):
                raise
            break
        problem = next(filter(None, all_gather(problem, gloo_group())), None)
        if problem or not skipped:
            found[what] = problem
        if run.config.check is True:
            print0(skipped or f'{"FAILED" if problem else "ok    "} {what}')
    return found
