"""What looks wrong with a run, in words, from the numbers it wrote: no model, no device, no torch.

Each check is a function (rows, run, ended) → (evidence, remedy) or None and an entry in CHECKS:
`rows` of metrics.jsonl, `run` of run.json, `ended` where no more rows will come. A check returns
None where it has too few rows to judge: a false alarm costs more than a late one.
"""

import math
from dataclasses import dataclass
from statistics import mean, median, stdev

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
    # largest attention logit: the softmax has become a choice of one token, and training may
    # diverge (Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy
    # Collapse; Kimi Team 2025, Kimi K2, §2.1, names 1,000). Ours reach 29
    'attention_logit': 1000.0,
    'no_gradient': 1e-3,  # a block's gradient norm / the median of the blocks that have one
    # learning rate / its highest, with more than a tenth of the run left
    'rate_gone': 1e-3,
    # steps that a weight remembers under decay, 1/(rate · weight_decay) (Wang and Aitchison 2024,
    # How to set AdamW's weight decay): ours remember 3,000 and more
    'memory': 300,
    # nats that the last `batches` logged losses or more lie below every evaluation of the training
    # split, beyond five errors of their mean: ours never do
    'batches': 5,
    'too_easy': 0.1,
    # nats below the entropy of single tokens, of the lowest of these losses / of the evaluated
    # training split, where that has `learned` so many: ours have 0.9 and more of them
    'too_hard': 0.5,
    'learned': 0.5,
    # validation loss / training loss
    'easy_validation': 0.7,
    # bits a byte: English has 0.6 to 1.3 (Shannon 1951; Cover and King 1978)
    'implausible': 0.3,
    'overlap': 0.1,  # share of validation that is also in the training split
    # nats that validation rises over its best, in at least `after_best` evaluations
    'overfit': 0.05,
    'after_best': 2,
    # nats that the loss on the text of also_evaluate rises: a third of what GPT-2 gains from 124M
    # to 355M parameters (3.12 to 2.84 on OpenWebText: README of nanoGPT). It is measured on the
    # same sequences each time, so chance hardly moves it
    'forgotten': 0.1,
    # share that neither loss falls by over the last third, while the rate is above half its highest
    'flat': 0.002,
    'data_wait': 0.25,  # share of the time spent waiting for batches
    # loss scale: below 1 the gradients overflow without any scaling (PyTorch, docs of GradScaler)
    'loss_scale': 1.0,
    # tokens for each parameter: 20 are compute-optimal (Hoffmann et al. 2022); this is a hundredth
    'tokens_per_parameter': 0.2,
    # share of ln(vocab) that the loss on a few batches falls below (Karpathy 2019)
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
    return [Diagnosis(check.__name__, *found) for check in CHECKS
            if (found := check(rows, run, ended))]


# -----------------------------------------------------------------------------
# reading rows


def block_values(row, measure, prefix='h.'):
    """{'h.0': value, …} of a health row: of the blocks; prefix='': also of the embeddings."""
    return {key.rpartition('/')[2]: value for key, value in row.items()
            if key.startswith(f'health/{measure}/{prefix}') and value is not None}


def last_batches(rows):
    """The losses logged between the last two evaluations, at least the last five, or []."""
    evaluations = [i for i, row in enumerate(rows) if row.get('train_loss') is not None]
    begin, end = [0, 0, *evaluations][-2:]
    losses = column(rows[:end], 'loss')
    n = max(THRESHOLDS['batches'], len(column(rows[begin:end], 'loss')))
    return losses[-n:] if len(losses) >= n else []


def updates(rows):
    """[(row, median update / weight of its blocks)] of the health rows."""
    return [(row, median(ratios.values())) for row in rows
            if (ratios := block_values(row, 'update_ratio'))]


def gradients(rows):
    """[{'h.0': norm, 'wte': …}] of the last two health rows."""
    return [norms for row in rows if (norms := block_values(row, 'grad_norm', ''))][-2:]


def first_loss(rows):
    """The loss of the weights that the run began with, or None where it was not measured."""
    losses = (row.get('train_loss') or row.get('loss') for row in rows if row['iter'] <= 1)
    return next(filter(None, losses), None)


def warmup_iters(run):
    """Iterations of warmup; decay_lr=False has none."""
    return run['config']['warmup_iters'] if run['config']['decay_lr'] else 0


def warmed_up(rows, run):
    """The rows from the end of warmup on."""
    return [row for row in rows if row['iter'] >= warmup_iters(run)]


def late_losses(rows, run):
    """The logged losses, or [] before they reach past the early steps after warmup."""
    rows = rows_with(rows, 'loss')
    is_late = rows and rows[-1]['iter'] >= warmup_iters(run) + THRESHOLDS['early_steps']
    return column(rows, 'loss') if is_late else []


# -----------------------------------------------------------------------------
# the start


def initial_loss(rows, run, ended):
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


def no_progress(rows, run, ended):
    first, losses = first_loss(rows), late_losses(rows, run)
    if not run['from_scratch'] or first is None or len(losses) < 5:
        return None
    # The mean of five: a single lucky batch hardly lowers it.
    lowest = min(sum(losses[i:i + 5]) for i in range(len(losses) - 4)) / 5
    if first - lowest <= THRESHOLDS['progress']:
        return (f'after {rows[-1]["tokens"]:,} tokens the loss is {lowest:.2f} at best (a mean of '
                f'five lines), and it began at {first:.2f}',
                'raise learning_rate (try ×10), and see that targets are the next tokens')


def no_context(rows, run, ended):
    unigram, losses = run['unigram_loss'], late_losses(rows, run)
    if unigram is None or not losses or no_progress(rows, run, ended):
        return None
    recent = median(losses[-max(5, len(losses) // 4):])
    if -THRESHOLDS['context'] <= recent - unigram <= 3 * THRESHOLDS['context']:
        return (f'the loss stays at {recent:.2f}, and the frequencies of single tokens alone give '
                f'{unigram:.2f}: nothing is learned from context',
                'see that the targets are the inputs shifted by one, and that attention is causal; '
                'if they are, lower learning_rate or train longer')


def first_rise(rows, run, ended):
    first = first_loss(rows)
    early = [row for row in rows_with(rows, 'loss') if row['iter'] <= THRESHOLDS['early_steps']]
    if first is None or not early:
        return None
    highest = max(early, key=lambda row: row['loss'])
    if highest['loss'] - first >= THRESHOLDS['first_rise']:
        return (f'the loss rose from {first:.2f} to {highest["loss"]:.2f} at iteration '
                f'{highest["iter"]}', f'lengthen warmup_iters ({run["config"]["warmup_iters"]} '
                'now) or lower learning_rate')


# -----------------------------------------------------------------------------
# gradients and updates


def rate_high(rows, run, ended):
    seen = updates(rows)
    if len(seen) < 2:
        return None
    row, highest = max(seen, key=lambda pair: pair[1])
    if highest > THRESHOLDS['update_high']:
        return (f'the step of iteration {row["iter"]} changed the weights by {highest:.0%} of '
                'their size, and 0.1% to 5% is usual',
                'lower learning_rate (try a tenth) or lengthen warmup_iters')
    first = block_values(seen[0][0], 'weight_norm')
    if not run['from_scratch'] or seen[0][0]['iter'] != 1 or not any(first.values()):
        return None
    for row, _ in seen:
        now = block_values(row, 'weight_norm')
        growth = median(now.get(name, norm) / norm for name, norm in first.items() if norm)
        if row['iter'] <= warmup_iters(run) + THRESHOLDS['early_steps'] \
                and growth > THRESHOLDS['growth']:
            return (f'by iteration {row["iter"]} the weights have grown to {growth:.0f} times '
                    'their size, and twice is usual', 'lower learning_rate (try a tenth)')


def rate_low(rows, run, ended):
    seen = updates(rows)
    if len(seen) < 2 or not run['from_scratch'] or seen[-1][0]['iter'] <= warmup_iters(run):
        return None
    highest = max(ratio for _, ratio in seen)
    if highest < THRESHOLDS['update_low'] and not rate_high(rows, run, ended):
        return (f'a step changes the weights by {highest:.1e} of their size at most, and about '
                '1e-3 is usual',
                'raise learning_rate (try ×10), and see that grad_clip is not tiny')


def spikes(rows, run, ended):
    rows = rows_with(warmed_up(rows, run), 'grad_norm')
    norms, found = column(rows, 'grad_norm'), []  # found: [(iteration, times the usual norm)]
    for i in range(50, len(rows)):
        usual = median(norms[i - 50:i])
        if usual and norms[i] > THRESHOLDS['spike'] * usual:
            found.append((rows[i]['iter'], norms[i] / usual))
    if len(found) >= THRESHOLDS['spikes']:
        it, times = max(found, key=lambda pair: pair[1])
        return (f'{len(found)} gradient norms were over {THRESHOLDS["spike"]:.0f} times their '
                f'usual, the highest {times:.0f} times at iteration {it}',
                'lower learning_rate or beta2, lengthen warmup_iters, and see that grad_clip is on')


def climb(rows, run, ended):
    norms = column(warmed_up(rows, run), 'grad_norm')
    if len(norms) < 50:
        return None
    fifth = len(norms) // 5
    early, late = median(norms[:fifth]), median(norms[-fifth:])
    if late >= THRESHOLDS['climb'] * early:
        return (f'the gradient norm has climbed from {early:.2g} to {late:.2g}',
                'lower learning_rate before the loss follows; weight_decay or qk_norm hold weights '
                'down')


def rate_gone(rows, run, ended):
    seen = rows_with(rows, 'lr')
    limit = THRESHOLDS['rate_gone'] * max(column(rows, 'lr'), default=0)
    last = max((row['iter'] for row in seen if row['lr'] > limit), default=warmup_iters(run))
    gone = [row for row in seen if row['iter'] > last]
    if gone and gone[0]['iter'] < 0.9 * run['config']['max_iters']:
        return (f'the learning rate is {gone[-1]["lr"]:.1e} since iteration {gone[0]["iter"]}',
                'set lr_decay_iters to max_iters, or min_lr to a tenth of learning_rate')


def clipped(rows, run, ended):
    limit, norms = run['config']['grad_clip'], column(warmed_up(rows, run), 'grad_norm')
    if limit and len(norms) >= 20 and median(norms) >= THRESHOLDS['clip'] * limit:
        return (f'gradients have a norm of {median(norms):.2g} and are cut to {limit:.2g} in '
                'nearly every step',
                'raise grad_clip (1.0 is usual), or lower learning_rate if the norm has grown')


def no_gradient(rows, run, ended):
    seen, tiny = gradients(rows), []
    for norms in seen:
        blocks = {name: norm for name, norm in norms.items() if name.startswith('h.')}
        limit = THRESHOLDS['no_gradient'] * median(list(filter(None, blocks.values())) or [0])
        tiny.append({name for name, norm in norms.items() if norm <= limit * (name in blocks)})
    if len(tiny) == 2 and (names := sorted(tiny[0] & tiny[1])):
        return (f'the gradient of {", ".join(names)} is {seen[-1][names[0]]:.1g}, and the largest '
                f'{max(seen[-1].values()):.1g}', 'is it frozen, or cut off by a detach or a norm '
                'that has collapsed?')


def same_gradient(rows, run, ended):
    seen = gradients(rows)
    if len(seen) == 2 and seen[0] == seen[1] and any(seen[0].values()):
        return ('all gradients have the norms of the look before',
                'see that each step has a batch of its own, calls backward and moves the weights')


def attention_logit(rows, run, ended):
    largest, it, name = max(((value, row['iter'], name) for row in rows for name, value
                             in block_values(row, 'attention_logit').items()), default=(0, 0, ''))
    if largest >= THRESHOLDS['attention_logit']:
        return (f'the attention logits of {name} reached {largest:,.0f} at iteration {it}, and '
                'tens are usual: each position attends to a single token',
                'set qk_norm=True, or lower learning_rate')


def short_memory(rows, run, ended):
    decay = run['config']['weight_decay']
    share = max(column(rows, 'lr'), default=0) * decay  # of a weight, lost in a step
    if share * THRESHOLDS['memory'] < 1 \
            or rate_high(rows, run, ended) or rate_low(rows, run, ended):
        return None
    usual = 1e-4 if run['config'].get('optimizer') == 'sgd' else 0.1
    return (f'weight decay takes {min(1, share):.1%} of the weights in each step, so they remember '
            f'{1 / share:.0f} steps',
            'lower learning_rate (try a tenth)' if decay <= usual else
            f'lower weight_decay ({decay:g} now; {usual:g} is usual)')


# -----------------------------------------------------------------------------
# validation


def foreign_validation(rows, run, ended):
    seen = rows_with(rows, 'train_loss', 'val_loss')
    if len(seen) < 2 or run['config']['overfit_batches']:
        return None
    first, last = seen[0], seen[-1]
    if max(epochs(run, last['tokens']).values()) <= 2 \
            and last['train_loss'] <= first['train_loss'] - THRESHOLDS['first_rise'] \
            and min(column(seen[1:], 'val_loss')) >= first['val_loss'] - 0.1:
        return (f'training has brought the loss from {first["train_loss"]:.2f} to '
                f'{last["train_loss"]:.2f}, and validation from {first["val_loss"]:.2f} to '
                f'{last["val_loss"]:.2f}',
                'is val.bin of the same tokenizer and kind of text as train.bin? python prepare.py '
                'inspect shows both')


def forgetting(rows, run, ended):
    name = run['config'].get('also_evaluate')
    losses = column(rows, f'val_loss/{name}')
    if losses and not run['from_scratch'] and not run['config']['overfit_batches'] \
            and losses[-1] - losses[0] >= THRESHOLDS['forgotten']:
        mix = ', or mix that text in, as with --dataset=NEW:0.9,OLD:0.1'
        return (f'it forgets: the loss on {name} rose from {losses[0]:.2f} to {losses[-1]:.2f}',
                'lower learning_rate or max_iters'
                + mix * (run['data']['tokenizer'] != 'chat'))  # conversations are in no mixture


def overfit(rows, run, ended):
    seen = rows_with(rows, 'train_loss', 'val_loss')
    if not seen or run['config']['overfit_batches'] or foreign_validation(rows, run, ended):
        return None
    best, last = min(seen, key=lambda row: row['val_loss']), seen[-1]
    after = [row for row in seen if row['iter'] > best['iter']]
    if len(after) >= THRESHOLDS['after_best'] and last['train_loss'] <= best['train_loss'] \
            and last['val_loss'] >= best['val_loss'] + THRESHOLDS['overfit']:
        return (f'validation rises since iteration {best["iter"]} (best {best["val_loss"]:.4f}, '
                f'now {last["val_loss"]:.4f}) while training falls to {last["train_loss"]:.4f}, '
                f'after {quote_epochs(epochs(run, last["tokens"]))}',
                'stop with --patience, or use more text, more dropout or a smaller model; '
                '--checkpoint=best has the best weights')


def flat(rows, run, ended):
    seen = [row for row in rows_with(rows, 'train_loss', 'val_loss') if row['iter'] > 0]
    rates, third = column(rows, 'lr'), len(seen) // 3
    if third < 2 or not rates or rates[-1] < max(rates) / 2 or run['config']['overfit_batches'] \
            or overfit(rows, run, ended) or foreign_validation(rows, run, ended):
        return None
    before, after, last = seen[:-third], seen[-third:], seen[-1]
    lows = [(min(column(before, key)), min(column(after, key)))
            for key in ('train_loss', 'val_loss')]
    if all((early - late) / early <= THRESHOLDS['flat'] for early, late in lows):
        return (f'since iteration {before[-1]["iter"]} neither loss has fallen (training '
                f'{last["train_loss"]:.4f}, validation {last["val_loss"]:.4f})',
                'let the learning rate decay; if it is low already, the model is too small for '
                'this text, or the text has no more to teach')


def easy_validation(rows, run, ended):
    seen = [row for row in rows_with(rows, 'train_loss', 'val_loss') if row['iter']]
    if seen and seen[-1]['val_loss'] <= THRESHOLDS['easy_validation'] * seen[-1]['train_loss'] \
            and not implausible(rows, run, ended):
        return (f'the validation loss ({seen[-1]["val_loss"]:.4f}) is far below that of training '
                f'({seen[-1]["train_loss"]:.4f})',
                'does validation repeat itself, or is it text of another kind?')


# -----------------------------------------------------------------------------
# batches, data, machine and budget


def batches_too_easy(rows, run, ended):
    losses, dropout = last_batches(rows), run['config'].get('dropout', 0)
    if not losses or run['config']['overfit_batches']:
        return None
    lowest, error = min(column(rows, 'train_loss')), stdev(losses) / len(losses)**0.5
    if lowest - mean(losses) >= THRESHOLDS['too_easy'] + 5 * error:
        return (f'the last {len(losses)} logged batches have a loss of {mean(losses):.2f}, and the '
                f'training split never had less than {lowest:.2f} when it was evaluated',
                f'lower dropout ({dropout:g} now): without it the model is another'
                if dropout > 0.5 else 'does the loader return the same sequences again and again?')


def batches_too_hard(rows, run, ended):
    losses, unigram = last_batches(rows)[-THRESHOLDS['batches']:], run['unigram_loss']
    if not losses or unigram is None:
        return None
    learned, seen = (unigram - loss for loss in (column(rows, 'train_loss')[-1], min(losses)))
    if learned >= THRESHOLDS['learned'] and seen < THRESHOLDS['too_hard'] * learned:
        return (f'logged batches have a loss of {min(losses):.2f} at best, and the training split '
                f'has {unigram - learned:.2f} when it is evaluated',
                'see what only training does to targets or to the model; is dropout too high?')


def implausible(rows, run, ended):
    bits, size = column(rows, 'val_bpb')[-1:], run.get('train_bytes_per_token')
    losses = last_batches(rows)[-THRESHOLDS['batches']:]
    if losses and size and run['from_scratch'] and not run['config']['overfit_batches'] \
            and max(epochs(run, rows[-1]['tokens']).values()) <= 1:
        bits.append(median(losses) / math.log(2) / size)
    if bits and min(bits) < THRESHOLDS['implausible'] and not batches_too_easy(rows, run, ended):
        return (f'{min(bits):.2f} bits a byte are too few for text that was not seen before: '
                'English has 0.6 to 1.3',
                'do targets or attention show the token to predict? does the text repeat itself?')


def overlap(rows, run, ended):
    share = run.get('val_in_train') or 0
    if share > THRESHOLDS['overlap']:
        return (f'{share:.0%} of the validation sequences are in the training split too',
                'remove duplicates and prepare the text again: this loss measures memory')


def changed_data(rows, run, ended):
    if run.get('changed_data'):
        return (f'the run began with other data: {run["changed_data"]}',
                'give it the files that it had, or start a new run from its weights')


def data_wait(rows, run, ended):
    shares = column(rows, 'data_wait')
    recent = shares[len(shares) // 2:]
    if len(shares) >= 10 and median(recent) >= THRESHOLDS['data_wait']:
        return (f'{median(recent):.0%} of the time training waits for batches',
                'set data_in_ram=True, or put data/ on a faster disk')


def loss_scale(rows, run, ended):
    seen = rows_with(rows, 'loss_scale')
    if seen and seen[-1]['loss_scale'] < THRESHOLDS['loss_scale']:
        return (f'float16 overflows: the loss scale is down to {seen[-1]["loss_scale"]:.2g} at '
                f'iteration {seen[-1]["iter"]}',
                'use dtype=bfloat16 or float32, or lower learning_rate')


def budget(rows, run, ended):
    if not ended or not rows or rows[-1]['iter'] < THRESHOLDS['early_steps'] \
            or not run['from_scratch'] or run['config']['overfit_batches']:
        return None
    seen = rows[-1]['tokens'] / run['parameters']
    if seen <= THRESHOLDS['tokens_per_parameter']:
        return (f'it ended after {seen:.2g} tokens for each parameter, and about 20 are '
                'compute-optimal (Hoffmann et al. 2022)',
                'a smaller model would be better after the same time, or this one after more')


CHECKS = (initial_loss, no_progress, no_context, first_rise, rate_high, rate_low, rate_gone, spikes,
          climb, clipped, no_gradient, same_gradient, attention_logit, short_memory,
          foreign_validation, forgetting, overfit, flat, easy_validation, batches_too_easy,
          batches_too_hard, implausible, overlap, changed_data, data_wait, loss_scale, budget)
