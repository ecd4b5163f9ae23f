"""What torch's own memory tracker says of a step, beside which plans are tested."""

from dataclasses import replace

import torch

from model import chunk_size
from plaingpt.monitoring.memory_recorder import kernels_of
from plaingpt.training.memory_planner import one_step


def tracked_step(shape, step):
    """{stage: bytes that tensors hold} of a step on tensors without data, 'peak' among them, as
    torch's own memory tracker counts them at full size."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    sizes, tracker = {}, MemTracker()
    step = replace(step, loss_chunk_tokens=chunk_size(
        step.loss_chunk_tokens, step.batch_size * shape.block_size, shape.vocab_size,
        step.device))  # as on that device, whatever is here

    def held(which):
        return sum(kinds['Total'] for kinds in tracker.get_tracker_snapshot(which).values())

    with FakeTensorMode(), kernels_of(step.device, step.is_eager):
        steps = one_step(shape, step, torch.device('cpu'))
        next(steps)
        _, gpt, optimizer = next(steps)
        gpt.register_forward_hook(lambda *_: sizes.update(forward=held('current')))
        tracker.track_external(gpt, optimizer)
        with tracker:
            for stage, _, _ in steps:
                sizes[stage] = held('current')
            sizes['peak'] = held('peak')
    return sizes
