"""References: the validation loss of a recipe over several seeds, to compare a run with.

docs/references/NAME.csv starts with a line `# {…}` that identifies the recipe and its corpus. The
columns are iter, mean, std and seeds, the number of runs behind mean and std.
"""

import csv
import json

from plaingpt.monitoring.run_record import rows_with
from plaingpt.system.files import ROOT

FOLDER = ROOT / 'docs/references'

# Student's t, 97.5%, with 1, 2, … degrees of freedom. mean ± t(n - 1) · s · √(1 + 1/n) over n seeds
# contains the loss of a new seed in 95 of 100 cases: the prediction interval of a normal
# distribution (Hahn and Meeker 1991, Statistical Intervals). The range of three seeds would exclude
# half of all new seeds.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
             2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
             2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def recipe_of(run, without_effect):
    """→ what identifies a recipe: a run's corpus and the settings that change its loss.
    run: the contents of run.json; without_effect: names of settings that do not change the loss"""
    config = run['config']
    source = run['data'].get('source', {})
    without_effect = {*without_effect, 'init_from'}
    settings = {key: value for key, value in run['changed'].items() if key not in without_effect}
    step_tokens = config['total_batch_size'] or (
        config['batch_size'] * config['block_size'] * config['gradient_accumulation_steps'])
    return {'corpus': source.get('corpus') or run['data']['folder'],
            'vocab_size': run['vocab_size'], 'step_tokens': step_tokens, 'settings': settings}


def find_reference(run, without_effect):
    """The name of the reference with the recipe of a run, or None. run: the contents of run.json"""
    if not run['from_scratch'] or run['config']['check'] == 'overfit':
        return None
    recipe = recipe_of(run, without_effect)
    for path in FOLDER.glob('*.csv'):
        header, *_ = path.read_text(encoding='utf-8').splitlines()
        if json.loads(header.removeprefix('#')) == recipe:
            return path.stem
    return None


def read_band(run):
    """[(iteration, low, high)] of the run's reference: the 95% prediction interval for
    a new seed. [] if it has none."""
    path = FOLDER / f'{run.get("reference")}.csv'
    if not path.exists():
        return []
    _, *lines = path.read_text(encoding='utf-8').splitlines()
    band = []
    for row in csv.DictReader(lines):
        n, mean = int(row['seeds']), float(row['mean'])
        half_width = STUDENT_T[n - 2] * (1 + 1 / n)**0.5 * float(row['std'])
        band.append((int(row['iter']), mean - half_width, mean + half_width))
    return band


def compare(rows, run):
    """How a run compares with its reference: the predicate of a sentence."""
    limits = {iter_num: (low, high) for iter_num, low, high in read_band(run)}
    evaluations = [row for row in rows_with(rows, 'val_loss') if row['iter'] in limits]
    if not evaluations:
        return 'has no reference run: nothing in docs/references/ matches its settings, dataset ' \
               'and evaluations'
    iter_num, loss = evaluations[-1]['iter'], evaluations[-1]['val_loss']
    low, high = limits[iter_num]
    if loss > high:
        place = 'above (worse than)'
    elif loss < low:
        place = 'below (better than)'
    else:
        place = 'inside'
    return f'is {place} the reference band of {run["reference"]}: {loss:.4f} at iteration ' \
           f'{iter_num} (95% prediction interval for a new seed: {low:.4f} to {high:.4f})'
