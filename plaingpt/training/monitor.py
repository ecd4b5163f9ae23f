"""Monitoring of a run: logs, benchmarks, samples, health checks, the film and the final report. It
does not affect training."""

import math
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from plaingpt.data.dataset import sample_prompts
from plaingpt.data.overlap import write_sketches
from plaingpt.monitoring.health import Health
from plaingpt.monitoring.metrics import Metrics
from plaingpt.monitoring.references import find_reference
from plaingpt.monitoring.run_record import TRAINED_ON, describe_run, trim_logs
from plaingpt.monitoring.run_report import write_report
from plaingpt.system.devices import eager
from plaingpt.system.distributed import (
    StopRequest,
    all_reduce_mean,
    gloo_group,
    is_sharded,
    print0,
)
from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable, write_json
from plaingpt.system.formatting import command_for, quoted
from plaingpt.training.bad_steps import SkippedSteps, StepCounter
from plaingpt.training.checkpoint import archive_previous_run, find
from plaingpt.training.evaluation import full_model, val_bytes_per_token
from plaingpt.training.optimizers import ema_weights
from plaingpt.training.progress import FINISHED, TIME_UP
from plaingpt.training.settings import NOT_COMPARED
from plaingpt.training.start import sketch_texts

HEALTH_INTERVAL = 100  # iterations between health checks
MIN_HEALTH_CHECKS = 5  # even in a short run, because a curve needs a few points
SAMPLE_TOKENS = 100  # length of a sample


class Monitor:
    """Monitors a train.Run and writes its logs to out_dir, after moving a previous run out of the
    way. A sharded model is gathered for health checks only if report=True.

    Benchmarks run on all processes; health checks and samples only on the one that is `writing`.
    The run's weights and random state are left unchanged.
    """

    def __init__(self, run):
        config, start = run.config, run.start
        self.run = run
        self.out_dir = Path(config.out_dir)
        self.resumed_at = run.progress.iter_num if start.resumed else None
        self.writing = run.world.is_main and not config.is_read_only
        self.record = describe_run(run)
        self.record['reference'] = find_reference(self.record, NOT_COMPARED)
        saved_state = start.checkpoint.state if start.resumed else {}
        backends, sketches = [], []
        if run.world.is_main and not start.resumed:
            sketches = sketch_texts(start, run.dataset, run.train_data, run.val_data)
        if self.writing:
            self.open_out_dir()
            if sketches:
                write_sketches(self.out_dir / TRAINED_ON, sketches)
            if config.log_to or config.wandb_log:
                from plaingpt.monitoring.backends import open_backends
                backends = open_backends(config, self.record, saved_state.get('wandb_id'))
        self.metrics = Metrics(run, self.record, backends,
                               val_bytes_per_token(run) if run.world.is_main else None,
                               saved_state.get('elapsed_s', 0.0))
        self.skipped = SkippedSteps(run.step.bad_steps, self.out_dir / 'anomalies.jsonl',
                                    run.train_data)
        self.counter = StepCounter(run.step, run.progress.iter_num)
        sharded = is_sharded(run.model.lm_head.weight)
        checks_health = config.report if sharded else self.writing
        interval = min(HEALTH_INTERVAL, max(1, config.max_iters // MIN_HEALTH_CHECKS))
        self.health = Health(run.model, interval if checks_health else 0, run.val_data,
                             run.step.autocast)
        self.film = None
        self.tokenizer = None
        if self.writing and (config.report or config.film):
            try:
                self.prompts, self.sampling, self.end_id = sample_prompts(run.dataset, run.val_data)
                self.tokenizer = run.dataset.tokenizer()
            except UserError as problem:
                self.metrics.print(f'warning: no samples: {problem}')
        if config.film and sharded:
            self.metrics.print('warning: film=True is not supported with parallel=fsdp; no film '
                               'will be recorded')
        elif config.film and self.tokenizer:
            from plaingpt.training.film import Film
            self.film = Film(run, self.sample, self.metrics.print)

    def open_out_dir(self):
        """Archive what this run would overwrite, and write its initial run.json."""
        progress, resumed = self.run.progress, self.run.start.resumed
        make_writable(self.out_dir / 'checkpoints')
        archive = archive_previous_run(self.out_dir, progress.iter_num if resumed else -1)
        if archive:
            moved = 'later steps' if resumed else 'the previous run'
            print0(f'moved {moved} to {archive}')
            self.record['went_back_to'] = progress.iter_num if resumed else None
        if resumed:
            trim_logs(self.out_dir, progress.iter_num, progress.evaluated)
        write_json(self.out_dir / 'run.json', self.record)

    def around_update(self, iter_num):
        """A context for update `iter_num`, which the health check measures. Before the first
        update, the film records the initial model."""
        if iter_num == 1:
            self.record_film(0, 0.0)
        return self.health.around_update(iter_num, self.run.step.scaler)

    def after_update(self, iter_num, fraction_done, loss, lr, grad_norm):
        """Log update `iter_num`, run a health check and record the film, whichever is due.
        fraction_done: before this update"""
        metrics = self.metrics
        metrics.bar.update()
        if iter_num % self.run.config.log_interval == 0:
            metrics.step(iter_num, all_reduce_mean(loss.clone()), lr, grad_norm)
            self.report_optimizer_misuse()
            self.skipped.report(iter_num, metrics.print)  # the host has just waited for the device
        if self.health.due(iter_num):
            with metrics.paused('health check'), self.full_model() as model:
                if self.writing:
                    metrics.write(iter_num, **self.health.measure(model))
        self.record_film(iter_num, fraction_done)

    def report_optimizer_misuse(self):
        """Log missing and extra steps of the optimizer, for a diagnosis."""
        iter_num = self.run.progress.iter_num
        if errors := self.counter.errors(iter_num):
            self.metrics.write(iter_num, **errors)

    def record_film(self, iter_num, fraction_done):
        if self.film and self.film.is_due(iter_num, fraction_done):
            with self.metrics.paused('filming'), ema_weights(self.run.step.optimizer), \
                    eager(self.run.compile):
                self.film.record(iter_num)

    @contextmanager
    def full_model(self):
        """A context with the unsharded model in eager mode, because shapes other than those of
        training would recompile it."""
        run = self.run
        with eager(run.compile), full_model(run.model, run.step.autocast) as model:
            yield model

    def score_and_sample(self, *losses):
        """Return ({task: its scores}, a sample or None), as far as they are enabled. Both are
        skipped if a loss is NaN, and the sample for a new model, which writes random tokens."""
        config = self.run.config
        needs_scores = config.eval_tasks and not config.eval_only
        needs_sample = config.report and not self.run.is_new
        scores, sample = {}, None
        if not (needs_scores or needs_sample) or any(map(math.isnan, losses)):
            return scores, sample
        with self.full_model() as model:
            if needs_scores:
                scores = self.score_benchmarks(model)
            if needs_sample:
                sample = self.sample(model)
        return scores, sample

    def log_scores(self, scores):
        """Log {lm_eval task: its scores}."""
        if scores:
            from plaingpt.inference.lm_eval_model import format_scores
            for name, values in scores.items():
                self.metrics.benchmark(self.run.progress.iter_num, name, values,
                                       format_scores(values))

    def score_benchmarks(self, model):
        """Run the lm_eval tasks and return {task: its scores}."""
        from plaingpt.inference.lm_eval_model import load_tasks, score_tasks
        run, config = self.run, self.run.config
        model.eval()
        scores = score_tasks(
            load_tasks(config.eval_tasks), config.eval_tasks_limit, model, run.dataset.tokenizer(),
            config.batch_size, run.step.autocast, gloo_group(), run.stop.raise_if_stopped)
        model.train()
        return scores

    def sample(self, model, tokens=SAMPLE_TOKENS):
        """Generate a sample: a text, or answers to questions. Returns None without a tokenizer. A
        signal ends it early."""
        if not self.tokenizer:
            return None
        model.eval()
        with self.run.step.autocast:
            texts = [self.tokenizer.decode([*prompt, *self.continue_prompt(model, prompt, tokens)])
                     for prompt in self.prompts]
        model.train()
        return '\n'.join(texts)

    def continue_prompt(self, model, prompt, tokens):
        """Generate the token ids that follow a prompt."""
        new_ids = []
        idx = torch.tensor([prompt], device=model.lm_head.weight.device)
        generator = torch.Generator(idx.device).manual_seed(self.run.config.seed)
        while len(new_ids) < tokens and self.run.stop.signal is None:
            idx = model.generate(idx, 1, **self.sampling, generator=generator)
            if idx[0, -1] == self.end_id:
                break
            new_ids.append(idx[0, -1].item())
        return new_ids

    def state(self):
        """Logging state to save in a checkpoint."""
        return {'elapsed_s': self.metrics.elapsed_s(), 'wandb_id': self.metrics.wandb_id()}

    def close(self, ending):
        """Close the logs, write the report, and print how the run ended. Raises UserError if the
        run gave up; exits with status 1 if its last checkpoint could not be saved."""
        run, config = self.run, self.run.config
        self.report_optimizer_misuse()
        self.metrics.close()
        if run.world.is_main and not config.eval_only:
            record = dict(self.record, config=asdict(config), ending=ending,
                          end=self.metrics.at(run.progress.iter_num))
            write_json(self.out_dir / 'run.json', record)
            if config.report:
                write_report(self.out_dir, record, print0)
        if self.film:
            print0(f'recorded film.jsonl; to view it: {command_for("plot")} --film '
                   f'{quoted(config.out_dir)}')
        if self.skipped.gave_up:
            raise self.skipped.error()
        if run.saver.failed:
            print0(f'{config.out_dir}: could not save the last checkpoint (see the warning above); '
                   'to resume from the previous one, repeat the command with --init_from=auto')
            sys.exit(1)
        if run.world.is_main and not config.eval_only:
            for line in self.closing_lines(ending):
                print0(line)

    def closing_lines(self, ending):
        """Console lines that say how the run ended and what to do next."""
        progress = self.run.progress
        iter_num = progress.iter_num
        out_dir_option = f'--out_dir={quoted(self.run.config.out_dir)}'
        if ending in StopRequest.NAMES and not iter_num:
            return [f'{ending}: stopped before the first iteration; there is nothing to resume']
        if ending in StopRequest.NAMES:
            return [f'{ending}: stopped after iteration {iter_num}; to resume: '
                    f'{command_for("train")} {out_dir_option} --init_from=resume']
        if self.resumed_at == iter_num:
            return [f'this run is already finished: no step after iteration {iter_num} ({ending}); '
                    'to continue, raise --max_iters or --minutes, or set --patience=0']
        lines = []
        if ending not in (FINISHED, TIME_UP):
            lines.append(f'stopped after iteration {iter_num}: {ending}')
        if not iter_num:
            return lines
        lines.append(f'done: saved checkpoints in {self.run.config.out_dir}/checkpoints; '
                     f'to sample: {command_for("sample")} {out_dir_option}')
        best = find(self.out_dir, 'best')
        if best.iter_num != iter_num:
            lines.append(f'sample.py uses the best checkpoint (iteration {best.iter_num}, '
                         f'validation loss {best.val_loss:.4f}); --checkpoint=latest uses the last '
                         'one')
        return lines
