"""How far a run is: a number from 0 to 1, which drives the learning rate, the evaluations and the
end. It counts iterations, or with --minutes the time.
"""

import math
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from plaingpt.monitoring.run_record import finite
from plaingpt.system.distributed import all_gather, gloo_group
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import command_for, quoted, setting
from plaingpt.training.schedules import get_lr
from plaingpt.training.start import used_s

EVALUATIONS = 10  # of a run of minutes, after the first


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
    updating: bool = False  # the weights may be changed in part
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

    def evaluation_is_due(self, iter_num, done):
        return iter_num % self.config.eval_interval == 0

    def get_lr(self, iter_num, done):
        return get_lr(iter_num, self.config)

    def left_s(self):
        return None  # not known

    @contextmanager
    def stopped(self):
        """A context: an evaluation and a save."""
        yield


class MinuteClock(IterationClock):
    """A run of config.minutes, as rank 0's clock says. Time that was needed before the first step
    is lost; the last evaluation and save have the time that the ones before took.

    used_s: what of it was used before a resume; began: when this command was given
    """

    def __init__(self, config, used_s, began):
        super().__init__(config)
        self.given_s, self.used_s = 60 * config.minutes, used_s
        self.ends_at = began + self.given_s - used_s
        self.began = None  # when the loop did
        self.stopped_s = 0.0  # what an evaluation and a save took
        self.evaluated_at = -1.0

    def left_s(self):
        return self.ends_at - time.perf_counter()

    def read(self, iter_num):
        now = time.perf_counter()
        self.began = self.began or now
        before = self.used_s / self.given_s
        time_left = self.ends_at - self.stopped_s - self.began
        share = (now - self.began) / time_left if time_left > 0 else 1.0
        done = all_gather(min(1.0, before + (1 - before) * share), gloo_group())[0]
        if done == 1 and iter_num == 0:
            raise UserError(f'minutes={setting(self.config.minutes)} is too short: there is no '
                            'time for a step after setup and evaluations; give more, or a smaller '
                            '--eval_iters')
        return done

    def evaluation_is_due(self, iter_num, done):
        """At each tenth, unless evaluations take more than a tenth of the time."""
        often = min(EVALUATIONS, self.given_s / 10 / max(self.stopped_s, 1e-9))
        due = int(done * often) > int(self.evaluated_at * often) or self.evaluated_at < 0
        if due:
            self.evaluated_at = done
        return due

    def get_lr(self, iter_num, done):
        return get_lr(iter_num, self.config, done)

    @contextmanager
    def stopped(self):
        began = time.perf_counter()
        yield
        self.stopped_s = time.perf_counter() - began


def make_clock(config, start):
    """The clock of a run: TrainConfig, Start → an IterationClock or MinuteClock."""
    if not config.minutes:
        return IterationClock(config)
    used = 0.0
    if start.resumed and (start.weights.state['left_s'] is not None
                          or config.init_from == 'resume'):
        used = used_s(start.weights.state, start.weights.settings()['minutes'])
    return MinuteClock(config, used, start.began)


@contextmanager
def saved_when_it_fails(run, monitor, save):
    """Save a train.Run that an error ends, as it was before the step, by train.py's `save`. Of
    several processes the others know nothing of the error."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the first error says more
            if run.world.size == 1 and not run.progress.updating:
                save(run, monitor)
                run.saver.wait()
                if run.progress.saved_at and not run.saver.failed:
                    error.add_note(f'iteration {run.progress.saved_at} is saved: '
                                   f'{command_for("train")} --out_dir={quoted(run.config.out_dir)} '
                                   '--init_from=resume')
        raise
