"""Optimizers: a model and its settings → what moves the weights.

A new one is a function here and its entry in OPTIMIZERS: settings, checkpoints and planning follow.
"""

from collections import defaultdict

import torch


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
    """Loshchilov and Hutter 2017."""
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
    """torch's Muon for `matrices` and fused AdamW for `rest`, as one optimizer.

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
        # Muon's own decay would move the weights in spite of found_inf, so it happens in step.
        self.muon = torch.optim.Muon([{**group, 'weight_decay': 0.0} for group in matrices], lr=lr,
                                     momentum=momentum, adjust_lr_fn='match_rms_adamw')
        self.decay = [group['weight_decay'] for group in matrices]
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=fused)
        super().__init__([*matrices, *rest], {'lr': lr})
        # One view on both: groups to set the learning rate in, states to save.
        self.param_groups = self.muon.param_groups + self.adamw.param_groups
        self.state = self.muon.state = self.adamw.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure=None):
        found_inf = self.found_inf
        for group, decay in zip(self.muon.param_groups, self.decay, strict=True):
            params = [p for p in group['params'] if p.grad is not None]
            keep = 1.0
            if found_inf is not None:
                # No gradient and no momentum make no update.
                keep = 1 - found_inf
                for p in params:
                    p.grad = torch.where(found_inf.bool(), 0.0, p.grad)
                momenta = [self.state[p]['momentum_buffer'] for p in params if self.state[p]]
                if momenta:
                    torch._foreach_mul_(momenta, keep)
            torch._foreach_mul_(params, 1 - group['lr'] * decay * keep)
        self.muon.step()
        self.adamw.found_inf = found_inf
        self.adamw.step()
