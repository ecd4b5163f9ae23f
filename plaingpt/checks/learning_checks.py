"""Checks of learning: weights, the loss, its gradient, a step, and what a checkpoint keeps."""

import math
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from model import GPT
from plaingpt.checks.model_checks import (
    NEARLY_SAME,
    SAME,
    NotChecked,
    largest_change,
    random_tokens,
    short,
)
from plaingpt.parallel.blocks import parameters_on_meta
from plaingpt.system.devices import rng_state
from plaingpt.system.errors import UserError
from plaingpt.training.checkpoint import Saver, open_checkpoint, optimizer_tensors
from plaingpt.training.evaluation import mean_loss
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.step import Step

# Nats by which a new model's loss may be above ln(vocab), and how many more for each channel: the
# logits of GPT-2's initialization have a variance of 0.02² · channels, and half of that adds to the
# loss. "Verify loss at init": Karpathy 2019, A Recipe for Training Neural Networks
INITIAL_LOSS, INITIAL_LOSS_PER_CHANNEL = 0.3, 0.0004
# Predicted falls of the loss, in nats; a smaller one is tried where the loss curves strongly.
PREDICTED_FALLS = (5e-3, 5e-4)
GRADIENT_ERROR = 0.01  # relative; ours is 0.0003


def listed(names):
    names = list(names)
    return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')


# -----------------------------------------------------------------------------
# the weights


def every_parameter_is_trainable(run):
    held = {id(p) for group in run.step.optimizer.param_groups for p in group['params']}
    for name, p in run.model.named_parameters():
        if p.dtype != torch.float32:
            return f'{name} is {p.dtype}, not float32: most updates would be rounded away'
        if id(p) not in held or not p.requires_grad:
            return f'{name} is not trainable: requires_grad is False, or no optimizer has it'


def model_matches_its_config(run):
    """A checkpoint keeps the parameters. To load it, a GPT is built from its config."""
    with parameters_on_meta():
        loaded = GPT(run.model.config)
    held, wanted = ({name: tuple(p.shape) for name, p in model.named_parameters()}
                    for model in (run.model, loaded))
    differ = [name for name in {**held, **wanted} if held.get(name) != wanted.get(name)]
    if differ:
        return (f'a checkpoint could not be loaded, because GPT(config) differs in '
                f'{listed(differ)}; change it in model.py, behind a field of GPTConfig')


# -----------------------------------------------------------------------------
# the loss


def evaluate(run, idx, targets):
    """→ the loss of a batch as the run's evaluations measure it"""
    loader = SimpleNamespace(eval_batches=lambda n: [None],
                             eval_batch=lambda starts: (idx, targets))
    run.model.train()
    return mean_loss(run.model, loader, len(idx), run.step.autocast)[0]


def initial_loss_is_about_ln_vocab_size(run):
    config = run.model.config
    tokens = random_tokens(run.model, 4, short(run.model) + 1) % config.vocab_size
    loss, expected = evaluate(run, tokens[:, :-1], tokens[:, 1:]), math.log(config.vocab_size)
    margin = INITIAL_LOSS + INITIAL_LOSS_PER_CHANNEL * config.n_embd
    if not (abs(loss - expected) <= margin if run.start.from_scratch else math.isfinite(loss)):
        return f'the initial loss is {loss:.2f} instead of about ln(vocab_size) = ' \
               f'{expected:.2f}; look at the initialization, and at how the loss is averaged'


def evaluation_loss_matches_the_logits(run):
    """Compare the evaluated loss with the cross-entropy of the logits that sampling uses, or with
    some label smoothing. The only target is the last one, which one shift more would lose."""
    model, idx = run.model, random_tokens(run.model, 2)
    model.eval()
    with run.step.autocast, torch.no_grad():
        logits = model.logits(model.hidden(idx)[:, -1]).float()  # (B, V)
    targets = torch.full_like(idx, -1)
    targets[:, -1] = likeliest = logits.argmax(dim=-1)
    loss, again = evaluate(run, idx, targets), evaluate(run, idx, targets)
    if not model.training:
        return 'dropout stays off after an evaluation; model.train() is not called'
    if abs(loss - again) > SAME * abs(loss):
        return 'two evaluations of a batch differ: is dropout on, as model.eval() is not called?'
    lowest, highest = (cross_entropy(logits, likeliest, label_smoothing=smoothing).item()
                       for smoothing in (0.0, 0.2))
    if not lowest * (1 - NEARLY_SAME) <= loss <= highest * (1 + NEARLY_SAME):
        return f'the evaluation loss is {loss:.4f}, but the cross-entropy of the logits that ' \
               f'sampling uses is {lowest:.4f}; is one of them shifted or scaled?'


# -----------------------------------------------------------------------------
# the gradient


def gradients_of(model, tokens, micro_steps=1):
    """tokens (B, T + 1), in micro-batches → {name: gradient of their mean loss}, 0 where none is"""
    torch.manual_seed(0)
    model.train()
    loss = sum(model(part[:, :-1], part[:, 1:])[1] for part in tokens.chunk(micro_steps))
    weights = dict(model.named_parameters())
    found = torch.autograd.grad(loss / micro_steps, list(weights.values()), allow_unused=True,
                                materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def every_parameter_gets_a_gradient(run):
    """With as many sequences as a batch has, so that each expert of a mixture gets a token."""
    found = gradients_of(run.model, random_tokens(
        run.model, max(2, run.config.batch_size), short(run.model) + 1))
    silent = [name for name, g in found.items() if not g.any() or not g.isfinite().all()]
    if silent:
        return f'no finite gradient reaches {listed(silent)}; look for a detach or unused output'


def gradients_match_finite_differences(run):
    """Step along the gradient: the loss must fall as far as the gradient predicts (a central
    difference)."""
    model, tokens = run.model, random_tokens(run.model, 2, short(run.model) + 1)
    gradients = gradients_of(model, tokens)
    square = sum(float(g.norm())**2 for g in gradients.values())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def loss_after(fall):
        torch.manual_seed(0)
        for name, p in model.named_parameters():
            p.copy_(weights[name] - fall / square * gradients[name])
        return model(tokens[:, :-1], tokens[:, 1:])[1].item()

    for predicted in PREDICTED_FALLS:
        fall = loss_after(-predicted / 2) - loss_after(predicted / 2)
        loss_after(0)  # puts the weights back
        if abs(fall - predicted) <= GRADIENT_ERROR * predicted:
            return None
    return f'gradients do not match finite differences: a step lowers the loss by {fall:.3g} ' \
           f'instead of {predicted:.3g}; look for a detach, or a wrong custom backward pass'


# -----------------------------------------------------------------------------
# steps and checkpoints


def step_follows_the_gradient(run):
    """Compare a step of the training loop, of two micro-batches, with a plain one."""
    model, tokens = run.model, random_tokens(run.model, 4, short(run.model) + 1)
    gradients = gradients_of(model, tokens, micro_steps=2)
    batches = [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(2)]
    scaler = torch.amp.GradScaler(run.device.type, enabled=False)
    step = Step(model, run.step.optimizer, scaler, nullcontext(), run.config.grad_clip, 2)
    torch.manual_seed(0)  # both draw the same random numbers
    step.forward_backward(iter(batches))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found = torch.zeros_like(p) if p.grad is None else p.grad
        if largest_change(found, gradients[name]) > NEARLY_SAME:
            return f'the gradient of {name} after two micro-batches is not that of their mean loss'
    step.update(run.config.learning_rate)
    if any(p.grad is not None and p.grad.any() for p in model.parameters()):
        return 'gradients remain after a step: zero_grad is not called'
    if not sum(float(((p.detach() - before[name]) * gradients[name]).sum())
               for name, p in model.named_parameters()) < 0:
        return 'a step does not follow the gradient: the weights stay, or move uphill'


def checkpoint_round_trip_works(run):
    """Save the small model after its step, and load it: all must be the same."""
    torch.manual_seed(1)  # weights that are not loaded, but drawn again, differ
    with TemporaryDirectory() as folder:
        saver = Saver(folder)
        saver.save(run.model, run.step.optimizer, {'iter_num': 1}, rng_state(torch.device('cpu')))
        if saver.failed:
            raise NotChecked(f'cannot write to {folder}')
        try:
            found = open_checkpoint(next(Path(folder, 'checkpoints').iterdir()))
            loaded = GPT(found.config).to(run.device)
            found.load_into(loaded)
            again = build_optimizer(loaded, run.config)
            found.load_optimizer(again, loaded)
        except UserError as problem:
            return f'a saved model cannot be loaded: {problem}'
    with torch.no_grad():
        before, after = ({'its logits': gpt.eval()(random_tokens(gpt, 2))[0], **gpt.state_dict(),
                          **optimizer_tensors(optimizer, gpt)} for gpt, optimizer in
                         ((run.model, run.step.optimizer), (loaded, again)))
    lost = [name for name in before if name not in after
            or not torch.equal(before[name], after[name])]
    if lost:
        return f'a saved model differs after loading in {listed(lost)}; it is not a parameter, ' \
               'not in the optimizer state, or a weight that is no longer tied'
