"""Measure a model while it trains: losses, benchmarks, samples, health, the film."""

import math
from contextlib import nullcontext

import torch
from tqdm import tqdm

from plaingpt.data.dataset import sample_prompts
from plaingpt.monitoring.health import Health
from plaingpt.system.distributed import (
    all_gather,
    gloo_group,
    is_sharded,
    launched_world,
    print0,
)
from plaingpt.system.errors import UserError
from plaingpt.training.averaging import averaged

HEALTH_INTERVAL = 100  # iterations between health checks
LOOKS = 5  # health checks in a short run, at least: a curve needs a few points
SAMPLE_TOKENS = 100  # in a sample


@torch.no_grad()
def mean_loss(model, loader, sequences, context, stop=None, label=None):
    """→ (mean loss in nats a token, its standard error). sequences: how many to read, evenly spaced
    over the split. model returns (logits or None, the loss of a batch, or those of its sequences).
    The standard error is that of the mean of these losses, None if there is one.
    Each process evaluates its share. stop: a StopRequest, checked between batches.
    label: of a progress bar. Raises Stopped.
    """
    model.eval()
    parts = []  # (targets, in sequences; loss) of each batch, or of each sequence
    for starts in tqdm(loader.eval_batches(sequences), label, leave=False,
                       disable=None if label and launched_world().is_main else True):
        if stop:
            stop.raise_if_stopped()
        idx, targets = loader.eval_batch(starts)  # even an empty one: all gather a sharded model
        with context:
            _, loss = model(idx, targets)
        counts = (targets != -1).sum(1) / targets.size(1)  # (B,)
        counts = counts if loss.dim() else counts.sum()
        parts.append(torch.stack((counts, loss.float())).view(2, -1))
    model.train()
    shares = all_gather(torch.cat(parts, dim=1).tolist(), gloo_group())
    n, losses = torch.cat([torch.tensor(share, dtype=torch.float64) for share in shares], dim=1)
    loss = (n * losses).sum() / n.sum()
    variance, num = (n * (losses - loss)**2).sum() / n.sum(), int((n > 0).sum())
    return loss.item(), math.sqrt(variance / (num - 1)) if num > 1 else None


def full_model(model, context):
    """A context with a GPT that a process can use by itself: the model, or, where it is sharded, a
    copy that is gathered from all processes."""
    if not is_sharded(model.lm_head.weight):
        return nullcontext(model)
    from plaingpt.parallel.sharding import gathered
    return gathered(model, context)


def evaluated_bytes(run):
    """UTF-8 bytes of text a token: the mean over the validation tokens that each evaluation reads
    (for a mixture the weighted mean), or None where it is not known."""
    try:
        sizes = run.dataset.token_bytes('val')
    except UserError as problem:  # the tokenizer could not be downloaded
        print0(f'no bits per byte: {problem}')
        return None
    return None if sizes is None else run.dataset.mean(
        part.mean_target(sizes, run.progress.eval_sequences)
        for part in run.val_data.parts)


def check_tasks(config):
    """See that the benchmarks of a run can be loaded. Raises UserError."""
    if config.eval_tasks and launched_world().local_rank == 0:
        from plaingpt.inference.lm_eval_model import load_tasks
        load_tasks(config.eval_tasks)


class Watching:
    """Looks at a train.Run: benchmarks and a sample at evaluations, health every HEALTH_INTERVAL
    iterations and at least LOOKS times, and the film. It logs to run.metrics. A sharded model is
    gathered for health checks only if a report is wanted.

    All processes share the work of a benchmark; health and samples are made where `writing`. The
    run's random numbers and weights stay as they are.
    """

    def __init__(self, run, group, writing):
        self.run, self.group, self.writing = run, group, writing
        config = run.config
        interval = min(HEALTH_INTERVAL, max(1, config.max_iters // LOOKS))
        sharded = is_sharded(run.model.lm_head.weight)
        looking = config.report if sharded else writing
        self.health = Health(run.model, interval if looking else 0, run.val_data, run.context)
        self.film = self.tokenizer = None
        if writing and (config.report or config.film):
            try:
                self.prompts, self.how, self.end = sample_prompts(run.dataset, run.val_data)
                self.tokenizer = run.dataset.tokenizer()
            except UserError as problem:
                run.metrics.print(f'warning: no samples of what the model writes: {problem}')
        if config.film and sharded:
            run.metrics.print('warning: no film: with parallel=fsdp no process has the whole model')
        elif config.film and self.tokenizer:
            from plaingpt.training.film import Film
            self.film = Film(run, self.sample)

    def around_update(self, iter_num, scaler):
        """A context for the optimizer's step of update `iter_num`, which health measures. Before
        the first one the film looks at the new model."""
        if iter_num == 1:
            self.take_film(0)
        return self.health.around_update(iter_num, scaler)

    def look_inside(self, iter_num):
        """Log the health of update `iter_num`, and take the film, where they are due."""
        metrics = self.run.metrics
        if self.health.due(iter_num):
            with metrics.paused('health check'), self.full_model() as model:
                if self.writing:
                    metrics.write(iter_num, **self.health.measure(model))
        self.take_film(iter_num)

    def take_film(self, iter_num):
        if self.film and iter_num in self.film.moments:
            with self.run.metrics.paused('filming'), averaged(self.run.optimizer):
                self.film.take(iter_num)

    def full_model(self):
        return full_model(self.run.model, self.run.context)

    def look(self, losses):
        """→ ({task: its scores}, a sample or None), as far as the settings ask for them, and the
        losses of this evaluation are numbers."""
        config = self.run.config
        benchmarks = config.eval_tasks and not config.eval_only
        asked = benchmarks or config.report
        if not asked or any(math.isnan(loss) for loss, _ in losses):
            return {}, None
        with self.full_model() as model:
            scores = self.score_benchmarks(model) if benchmarks else {}
            return scores, self.sample(model) if config.report else None

    def log(self, losses, val_loss, is_best, scores, text):
        """Log what an evaluation found. losses: (loss, standard error) of the training split, then
        of each corpus's validation split. val_loss: of a mixture, their weighted mean."""
        run, iter_num = self.run, self.run.progress.iter_num
        (train_loss, _), *of_val = losses
        error = None
        if all(each is not None for _, each in of_val):
            error = math.sqrt(sum((part.weight * each)**2 for part, (_, each)
                                  in zip(run.dataset.parts, of_val, strict=True)))
        run.progress.val_stderr = error
        run.metrics.evaluation(iter_num, train_loss, val_loss, is_best, text, error)
        if scores:
            from plaingpt.inference.lm_eval_model import quote_scores
            for name, values in scores.items():
                run.metrics.benchmark(iter_num, name, values, quote_scores(values))

    def score_benchmarks(self, model):
        """→ {task of lm_eval: its scores} of the model as it is now."""
        from plaingpt.inference.lm_eval_model import load_tasks, score_tasks
        run, config = self.run, self.run.config
        model.eval()
        scores = score_tasks(
            load_tasks(config.eval_tasks), config.eval_tasks_limit, model, run.dataset.tokenizer(),
            config.batch_size, run.context, self.group, run.stop.raise_if_stopped)
        model.train()
        return scores

    def sample(self, model, tokens=SAMPLE_TOKENS):
        """A text by the model as it is now, or its answers to questions, or None where no sample is
        wanted. A signal ends it early."""
        if not self.tokenizer:
            return None
        model.eval()
        with self.run.context:
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
