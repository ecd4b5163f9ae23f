"""Say what looks wrong with a run, from the numbers that it wrote: no model, no device, no torch.

Each check is a function (rows, run) → (evidence, remedy) or None and an entry in CHECKS: `rows` of
metrics.jsonl, `run` of run.json. A check returns None where it has too few rows to judge: a false
alarm costs more than a late one. What can be seen before the first step is seen in plaingpt/checks.
"""

from itertools import pairwise
from statistics import median

from plaingpt.monitoring.run_record import column, rows_with

# Thresholds. None was tuned to a single run. "Ours" are the healthy runs of
# tests/monitoring/test_diagnosis.py and docs/references/: they stay a factor of 2 or more away.
EARLY_STEPS = 200  # in which no loss should lie above the first one
# nats that a loss rises above the first one, early, or above the lowest evaluation of the training
# split, later: ours never rise by 0.1
RISE = 0.5
# update / weight in a step: about 1e-3 is healthy (Karpathy 2022, makemore part 3), and early on
# weights of 0.02 change by up to 5e-2
UPDATE_LOW, UPDATE_HIGH = 3e-4, 0.25
NO_GRADIENT = 1e-3  # a block's gradient norm / the median of the blocks: 0.05 or more in ours
# steps in which a gradient may be 0, since what multiplies it begins at zero: three in ours
FIRST_STEPS = 5
# nats by which validation rises above its best, for this many evaluations or more: twice the
# deviation of seeds in docs/references/, 0.023 at most (Prechelt 1998, Early Stopping: one rise
# alone is noise)
OVERFIT, AFTER_BEST = 0.05, 2
IMPLAUSIBLE = 0.3  # bits a byte: English has 0.6 to 1.3 (Shannon 1951; Cover and King 1978)


def diagnose(rows, run):
    """→ {check: what the numbers show, and what to do} of what looks wrong."""
    found = {check.__name__: check(rows, run) for check in CHECKS}
    return {name: '; '.join(said) for name, said in found.items() if said}


def block_values(row, measure, prefix='h.'):
    """{'h.0': value, …} of a health row: of the blocks; prefix='': also of the embeddings."""
    return {key.rpartition('/')[2]: value for key, value in row.items()
            if key.startswith(f'health/{measure}/{prefix}') and value is not None}


def updates(rows):
    """[(iteration, median update / weight of the blocks)] of the health rows."""
    return [(row['iter'], median(ratios.values())) for row in rows
            if (ratios := block_values(row, 'update_ratio'))]


# -----------------------------------------------------------------------------
# the loss


def unmoved(rows, run):
    # The first evaluation of a new model is shorter than the others, and has other losses.
    evaluations = rows_with(rows, 'train_loss', 'val_loss')[:3]
    for before, after in pairwise(evaluations):
        if all(before[key] == after[key] for key in ('train_loss', 'val_loss')):
            return (f'the evaluation at iteration {after["iter"]} gives the same losses as that at '
                    f'{before["iter"]}, to the last digit ({after["train_loss"]}): no weight has '
                    'moved', "see that the loop sets each group's learning rate and calls the "
                    "optimizer's step")


def diverging(rows, run):
    remedy = f'lower learning_rate or lengthen warmup_iters ({run["config"]["warmup_iters"]} now)'
    evaluations = rows_with(rows, 'train_loss')
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    early = column([row for row in rows if row['iter'] <= EARLY_STEPS], 'loss')
    # The lower of two steps in a row: a single batch may be an odd one.
    highest = max(map(min, pairwise(early)), default=0)
    if highest >= first['train_loss'] + RISE:
        return f'the loss rose from {first["train_loss"]:.2f} to {highest:.2f}', remedy
    lowest = min(evaluations, key=lambda row: row['train_loss'])
    if last['train_loss'] >= lowest['train_loss'] + RISE:
        return (f'the training loss rose from {lowest["train_loss"]:.2f} at iteration '
                f'{lowest["iter"]} to {last["train_loss"]:.2f} at iteration {last["iter"]}',
                f'go back to --checkpoint=best and {remedy}')


def overfit(rows, run):
    seen = rows_with(rows, 'train_loss', 'val_loss')
    if not seen or run['config'].get('check') == 'overfit':
        return None
    best, last = min(seen, key=lambda row: row['val_loss']), seen[-1]
    after = [row for row in seen if row['iter'] > best['iter']]
    if len(after) >= AFTER_BEST and last['train_loss'] <= best['train_loss'] \
            and last['val_loss'] >= best['val_loss'] + OVERFIT:
        return (f'validation rises since iteration {best["iter"]} (best {best["val_loss"]:.4f}, '
                f'now {last["val_loss"]:.4f}) while training falls to {last["train_loss"]:.4f}, '
                f'after {last["tokens"] / run["train_tokens"]:.3g} epochs',
                'stop with --patience, or use more text, a larger weight_decay, more dropout or a '
                'smaller model; --checkpoint=best has the best weights')


def implausible(rows, run):
    bits = column(rows, 'val_bpb')[-1:]
    if bits and bits[0] < IMPLAUSIBLE and run['config'].get('check') != 'overfit':
        return (f'{bits[0]:.2f} bits a byte are too few for text that was not seen before: English '
                'has 0.6 to 1.3',
                'do targets or attention show the token to predict? does the text repeat itself?')


# -----------------------------------------------------------------------------
# learning rate and gradients


def rate_high(rows, run):
    seen = updates(rows)
    iter_num, highest = max(seen, key=lambda pair: pair[1], default=(0, 0))
    if len(seen) > 1 and highest > UPDATE_HIGH:
        return (f'the step of iteration {iter_num} changed the weights by {highest:.0%} of their '
                'size, and 0.1% to 5% is usual',
                'lower learning_rate (try a tenth) or lengthen warmup_iters')


def rate_low(rows, run):
    seen = updates(rows)
    if len(seen) < 2 or not run['from_scratch'] \
            or seen[-1][0] <= run['config']['warmup_iters']:
        return None
    highest = max(ratio for _, ratio in seen)
    if highest < UPDATE_LOW:
        return (f'a step changes the weights by {highest:.1e} of their size at most, and about '
                '1e-3 is usual',
                'raise learning_rate (try ×10), and see that grad_clip is not tiny')


def no_gradient(rows, run):
    if rows and rows[-1]['iter'] <= FIRST_STEPS:
        return None
    seen = [norms for row in rows if (norms := block_values(row, 'grad_norm', ''))][-2:]
    tiny = []  # names of the blocks and embeddings without a gradient, of the last two health rows
    for norms in seen:
        blocks = [norm for name, norm in norms.items() if name.startswith('h.') and norm]
        limit = NO_GRADIENT * median(blocks or [0])
        tiny.append({name for name, norm in norms.items()
                     if norm <= (limit if name.startswith('h.') else 0)})
    if len(tiny) == 2 and (names := sorted(tiny[0] & tiny[1])):
        return (f'the gradient of {", ".join(names)} is {seen[-1][names[0]]:.1g}, and the largest '
                f'{max(seen[-1].values()):.1g}', 'is it frozen, or cut off by a detach or a norm '
                'that has collapsed?')


CHECKS = (unmoved, diverging, overfit, implausible, rate_high, rate_low, no_gradient)
