"""Is a change better? Base and change are trained in pairs, and compared after each.

Both runs of a pair have one seed, so they see the same data in the same order. A loss is what a run
itself reports of the validation split. With --split=test the trained models are scored once more.
"""

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plaingpt.data.dataset import open_named
from plaingpt.experiments.runs import mean_and_error, run_command, train_once
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, read_json

LEVEL = 0.05  # of an interval: how often it may miss, over all looks together
PRIOR = 10.0  # variance of effects, in that between pairs: finds clear ones in three to eight
EXIT_STATUS = {'BETTER': 0, 'NOT SHOWN': 3, 'WORSE': 4}
SOURCES = {'val': 'as the runs themselves report it of the validation split',
           'test': "by each side's evaluate.py, on the test split, which no run looked at"}


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


def verdict(differences):
    low, high = interval(differences)
    return 'BETTER' if high < 0 else 'WORSE' if low > 0 else 'NOT SHOWN'


def judge(config, words, changed_words):
    """Train pairs until the verdict is clear, or the budget is spent → (a row for each, what they
    show, the exit status). words: what each side's train.py is told. Raises UserError."""
    began, pairs = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix='plaingpt-judge-') as folder:
        sides = copy_sides(config, words, changed_words, Path(folder))
        try:
            while len(pairs) < config.pairs:
                pair = {'seed': config.seed + len(pairs)}
                for side in sides:  # the first run may choose its dtype, and the others have it too
                    train(*side, pair, [*pairs, pair][0].get('base_dtype', 'auto'), config)
                pairs.append(pair)
                print(f'pair {len(pairs)} (seed {pair["seed"]}): base {pair["base_val"]:.4f}, '
                      f'change {pair["change_val"]:.4f}', file=sys.stderr)
                low, high = interval(differences_of(pairs, 'val'))
                needed = (time.perf_counter() - began) / 60 * (1 + 1 / len(pairs))  # for one more
                if low > 0 or high < 0 or -config.least <= low <= high <= config.least \
                        or needed > config.minutes > 0:
                    break
        except KeyboardInterrupt:  # the pairs so far count
            if not pairs:
                raise
    text = '\n'.join(describe(pairs, split) for split in dict.fromkeys(['val', config.split]))
    return pairs, text, EXIT_STATUS[verdict(differences_of(pairs, config.split))]


def differences_of(pairs, split):
    return [pair[f'change_{split}'] - pair[f'base_{split}'] for pair in pairs]


def describe(pairs, split):
    found, ratios = differences_of(pairs, split), [p['change_ms'] / p['base_ms'] for p in pairs]
    low, high = interval(found)
    return f'{verdict(found)} after pair {len(pairs)}: {mean_and_error(found)[0]:+.4f} nats a ' \
           f'token (95%: {low:+.4f} to {high:+.4f}), {SOURCES[split]}; ' \
           f'{mean_and_error(ratios)[0]:.2f}x the time a step ({min(ratios):.2f}x to ' \
           f'{max(ratios):.2f}x)'


def train(name, tree, words, pair, dtype, config):
    """Train one side of a pair, and put its numbers into the row. Raises UserError."""
    folder = tree.with_name(f'{name}-run')
    try:
        made = train_once([f'--dtype={dtype}', *words, f'--seed={pair["seed"]}',
                           f'--log_interval={max(1, config.max_iters // 10)}', '--minutes=0',
                           '--report=False'], folder, tree)
        if made['final_loss'] is None:
            raise UserError('its last validation loss is not finite')
        of_base, own = (open_named(dataset).identity(config.split)
                        for dataset in (config.dataset, made['dataset']))
        if of_base != own:
            raise UserError('losses of other text, or in other tokens, cannot be compared')
        pair |= {f'{name}_val': made['final_loss'], f'{name}_ms': made['step_ms'],
                 f'{name}_dtype': made['dtype']}
        if config.split == 'test':
            run_command('evaluate', [
                f'--out_dir={folder}', '--checkpoint=latest', '--tasks=test',
                f'--device={config.device}', f'--output={folder}/scores.json'], tree)
            pair[f'{name}_test'] = read_json(folder / 'scores.json')['results']['test']['loss']
    except UserError as problem:
        raise UserError(f'the {name}: {problem}') from None
    shutil.rmtree(folder)


def copy_sides(config, words, changed_words, folder):
    """Copy both, since a clone may be edited meanwhile → [(name, folder, words of its train.py)]"""
    base, change = folder / 'base', folder / 'change'
    copy_code(config.change or ROOT, change)
    if config.patch:
        git('apply', os.path.abspath(config.patch), cwd=change)
    if config.against:
        git('archive', f'--output={base}.zip', config.against, cwd=ROOT)
        shutil.unpack_archive(f'{base}.zip', base)
    else:
        copy_code(ROOT, base)

    def of_side(tree, word):  # a config file of this clone becomes that of the side
        path = Path(word if os.path.exists(word) else ROOT / word).resolve()
        return str(tree / path.relative_to(ROOT)) \
            if word.endswith('.py') and path.is_relative_to(ROOT) else word
    return [('base', base, [of_side(base, word) for word in words]),
            ('change', change, [of_side(change, word) for word in changed_words])]


def copy_code(clone, folder):
    folder.mkdir()
    for path in [*Path(clone).glob('*.py'), Path(clone, 'config'), Path(clone, 'plaingpt')]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)


def git(*words, cwd):
    env = {**os.environ, 'GIT_CEILING_DIRECTORIES': str(Path(cwd).parent)}  # a copy is on its own
    done = subprocess.run(['git', *words], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f'git {" ".join(words)}: {done.stderr.strip()}')
