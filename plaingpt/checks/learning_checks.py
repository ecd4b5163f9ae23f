"""Checks of learning: the parameters, the loss, its gradient, a step, a checkpoint round trip."""

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from model import GPT
from plaingpt.checks.model_checks import (
    LOOSE_TOLERANCE,
    TOLERANCE,
    NotChecked,
    check_length,
    largest_change,
    random_tokens,
)
from plaingpt.core.blocks import parameters_on_meta
from plaingpt.core.checkpoint import Saver, open_checkpoint, optimizer_tensors
from plaingpt.core.evaluation import mean_loss
from plaingpt.core.optimizers import build_optimizer
from plaingpt.system.errors import UserError

# How far a new model's loss may be from ln(vocab_size) in nats: a constant and a term per channel,
# as the logits of GPT-2's initialization have variance 0.02² · n_embd, and half of it adds to the
# loss. "Verify loss at init": Karpathy 2019, A Recipe for Training Neural Networks
INITIAL_LOSS, INITIAL_LOSS_PER_CHANNEL = 0.3, 0.0004
# Predicted decreases of the loss in nats. The smaller one is tried if the loss curves strongly.
PREDICTED_DECREASES = (5e-3, 5e-4)
GRADIENT_ERROR = 0.01  # relative; ours is 0.0003


def join_names(names):
    names = list(names)
    more = f' and {len(names) - 4} more' if len(names) > 4 else ''
    return ', '.join(names[:4]) + more


# -----------------------------------------------------------------------------
# the parameters


def every_parameter_is_trainable(run):
    groups = run.step.optimizer.param_groups
    optimized = {id(p) for group in groups for p in group['params']}
    for name, p in run.model.named_parameters():
        if p.dtype != torch.float32:
            return f'{name} is {p.dtype}, not float32: most updates would round to zero'
        if id(p) not in optimized or not p.requires_grad:
            return f'{name} is not trainable: requires_grad is False, or no optimizer has it'


def model_matches_its_config(run):
    """A checkpoint stores parameters. To load it, GPT(config) must have the same ones."""
    with parameters_on_meta():
        loaded = GPT(run.model.config)
    shapes, expected = ({name: tuple(p.shape) for name, p in model.named_parameters()}
                        for model in (run.model, loaded))
    differing = [name for name in {**shapes, **expected}
                 if shapes.get(name) != expected.get(name)]
    if differing:
        return (f'a checkpoint could not be loaded, because GPT(config) differs in '
                f'{join_names(differing)}; change it in model.py, behind a field of GPTConfig')


# -----------------------------------------------------------------------------
# the loss


def evaluate(run, idx, targets):
    """→ the loss of a batch, computed as in the run's evaluations"""
    loader = SimpleNamespace(eval_batches=lambda n: [None],
                             eval_batch=lambda starts: (idx, targets))
    run.model.train()
    return mean_loss(run.model, loader, len(idx), run.step.autocast)[0]


def initial_loss_is_about_ln_vocab_size(run):
    config = run.model.config
    tokens = random_tokens(run.model, 4, check_length(run.model) + 1) % config.vocab_size
    loss = evaluate(run, tokens[:, :-1], tokens[:, 1:])
    expected = math.log(config.vocab_size)
    margin = math.inf  # of pretrained weights the loss must just be finite
    if run.start.from_scratch:
        margin = INITIAL_LOSS + INITIAL_LOSS_PER_CHANNEL * config.n_embd
    if not math.isfinite(loss) or abs(loss - expected) > margin:
        return f'the initial loss is {loss:.2f} instead of about ln(vocab_size) = ' \
               f'{expected:.2f}; look at the initialization, and at how the loss is averaged'


def evaluation_loss_matches_the_logits(run):
    """Compare the evaluation loss with the cross-entropy of the logits used for sampling, allowing
    for label smoothing. The last position is the only target: shifting twice would lose it."""
    model = run.model
    idx = random_tokens(run.model, 2)
    model.eval()
    with run.step.autocast, torch.no_grad():
        logits = model.logits(model.hidden(idx)[:, -1]).float()  # (B, V)
    targets = torch.full_like(idx, -1)
    targets[:, -1] = likeliest = logits.argmax(dim=-1)
    loss = evaluate(run, idx, targets)
    repeated_loss = evaluate(run, idx, targets)
    if not model.training:
        return 'dropout stays off after an evaluation; model.train() is not called'
    if abs(loss - repeated_loss) > TOLERANCE * abs(loss):
        return 'two evaluations of the same batch differ; is model.eval() called, to turn off ' \
               'dropout?'
    lowest, highest = (cross_entropy(logits, likeliest, label_smoothing=smoothing).item()
                       for smoothing in (0.0, 0.2))
    if not lowest * (1 - LOOSE_TOLERANCE) <= loss <= highest * (1 + LOOSE_TOLERANCE):
        return f'the evaluation loss is {loss:.4f}, but the cross-entropy of the logits used for ' \
               f'sampling is {lowest:.4f}; is one of them shifted or scaled?'


# -----------------------------------------------------------------------------
# the gradient


def gradients_of(model, tokens, micro_steps=1):
    """tokens (B, T + 1), split into micro-batches → {name: gradient of the mean loss}; zeros for
    parameters that the loss does not depend on"""
    torch.manual_seed(0)
    model.train()
    loss = 0.0
    for micro_batch in tokens.chunk(micro_steps):
        loss = loss + model(micro_batch[:, :-1], micro_batch[:, 1:])[1]
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss / micro_steps, list(parameters.values()),
                                    allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def every_parameter_gets_a_gradient(run):
    """Uses as many sequences as a batch has, so that each expert of an MoE gets a token."""
    tokens = random_tokens(run.model, max(2, run.config.batch_size), check_length(run.model) + 1)
    gradients = gradients_of(run.model, tokens)
    bad = [name for name, g in gradients.items() if not g.any() or not g.isfinite().all()]
    if bad:
        return f'no finite gradient reaches {join_names(bad)}; look for a detach or an unused ' \
               'output'


def gradients_match_finite_differences(run):
    """Step along the gradient: the loss must decrease as the gradient predicts (central
    difference)."""
    model = run.model
    tokens = random_tokens(run.model, 2, check_length(run.model) + 1)
    gradients = gradients_of(model, tokens)
    squared_norm = sum(float(g.norm())**2 for g in gradients.values())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def loss_after(decrease):
        torch.manual_seed(0)
        for name, p in model.named_parameters():
            p.copy_(weights[name] - decrease / squared_norm * gradients[name])
        return model(tokens[:, :-1], tokens[:, 1:])[1].item()

    for predicted in PREDICTED_DECREASES:
        decrease = loss_after(-predicted / 2) - loss_after(predicted / 2)
        loss_after(0)  # restores the weights
        if abs(decrease - predicted) <= GRADIENT_ERROR * predicted:
            return None
    return f'gradients do not match finite differences: a step lowers the loss by {decrease:.3g} ' \
           f'instead of {predicted:.3g}; look for a detach, or a wrong custom backward pass'


# -----------------------------------------------------------------------------
# steps and checkpoints


def step_follows_the_gradient(run):
    """Compare a training step of two micro-batches with gradients computed directly."""
    model = run.model
    tokens = random_tokens(run.model, 4, check_length(run.model) + 1)
    gradients = gradients_of(model, tokens, micro_steps=2)
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in tokens.chunk(2)]
    step = replace(run.step, dtype='float32', micro_steps=2)
    torch.manual_seed(0)  # the same dropout as in gradients_of
    step.forward_backward(iter(batches))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        if largest_change(gradient, gradients[name]) > LOOSE_TOLERANCE:
            return f'the gradient of {name} after two micro-batches is not that of their mean loss'
    gradient_of = {p: gradients[name] for name, p in model.named_parameters()}
    with_state = []  # the parameters that have a state after each step of the optimizer
    hook = step.optimizer.register_step_post_hook(lambda optimizer, *_: with_state.append(
        [p for p, state in optimizer.state.items() if state]))
    step.update(run.config.learning_rate)
    hook.remove()
    if len(with_state) != 1:
        return f'an update calls optimizer.step() {len(with_state)} times instead of once'
    if not all(has_state(step.optimizer, p) for p in with_state[0] if gradient_of[p].any()):
        return "an update clears the optimizer's state, such as its momentum"
    if any(p.grad is not None and p.grad.any() for p in model.parameters()):
        return 'gradients remain after a step: zero_grad is not called'
    unchanged = unchanged_by_step(step.optimizer, model, before, gradients)
    if unchanged:
        return f'a step does not change {join_names(unchanged)}; is the update skipped for some?'
    slope = sum(float(((p.detach() - before[name]) * gradients[name]).sum())
                for name, p in model.named_parameters())
    if not slope < 0:
        return 'a step does not follow the gradient: it increases the loss'


def has_state(optimizer, p):
    """Whether the optimizer has a state for p, and no tensor of it is all zeros."""
    state = optimizer.state.get(p, {})
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return bool(state) and all(value.any() for value in tensors)


def unchanged_by_step(optimizer, model, before, gradients):
    """The names of the parameters that a step has left as `before`, in spite of their gradient."""
    frozen = set()  # lr_scales may have 0
    for group in optimizer.param_groups:
        if group['lr'] == 0:
            frozen.update(group['params'])
    largest = {name: float(g.abs().max()) for name, g in gradients.items()}
    smallest = TOLERANCE * max(largest.values())
    return [name for name, p in model.named_parameters() if p not in frozen
            and largest[name] > smallest and torch.equal(p, before[name])]


def checkpoint_round_trip_works(run):
    """Save and load the small model after its step: everything must be the same."""
    torch.manual_seed(1)  # so that weights which are initialized but not loaded differ
    with TemporaryDirectory() as folder:
        saver = Saver(folder)
        saver.save(run.model, run.step.optimizer, {'iter_num': 1, 'rng': {}})
        if saver.failed:
            raise NotChecked(f'cannot write to {folder}')
        try:
            checkpoint = open_checkpoint(next(Path(folder, 'checkpoints').iterdir()))
            loaded = GPT(checkpoint.config).to(run.step.device)
            checkpoint.load_into(loaded)
            loaded_optimizer = build_optimizer(loaded, run.config)
            checkpoint.load_optimizer(loaded_optimizer, loaded)
        except UserError as problem:
            return f'a checkpoint round trip fails: {problem}'
    before = tensors_of(run.model, run.step.optimizer)
    after = tensors_of(loaded, loaded_optimizer)
    differing = [name for name in before if name not in after
                 or not torch.equal(before[name], after[name])]
    if differing:
        return f'a checkpoint round trip changes {join_names(differing)}; look for a tensor that ' \
               'is not a Parameter, missing optimizer state, or weights that came untied'


@torch.no_grad()
def tensors_of(model, optimizer):
    """{name: tensor} of all that a checkpoint must restore"""
    logits, _ = model.eval()(random_tokens(model, 2))
    return {'the logits': logits, **model.state_dict(), **optimizer_tensors(optimizer, model)}
