"""What larger runs on a text will reach: a scaling law, measured by a ladder of small runs.

loss(N, D) = E + (N₀/N)^a + (D₀/D)^b, in nats a token (Hoffmann et al. 2022, "Chinchilla", §3.3).
N counts the weights that are in matmuls: those of the blocks and the head, no embedding that is
only looked up. D counts training tokens; those after the first epoch count less and less
(Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", §3.1).

Each size of the ladder is one run with a constant learning rate. Wherever the average of its last
weights is evaluated, it has the loss of a run of that length whose rate fell (Hägele et al. 2024,
arXiv 2405.18392, §4.1). The largest run is predicted from the others before it is trained.
"""

import math
import shlex
import sys
from dataclasses import replace
from itertools import takewhile

import numpy as np
import torch
from tqdm import tqdm

from model import GPT
from plaingpt.data.dataset import dataset_folder
from plaingpt.experiments.runs import train_once, training_words
from plaingpt.experiments.step_speed import estimate_speed
from plaingpt.monitoring.drawing import Line, Panel, choose_colours, save_figure
from plaingpt.monitoring.figures import NATS
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import read_json, write_json
from plaingpt.system.formatting import setting, short
from plaingpt.training.run_data import evaluated_bytes

SIZES, RATIO = 4, 1.8  # below the largest, each with so many times fewer parameters
LARGEST_SHARE = 3  # the largest run takes so many times as long as another size
LARGEST_TOKENS = 10  # of the largest run, about, for each parameter
TRAINING = 0.85  # of the minutes; the others start processes and evaluate
LEAST_STEPS = 400  # of a run: after fewer than 200, losses are not yet on the law
LENGTHS = 2  # the law is fitted to losses after three quarters and all of a run, not earlier
WINDOW = 12  # weights are averaged over about a twelfth of a run
RATE = 0.5  # of the config's learning rate: here it stays high (docs/scaling.md)
SAMPLES = 200  # fits, which make the intervals
LEAST_NOISE = 0.005  # of a loss, as a share of it: so much do seeds differ (docs/scaling.md)
FAR = 50  # times the work of the largest run: the law was never compared so far
MANY_EPOCHS = 10  # beyond them a model learns small text by heart, which the law does not know
FILE = 'law.json'  # beside the tokens


# -----------------------------------------------------------------------------
# the ladder


def widths(config):
    """Yield the widths that a model of the config's heads can have, in steps of 8 channels or more.
    Each head has an even number, which rotary embeddings take."""
    width = unit = 2 * config.n_head * math.ceil(4 / config.n_head)
    while True:
        yield width
        width += max(1, width // 16 // unit) * unit


def settings_at(config, width, steps=LEAST_STEPS):
    """Settings of a TrainConfig at another width, of the ladder and of what it advises. Depth
    and heads stay, since one more of them is a jump in the losses of small models; wider models
    get more heads. The learning rate transfers: Muon's updates are as large at any width (Liu et
    al. 2025, §2.2); AdamW's rate falls with the width (Yang et al. 2022, "Tensor Programs V")."""
    scale = width / config.n_embd
    n_head = next((n for n in range(int(config.n_head * scale), config.n_head, -1)
                   if width % (2 * n) == 0), config.n_head)
    rate = RATE / (1 if config.optimizer in ('muon', 'normuon') else scale)
    return {'n_embd': width, 'n_head': n_head, 'n_inner': round(config.n_inner * scale),
            'n_kv_head': config.n_kv_head and math.gcd(n_head, config.n_kv_head),
            'learning_rate': rate * config.learning_rate, 'lr_schedule': 'constant',
            'max_iters': steps, 'average_decay': round(max(0.0, 1 - WINDOW / steps), 6)}


def model_at(config, width, vocab_size):
    """→ a GPT of that width without data"""
    with torch.device('meta'):
        return GPT(replace(config, **settings_at(config, width)).gpt_config(vocab_size))


def plan_ladder(config, vocab_size, step_seconds):
    """→ [{'width', 'n', 'steps'}] of the ladder, the smallest size first, for config.minutes.
    step_seconds: width → of a step. Raises UserError where the time is too short."""
    seconds = TRAINING * 60 * config.minutes / (SIZES + LARGEST_SHARE)
    flops_per_s = model_at(config, config.n_embd, vocab_size).flops_per_token() \
        * config.step_tokens() / step_seconds(config.n_embd)
    largest = math.sqrt(LARGEST_SHARE * seconds * flops_per_s / 6 / LARGEST_TOKENS)
    ladder = []
    for k in range(SIZES, -1, -1):
        width, n = next((width, n) for width in widths(config) if (
            n := model_at(config, width, vocab_size).matmul_parameters()) > largest / RATIO**k)
        steps = seconds * (LARGEST_SHARE if k == 0 else 1) / step_seconds(width)
        ladder.append({'width': width, 'n': n, 'steps': 4 * int(steps / 4)})
    least = min(size['steps'] for size in ladder)
    same = len({size['width'] for size in ladder}) <= SIZES
    if same or least < LEAST_STEPS:
        why = 'the smallest models would be the same' if same else \
            f'a run has {least} steps, and {LEAST_STEPS} are the least'
        raise UserError(f'minutes={config.minutes:g} is too short for a ladder of this config on '
                        f'this machine, where {why}: give more minutes, or a config with fewer '
                        'tokens a step')
    return ladder


def find_ladder(config, vocab_size, folder, work, command):
    """→ plan_ladder's, by speeds that are measured here. `folder` keeps it, so that the command
    that is given again goes on with the same runs. work: the Workload of config"""
    path = folder / 'ladder.json'
    if path.exists():
        kept = read_json(path)
        if kept.get('command') != command:
            raise UserError(f'{path} was planned by another command: {kept.get("command")}: give '
                            'that one, or another folder with --save')
        return kept['ladder']

    def step_seconds(width):
        at = replace(config, minutes=0.0, **settings_at(config, width))
        alone = work._replace(config=at, shape=at.gpt_config(vocab_size))
        return config.step_tokens() / max(estimate_speed(alone)[0] for _ in range(3))

    ladder = plan_ladder(config, vocab_size, step_seconds)
    write_json(path, {'command': command, 'ladder': ladder})
    return ladder


def train_size(config, size, index, folder, machine):
    """Train a size of the ladder → [{'size', 'n', 'tokens', 'loss', 'step_s'}] of its lengths"""
    width, n, steps = size.values()
    quarter = steps // 4
    config = replace(
        config, **settings_at(config, width, steps), minutes=0.0, decay_lr=True,
        warmup_iters=min(config.warmup_iters, quarter // 4), seed=config.seed + index,
        init_from='scratch', eval_interval=quarter, checkpoint_interval=quarter,
        log_interval=max(1, quarter // 10), patience=0, film=False, report=False, health_interval=0)
    made = train_once(config, folder / f'width {width}', machine)
    losses = [loss for _, loss in made['curve']]  # after each quarter, and before the first
    if None in losses:
        raise UserError(f'{folder}: a loss is not finite: give a lower --learning_rate')
    return [{'size': index, 'n': n, 'tokens': i * quarter * config.step_tokens(),
             'loss': losses[i], 'step_s': made['step_ms'] / 1e3} for i in range(5 - LENGTHS, 5)]


def measure(config, dataset, folder, work, facts):
    """Train the ladder in `folder`, its largest run after it was predicted → the law, as law.json
    has it, with the facts of tables.describe_measurement. Raises UserError."""
    with needs('scipy', 'a scaling law'):
        import scipy.optimize  # noqa: F401  (before hours of training)
    ladder = find_ladder(config, dataset.vocab_size, folder, work, facts['command'])
    text_tokens, rows = len(dataset.split('train')), []
    for index, size in enumerate(tqdm(ladder, 'training', disable=None)):
        tokens = size['steps'] * config.step_tokens()
        what = f'{short(size["n"])} parameters in matmuls, {short(tokens)} tokens'
        if size is ladder[-1]:
            losses = predict(fit(rows, text_tokens), size['n'], tokens, noisy=True)
            low, middle, high = interval(losses)
            tqdm.write(f'{what}: loss {middle:.3f} predicted, from {low:.3f} to {high:.3f}',
                       file=sys.stderr)
        rows += train_size(config, size, index, folder, facts['machine'])
        tqdm.write(f'{what}: loss {rows[-1]["loss"]:.3f}', file=sys.stderr)
    least, _, most = interval(losses, 0.95)
    held_out = {**rows[-1], 'low': low, 'predicted': middle, 'high': high,
                'holds': least <= rows[-1]['loss'] <= most}
    gpt = model_at(config, size['width'], dataset.vocab_size)
    flops = config.step_tokens() * gpt.flops_per_token()
    return {**facts, **fit(rows, text_tokens), 'held_out': held_out,
            'vocab_size': dataset.vocab_size, 'bytes_per_token': evaluated_bytes(
                dataset, dataset.loader('val', False, config.block_size, config.batch_size),
                config, config.eval_sequences()),
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
    seeds (a parametric bootstrap). Huber's loss of logarithms (Hoffmann et al. 2022, eq. 3)."""
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

    theta, runs = best(loss, means, LEAST_NOISE, means), size.max() + 1
    # Lengths of a run have its seed in common: they tell about as much of the noise as one.
    noise = max(LEAST_NOISE, math.sqrt((off(theta, loss)**2).sum() / runs))
    random, samples = np.random.default_rng(0), []
    noises = noise * np.sqrt(runs / random.chisquare(runs, SAMPLES))
    for noise in noises:
        shift = random.normal(size=runs)[size] + random.normal(size=len(loss)) / math.sqrt(2)
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


def spread(found):
    """An interval → '1.85 (1.83 to 1.88)'"""
    low, middle, high = map(short, found)
    return f'{middle} ({low} to {high})'


# -----------------------------------------------------------------------------
# what it tells


def find(dataset):
    """The law beside the tokens of a dataset. Raises UserError where there is none to read."""
    path = dataset_folder(dataset) / FILE
    try:
        return read_json(path)
    except (OSError, ValueError):
        raise UserError(f'{path} is absent or damaged, which says what is best for a budget: '
                        'python bench.py --law CONFIG measures it') from None


def best_run(law, config, flops):
    """The width whose run has the lowest loss after so many FLOPs → {'settings', 'n', 'tokens',
    'epochs', 'loss': an interval, 'gains': by how much twice of what lowers it, intervals}"""
    def run_of(width):
        gpt = model_at(config, width, law['vocab_size'])
        n, tokens = gpt.matmul_parameters(), flops / gpt.flops_per_token()
        return predict(law, n, tokens), width, n, tokens

    # A run of fewer tokens than a tenth of its parameters is not the best.
    runs = takewhile(lambda run: run[3] > run[2] / 10, map(run_of, widths(config)))
    best = min(runs, key=lambda run: np.median(run[0]), default=None)
    if best is None:
        raise UserError('that budget is too small for a run of any size')
    loss, width, n, tokens = best
    twice = {'text': predict(law, n, tokens, text=2), 'time': predict(law, n, 2 * tokens),
             'parameters': predict(law, 2 * n, tokens)}
    steps = max(1, round(tokens / config.step_tokens()))
    return {'settings': settings_at(config, width, steps), 'n': n, 'tokens': tokens,
            'epochs': tokens / law['text_tokens'], 'loss': interval(loss),
            'gains': {what: interval(loss - lower) for what, lower in twice.items()}}


def describe(law, config, best, budget, argv):
    """→ lines: the law with its intervals, how the held-out run came out, and, where the law holds,
    the best run of a budget ('8h'), the command that trains it, and what twice as much of what it
    takes would gain. argv: the command line that config was read from"""
    E, N0, a, D0, b, R = np.exp(law['samples']).T  # each (SAMPLES,)
    N0, D0 = law['units'][0] * N0 ** (1 / a), law['units'][1] * D0 ** (1 / b)
    values = {'E': E, 'N₀': N0, 'a': a, 'D₀': D0, 'b': b, 'R': R}
    held = law['held_out']
    lines = ['loss(N, D) = E + (N₀/N)^a + (D₀/D)^b with ' + ', '.join(
                 f'{name} = {spread(interval(value))}' for name, value in values.items()),
             f'held out: {short(held["n"])} parameters, {short(held["tokens"])} tokens: '
             f'{held["low"]:.3f} to {held["high"]:.3f} predicted, {held["loss"]:.3f} measured',
             f'by {law["command"]}, on {law["date"]}']
    if not held['holds']:
        return [*lines, 'that is not what the law predicts, so it gives no advice: runs follow a '
                        'law better that are longer (--minutes), and shorter than their text']
    words = ['python', 'train.py', *training_words(argv)] + [
        f'--{key}={setting(value)}' for key, value in best['settings'].items()
        if value != getattr(config, key)]
    bits = f', {best["loss"][1] / math.log(2) / law["bytes_per_token"]:.3f} bits a byte' \
        if law['bytes_per_token'] else ''
    work = best['n'] * best['tokens'] / held['n'] / held['tokens']
    far = f', if the law holds for {short(work)} times the work of its largest run' * (work > FAR)
    lacking = '; text is what you lack' * (best['epochs'] > MANY_EPOCHS)
    gains = sorted(best['gains'].items(), key=lambda pair: -pair[1][1])
    return [*lines, f'best for {budget}: {short(best["n"])} parameters, {best["epochs"]:.2g} '
                    f'epochs: loss {spread(best["loss"])}{bits}{far}{lacking}',
            f'  {shlex.join(words)}',
            *(f'  twice the {what}: {spread(gain)} lower' for what, gain in gains)]


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
