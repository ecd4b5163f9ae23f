"""Checks of learning: weights, the loss, its gradient, a step, and what a checkpoint keeps."""

import math
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
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
from plaingpt.system.devices import rng_state
from plaingpt.system.errors import UserError
from plaingpt.training.checkpoint import Saver, open_checkpoint, optimizer_tensors
from plaingpt.training.evaluation import mean_loss
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.step_guard import StepGuard

EVALUATED = 3  # sequences of the validation split
# Nats by which a new model's loss may miss ln(vocab), and how many more for each channel: the
# logits of GPT-2's initialisation have a variance of 0.02² · channels, and half of that adds to the
# loss. "Verify loss at init": Karpathy 2019, A Recipe for Training Neural Networks
INITIAL_LOSS, INITIAL_LOSS_PER_CHANNEL = 0.3, 0.0004
INITIAL_STD = 0.02  # of weights; a normalised embedding times itself is about this times n_embd
# Predicted drops of the loss, in nats; a smaller one is tried where the loss curves strongly.
PREDICTED_DROPS = (5e-3, 5e-4)
GRADIENT_ERROR = 0.01  # relative; ours is 0.0003
CUT_OFF = 1e-12  # squared norm; a smaller gradient predicts nothing
SMALL_STATE = {'iter_num': 1, 'val_loss': None, 'config': {}, 'tokenizer': {'kind': 'byte'},
               'data': '', 'samples': {}, 'sequences': 0, 'elapsed_s': 0.0, 'scaler': {}}


def listed(names):
    names = list(names)
    return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')


# -----------------------------------------------------------------------------
# the weights


def weights_are_float32(run):
    other = {name: p.dtype for name, p in run.model.named_parameters() if p.dtype != torch.float32}
    if other:
        return (f'{listed(other)}: {next(iter(other.values()))} instead of float32: most updates '
                'are smaller than its rounding; dtype is that of the matmuls alone')


def weights_are_optimized(run):
    frozen = [name for name, p in run.model.named_parameters() if not p.requires_grad]
    if frozen:
        return f'{listed(frozen)} will not learn: requires_grad is False'
    held = {id(p) for group in run.optimizer.param_groups for p in group['params']}
    left = [name for name, p in run.model.named_parameters() if id(p) not in held]
    if left:
        return f'{listed(left)} will not learn: the optimizer does not have it'


def checkpoints_fit(run):
    """A checkpoint keeps the parameters. To load it, a GPT of the same config is made."""
    with torch.device('meta'):
        loaded = GPT(run.model.config)
    held, wanted = ({name: tuple(p.shape) for name, p in model.named_parameters()}
                    for model in (run.model, loaded))
    differ = [name for name in {**held, **wanted} if held.get(name) != wanted.get(name)]
    if differ:
        return (f'{listed(differ)}: a checkpoint could not be loaded, because GPT(config) is '
                'another model: change it in model.py, behind a field of GPTConfig')


# -----------------------------------------------------------------------------
# the loss


def evaluate(run, tokens):
    """tokens (B, T + 1) → their loss as the run's evaluations measure it."""
    batch = tokens[:, :-1], tokens[:, 1:]
    loader = SimpleNamespace(eval_batches=lambda n: [batch], eval_batch=lambda batch: batch)
    run.model.train()
    return mean_loss(run.model, loader, len(tokens), run.context)[0]


def loss_is_usual(run):
    """The loss of a few short sequences of the validation split."""
    stream, shape = run.val_data.stream, run.model.config
    length = 1 + min(short(run.model), len(stream) - 1)
    starts = np.linspace(0, len(stream) - length, EVALUATED).astype(np.int64)
    tokens = torch.from_numpy(stream.sequences(starts, length)).to(run.device)
    loss, expected = evaluate(run, tokens), math.log(shape.vocab_size)
    tolerance = INITIAL_LOSS + INITIAL_LOSS_PER_CHANNEL * shape.n_embd
    repeats = float((tokens[:, 1:] == tokens[:, :-1]).float().mean())  # a tied head predicts them
    lowest = -tolerance - INITIAL_STD * shape.n_embd * repeats
    is_usual = lowest <= loss - expected <= tolerance
    is_right = is_usual if run.start.from_scratch else math.isfinite(loss)
    if not is_right:
        return f'the first loss is {loss:.2f}, and a model that knows nothing has ' \
               f'ln({shape.vocab_size}) = {expected:.2f}: look at the initialisation, and at how ' \
               'the loss is averaged'


def evaluation_repeats(run):
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        losses.append(evaluate(run, random_tokens(run.model, 2)))
        if not run.model.training:
            return 'dropout stays off after an evaluation: model.train() is not called'
    if abs(losses[0] - losses[1]) > SAME * abs(losses[0]):
        return (f'two evaluations of the same weights give {losses[0]:.5f} and {losses[1]:.5f}: '
                'dropout is on, because model.eval() is not called or a layer ignores it')


def loss_is_of_the_logits(run):
    """Compare the evaluated loss with the cross-entropy of the logits that sampling uses."""
    tokens = random_tokens(run.model, 2, short(run.model) + 1)
    loss, idx, targets = evaluate(run, tokens), tokens[:, :-1], tokens[:, 1:]
    one = torch.full_like(targets, -1)
    one[0, -1] = targets[0, -1]  # one target alone shows whether targets are shifted once more
    model = run.model.eval()
    with run.context, torch.no_grad():
        logits = model.logits(model.hidden(idx)).float()  # (B, T, V)
        losses = [loss, model(idx, one)[1].item()]
    for loss, known in zip(losses, (targets, one), strict=True):
        expected = cross_entropy(logits.flatten(0, 1), known.flatten(), ignore_index=-1).item()
        if not abs(loss - expected) <= NEARLY_SAME * abs(expected):
            return f'the loss is {loss:.4f} in eval mode, and the cross-entropy of the logits ' \
                   f'that samples are drawn from {expected:.4f}: one of them is shifted or scaled'


# -----------------------------------------------------------------------------
# the gradient


def gradients_of(model, tokens):
    """tokens (B, T + 1) → {name: gradient of the training loss in float32}, 0 where none is."""
    torch.manual_seed(0)
    loss = model.train()(tokens[:, :-1], tokens[:, 1:])[1]
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True,
                                materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def every_weight_learns(run):
    found = gradients_of(run.model, random_tokens(run.model, 2, short(run.model) + 1))
    broken = [name for name, g in found.items() if not g.isfinite().all()]
    if broken:
        return f'the gradient of {listed(broken)} is not finite'
    if not all(g.any() for g in found.values()):
        # A few tokens may not reach each expert of a mixture, so take a whole batch.
        found = gradients_of(run.model, random_tokens(
            run.model, run.config.batch_size, run.config.block_size + 1))
    silent = [name for name, g in found.items() if not g.any()]
    if silent:
        return f'no gradient reaches {listed(silent)}: a detach, or an output that is not used'


def gradient_is_true(run):
    """Step along the gradient: the loss must fall as far as the gradient predicts (a central
    difference). Half of the fall comes from the first block, whose gradient passes all others."""
    model, tokens = run.model, random_tokens(run.model, 2, short(run.model) + 1)
    gradients = gradients_of(model, tokens)
    lengths = {}  # of the step along each gradient that should lower the loss by 1
    for first in (True, False):
        group = [name for name in gradients if name.startswith('transformer.h.0.') == first]
        square = sum(float(gradients[name].norm())**2 for name in group)
        if not CUT_OFF < square < math.inf:
            raise NotChecked('there is no gradient')  # every_weight_learns says so
        lengths |= dict.fromkeys(group, 0.5 / square)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_after(step):
        torch.manual_seed(0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name] - step * lengths[name] * gradients[name])
        return model(tokens[:, :-1], tokens[:, 1:])[1].item()

    for predicted in PREDICTED_DROPS:
        fall = loss_after(-predicted / 2) - loss_after(predicted / 2)
        loss_after(0)  # puts the weights back
        if abs(fall - predicted) <= GRADIENT_ERROR * predicted:
            return None
    return (f'a step along the gradient should lower the loss by {predicted:.3g}, and lowers it '
            f'by {fall:.3g}: a detach in a branch, or a backward pass of your own that is not the '
            'derivative of its forward pass')


# -----------------------------------------------------------------------------
# steps and checkpoints


def step_follows_the_gradient(run, forward_backward, update):
    """Compare a step of the training loop, of two micro-batches, with a plain one."""
    model = run.model.train()
    idx = random_tokens(model, 4).view(2, 2, -1)
    weights = dict(model.named_parameters())
    torch.manual_seed(0)  # both draw the same random numbers
    mean = sum(model(tokens, tokens)[1] for tokens in idx) / 2
    gradients = torch.autograd.grad(mean, list(weights.values()), allow_unused=True,
                                    materialize_grads=True)
    scaler = torch.amp.GradScaler(run.device.type, enabled=False)
    torch.manual_seed(0)
    loss = forward_backward(model, iter([(tokens, tokens) for tokens in idx]), 2, scaler,
                            nullcontext())
    if not abs(loss.item() - mean.item()) <= NEARLY_SAME * abs(mean.item()):
        return f'a step of two micro-batches has a loss of {loss.item():.4f}, and their mean is ' \
               f'{mean.item():.4f}'
    for (name, p), gradient in zip(weights.items(), gradients, strict=True):
        if gradient.any() and (p.grad is None or largest_change(p.grad, gradient) > NEARLY_SAME):
            return f'the gradient of {name} is not that of the mean loss of two micro-batches'
    before = [p.detach().clone() for p in weights.values()]
    guard = StepGuard(None, None, run.device)
    update(model, run.optimizer, scaler, run.config.grad_clip, guard, 0, loss)
    if any(p.grad is not None and p.grad.any() for p in weights.values()):
        return 'gradients are left when a step has ended, and add to those of the next: ' \
               'zero_grad is not called'
    along = sum(float(((p.detach() - old) * gradient).sum())
                for p, old, gradient in zip(weights.values(), before, gradients, strict=True))
    if not along < 0:
        return 'a step moves no weight, or moves the weights up the gradient'


def checkpoints_come_back(run):
    """Train a step, save it and load it: all must be the same."""
    model, optimizer = run.model.train(), run.optimizer
    idx = random_tokens(model, 2)
    optimizer.zero_grad()
    model(idx, idx)[1].backward()
    optimizer.step()
    torch.manual_seed(1)  # weights that are not loaded, but drawn again, differ
    with TemporaryDirectory() as folder:
        saver = Saver(folder)
        saver.save(model, optimizer, SMALL_STATE, rng_state(torch.device('cpu')))
        if saver.failed:
            raise NotChecked(f'{folder} cannot be written')
        try:
            found = open_checkpoint(next(Path(folder, 'checkpoints').iterdir()))
            loaded = found.load_model(run.device)
            again = build_optimizer(loaded, run.config)
            found.load_optimizer(again, loaded)
        except UserError as problem:
            return f'a small model that is saved cannot be loaded ({problem}): are modules ' \
                   'shared, or parameters made in another way than by GPT(config)?'
    with torch.no_grad():
        before, after = ({'its logits': gpt.eval()(idx)[0], **gpt.state_dict(),
                          **optimizer_tensors(by, gpt)} for gpt, by in
                         ((model, optimizer), (loaded, again)))
    lost = [name for name in {**before, **after} if name not in before or name not in after
            or not torch.equal(before[name], after[name])]
    if lost:
        return f'a small model that is saved and loaded differs in {listed(lost)}: it may be no ' \
               'parameter, not in the state of the optimizer, or a weight that is no longer tied'
