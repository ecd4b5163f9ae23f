"""Optimizers: a model and its settings → what moves the weights.

A new one is a function here and its entry in OPTIMIZERS: settings, checkpoints and planning follow.
"""

import math
from collections import defaultdict

import torch

from plaingpt.system.devices import cpu_has_bfloat16


def build_optimizer(model, config, device_type):
    """The optimizer that a TrainConfig names, over the parameters of a GPT that require gradients.

    Matrices and embeddings decay by config.weight_decay, biases and norms do not.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    decayed = {'params': [p for p in params if p.dim() >= 2], 'weight_decay': config.weight_decay}
    plain = {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}
    fused = device_type in ('cuda', 'cpu', 'mps')
    return OPTIMIZERS[config.optimizer](decayed, plain, model, config, fused)


# Each: two parameter groups (that decay, that do not), the GPT, the TrainConfig, whether torch has
# fused kernels → a torch.optim.Optimizer. training_step.update keeps one that knows nothing of
# `found_inf` from stepping on a gradient that is not finite, and waits for the device to do so.


def adamw(decayed, plain, model, config, fused):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""
    return torch.optim.AdamW([decayed, plain], lr=config.learning_rate,
                             betas=(config.beta1, config.beta2), fused=fused)


def sgd(decayed, plain, model, config, fused):
    """With Nesterov's momentum. Wants a learning rate some 100 times AdamW's."""
    return torch.optim.SGD([decayed, plain], lr=config.learning_rate, momentum=config.momentum,
                           nesterov=config.momentum > 0, fused=fused)


def muon(decayed, plain, model, config, fused):
    """Muon for the blocks' matrices, AdamW for the rest."""
    blocks = set(model.transformer.h.parameters())
    matrices = {**decayed, 'params': [p for p in decayed['params'] if p in blocks]}
    others = {**decayed, 'params': [p for p in decayed['params'] if p not in blocks]}
    return MuonAdamW([matrices], [others, plain], config.learning_rate,
                     (config.beta1, config.beta2), config.momentum, fused)


OPTIMIZERS = {'adamw': adamw, 'muon': muon, 'sgd': sgd}


class MuonAdamW(torch.optim.Optimizer):
    """Muon for `matrices` and fused AdamW for `rest`, as one optimizer.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves a matrix by its
    momentum with all singular values made about equal. The update is scaled to AdamW's size (Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2), so both take one learning rate.

    Like torch's fused optimizers it reads `found_inf`, a number on the device, and leaves the
    weights alone where that is 1, without any wait for the device. Muon's momentum is then 0.

    matrices, rest: lists of parameter groups
    """

    _step_supports_amp_scaling = True  # tells GradScaler that `found_inf` is heeded here
    found_inf = None

    def __init__(self, matrices, rest, lr, betas, momentum, fused):
        super().__init__([*matrices, *rest], {'lr': lr, 'momentum': momentum})
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=fused)
        # One view on both: groups to set the learning rate in, states to save.
        self.matrices = self.param_groups[:len(matrices)]
        self.param_groups = self.matrices + self.adamw.param_groups
        self.state = self.adamw.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.matrices:
            for p in group['params']:
                if p.grad is not None:
                    self.move(p, **group)
        self.adamw.found_inf = self.found_inf
        self.adamw.step()

    def move(self, p, lr, momentum, weight_decay, **_):
        """One update of a matrix p (rows, columns), as torch.optim.Muon makes it."""
        grad, keep, state = p.grad, 1.0, self.state[p]
        if 'momentum_buffer' not in state:
            state['momentum_buffer'] = torch.zeros_like(p)
        if self.found_inf is not None:
            # No gradient and no momentum make no update.
            keep = 1 - self.found_inf
            grad = torch.where(self.found_inf.bool(), 0.0, grad)
            state['momentum_buffer'].mul_(keep)
        state['momentum_buffer'].lerp_(grad, 1 - momentum)
        update = orthogonalized(grad.lerp(state['momentum_buffer'], momentum))  # Nesterov's
        p.mul_(1 - lr * weight_decay * keep)
        p.add_(update, alpha=-lr * 0.2 * math.sqrt(max(p.shape)))


def orthogonalized(matrix, steps=5):
    """A matrix with all its singular values about 1, by Newton-Schulz iterations in bfloat16
    (Jordan et al. 2024). A CPU without bfloat16 takes float32, which is 20 times as fast there."""
    a, b, c = 3.4445, -4.7750, 2.0315
    slow = matrix.device.type == 'cpu' and not cpu_has_bfloat16()
    x = matrix.to(torch.float32 if slow else torch.bfloat16)
    x = x.T if matrix.size(0) > matrix.size(1) else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x
