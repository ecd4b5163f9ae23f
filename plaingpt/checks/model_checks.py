"""Checks of the network: does it see what it may see, and does every weight learn?

Each is a function Subject → None, or in a line what it found and what that usually means. The
comparisons hold on any device: the same shapes take the same kernels, so equal numbers stay equal.
"""

import math

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from model import GPT
from plaingpt.checks.subject import Looked, NotChecked, largest_change, mode, opener, others
from plaingpt.inference.generation import KVCache
from plaingpt.system.errors import UserError
from plaingpt.training.optimizers import MuonAdamW, parts_of

SAME = 1e-5  # of the RMS: what rounding may change; a token that is seen changes more
NEARLY_SAME = 1e-3  # where the same sums are taken in another order
LOSS_ERROR = 3e-3  # of a loss: bfloat16 rounds logits in another order
# Predicted drops of the loss, in nats; a smaller one is tried where the loss curves strongly.
PREDICTED_DROPS = (5e-3, 5e-4, 5e-5)
ROUNDING = 2e-6  # nats, of a difference of two losses in float32
# Nats that a new model's loss may be away from ln(vocab), and so much more for each channel: the
# logits of GPT-2's initialisation have a variance of 0.02² · channels, and half of that adds to the
# loss. "Verify loss at init": Karpathy 2019, A Recipe for Training Neural Networks
INITIAL_LOSS, INITIAL_LOSS_PER_CHANNEL = 0.3, 0.0004
INITIAL_STD = 0.02  # of weights: an embedding is about that times n_embd along itself, normalised
GRADIENT_ERROR = 0.01  # of it; ours is 0.001
SWAPS = 5  # of neighbouring tokens, along a sequence
SCORED = 128  # tokens, at most, that are looked at before scores are taken
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


def matrices_are_stated(subject):
    """Muon orthogonalizes each matrix by itself, so it has to know which share a weight."""
    c, model = subject.model.config, subject.model
    if not isinstance(subject.optimizer, MuonAdamW):
        return None
    shared = {'attn.c_attn': c.qkv_sizes}
    if c.mlp == 'swiglu':
        shared['mlp.c_fc'] = 2 * (c.mlp_width,)
    for name, p in model.named_parameters():
        sizes = shared.get('.'.join(name.split('.')[3:5]))
        if name.endswith('.weight') and sizes and len(p) == sum(sizes) \
                and parts_of(model, name, p) != sizes:
            return (f'the rows of {listed([name])} are {len(sizes)} matrices of '
                    f'{", ".join(map(str, sizes))}, and the optimizer takes them for '
                    f'{", ".join(map(str, parts_of(model, name, p)))}: say in model.py how many '
                    f'rows each has, as in self.{name.split(".")[4]}.parts = (…)')


# -----------------------------------------------------------------------------
# what a token sees


def future_is_hidden(subject):
    return reads_ahead(subject.looked) or reads_targets(subject)


def reads_ahead(looked):
    B, T, _ = looked.before.shape  # one row, or four and more
    for row, t in ((0, looked.changed.start), (3, T - 1))[:B]:
        if t and largest_change(looked.before[row, :t], looked.after[row, :t]) > SAME:
            return (f'what positions 0 to {t - 1} say changes with the tokens from {t} on: '
                    'attention without is_causal or with a wrong mask, or a layer that mixes in '
                    'later tokens')


def reads_targets(subject):
    """Where the loss has no logits beside it, the gradient of the head tells what it has read: that
    of the rows of other tokens is the same for any targets."""
    model, idx, last = subject.model, subject.batch[0], subject.model.config.vocab_size - 1
    head, found = {'lm_head.weight': model.lm_head.weight.detach().clone().requires_grad_()}, []
    for training in (True, False):
        for target in (0, last):
            with subject.training_mode(training):
                _, loss = functional_call(model, head, (idx, torch.full_like(idx, target)),
                                          tie_weights=False)
            found += torch.autograd.grad(loss, head.values(), allow_unused=True)
        if last > 1 and found[-1] is not None \
                and largest_change(*(gradient[1:last] for gradient in found[-2:])) > SAME:
            return ('what the head reads changes with the targets: something in forward() looks '
                    f'at them before the loss, in {"training" if training else "evaluations"}')


def check_future(model, context):
    """Raise UserError where a network that is to be scored sees later tokens."""
    shape = model.config
    tokens = torch.arange(min(SCORED, shape.block_size), device=model.lm_head.weight.device)
    tokens = tokens[None] % shape.vocab_size  # (1, T)
    tokens = torch.where(tokens == opener(shape), others(tokens, shape), tokens)
    with mode(model, training=False), torch.no_grad(), context:
        problem = reads_ahead(Looked(lambda idx: model.hidden(idx).float(), tokens, shape))
    if problem:
        raise UserError(f'nothing was scored, because {problem}')


def texts_are_apart(subject):
    if largest_change(*(x[1::4] for x in (subject.looked.before, subject.looked.after))) > SAME:
        return ('what a sequence says changes with another sequence of the batch: a view, '
                'transpose or mean over the wrong dimension')
    if subject.opener >= 0:
        idx = subject.sequences(subject.config.block_size)[:1, :-1].clone()
        t = idx.size(1) // 2
        changed = subject.others(idx)
        changed[:, t + 1:] = idx[:, t + 1:]
        idx[:, t] = changed[:, t] = subject.opener
        if largest_change(*(subject.hidden(tokens)[:, t:] for tokens in (idx, changed))) > SAME:
            return ('what a document says changes with the one before it in its sequence: '
                    'attention, or a layer that mixes in earlier tokens, does not heed '
                    'document_attention')


def past_is_seen(subject):
    t = subject.looked.changed.stop
    after = [x[2, t:] for x in (subject.looked.before, subject.looked.after)]
    if after[0].numel() and largest_change(*after) <= SAME:
        return (f'what positions from {t} on say does not change with the tokens before: '
                'attention sees too little, or its output is not used')


def blocks_output(subject, idx):
    """[what each block puts out, (B, T, C)] in eval mode, of idx (B, T)"""
    found = []
    hooks = [block.register_forward_hook(lambda _, inputs, x: found.append(x))
             for block in subject.model.transformer.h]
    try:
        with subject.training_mode(False), torch.no_grad():
            subject.model.hidden(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def blocks_pass_on(subject):
    """With the branches of all blocks silenced, what goes into a block must come out of it."""
    model, idx = subject.model, subject.batch[0]  # (2, T)
    ends = [m for name, m in model.transformer.h.named_modules() if name.endswith('c_proj')]
    silence = [m.register_forward_hook(lambda _, inputs, y: torch.zeros_like(y)) for m in ends]
    try:
        outputs = blocks_output(subject, torch.cat((idx, subject.others(idx))))
    finally:
        for hook in silence:
            hook.remove()
    for i, x in enumerate(outputs):
        if largest_change(*x.chunk(2)) <= SAME:
            return (f'nothing of what goes into block {i} comes out of it where its attention and '
                    'its MLP add nothing: a residual connection is missing, as in x = attn(x) for '
                    'x = x + attn(x)')


def order_matters(subject):
    """Swap two neighbouring tokens at several places of two sequences: some later token must tell.
    One swap says little, because attention may ignore any two tokens. The first block is looked at
    alone: in later blocks the causal mask gives away a little of the order."""
    model, idx = subject.model, subject.batch[0]  # (2, T)
    last = idx.size(1) - 3 - model.config.conv  # i, i + 1 and what a short convolution reads
    if last < 0:
        raise NotChecked(f'sequences of {idx.size(1)} are too short')
    for i in sorted({last * k // (SWAPS - 1) for k in range(SWAPS)}, reverse=True):
        tokens = idx.clone()
        tokens[:, i + 1] = subject.others(tokens[:, i])
        swapped = tokens.clone()
        swapped[:, i:i + 2] = tokens[:, i:i + 2].flip(1)
        x = blocks_output(subject, torch.cat((tokens, swapped)))[0]  # (4, T, C)
        before, after = x[:, i + 2 + model.config.conv:].chunk(2)
        if largest_change(before, after) > SAME / 10:
            return None
    return ('the first block says the same where two earlier tokens change places: positions '
            'are not added, or rotary does not reach queries and keys')


# -----------------------------------------------------------------------------
# what the loss is


def loss_is_usual(subject):
    with subject.training_mode():
        loss = subject.evaluated_loss()
    size, expected = subject.model.config.vocab_size, math.log(subject.model.config.vocab_size)
    uniform = f'a model that knows nothing has ln({size}) = {expected:.2f}'
    tolerance = INITIAL_LOSS + INITIAL_LOSS_PER_CHANNEL * subject.model.config.n_embd
    idx, targets = subject.evaluated_batch()
    repeats = float((idx == targets).float().mean())  # a tied head foresees them
    foreseen = INITIAL_STD * subject.model.config.n_embd * repeats
    if not math.isfinite(loss):
        return f'the first loss is {loss}: a division by zero, a softmax over nothing, or an ' \
               'initialisation that is too large'
    if subject.from_scratch and not -tolerance - foreseen <= loss - expected <= tolerance:
        return f'the first loss is {loss:.2f}, and {uniform}: look at the initialisation, and at ' \
               'how the loss is averaged'
    if not subject.from_scratch and loss > expected + tolerance:
        return f'the first loss is {loss:.2f}, and {uniform}: the loaded model is sure of ' \
               'what is wrong here. New text and overfit weights do that; so does text prepared ' \
               'with another tokenizer, and so do weights that are not all loaded'


def evaluation_repeats(subject):
    losses = []
    for seed in range(2):
        with subject.training_mode():
            torch.manual_seed(seed)
            losses.append(subject.evaluated_loss())
            if not subject.model.training:
                return 'an evaluation leaves the model in eval mode, so that it goes on without ' \
                       'dropout: model.train() is not called after it'
    if abs(losses[0] - losses[1]) > SAME * abs(losses[0]):
        return (f'two evaluations of the same weights give {losses[0]:.5f} and {losses[1]:.5f}: '
                'dropout is on, because model.eval() is not called or a layer does not heed it')


def loss_is_of_the_logits(subject):
    """The evaluated loss beside the cross-entropy of what the model is sampled with."""
    with subject.training_mode():
        loss = subject.evaluated_loss()
    idx, targets = subject.evaluated_batch()
    one = torch.full_like(targets, -1)
    one[0, -1] = targets[0, -1]  # alone, it tells whether targets are shifted once more
    with subject.training_mode(False), subject.context, torch.no_grad():
        logits = subject.model.logits(subject.model.hidden(idx)).float()  # (B, T, V)
        losses = [loss, subject.model(idx, one)[1].item()]
    for loss, known in zip(losses, (targets, one), strict=True):
        expected = cross_entropy(logits.flatten(0, 1), known.flatten(), ignore_index=-1).item()
        if not abs(loss - expected) <= LOSS_ERROR * abs(expected):
            return (f'the model has a loss of {loss:.4f} in eval mode, and the cross-entropy of '
                    f'its logits is {expected:.4f}: forward() and logits(), which samples are '
                    'drawn from, do not agree; is something shifted, weighted, smoothed or scaled '
                    'in one of them?')


# -----------------------------------------------------------------------------
# what learns


def every_weight_learns(subject):
    found = subject.gradients
    broken = [name for name, g in found.items() if g is not None and not g.isfinite().all()]
    if broken:
        return f'the gradient of {listed(broken)} is not finite: a division by zero, a square ' \
               'root at 0, or a softmax over nothing'
    if silent_of(found):  # few tokens may not reach each expert of a mixture: many of all kinds
        size = subject.config.batch_size, subject.config.block_size + 1
        with subject.training_mode():
            tokens = torch.randint(subject.model.config.vocab_size, size, device=subject.device)
        found = subject.gradients_of((tokens[:, :-1], tokens[:, 1:]))
    if silent := silent_of(found):
        return f'no gradient reaches {listed(silent)}: a detach, no_grad or .data on the way, or ' \
               'a layer whose output is not used'


def silent_of(gradients):
    return [name for name, g in gradients.items() if g is None or not g.any()]


def gradient_is_true(subject):
    """A central difference: along the gradient the loss must fall as it predicts. Half of the fall
    is predicted by the weights of the first block, which all later ones pass gradients on to."""
    groups = {True: {}, False: {}}
    for name, gradient in subject.gradients.items():
        if gradient is not None:
            groups[name.startswith('transformer.h.0.')][name] = gradient
    lengths = {}  # of a step along each gradient that lowers the loss by 1, as predicted
    for group in groups.values():
        square = sum(float(gradient.norm())**2 for gradient in group.values())
        if not CUT_OFF < square < math.inf:
            raise NotChecked('there is no gradient')  # every_weight_learns says so
        lengths |= dict.fromkeys(group, 0.5 / square)
    weights = {name: p.detach() for name, p in subject.model.named_parameters()}
    ratio = None
    for predicted in PREDICTED_DROPS:
        behind, ahead = (subject.loss({**weights, **{
            name: torch.add(weights[name], subject.gradients[name],
                            alpha=way / 2 * predicted * length).requires_grad_()
            for name, length in lengths.items()}}).item() for way in (1, -1))
        fall, before = behind - ahead, ratio
        ratio, error = fall / predicted, GRADIENT_ERROR + ROUNDING / predicted
        if abs(ratio - 1) <= error:
            return None
        if before is not None and abs(ratio - before) <= error:
            break  # it is not rough
    return (f'a step along the gradient should lower the loss by {predicted:.3g}, and lowers it '
            f'by {fall:.3g}: a detach in a branch, a backward pass of your own that is not the '
            'derivative of its forward pass, or a step in the forward pass (rounding, a choice)')


# -----------------------------------------------------------------------------
# what is done with the model later


def cache_changes_nothing(subject):
    """Two prompts of different lengths, continued with given tokens, with a cache and without."""
    model, texts = subject.model, subject.batch[0][:2].clone()
    T = texts.size(1)
    if T < 4:
        raise NotChecked(f'sequences of {T} are too short')
    prompts = (T // 2, T // 2 - 1)
    if subject.opener >= 0:  # a document begins in a prompt, and one in what follows the other
        texts[0, 1] = texts[1, T // 2] = subject.opener
    with subject.training_mode(False), torch.inference_mode():
        whole = model.logits(model.hidden(texts)).float()  # (2, T, V)
        cache, worst = KVCache(model.config, T, texts.device), 0.0
        cache.begin([0, 1])  # the second prompt is padded by one token
        idx = torch.stack((texts[0, :T // 2], texts[1, :T // 2].roll(1)))  # (2, T // 2)
        for i in range(min(4, T - T // 2)):
            cache.advance(idx)
            logits = model.logits(model.hidden(idx, cache)[:, -1]).float()  # (2, V)
            expected = torch.stack([whole[b, n + i - 1] for b, n in enumerate(prompts)])
            worst = max(worst, largest_change(logits, expected))
            idx = torch.stack([texts[b, n + i] for b, n in enumerate(prompts)])[:, None]  # (2, 1)
    if worst > NEARLY_SAME:
        return ('generation with a cache gives other logits than without, by '
                f'{worst:.2g} of their size, so samples are not of this model: attention that does '
                'not take keys and values from cache.extend, other positions, or a layer that '
                'needs earlier tokens and does not keep them')
