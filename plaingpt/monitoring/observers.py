"""Observers of a run: health checks, samples and benchmarks, and the film. They look at the model
and return numbers and texts to log. They leave weights and random state unchanged, but take time,
which counts in a timed run."""

import math
from contextlib import contextmanager

from plaingpt.core.bad_steps import StepCounter
from plaingpt.core.evaluation import full_model
from plaingpt.core.optimizers import ema_weights
from plaingpt.monitoring.health import Health
from plaingpt.monitoring.sampling import Sampler, score_benchmarks
from plaingpt.system.devices import eager
from plaingpt.system.distributed import is_sharded, launched_world
from plaingpt.system.errors import UserError

HEALTH_INTERVAL = 100  # iterations between health checks
MIN_HEALTH_CHECKS = 5  # even in a short run, because a curve needs a few points


class Observers:
    """The observers of a Run. Benchmarks run on all processes, the others on rank 0. If the
    model is sharded, it is gathered for health checks only if report=True."""

    def __init__(self, run):
        config, log = run.config, run.log
        self.run, self.log = run, log
        self.writing = launched_world().is_main and not config.is_read_only
        sharded = is_sharded(run.model.lm_head.weight)
        checks_health = config.report if sharded else self.writing
        interval = min(HEALTH_INTERVAL, max(1, config.max_iters // MIN_HEALTH_CHECKS))
        self.health = Health(run.model, interval if checks_health else 0, run.val_data,
                             run.step.autocast)
        self.counter = StepCounter(run.step, run.progress.iter_num)
        self.sampler = None
        self.film = None
        if self.writing and (config.report or config.film):
            try:
                self.sampler = Sampler(run)
            except UserError as problem:
                log.print(f'warning: no samples: {problem}')
        if config.film and sharded:
            log.print('warning: film=True is not supported with parallel=fsdp; no film will be '
                      'recorded')
        elif config.film and self.sampler:
            from plaingpt.monitoring.film import Film
            self.film = Film(run, self.sampler)

    def around_update(self, iter_num):
        """A context for update `iter_num`, which the health check measures. Before the first
        update, the film records the initial model."""
        if iter_num == 1:
            self.record_film(0, 0.0)
        return self.health.around_update(iter_num, self.run.step.scaler)

    def on_step(self, iter_num, fraction_done):
        """Run a health check and record the film, whichever is due after update `iter_num`.
        fraction_done: before this update"""
        if iter_num % self.run.config.log_interval == 0:
            self.report_optimizer_misuse()
        if self.health.due(iter_num):
            with self.log.paused('health check'), self.full_model() as model:
                if self.writing:
                    self.log.write(iter_num, **self.health.measure(model))
        self.record_film(iter_num, fraction_done)

    def report_optimizer_misuse(self):
        """Log missing and extra steps of the optimizer, for a diagnosis."""
        iter_num = self.run.progress.iter_num
        if errors := self.counter.errors(iter_num):
            self.log.write(iter_num, **errors)

    def record_film(self, iter_num, fraction_done):
        if self.film and self.film.is_due(iter_num, fraction_done):
            with self.log.paused('filming'), ema_weights(self.run.step.optimizer), \
                    eager(self.run.step.compile):
                self.film.record(iter_num)

    @contextmanager
    def full_model(self):
        """A context with the unsharded model in eager mode, because shapes other than those of
        training would recompile it."""
        step = self.run.step
        with eager(step.compile), full_model(self.run.model, step.autocast) as model:
            yield model

    def on_evaluation(self, *losses):
        """→ ({task: its scores}, a sample or None), as far as they are enabled. Both are skipped if
        one of the losses is NaN, and the sample for a new model, which writes random tokens."""
        config = self.run.config
        needs_scores = config.eval_tasks and not config.eval_only
        needs_sample = config.report and not self.run.is_new
        scores, sample = {}, None
        if not (needs_scores or needs_sample) or any(map(math.isnan, losses)):
            return scores, sample
        with self.full_model() as model:
            if needs_scores:
                scores = score_benchmarks(self.run, model)
            if needs_sample and self.sampler:
                sample = self.sampler.sample(model)
        return scores, sample

    def on_end(self):
        self.report_optimizer_misuse()
