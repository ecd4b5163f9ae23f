"""A training step: the gradient of some micro-batches, and the update of the weights that follows.

    loss = step.forward_backward(batches)
    grad_norm = step.update(lr)

The training loop, the preflight, bench.py and plan.py make the same Step.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from plaingpt.system.distributed import all_gather, full_tensor, gloo_group
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line

MAX_BAD_STEPS = 10  # this many in a row end the run
OVERFLOWS = 16  # GradScaler halves its scale this often to get from 65,536, where it begins, to 1


@dataclass
class Step:
    """A step whose loss or gradient is not finite (NaN, infinity) leaves the weights alone.

    It does so without waiting for the device: a fused optimizer reads there, as `found_inf`,
    whether to skip the step. `SkippedSteps` reads it later. With float16, gradients overflow while
    GradScaler looks for its scale; up to OVERFLOWS such steps in a row are skipped and not bad.
    """

    model: torch.nn.Module  # a GPT, perhaps compiled, and in DDP or FSDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: object  # the context of forward passes
    grad_clip: float  # largest norm of the gradient; 0: no limit
    micro_steps: int = 1  # micro-batches of this process in a step

    def __post_init__(self):
        device = next(self.model.parameters()).device
        self.loss = None  # of the last forward_backward
        self.skipped_in_a_row = torch.zeros((), device=device)
        self.bad_in_a_row = torch.zeros((), device=device)
        self.unread = []  # (bad, loss, gradient norm) of each step, on the device

    def forward_backward(self, batches):
        """Add up the gradients of the micro-batches → this process's mean loss, on the device.

        batches yields (idx, targets), or (idx, targets, weight) where not all tokens count. weight:
        tokens of the micro-batch that count / those of the step on all processes × processes, since
        gradients and losses are averaged over the processes"""
        self.loss = 0.0
        for micro_step in range(self.micro_steps):
            idx, targets, *weight = next(batches)
            is_last = micro_step == self.micro_steps - 1
            # DDP exchanges gradients after the last micro-batch only. FSDP does so after each one,
            # because a process keeps only its own rows of them.
            skips_sync = isinstance(self.model, DistributedDataParallel) and not is_last
            with self.model.no_sync() if skips_sync else nullcontext():
                with self.autocast:
                    _, loss = self.model(idx, targets)
                    loss = loss * weight[0] if weight else loss / self.micro_steps
                self.scaler.scale(loss).backward()
            self.loss += loss.detach()
        return self.loss

    def update(self, lr):
        """Clip the gradient and move the weights, unless something is not finite → gradient norm,
        before clipping. lr: the schedule's; each parameter group has its own factor on it"""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group['lr'] = lr * group['lr_scale']
        self.scaler.unscale_(optimizer)
        grad_norm = full_tensor(clip_grad_norm_(self.model.parameters(),
                                                self.grad_clip or math.inf))
        skip_step = self.check_finite(grad_norm)  # a tensor: 1 where one is NaN or inf
        # Not scaler.step: it looks at gradients only, and would move the weights after a bad loss.
        if getattr(optimizer, '_step_supports_amp_scaling', False):
            optimizer.found_inf = skip_step  # torch's fused optimizers and ours skip it if it is 1
            optimizer.step()
        elif not skip_step:  # others cannot skip by themselves, so the host waits for the device
            optimizer.step()
        self.scaler.update()
        # DDP's gradients are views of its buckets; set to None, they would be allocated again.
        is_ddp = isinstance(self.model, DistributedDataParallel)
        optimizer.zero_grad(set_to_none=not is_ddp)
        return grad_norm

    def check_finite(self, grad_norm):
        """→ 1.0 on the device where the optimizer must skip the step, else 0.0; the same on all
        ranks. It is 1 if the loss or the gradient is not finite on any rank, and once
        MAX_BAD_STEPS have come in a row. A step is bad if its loss is not finite, or if its
        gradient still is not after the steps that GradScaler needs."""
        finite_loss = self.loss.isfinite()
        broken = 1 - torch.stack([finite_loss & grad_norm.isfinite(), finite_loss]).float()
        if dist.is_initialized():
            dist.all_reduce(broken, dist.ReduceOp.MAX)
        not_finite, bad_loss = broken
        overflows = OVERFLOWS if self.scaler.is_enabled() else 0
        bad = torch.maximum(bad_loss, not_finite * (self.skipped_in_a_row >= overflows))
        gave_up = (self.bad_in_a_row >= MAX_BAD_STEPS).float()
        skip_step = torch.maximum(not_finite, gave_up)
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skip_step
        self.bad_in_a_row = (self.bad_in_a_row + 1) * torch.maximum(bad, gave_up)
        self.unread.append((bad, self.loss, grad_norm))
        return skip_step


class SkippedSteps:
    """Writes the bad steps of a Step to anomalies.jsonl, and sees when to give up. It waits for the
    device: call `report` on steps on which the host waits anyway.

    path: of anomalies.jsonl; loader: the BatchLoader that tells which sequences a step trained on
    """

    def __init__(self, step, path, loader):
        self.step, self.path, self.loader = step, path, loader
        self.gave_up = ''  # why the run ends, where MAX_BAD_STEPS came in a row
        self.group = gloo_group()

    def report(self, iter_num, print_line):
        """Write down the bad steps since the last report, the last of which was update iter_num.
        Where the run gives up, the weights are as before the first of them."""
        steps, self.step.unread = self.step.unread, []
        if not steps or not torch.stack([bad for bad, _, _ in steps]).any():
            return
        for i, (bad, loss, grad_norm) in enumerate(steps, start=iter_num - len(steps) + 1):
            if not bad:
                continue
            losses = [as_json(x) for x in all_gather(loss.item(), self.group)]
            norm = as_json(grad_norm.item())
            first, last, starts = self.loader.step_sequences(i - 1)
            print_line(f'warning: iteration {i} was skipped: loss {", ".join(map(str, losses))}, '
                       f'gradient norm {norm}; see {self.path}')
            if not self.group or dist.get_rank() == 0:
                append_line(self.path, {
                    'iter': i, 'loss': losses, 'grad_norm': norm,
                    'sequences': [first, last], 'sequence_starts': starts})
        if self.step.bad_in_a_row.item() >= MAX_BAD_STEPS:
            self.gave_up = f'given up: {MAX_BAD_STEPS} steps in a row were not finite'

    def error(self):
        """The error that ends the run."""
        return UserError(
            f'the last {MAX_BAD_STEPS} steps had a loss or gradient that is not finite, and '
            'the weights are as before them: lower --learning_rate, lengthen --warmup_iters or try '
            f'--dtype=float32, and look at the text that {self.path} names; then continue with '
            '--init_from=resume, or from before with --checkpoint=best')


def as_json(x):
    """JSON knows no NaN or infinity: they become text."""
    return round(x, 4) if math.isfinite(x) else str(x)
