"""Checks of the network: does it see what it may see, and does every weight learn?

Each is a function Subject → None, or in a line what it found and what that usually means. The
comparisons hold on any device: the same shapes take the same kernels, so equal numbers stay equal.
"""

import math

import torch

from model import GPT
from plaingpt.inference.generation import Context
from plaingpt.monitoring.diagnosis import THRESHOLDS
from plaingpt.preflight.subject import largest_change

SAME = 1e-5  # of the RMS: what rounding may change; a token that is seen changes more
NEARLY_SAME = 1e-3  # where the same sums are taken in another order
PREDICTED_FALL = 0.005  # nats, of the step along the gradient that shows whether it is true
GRADIENT_ERROR = {True: 0.01, False: 0.1}  # of it: on a CPU, elsewhere (TF32 rounds). Ours: 0.001
CUT_OFF = 1e-12  # squared norm of a gradient that predicts nothing


def listed(names, shown=4):
    """['transformer.h.0.ln_1.weight', …] → 'h.0.ln_1.weight, … and 8 more'."""
    names = [name.removeprefix('transformer.') for name in names]
    more = f' and {len(names) - shown} more' if len(names) > shown else ''
    return ', '.join(names[:shown]) + more


# -----------------------------------------------------------------------------
# what is known without a forward pass


def weights_are_float32(subject):
    other = {name: p.dtype for name, p in subject.model.named_parameters()
             if p.dtype != torch.float32}
    if other:
        return (f'{listed(other)}: {next(iter(other.values()))} instead of float32: most updates '
                'are smaller than its rounding; dtype is the precision of the matmuls, and the '
                'weights stay in float32')


def weights_are_optimized(subject):
    frozen = [name for name, p in subject.model.named_parameters() if not p.requires_grad]
    if frozen:
        return f'{listed(frozen)} will not learn: requires_grad is False'
    held = {id(p) for group in subject.optimizer.param_groups for p in group['params']}
    left = [name for name, p in subject.model.named_parameters() if id(p) not in held]
    if left:
        return f'{listed(left)} will not learn: the optimizer does not have it'


def checkpoints_fit(subject):
    """A checkpoint keeps the parameters; who loads it makes a GPT of the same config."""
    with torch.device('meta'):
        loaded = GPT(subject.model.config)
    held, wanted = ({name: tuple(p.shape) for name, p in model.named_parameters()}
                    for model in (subject.model, loaded))
    differ = [name for name in {**held, **wanted} if held.get(name) != wanted.get(name)]
    if differ:
        return (f'{listed(differ)}: a checkpoint of this model could not be loaded, because '
                'GPT(config) is another: change the model in model.py, behind a field of '
                'GPTConfig')


# -----------------------------------------------------------------------------
# what a token sees


def future_is_hidden(subject):
    t = subject.place
    before = [logits[0, :t] for logits in (subject.logits, subject.changed_logits)]
    if t and largest_change(*before) > SAME:
        return (f'the logits at positions 0 to {t - 1} change with the tokens from {t} on: '
                'attention without is_causal or with a wrong mask, or a layer that mixes in '
                'later tokens')


def rows_are_apart(subject):
    if largest_change(subject.logits[1], subject.changed_logits[1]) > SAME:
        return ('the logits of a sequence change with another sequence of the batch: a view, '
                'transpose or mean over the wrong dimension')


def past_is_seen(subject):
    after = [logits[2, subject.place + 1:] for logits in (subject.logits, subject.changed_logits)]
    if after[0].numel() and largest_change(*after) <= SAME:
        return (f'the logits after position {subject.place} do not change with the token there: '
                'attention sees too little, or its output is not used')


def order_matters(subject):
    """In the first block alone: the causal mask tells later ones a little about the order."""
    model, idx = subject.model, subject.idx[:1].clone()  # (1, T)
    if idx.size(1) < 4:
        return None
    idx[0, 1] = subject.others(idx[0, 0])
    swapped = torch.cat((idx[:, [1, 0]], idx[:, 2:]), dim=1)
    seen = []
    hook = model.transformer.h[0].register_forward_hook(lambda _, inputs, x: seen.append(x))
    with hook, subject.training_mode(False), torch.no_grad():
        model.hidden(torch.cat((idx, swapped)))
    x = seen[0][:, -1]  # (2, C)
    if largest_change(x[0], x[1]) <= SAME / 10:
        return ('the first block gives the same where two earlier tokens change places: positions '
                'are not added, or rotary does not reach queries and keys')


# -----------------------------------------------------------------------------
# what learns


def loss_is_usual(subject):
    with subject.training_mode():
        loss = subject.evaluated_loss()
    size, expected = subject.model.config.vocab_size, math.log(subject.model.config.vocab_size)
    uniform = f'a model that knows nothing has ln({size}) = {expected:.2f}'
    tolerance = THRESHOLDS['initial_loss'] \
        + THRESHOLDS['initial_loss_per_channel'] * subject.model.config.n_embd
    if not math.isfinite(loss):
        return f'the first loss is {loss}: look at the initialisation'
    if subject.from_scratch and abs(loss - expected) > tolerance:
        return f'the first loss is {loss:.2f}, and {uniform}: look at the initialisation, and at ' \
               'how the loss is averaged'
    if not subject.from_scratch and loss > expected + tolerance:
        return f'the first loss is {loss:.2f}, and {uniform}: was this text prepared with the ' \
               'tokenizer of the weights, and are all of them loaded?'


def evaluation_repeats(subject):
    losses = []
    for seed in range(2):
        with subject.training_mode():
            torch.manual_seed(seed)
            losses.append(subject.evaluated_loss())
    if abs(losses[0] - losses[1]) > SAME * abs(losses[0]):
        return (f'two evaluations of the same weights give {losses[0]:.5f} and {losses[1]:.5f}: '
                'dropout is on, because model.eval() is not called or a layer does not heed it')


def every_weight_learns(subject):
    found = subject.gradients
    silent = [name for name, g in found.items() if g is None or not g.any()]
    broken = [name for name, g in found.items() if g is not None and not g.isfinite().all()]
    if broken:
        return f'the gradient of {listed(broken)} is not finite: a division by zero, a square ' \
               'root at 0, or a softmax over nothing'
    if silent:
        return f'no gradient reaches {listed(silent)}: a detach, no_grad or .data on the way, or ' \
               'a layer whose output is not used'


def gradient_is_true(subject):
    """A central difference: along the gradient the loss must fall as it predicts. Half of the fall
    is predicted by the weights of the first block, which all later ones pass gradients on to."""
    groups = {True: {}, False: {}}
    for name, gradient in subject.gradients.items():
        if gradient is not None:
            groups[name.startswith('transformer.h.0.')][name] = gradient
    lengths = {}  # of the step along each gradient
    for group in groups.values():
        square = sum(float(gradient.norm())**2 for gradient in group.values())
        if not CUT_OFF < square < math.inf:
            return None  # every_weight_learns says so
        lengths |= dict.fromkeys(group, PREDICTED_FALL / 2 / square)
    weights = subject.large_weights
    behind, ahead = (subject.loss({**weights, **{
        name: torch.add(weights[name].detach(), subject.gradients[name],
                        alpha=way / 2 * length).requires_grad_()
        for name, length in lengths.items()}}).item() for way in (1, -1))
    fall = behind - ahead
    allowed = GRADIENT_ERROR[subject.device.type == 'cpu']
    if abs(fall / PREDICTED_FALL - 1) > allowed:
        return (f'a step along the gradient should lower the loss by {PREDICTED_FALL:.4f}, and '
                f'lowers it by {fall:.4f}: a detach in a branch, or a backward pass of your own '
                'that is not the derivative of its forward pass')


# -----------------------------------------------------------------------------
# what is done with the model later


def cache_changes_nothing(subject):
    """Two prompts of different lengths, continued with given tokens, with a cache and without."""
    model, T = subject.model, subject.idx.size(1)
    if T < 4:
        return None
    texts, prompts = subject.idx[:2], (T // 2, T // 2 - 1)
    with subject.training_mode(False), torch.inference_mode():
        whole = model.logits(model.hidden(texts)).float()  # (2, T, V)
        cached, idx, worst = Context(model), None, 0.0
        for i in range(min(4, T - T // 2)):
            rows = [texts[b, :n + i].tolist() for b, n in enumerate(prompts)]
            logits = cached.next_logits(rows, idx, T - T // 2 - i)  # (2, V)
            expected = torch.stack([whole[b, n + i - 1] for b, n in enumerate(prompts)])
            worst = max(worst, largest_change(logits, expected))
            idx = torch.stack([texts[b, n + i] for b, n in enumerate(prompts)])[:, None]  # (2, 1)
    if worst > NEARLY_SAME:
        return ('generation with a cache gives other logits than without, by '
                f'{worst:.2g} of their size, so samples are not of this model: attention that does '
                'not take keys and values from cache.extend, other positions, or a layer that '
                'needs earlier tokens and does not keep them')
