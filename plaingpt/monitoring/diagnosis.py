"""Diagnose a run from its logs alone, without model, device or torch.

Each diagnosis is a function (rows of metrics.jsonl, contents of run.json) → (evidence, remedy) or
None, listed in DIAGNOSES. With too few rows to judge it returns None: a false alarm costs more than
a late one. plaingpt/checks finds what can be known before the first step.
"""

from itertools import pairwise
from statistics import median

from plaingpt.monitoring.run_record import column, rows_with
from plaingpt.system.formatting import count_of

# Thresholds. None was tuned to a single run. Every healthy run in test_diagnosis.py and
# docs/references/ stays a factor of 2 or more away from each.
EARLY_STEPS = 200  # in which no loss should exceed the first one
# Nats by which a loss rises above the first one (early), or above the lowest training loss of an
# evaluation (later). Healthy runs never rise by 0.1.
RISE = 0.5
# Update-to-weight ratio of a step. About 1e-3 is healthy (Karpathy 2022, makemore part 3); early in
# training, weights of 0.02 change by up to 5e-2.
UPDATE_LOW, UPDATE_HIGH = 3e-4, 0.25
NO_GRADIENT = 1e-3  # gradient norm of a block relative to the median block; healthy: 0.05 or more
# Steps in which a gradient may be 0, since it is multiplied by a zero-initialized weight: three in
# healthy runs.
FIRST_STEPS = 5
# Overfitting: the validation loss is OVERFIT nats above its best after at least AFTER_BEST more
# evaluations; twice the largest std over seeds in docs/references/ (0.023). A single rise is noise
# (Prechelt 1998, Early Stopping).
OVERFIT, AFTER_BEST = 0.05, 2
IMPLAUSIBLE = 0.3  # bits per byte; English has 0.6 to 1.3 (Shannon 1951; Cover and King 1978)


def diagnose(rows, run):
    """→ {name of a diagnosis: 'evidence; remedy'} for everything that looks wrong"""
    findings = {}
    for diagnosis in DIAGNOSES:
        finding = diagnosis(rows, run)
        if finding:
            findings[diagnosis.__name__] = '; '.join(finding)
    return findings


def block_values(row, measure, prefix='h.'):
    """{'h.0': value, …} of a health row, per block; with prefix='' also the embeddings."""
    return {key.rpartition('/')[2]: value for key, value in row.items()
            if key.startswith(f'health/{measure}/{prefix}') and value is not None}


def update_ratios(rows):
    """[(iteration, update-to-weight ratio of the median block)] of the health rows."""
    ratios = []
    for row in rows:
        values = block_values(row, 'update_ratio')
        if values:
            ratios.append((row['iter'], median(values.values())))
    return ratios


# -----------------------------------------------------------------------------
# the loss


def optimizer_misused(rows, run):
    for row in rows_with(rows, 'missed_steps'):
        times = count_of(abs(row['missed_steps']), 'time')
        too = 'too few' if row['missed_steps'] > 0 else 'too many'
        return (f'after iteration {row["iter"]}, optimizer.step() was called {times} {too}',
                'check that each iteration calls optimizer.step() once, and that the '
                'optimizer is not built again')
    for row in rows_with(rows, 'lost_states'):
        return (f'by iteration {row["iter"]}, the state of the optimizer, such as its momentum, '
                f'was lost {count_of(row["lost_states"], "time")}',
                'look for what clears optimizer.state')


def diverging(rows, run):
    remedy = f'lower learning_rate or raise warmup_iters (now {run["config"]["warmup_iters"]})'
    evaluations = rows_with(rows, 'train_loss')
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    early = column([row for row in rows if row['iter'] <= EARLY_STEPS], 'loss')
    # The lower of two consecutive losses, since a single batch may be an outlier.
    highest = max(map(min, pairwise(early)), default=0)
    if highest >= first['train_loss'] + RISE:
        return f'the loss rose from {first["train_loss"]:.2f} to {highest:.2f}', remedy
    lowest = min(evaluations, key=lambda row: row['train_loss'])
    if last['train_loss'] >= lowest['train_loss'] + RISE:
        if lowest['iter']:  # no checkpoint has the initial weights
            remedy = f'resume from --checkpoint=best and {remedy}'
        return (f'the training loss rose from {lowest["train_loss"]:.2f} at iteration '
                f'{lowest["iter"]} to {last["train_loss"]:.2f} at iteration {last["iter"]}', remedy)


def overfit(rows, run):
    evaluations = rows_with(rows, 'train_loss', 'val_loss')
    if not evaluations or run['config'].get('check') == 'overfit':
        return None
    best, last = min(evaluations, key=lambda row: row['val_loss']), evaluations[-1]
    after_best = [row for row in evaluations if row['iter'] > best['iter']]
    if len(after_best) >= AFTER_BEST and last['train_loss'] <= best['train_loss'] \
            and last['val_loss'] >= best['val_loss'] + OVERFIT:
        remedy = 'stop early with --patience, or use more text, a larger weight_decay, more ' \
                 'dropout or a smaller model'
        if best['iter']:
            remedy += '; --checkpoint=best has the best weights'
        epochs = f'{last["tokens"] / run["train_tokens"]:.3g}'
        return (f'overfitting: the validation loss has risen since iteration {best["iter"]} (best '
                f'{best["val_loss"]:.4f}, now {last["val_loss"]:.4f}) while the training loss fell '
                f'to {last["train_loss"]:.4f}, after {count_of(epochs, "epoch")}', remedy)


def implausible(rows, run):
    bits = column(rows, 'val_bpb')[-1:]
    if bits and bits[0] < IMPLAUSIBLE and run['config'].get('check') != 'overfit':
        return (f'{bits[0]:.2f} bits per byte is implausibly low for unseen text (English: 0.6 to '
                '1.3)', 'check for leakage: targets or attention that expose the next token, or '
                'validation text that is also in the training split')


# -----------------------------------------------------------------------------
# learning rate and gradients


def rate_high(rows, run):
    ratios = update_ratios(rows)
    iter_num, highest = max(ratios, key=lambda pair: pair[1], default=(0, 0))
    if len(ratios) > 1 and highest > UPDATE_HIGH:
        return (f'the step at iteration {iter_num} changed the weights by {highest:.0%} of their '
                'norm; 0.1% to 5% is usual',
                'lower learning_rate (try a tenth) or raise warmup_iters')


def rate_low(rows, run):
    ratios = update_ratios(rows)
    if len(ratios) < 2:
        return None
    highest = max(ratio for _, ratio in ratios)
    if highest == 0:
        return ('no step has changed the weights', "check learning_rate, that the loop sets each "
                "group's rate, and that the optimizer has the model's parameters")
    is_warmed_up = ratios[-1][0] > run['config']['warmup_iters']
    if highest < UPDATE_LOW and run['from_scratch'] and is_warmed_up:
        return (f'each step changes the weights by at most {highest:.1e} of their norm; about 1e-3 '
                'is usual', 'raise learning_rate (try 10×), and check that grad_clip is not tiny')


def no_gradient(rows, run):
    if rows and rows[-1]['iter'] <= FIRST_STEPS:
        return None
    health_rows = [norms for row in rows if (norms := block_values(row, 'grad_norm', ''))]
    if len(health_rows) < 2:
        return None
    names = sorted(without_gradient(health_rows[-2]) & without_gradient(health_rows[-1]))
    if names:
        norms = health_rows[-1]
        return (f'the gradient norm of {", ".join(names)} is {norms[names[0]]:.1g}, and the '
                f'largest is {max(norms.values()):.1g}',
                'check for requires_grad=False, a detach(), or a norm whose weight is near 0')


def without_gradient(norms):
    """{name: gradient norm} → the names of blocks and embeddings that get no gradient."""
    blocks = {name: norm for name, norm in norms.items() if name.startswith('h.')}
    nonzero = [norm for norm in blocks.values() if norm]
    limit = NO_GRADIENT * median(nonzero) if nonzero else 0
    return {name for name, norm in norms.items() if norm <= (limit if name in blocks else 0)}


DIAGNOSES = (optimizer_misused, diverging, overfit, implausible, rate_high, rate_low, no_gradient)
