"""How far a run is: a number from 0 to 1, which drives the learning rate, the evaluations and the
end. It counts iterations, or with --minutes the time.
"""

import math
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass

from plaingpt.monitoring.run_record import finite
from plaingpt.system.distributed import all_gather, gloo_group
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import setting
from plaingpt.training.schedules import get_lr
from plaingpt.training.start import used_s

EVALUATIONS = 10  # of a run of minutes, after the first
FINISHED, TIME_UP = 'all iterations are done', 'time is up'  # how a run comes to its end


@dataclass
class Progress:
    """What a checkpoint keeps of the loop."""

    iter_num: int = 0  # updates made
    best_val_loss: float = math.inf
    evals_since_best: int = 0
    evaluated_at: int | None = None  # the iteration of the last evaluation
    val_loss: float | None = None  # what it measured
    val_stderr: float | None = None  # its standard error
    saved_at: int | None = None  # the iteration of the last checkpoint
    saved_evaluated: bool = False  # that checkpoint has its evaluation
    updating: bool = False  # the weights may be partly updated
    eval_sequences: int = 0  # sequences of a split in each evaluation

    @property
    def evaluated(self):
        """Whether this iteration was evaluated."""
        return self.evaluated_at == self.iter_num

    def record_evaluation(self, val_loss, val_stderr):
        """→ whether the loss of this evaluation is the best so far."""
        self.evaluated_at, self.val_loss, self.val_stderr = self.iter_num, val_loss, val_stderr
        best = val_loss < self.best_val_loss
        if best:
            self.best_val_loss = val_loss
        self.evals_since_best = 0 if best else self.evals_since_best + 1
        return best

    def state(self):
        """What a checkpoint of this iteration keeps, as JSON."""
        return {'iter_num': self.iter_num, 'evaluated': self.evaluated,
                'val_loss': finite(self.val_loss) if self.evaluated else None,
                'val_loss_stderr': finite(self.val_stderr) if self.evaluated else None,
                'best_val_loss': finite(self.best_val_loss),
                'evals_since_best': self.evals_since_best, 'eval_sequences': self.eval_sequences}


class IterationClock:
    """A run of max_iters iterations."""

    def __init__(self, config):
        self.config = config

    def read(self, iter_num):
        """→ how far the run is after `iter_num` updates, from 0 to 1."""
        return iter_num / self.config.max_iters if iter_num < self.config.max_iters else 1.0

    def evaluation_is_due(self, iter_num, fraction_done):
        return iter_num % self.config.eval_interval == 0

    def get_lr(self, iter_num, fraction_done):
        return get_lr(iter_num, self.config)

    def left_s(self):
        return None  # not known

    @contextmanager
    def timed_evaluation(self):
        """A context for an evaluation."""
        yield


class MinuteClock(IterationClock):
    """A run of config.minutes, by rank 0's clock. The time before the first step does not count as
    progress. The last evaluation gets the time that those before it took.

    used_s: seconds used before a resume; began: when this command was started
    """

    def __init__(self, config, used_s, began):
        super().__init__(config)
        self.given_s, self.used_s = 60 * config.minutes, used_s
        self.ends_at = began + self.given_s - used_s
        self.loop_began = None
        self.evaluations_s = []  # what the last ones took
        self.evaluated_at = -1.0  # fraction_done then

    @property
    def evaluation_s(self):
        """What an evaluation takes: the median of the last ones."""
        return statistics.median(self.evaluations_s or [0.0])

    def left_s(self):
        return self.ends_at - time.perf_counter()

    def read(self, iter_num):
        now = time.perf_counter()
        self.loop_began = self.loop_began or now
        before = self.used_s / self.given_s
        time_left = self.ends_at - self.evaluation_s - self.loop_began
        share = (now - self.loop_began) / time_left if time_left > 0 else 1.0
        fraction_done = all_gather(min(1.0, before + (1 - before) * share), gloo_group())[0]
        if fraction_done == 1 and iter_num == 0:
            raise UserError(f'minutes={setting(self.config.minutes)} is too short: setup took '
                            'all of it; give more')
        self.fraction_done = fraction_done
        return fraction_done

    def evaluation_is_due(self, iter_num, fraction_done):
        """At each tenth; less often if evaluations would take more than a tenth of the time."""
        often = min(EVALUATIONS, self.given_s / 10 / max(self.evaluation_s, 1e-9))
        return int(fraction_done * often) > int(self.evaluated_at * often) or self.evaluated_at < 0

    def get_lr(self, iter_num, fraction_done):
        return get_lr(iter_num, self.config, fraction_done)

    @contextmanager
    def timed_evaluation(self):
        began = time.perf_counter()
        self.evaluated_at = self.fraction_done
        yield
        self.evaluations_s = [*self.evaluations_s[-2:], time.perf_counter() - began]


def make_clock(config, start):
    """The clock of a run: TrainConfig, Start → an IterationClock or MinuteClock."""
    if not config.minutes:
        return IterationClock(config)
    used = 0.0
    if start.resumed and (start.weights.state['left_s'] is not None
                          or config.init_from == 'resume'):
        used = used_s(start.weights.state, start.weights.settings()['minutes'])
    return MinuteClock(config, used, start.began)
