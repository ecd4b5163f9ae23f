"""Optimizers: a model and its settings → what moves the weights.

A new one is a function here and its entry in OPTIMIZERS: settings, checkpoints and planning follow.
"""

import math
from collections import defaultdict

import torch

from plaingpt.system.devices import cpu_has_bfloat16


def build_optimizer(model, config, device_type):
    """The optimizer that a TrainConfig names, over the parameters of a GPT that take gradients."""
    groups = parameter_groups(model, config)
    return OPTIMIZERS[config.optimizer](groups, config, fused=device_type in ('cuda', 'cpu', 'mps'))


def parameter_groups(model, config):
    """{'matrices' (of blocks), 'embedding', 'head' (unless tied), 'vectors'} → a parameter group.

    Its learning rate is the schedule's times its 'lr_scale'. Vectors work on each channel by itself
    (biases, norms, short convolutions), and do not decay. For each of the matrices, 'stacked' tells
    how many it is made of: queries', keys' and values', or the two of SwiGLU."""
    scales = {'matrices': 1.0, 'embedding': config.embedding_lr_scale,
              'head': config.head_lr_scale, 'vectors': config.vector_lr_scale}
    groups = {kind: {'params': [], 'lr': config.learning_rate * scale, 'lr_scale': scale,
                     'weight_decay': 0.0 if kind == 'vectors' else config.weight_decay}
              for kind, scale in scales.items()}
    stacked = {'c_attn': 3, 'c_fc': 2 if config.mlp == 'swiglu' else 1}
    groups['matrices']['stacked'] = []
    for name, p in model.named_parameters():
        kind = kind_of(name, p)
        if p.requires_grad:
            groups[kind]['params'].append(p)
            if kind == 'matrices':
                groups[kind]['stacked'].append(stacked.get(name.split('.')[-2], 1))
    return {kind: group for kind, group in groups.items() if group['params']}


def kind_of(name, p):
    if p.dim() < 2 or name.endswith('.conv.weight'):
        return 'vectors'
    if name.startswith('transformer.h.'):
        return 'matrices'
    return 'head' if name == 'lm_head.weight' else 'embedding'


# Each: parameter_groups, the TrainConfig, whether torch has fused kernels → an Optimizer.
# training_step.update keeps one that knows nothing of `found_inf` from stepping on a gradient that
# is not finite, and waits for the device to do so.


def adamw(groups, config, fused):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""
    return torch.optim.AdamW(groups.values(), betas=(config.beta1, config.beta2), fused=fused)


def sgd(groups, config, fused):
    """With Nesterov's momentum. Wants a learning rate some 100 times AdamW's."""
    return torch.optim.SGD(groups.values(), momentum=config.momentum,
                           nesterov=config.momentum > 0, fused=fused)


def muon(groups, config, fused):
    """Muon for the blocks' matrices, AdamW for the rest."""
    return MuonAdamW(groups, config, fused)


def normuon(groups, config, fused):
    """Muon with all rows of an update about equally long (Li et al. 2025, "NorMuon"); queries, keys
    and values, and the halves of SwiGLU's matrix, are matrices of their own."""
    return MuonAdamW(groups, config, fused, equal_rows=True)


OPTIMIZERS = {'adamw': adamw, 'muon': muon, 'normuon': normuon, 'sgd': sgd}


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices and fused AdamW for the other groups, as one optimizer.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves a matrix by its
    momentum with all singular values made about equal. The update is scaled to AdamW's size (Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2), so both take one learning rate.
    Matrices of one shape are orthogonalized together, as one batch of matmuls.

    Like torch's fused optimizers it reads `found_inf`, a number on the device, and leaves the
    weights alone where that is 1, without any wait for the device. Muon's momentum is then 0.
    """

    _step_supports_amp_scaling = True  # tells GradScaler that `found_inf` is heeded here
    found_inf = None

    def __init__(self, groups, config, fused, equal_rows=False):
        rest = [group for kind, group in groups.items() if kind != 'matrices']
        super().__init__([groups['matrices'], *rest], {})
        self.momentum, self.equal_rows, self.rows_beta = config.momentum, equal_rows, config.beta2
        self.adamw = torch.optim.AdamW(rest, betas=(config.beta1, config.beta2), fused=fused)
        # One view on both: groups to set the learning rate in, states to save.
        self.matrices = self.param_groups[0]
        self.param_groups = [self.matrices, *self.adamw.param_groups]
        self.state = self.adamw.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure=None):
        alike = defaultdict(list)  # shape → [(matrix, momentum, rows' mean squares), …]
        for p, n in zip(self.matrices['params'], self.matrices['stacked'], strict=True):
            if p.grad is not None:
                parts = [t.chunk(n if self.equal_rows else 1) for t in (p, *self.remember(p))]
                for part in zip(*parts, strict=True):
                    alike[part[0].shape].append(part)
        for same in alike.values():
            self.move(*zip(*same, strict=True), **self.matrices)
        self.adamw.found_inf = self.found_inf
        self.adamw.step()

    def remember(self, p):
        """Add the gradient of a matrix to its momentum → Nesterov's direction, and the state of
        equal_rows, (rows, 1)."""
        grad, state = p.grad, self.state[p]
        if not state:
            state['momentum_buffer'] = torch.zeros_like(p)
            if self.equal_rows:
                state['exp_avg_sq_rows'] = torch.zeros_like(p[:, :1])
        if self.found_inf is not None:  # no gradient and no momentum make no update
            grad = torch.where(self.found_inf.bool(), 0.0, grad)
            state['momentum_buffer'].mul_(1 - self.found_inf)
        state['momentum_buffer'].lerp_(grad, 1 - self.momentum)
        direction = grad.lerp(state['momentum_buffer'], self.momentum)
        return direction, state.get('exp_avg_sq_rows', direction)

    def move(self, matrices, directions, rows, lr, weight_decay, **_):
        """One update of n matrices of one shape; without equal_rows it is torch.optim.Muon's."""
        shape = matrices[0].shape
        updates = orthogonalized(torch.stack(directions))  # (n, rows, columns)
        size = math.sqrt(max(shape))
        if self.equal_rows:
            updates = updates.float()
            for mean, square in zip(rows, updates.square().mean(-1, keepdim=True), strict=True):
                mean.lerp_(square, 1 - self.rows_beta)
            updates /= torch.stack(rows).sqrt() + 1e-8
            updates /= updates.norm(dim=(-2, -1), keepdim=True) + 1e-8
            size = math.sqrt(shape.numel())
        decay = lr * weight_decay * (1 if self.found_inf is None else 1 - self.found_inf)
        for p, update in zip(matrices, updates, strict=True):
            p.mul_(1 - decay).add_(update, alpha=-lr * 0.2 * size)


def orthogonalized(matrices, steps=5):
    """Matrices (n, rows, columns) with all their singular values about 1, by Newton-Schulz
    iterations in bfloat16 (Jordan et al. 2024). A CPU without bfloat16 takes float32, which is 20
    times as fast there."""
    a, b, c = 3.4445, -4.7750, 2.0315
    slow = matrices.device.type == 'cpu' and not cpu_has_bfloat16()
    x = matrices.to(torch.float32 if slow else torch.bfloat16)
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    if slow and x.size(2) >= 2 * x.size(1):
        x = polynomial_of_gram(x @ x.mT, (a, b, c), steps) @ x
    else:
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def polynomial_of_gram(gram, coefficients, steps):
    """What all iterations together multiply x with, given xxᵀ: each multiplies it with a polynomial
    of its xxᵀ. Where x is wide this is less work. bfloat16 is not exact enough for it."""
    a, b, c = coefficients
    product = None
    for step in range(steps):
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=1, dim2=2).add_(a)  # a + b·gram + c·gram²
        product = p if product is None else product @ p
        if step < steps - 1:
            gram = p @ gram @ p
    return product
