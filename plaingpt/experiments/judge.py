"""Is a change better? The code of a commit and the code as it is here are trained in pairs, and
compared after each.

Both runs of a pair have one seed, so they see the same data in the same order. A loss is what a run
itself reports of the validation split.
"""

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plaingpt.experiments.runs import mean_and_error, train_once
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT

LEVEL = 0.05  # of an interval: how often it may miss, over all looks together
PRIOR = 10.0  # variance of effects, in that between pairs: finds clear ones in three to eight
EXIT_STATUS = {'BETTER': 0, 'NOT SHOWN': 3, 'WORSE': 4}


def interval(differences):
    """→ (low, high), of the mean difference. It holds after each pair at once, so that one may stop
    at any, and needs differences that are normal with any variance, or close to it.

    The t-test of Wang and Ramdas 2025, "Anytime-valid t-tests and confidence sequences for Gaussian
    means with unknown variance" (Gaussian mixture of scale-invariant likelihood ratios). Against no
    effect, the likelihood ratio of n pairs is k^(-1/2) ((1 + t²/(n-1)) / (1 + t²/(n-1)/k))^(n/2)
    with k = 1 + n PRIOR. It is above 1/LEVEL for the t that lie outside of the interval.
    """
    n = len(differences)
    k = 1 + n * PRIOR
    c = (math.sqrt(k) / LEVEL) ** (2 / max(n, 1))
    if n < 2 or c >= k:  # no t is large enough
        return -math.inf, math.inf
    mean, error = mean_and_error(differences)
    reach = error * math.sqrt((n - 1) * (c - 1) / (1 - c / k))
    return mean - reach, mean + reach


def judge(config, words):
    """Train pairs until the verdict is clear, or the budget is spent → (a row for each, what they
    show, the exit status). words: what train.py is told. Raises UserError."""
    began, pairs = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix='plaingpt-judge-') as folder:
        sides = copy_sides(config.against, words, Path(folder))
        while len(pairs) < config.pairs:
            pair = {'seed': config.seed + len(pairs)}
            for side in sides:  # the first run may choose its dtype, and the others have it too
                train(*side, pair, [*pairs, pair][0].get('base_dtype', 'auto'), config)
            pairs.append(pair)
            print(f'pair {len(pairs)} (seed {pair["seed"]}): base {pair["base_val"]:.4f}, '
                  f'change {pair["change_val"]:.4f}', file=sys.stderr)
            differences = [pair['change_val'] - pair['base_val'] for pair in pairs]
            low, high = interval(differences)
            needed = (time.perf_counter() - began) / 60 * (1 + 1 / len(pairs))  # for one more
            if low > 0 or high < 0 or needed > config.minutes > 0:
                break
    verdict = 'BETTER' if high < 0 else 'WORSE' if low > 0 else 'NOT SHOWN'
    slower = mean_and_error([pair['change_ms'] / pair['base_ms'] for pair in pairs])[0]
    return pairs, f'{verdict} after pair {len(pairs)}: {mean_and_error(differences)[0]:+.4f} ' \
        f'nats a token (95%: {low:+.4f} to {high:+.4f}) of validation loss; {slower:.2f}x the ' \
        'time a step', EXIT_STATUS[verdict]


def train(name, tree, words, pair, dtype, config):
    """Train one side of a pair, and put its numbers into the row. Raises UserError."""
    folder = tree.with_name(f'{name}-run')
    try:
        made = train_once([f'--dtype={dtype}', *words, f'--seed={pair["seed"]}',
                           f'--log_interval={max(1, config.max_iters // 10)}',
                           '--report=False'], folder, tree)
        if made['final_loss'] is None or made['dataset'] != config.dataset:
            raise UserError('its last validation loss is not finite, or of another dataset')
    except UserError as problem:
        raise UserError(f'the {name}: {problem}') from None
    pair |= {f'{name}_val': made['final_loss'], f'{name}_ms': made['step_ms'],
             f'{name}_dtype': made['dtype']}
    shutil.rmtree(folder)


def copy_sides(commit, words, folder):
    """Copy both, since this clone may be edited meanwhile → [(name, folder, words of its train.py)]
    """
    base, change = folder / 'base', folder / 'change'
    done = subprocess.run(['git', 'archive', f'--output={base}.zip', commit], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode:
        raise UserError(f'against={commit}: {done.stderr.strip()}')
    shutil.unpack_archive(f'{base}.zip', base)
    change.mkdir()
    for path in [*ROOT.glob('*.py'), ROOT / 'config', ROOT / 'plaingpt']:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, change / path.name)

    def of_side(tree, word):  # a config file of this clone becomes that of the side
        path = Path(word if os.path.exists(word) else ROOT / word).resolve()
        return str(tree / path.relative_to(ROOT)) \
            if word.endswith('.py') and path.is_relative_to(ROOT) else word
    return [(tree.name, tree, [of_side(tree, word) for word in words]) for tree in (base, change)]
