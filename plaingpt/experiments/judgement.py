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

    def differences(self, level=''):
        """At one level, or the one that decides."""
        return [pair[level or self.decided_by] - pair['base'] for pair in self.pairs]

    def verdict(self, level=''):
        low, high = interval(self.differences(level))
        return UNSOUND if self.unsound else BETTER if high < 0 else WORSE if low > 0 else NOT_SHOWN

    def is_over(self, least):
        """Whether more pairs would add nothing. least: a difference that matters"""
        differences = self.differences()
        low, high = interval(differences)
        same = len(differences) > 1 and not any(differences)
        return same or self.verdict() != NOT_SHOWN or -least < low <= high < least

    def describe_pair(self):
        """The last pair, in a line."""
        pair, found = self.pairs[-1], self.differences()[-1]
        return f'pair {len(self.pairs)} (seed {pair["seed"]}): base {pair["base"]:.4f}, change ' \
               f'{pair[self.decided_by]:.4f}: {found:+.4f}, {pair["ratio"]:.2f}x the time'

    def describe(self, level=''):
        """'-0.0150 nats a token (95%: -0.0210 to -0.0090)'"""
        if not self.pairs:
            return 'no pair'
        low, high = interval(self.differences(level))
        within = f'{low:+.4f} to {high:+.4f}' if low > -math.inf else 'takes more pairs'
        return f'{statistics.mean(self.differences(level)):+.4f} {self.unit} (95%: {within})'

    def lines(self):
        """What came of it, for a person."""
        notes = [f'note: {note}' for note in self.notes]
        if self.unsound:
            return [*notes, f'verdict: {UNSOUND}: {self.unsound}']
        ratios = [pair['ratio'] for pair in self.pairs] or [1.0]
        noisy = ', noisy' * (max(ratios) > NOISY * min(ratios))
        return [*notes, *(f'at equal {level:6} {self.describe(level)}: {self.verdict(level)}'
                          for level in LEVELS),
                f'verdict after {count_of(len(self.pairs), "pair")}: {self.verdict()} at equal '
                f'{self.decided_by}; {statistics.geometric_mean(ratios):.2f}x the time a step '
                f'({min(ratios):.2f}x to {max(ratios):.2f}x{noisy})']


def draw_pairs(judgement, path, what):
    """Draw the difference of each pair, and the interval after each, into a PNG."""
    found = judgement.differences()
    lines = [Line([1, len(found)], [0, 0], 'no change', GREY, style={'lw': 1}),
             Line(list(range(1, len(found) + 1)), found, 'a pair', style={'ls': '', 'marker': 'o'})]
    if looks := list(range(3, len(found) + 1)):  # of fewer pairs there is no interval
        means = [statistics.mean(found[:n]) for n in looks]
        reaches = [interval(found[:n])[1] - mean for n, mean in zip(looks, means, strict=True)]
        lines.append(Line(looks, means, 'mean', COLOURS[3], reaches, style={'marker': 'o'}))
    headline = f'{judgement.verdict()} at equal {judgement.decided_by}: {judgement.describe()}'
    save_figure([Panel(headline, lines, f'Is it better? {what}', 'pair',
                       f'change - base, {judgement.unit}')], path)


def read_ledger(path):
    """→ its rows. Raises UserError."""
    if not path.exists():
        raise UserError(f'{path} is not there: --judge writes it, below --save where it has that')
    lines = path.read_text(encoding='utf-8').splitlines()
    try:
        return json.loads('[' + ',\n'.join(lines) + ']')  # at once: an error names its line
    except ValueError as problem:
        raise UserError(f'{path}: not what --judge writes ({problem}): remove the line') from None


def describe_ledger(rows):
    """Rows of the ledger → a table, and how much of it luck explains."""
    n = sum(row['verdict'] != UNSOUND for row in rows)
    better = sum(row['verdict'] == BETTER for row in rows)
    table = []
    for row in rows:
        found = Judgement(row['unit'], row['decided_by'], row['pairs'])
        is_clear = row['verdict'] == BETTER and interval(found.differences(), LEVEL / n)[1] < 0
        table.append([row['date'], row['command'].partition('--judge ')[2], str(len(row['pairs'])),
                      found.describe(), row['verdict'], 'yes' if is_clear else '–'])
    header = ['when', 'judged', 'pairs', 'difference', 'verdict', f'also of {n} tries']
    return markdown(header, table) + (
        f'\n\n{better} of {n} judgements say {BETTER}. If no change did anything, luck would '
        f'make {n * LEVEL / 2:.2g} of them say so. The last column is yes where a difference is '
        f'beyond the luck of all {n} tries together (Bonferroni).')
