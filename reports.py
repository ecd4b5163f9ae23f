"""What a training run tells of itself now and then: benchmark scores, and a text it writes."""

import torch

from generation import generate
from runtime import launched_world, say
from scoring import open_benchmark, quote_benchmark


class Reports:
    """Benchmarks every eval_tasks_interval and a sample every sample_interval iterations."""

    def __init__(self, config, dataset, model, metrics, context, group):
        self.config, self.model, self.metrics = config, model, metrics
        self.context, self.group = context, group
        self.tokenizer, self.benchmarks = None, []
        if config.eval_tasks_interval or config.sample_interval:
            self.tokenizer = dataset.tokenizer()
        if config.eval_tasks_interval:
            self.benchmarks = [open_benchmark(name, self.tokenizer, model.config.block_size)
                               for name in config.eval_tasks.split(',')]

    def after(self, iter_num):
        """Make those that are due after `iter_num` updates."""
        if self.benchmarks and iter_num % self.config.eval_tasks_interval == 0:
            for benchmark in self.benchmarks:
                scores = benchmark.score(self.model, self.config.batch_size, self.context,
                                         self.group)
                self.metrics.benchmark(iter_num, benchmark.name, scores, quote_benchmark(scores))
        if self.config.sample_interval and iter_num % self.config.sample_interval == 0 \
                and launched_world().is_main:
            say(f'---------------\n{self.write()}\n---------------')

    def write(self):
        """A text of 100 tokens by the model as it is; the run's random numbers stay as they are."""
        start = self.config.sample_start
        ids = self.tokenizer.encode(start).tolist() or [self.tokenizer.end_of_text or 0]
        self.model.eval()
        with self.context:
            [new] = generate(self.model, [ids], 100, temperature=0.8, top_k=200,
                             generators=[torch.Generator().manual_seed(self.config.seed)])
        self.model.train()
        return start + self.tokenizer.decode(new)
