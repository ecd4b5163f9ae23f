"""What pairs of trainings show of a change: an interval that may be looked at after each pair, the
verdict, the ledger of all judgements, a picture."""

import json
import math
import statistics
from dataclasses import dataclass, field

from plaingpt.experiments.runs import mean_and_error
from plaingpt.experiments.tables import markdown
from plaingpt.monitoring.drawing import COLOURS, GREY, Line, Panel, save_figure
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of

LEVEL = 0.05  # of an interval: how often it may miss, over all looks together
PRIOR = 10.0  # variance of effects, in that between pairs: finds clear ones in three to eight
BETTER, NOT_SHOWN, WORSE, UNSOUND = 'BETTER', 'NOT SHOWN', 'WORSE', 'UNSOUND'
EXIT_STATUS = {BETTER: 0, UNSOUND: 2, NOT_SHOWN: 3, WORSE: 4}
LEVELS = 'steps', 'tokens', 'time'  # at which both sides are equal
NOISY = 1.05  # times of pairs that differ by this factor


def interval(differences, level=LEVEL):
    """→ (low, high), of the mean difference. It holds after each pair at once, so that one may stop
    at any, and needs differences that are normal with any variance, or close to it.

    The t-test of Wang and Ramdas 2025, "Anytime-valid t-tests and confidence sequences for Gaussian
    means with unknown variance" (Gaussian mixture of scale-invariant likelihood ratios). Against no
    effect, the likelihood ratio of n pairs is k^(-1/2) ((1 + t²/(n-1)) / (1 + t²/(n-1)/k))^(n/2)
    with k = 1 + n PRIOR. It is above 1/level for the t that lie outside of the interval.
    """
    n = len(differences)
    k = 1 + n * PRIOR
    c = (math.sqrt(k) / level) ** (2 / max(n, 1))
    if n < 2 or c >= k:  # no t is large enough
        return -math.inf, math.inf
    mean, error = mean_and_error(differences)
    reach = error * math.sqrt((n - 1) * (c - 1) / (1 - c / k))
    return mean - reach, mean + reach


@dataclass
class Judgement:
    """Pairs so far. A pair is {'seed', 'base', 'steps', 'tokens', 'time', 'ratio'}: the losses of
    the base and of the change at equal steps, tokens and time; the change's time of a step in the
    base's."""

    unit: str = 'nats a token'
    decided_by: str = 'steps'  # or time, where the two sides do not work alike
    pairs: list = field(default_factory=list)
    notes: list = field(default_factory=list)  # what else the change does, a line each
    unsound: str = ''  # what it does that no loss makes up for

    def differences(self, level):
        return [pair[level] - pair['base'] for pair in self.pairs]

    def verdict(self, level=''):
        """At one level, or the one that decides."""
        low, high = interval(self.differences(level or self.decided_by))
        return UNSOUND if self.unsound else BETTER if high < 0 else WORSE if low > 0 else NOT_SHOWN

    def is_over(self, least):
        """Whether more pairs would add nothing. least: a difference that matters"""
        differences = self.differences(self.decided_by)
        low, high = interval(differences)
        same = len(differences) > 1 and not any(differences)
        return same or self.verdict() != NOT_SHOWN or -least < low <= high < least

    def describe_pair(self):
        """The last pair, in a line."""
        pair, at = self.pairs[-1], self.decided_by
        return f'pair {len(self.pairs)} (seed {pair["seed"]}): base {pair["base"]:.4f}, change ' \
               f'{pair[at]:.4f}: {pair[at] - pair["base"]:+.4f}, {pair["ratio"]:.2f}x the time'

    def describe(self, level):
        """'-0.0150 nats a token (95%: -0.0210 to -0.0090)'"""
        found, (low, high) = self.differences(level), interval(self.differences(level))
        within = f'{low:+.4f} to {high:+.4f}' if low > -math.inf else 'takes more pairs'
        return f'{mean_and_error(found)[0]:+.4f} {self.unit} (95%: {within})'

    def lines(self):
        """What came of it, for a person."""
        found = [f'note: {note}' for note in self.notes]
        if self.unsound:
            return [*found, f'verdict: {UNSOUND}: {self.unsound}']
        for level in LEVELS if self.pairs else ():
            found.append(f'at equal {level:6} {self.describe(level)}: {self.verdict(level)}')
        ratios = [pair['ratio'] for pair in self.pairs] or [1.0]
        noisy = f' ({min(ratios):.2f}x to {max(ratios):.2f}x: noisy)' \
            if max(ratios) > NOISY * min(ratios) else ''
        return [*found, f'verdict after {count_of(len(self.pairs), "pair")}: {self.verdict()} at '
                f'equal {self.decided_by}; {statistics.geometric_mean(ratios):.2f}x the time a '
                f'step{noisy}']


def draw_pairs(judgement, path, what):
    """Draw the difference of each pair, and the interval after each, into a PNG."""
    level = judgement.decided_by
    found = judgement.differences(level)
    looks = range(3, len(found) + 1)  # of fewer pairs there is no interval
    means = [statistics.mean(found[:n]) for n in looks]
    reaches = [interval(found[:n])[1] - mean for n, mean in zip(looks, means, strict=True)]
    dots = {'ls': '', 'marker': 'o', 'ms': 7}
    lines = [Line(list(range(1, len(found) + 1)), found, 'a pair', style=dots),
             Line([1, len(found)], [0, 0], 'no change', GREY, style={'lw': 1})]
    if means:
        lines.append(Line(list(looks), means, 'mean', COLOURS[3], reaches, style={'marker': 'o'}))
    save_figure([Panel(
        f'{judgement.verdict()} at equal {level}: {judgement.describe(level)}', lines,
        f'Is it better? {what}', 'pair', f'change - base, {judgement.unit}')], path)


def read_ledger(path):
    """→ its rows. Raises UserError."""
    rows = []
    try:
        for line in path.read_text(encoding='utf-8').splitlines():
            rows.append(json.loads(line))
            describe_ledger(rows[-1:])
    except FileNotFoundError:
        raise UserError(f'{path} is not there: --judge writes it, below --save where it has that'
                        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        raise UserError(f'{path}, line {len(rows) or 1}: not what --judge writes ({problem}): '
                        'remove the line') from None
    return rows


def describe_ledger(rows):
    """Rows of the ledger → a table, and how much of it luck explains."""
    judged = [row for row in rows if row['verdict'] != UNSOUND]
    n, better = len(judged), [row for row in judged if row['verdict'] == BETTER]
    table = []
    for row in rows:
        found = row['pairs'] and Judgement(**{key: row[key] for key in (
            'unit', 'decided_by', 'pairs')})
        high = interval(found.differences(found.decided_by), LEVEL / max(n, 1))[1] if found else 0
        table.append([row['date'], row['command'].partition('--judge ')[2], str(len(row['pairs'])),
                      found.describe(found.decided_by) if found else '–', row['verdict'],
                      {True: 'yes', False: 'no'}[high < 0] if row in better else '–'])
    return markdown(['when', 'judged', 'pairs', 'difference', 'verdict',
                     f'also of {n} tries'], table) + (
        f'\n\n{len(better)} of {n} judgements say {BETTER}. If no change did anything, luck would '
        f'make {n * LEVEL / 2:.2g} of them say so. The last column is yes where a difference is '
        f'beyond the luck of all {n} tries together (Bonferroni).')
