"""Muon for the matrices of the blocks, AdamW for all else, as one optimizer.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon: the update of a matrix is its
momentum with all singular values made about equal. Scaled as in Liu et al. 2025, "Muon is Scalable
for LLM Training", §2.2, it is as large as AdamW's: both take the same learning rate and decay.
"""

from collections import defaultdict

import torch


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for `matrices`, fused AdamW for `rest`.

    Like torch's fused optimizers it reads `found_inf`, a number on the device, and leaves the
    weights alone where that is 1, without any wait for the device. Muon's momentum is then 0.

    matrices, rest: parameter groups
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
