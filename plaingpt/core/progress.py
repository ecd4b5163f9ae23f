"""The progress of a run: the loop's counters, and a clock that measures how much is done.

The clock measures how much of the run is done, from 0 to 1: by iterations or, with --minutes, by
time. At 1 the run ends. A timed run's learning rate follows the clock.
"""

import math
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass

from plaingpt.core.start import used_s
from plaingpt.system.distributed import all_gather, gloo_group
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import finite, setting

NUM_EVALUATIONS = 10  # in a timed run, after the first one
# reasons why a run ends, besides signals, errors and patience
FINISHED = 'finished (max_iters reached)'
TIME_UP = 'time is up'


@dataclass
class Progress:
    """The loop's counters, which checkpoints save."""

    iter_num: int = 0  # completed steps
    best_val_loss: float = math.inf
    evals_since_best: int = 0
    evaluated_at: int | None = None  # iteration of the last evaluation
    val_loss: float | None = None  # of the last evaluation
    val_stderr: float | None = None  # its standard error
    saved_at: int | None = None  # iteration of the last checkpoint
    saved_evaluated: bool = False  # whether that checkpoint includes its evaluation
    updating: bool = False  # an optimizer step is under way: weights may be partly updated
    eval_sequences: int = 0  # sequences per split in each evaluation

    @property
    def evaluated(self):
        """Whether this iteration has been evaluated."""
        return self.evaluated_at == self.iter_num

    def record_evaluation(self, val_loss, val_stderr):
        """Record the evaluation of this iteration. Return whether its loss is the best so far."""
        self.evaluated_at = self.iter_num
        self.val_loss = val_loss
        self.val_stderr = val_stderr
        if val_loss < self.best_val_loss:
            self.best_val_loss = val_loss
            self.evals_since_best = 0
            return True
        self.evals_since_best += 1
        return False

    def state_dict(self):
        return {'iter_num': self.iter_num, 'evaluated': self.evaluated,
                'val_loss': finite(self.val_loss) if self.evaluated else None,
                'val_loss_stderr': finite(self.val_stderr) if self.evaluated else None,
                'best_val_loss': finite(self.best_val_loss),
                'evals_since_best': self.evals_since_best, 'eval_sequences': self.eval_sequences}

    def load_state_dict(self, state):
        self.iter_num = self.saved_at = state['iter_num']
        self.saved_evaluated = state['evaluated']
        self.evaluated_at = self.iter_num if state['evaluated'] else None
        self.val_loss, self.val_stderr = state['val_loss'], state['val_loss_stderr']
        self.best_val_loss = state['best_val_loss']
        if self.best_val_loss is None:  # JSON has no infinity
            self.best_val_loss = math.inf
        self.evals_since_best = state['evals_since_best']
        self.eval_sequences = state['eval_sequences']


class IterationClock:
    """The clock of a run of max_iters iterations."""

    def __init__(self, config):
        self.config = config

    def state_dict(self):
        """{'left_s': seconds left of a timed run, or None; 'evaluations': of a timed run}"""
        return {'left_s': None, 'evaluations': ()}

    def load_state_dict(self, state):
        pass  # this clock needs only iter_num

    def read(self, iter_num):
        """The fraction of the run that is done after `iter_num` steps, from 0 to 1."""
        if iter_num < self.config.max_iters:
            return iter_num / self.config.max_iters
        return 1.0

    def evaluation_is_due(self, iter_num, fraction_done):
        return iter_num % self.config.eval_interval == 0

    def exclude(self, seconds):
        """The last `seconds` were not spent on training; a TrainingClock does not count them."""

    @contextmanager
    def timed_evaluation(self):
        """A context to evaluate in; a MinuteClock times it."""
        yield


class MinuteClock(IterationClock):
    """The clock of a run of config.minutes, by rank 0's time. The time before the first step does
    not count as progress, but is part of the minutes. Time is reserved for the last evaluation: the
    median of the last three.

    started_at: when this command was started
    """

    def __init__(self, config, started_at):
        super().__init__(config)
        self.total_s = 60 * config.minutes
        self.ends_at = started_at + self.total_s
        self.used_s = 0.0  # seconds used before a resume
        self.now_s = 0.0  # seconds used so far
        self.loop_started_at = None
        self.evaluations = []  # [seconds used before it, seconds that it took] of the last three

    def state_dict(self):
        return {'left_s': self.ends_at - time.perf_counter(), 'evaluations': self.evaluations}

    def load_state_dict(self, state):
        was_timed = state['left_s'] is not None
        if was_timed or self.config.init_from == 'resume':
            self.used_s = self.now_s = used_s(state)
            self.ends_at -= self.used_s
        self.evaluations = list(state.get('evaluations', []))
        if state['evaluated'] and not self.evaluations:  # the saved run counted iterations
            self.evaluations = [[self.used_s, 0.0]]

    @property
    def evaluation_s(self):
        """The time that an evaluation takes: the median of the last three."""
        return statistics.median([seconds for _, seconds in self.evaluations] or [0.0])

    def read(self, iter_num):
        now = time.perf_counter()
        self.loop_started_at = self.loop_started_at or now
        done_before = self.used_s / self.total_s  # before this start
        loop_s = self.ends_at - self.evaluation_s - self.loop_started_at
        done_now = (now - self.loop_started_at) / loop_s if loop_s > 0 else 1.0
        fraction_done = min(1.0, done_before + (1 - done_before) * done_now)
        fraction_done, self.now_s = all_gather(
            (fraction_done, self.total_s - self.ends_at + now), gloo_group())[0]
        if fraction_done == 1 and iter_num == 0:
            raise UserError(f'minutes={setting(self.config.minutes)} is too short: setup took '
                            'all of that time; raise --minutes')
        return fraction_done

    def evaluation_is_due(self, iter_num, fraction_done):
        """True a tenth of the run after the last evaluation; later if evaluations would take over a
        tenth of the time. Not shortly before the end, when the run is evaluated anyway."""
        if not self.evaluations:
            return True
        interval_s = max(self.total_s, 100 * self.evaluation_s) / NUM_EVALUATIONS
        last_s = self.total_s - self.evaluation_s  # when the last evaluation begins
        evaluated_s, _ = self.evaluations[-1]
        return evaluated_s + interval_s <= self.now_s <= last_s - interval_s / 2

    @contextmanager
    def timed_evaluation(self):
        started_at = time.perf_counter()
        yield
        seconds = all_gather(time.perf_counter() - started_at, gloo_group())[0]
        self.evaluations = [*self.evaluations[-2:], [self.now_s, seconds]]


class TrainingClock(MinuteClock):
    """A MinuteClock that counts the time of steps alone, not setup, evaluations, saves, health
    checks and logs. Two versions of the code then train for the same time, whatever else they do.
    It evaluates only at the end, but with patience as often as a MinuteClock."""

    evaluation_s = 0.0  # nothing is reserved

    def read(self, iter_num):
        if self.loop_started_at is None:
            self.ends_at = time.perf_counter() + self.total_s - self.used_s
        return super().read(iter_num)

    def exclude(self, seconds):
        self.loop_started_at += seconds
        self.ends_at += seconds

    def evaluation_is_due(self, iter_num, fraction_done):
        return self.config.patience > 0 and super().evaluation_is_due(iter_num, fraction_done)


def make_clock(config, started_at):
    """The clock of a new run. started_at: when this command was started"""
    if not config.minutes:
        return IterationClock(config)
    clock_type = TrainingClock if config.clock == 'training' else MinuteClock
    return clock_type(config, started_at)
