"""Skip steps whose loss or gradient is not finite; find steps that a bug leaves out or repeats."""

import math
from pathlib import Path

import torch
import torch.distributed as dist

from plaingpt.system.distributed import all_gather, gloo_group, launched_world
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line

MAX_BAD_STEPS = 10  # consecutive bad steps before the run gives up
MAX_OVERFLOWS = 16  # GradScaler's scale starts at 65,536 and reaches 1 after 16 halvings


class BadSteps:
    """Decides which steps of a process to skip: those whose loss or gradient is NaN or infinite.

    Skipping does not synchronize host and device: the decision stays on the device, where a fused
    optimizer reads it as `found_inf`, and report() writes it down later. In float16, gradients
    overflow until GradScaler has found its scale, so up to MAX_OVERFLOWS consecutive overflows are
    skipped without counting as bad steps.
    """

    def __init__(self, scaler, device):
        self.max_overflows = MAX_OVERFLOWS if scaler.is_enabled() else 0
        self.updates_without_step = 0  # skipped updates in which optimizer.step() was not called
        self.consecutive_skips = torch.zeros((), device=device)
        self.consecutive_bad = torch.zeros((), device=device)
        self.unreported = []  # (is bad, loss, gradient norm) of each step, on the device
        self.gave_up = ''  # the reason, after MAX_BAD_STEPS consecutive bad steps

    def must_skip(self, loss, grad_norm):
        """Return 1.0 on the device if the optimizer must skip the step, else 0.0; the same on all
        ranks. A step is skipped if the loss or the gradient is not finite on any rank, and after
        MAX_BAD_STEPS consecutive bad steps. A bad step has a loss that is not finite, or a gradient
        that is still not finite after MAX_OVERFLOWS skipped steps (in float16)."""
        is_finite_loss = loss.isfinite()
        is_finite_step = is_finite_loss & grad_norm.isfinite()
        not_finite = 1 - torch.stack([is_finite_step, is_finite_loss]).float()
        if dist.is_initialized():
            dist.all_reduce(not_finite, dist.ReduceOp.MAX)
        not_finite_step, not_finite_loss = not_finite.bool()
        is_bad = not_finite_loss | (
            not_finite_step & (self.consecutive_skips >= self.max_overflows))
        gave_up = self.consecutive_bad >= MAX_BAD_STEPS
        skip_step = not_finite_step | gave_up
        self.consecutive_skips = (self.consecutive_skips + 1) * skip_step
        self.consecutive_bad = (self.consecutive_bad + 1) * (is_bad | gave_up)
        self.unreported.append((is_bad, loss, grad_norm))
        return skip_step.float()

    def report(self, run):
        """Write the bad steps of a Run since the last report to anomalies.jsonl. If the run gives
        up, return why; bad steps have left the weights unchanged. This waits for the device, so
        call it where the host waits anyway."""
        iter_num, path = run.progress.iter_num, Path(run.config.out_dir, 'anomalies.jsonl')
        steps, self.unreported = self.unreported, []
        if not steps or not torch.stack([is_bad for is_bad, _, _ in steps]).any():
            return self.gave_up
        first_iter = iter_num - len(steps) + 1
        for i, (is_bad, loss, grad_norm) in enumerate(steps, start=first_iter):
            if not is_bad:
                continue
            losses = [as_json(x) for x in all_gather(loss.item(), gloo_group())]
            norm = as_json(grad_norm.item())
            # iteration i is made by step i - 1 of the loader, which counts from 0
            first, last, starts = run.train_data.sequences_of_step(i - 1)
            run.log.print(f'warning: skipped iteration {i}: loss {", ".join(map(str, losses))}, '
                          f'gradient norm {norm}; see {path}')
            if launched_world().is_main:
                append_line(path, {
                    'iter': i, 'loss': losses, 'grad_norm': norm,
                    'sequences': [first, last], 'sequence_starts': starts})
        if self.consecutive_bad.item() >= MAX_BAD_STEPS:
            self.gave_up = f'gave up after {MAX_BAD_STEPS} consecutive bad steps'
        return self.gave_up

    def error(self, out_dir):
        """The error that ends the run."""
        return UserError(
            f'the loss or the gradient was not finite in {MAX_BAD_STEPS} consecutive steps (the '
            'weights were left unchanged): lower --learning_rate, raise --warmup_iters or try '
            f'--dtype=float32, and inspect the text listed in {out_dir}/anomalies.jsonl; then '
            'continue with --init_from=resume, or from an earlier checkpoint with '
            '--checkpoint=best')


class StepCounter:
    """Counts the steps of an optimizer, and how often it has lost its state: a bug such as a second
    optimizer.step() would otherwise go unnoticed.

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
        after iteration iter_num; only those that are not 0"""
        updates = iter_num - self.first_iter - self.step.bad_steps.updates_without_step
        errors = {'missed_steps': updates - self.steps, 'lost_states': max(0, self.new_states - 1)}
        return {key: value for key, value in errors.items() if value}


def as_json(x):
    """Round x; NaN and infinity, which JSON does not have, become strings."""
    return round(x, 4) if math.isfinite(x) else str(x)
