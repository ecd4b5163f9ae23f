"""Preflight: before the first step, is what is about to train still sound?

People change this code. What they break without an error shows in a second here, and otherwise
after hours, or never. A new check is a function and its entry in CHECKS.
"""

import time

import torch

from plaingpt.checks.data_checks import (
    batches_are_of_the_files,
    batches_differ,
    data_is_text,
    epoch_reads_all,
    evaluation_reads_all,
    rate_lasts,
)
from plaingpt.checks.model_checks import (
    blocks_pass_on,
    cache_changes_nothing,
    checkpoints_fit,
    evaluation_repeats,
    every_weight_learns,
    future_is_hidden,
    gradient_is_true,
    loss_is_of_the_logits,
    loss_is_usual,
    matrices_are_stated,
    order_matters,
    past_is_seen,
    texts_are_apart,
    weights_are_float32,
    weights_are_optimized,
)
from plaingpt.checks.step_checks import checkpoints_come_back, steps_follow_the_gradient
from plaingpt.checks.subject import NotChecked, Subject, shallow
from plaingpt.parallel.sharding import sharded
from plaingpt.system.devices import exact_matmul
from plaingpt.system.distributed import all_gather, gloo_group, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import one_line
from plaingpt.system.streams import status, warn
from plaingpt.training.evaluation import mean_loss

# What must hold → the check.
BEFORE = {  # of settings, data and weights as they are
    'the weights are float32': weights_are_float32,
    'every weight may move': weights_are_optimized,
    'a checkpoint has every weight': checkpoints_fit,
    'the optimizer knows the matrices': matrices_are_stated,
    'batches are what the files hold': batches_are_of_the_files,
    'each step and process has its own batch': batches_differ,
    'an epoch reads every sequence once': epoch_reads_all,
    'an evaluation reads every sequence once': evaluation_reads_all,
    'the data is text': data_is_text,
    'the learning rate lasts': rate_lasts,
    'the first loss is usual': loss_is_usual}
INSIDE = {  # of the network, while what begins at zero or small is made to count
    'the future is hidden': future_is_hidden,
    'the past is seen': past_is_seen,
    'sequences and documents are apart': texts_are_apart,
    'the order of tokens matters': order_matters,
    'each block passes its input on': blocks_pass_on,
    'every weight gets a gradient': every_weight_learns,
    'the gradient is true': gradient_is_true,
    'an evaluation repeats itself': evaluation_repeats,
    'the loss is that of the logits': loss_is_of_the_logits,
    'generation with a cache is the same': cache_changes_nothing,
    'a step follows the gradient': steps_follow_the_gradient,
    'a saved model comes back': checkpoints_come_back}
LATER = {'the future is hidden': future_is_hidden}  # also of a run that continues or evaluates
# Loaded weights may be the reason, such as those of an overfit model: then it is a warning.
LEARNABLE = {'the first loss is usual', 'the past is seen', 'the order of tokens matters'}
NEEDED = {'the weights are float32', 'an evaluation reads every sequence once'}  # to look inside


@status.doing('checking')
@exact_matmul()  # TF32 rounds more than many a mistake changes
def preflight(run, forward_backward, update):
    """Check a run that is about to begin, on all processes, and say what came of it in a line; with
    check=True a line for each check. The run is left as it was. Of one that continues, or that
    only evaluates, it is checked that the future is hidden.

    run: train.Run; the two functions make its steps: train.py's
    Raises UserError with a line for each check that fails, unless check=warn."""
    config, began, resumed = run.config, time.perf_counter(), run.start.resumed
    if not config.check:
        return
    brief = config.check is not True and bool(resumed or config.eval_only)
    model, optimizer = run.model, run.optimizer
    is_sharded = sharded(run.model)
    if is_sharded:  # a process has not all of it: one of its kind stands for it
        model, optimizer = shallow(model.config, config, run.device)
    subject = Subject(config, run.dataset, run.train_data, run.val_data, model, optimizer,
                      run.context, gloo_group(),
                      from_scratch=run.start.from_scratch or is_sharded,
                      evaluate=lambda *what: mean_loss(*what, run.context)[0],
                      evaluated=run.progress.eval_sequences, forward_backward=forward_backward,
                      update=update)
    problems = {} if brief else make(BEFORE, subject)
    if not NEEDED & problems.keys():
        with subject.enlarged():
            problems |= make(LATER if brief else INSIDE, subject)
    if subject.device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(subject.device)  # what is logged is the run's
    lines = [f'preflight: {what}? No: {problem}' for what, problem in problems.items()]
    if config.check != 'warn' and not all(is_doubt(what, subject) for what in problems):
        raise UserError('\n'.join([*lines, 'nothing was trained: mend this, or, where it is meant, '
                                   'give --check=warn']))
    for line in lines if run.world.is_main else ():
        warn(line)
    if brief:
        return
    of = f' of {len(problems) + subject.passed}' * bool(problems)
    print0(f'preflight: {subject.passed}{of} checks passed in {time.perf_counter() - began:.2f} s'
           + (f'; the model will read {subject.text!r}' if subject.text else ''))


def is_doubt(what, subject):
    """Whether a check that does not hold is a warning, because the weights may be the reason."""
    return what in LEARNABLE and not subject.from_scratch


def make(checks, subject):
    """→ {what does not hold: why}, the same on all processes."""
    problems = {}
    for what, check in checks.items():
        skipped = problem = None
        try:
            problem = check(subject)
        except (NotChecked, torch.OutOfMemoryError) as reason:
            skipped = f'not checked: {what} ({one_line(reason)})'
        except Exception:  # of the code that is checked: what was found before tells more
            if not problems:
                raise
            break
        found = all_gather(problem, subject.group)
        if problem := next(filter(None, found), None):
            problems[what] = problem if found[0] else \
                f'{problem} (process {found.index(problem)} alone)'
        subject.passed += not (problem or skipped)
        if subject.config.check is True:
            failed = 'unsure' if is_doubt(what, subject) else 'FAILED'
            print0(skipped or f'{failed if problem else "ok    "} {what}')
    return problems
