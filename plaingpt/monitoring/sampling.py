"""What a run does with its model at evaluations: a sample, and the benchmarks of lm_eval."""

import torch

from plaingpt.system.distributed import gloo_group, launched_world
from plaingpt.system.errors import UserError

SAMPLE_TOKENS = 100  # length of a sample
SAMPLE_QUESTIONS = 3  # validation questions that a fine-tuned model answers in its samples


class Sampler:
    """Writes samples with the model of a Run: a text, or answers to questions. Raises
    UserError if the dataset has no tokenizer."""

    def __init__(self, run):
        self.prompts, self.sampling, self.end_id = sample_prompts(run.dataset, run.val_data)
        self.tokenizer = run.dataset.tokenizer()
        self.autocast, self.stop, self.seed = run.step.autocast, run.stop, run.config.seed

    def sample(self, model, tokens=SAMPLE_TOKENS):
        """Generate a text; a signal ends it early."""
        model.eval()
        with self.autocast:
            texts = [self.tokenizer.decode([*prompt, *self.continue_prompt(model, prompt, tokens)])
                     for prompt in self.prompts]
        model.train()
        return '\n'.join(texts)

    def continue_prompt(self, model, prompt, tokens):
        """Generate the token ids that follow a prompt."""
        new_ids = []
        idx = torch.tensor([prompt], device=model.lm_head.weight.device)
        generator = torch.Generator(idx.device).manual_seed(self.seed)
        while len(new_ids) < tokens and self.stop.signal is None:
            idx = model.generate(idx, 1, **self.sampling, generator=generator)
            if idx[0, -1] == self.end_id:
                break
            new_ids.append(idx[0, -1].item())
        return new_ids


def score_benchmarks(run, model):
    """Run the lm_eval tasks of config.eval_tasks on all processes → {task: its scores}"""
    from plaingpt.inference.lm_eval_model import load_tasks, score_tasks
    config = run.config
    model.eval()
    scores = score_tasks(
        load_tasks(config.eval_tasks), config.eval_tasks_limit, model, run.dataset.tokenizer(),
        config.batch_size, run.step.autocast, gloo_group(), run.stop.raise_if_stopped)
    model.train()
    return scores


def check_tasks(config):
    """Check that the benchmarks of a run can be loaded. Raises UserError."""
    if config.eval_tasks and launched_world().local_rank == 0:
        from plaingpt.inference.lm_eval_model import load_tasks
        load_tasks(config.eval_tasks)


def sample_prompts(dataset, val_loader):
    """The prompts of a run's samples: those of sample.py without a prompt, or questions of
    conversations that leave room for a reply → (prompts as ids, options of GPT.generate, the id
    that ends a reply or None). Raises UserError."""
    tokenizer = dataset.tokenizer()
    if not dataset.has_mask():
        from plaingpt.inference.text_generator import prompt_ids
        prompt = prompt_ids('\n', tokenizer, dataset.document_start)
        return [prompt], {'temperature': 0.8, 'top_k': 200}, None
    prompts = val_loader.question_prompts(SAMPLE_QUESTIONS)
    if not prompts:
        raise UserError('no question in the validation split leaves room for a reply')
    return prompts, {'temperature': 0}, tokenizer.end_of_turn
