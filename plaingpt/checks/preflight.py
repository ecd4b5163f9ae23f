"""Preflight: checks before the first step that the code, the data and the weights are sound.

People change this code. A silent bug would otherwise show up after hours of training, or never; the
preflight finds it in about a second. To add a check, write a function (Run → None, or one line that
says what is wrong and what usually causes it) and list it below. All processes run all checks.
"""

import time
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

import torch

from plaingpt.checks import data_checks, learning_checks, model_checks
from plaingpt.checks.model_checks import NotChecked
from plaingpt.core.blocks import apply_activation_checkpointing
from plaingpt.core.loss import loss_in_chunks
from plaingpt.core.optimizers import build_optimizer
from plaingpt.system.devices import eager, exact_matmul
from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.errors import UserError, phase
from plaingpt.system.formatting import count_of, one_line

# A check is named after the property that holds; --skip_checks takes these names.
SETUP_CHECKS = (  # settings, data and weights
    learning_checks.every_parameter_is_trainable, learning_checks.model_matches_its_config,
    data_checks.batches_match_the_files, data_checks.sequences_are_shuffled,
    data_checks.epoch_reads_every_sequence_once,
    data_checks.evaluation_reads_every_sequence_once,
    data_checks.tokens_vary, data_checks.tokens_match_the_tokenizer,
    data_checks.learning_rate_lasts, data_checks.weights_outlive_their_decay,
    learning_checks.initial_loss_is_about_ln_vocab_size)
RESUME_SETUP_CHECKS = (data_checks.weights_outlive_their_decay,)
RESUME_CHECKS = model_checks.attention_is_causal, model_checks.targets_are_not_read
CODE_CHECKS = (  # the code, with a small model that has the flags of the run's model
    learning_checks.step_follows_the_gradient, *RESUME_CHECKS, model_checks.every_target_counts,
    model_checks.sequences_are_independent,
    model_checks.token_order_matters, model_checks.blocks_are_residual,
    learning_checks.every_parameter_gets_a_gradient,
    learning_checks.gradients_match_finite_differences,
    learning_checks.evaluation_loss_matches_the_logits,
    learning_checks.checkpoint_round_trip_works)


@phase('preflight')
@exact_matmul()  # TF32 rounding would hide mistakes
def preflight(run):
    """Check a run before it starts, on all processes, and print one line; with check=True one line
    per check. The run's state is left unchanged. A run that resumes or only evaluates makes just
    RESUME_SETUP_CHECKS and RESUME_CHECKS.

    Raises UserError with a line for each failed check."""
    config = run.config
    start_time = time.perf_counter()
    if not config.check:
        return
    is_short = config.check is not True and bool(run.start.resumed or config.eval_only)
    skipped = config.skip_checks.split(',') if config.skip_checks else []
    refuse_unknown_checks(skipped)
    # Eager mode, since compiling for the checks' shapes would take too long.
    with torch.random.fork_rng([run.step.device] if run.step.device.type == 'cuda' else []), \
            eager(run.step.compile):
        problems = run_checks(RESUME_SETUP_CHECKS if is_short else SETUP_CHECKS, run, skipped)
        if not any(problems.values()):  # else the code checks would repeat the same failures
            checks = RESUME_CHECKS if is_short else CODE_CHECKS
            problems |= run_checks(checks, with_small_model(run), skipped)
    if run.step.device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(run.step.device)  # exclude the preflight from the logs
    failed = [name for name, problem in problems.items() if problem]
    if failed:
        raise UserError('\n'.join([
            *(f'preflight: {problems[name]}' for name in failed),
            'training did not start; fix this, or if it is intended, add '
            f'--skip_checks={",".join(skipped + failed)}']))
    if not is_short:
        print0(f'preflight: {count_of(len(problems), "check")} passed in '
               f'{time.perf_counter() - start_time:.2f} s{data_checks.first_text(run)}')


def refuse_unknown_checks(skipped):
    """Raise UserError if skip_checks has a name that no check has."""
    names = [check.__name__ for check in (*SETUP_CHECKS, *CODE_CHECKS)]
    for name in set(skipped) - set(names):
        nearest = get_close_matches(name, names, n=1) or names
        raise UserError(f'skip_checks={name}: no such check; use {", ".join(nearest)}')


def with_small_model(run):
    """→ the run with a small model, and an optimizer that changes the weights only slightly"""
    config = replace(run.config, learning_rate=1e-3, weight_decay=0.0)
    model = model_checks.small_model(run.model.config).to(run.step.device)
    if run.model.loss_in_chunks is not None:  # make sure that there are several chunks
        model.loss_in_chunks = partial(loss_in_chunks, chunk=model.config.block_size // 2 + 1)
    apply_activation_checkpointing(model, config.activation_checkpointing)
    step = replace(run.step, model=model, optimizer=build_optimizer(model, config))
    return replace(run, config=config, model=model, step=step)


def run_checks(checks, run, skipped):
    """→ {name of each check that ran: its problem or None}, the same on all processes"""
    problems = {}
    for check in checks:
        name = check.__name__
        problem = None
        not_checked = None
        if name in skipped:
            continue
        try:
            problem = check(run)
        except (NotChecked, OSError, torch.OutOfMemoryError) as reason:
            not_checked = f'not checked: {name} ({one_line(reason)})'
        except Exception as error:  # raised by the code under test
            if any(problems.values()):
                break  # the problems found so far explain more
            error.add_note(f'raised in a preflight check: --skip_checks={name} skips it')
            raise
        problem = next(filter(None, all_gather(problem, gloo_group())), None)
        if problem or not not_checked:
            problems[name] = problem
        if run.config.check is True:
            print0(not_checked or f'{"FAILED" if problem else "ok    "} {name}')
    return problems
