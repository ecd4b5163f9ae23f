"""What is looked at while a run trains: health, benchmark scores, and texts by the model."""

import math

import torch

from plaingpt.inference.generation import generate
from plaingpt.monitoring.health import Health
from plaingpt.system.errors import UserError
from plaingpt.system.streams import status

QUESTIONS = 3  # of the validation split, that samples of a tuned model answer
HEALTH_INTERVAL = 100  # iterations between health checks
LOOKS = 5  # of them in a run at least, however short: a curve takes a few points
SAMPLE_START, SAMPLE_TOKENS = '\n', 100  # what a sample of plain text continues; its length


def sample_prompts(config, dataset, val_loader):
    """What samples of a run continue, SAMPLE_START or questions of conversations → (prompts as ids,
    the same as text, options of generate). Raises UserError."""
    tokenizer = dataset.tokenizer()
    if not dataset.has_mask():
        prompt = tokenizer.encode(SAMPLE_START).tolist() or [tokenizer.end_of_text or 0]
        return [prompt], [SAMPLE_START], {'temperature': 0.8, 'top_k': 200}
    prompts = val_loader.questions(QUESTIONS)
    if not prompts:
        raise UserError('no question of the validation split has room for an answer in '
                        f'block_size={config.block_size}')
    return prompts, [tokenizer.decode(prompt) for prompt in prompts], \
        {'temperature': 0, 'end_of_text': tokenizer.end_of_turn}


class Probes:
    """Health every HEALTH_INTERVAL and a sample every sample_interval iterations, benchmarks and,
    for the report, samples at evaluations, logged to `metrics`. Health at least LOOKS times in a
    run; a sharded model, which is made whole for it, has none without a report.

    All processes share the work of a benchmark; health and samples are made where `writing`. The
    run's random numbers and weights stay as they are. parallel: Replicated or Sharded
    """

    def __init__(self, config, dataset, parallel, metrics, val_loader, context, group, writing):
        self.config, self.dataset = config, dataset
        self.parallel, self.metrics = parallel, metrics
        self.context, self.group, self.writing = context, group, writing
        interval = min(HEALTH_INTERVAL, max(1, config.max_iters // LOOKS))
        looking = config.report if parallel.sharded else writing
        self.health = Health(parallel.model, interval if looking else 0, val_loader, context)
        self.tokenizer = None
        if writing and (config.report or config.sample_interval):
            try:
                self.prompts, self.shown, self.how = sample_prompts(config, dataset, val_loader)
                self.tokenizer = dataset.tokenizer()
            except UserError as problem:
                metrics.print(f'warning: no samples of what the model writes: {problem}')

    def around_update(self, iter_num, scaler):
        """A context for the optimizer's step of update `iter_num`, which health measures."""
        return self.health.around_update(iter_num, scaler)

    def check_health(self, iter_num):
        """Log the health of update `iter_num`, where it is due."""
        if not self.health.due(iter_num):
            return
        with self.metrics.paused('health check'), self.parallel.full_model() as model:
            if not self.writing:
                return
            self.metrics.health(iter_num, self.health.measure(model))

    def evaluate(self, progress, losses, stop):
        """Run the benchmarks and make the sample that are due; then log them and the losses (train,
        val of each corpus: each with its standard error), where they were due. Of several corpora
        the mean by their shares counts. Raises Stopped where `stop` is wanted,
        before anything is logged."""
        config, iter_num, scores, text = self.config, progress.iter_num, {}, None
        benchmarks = config.eval_tasks and losses and not config.eval_only
        samples = progress.sample_is_due(config) or (
            config.report and progress.loss_is_due(config))
        if benchmarks or samples:
            with self.parallel.full_model() as model:
                scores = self.score_benchmarks(model, stop) if benchmarks else {}
                text = self.sample(model, stop) if samples else None
        stop.raise_if_stopped()
        parts = self.dataset.parts
        losses, errors = zip(*losses, strict=True) if losses else ((), ())
        val_loss = self.dataset.mean(losses[1:]) if losses else None
        best = progress.record_evaluation(val_loss)
        if losses:
            errors = errors[1:]
            error = None if None in errors else math.sqrt(sum(
                (part.weight * error)**2 for part, error in zip(parts, errors, strict=True)))
            of_each = {part.name: loss for part, loss in zip(parts, losses[1:], strict=True)
                       if part.name}
            self.metrics.evaluation(iter_num, losses[0], val_loss, best, text, of_each, error)
        for name, (values, quote) in scores.items():
            self.metrics.benchmark(iter_num, name, values, quote)
        if text is not None and progress.sample_is_due(config):
            self.metrics.sample(iter_num, text)

    def score_benchmarks(self, model, stop):
        """→ {task of lm_eval: (its scores, the same as a line)} of the model as it is now."""
        from plaingpt.inference import lm_eval_model
        lm = lm_eval_model.lm_eval_model(model, self.dataset.tokenizer(), self.config.batch_size,
                                         self.context, self.group, stop.raise_if_stopped)
        model.eval()
        found = lm_eval_model.run_tasks(lm, lm_eval_model.load_tasks(self.config.eval_tasks),
                                        self.config.eval_tasks_limit)
        model.train()
        return {task: (scores, lm_eval_model.quote_scores(scores))
                for task, scores in found.items()}

    @status.doing('sampling')
    def sample(self, model, stop):
        """A text by the model as it is now, or its answers to questions, or None where none is
        wanted. It ends early where this process received a signal."""
        if not self.tokenizer:
            return None
        model.eval()
        with self.context:
            news = generate(model, self.prompts, SAMPLE_TOKENS, **self.how,
                            on_token=lambda *_: stop.signal is not None,
                            generators=[torch.Generator().manual_seed(self.config.seed)
                                        for _ in self.prompts])
        model.train()
        return '\n'.join(shown + self.tokenizer.decode(new)
                         for shown, new in zip(self.shown, news, strict=True))
