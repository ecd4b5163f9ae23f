"""Optimizers: a model and its settings → what moves the weights.

A new one is a function here and its entry in OPTIMIZERS: settings, checkpoints and planning follow.
"""

import math
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw as move_as_adamw

from plaingpt.system.devices import cpu_has_bfloat16
from plaingpt.system.distributed import is_sharded, local_rows
from plaingpt.system.errors import UserError
from plaingpt.training.averaging import keep_average


def build_optimizer(model, config, processes=1):
    """The optimizer that a TrainConfig names, over the parameters of a GPT that take gradients.

    processes: how many may share the work of a step, because their gradients are equal (DDP);
    sharded parameters (FSDP2) know their processes themselves"""
    optimizer = OPTIMIZERS[config.optimizer](parameter_groups(model, config), config)
    optimizer.processes = processes
    if config.average_decay:
        keep_average(optimizer, config.average_decay)
    return optimizer


def parameter_groups(model, config):
    """{'matrices' (of blocks), 'embedding', 'head' (unless tied), 'vectors'} → a parameter group.

    Its learning rate is the schedule's times its 'lr_scale'. Vectors work on each channel by itself
    (biases, norms, short convolutions). A weight may hold several matrices: those of
    queries, keys and values, or SwiGLU's two. 'parts' has their rows, as its layer tells."""
    scales = config.scales()
    scales = {'matrices': 1.0, 'embedding': scales['embedding'], 'head': scales['head'],
              'vectors': scales['vector']}
    groups = {kind: {'params': [], 'lr': config.learning_rate * scale, 'lr_scale': scale,
                     'weight_decay': 0.0 if kind == 'vectors' else config.weight_decay}
              for kind, scale in scales.items()}
    groups['matrices']['parts'] = []
    for name, p in model.named_parameters():
        kind = kind_of(name, p)
        if p.requires_grad:
            groups[kind]['params'].append(p)
            if kind == 'matrices':
                groups[kind]['parts'].append(parts_of(model, name, p))
    return {kind: group for kind, group in groups.items() if group['params']}


def parts_of(model, name, p):
    """The rows of each matrix that the weight `p` of a GPT is made of. Raises UserError."""
    layer = name.rpartition('.')[0]
    parts = getattr(model.get_submodule(layer), 'parts', (p.size(0),))
    if sum(parts) != p.size(0):
        raise UserError(f'{layer}.parts = {parts} in model.py: these are the rows of the matrices '
                        f'in {name}, and it has {p.size(0)} rows')
    return parts


def kind_of(name, p):
    if p.dim() < 2 or name.endswith('.conv.weight'):
        return 'vectors'
    if name.endswith('.value_embedding.weight'):
        return 'embedding'
    if name.startswith('transformer.h.'):
        return 'matrices'
    return 'head' if name == 'lm_head.weight' else 'embedding'


# Each function: parameter_groups and the TrainConfig → an Optimizer. If it does not know
# `found_inf`, train.update waits for the device, and skips steps whose gradient is not finite.


def adamw(groups, config):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""
    return torch.optim.AdamW(groups.values(), betas=(config.beta1, config.beta2), fused=True)


def sgd(groups, config):
    """SGD with Nesterov's momentum. It needs a learning rate some 100 times AdamW's."""
    return torch.optim.SGD(groups.values(), momentum=config.momentum,
                           nesterov=config.momentum > 0)


class Stack(NamedTuple):
    """`n` matrices of one shape, one below another in the rows of a parameter."""

    parameter: torch.nn.Parameter
    start: int  # the first of its rows
    rows: int
    n: int

    @property
    def shape(self):
        return self.rows // self.n, self.parameter.size(1)

    def cut(self, tensor):
        """This process's rows of a tensor as large as the parameter → those of the stack."""
        local, first = local_rows(tensor)
        if self.rows == len(self.parameter):
            return local
        return local[max(self.start - first, 0):max(self.start - first + self.rows, 0)]


def stacks_of(p, parts):
    """parts: the rows of each matrix in the parameter `p`, from the top → its Stacks"""
    found, start = [], 0
    for rows, alike in groupby(parts):
        n = len(list(alike))
        found.append(Stack(p, start, n * rows, n))
        start += n * rows
    return found


class Matrices(NamedTuple):
    """Stacks of matrices of one shape (R, C). owners.py has those that processes share."""

    shape: tuple
    stacks: list

    def to_owners(self, tensors, dtype):
        """A tensor for each stack → all matrices (n, R, C), as this process owns all."""
        return torch.cat(tensors).to(dtype).view(-1, *self.shape)

    def from_owners(self, results):
        return results

    def lengths(self, updates):
        """Matrices (n, R, C) → the Frobenius norm of each (n, 1, 1)."""
        return updates.norm(dim=(-2, -1), keepdim=True)


def cut(alike, of_parameter):
    """A function(parameter) → this process's rows of what it returns, for each stack of Matrices or
    of those in owners.py."""
    return [stack.cut(of_parameter(stack.parameter)) for stack in alike.stacks]


def by_shape(held, processes):
    """[(parameter, rows of each matrix in it)] → Matrices for each shape."""
    stacks = [stack for p, parts in held for stack in stacks_of(p, parts)]
    if stacks and (processes > 1 or is_sharded(stacks[0].parameter)):
        from plaingpt.parallel.owners import shared_by_shape
        return shared_by_shape(stacks, processes)
    alike = {}
    for stack in stacks:
        alike.setdefault(stack.shape, Matrices(stack.shape, [])).stacks.append(stack)
    return list(alike.values())


def muon_update(gradients, momenta, beta, orthogonalize):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): a matrix moves by its
    momentum with all singular values made about equal. gradients, momenta: of matrices of one
    shape; the momenta change → what orthogonalize() makes of the directions."""
    torch._foreach_lerp_(momenta, gradients, 1 - beta)
    directions = torch._foreach_lerp(gradients, momenta, beta)  # Nesterov's momentum
    return orthogonalize(directions)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the first group, the matrices, and torch's fused AdamW for the others.

    Queries, keys and values, and the halves of SwiGLU's matrix, are matrices of their own. Those of
    one shape are orthogonalized together, as one batch of matmuls, each by the process that owns
    it. The update is scaled to be as large as AdamW's, so both take one learning rate (Liu et al.
    2025, "Muon is Scalable", section 2.2).

    equal_rows: all rows of an update get about equally long (Li et al. 2025, "NorMuon")
    found_inf: a tensor, 1 if weights and states must stay as they are, as in torch's optimizers
    """

    _step_supports_amp_scaling = True  # says that this class reads `found_inf`
    found_inf = None
    processes = 1  # that share the work, unless parameters are sharded

    def __init__(self, groups, config, equal_rows=False):
        super().__init__(groups.values(), {})
        self.momentum, self.equal_rows = config.momentum, equal_rows
        self.beta1, self.beta2 = config.beta1, config.beta2

    @torch.no_grad()
    def step(self, closure=None):
        matrices, *others = self.param_groups
        self.step_muon(**matrices)
        for group in others:
            self.step_adamw(**group)

    def step_muon(self, params, parts, lr, weight_decay, **_):
        held = [(p, rows) for p, rows in zip(params, parts, strict=True) if p.grad is not None]
        for p, _ in held:
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
                if self.equal_rows:
                    self.state[p]['exp_avg_sq_rows'] = torch.zeros_like(p[:, :1])
        for alike in by_shape(held, self.processes):
            gradients = cut(alike, lambda p: p.grad)
            momenta = cut(alike, lambda p: self.state[p]['momentum_buffer'])
            gradients = self.unless_held(gradients, momenta)  # then the momentum stays as it is
            updates = muon_update(gradients, momenta, self.momentum, partial(self.share, alike))
            if self.equal_rows:
                updates = self.with_equal_rows(updates, alike)
            weights = cut(alike, lambda p: p)
            torch._foreach_mul_(weights, 1 - lr * weight_decay * self.alright())
            torch._foreach_add_(
                weights, updates.reshape(-1, alike.shape[1]).split([len(w) for w in weights]),
                alpha=-lr * (0.2 * math.sqrt(max(alike.shape))))

    def share(self, alike, directions):
        """orthogonalized(), where each process computes the matrices that it owns."""
        mine = alike.to_owners(directions, iterations_dtype(directions[0].device))
        return alike.from_owners(orthogonalized(mine) * self.alright()).float()

    def with_equal_rows(self, updates, alike):
        """Divide each row of the updates by the size that it had in the mean so far. The length of
        each update stays the same."""
        rows = cut(alike, lambda p: self.state[p]['exp_avg_sq_rows'])
        squares = updates.square().mean(-1, keepdim=True)
        new = squares.reshape(-1, 1).to(rows[0].dtype).split([len(r) for r in rows])
        torch._foreach_lerp_(rows, self.unless_held(new, rows), 1 - self.beta2)
        updates = updates / (torch.cat(rows).view(squares.shape).sqrt() + 1e-8)
        return updates * (math.sqrt(min(alike.shape)) / alike.lengths(updates).clamp(min=1e-8))

    def step_adamw(self, params, lr, weight_decay, **_):
        params = [p for p in params if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p] = {'step': torch.zeros((), device=p.device),
                                 'exp_avg': torch.zeros_like(p), 'exp_avg_sq': torch.zeros_like(p)}
        steps, means, squares = ([self.state[p][key] for p in params]
                                 for key in ('step', 'exp_avg', 'exp_avg_sq'))
        move_as_adamw(
            params, [p.grad for p in params], means, squares, [], steps, fused=True,
            found_inf=self.found_inf, amsgrad=False, beta1=self.beta1, beta2=self.beta2, lr=lr,
            weight_decay=weight_decay, eps=1e-8, maximize=False)

    def unless_held(self, new, old):
        """Tensors: `new`, or `old` where the step is to change nothing."""
        if self.found_inf is None:
            return new
        held = self.found_inf.bool().view(())
        return [torch.where(held, b, a) for a, b in zip(new, old, strict=True)]

    def alright(self):
        """1, or 0 where the step is to change nothing."""
        return 1.0 if self.found_inf is None else 1 - self.found_inf.view(())


OPTIMIZERS = {'adamw': adamw, 'sgd': sgd, 'muon': MuonAdamW,
              'normuon': partial(MuonAdamW, equal_rows=True)}

# Newton-Schulz iterations x ← a·x + b·(x xᵀ) x + c·(x xᵀ)² x bring all singular values between 0.7
# and 1.2 (Jordan et al. 2024).
ITERATIONS, (A, B, C) = 5, (3.4445, -4.7750, 2.0315)


def iterations_dtype(device):
    """bfloat16. A CPU without it takes float32, which is 20 times as fast there."""
    slow = device.type == 'cpu' and not cpu_has_bfloat16()
    return torch.float32 if slow else torch.bfloat16


def orthogonalized(matrices):
    """Matrices (n, rows, columns) with all their singular values about 1, in iterations_dtype."""
    x = matrices.to(iterations_dtype(matrices.device))
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x
