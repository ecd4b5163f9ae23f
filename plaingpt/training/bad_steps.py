"""Bad steps: a loss or gradient that is not finite is seen before the weights move."""

import math

import torch
import torch.distributed as dist

from plaingpt.system.distributed import all_gather, host_group
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line


class StepGuard:
    """Keeps the optimizer still on bad steps, without waiting for the device.

    The verdict is a number on the device, where a fused optimizer reads it as `found_inf` and does
    nothing if it is 1. The host looks at it in `report`, on steps on which it waits anyway.

    path: anomalies.jsonl, which gets a line for each bad step
    sequences_of: iteration → the numbers of its sequences and where they begin in the token stream
    """

    def __init__(self, path, max_bad_steps, sequences_of, device):
        self.path = path
        self.max_bad_steps = max_bad_steps
        self.sequences_of = sequences_of
        self.in_a_row = torch.zeros((), device=device)
        self.unread = []  # (iteration, bad, loss, gradient norm), on the device but for the first
        self.group = host_group()

    def judge(self, iter_num, loss, grad_norm):
        """→ 1.0 on the device where the optimizer must not move, else 0.0; alike on all ranks.

        Once `max_bad_steps` have come in a row it stays 1.0: the weights wait for the host to see.
        """
        bad = 1 - (loss.isfinite() & grad_norm.isfinite()).float()
        if dist.is_initialized():
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        bad = torch.maximum(bad, (self.in_a_row >= self.max_bad_steps).float())
        self.in_a_row = (self.in_a_row + 1) * bad
        self.unread.append((iter_num, bad, loss, grad_norm))
        return bad

    def report(self, say):
        """Write down the bad steps since the last report. This waits for the device.

        → True where it is time to stop; the weights are then as before the first of them.
        """
        steps, self.unread = self.unread, []
        if not steps or not torch.stack([bad for _, bad, _, _ in steps]).any():
            return False
        for iter_num, bad, loss, grad_norm in steps:
            if not bad:
                continue
            losses = all_gather(loss.item(), self.group)
            first, last, starts = self.sequences_of(iter_num)
            say(f'warning: iteration {iter_num + 1} left the weights alone: loss '
                f'{number(losses)}, gradient norm {grad_norm.item()}; see {self.path}')
            if not self.group or dist.get_rank() == 0:
                line = {'iter': iter_num + 1, 'loss': [as_json(x) for x in losses],
                        'grad_norm': as_json(grad_norm.item()),
                        'sequences': [first, last], 'sequence_starts': starts}
                append_line(self.path, line)
        return self.in_a_row.item() >= self.max_bad_steps

    def give_up(self):
        """The message to stop with."""
        return UserError(
            f'the last {self.max_bad_steps} steps had a loss or gradient that is not finite, and '
            'the weights are as before them: lower --learning_rate, lengthen --warmup_iters or try '
            f'--dtype=float32, and look at the text that {self.path} names; then go on with '
            '--init_from=resume, or from before with --checkpoint=best')


def as_json(x):
    """JSON knows no NaN or infinity: they become text."""
    return x if math.isfinite(x) else str(x)


def number(losses):
    """The losses of all processes, for people."""
    return ', '.join(f'{x:.4f}' for x in losses)
