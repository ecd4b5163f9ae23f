"""What larger runs on a text will reach: a scaling law, measured by a ladder of small runs.

loss(N, D) = E + (N₀/N)^a + (D₀/D)^b, in nats a token (Hoffmann et al. 2022, "Chinchilla", §3.3).
N counts the weights that are in matmuls: those of the blocks and the head, no embedding that is
only looked up. D counts training tokens; those after the first epoch count less and less
(Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", §3.1).

Each size of the ladder is one run with a constant learning rate, from which shorter runs branch
off: they take its checkpoint and let the rate fall (Hägele et al. 2024, arXiv 2405.18392). The
largest run is predicted from the others before it is trained.
"""

import json
import math
import sys
from dataclasses import fields, replace
from itertools import count

import numpy as np
import torch
from tqdm import tqdm

from model import GPT
from plaingpt.data.dataset import dataset_folder, read_names
from plaingpt.experiments.runs import train_once
from plaingpt.experiments.step_speed import estimate_speed
from plaingpt.monitoring.drawing import Line, Panel, choose_colours, save_figure
from plaingpt.monitoring.figures import NATS
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import read_json, write_json
from plaingpt.system.formatting import setting, short
from plaingpt.training.settings import TrainConfig

SIZES, RATIO = 4, 1.8  # below the largest, each with so many times fewer parameters
PARTS = 1, 2, 4  # a size is trained for its whole length, a half and a quarter of it
DECAY = 0.2  # of a run, in which its learning rate falls
RATE = 0.5  # of the config's learning rate: here it stays high longer (docs/scaling.md)
LARGEST_SHARE = 3  # the largest run takes so many times as long as another size
LARGEST_TOKENS = 10  # of the largest run, about, for each parameter
WIDTHS = 8  # widths are multiples of it
START_S = 6  # of a process, until it trains
LEAST_STEPS = 100  # of the shortest run: shorter ones are off the law by up to 0.1
SAMPLES = 200  # fits, which make the intervals
DETERMINED = 5  # parameters of the law that runs determine, whatever is known before
LEAST_NOISE = 0.003  # of a loss, as a share of it
FAR = 50  # times the work of the largest run: the law was never compared so far
MANY_EPOCHS = 10  # beyond them a model learns small text by heart, which the law does not know
FILE = 'law.json'  # beside the tokens


# -----------------------------------------------------------------------------
# the ladder


def settings_at(config, width):
    """Settings of a TrainConfig's model at another width: the depth grows with it, and the learning
    rate is one that transfers. Muon's updates are as large at any width (Liu et al. 2025, §2.2);
    AdamW's rate falls with the width (Yang et al. 2022, "Tensor Programs V")."""
    scale = width / config.n_embd
    n_head = next(n for n in count(max(1, int(config.n_head * scale)), -1)
                  if width % (2 * n) == 0)
    n_kv_head = config.n_kv_head and math.gcd(
        n_head, max(1, n_head * config.n_kv_head // config.n_head))
    rate = RATE / (1 if config.optimizer in ('muon', 'normuon') else scale)
    return {'n_embd': width, 'n_layer': max(min(2, config.n_layer), round(config.n_layer * scale)),
            'n_head': n_head, 'n_kv_head': n_kv_head, 'n_inner': round(config.n_inner * scale),
            'learning_rate': rate * config.learning_rate, 'min_lr': rate * config.min_lr}


def model_at(config, width, vocab_size):
    """→ a GPT of that width without data"""
    with torch.device('meta'):
        return GPT(replace(config, **settings_at(config, width)).gpt_config(vocab_size))


def plan_ladder(config, vocab_size, step_seconds):
    """→ [{'width', 'n', 'steps'}] of the ladder, the smallest size first, for config.minutes.
    step_seconds: width → of a step. Raises UserError where the time is too short."""
    trained = 1 + DECAY * sum(1 / part for part in PARTS[1:])  # shorter runs train their decay
    seconds = (60 * config.minutes - START_S * (SIZES * len(PARTS) + 1)) \
        / (SIZES * trained + LARGEST_SHARE)
    flops_per_s = model_at(config, config.n_embd, vocab_size).flops_per_token() \
        * config.step_tokens() / step_seconds(config.n_embd)
    largest = math.sqrt(max(0, LARGEST_SHARE * seconds) * flops_per_s / 6 / LARGEST_TOKENS)
    ladder = {}
    for k in range(SIZES, -1, -1):
        width, n = next((width, n) for width in count(WIDTHS, WIDTHS) if (
            n := model_at(config, width, vocab_size).matmul_parameters()) > largest / RATIO**k)
        # 4 evaluations of 2 splits, whose steps go forward only
        steps = seconds * (LARGEST_SHARE if k == 0 else 1) / step_seconds(width) \
            - 4 * 2 / 3 * config.eval_iters / config.accumulation()
        steps = int(steps / 5 / PARTS[-1]) * 5 * PARTS[-1]  # a fifth of any part is whole
        ladder[width] = {'width': width, 'n': n, 'steps': steps}
    if len(ladder) <= SIZES or any(
            size['steps'] < LEAST_STEPS * PARTS[-1] for size in ladder.values()):
        raise UserError(f'minutes={config.minutes:g} is too short for a ladder of this config on '
                        'this machine: give more, or a config with fewer tokens a step')
    return list(ladder.values())


def find_ladder(config, vocab_size, folder, work):
    """→ {'ladder', 'dtype'}, which `folder` keeps: they are measured, and the command that is given
    again goes on with the same runs. work: the Workload of config"""
    asked = json.loads(json.dumps(
        {field.name: getattr(config, field.name) for field in fields(TrainConfig)}))
    path = folder / 'ladder.json'
    try:
        if path.exists() and (kept := read_json(path))['asked'] == asked:
            return kept
    except (ValueError, TypeError, LookupError) as problem:
        raise UserError(f'{path}: {problem!r}: remove it, and a ladder is planned anew') from None
    known = {}

    def step_seconds(width):
        if width not in known:
            at = replace(config, minutes=0.0, **settings_at(config, width))
            alone = work._replace(config=at, shape=at.gpt_config(vocab_size))
            speed = max(estimate_speed(alone)[0] for _ in range(3))  # other programs disturb it
            known[width] = config.step_tokens() / speed
        return known[width]

    made = {'asked': asked, 'dtype': work.dtype,
            'ladder': plan_ladder(config, vocab_size, step_seconds)}
    write_json(path, made)
    return made


def train_size(config, ladder, index, folder, machine):
    """Train a size for its lengths → [{'size', 'n', 'tokens', 'loss', 'step_s'}]"""
    width, n, steps = ladder[index].values()
    shortest = min(size['steps'] for size in ladder) // PARTS[-1]
    config = replace(
        config, **settings_at(config, width), minutes=0.0, seed=config.seed + index,
        lr_schedule='wsd', wsd_decay=DECAY, decay_lr=True, init_from='scratch',
        warmup_iters=min(config.warmup_iters, shortest // 4), always_save_checkpoint=False,
        checkpoint_interval=steps // 5, log_interval=steps // 40, report=False, health_interval=0,
        patience=0, sample_interval=0, eval_tasks_interval=0)
    rows, whole = [], folder / f'width {width}'
    for part in PARTS if index < SIZES else PARTS[:1]:
        length = steps // part
        run = replace(config, max_iters=length, lr_decay_iters=length, eval_interval=length)
        # the rate of the whole run was constant up to here
        start = whole / 'checkpoints' / f'iter-{length - length // 5:08d}' if part > 1 else None
        made = train_once(run, folder / f'width {width}, 1 of {part}' if start else whole, machine,
                          start, keep=9)
        if made['final_loss'] is None:
            raise UserError(f'{whole}: the loss is not finite: give a lower --learning_rate')
        rows.append({'size': index, 'n': n, 'tokens': length * config.step_tokens(),
                     'loss': made['final_loss'], 'step_s': made['step_ms'] / 1e3})
    return rows


def measure(config, dataset, folder, work, facts):
    """Train the ladder in `folder`, its largest run after it was predicted → the law, as law.json
    has it, with the facts of tables.describe_measurement. Raises UserError."""
    with needs('scipy', 'a scaling law'):
        import scipy.optimize  # noqa: F401  (before hours of training)
    found = find_ladder(config, dataset.vocab_size, folder, work)
    config, ladder = replace(config, dtype=found['dtype']), found['ladder']
    text_tokens = len(dataset.split('train'))
    print(f'{SIZES * len(PARTS) + 1} runs, {short(ladder[0]["n"])} to {short(ladder[-1]["n"])} '
          f'parameters in matmuls, up to {short(ladder[-1]["steps"] * config.step_tokens())} '
          f'tokens, in {folder}', file=sys.stderr)
    rows = []
    for index in tqdm(range(SIZES + 1), 'training', disable=None):
        if index == SIZES:
            law = fit(rows, text_tokens)
            n, tokens = ladder[-1]['n'], ladder[-1]['steps'] * config.step_tokens()
            predicted = predict(law, n, tokens, noisy=True)
            low, middle, high = interval(predicted)
            tqdm.write(f'the largest run, {short(n)} parameters and {short(tokens)} tokens, will '
                       f'end at {middle:.3f} ({low:.3f} to {high:.3f})', file=sys.stderr)
        rows += train_size(config, ladder, index, folder, facts['machine'])
    least, _, most = interval(predicted, 0.95)
    held_out = {**rows[-1], 'low': low, 'predicted': middle, 'high': high,
                'holds': least <= rows[-1]['loss'] <= most}
    gpt = model_at(config, ladder[-1]['width'], dataset.vocab_size)
    flops = config.step_tokens() * gpt.flops_per_token()
    return {**facts, **fit(rows, text_tokens), 'held_out': held_out,
            'step_tokens': config.step_tokens(), 'vocab_size': dataset.vocab_size,
            'bytes_per_token': dataset.bytes_per_token('val'),
            'flops_per_s': flops / rows[-1]['step_s']}


# -----------------------------------------------------------------------------
# the fit


def loss_at(theta, n, tokens, text_tokens):
    """The law. theta: logarithms of E, (N₀)^a, a, (D₀)^b, b and R, (…, 6); n, tokens and
    text_tokens in units of the fit"""
    E, N0a, a, D0b, b, R = np.exp(np.moveaxis(theta, -1, 0))
    repeats = np.maximum(tokens / text_tokens - 1, 0)
    worth = np.minimum(tokens, text_tokens) * (1 + R * (1 - np.exp(-repeats / R)))
    return E + N0a * n**-a + D0b * worth**-b


def known_before(lowest):
    """→ (means, standard deviations) of theta before any run, where `lowest` is the lowest loss:
    few short runs determine it badly, and these keep the intervals honest. E is about half of that
    loss, the other terms a quarter; exponents as in Hoffmann et al. 2022 (0.34 and 0.28) and
    Besiroglu et al. 2024 (0.35 and 0.37); R, the epochs after which a token is worth 1/e, is 15 in
    Muennighoff et al. 2023. The deviations are of logarithms: e^0.4 is 1.5."""
    means = np.log([lowest / 2, lowest / 4, 0.35, lowest / 4, 0.35, 15.0])
    return means, np.array([0.5, 1.0, 0.4, 1.0, 0.4, 0.7])


def fit(rows, text_tokens):
    """Runs → a law: SAMPLES of theta, each fitted to losses as they might have come out with other
    seeds. Huber's loss of logarithms (Hoffmann et al. 2022, eq. 3)."""
    from scipy.optimize import least_squares
    n, tokens, loss, size = (np.array([row[key] for row in rows])
                             for key in ('n', 'tokens', 'loss', 'size'))
    units = float(np.exp(np.log(n).mean())), float(np.exp(np.log(tokens).mean()))
    means, deviations = known_before(loss.min())

    def off(theta, loss):
        return np.log(loss_at(theta, n / units[0], tokens / units[1], text_tokens / units[1])
                      / loss)

    def best(loss, means, noise, start):
        return least_squares(lambda theta: np.concatenate(
            [off(theta, loss) / noise, (theta - means) / deviations]),
            start, loss='huber', f_scale=2.0, max_nfev=50).x

    theta, noise, free = means, 2 * LEAST_NOISE, len(rows) - DETERMINED
    for _ in range(2):
        theta = best(loss, means, noise, theta)
        noise = max(LEAST_NOISE, math.sqrt((off(theta, loss)**2).sum() / free))
    random, samples = np.random.default_rng(0), []
    noises = noise * np.sqrt(free / random.chisquare(free, SAMPLES))
    for noise in noises:
        # what a seed does is shared by the runs of a size, which have one
        shift = random.normal(size=size.max() + 1)[size] \
            + random.normal(size=len(loss)) / math.sqrt(2)
        samples.append(best(loss * np.exp(noise * shift),
                            random.normal(means, deviations), noise, theta).tolist())
    return {'samples': samples, 'noises': noises.tolist(), 'units': units,
            'text_tokens': text_tokens, 'rows': rows}


def predict(law, n, tokens, text=1.0, noisy=False):
    """→ (SAMPLES,) losses of a run. text: the factor by which there is more text; noisy: as single
    runs come out, not their mean"""
    n_unit, token_unit = law['units']
    found = loss_at(np.array(law['samples']), n / n_unit, tokens / token_unit,
                    text * law['text_tokens'] / token_unit)
    noise = np.random.default_rng(1).normal(size=len(found)) * law['noises']
    return found * np.exp(noise) if noisy else found


def interval(values, share=0.8):
    """→ (low, median, high), which hold so much of the values"""
    return tuple(np.quantile(values, [0.5 - share / 2, 0.5, 0.5 + share / 2]).tolist())


# -----------------------------------------------------------------------------
# what it tells


def find(dataset):
    """The law beside the tokens of a dataset, or None. Raises UserError where it is damaged."""
    path = dataset_folder(next(iter(read_names(dataset)))) / FILE
    if len(read_names(dataset)) > 1 or not path.exists():
        return None
    try:
        law = read_json(path)
        describe(law)
    except (OSError, ValueError, TypeError, LookupError) as problem:
        raise UserError(f'{path}: {problem!r}: remove it, or measure it again: python bench.py '
                        '--law CONFIG') from None
    return law


def best_run(law, config, flops):
    """The width whose run has the lowest loss after so many FLOPs → {'settings', 'n', 'tokens',
    'epochs', 'loss': an interval, 'gains': by how much twice of what lowers it, intervals}"""
    best, width, worse = None, WIDTHS, 0
    while worse < 8:
        gpt = model_at(config, width, law['vocab_size'])
        n, tokens = gpt.matmul_parameters(), flops / gpt.flops_per_token()
        loss, worse = predict(law, n, tokens), worse + 1
        if best is None or np.median(loss) < np.median(best[0]):
            best, worse = (loss, width, n, tokens), 0
        width += max(1, width // 16 // WIDTHS) * WIDTHS
    loss, width, n, tokens = best
    twice = {'text': predict(law, n, tokens, text=2), 'time': predict(law, n, 2 * tokens),
             'parameters': predict(law, 2 * n, tokens)}
    return {'settings': settings_at(config, width), 'n': n, 'tokens': tokens,
            'epochs': tokens / law['text_tokens'], 'loss': interval(loss),
            'gains': {what: interval(loss - lower) for what, lower in twice.items()}}


def describe(law):
    """→ lines: the formula with 80% intervals, how the held-out run came out"""
    E, N0, a, D0, b, R = np.exp(law['samples']).T  # each (SAMPLES,)
    N0, D0 = law['units'][0] * N0 ** (1 / a), law['units'][1] * D0 ** (1 / b)
    values = {'E': E, 'N₀': N0, 'a': a, 'D₀': D0, 'b': b, 'R': R}
    held = law['held_out']
    return ['loss(N, D) = E + (N₀/N)^a + (D₀/D)^b with ' + ', '.join(
        '{3} = {1} ({0} to {2})'.format(*map(short, interval(value)), name)
        for name, value in values.items()),
        f'held out: {short(held["n"])} parameters, {short(held["tokens"])} tokens: '
        f'{held["low"]:.3f} to {held["high"]:.3f} predicted, {held["loss"]:.3f} measured'
        + ', outside of these 80%' * (not held['low'] <= held['loss'] <= held['high']),
        f'by {law["command"]}, on {law["date"]}',
        *([] if held['holds'] else ['that is not what the law predicts, so it gives no advice: '
                                    'longer runs (--minutes) follow a law better'])]


def in_bits(law, losses):
    """An interval of losses → text, in bits a byte where the dataset knows its bytes"""
    unit, nats = ('bits a byte', math.log(2) * law['bytes_per_token']) if law['bytes_per_token'] \
        else ('nats a token', 1.0)
    return '{1:.3f} {unit} ({0:.3f} to {2:.3f})'.format(*(x / nats for x in losses), unit=unit)


def advise(law, config, best):
    """→ lines: the best run of a budget, its settings, what twice as much of each would bring"""
    words = ['python train.py CONFIG'] + [
        f'--{key}={setting(value)}' for key, value in best['settings'].items()
        if value != getattr(config, key)]
    work = best['n'] * best['tokens'] / law['held_out']['n'] / law['held_out']['tokens']
    far = f', if the law holds for {short(work)} times the work of its largest run' * (work > FAR)
    lacking = '; text is what you lack' * (best['epochs'] > MANY_EPOCHS)
    gains = sorted(best['gains'].items(), key=lambda pair: -pair[1][1])
    return [f'{short(best["n"])} parameters, {best["epochs"]:.2g} epochs: '
            f'{in_bits(law, best["loss"])}{far}{lacking}',
            ' '.join([*words, '--lr_schedule=wsd',
                      f'--max_iters={best["tokens"] / law["step_tokens"]:.0f}']),
            *(f'twice the {what}: {in_bits(law, gain)} lower' for what, gain in gains)]


def draw(law, path, name):
    """Draw the runs, the law's curves and the held-out run with its band into a PNG. UserError."""
    held, lines = law['held_out'], []
    sizes = sorted({row['n'] for row in law['rows']})
    tokens = np.geomspace(*(of(row['tokens'] for row in law['rows']) for of in (min, max)), 60)
    for n, colour in zip(sizes, choose_colours(len(sizes)), strict=True):
        lines.append(Line(tokens.tolist(), [interval(predict(law, n, x))[1] for x in tokens],
                          f'{short(n)} parameters', colour, style={'lw': 1.2}))
        lines += [Line([row['tokens']], [row['loss']], colour=colour)
                  for row in law['rows'] if row['n'] == n]
    band = [held['tokens'] * 0.98, held['tokens'] * 1.02], [held['low']] * 2, [held['high']] * 2
    save_figure([Panel(f'{held["low"]:.2f} to {held["high"]:.2f} predicted for the largest run, '
                       f'{held["loss"]:.2f} measured', lines, f'Does the law of {name} hold?',
                       'tokens', NATS, band=band)], path)
