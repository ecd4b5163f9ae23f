"""References: the validation loss of a recipe over several seeds, and where a run lies beside it.

docs/references/NAME.csv begins with a line `# {…}` that identifies the recipe and its text. Below
are iter, mean, std and seeds, the number of runs behind mean and std.
"""

import csv
import json

from plaingpt.monitoring.run_record import rows_with
from plaingpt.system.files import ROOT

FOLDER = ROOT / 'docs/references'

# Student's t, 97.5%, with 1, 2, … degrees of freedom. mean ± t(n - 1) · s · √(1 + 1/n) of n seeds
# holds one new seed in 95 of 100 cases: the prediction interval of a normal distribution (Hahn and
# Meeker 1991, Statistical Intervals). The range of three seeds would exclude every second new one.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
             2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
             2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def recipe_of(run, without_effect):
    """What a run.json has of the run's text and of the settings that change its loss.
    without_effect: names of settings that change none"""
    config, source = run['config'], run['data'].get('source', {})
    without_effect = {*without_effect, 'init_from'}
    settings = {key: value for key, value in run['changed'].items() if key not in without_effect}
    return {'corpus': source.get('corpus') or run['data']['folder'],
            'vocab_size': run['vocab_size'],
            'step_tokens': config['total_batch_size'] or config['batch_size']
            * config['block_size'] * config['gradient_accumulation_steps'], 'settings': settings}


def find_reference(run, without_effect):
    """The name of the reference whose recipe a run has, or None. run: the facts of run.json"""
    if not run['from_scratch'] or run['config']['check'] == 'overfit':
        return None
    recipe = recipe_of(run, without_effect)
    for path in FOLDER.glob('*.csv'):
        first, *_ = path.read_text(encoding='utf-8').splitlines()
        if json.loads(first.removeprefix('#')) == recipe:
            return path.stem
    return None


def read_band(run):
    """[(iteration, low, high)] of the reference that a run found when it began: where 95% of new
    seeds are expected. [] without one."""
    path = FOLDER / f'{run.get("reference")}.csv'
    if not path.exists():
        return []
    _, *lines = path.read_text(encoding='utf-8').splitlines()
    band = []
    for row in csv.DictReader(lines):
        n, mean = int(row['seeds']), float(row['mean'])
        reach = STUDENT_T[n - 2] * (1 + 1 / n)**0.5 * float(row['std'])
        band.append((int(row['iter']), mean - reach, mean + reach))
    return band


def compare(rows, run):
    """Where a run lies beside its reference, in a sentence."""
    edges = {iter_num: (low, high) for iter_num, low, high in read_band(run)}
    seen = [row for row in rows_with(rows, 'val_loss') if row['iter'] in edges]
    if not seen:
        return 'has no reference: docs/references/ has none of its settings, text and evaluations'
    iter_num, loss = seen[-1]['iter'], seen[-1]['val_loss']
    low, high = edges[iter_num]
    side = 'inside'
    if not low <= loss <= high:
        side = 'above (worse than)' if loss > high else 'below (better than)'
    return f'lies {side} the band of {run["reference"]}: {loss:.4f} at iteration {iter_num}, ' \
           f'where 95% of new seeds are expected in {low:.4f} to {high:.4f}'
