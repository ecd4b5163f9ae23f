"""Curves to compare with: references/NAME.jsonl, and where a run lies beside one.

The file has, for each seed, a line {"seed", "run"} with the facts of that run (describe in
run_report.py) and then the rows of its metrics.jsonl, each with its seed.
"""

import difflib
import json
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median, stdev

from plaingpt.monitoring.metrics import parse_row, step_tokens
from plaingpt.monitoring.run_summary import is_run
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT

FOLDER = ROOT / 'references'

# Student's t, 97.5%, for as many seeds: a new seed lies within mean ± t · s · √(1 + 1/n) 95 times
# of 100. The range of the seeds themselves would turn away every second one, with three of them.
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}

# What a run can be expected to differ by when it differs in these. The seed is not among them.
LEARNING = ('block_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias', 'rotary', 'rmsnorm',
            'qk_norm', 'mlp', 'tied_head', 'logit_softcap', 'zero_init', 'optimizer',
            'learning_rate', 'max_iters', 'weight_decay', 'beta1', 'beta2', 'momentum', 'grad_clip',
            'decay_lr', 'lr_schedule', 'wsd_decay', 'warmup_iters', 'lr_decay_iters', 'min_lr',
            'overfit_batches')


@dataclass(frozen=True)
class Reference:
    name: str
    runs: dict  # seed → facts of its run
    rows: dict  # seed → its rows

    @property
    def run(self):
        """The facts of one seed's run, which stand for all."""
        return next(iter(self.runs.values()))

    def band(self):
        """[(tokens, low, high)] of validation losses that 95% of new seeds lie within, from the
        first evaluation after a step on: before it nobody knows how the curve runs."""
        at = {}
        for rows in self.rows.values():
            for row in rows:
                if row.get('val_loss') is not None and row['iter']:
                    at.setdefault(row['tokens'], []).append(row['val_loss'])
        n = len(self.rows)
        if n < 2:
            return []
        t = STUDENT_T[min(n, max(STUDENT_T))]
        width = {tokens: t * stdev(losses) * (1 + 1 / n)**0.5
                 for tokens, losses in at.items() if len(losses) == n}
        return [(tokens, mean(at[tokens]) - width[tokens], mean(at[tokens]) + width[tokens])
                for tokens in sorted(width)]

    def step_tokens(self):
        """Tokens in a step."""
        return step_tokens(next(iter(self.rows.values())))

    def compare(self, name, rows, run=None):
        """A sentence on where the run `name` lies. run: its facts, where they are known."""
        if run and (why := self.other_text(run)):
            return f'{name} was trained on other text than {self.name} ({why}): their losses do ' \
                   'not compare'
        whole, band = f'{self.name} ({len(self.rows)} seeds)', self.band()
        if not band:
            return f'{self.name} has one seed, and a band takes two: python make_reference.py ' \
                   f'{self.name}'
        placed = [(row, row['val_loss'], *edges) for row in rows
                  if row.get('val_loss') is not None and (edges := between(band, row['tokens']))]
        if not placed:
            first, last = band[0][0], band[-1][0]
            return f'{name} has no evaluation between {first:,} and {last:,} tokens ' \
                   f'({first // self.step_tokens()} and {last // self.step_tokens()} iterations ' \
                   f'of the reference), where {whole} has its own'
        sides = [(loss > high) - (loss < low) for _, loss, low, high in placed]
        row, loss, low, high = placed[-1]
        at_end = f'{loss:.4f} at iteration {row["iter"]}, {row["tokens"]:,} tokens, where 95% of ' \
                 f'seeds lie in {low:.4f} to {high:.4f}'
        if not any(sides):
            where = f'lies inside the band of {whole}: {at_end}'
        elif sides[-1] == 0:
            out = [placed[i][0]['iter'] for i, side in enumerate(sides) if side]
            where = f'has come back into the band of {whole}, and was out of it at iteration ' \
                    f'{", ".join(map(str, out))}: {at_end}'
        else:
            since = len(sides) - 1
            while since and sides[since - 1] == sides[-1]:
                since -= 1
            off, word = (loss - high, 'above (worse)') if sides[-1] > 0 else \
                (low - loss, 'below (better)')
            where = f'lies {word} the band of {whole} from iteration ' \
                    f'{placed[since][0]["iter"]} on, by {off:.4f} at the end: {at_end}'
        return f'{name} {where}{self.speed(rows, run)}' \
               f'{self.differences(rows, run) if run else ""}'

    def other_text(self, run):
        """Why losses of the run cannot be compared, or None.

        Python's own library differs between versions of Python, by a few in a hundred."""
        theirs = self.run
        for key in ('vocab_size', 'train_tokens'):
            near = 0.1 if key == 'train_tokens' and corpus_of(run) == corpus_of(theirs) else 0.0
            if abs(run[key] - theirs[key]) > near * theirs[key]:
                return f'{key} {run[key]:,} in {run["data"]["folder"]}; there {theirs[key]:,} in ' \
                       f'{theirs["data"]["folder"]}'
        return None

    def differences(self, rows, run):
        """'; unlike the reference: n_embd=192 (there 128)', or nothing."""
        theirs = self.run
        found = [(key, run['config'][key], theirs['config'][key]) for key in LEARNING
                 if run['config'].get(key) != theirs['config'].get(key)]
        tokens = step_tokens(rows)
        if tokens and tokens != self.step_tokens():
            found.append(('tokens a step', tokens, self.step_tokens()))
        if run['train_tokens'] != theirs['train_tokens']:
            found.append(('training tokens', run['train_tokens'], theirs['train_tokens']))
        return '; unlike the reference: ' * bool(found) + ', '.join(
            f'{key}={mine} (there {other})' for key, mine, other in found)

    def speed(self, rows, run):
        """'; 1.2 times as fast as there (AMD EPYC, 2 cores)', or nothing where it is not known, or
        the model is another. The fastest seed counts: the others shared their machine."""
        if run and run['parameters'] != self.run['parameters']:
            return ''
        mine, *theirs = ([row['tokens_per_s'] for row in seen if row.get('tokens_per_s')]
                         for seen in (rows, *self.rows.values()))
        if not mine or not all(theirs):
            return ''
        machine = self.run['machine']
        device = machine['device'] if machine['device'] != 'cpu' else \
            f'{machine["cpu"]}, {machine["cores"]} cores'
        ratio = median(mine) / max(map(median, theirs))
        return f'; {ratio:.2f} times as fast as there ({device})'


def corpus_of(run):
    return run['data'].get('source', {}).get('corpus')


def between(band, tokens):
    """(low, high) of the band at `tokens`, on a straight line between its points, or None."""
    for (t0, low0, high0), (t1, low1, high1) in pairwise(band):
        if t0 <= tokens <= t1:
            share = (tokens - t0) / (t1 - t0)
            return low0 + share * (low1 - low0), high0 + share * (high1 - high0)
    return None


def read_reference(name):
    """references/NAME.jsonl. Raises UserError where there is none, or it is none."""
    path = FOLDER / f'{name}.jsonl'
    known = sorted(p.stem for p in FOLDER.glob('*.jsonl'))
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f'did you mean {nearest[0]}?' if nearest else \
            f'there are {", ".join(known) or "none"}, and make_reference.py makes others'
        raise UserError(f'reference={name}: {hint}')
    runs, rows = {}, {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            value = json.loads(line)
            if 'run' in value:
                if not is_run(value['run']):
                    raise ValueError('these are no facts of a run')
                runs[value['seed']], rows[value['seed']] = value['run'], []
            else:
                rows[value['seed']].append(parse_row(line))
        except (ValueError, KeyError, TypeError) as e:
            why = f'of no run before it: {e}' if isinstance(e, KeyError) else e
            raise damaged(path, f'line {number}: {why}') from None
    for seed, seen in rows.items():
        if not any(row['iter'] for row in seen):
            raise damaged(path, f'seed {seed} has no rows')
    if not rows:
        raise damaged(path, 'empty')
    return Reference(name, runs, rows)


def damaged(path, why):
    return UserError(f'{path}, {why}: take it from the project again, or make it anew with '
                     'make_reference.py')


def write_reference(reference):
    FOLDER.mkdir(exist_ok=True)
    lines = []
    for seed in sorted(reference.runs):
        lines.append(json.dumps({'seed': seed, 'run': reference.runs[seed]}))
        lines += [json.dumps({'seed': seed, **{key: value for key, value in row.items()
                                               if key not in ('seed', 'sample')}})
                  for row in reference.rows[seed]]
    temporary = FOLDER / f'{reference.name}.tmp'
    temporary.write_text('\n'.join(lines) + '\n', encoding='utf-8')
    temporary.rename(FOLDER / f'{reference.name}.jsonl')
