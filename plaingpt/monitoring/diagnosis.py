"""What looks wrong with a run, in words, from the numbers it wrote: no model, no device, no torch.

Each check is a function (rows, run, ended) → Diagnosis or None and an entry in CHECKS. `rows` are
those of metrics.jsonl, `run` is run.json (run_record.describe_run), and `ended` says that no more
rows will come. A check returns None where it has too few rows to judge: a false alarm costs more
than a late one.
"""

import math
from dataclasses import dataclass
from statistics import median

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
    # nats below the entropy of single tokens (Shannon 1951, F1), which a model reaches without
    # context
    'context': 0.1,
    # nats above the first loss within the first `early_steps`: ours never rise by 0.1
    'first_rise': 0.5,
    # update / weight in a step: about 1e-3 is healthy (Karpathy 2022, makemore part 3), and early
    # on weights of 0.02 change by up to 5e-2. A rate that is too high makes the weights grow soon
    # after warmup: ours have grown to 1.5 to 3.2 times their first size
    'growth': 8.0,
    'update_high': 1.0,
    'update_low': 3e-4,
    # gradient norm / median of the 50 logged before it, and how often it is so high: harmful spikes
    # are rare and 10 and more times as high (PaLM, §5.1; Takase et al. 2023, Spike No More)
    'spike': 10.0,
    'spikes': 3,
    # median gradient norm of the last fifth / that of the fifth after warmup: ours grow to 2.1
    'climb': 5.0,
    # median gradient norm / grad_clip: the limit should be half to ten times the usual norm
    # (Pascanu et al. 2013, §3.2)
    'clip': 20.0,
    # a block's gradient norm / the median of all blocks
    'dying': 1e-3,
    # steps that a weight remembers under decay, 1/(rate · weight_decay) (Wang and Aitchison 2024,
    # How to set AdamW's weight decay): ours remember 3,000 and more
    'memory': 300,
    # nats that validation rises over its best, in at least `after_best` evaluations
    'overfit': 0.05,
    'after_best': 2,
    # share that neither loss falls by over the last third, while the rate is above half its highest
    'flat': 0.002,
    # share of the time spent waiting for batches
    'data_wait': 0.25,
    # loss scale: below 1 the gradients overflow without any scaling (PyTorch, docs of GradScaler)
    'loss_scale': 1.0,
    # tokens for each parameter: 20 are compute-optimal (Hoffmann et al. 2022); this is a hundredth
    'tokens_per_parameter': 0.2,
    # share of ln(vocab) that the loss on a few batches falls below (Karpathy 2019, see above)
    'overfit_check': 0.05,
}


@dataclass(frozen=True)
class Diagnosis:
    """Something that looks wrong: what the numbers show, and what to do."""

    name: str
    evidence: str
    remedy: str

    def __str__(self):
        return f'{self.evidence}; {self.remedy}'


def diagnose(rows, run, ended=False):
    """→ [Diagnosis], each check's at most once."""
    return [found for check in CHECKS if (found := check(rows, run, ended))]


# -----------------------------------------------------------------------------
# reading rows


def column(rows, key):
    """[(iteration, value)] where a row has a value of `key`."""
    return [(row['iter'], row[key]) for row in rows if row.get(key) is not None]


def values(rows, key):
    return [value for _, value in column(rows, key)]


def evaluated(rows):
    """The rows of evaluations, with the losses of both splits."""
    return [row for row in rows if row.get('val_loss') is not None
            and row.get('train_loss') is not None]


def block_values(row, measure):
    """{'h.0': value, …} of a health row: of the blocks, without the embeddings."""
    prefix = f'health/{measure}/h.'
    return {key.rpartition('/')[2]: value for key, value in row.items()
            if key.startswith(prefix) and value is not None}


def first_loss(rows):
    """The loss of the weights that the run began with, or None where it was not measured."""
    return next((row.get('train_loss') or row.get('loss') for row in rows if row['iter'] <= 1
                 and (row.get('train_loss') or row.get('loss'))), None)


def smooth(points, n=5):
    """Means of n neighbours, which a single lucky batch hardly lowers: [(iteration, value)]."""
    return [(points[i][0], sum(value for _, value in points[i - n + 1:i + 1]) / n)
            for i in range(n - 1, len(points))]


def warmup_iters(run):
    """Iterations of warmup; decay_lr=False has none."""
    return run['config']['warmup_iters'] if run['config']['decay_lr'] else 0


def warmed_up(rows, run):
    """The rows from the end of warmup on."""
    return [row for row in rows if row['iter'] >= warmup_iters(run)]


def is_late(points, run):
    """True where [(iteration, value)] reach past the early steps after warmup."""
    return bool(points) and points[-1][0] >= warmup_iters(run) + THRESHOLDS['early_steps']


# -----------------------------------------------------------------------------
# the start


def initial_loss(rows, run, ended):
    first, expected = first_loss(rows), math.log(run['vocab_size'])
    if first is None:
        return None
    uniform = f'a model that knows nothing has ln({run["vocab_size"]}) = {expected:.2f}'
    if not run['from_scratch'] and first > expected:
        return Diagnosis('initial_loss', f'the weights it began with have a loss of {first:.2f}, '
                         f'and {uniform}', 'was this text prepared with their tokenizer?')
    if run['from_scratch'] and abs(first - expected) > THRESHOLDS['initial_loss'] \
            + THRESHOLDS['initial_loss_per_channel'] * run['config']['n_embd']:
        return Diagnosis('initial_loss', f'the first loss is {first:.2f}, but {uniform}',
                         'look at the initialisation, and at targets and vocabulary')


def no_progress(rows, run, ended):
    first, points = first_loss(rows), smooth(column(rows, 'loss'))
    if not run['from_scratch'] or first is None or not is_late(points, run):
        return None
    lowest = min(value for _, value in points)
    if first - lowest <= THRESHOLDS['progress']:
        return Diagnosis('no_progress', f'after {rows[-1]["tokens"]:,} tokens the loss is '
                         f'{lowest:.2f} at best (a mean of five lines), and it began at '
                         f'{first:.2f}',
                         'raise learning_rate (try ×10), and see that targets are the next tokens')


def no_context(rows, run, ended):
    unigram, points = run['unigram_loss'], column(rows, 'loss')
    if unigram is None or not is_late(points, run) or no_progress(rows, run, ended):
        return None
    recent = median(value for _, value in points[-max(5, len(points) // 4):])
    if -THRESHOLDS['context'] <= recent - unigram <= 3 * THRESHOLDS['context']:
        return Diagnosis('no_context', f'the loss stays at {recent:.2f}, and the frequencies of '
                         f'single tokens alone give {unigram:.2f}: nothing is learned from context',
                         'see that the targets are the inputs shifted by one, and that attention '
                         'is causal; if they are, lower learning_rate or train longer')


def first_rise(rows, run, ended):
    first = first_loss(rows)
    points = [(it, loss) for it, loss in column(rows, 'loss') if it <= THRESHOLDS['early_steps']]
    if first is None or not points:
        return None
    it, highest = max(points, key=lambda point: point[1])
    if highest - first >= THRESHOLDS['first_rise']:
        return Diagnosis('first_rise', f'the loss rose from {first:.2f} to {highest:.2f} at '
                         f'iteration {it}', f'lengthen warmup_iters '
                         f'({run["config"]["warmup_iters"]} now) or lower learning_rate')


# -----------------------------------------------------------------------------
# gradients and updates


def update_size(rows, run, ended):
    seen = [(row, median(found.values())) for row in rows
            if (found := block_values(row, 'update_ratio'))]
    if len(seen) < 2:
        return None
    row, highest = max(seen, key=lambda pair: pair[1])
    if highest > THRESHOLDS['update_high']:
        return Diagnosis('rate_high', f'the step of iteration {row["iter"]} changed the weights by '
                         f'{highest:.0%} of their size, and 0.1% to 5% is usual',
                         'lower learning_rate (try a tenth) or lengthen warmup_iters')
    first = block_values(seen[0][0], 'weight_norm')
    if run['from_scratch'] and seen[0][0]['iter'] == 1 and any(first.values()):
        for row, _ in seen:
            now = block_values(row, 'weight_norm')
            growth = median(now.get(name, norm) / norm for name, norm in first.items() if norm)
            if row['iter'] <= warmup_iters(run) + THRESHOLDS['early_steps'] \
                    and growth > THRESHOLDS['growth']:
                return Diagnosis('rate_high', f'by iteration {row["iter"]} the weights have grown '
                                 f'to {growth:.0f} times their size, and twice is usual',
                                 'lower learning_rate (try a tenth)')
    if highest < THRESHOLDS['update_low'] and run['from_scratch'] \
            and seen[-1][0]['iter'] > warmup_iters(run):
        return Diagnosis('rate_low', f'a step changes the weights by {highest:.1e} of their size '
                         'at most, and about 1e-3 is usual',
                         'raise learning_rate (try ×10), and see that grad_clip is not tiny')


def spikes(rows, run, ended):
    points = column(warmed_up(rows, run), 'grad_norm')
    usual = [median(value for _, value in points[i - 50:i]) for i in range(50, len(points))]
    found = [(it, norm / level) for (it, norm), level in zip(points[50:], usual, strict=True)
             if level and norm > THRESHOLDS['spike'] * level]
    if len(found) >= THRESHOLDS['spikes']:
        it, times = max(found, key=lambda point: point[1])
        return Diagnosis('spikes', f'{len(found)} gradient norms were over '
                         f'{THRESHOLDS["spike"]:.0f} times their usual, the highest {times:.0f} '
                         f'times at iteration {it}',
                         'lower learning_rate or beta2, lengthen warmup_iters, and see that '
                         'grad_clip is on')


def climb(rows, run, ended):
    norms = values(warmed_up(rows, run), 'grad_norm')
    if len(norms) < 50:
        return None
    fifth = len(norms) // 5
    early, late = median(norms[:fifth]), median(norms[-fifth:])
    if late >= THRESHOLDS['climb'] * early:
        return Diagnosis('climb', f'the gradient norm has climbed from {early:.2g} to {late:.2g}',
                         'lower learning_rate before the loss follows; weight_decay or qk_norm '
                         'hold weights down')


def clipped(rows, run, ended):
    limit, norms = run['config']['grad_clip'], values(warmed_up(rows, run), 'grad_norm')
    if limit and len(norms) >= 20 and median(norms) >= THRESHOLDS['clip'] * limit:
        return Diagnosis('clipped', f'gradients have a norm of {median(norms):.2g} and are cut to '
                         f'{limit:.2g} in nearly every step', 'raise grad_clip (1.0 is usual), or '
                         'lower learning_rate if the norm has grown')


def dying(rows, run, ended):
    seen = [found for row in rows if len(found := block_values(row, 'grad_norm')) > 1]
    tiny = [{name for name, norm in found.items()
             if norm <= THRESHOLDS['dying'] * median(found.values()) > 0} for found in seen[-2:]]
    names = sorted(tiny[0] & tiny[1]) if len(tiny) == 2 else []
    if names:
        return Diagnosis('dying', f'the gradient of {", ".join(names)} is '
                         f'{seen[-1][names[0]]:.1e}, that of other blocks '
                         f'{median(seen[-1].values()):.1e}',
                         'is it frozen, or cut off by a detach or a norm that has collapsed?')


def forgetting(rows, run, ended):
    decay = run['config']['weight_decay']
    rate = max(values(rows, 'lr'), default=0)
    if rate * decay * THRESHOLDS['memory'] < 1 or update_size(rows, run, ended):
        return None
    usual = 1e-4 if run['config'].get('optimizer') == 'sgd' else 0.1
    remedy = 'lower learning_rate (try a tenth)' if decay <= usual else \
        f'lower weight_decay ({decay:g} now; {usual:g} is usual)'
    return Diagnosis('forgetting', f'weight decay takes {min(1, rate * decay):.1%} of the weights '
                     f'in each step, so they remember {1 / (rate * decay):.0f} steps', remedy)


# -----------------------------------------------------------------------------
# validation


def foreign_validation(rows, run, ended):
    evaluations = evaluated(rows)
    if len(evaluations) < 2 or run['config']['overfit_batches']:
        return None
    first, last = evaluations[0], evaluations[-1]
    if last['tokens'] <= 2 * run['train_tokens'] \
            and last['train_loss'] <= first['train_loss'] - THRESHOLDS['first_rise'] \
            and min(row['val_loss'] for row in evaluations[1:]) >= first['val_loss'] - 0.1:
        return Diagnosis('foreign_validation', f'training has brought the loss from '
                         f'{first["train_loss"]:.2f} to {last["train_loss"]:.2f}, and validation '
                         f'from {first["val_loss"]:.2f} to {last["val_loss"]:.2f}',
                         'is val.bin of the same tokenizer and kind of text as train.bin? python '
                         'prepare.py inspect shows both')


def overfit(rows, run, ended):
    evaluations = evaluated(rows)
    if not evaluations or run['config']['overfit_batches'] or foreign_validation(rows, run, ended):
        return None
    best, last = min(evaluations, key=lambda row: row['val_loss']), evaluations[-1]
    after = [row for row in evaluations if row['iter'] > best['iter']]
    if len(after) >= THRESHOLDS['after_best'] and last['train_loss'] <= best['train_loss'] \
            and last['val_loss'] >= best['val_loss'] + THRESHOLDS['overfit']:
        return Diagnosis('overfit', f'validation rises since iteration {best["iter"]} (best '
                         f'{best["val_loss"]:.4f}, now {last["val_loss"]:.4f}) while training '
                         f'falls to {last["train_loss"]:.4f}, after '
                         f'{last["tokens"] / run["train_tokens"]:.3g} epochs',
                         'stop with --patience, or use more text, more dropout or a smaller model; '
                         '--checkpoint=best has the best weights')


def flat(rows, run, ended):
    evaluations = [row for row in evaluated(rows) if row['iter'] > 0]
    rates = values(rows, 'lr')
    third = len(evaluations) // 3
    if third < 2 or not rates or rates[-1] < max(rates) / 2 or run['config']['overfit_batches'] \
            or overfit(rows, run, ended) or foreign_validation(rows, run, ended):
        return None
    before, after, last = evaluations[:-third], evaluations[-third:], evaluations[-1]
    lows = [[min(row[key] for row in part) for part in (before, after)]
            for key in ('train_loss', 'val_loss')]
    if all((early - late) / early <= THRESHOLDS['flat'] for early, late in lows):
        return Diagnosis('flat', f'since iteration {before[-1]["iter"]} neither loss has fallen '
                         f'(training {last["train_loss"]:.4f}, validation {last["val_loss"]:.4f})',
                         'let the learning rate decay; if it is low already, the model is too '
                         'small for this text, or the text has no more to teach')


# -----------------------------------------------------------------------------
# machine and budget


def data_wait(rows, run, ended):
    shares = values(rows, 'data_wait')
    recent = shares[len(shares) // 2:]
    if len(shares) >= 10 and median(recent) >= THRESHOLDS['data_wait']:
        return Diagnosis('data_wait', f'{median(recent):.0%} of the time training waits for '
                         'batches', 'set data_in_ram=True, or put data/ on a faster disk')


def loss_scale(rows, run, ended):
    scales = column(rows, 'loss_scale')
    if scales and scales[-1][1] < THRESHOLDS['loss_scale']:
        return Diagnosis('loss_scale', f'float16 overflows: the loss scale is down to '
                         f'{scales[-1][1]:.2g} at iteration {scales[-1][0]}',
                         'use dtype=bfloat16 or float32, or lower learning_rate')


def budget(rows, run, ended):
    if not ended or not rows or rows[-1]['iter'] < THRESHOLDS['early_steps'] \
            or not run['from_scratch'] or run['config']['overfit_batches']:
        return None
    seen = rows[-1]['tokens'] / run['parameters']
    if seen <= THRESHOLDS['tokens_per_parameter']:
        return Diagnosis('budget', f'it ended after {seen:.2g} tokens for each parameter, and '
                         'about 20 are compute-optimal (Hoffmann et al. 2022)', 'a smaller model '
                         'would be better after the same time, or this one after more')


CHECKS = (initial_loss, no_progress, no_context, first_rise, update_size, spikes, climb, clipped,
          dying, forgetting, foreign_validation, overfit, flat, data_wait, loss_scale, budget)


def overfit_check(rows, run):
    """What a run with overfit_batches shows, in a sentence, or None."""
    losses = column(rows, 'train_loss')
    n = run['config']['overfit_batches']
    if not n or len(losses) < 2:
        return None
    limit = THRESHOLDS['overfit_check'] * math.log(run['vocab_size'])
    (_, first), (it, last) = losses[0], losses[-1]
    what = f'overfit_batches={n}: the loss went from {first:.3f} to {last:.3f} in {it} iterations'
    if last < limit:
        return f'{what}, near zero as it should: model, loss and optimizer can learn'
    return (f'{what}, and should come under {limit:.2f}: train longer, with dropout=0 and a higher '
            'learning_rate; if it still does not, something is broken')
