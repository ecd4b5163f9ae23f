"""References: the validation loss of a recipe over several seeds, to compare a run with.

docs/references/NAME.csv starts with a line `# {…}` that identifies the recipe and its corpus. The
columns are iter, mean, std and seeds, the number of runs behind mean and std.
"""

import csv
import json
from functools import cache
from math import atan2, cos, pi, sqrt

from plaingpt.monitoring.run_record import rows_with
from plaingpt.system.files import ROOT, with_current_names

FOLDER = ROOT / 'docs/references'


def recipe_of(run, without_effect):
    """→ what identifies a recipe: a run's corpus and the settings that change its loss.
    run: the contents of run.json; without_effect: names of settings that do not change the loss"""
    config = run['config']
    source = run['data'].get('source', {})
    without_effect = {*without_effect, 'init_from'}
    settings = {key: value for key, value in with_current_names(run['changed']).items()
                if key not in without_effect}
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
        reference = json.loads(header.removeprefix('#'))
        reference['settings'] = with_current_names(reference.get('settings', {}))
        if reference == recipe:
            return path.stem
    return None


def p_value(mean, error, df):
    """The two-sided p-value of Student's t = mean / error with `df` degrees of freedom. With
    t = √df · tan(angle), the density of the angle is proportional to cos(angle)^(df - 1)."""
    def area_beyond(angle):  # by the midpoint rule
        width = (pi / 2 - angle) / 200
        return width * sum(cos(angle + (i + 0.5) * width)**(df - 1) for i in range(200))

    return area_beyond(atan2(abs(mean), error * sqrt(df))) / area_beyond(0.0)


@cache
def t_quantile(df):
    """The t whose p-value is 0.05: a 95% interval extends t standard errors to either side."""
    low, high = 0.0, 100.0
    while high - low > 1e-6:
        t = (low + high) / 2
        if p_value(t, 1.0, df) > 0.05:
            low = t
        else:
            high = t
    return high


def read_band(run):
    """[(iteration, low, high)] of the run's reference: the 95% prediction interval for a new seed,
    mean ± t(n - 1) · s · √(1 + 1/n) over n seeds (Hahn and Meeker 1991, Statistical Intervals).
    The range of three seeds would exclude half of all new seeds. [] if it has none."""
    path = FOLDER / f'{run.get("reference")}.csv'
    if not path.exists():
        return []
    _, *lines = path.read_text(encoding='utf-8').splitlines()
    band = []
    for row in csv.DictReader(lines):
        n, mean = int(row['seeds']), float(row['mean'])
        half_width = t_quantile(n - 1) * sqrt(1 + 1 / n) * float(row['std'])
        band.append((int(row['iter']), mean - half_width, mean + half_width))
    return band


def compare(rows, run):
    """How a run compares with its reference: a line of a report."""
    limits = {iter_num: (low, high) for iter_num, low, high in read_band(run)}
    evaluations = [row for row in rows_with(rows, 'val_loss') if row['iter'] in limits]
    if not evaluations:
        return 'no reference curve for this recipe'
    iter_num, loss = evaluations[-1]['iter'], evaluations[-1]['val_loss']
    low, high = limits[iter_num]
    if loss > high:
        place = 'above (worse than)'
    elif loss < low:
        place = 'below (better than)'
    else:
        place = 'inside'
    return f'{place} the reference band of {run["reference"]}: {loss:.4f} at iteration ' \
           f'{iter_num} (95% prediction interval for a new seed: {low:.4f} to {high:.4f})'
