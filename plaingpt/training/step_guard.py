"""A training step whose loss or gradient is not finite (NaN, infinity) leaves the weights alone,
and an error in the middle of a run leaves a checkpoint."""

import math
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from plaingpt.system.distributed import all_gather, gloo_group
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line
from plaingpt.system.formatting import command_for, quoted

MAX_BAD_STEPS = 10  # this many in a row end the run
OVERFLOWS = 16  # GradScaler halves its scale this often to get from 65,536, where it begins, to 1


class StepGuard:
    """Lets the optimizer skip steps whose loss or gradient is not finite, without waiting for the
    device: a fused optimizer reads the result there as `found_inf`, and does nothing if it is 1.
    The host reads it in `report`, on steps on which it waits anyway.

    path: anomalies.jsonl, which gets a line for each bad step
    loader: the BatchLoader that tells which sequences the step trained on
    scaling: with float16, gradients overflow while GradScaler looks for its scale; up to OVERFLOWS
    such steps in a row are not bad, though the optimizer skips them too
    """

    def __init__(self, path, loader, device, scaling=False):
        self.path, self.loader = path, loader
        self.overflows = OVERFLOWS if scaling else 0
        self.held_in_a_row = torch.zeros((), device=device)  # steps that moved no weight
        self.bad_in_a_row = torch.zeros((), device=device)
        self.unread = []  # (iteration, bad, loss, gradient norm), on the device but for the first
        self.gave_up = ''  # why the run ends, where MAX_BAD_STEPS came in a row
        self.group = gloo_group()

    def check_finite(self, iter_num, loss, grad_norm):
        """→ hold: 1.0 on the device where the optimizer must skip the step, else 0.0; the same on
        all ranks. It is 1 if the loss or the gradient is not finite on any rank, and once
        MAX_BAD_STEPS have come in a row. A step is bad if its loss is not finite or, with float16,
        if its gradient still is not after `overflows` held steps in a row."""
        broken = 1 - torch.stack([loss.isfinite() & grad_norm.isfinite(), loss.isfinite()]).float()
        if dist.is_initialized():
            dist.all_reduce(broken, dist.ReduceOp.MAX)
        not_finite, bad_loss = broken
        bad = torch.maximum(bad_loss, not_finite * (self.held_in_a_row >= self.overflows))
        gave_up = (self.bad_in_a_row >= MAX_BAD_STEPS).float()
        hold = torch.maximum(not_finite, gave_up)
        self.held_in_a_row = (self.held_in_a_row + 1) * hold
        self.bad_in_a_row = (self.bad_in_a_row + 1) * torch.maximum(bad, gave_up)
        self.unread.append((iter_num, bad, loss, grad_norm))
        return hold

    def report(self, print_line):
        """Write down the bad steps since the last report, and see whether to give up: the weights
        are then as before the first of them. This waits for the device."""
        steps, self.unread = self.unread, []
        if not steps or not torch.stack([bad for _, bad, _, _ in steps]).any():
            return
        for iter_num, bad, loss, grad_norm in steps:
            if not bad:
                continue
            losses = [as_json(x) for x in all_gather(loss.item(), self.group)]
            norm = as_json(grad_norm.item())
            first, last, starts = self.loader.step_sequences(iter_num)
            print_line(f'warning: iteration {iter_num + 1} left the weights alone: loss '
                       f'{", ".join(map(str, losses))}, gradient norm {norm}; see {self.path}')
            if not self.group or dist.get_rank() == 0:
                append_line(self.path, {
                    'iter': iter_num + 1, 'loss': losses, 'grad_norm': norm,
                    'sequences': [first, last], 'sequence_starts': starts})
        if self.bad_in_a_row.item() >= MAX_BAD_STEPS:
            self.gave_up = f'given up: {MAX_BAD_STEPS} steps in a row were not finite'

    def error(self):
        """The error that ends the run."""
        return UserError(
            f'the last {MAX_BAD_STEPS} steps had a loss or gradient that is not finite, and '
            'the weights are as before them: lower --learning_rate, lengthen --warmup_iters or try '
            f'--dtype=float32, and look at the text that {self.path} names; then continue with '
            '--init_from=resume, or from before with --checkpoint=best')


@contextmanager
def saved_when_it_fails(run, save):
    """Save a train.Run that an error ends, as it was before the step, by train.py's `save`. Of
    several processes the others know nothing of the error."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the first error says more
            if run.world.size == 1 and not run.progress.updating:
                save(run)
                run.saver.wait()
                if run.progress.saved_at and not run.saver.failed:
                    error.add_note(f'iteration {run.progress.saved_at} is saved: '
                                   f'{command_for("train")} --out_dir={quoted(run.config.out_dir)} '
                                   '--init_from=resume')
        raise


def as_json(x):
    """JSON knows no NaN or infinity: they become text."""
    return round(x, 4) if math.isfinite(x) else str(x)
