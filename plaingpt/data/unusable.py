"""Unusable files and rows: a few are skipped and counted, more than 1% are an error."""

from collections import Counter

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import count_of

MAX_UNUSABLE = 0.01  # fraction of the files or rows; beyond it, something else is wrong
EARLY_STOP = 1000  # rows after which a pass ends if all of them are unusable
MAX_EXAMPLES = 3  # listed per reason


class Unusable(UserError):
    """A file or row that cannot be used. reason: what is counted; details: about this one, and what
    to do"""

    def __init__(self, where, reason, details=''):
        super().__init__(f'{where}: {reason}{details}')
        self.where, self.reason = where, reason


class Tally:
    """Counts unusable files or rows by reason. strict: each is an error"""

    def __init__(self, noun, strict=False):
        self.noun, self.strict = noun, strict
        self.restart()

    def restart(self):
        self.total, self.counts, self.examples = 0, Counter(), {}

    def skip(self, problem):
        """Count an Unusable. Raises UserError if all so far, EARLY_STOP or more, are unusable.
        """
        if self.strict:
            raise problem
        self.counts[problem.reason] += 1
        examples = self.examples.setdefault(problem.reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(problem)
        if EARLY_STOP <= self.total == self.counts.total():
            self.check()

    def check(self):
        """Raises UserError if more than 1% are unusable."""
        count = self.counts.total()
        if count <= MAX_UNUSABLE * self.total:
            return
        reason, number = self.counts.most_common(1)[0]
        raise UserError(f'{self.examples[reason][0]} ({count:,} of '
                        f'{count_of(self.total, self.noun)} cannot be used, {number:,} for this '
                        f'reason; at most {MAX_UNUSABLE:.0%} may be skipped)')

    def describe(self):
        """One line per reason."""
        for reason, number in self.counts.most_common():
            examples = '; '.join(problem.where for problem in self.examples[reason])
            if number > MAX_EXAMPLES:
                examples += '; …'
            yield f'skipped {number:,} of {count_of(self.total, self.noun)}: {reason} ({examples})'
