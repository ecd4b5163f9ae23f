"""A training step: accumulate the gradient over micro-batches, then update the weights.

    loss = step.forward_backward(batches)
    grad_norm = step.update(lr)

The training loop, the preflight, bench.py and plan.py all use this Step.
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

MAX_BAD_STEPS = 10  # consecutive bad steps before the run gives up
MAX_OVERFLOWS = 16  # GradScaler's scale starts at 65,536 and reaches 1 after 16 halvings


@dataclass
class Step:
    """A training step that skips the update if the loss or the gradient is NaN or infinite.

    Skipping does not synchronize host and device: the decision stays on the device, where a fused
    optimizer reads it as `found_inf`, and `SkippedSteps` reports it later. In float16, gradients
    overflow until GradScaler has found its scale, so up to MAX_OVERFLOWS consecutive overflows are
    skipped without counting as bad steps.
    """

    model: torch.nn.Module  # a GPT, perhaps compiled, and in DDP or FSDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: object  # context of the forward pass
    grad_clip: float  # maximum gradient norm; 0: no clipping
    micro_steps: int = 1  # micro-batches per step on this process

    def __post_init__(self):
        device = next(self.model.parameters()).device
        self.loss = None  # of the last forward_backward
        self.uncalled = 0  # skipped updates in which optimizer.step() was not called
        self.consecutive_skips = torch.zeros((), device=device)
        self.consecutive_bad = torch.zeros((), device=device)
        self.unreported = []  # (is bad, loss, gradient norm) of each step, on the device

    def forward_backward(self, batches):
        """Accumulate the gradients of the micro-batches. Return this process's mean loss, on the
        device.

        batches: yields (idx, targets), and each micro-batch then counts 1 / micro_steps. If some
        tokens are masked, it yields (idx, targets, weight): weight is the micro-batch's share of
        the step's unmasked tokens on all processes, times the number of processes, which cancels
        the average over processes."""
        self.loss = 0.0
        for micro_step in range(self.micro_steps):
            idx, targets, *weight = next(batches)
            is_last = micro_step == self.micro_steps - 1
            # DDP averages gradients only after the last micro-batch. FSDP must do it after each
            # one, because a process stores only its shard of the gradient.
            skip_sync = isinstance(self.model, DistributedDataParallel) and not is_last
            with self.model.no_sync() if skip_sync else nullcontext():
                with self.autocast:
                    _, loss = self.model(idx, targets)
                    loss = loss * weight[0] if weight else loss / self.micro_steps
                self.scaler.scale(loss).backward()
            self.loss += loss.detach()
        return self.loss

    def update(self, lr):
        """Clip the gradient and update the weights, unless the step must be skipped. Return the
        gradient norm before clipping. lr: from the schedule; each parameter group scales it."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group['lr'] = lr * group['lr_scale']  # lr_scale: set by parameter_groups()
        self.scaler.unscale_(optimizer)
        max_norm = self.grad_clip or math.inf  # infinity: only measure the norm
        grad_norm = full_tensor(clip_grad_norm_(self.model.parameters(), max_norm))
        skip_step = self.must_skip(grad_norm)  # 1.0 or 0.0, on the device
        # Not scaler.step(): it checks only gradients, and would update the weights after a bad
        # loss. The flag is torch's, for optimizers that skip the step themselves if found_inf is 1.
        if getattr(optimizer, '_step_supports_amp_scaling', False):
            optimizer.found_inf = skip_step
            optimizer.step()
        elif not skip_step:  # for other optimizers, the host waits for the device
            optimizer.step()
        else:
            self.uncalled += 1
        self.scaler.update()
        # DDP's gradients are views of its buckets; setting them to None would reallocate them.
        is_ddp = isinstance(self.model, DistributedDataParallel)
        optimizer.zero_grad(set_to_none=not is_ddp)
        return grad_norm

    def must_skip(self, grad_norm):
        """Return 1.0 on the device if the optimizer must skip the step, else 0.0; the same on all
        ranks. A step is skipped if the loss or the gradient is not finite on any rank, and after
        MAX_BAD_STEPS consecutive bad steps. A bad step has a loss that is not finite, or a gradient
        that is still not finite after MAX_OVERFLOWS skipped steps (in float16)."""
        is_finite_loss = self.loss.isfinite()
        is_finite_step = is_finite_loss & grad_norm.isfinite()
        not_finite = 1 - torch.stack([is_finite_step, is_finite_loss]).float()
        if dist.is_initialized():
            dist.all_reduce(not_finite, dist.ReduceOp.MAX)
        not_finite_step, not_finite_loss = not_finite
        max_overflows = MAX_OVERFLOWS if self.scaler.is_enabled() else 0
        # 1.0 is true and 0.0 is false: maximum is "or", a product is "and"
        is_bad = torch.maximum(not_finite_loss,
                               not_finite_step * (self.consecutive_skips >= max_overflows))
        gave_up = (self.consecutive_bad >= MAX_BAD_STEPS).float()
        skip_step = torch.maximum(not_finite_step, gave_up)
        self.consecutive_skips = (self.consecutive_skips + 1) * skip_step
        self.consecutive_bad = (self.consecutive_bad + 1) * torch.maximum(is_bad, gave_up)
        self.unreported.append((is_bad, self.loss, grad_norm))
        return skip_step


class SkippedSteps:
    """Writes a Step's bad steps to anomalies.jsonl and decides when the run gives up. `report`
    waits for the device, so call it where the host waits anyway.

    path: of anomalies.jsonl; loader: the BatchLoader that knows which sequences a step trained on
    """

    def __init__(self, step, path, loader):
        self.step, self.path, self.loader = step, path, loader
        self.gave_up = ''  # the reason, after MAX_BAD_STEPS consecutive bad steps
        self.group = gloo_group()

    def report(self, iter_num, print_line):
        """Record the bad steps since the last report. iter_num: the latest step. If the run gives
        up, the weights are those before the first bad step."""
        steps = self.step.unreported
        self.step.unreported = []
        if not steps or not torch.stack([is_bad for is_bad, _, _ in steps]).any():
            return
        first_iter = iter_num - len(steps) + 1
        for i, (is_bad, loss, grad_norm) in enumerate(steps, start=first_iter):
            if not is_bad:
                continue
            losses = [as_json(x) for x in all_gather(loss.item(), self.group)]
            norm = as_json(grad_norm.item())
            # iteration i is made by step i - 1 of the loader, which counts from 0
            first, last, starts = self.loader.sequences_of_step(i - 1)
            print_line(f'warning: skipped iteration {i}: loss {", ".join(map(str, losses))}, '
                       f'gradient norm {norm}; see {self.path}')
            if not self.group or dist.get_rank() == 0:
                append_line(self.path, {
                    'iter': i, 'loss': losses, 'grad_norm': norm,
                    'sequences': [first, last], 'sequence_starts': starts})
        if self.step.consecutive_bad.item() >= MAX_BAD_STEPS:
            self.gave_up = f'gave up after {MAX_BAD_STEPS} consecutive bad steps'

    def error(self):
        """The error that ends the run."""
        return UserError(
            f'the loss or the gradient was not finite in {MAX_BAD_STEPS} consecutive steps (the '
            'weights are those before them): lower --learning_rate, raise --warmup_iters or try '
            f'--dtype=float32, and inspect the text listed in {self.path}; then continue with '
            '--init_from=resume, or from an earlier checkpoint with --checkpoint=best')


class StepCounter:
    """Counts the steps of an optimizer, and how often it has lost its state: a mistake in the code
    around it, such as a second optimizer.step(), would train on in silence.

    step: a Step; iter_num: the iteration at which counting starts
    """

    def __init__(self, step, iter_num):
        self.step, self.first_iter = step, iter_num
        self.steps = 0
        self.new_states = 0
        step.optimizer.register_step_post_hook(self.count)

    def count(self, optimizer, *_):
        """Count a step. The first state is marked with a None, which checkpoints leave out; a state
        without the mark is a new one."""
        self.steps += 1
        state = next(filter(None, optimizer.state.values()), None)
        if state is not None and 'counted' not in state:
            state['counted'] = None
            self.new_states += 1

    def errors(self, iter_num):
        """{'missed_steps': updates without a step (below 0: too many steps), 'lost_states': …}
        after iteration iter_num, as far as they are not 0"""
        updates = iter_num - self.first_iter - self.step.uncalled
        errors = {'missed_steps': updates - self.steps, 'lost_states': max(0, self.new_states - 1)}
        return {key: value for key, value in errors.items() if value}


def as_json(x):
    """Round x; NaN and infinity, which JSON does not have, become strings."""
    return round(x, 4) if math.isfinite(x) else str(x)
