"""What a training run tells of itself now and then: benchmark scores, and a text it writes."""

import torch

from plaingpt.inference.generation import generate
from plaingpt.inference.scoring import open_benchmark, quote_benchmark
from plaingpt.system.errors import UserError


class Reports:
    """Benchmarks every eval_tasks_interval and a sample every sample_interval iterations.

    writing: whether this process writes samples
    """

    def __init__(self, config, dataset, model, metrics, context, group, writing):
        self.config, self.model, self.metrics = config, model, metrics
        self.context, self.group = context, group
        self.writing, self.benchmarks = writing and config.sample_tokens > 0, []
        if config.eval_tasks_interval:
            tokenizer = dataset.tokenizer()
            self.benchmarks = [open_benchmark(name, tokenizer, model.config.block_size)
                               for name in config.eval_tasks.split(',')]
        if self.writing:
            try:
                self.tokenizer = dataset.tokenizer()
                self.start = self.tokenizer.encode(config.sample_start).tolist() \
                    or [self.tokenizer.end_of_text or 0]
            except UserError as problem:
                metrics.say(f'warning: no samples of what the model writes: {problem}')
                self.writing = False

    def after(self, iter_num):
        """Make those that are due after `iter_num` updates."""
        if self.benchmarks and iter_num % self.config.eval_tasks_interval == 0:
            for benchmark in self.benchmarks:
                scores = benchmark.score(self.model, self.config.batch_size, self.context,
                                         self.group)
                self.metrics.benchmark(iter_num, benchmark.name, scores, quote_benchmark(scores))
        if self.writing and self.config.sample_interval \
                and iter_num % self.config.sample_interval == 0:
            self.metrics.sample(iter_num, self.write())

    def write(self):
        """A text by the model as it is, or None where none is wanted. The run's random numbers
        stay as they are."""
        if not self.writing:
            return None
        self.model.eval()
        with self.context:
            [new] = generate(self.model, [self.start], self.config.sample_tokens, temperature=0.8,
                             top_k=200,
                             generators=[torch.Generator().manual_seed(self.config.seed)])
        self.model.train()
        return self.config.sample_start + self.tokenizer.decode(new)


class Probes:
    def __init__(self, config, dataset, model, metrics, val_loader, context, group, is_main):
        from plaingpt.monitoring.health import Health
        self.metrics = metrics
        self.health = Health(model, config.health_interval if is_main else 0, val_loader, context)
        self.reports = Reports(config, dataset, model, metrics, context, group, is_main)

    def around_update(self, iter_num, scaler):
        return self.health.around_update(iter_num, scaler)

    def sample(self):
        return self.reports.write()

    def after_step(self, iter_num):
        with self.metrics.paused():
            if self.health.due(iter_num):
                self.metrics.health(iter_num, self.health.look())
            self.reports.after(iter_num)
