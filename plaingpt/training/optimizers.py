"""Optimizers: a model and its settings → what moves the weights.

A new one is a function here and its entry in OPTIMIZERS: settings, checkpoints and planning follow.
"""

import math
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from itertools import groupby

import torch
from torch.optim.adamw import adamw as adamw_step

from plaingpt.parallel.owners import from_owners, to_owners
from plaingpt.system.devices import cpu_has_bfloat16
from plaingpt.system.distributed import local_rows


def build_optimizer(model, config):
    """The optimizer that a TrainConfig names, over the parameters of a GPT that take gradients."""
    optimizer = OPTIMIZERS[config.optimizer](parameter_groups(model, config), config)
    if config.average_decay:
        keep_average(optimizer, config.average_decay)
    return optimizer


def parameter_groups(model, config):
    """{'matrices' (of blocks), 'embedding', 'ngram', 'head' (unless tied), 'vector'} → a parameter
    group.

    Its learning rate is the schedule's times its 'lr_scale'. A vector works on each channel by
    itself (biases, norms, short convolutions). A weight may hold several matrices, one below the
    other: those of queries, keys and values, or SwiGLU's two. 'parts' has the rows of each."""
    scales = {'matrices': 1.0, **config.scales()}
    groups = {kind: {'params': [], 'lr': config.learning_rate * scale, 'lr_scale': scale,
                     'weight_decay': 0.0 if kind == 'vector' else config.weight_decay}
              for kind, scale in scales.items()}
    groups['matrices']['parts'] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            group = groups[kind_of(name, p)]
            group['params'].append(p)
            if 'parts' in group:
                layer = model.get_submodule(name.rpartition('.')[0])
                group['parts'].append(tuple(getattr(layer, 'split_sizes', [len(p)])))
    return {kind: group for kind, group in groups.items() if group['params']}


def kind_of(name, p):
    if p.dim() < 2 or name.endswith('.conv.weight'):
        return 'vector'
    if name.endswith('.value_embedding.weight'):
        return 'embedding'
    if name == 'transformer.ngram.weight':
        return 'ngram'
    if name.startswith('transformer.h.'):
        return 'matrices'
    return 'head' if name == 'lm_head.weight' else 'embedding'


def without_dynamo(optimizer_class):
    """A torch.optim.Optimizer whose methods do not import torch._dynamo. torch's do when they are
    first called, to hide from torch.compile, and that takes 0.8 s. Nothing here compiles them."""
    names = 'add_param_group', 'zero_grad', 'state_dict', 'load_state_dict'
    methods = {name: unwrap(getattr(optimizer_class, name)) for name in names}
    methods['step'] = torch.no_grad()(unwrap(optimizer_class.step))
    return type(optimizer_class.__name__, (optimizer_class,), methods)


# Each function: parameter_groups and the TrainConfig → an Optimizer. If it does not know
# `found_inf`, the host waits for the device, and skips steps whose gradient is not finite.


def adamw(groups, config):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""
    AdamW = without_dynamo(torch.optim.AdamW)
    return AdamW(groups.values(), betas=(config.beta1, config.beta2), fused=True)


def sgd(groups, config):
    """SGD with Nesterov momentum. It needs about 100 times AdamW's learning rate."""
    SGD = without_dynamo(torch.optim.SGD)
    return SGD(groups.values(), momentum=config.momentum, nesterov=config.momentum > 0)


# -----------------------------------------------------------------------------
# Muon


def orthogonalize(matrices):
    """Matrices (…, R, C) → matrices with the same singular vectors, whose singular values are all
    between 0.7 and 1.2.

    Five Newton-Schulz iterations x ← a·x + b·(x xᵀ) x + c·(x xᵀ)² x (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon), in bfloat16 where that is fast."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(newton_schulz_dtype(matrices.device)).flatten(0, -3)  # (n, R, C)
    is_tall = x.size(1) > x.size(2)
    x = x.mT if is_tall else x  # x xᵀ is smaller then
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT  # (n, R, R)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if is_tall else x
    return x.unflatten(0, matrices.shape[:-2])


def newton_schulz_dtype(device):
    """bfloat16. A CPU without it takes float32, which is 20 times as fast there."""
    is_slow = device.type == 'cpu' and not cpu_has_bfloat16()
    return torch.float32 if is_slow else torch.bfloat16


def normalize_rows(updates, row_squares, weight):
    """Divide each row of the updates (…, R, C) by its typical size, where the norm of each matrix
    stays that of an orthogonal one (Li et al. 2025, "NorMuon").

    row_squares (…, R, 1): a moving average of each row's mean square, to which `weight` of these is
    added in place"""
    row_squares.lerp_(updates.square().mean(-1, keepdim=True), weight)
    updates = updates / (row_squares.sqrt() + 1e-8)
    norms = updates.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-8)
    return updates * (math.sqrt(min(updates.shape[-2:])) / norms)


@without_dynamo
class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of blocks, and torch's fused AdamW for the other groups.

    normuon: whether to normalize the rows of updates
    found_inf: a tensor, 1 to skip a step, which leaves weights and states as they are. As in
        torch's fused optimizers, the host does not wait for it.
    """

    _step_supports_amp_scaling = True  # says that this class reads `found_inf`
    found_inf = None

    def __init__(self, groups, config, normuon=False):
        super().__init__(groups.values(), {})
        self.momentum, self.normuon = config.momentum, normuon
        self.beta1, self.beta2 = config.beta1, config.beta2

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if 'parts' in group:
                self.step_muon(**group)
            else:
                self.step_adamw(**group)

    def step_muon(self, params, parts, lr, weight_decay, **_):
        batches = {}  # matrices of one shape are orthogonalized together
        for p, rows in zip(params, parts, strict=True):
            if p.grad is not None:
                batches.setdefault((p.shape, rows), []).append(p)
                if not self.state[p]:
                    self.state[p]['momentum_buffer'] = torch.zeros_like(p)
                    if self.normuon:
                        self.state[p]['exp_avg_sq_rows'] = torch.zeros_like(p[:, :1])
        for (_, rows), weights in batches.items():
            self.step_batch(weights, rows, lr, weight_decay)

    def step_batch(self, params, parts, lr, weight_decay):
        """Move n weights (R, C) by their momenta, orthogonalized. parts: the rows of each matrix in
        a weight.

        The updates are scaled to AdamW's usual RMS, 0.2, so that both take the same learning rate
        (Liu et al. 2025, "Muon is Scalable", section 2.2)."""
        weights, gradients = local(params), local(p.grad for p in params)
        momenta = local(self.state[p]['momentum_buffer'] for p in params)
        keep = 1.0
        if self.found_inf is not None:
            skip = self.found_inf.view(()).bool()
            keep = 1 - skip.float()  # multiplies all that is added
            gradients = [torch.where(skip, m, g)  # leaves the momentum m as it is
                         for g, m in zip(gradients, momenta, strict=True)]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        directions = torch._foreach_lerp(gradients, momenta, self.momentum)  # Nesterov's momentum
        directions = torch.stack(directions).to(newton_schulz_dtype(momenta[0].device))
        directions = to_owners(directions, params[0])  # (n, R, C)
        updates = [orthogonalize(matrices).float() for matrices in split(directions, parts)]
        if self.normuon:
            self.apply_normuon(updates, params, parts, keep)
        largest = max(*parts, directions.size(2))
        for matrices in updates:
            matrices *= keep * math.sqrt(max(matrices.shape[-2:]) / largest)
        updates = torch.cat([matrices.flatten(1, 2) for matrices in updates], dim=1)  # (n, R, C)
        updates = from_owners(updates, params)
        torch._foreach_mul_(weights, 1 - lr * weight_decay * keep)
        torch._foreach_add_(weights, list(updates), alpha=-lr * (0.2 * math.sqrt(largest)))

    def apply_normuon(self, updates, params, parts, keep):
        """Normalize the rows of the updates, a list as of split(), and update their averages."""
        states = local(self.state[p]['exp_avg_sq_rows'] for p in params)
        row_squares = to_owners(torch.stack(states), params[0])  # (n, R, 1)
        for i, squares in enumerate(split(row_squares, parts)):
            updates[i] = normalize_rows(updates[i], squares, (1 - self.beta2) * keep)
        torch._foreach_copy_(states, list(from_owners(row_squares, params)))

    def step_adamw(self, params, lr, weight_decay, **_):
        params = [p for p in params if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p] = {'step': torch.zeros((), device=p.device),
                                 'exp_avg': torch.zeros_like(p), 'exp_avg_sq': torch.zeros_like(p)}
        steps, averages, squares = ([self.state[p][key] for p in params]
                                    for key in ('step', 'exp_avg', 'exp_avg_sq'))
        adamw_step(
            params, [p.grad for p in params], averages, squares, [], steps, fused=True,
            found_inf=self.found_inf, amsgrad=False, beta1=self.beta1, beta2=self.beta2, lr=lr,
            weight_decay=weight_decay, eps=1e-8, maximize=False)


def split(weights, parts):
    """Weights (n, R, C), the rows of each matrix in a weight → a list of views (n, k, rows, C),
    where k neighbors of the same shape are together."""
    blocks = [(rows, len(list(same))) for rows, same in groupby(parts)]
    views = weights.split([rows * k for rows, k in blocks], dim=1)
    return [view.unflatten(1, (k, rows)) for view, (rows, k) in zip(views, blocks, strict=True)]


def local(tensors):
    """The rows of each tensor that this process has: all of them, unless they are sharded."""
    return [local_rows(tensor)[0] for tensor in tensors]


OPTIMIZERS = {'adamw': adamw, 'sgd': sgd, 'muon': MuonAdamW,
              'normuon': partial(MuonAdamW, normuon=True)}


# -----------------------------------------------------------------------------
# an average of the weights


def keep_average(optimizer, decay):
    """Let each step of an optimizer update an exponential moving average of its parameters, which
    begins with the first step. The average is one of the optimizer's states, so memory plans,
    sharding and checkpoints include it."""
    @torch.no_grad()
    def add(optimizer, *_):
        begun = any('average' in state for state in optimizer.state.values())
        n = optimizer.averaged_steps = 1 + (optimizer.averaged_steps if begun else 0)
        now = min(decay, n / (9 + n))  # forgets the first weights soon (Abadi et al. 2016)
        for p in (p for group in optimizer.param_groups for p in group['params']):
            state = optimizer.state[p]
            if 'average' in state:
                state['average'].lerp_(p, 1 - now)
            elif p.grad is not None:  # without one, the optimizer keeps no state of p either
                state['average'] = p.detach().clone()
    optimizer.register_step_post_hook(add)


@contextmanager
def averaged(optimizer):
    """A context in which the parameters are their averages, where the optimizer keeps any."""
    exchange(optimizer)
    try:
        yield
    finally:
        exchange(optimizer)


@torch.no_grad()
def exchange(optimizer):
    """Exchange the parameters with their averages. Checkpoints are written and read in this form:
    the model holds the average, and the optimizer's state the weights to continue from."""
    for p, state in optimizer.state.items():
        if 'average' in state:
            weights = p.clone()
            p.copy_(state['average'])
            state['average'].copy_(weights)


def go_on(optimizer, decay, averaged_steps):
    """Call it after the model and the optimizer of a checkpoint were loaded. decay: 0 ends the
    average; averaged_steps: how many steps the average has seen"""
    exchange(optimizer)
    optimizer.averaged_steps = averaged_steps
    if not decay:
        for state in optimizer.state.values():
            state.pop('average', None)
