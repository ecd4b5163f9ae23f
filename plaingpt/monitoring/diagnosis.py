"""What looks wrong with a run, in words, from the numbers it wrote: no model, no device, no torch.

Each check is a function (rows, run) → (evidence, remedy) or None and an entry in CHECKS: `rows` of
metrics.jsonl, `run` of run.json. A check returns None where it has too few rows to judge: a false
alarm costs more than a late one.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from plaingpt.monitoring.metrics_file import column, rows_with
from plaingpt.monitoring.run_record import epochs
from plaingpt.system.formatting import quote_epochs

# When something is wrong. None was tuned to a single run. "Ours" are the healthy runs of
# tests/monitoring/test_diagnosis.py and references/: they keep a factor of 2 or more away.
THRESHOLDS = {
    # nats from ln(vocab), and so much more for each channel: the logits of GPT-2's initialisation
    # have a variance of 0.02² · channels, and half of that adds to the loss. "Verify loss at init":
    # Karpathy 2019, A Recipe for Training Neural Networks
    'initial_loss': 0.3,
    'initial_loss_per_channel': 0.0004,
    # nats that a new model's loss falls within `early_steps` after warmup; ours fall by 1 and more
    'progress': 0.25,
    'early_steps': 200,
    # nats around the entropy of single tokens (Shannon 1951, F1), which a model reaches without
    # context
    'context': 0.1,
    # nats that a loss rises above the first one, early, or above the lowest evaluation of the
    # training split, later: ours never rise by 0.1
    'rise': 0.5,
    # update / weight in a step: about 1e-3 is healthy (Karpathy 2022, makemore part 3), and early
    # on weights of 0.02 change by up to 5e-2
    'update_high': 0.25,
    'update_low': 3e-4,
    # learning rate / its highest, with more than a tenth of the run left
    'rate_gone': 1e-3,
    # median gradient norm / grad_clip: the limit should be half to ten times the usual norm
    # (Pascanu et al. 2013, §3.2)
    'clip': 20.0,
    'no_gradient': 1e-3,  # a block's gradient norm / the median of the blocks that have one
    # largest attention logit: the softmax has become a choice of one token, and training may
    # diverge (Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy
    # Collapse; Kimi Team 2025, Kimi K2, §2.1, names 1,000). Ours reach 29
    'attention_logit': 1000.0,
    # loss scale: below 1 the gradients overflow without any scaling (PyTorch, docs of GradScaler)
    'loss_scale': 1.0,
    # nats that validation rises over its best, in at least `after_best` evaluations
    'overfit': 0.05,
    'after_best': 2,
    # bits a byte: English has 0.6 to 1.3 (Shannon 1951; Cover and King 1978)
    'implausible': 0.3,
    'overlap': 0.1,  # share of validation that is also in the training split
    'data_wait': 0.25,  # share of the time spent waiting for batches
    # share of ln(vocab) that the loss on a few batches falls below (Karpathy 2019)
    'overfit_check': 0.05,
}
OVERFLOWS = 16  # steps that float16 may skip first: step_guard.py


@dataclass(frozen=True)
class Diagnosis:
    """Something that looks wrong: what the numbers show, and what to do."""

    name: str
    evidence: str
    remedy: str

    def __str__(self):
        return f'{self.evidence}; {self.remedy}'


def diagnose(rows, run):
    """→ [Diagnosis], each check's at most once."""
    return [Diagnosis(check.__name__, *found) for check in CHECKS if (found := check(rows, run))]


# -----------------------------------------------------------------------------
# reading rows


def first_loss(rows):
    """The loss of the weights that the run began with, or None where it was not measured."""
    losses = (row.get('train_loss') or row.get('loss') for row in rows if row['iter'] <= 1)
    return next(filter(None, losses), None)


def warmup_iters(run):
    """Iterations of warmup; decay_lr=False has none."""
    return run['config']['warmup_iters'] if run['config']['decay_lr'] else 0


def late_losses(rows, run):
    """The logged losses, or [] before they reach past the early steps after warmup."""
    rows = rows_with(rows, 'loss')
    is_late = rows and rows[-1]['iter'] >= warmup_iters(run) + THRESHOLDS['early_steps']
    return column(rows, 'loss') if is_late else []


def block_values(row, measure, prefix='h.'):
    """{'h.0': value, …} of a health row: of the blocks; prefix='': also of the embeddings."""
    return {key.rpartition('/')[2]: value for key, value in row.items()
            if key.startswith(f'health/{measure}/{prefix}') and value is not None}


def updates(rows):
    """[(row, median update / weight of its blocks)] of the health rows."""
    return [(row, median(ratios.values())) for row in rows
            if (ratios := block_values(row, 'update_ratio'))]


def overfits_on_purpose(run):
    return run['config'].get('check') == 'overfit'


# -----------------------------------------------------------------------------
# the loss


def initial_loss(rows, run):
    first, expected = first_loss(rows), math.log(run['vocab_size'])
    if first is None:
        return None
    uniform = f'a model that knows nothing has ln({run["vocab_size"]}) = {expected:.2f}'
    if not run['from_scratch'] and first > expected:
        return (f'the weights it began with have a loss of {first:.2f}, and {uniform}',
                'was this text prepared with their tokenizer?')
    tolerance = THRESHOLDS['initial_loss'] \
        + THRESHOLDS['initial_loss_per_channel'] * run['config']['n_embd']
    if run['from_scratch'] and abs(first - expected) > tolerance:
        return (f'the first loss is {first:.2f}, but {uniform}',
                'look at the initialisation, and at targets and vocabulary')


def unmoved(rows, run):
    seen = rows_with(rows, 'train_loss', 'val_loss')
    first, *later = seen or [{'iter': None}]
    scaled = bool(rows_with(rows, 'loss_scale'))  # float16 skips steps until it has found its scale
    later = [row for row in later if row['iter'] > OVERFLOWS * scaled]
    if first['iter'] == 0 and later and all(
            first[key] == later[0][key] for key in ('train_loss', 'val_loss')):
        return (f'the evaluation at iteration {later[0]["iter"]} gives the same losses as that at '
                f'0, to the last digit ({first["train_loss"]}): no weight has moved',
                "see that the loop sets each group's learning rate and calls the optimizer's step")


def no_progress(rows, run):
    first, losses = first_loss(rows), late_losses(rows, run)
    if not run['from_scratch'] or first is None or len(losses) < 5:
        return None
    # The mean of five: a single lucky batch hardly lowers it.
    lowest = min(sum(losses[i:i + 5]) for i in range(len(losses) - 4)) / 5
    if first - lowest <= THRESHOLDS['progress']:
        return (f'after {rows[-1]["tokens"]:,} tokens the loss is {lowest:.2f} at best (a mean of '
                f'five lines), and it began at {first:.2f}',
                'raise learning_rate (try ×10), and see that targets are the next tokens')


def no_context(rows, run):
    unigram, losses = run['unigram_loss'], late_losses(rows, run)
    if unigram is None or not losses or no_progress(rows, run):
        return None
    recent = median(losses[-max(5, len(losses) // 4):])
    if -THRESHOLDS['context'] <= recent - unigram <= 3 * THRESHOLDS['context']:
        return (f'the loss stays at {recent:.2f}, and the frequencies of single tokens alone give '
                f'{unigram:.2f}: nothing is learned from context',
                'see that the targets are the inputs shifted by one, and that attention is causal; '
                'if they are, lower learning_rate or train longer')


def diverging(rows, run):
    remedy = f'lower learning_rate or lengthen warmup_iters ({run["config"]["warmup_iters"]} now)'
    first = first_loss(rows)
    early = [row for row in rows_with(rows, 'loss') if row['iter'] <= THRESHOLDS['early_steps']]
    if first is not None and len(early) > 1:
        # The lower of two lines in a row: a single batch may be an odd one.
        highest = max(pairwise(early), key=lambda pair: min(row['loss'] for row in pair))
        lower = min(highest, key=lambda row: row['loss'])
        if lower['loss'] >= first + THRESHOLDS['rise']:
            return (f'the loss rose from {first:.2f} to {lower["loss"]:.2f} at iteration '
                    f'{lower["iter"]}', remedy)
    # Later, evaluations count.
    evaluations = rows_with(rows, 'train_loss')
    if evaluations:
        lowest, last = min(evaluations, key=lambda row: row['train_loss']), evaluations[-1]
        if last['train_loss'] >= lowest['train_loss'] + THRESHOLDS['rise']:
            return (f'the training loss rose from {lowest["train_loss"]:.2f} at iteration '
                    f'{lowest["iter"]} to {last["train_loss"]:.2f} at iteration {last["iter"]}',
                    f'go back to --checkpoint=best and {remedy}')


# -----------------------------------------------------------------------------
# learning rate, gradients and numbers


def rate_high(rows, run):
    seen = updates(rows)
    if len(seen) < 2:
        return None
    row, highest = max(seen, key=lambda pair: pair[1])
    if highest > THRESHOLDS['update_high']:
        return (f'the step of iteration {row["iter"]} changed the weights by {highest:.0%} of '
                'their size, and 0.1% to 5% is usual',
                'lower learning_rate (try a tenth) or lengthen warmup_iters')


def rate_low(rows, run):
    seen = updates(rows)
    if len(seen) < 2 or not run['from_scratch'] or seen[-1][0]['iter'] <= warmup_iters(run):
        return None
    highest = max(ratio for _, ratio in seen)
    if highest < THRESHOLDS['update_low']:
        return (f'a step changes the weights by {highest:.1e} of their size at most, and about '
                '1e-3 is usual',
                'raise learning_rate (try ×10), and see that grad_clip is not tiny')


def rate_gone(rows, run):
    seen = rows_with(rows, 'lr')
    limit = THRESHOLDS['rate_gone'] * max(column(rows, 'lr'), default=0)
    last = max((row['iter'] for row in seen if row['lr'] > limit), default=warmup_iters(run))
    gone = [row for row in seen if row['iter'] > last]
    if gone and gone[0]['iter'] < 0.9 * run['config']['max_iters']:
        return (f'the learning rate is {gone[-1]["lr"]:.1e} since iteration {gone[0]["iter"]}',
                'set lr_decay_iters to max_iters, or min_lr to a tenth of learning_rate')


def clipped(rows, run):
    limit = run['config']['grad_clip']
    norms = column([row for row in rows if row['iter'] >= warmup_iters(run)], 'grad_norm')
    if limit and len(norms) >= 20 and median(norms) >= THRESHOLDS['clip'] * limit:
        return (f'gradients have a norm of {median(norms):.2g} and are cut to {limit:.2g} in '
                'nearly every step',
                'raise grad_clip (1.0 is usual), or lower learning_rate if the norm has grown')


def no_gradient(rows, run):
    seen = [norms for row in rows if (norms := block_values(row, 'grad_norm', ''))][-2:]
    tiny = []  # names of the blocks and embeddings without a gradient, of the last two health rows
    for norms in seen:
        blocks = {name: norm for name, norm in norms.items() if name.startswith('h.')}
        limit = THRESHOLDS['no_gradient'] * median(list(filter(None, blocks.values())) or [0])
        tiny.append({name for name, norm in norms.items() if norm <= limit * (name in blocks)})
    if len(tiny) == 2 and (names := sorted(tiny[0] & tiny[1])):
        return (f'the gradient of {", ".join(names)} is {seen[-1][names[0]]:.1g}, and the largest '
                f'{max(seen[-1].values()):.1g}', 'is it frozen, or cut off by a detach or a norm '
                'that has collapsed?')


def attention_logit(rows, run):
    largest, it, name = max(((value, row['iter'], name) for row in rows for name, value
                             in block_values(row, 'attention_logit').items()), default=(0, 0, ''))
    if largest >= THRESHOLDS['attention_logit']:
        return (f'the attention logits of {name} reached {largest:,.0f} at iteration {it}, and '
                'tens are usual: each position attends to a single token',
                'set qk_norm=True, or lower learning_rate')


def loss_scale(rows, run):
    seen = rows_with(rows, 'loss_scale')
    if seen and seen[-1]['loss_scale'] < THRESHOLDS['loss_scale']:
        return (f'float16 overflows: the loss scale is down to {seen[-1]["loss_scale"]:.2g} at '
                f'iteration {seen[-1]["iter"]}',
                'use dtype=bfloat16 or float32, or lower learning_rate')


# -----------------------------------------------------------------------------
# validation


def overfit(rows, run):
    seen = rows_with(rows, 'train_loss', 'val_loss')
    if not seen or overfits_on_purpose(run):
        return None
    best, last = min(seen, key=lambda row: row['val_loss']), seen[-1]
    after = [row for row in seen if row['iter'] > best['iter']]
    if len(after) >= THRESHOLDS['after_best'] and last['train_loss'] <= best['train_loss'] \
            and last['val_loss'] >= best['val_loss'] + THRESHOLDS['overfit']:
        return (f'validation rises since iteration {best["iter"]} (best {best["val_loss"]:.4f}, '
                f'now {last["val_loss"]:.4f}) while training falls to {last["train_loss"]:.4f}, '
                f'after {quote_epochs(epochs(run, last["tokens"]))}',
                'stop with --patience, or use more text, a larger weight_decay, more dropout or a '
                'smaller model; --checkpoint=best has the best weights')


def implausible(rows, run):
    bits, size = column(rows, 'val_bpb')[-1:], run.get('train_bytes_per_token')
    losses = column(rows, 'loss')[-5:]
    if len(losses) == 5 and size and run['from_scratch'] and not overfits_on_purpose(run) \
            and max(epochs(run, rows[-1]['tokens']).values()) <= 1:
        bits.append(median(losses) / math.log(2) / size)
    if bits and min(bits) < THRESHOLDS['implausible']:
        return (f'{min(bits):.2f} bits a byte are too few for text that was not seen before: '
                'English has 0.6 to 1.3',
                'do targets or attention show the token to predict? does the text repeat itself, '
                'or the loader return the same sequences again?')


def overlap(rows, run):
    share = run.get('val_in_train') or 0
    if share > THRESHOLDS['overlap']:
        return (f'{share:.0%} of the validation sequences are in the training split too',
                'remove duplicates and prepare the text again: this loss measures memory')


# -----------------------------------------------------------------------------
# data


def changed_data(rows, run):
    if run.get('changed_data'):
        return (f'the run began with other data: {run["changed_data"]}',
                'give it the files that it had, or start a new run from its weights')


def data_wait(rows, run):
    shares = column(rows, 'data_wait')
    recent = shares[len(shares) // 2:]
    if len(shares) >= 10 and median(recent) >= THRESHOLDS['data_wait']:
        return (f'{median(recent):.0%} of the time training waits for batches',
                'put data/ on a faster disk, or free memory for it')


CHECKS = (initial_loss, unmoved, no_progress, no_context, diverging,
          rate_high, rate_low, rate_gone, clipped, no_gradient, attention_logit, loss_scale,
          overfit, implausible, overlap, changed_data, data_wait)


def overfit_check(rows, run):
    """What a run with check=overfit shows, in a sentence, or None."""
    seen = rows_with(rows, 'train_loss')
    if not overfits_on_purpose(run) or len(seen) < 2:
        return None
    limit = THRESHOLDS['overfit_check'] * math.log(run['vocab_size'])
    first, last = seen[0]['train_loss'], seen[-1]['train_loss']
    what = f'check=overfit: the loss went from {first:.3f} to {last:.3f} in ' \
           f'{seen[-1]["iter"]} iterations'
    if last < limit:
        return f'{what}, near zero as it should: model, loss and optimizer can learn'
    return (f'{what}, and should come under {limit:.2f}: train longer, with dropout=0 and a higher '
            'learning_rate; if it still does not, something is broken')
