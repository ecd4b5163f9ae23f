"""What watches a run while it trains: its logs, benchmarks, samples, health, the film, and what it
says at its end. The run is the same without it."""

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
from plaingpt.monitoring.run_record import describe_run
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
from plaingpt.training.evaluation import evaluated_bytes, full_model
from plaingpt.training.optimizers import averaged
from plaingpt.training.progress import FINISHED, TIME_UP
from plaingpt.training.settings import WITHOUT_EFFECT
from plaingpt.training.start import TRAINED_ON, archive_previous_run, sketch_texts, trim_logs
from plaingpt.training.step import SkippedSteps

HEALTH_INTERVAL = 100  # iterations between health checks
LOOKS = 5  # health checks in a short run, at least: a curve needs a few points
SAMPLE_TOKENS = 100  # in a sample


class Monitor:
    """Watches a train.Run, and writes what it sees into out_dir, from where it moves an earlier run
    first. A sharded model is gathered for health checks only if a report is wanted.

    All processes share the work of a benchmark; health and samples are measured where `writing`.
    The run's random numbers and weights stay as they are.
    """

    def __init__(self, run):
        config, start = run.config, run.start
        self.run, self.out_dir = run, Path(config.out_dir)
        self.began_at = run.progress.iter_num if start.resumed else None
        self.writing = run.world.is_main and not config.is_read_only
        self.record = describe_run(run)
        self.record['reference'] = find_reference(self.record, WITHOUT_EFFECT)
        saved = start.checkpoint.state if start.resumed else {}
        backends, sketches = [], []
        if run.world.is_main and not start.resumed:
            sketches = sketch_texts(start, run.dataset, run.train_data, run.val_data)
        if self.writing:
            self.open_out_dir()
            if sketches:
                write_sketches(self.out_dir / TRAINED_ON, sketches)
            if config.log_to or config.wandb_log:
                from plaingpt.monitoring.backends import open_backends
                backends = open_backends(config, self.record, saved.get('wandb_id'))
        self.metrics = Metrics(run, self.record, backends,
                               evaluated_bytes(run) if run.world.is_main else None,
                               saved.get('elapsed_s', 0.0))
        self.skipped = SkippedSteps(run.step, self.out_dir / 'anomalies.jsonl', run.train_data)
        sharded = is_sharded(run.model.lm_head.weight)
        looking = config.report if sharded else self.writing
        interval = min(HEALTH_INTERVAL, max(1, config.max_iters // LOOKS))
        self.health = Health(run.model, interval if looking else 0, run.val_data,
                             run.step.autocast)
        self.film = self.tokenizer = None
        if self.writing and (config.report or config.film):
            try:
                self.prompts, self.how, self.end = sample_prompts(run.dataset, run.val_data)
                self.tokenizer = run.dataset.tokenizer()
            except UserError as problem:
                self.metrics.print(f'warning: no samples of what the model writes: {problem}')
        if config.film and sharded:
            self.metrics.print('warning: no film: with parallel=fsdp no process has all weights')
        elif config.film and self.tokenizer:
            from plaingpt.training.film import Film
            self.film = Film(run, self.sample, self.metrics.print)

    def open_out_dir(self):
        """Archive what this run would overwrite, and begin its run.json."""
        progress, resumed = self.run.progress, self.run.start.resumed
        make_writable(self.out_dir / 'checkpoints')
        if archive := archive_previous_run(self.out_dir, progress.iter_num if resumed else -1):
            moved = 'later steps' if resumed else 'the previous run'
            print0(f'moved {moved} to {archive}')
            self.record['went_back_to'] = progress.iter_num if resumed else None
        if resumed:
            trim_logs(self.out_dir, progress.iter_num, progress.evaluated)
        write_json(self.out_dir / 'run.json', self.record)

    def around_update(self, iter_num):
        """A context for update `iter_num`, which health measures. Before the first one the film
        looks at the new model."""
        if iter_num == 1:
            self.take_film(0, 0.0)
        return self.health.around_update(iter_num, self.run.step.scaler)

    def after_update(self, iter_num, fraction_done, loss, lr, grad_norm):
        """Log update `iter_num`, its health and the film, if they are due. fraction_done: before
        this update"""
        metrics = self.metrics
        metrics.bar.update()
        if iter_num % self.run.config.log_interval == 0:
            metrics.step(iter_num, all_reduce_mean(loss.clone()), lr, grad_norm)
            self.skipped.report(iter_num, metrics.print)  # the host waits for the device anyway
        if self.health.due(iter_num):
            with metrics.paused('health check'), self.full_model() as model:
                if self.writing:
                    metrics.write(iter_num, **self.health.measure(model))
        self.take_film(iter_num, fraction_done)

    def take_film(self, iter_num, fraction_done):
        if self.film and self.film.is_due(iter_num, fraction_done):
            with self.metrics.paused('filming'), averaged(self.run.step.optimizer), \
                    eager(self.run.compile):
                self.film.take(iter_num)

    @contextmanager
    def full_model(self):
        """A context with the whole model, in eager mode: shapes differ from those of training, and
        compiled blocks would be compiled again."""
        run = self.run
        with eager(run.compile), full_model(run.model, run.step.autocast) as model:
            yield model

    def score_and_sample(self, *losses):
        """→ ({task: its scores}, a sample or None), if the settings ask for them and the losses of
        this evaluation are numbers. A new model would write random tokens."""
        config = self.run.config
        benchmarks = config.eval_tasks and not config.eval_only
        samples = config.report and not self.run.is_new
        if not (benchmarks or samples) or any(map(math.isnan, losses)):
            return {}, None
        with self.full_model() as model:
            scores = self.score_benchmarks(model) if benchmarks else {}
            return scores, self.sample(model) if samples else None

    def log_scores(self, scores):
        """Log {task of lm_eval: its scores}."""
        if scores:
            from plaingpt.inference.lm_eval_model import quote_scores
            for name, values in scores.items():
                self.metrics.benchmark(self.run.progress.iter_num, name, values,
                                       quote_scores(values))

    def score_benchmarks(self, model):
        """→ {task of lm_eval: its scores} of the model as it is now."""
        from plaingpt.inference.lm_eval_model import load_tasks, score_tasks
        run, config = self.run, self.run.config
        model.eval()
        scores = score_tasks(
            load_tasks(config.eval_tasks), config.eval_tasks_limit, model, run.dataset.tokenizer(),
            config.batch_size, run.step.autocast, gloo_group(), run.stop.raise_if_stopped)
        model.train()
        return scores

    def sample(self, model, tokens=SAMPLE_TOKENS):
        """A text by the model as it is now, or its answers to questions, or None where no sample is
        wanted. A signal ends it early."""
        if not self.tokenizer:
            return None
        model.eval()
        with self.run.step.autocast:
            news = [self.continue_prompt(model, prompt, tokens) for prompt in self.prompts]
        model.train()
        return '\n'.join(self.tokenizer.decode([*prompt, *new])
                         for prompt, new in zip(self.prompts, news, strict=True))

    def continue_prompt(self, model, prompt, tokens):
        """→ the ids that follow those of a prompt."""
        idx, new = torch.tensor([prompt], device=model.lm_head.weight.device), []
        generator = torch.Generator(idx.device).manual_seed(self.run.config.seed)
        while len(new) < tokens and self.run.stop.signal is None:
            idx = model.generate(idx, 1, **self.how, generator=generator)
            if idx[0, -1] == self.end:
                break
            new.append(idx[0, -1].item())
        return new

    def state(self):
        """What a checkpoint keeps of the logs, as JSON."""
        return {'elapsed_s': self.metrics.elapsed_s(), 'wandb_id': self.metrics.wandb_id()}

    def close(self, ending):
        """Close the logs, write the report, and say how the run ended. Raises UserError where it
        gave up; exits where its last checkpoint could not be written."""
        run, config = self.run, self.run.config
        self.metrics.close()
        if run.world.is_main and not config.eval_only:
            record = dict(self.record, config=asdict(config), ending=ending,
                          end=self.metrics.at(run.progress.iter_num))
            write_json(self.out_dir / 'run.json', record)
            if config.report:
                write_report(self.out_dir, record, print0)
        if self.film:
            print0(f'{command_for("plot")} --film {quoted(config.out_dir)} shows how it learned')
        if self.skipped.gave_up:
            raise self.skipped.error()
        if run.saver.failed:
            print0(f'the last checkpoint could not be written in {config.out_dir}: see the '
                   'warning, then start again with --init_from=auto, which resumes from the one '
                   'before, if any')
            sys.exit(1)
        if not config.eval_only:
            for line in self.last_words(ending):
                print0(line)

    def last_words(self, ending):
        """How the run ended, and what can be done with it → lines."""
        progress, iter_num = self.run.progress, self.run.progress.iter_num
        command = f'--out_dir={quoted(self.run.config.out_dir)}'
        if ending in StopRequest.NAMES and not iter_num:
            return [f'{ending}: stopped before the first iteration; there is nothing to resume']
        if ending in StopRequest.NAMES:
            return [f'{ending}: stopped after iteration {iter_num}; to resume: '
                    f'{command_for("train")} {command} --init_from=resume']
        if self.began_at == iter_num:
            return [f'this run is already finished: no step after iteration {iter_num} ({ending}); '
                    'to continue, raise --max_iters or --minutes, or set --patience=0']
        lines = []
        if ending not in (FINISHED, TIME_UP):
            lines.append(f'stopped after iteration {iter_num}: {ending}')
        if iter_num:
            lines.append(f'done: {self.run.config.out_dir}/checkpoints has the weights; '
                         f'{command_for("sample")} {command}')
        if progress.evals_since_best:
            lines.append('sample.py takes the best weights, of validation loss '
                         f'{progress.best_val_loss:.4f}; --checkpoint=latest takes the last')
        return lines
