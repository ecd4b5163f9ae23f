"""Files and rows that cannot be used: a few are left out and counted, more than 1% are an error."""

from collections import Counter

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of

MAX_UNUSABLE = 0.01  # share of the files or rows; if there are more, something else is wrong
EARLY = 1000  # unusable rows, after which a pass over all rows may stop
EXAMPLES = 3  # named for each reason


class Unusable(UserError):
    """A file or row that cannot be used. reason: the same words for all that are alike; details: of
    this one, and what to do"""

    def __init__(self, where, reason, details=''):
        super().__init__(f'{where}: {reason}{details}')
        self.where, self.reason = where, reason


class Tally:
    """Counts the files or rows that cannot be used, by reason. strict: each is an error"""

    def __init__(self, noun, strict=False):
        self.noun, self.strict = noun, strict
        self.restart()

    def restart(self):
        self.seen, self.counts, self.examples = 0, Counter(), {}

    def leave_out(self, problem, total=0):
        """Count an Unusable. total: about how many there are in all, 0 if unknown. Raises UserError
        where it is certain that too many are unusable."""
        if self.strict:
            raise problem
        self.counts[problem.reason] += 1
        self.examples.setdefault(problem.reason, [])
        if len(self.examples[problem.reason]) < EXAMPLES:
            self.examples[problem.reason].append(problem)
        count = self.counts.total()
        if count >= EARLY and (total or count == self.seen):
            self.check(max(total, self.seen))

    def check(self, total, advice=lambda problem: ''):
        """Raises UserError where more than 1% of `total` are unusable. advice: what else to do
        about an Unusable"""
        count = self.counts.total()
        if count > MAX_UNUSABLE * total:
            reason, number = self.counts.most_common(1)[0]
            example, *others = self.examples[reason]
            why = '' if number == count else f', {number:,} for this reason'
            if others:
                why += f', such as {"; ".join(problem.where for problem in others)}'
            raise UserError(f'{example}{advice(example)} ({count:,} of '
                            f'{count_of(total, self.noun)} cannot be used{why}; at most '
                            f'{MAX_UNUSABLE:.0%} may be left out)')

    def describe(self):
        """A line for each reason."""
        for reason, number in self.counts.most_common():
            places = '; '.join(problem.where for problem in self.examples[reason])
            more = '; …' if number > EXAMPLES else ''
            yield f'left out {number:,} of {count_of(self.seen, self.noun)}: {reason} ' \
                  f'({places}{more})'
