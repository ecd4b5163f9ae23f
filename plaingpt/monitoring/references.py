"""What a recipe's validation loss is over several seeds, and where a run lies beside it.

references/NAME.csv has a line `# {…}` with what tells the recipe and its text, then iter, mean, std
and seeds, the number of runs that the two are of.
"""

import csv
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from plaingpt.monitoring.metrics_file import read_rows, rows_with
from plaingpt.monitoring.run_record import read_run
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, write_atomically
from plaingpt.system.formatting import setting

FOLDER = ROOT / 'references'

# Student's t, 97.5%, with 1, 2, … degrees of freedom. mean ± t(n - 1) · s · √(1 + 1/n) of n seeds
# holds one new seed in 95 of 100 cases: the prediction interval of a normal distribution (Hahn and
# Meeker 1991, Statistical Intervals). The range of three seeds would exclude every second new one.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
             2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
             2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


@dataclass(frozen=True)
class Reference:
    name: str
    recipe: dict  # as of recipe_of
    band: list  # [(iteration, low, high)]: where 95% of new seeds are expected

    def compare(self, rows, recipe=None):
        """Where a run with these rows lies, in a sentence; recipe: its own, where it may differ"""
        recipe = recipe or self.recipe
        if other := [key for key in self.recipe.keys() - {'settings'}
                     if recipe[key] != self.recipe[key]]:
            return f'does not compare with {self.name}: the {listed(other, recipe, self.recipe)}'
        edges = {iter_num: (low, high) for iter_num, low, high in self.band}
        seen = [row for row in rows_with(rows, 'val_loss') if row['iter'] in edges]
        if not seen:
            return f'has no evaluation yet at an iteration of {self.name}: ' \
                   + ', '.join(map(str, edges))
        loss, (low, high) = seen[-1]['val_loss'], edges[seen[-1]['iter']]
        side = 'above (worse than)' if loss > high else \
            'below (better than)' if loss < low else 'inside'
        said = f'lies {side} the band of {self.name}: {loss:.4f} at iteration ' \
               f'{seen[-1]["iter"]}, where 95% of new seeds are expected in {low:.4f} to {high:.4f}'
        here, there = recipe['settings'], self.recipe['settings']
        differing = [key for key in {**there, **here} if here.get(key) != there.get(key)]
        return f'{said}; unlike it, {listed(differing, here, there)}' if differing else said


def listed(keys, here, there):
    """'n_embd=64 (there 128), …'"""
    values = [(key, *(setting(each[key]) if key in each else 'the default'
                      for each in (here, there))) for key in keys]
    return ', '.join(f'{key}={value} (there {other})' for key, value, other in values)


def recipe_of(run, without_effect):
    """What a run.json has of the run's text and of the settings that change its loss."""
    config, source = run['config'], run['data'].get('source', {})
    settings = {key: value for key, value in run['changed'].items() if key not in without_effect}
    if run['from_scratch']:  # also where it was resumed
        settings.pop('init_from', None)
    return {'corpus': source.get('corpus') or run['data']['folder'],
            'vocab_size': run['vocab_size'],
            'step_tokens': config['total_batch_size'] or config['batch_size']
            * config['block_size'] * config['gradient_accumulation_steps'], 'settings': settings}


def names():
    return sorted(path.stem for path in FOLDER.glob('*.csv'))


def read_reference(name):
    """The Reference of references/NAME.csv. Raises UserError."""
    if name not in names():
        raise UserError(f'there is no reference {name}: references/ has {", ".join(names())}')
    path = FOLDER / f'{name}.csv'
    try:
        recipe, *lines = path.read_text(encoding='utf-8').splitlines()
        band = []
        for row in csv.DictReader(lines):
            n, middle = int(row['seeds']), float(row['mean'])
            reach = STUDENT_T[min(n - 1, len(STUDENT_T)) - 1] * (1 + 1 / n)**0.5 * float(row['std'])
            band.append((int(row['iter']), middle - reach, middle + reach))
        return Reference(name, json.loads(recipe.removeprefix('#')), band)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f'{path} is damaged ({e}): take it from the project again') from None


def find_reference(run, without_effect):
    """The name of the reference whose recipe a run has, or None. run: the facts of run.json;
    without_effect: names of settings that change no loss"""
    if run['config'].get('check') == 'overfit':  # of a batch, and not of the text
        return None
    recipe = recipe_of(run, without_effect)
    return next((name for name in names() if read_reference(name).recipe == recipe), None)


def recorded(run):
    """The Reference that a run found when it began, None without one."""
    with suppress(UserError):
        return read_reference(run['reference']) if run.get('reference') else None


def compare(rows, run):
    """Where a run lies beside the reference that it found when it began, in a sentence."""
    reference = recorded(run)
    return reference.compare(rows) if reference else \
        'has no reference: references/ has none of its settings and text'


def write_reference(name, folder, without_effect):
    """Write references/NAME.csv of the runs that bench.py --sweep=seed=… left in a folder."""
    folders = [path.parent for path in sorted(Path(folder).glob('*/run.json'))]
    recipes = [recipe_of(read_run(each), without_effect) for each in folders]
    if len(folders) < 2 or recipes != recipes[:1] * len(recipes):
        raise UserError(f'{folder}: a reference takes two runs or more of one recipe')
    losses = {}
    for each in folders:
        for row in rows_with(read_rows(each / 'metrics.jsonl', print), 'val_loss'):
            losses.setdefault(row['iter'], []).append(row['val_loss'])
    lines = [f'{iter_num},{mean(found):.6f},{stdev(found):.6f},{len(found)}'
             for iter_num, found in sorted(losses.items())
             if iter_num and len(found) == len(folders)]
    write_atomically(FOLDER / f'{name}.csv', '\n'.join(
        [f'# {json.dumps(recipes[0])}', 'iter,mean,std,seeds', *lines, '']))
