"""Preflight: before the first step, is what is about to train still sound?

People change this code. A mistake that raises no error is found here in a second, otherwise after
hours, or never. A new check is a function and its entry in a table below: train.Run → None, or one
line that says what is wrong and what that usually means. All processes run all checks together.
"""

import time
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

import torch

from plaingpt.checks import data_checks, learning_checks, model_checks
from plaingpt.checks.model_checks import NotChecked
from plaingpt.parallel.blocks import apply_activation_checkpointing
from plaingpt.system.devices import eager, exact_matmul
from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.errors import UserError, phase
from plaingpt.system.formatting import one_line
from plaingpt.training.loss import chunked_cross_entropy
from plaingpt.training.optimizers import build_optimizer

# A check is named after the property that holds; --skip_checks takes these names.
BEFORE = (  # settings, data and weights as they are
    learning_checks.every_parameter_is_trainable, learning_checks.model_matches_its_config,
    data_checks.batches_match_the_files, data_checks.sequences_are_shuffled,
    data_checks.epoch_reads_every_sequence_once,
    data_checks.evaluation_reads_every_sequence_once,
    data_checks.tokens_vary, data_checks.tokens_match_the_tokenizer,
    data_checks.learning_rate_lasts,
    learning_checks.initial_loss_is_about_ln_vocab_size)
LATER = model_checks.attention_is_causal, model_checks.targets_are_not_read  # also when resumed
INSIDE = (  # the code, with a small network that has the run's flags
    learning_checks.step_follows_the_gradient, *LATER, model_checks.every_target_counts,
    model_checks.sequences_are_independent,
    model_checks.token_order_matters, model_checks.blocks_are_residual,
    learning_checks.every_parameter_gets_a_gradient,
    learning_checks.gradients_match_finite_differences,
    learning_checks.evaluation_loss_matches_the_logits,
    learning_checks.checkpoint_round_trip_works)


@phase('preflight')
@exact_matmul()  # the rounding of TF32 would hide mistakes
def preflight(run):
    """Check a run that is about to begin, on all processes, and print the result in a line; with
    check=True a line per check. The run is left as it was. If it is resumed, or only evaluates,
    it makes the checks of LATER alone.

    Raises UserError with a line for each check that fails."""
    config, began = run.config, time.perf_counter()
    if not config.check:
        return
    brief = config.check is not True and bool(run.start.resumed or config.eval_only)

    skipped = config.skip_checks.split(',') if config.skip_checks else []
    names = [check.__name__ for check in (*BEFORE, *INSIDE)]
    for name in set(skipped) - set(names):
        nearest = get_close_matches(name, names, n=1) or names
        raise UserError(f'skip_checks={name}: there is no such check; use {", ".join(nearest)}')
    # in eager mode: their shapes are not those of training, and each would be compiled
    with torch.random.fork_rng([run.device] if run.device.type == 'cuda' else []), \
            eager(run.compile):
        found = {} if brief else make(BEFORE, run, skipped)
        if not any(found.values()):  # else what is inside would say the same once more
            found |= make(LATER if brief else INSIDE, with_small_model(run), skipped)
    if run.device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(run.device)  # what is logged is the run's
    if failed := [name for name, problem in found.items() if problem]:
        raise UserError('\n'.join([
            *(f'preflight: {found[name]}' for name in failed), 'nothing was trained: fix this, or '
            f'if it is intended, add --skip_checks={",".join(skipped + failed)}']))
    if not brief:
        print0(f'preflight: {len(found)} checks passed in {time.perf_counter() - began:.2f} s'
               f'{data_checks.first_text(run)}')


def with_small_model(run):
    """→ the run with a small model, and with an optimizer that moves each weight a little"""
    config = replace(run.config, learning_rate=1e-3, weight_decay=0.0)
    model = model_checks.small_model(run.model.config).to(run.device)
    model.loss_function = run.model.loss_function
    if model.loss_function is chunked_cross_entropy:  # with chunks so small that there are several
        model.loss_function = partial(chunked_cross_entropy, chunk=model.config.block_size // 2 + 1)
    apply_activation_checkpointing(model, config.activation_checkpointing)
    step = replace(run.step, model=model, optimizer=build_optimizer(model, config))
    return replace(run, config=config, model=model, step=step)


def make(checks, run, skipped):
    """→ {name of a check: what is wrong, or None}, the same on all processes."""
    found = {}
    for check in checks:
        name, not_checked, problem = check.__name__, None, None
        if name in skipped:
            continue
        try:
            problem = check(run)
        except (NotChecked, OSError, torch.OutOfMemoryError) as reason:
            not_checked = f'not checked: {name} ({one_line(reason)})'
        except Exception as error:  # raised by the code that is checked: earlier findings tell more
            if not any(found.values()):
                error.add_note(f'in a check of the preflight: --skip_checks={name} leaves it out')
                raise
            break
        problem = next(filter(None, all_gather(problem, gloo_group())), None)
        if problem or not not_checked:
            found[name] = problem
        if run.config.check is True:
            print0(not_checked or f'{"FAILED" if problem else "ok    "} {name}')
    return found
