"""Reference curves in references/NAME.jsonl, and where a run lies beside one.

The file has, for each seed, a line {"seed", "run"} with the facts of that run
(run_record.describe_run) and then the rows of its metrics.jsonl, each with its seed.
"""

import difflib
import json
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

from plaingpt.monitoring.metrics_file import parse_row, read_rows, rows_with, step_tokens
from plaingpt.monitoring.run_record import check_run, read_run
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT, write_atomically
from plaingpt.system.formatting import capitalized, setting

FOLDER = ROOT / 'references'
HOW = 'docs/monitoring.md says how one is made'

# Student's t, 97.5%, with 1, 2, … degrees of freedom. mean ± t(n - 1) · s · √(1 + 1/n) of n seeds
# holds one new seed in 95 of 100 cases: the prediction interval of a normal distribution (Hahn and
# Meeker 1991, Statistical Intervals). The range of three seeds would exclude every second new one.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
             2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
             2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


@dataclass(frozen=True)
class Reference:
    name: str
    runs: dict  # seed → facts of its run
    rows: dict  # seed → its rows

    @property
    def run(self):
        """The facts of one seed's run, which stand for all."""
        return next(iter(self.runs.values()))

    def step_tokens(self):
        return step_tokens(next(iter(self.rows.values())))

    def band(self):
        """[(tokens, low, high)] of validation losses: where 95% of new seeds are expected, from
        the first evaluation after a step on."""
        losses_at = {}
        for rows in self.rows.values():
            for row in rows_with(rows, 'val_loss'):
                if row['iter']:
                    losses_at.setdefault(row['tokens'], []).append(row['val_loss'])
        n = len(self.rows)
        if n < 2:
            return []
        width = STUDENT_T[min(n - 1, len(STUDENT_T)) - 1] * (1 + 1 / n)**0.5  # in deviations
        return [(tokens, mean(losses) - width * stdev(losses), mean(losses) + width * stdev(losses))
                for tokens, losses in sorted(losses_at.items()) if len(losses) == n]

    def headline(self, runs):
        """Where runs, [(name, rows)], lie at their last evaluation, in a few words."""
        band, said = self.band(), []
        for name, rows in runs:
            placed = [(row['val_loss'], *edges) for row in rows_with(rows, 'val_loss')
                      if (edges := band_at(band, row['tokens']))]
            who = f'{name} is ' * (len(runs) > 1)
            if not placed:
                said.append(f'{who}not within its range of iterations yet')
                continue
            loss, low, high = placed[-1]
            where = f'worse: {loss - high:.2f} above the band' if loss > high else \
                f'better: {low - loss:.2f} below the band' if loss < low else 'inside the band'
            said.append(f'{who}{where}')
        if len(runs) == 1 and placed:
            said[0] += f', where 95% of new seeds end: {low:.2f} to {high:.2f}'
        return capitalized('; '.join(said))

    def compare(self, name, rows, run=None, without_effect=()):
        """A sentence on where the run `name` lies. run: its facts, where they are known;
        without_effect: names of settings that change no loss"""
        if run and (why := self.other_text(run)):
            return f'{name} was trained on other text than {self.name} ({why}): their losses do ' \
                   'not compare'
        seeds, band = f'{self.name} ({len(self.rows)} seeds)', self.band()
        if not band:
            return f'{self.name} has one seed, and a band takes two: {HOW}'
        evaluations = [(row, *edges) for row in rows_with(rows, 'val_loss')
                       if (edges := band_at(band, row['tokens']))]
        if not evaluations:
            first, last = band[0][0], band[-1][0]
            return f'{name} has no evaluation between {first:,} and {last:,} tokens ' \
                   f'({first // self.step_tokens()} and {last // self.step_tokens()} iterations ' \
                   f'of the reference), where {seeds} has its own'
        return f'{name} {place(evaluations, seeds)}' \
               f'{self.differences(rows, run, without_effect) if run else ""}'

    def other_text(self, run):
        """Why the losses of a run cannot be compared, or None.

        The token count of one corpus may differ by 10%: Python's own library, for example, differs
        between versions of Python."""
        here, there = (each['data'].get('source', {}).get('corpus') for each in (run, self.run))
        for key, tolerance in (('vocab_size', 0.0), ('train_tokens', 0.1 if here == there else 0)):
            if abs(run[key] - self.run[key]) > tolerance * self.run[key]:
                return f'{key} {run[key]:,} in {run["data"]["folder"]}; there ' \
                       f'{self.run[key]:,} in {self.run["data"]["folder"]}'
        return None

    def differences(self, rows, run, without_effect):
        """'; unlike the reference: n_embd=192 (there 128)', or ''."""
        found = differing_settings(run, self.run, without_effect)
        tokens = step_tokens(rows)
        if tokens and tokens != self.step_tokens():
            found.append(('tokens a step', tokens, self.step_tokens()))
        if run['train_tokens'] != self.run['train_tokens']:
            found.append(('training tokens', run['train_tokens'], self.run['train_tokens']))
        listed = ', '.join(f'{key}={setting(value)} (there {setting(other)})'
                           for key, value, other in found)
        return f'; unlike the reference: {listed}' if found else ''


def differing_settings(run, other, without_effect):
    """[(key, value, value of the other)] of settings that change what a run can be expected to
    reach. run, other: facts of runs, with 'config' and 'changed'; without_effect: names of others.

    A setting that a run of an older version lacks has its default there."""
    found = []
    for key in {**run['config'], **other['config']}:
        values = [each['config'].get(key, 'the default') for each in (run, other)]
        has_default = 'the default' in values and key not in {**run['changed'], **other['changed']}
        if key not in without_effect and values[0] != values[1] and not has_default:
            found.append((key, *values))
    return found


def place(evaluations, seeds):
    """'lies inside the band of …', from [(row, low, high)]; seeds: the name of the band."""
    sides = [(row['val_loss'] > high) - (row['val_loss'] < low) for row, low, high in evaluations]
    row, low, high = evaluations[-1]
    loss = row['val_loss']
    at_end = f'{loss:.4f} at iteration {row["iter"]}, {row["tokens"]:,} tokens, where 95% of ' \
             f'new seeds are expected in {low:.4f} to {high:.4f}'
    if not any(sides):
        return f'lies inside the band of {seeds}: {at_end}'
    if sides[-1] == 0:
        outside = [row['iter'] for (row, *_), side in zip(evaluations, sides, strict=True) if side]
        return f'lies inside the band of {seeds} at the end, and was out of it at iteration ' \
               f'{", ".join(map(str, outside))}, as one evaluation in 20 is by chance: {at_end}'
    since = max((i + 1 for i, side in enumerate(sides) if side != sides[-1]), default=0)
    distance, word = (loss - high, 'above (worse)') if sides[-1] > 0 else \
        (low - loss, 'below (better)')
    return f'lies {word} the band of {seeds} from iteration {evaluations[since][0]["iter"]} on, ' \
           f'by {distance:.4f} at the end: {at_end}'


def band_at(band, tokens):
    """(low, high) of the band at `tokens`, on a straight line between its points, or None."""
    for (t0, low0, high0), (t1, low1, high1) in pairwise(band):
        if t0 <= tokens <= t1:
            share = (tokens - t0) / (t1 - t0)
            return low0 + share * (low1 - low0), high0 + share * (high1 - high0)
    return None


def read_reference(name):
    """The Reference of references/NAME.jsonl. Raises UserError where it is absent or damaged."""
    path = FOLDER / f'{name}.jsonl'
    known = sorted(p.stem for p in FOLDER.glob('*.jsonl'))
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f'did you mean {nearest[0]}?' if nearest else \
            f'there are {", ".join(known) or "none"}, and {HOW}'
        raise UserError(f'reference={name}: {hint}')
    runs, rows = {}, {}  # by seed
    try:
        with open(path, 'rb') as f:
            for line in f:
                value = json.loads(line)
                if 'run' in value:
                    runs[value['seed']], rows[value['seed']] = check_run(value['run']), []
                else:
                    rows[value['seed']].append(parse_row(line))
        if not rows or not all(map(step_tokens, rows.values())):
            raise ValueError('a seed has no rows')
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f'{path} is damaged ({type(e).__name__}: {e}): take it from the project '
                        f'again, or make it anew: {HOW}') from None
    return Reference(name, runs, rows)


def find_reference(run, without_effect):
    """The name of the reference whose text and settings a run has, or None. without_effect: as of
    Reference.compare"""
    if run['config'].get('check') == 'overfit':  # of a batch, and not of the text
        return None
    if run['from_scratch']:  # also where it was resumed
        run = {**run, 'config': {**run['config'], 'init_from': 'scratch'}}
    for path in sorted(FOLDER.glob('*.jsonl')):
        with suppress(OSError, ValueError, KeyError, TypeError), open(path, 'rb') as f:
            other = check_run(json.loads(f.readline())['run'])  # of its first seed
            if config_step_tokens(run) == config_step_tokens(other) \
                    and not Reference(path.stem, {0: other}, {}).other_text(run) \
                    and not differing_settings(run, other, without_effect):
                return path.stem
    return None


def config_step_tokens(run):
    """Tokens in a step, by the settings."""
    config = run['config']
    return config['total_batch_size'] or config['batch_size'] * config['block_size'] \
        * config['gradient_accumulation_steps']


def reference_of(run):
    """The Reference that a run recorded when it began, None without one."""
    with suppress(UserError):
        return read_reference(run['reference']) if run.get('reference') else None


def write_reference(name, folder):
    """Write references/NAME.jsonl of the runs in a folder, as bench.py --sweep=seed=… leaves them,
    without samples of text and names of folders. Raises UserError."""
    lines, recipes = [], []
    for path in sorted(Path(folder).glob('*/run.json')):
        run, rows = read_run(path.parent), read_rows(path.with_name('metrics.jsonl'), print)
        seed = run['config']['seed']
        run['config']['out_dir'] = run['changed']['out_dir'] = f'out-{name}'
        run['command'] = f'train.py config/{name}.py --seed={seed}'
        source = run['data'].get('source', {})
        if 'input' in source:
            source['input'] = Path(source['input']).name
        recipes.append({**run['config'], 'seed': 0})
        if recipes[0] != recipes[-1]:
            raise UserError(f'{path.parent}: its settings are not those of the other runs there: '
                            'train all seeds of one recipe into a folder of their own')
        lines.append({'seed': seed, 'run': run})
        lines += [{'seed': seed, **{key: row[key] for key in row if key != 'sample'}}
                  for row in rows]
    if not lines:
        raise UserError(f'{folder}: there are no runs')
    FOLDER.mkdir(exist_ok=True)
    write_atomically(FOLDER / f'{name}.jsonl', ''.join(json.dumps(line) + '\n' for line in lines))
