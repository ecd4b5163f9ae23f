"""The memory of a training step, measured beside what was planned."""

import torch

from plaingpt.system.formatting import gib
from plaingpt.training.memory_planner import one_step, predict


def tracked_step(model, run):
    """{stage: bytes that tensors hold} of a step on tensors without data, 'peak' among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    def held(which):
        return sum(kinds['Total'] for kinds in tracker.get_tracker_snapshot(which).values())

    sizes = {}
    with FakeTensorMode():
        steps = one_step(model, run, torch.device('cpu'))
        tracker = MemTracker()
        _, gpt, optimizer = next(steps)
        tracker.track_external(gpt, optimizer)
        with tracker:
            for stage, _, _ in steps:
                sizes[stage] = held('current')
                if stage != 'forward':
                    tracker.reset_mod_stats()  # or it refuses a second forward pass
            sizes['peak'] = held('peak')
    del sizes['between']
    return sizes


def cuda_step(model, run, device):
    """→ ({stage: bytes that tensors hold}, {stage: bytes that the allocator reserved})."""
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = {}, {}
    for stage, _, _ in one_step(model, run, device):
        torch.cuda.synchronize(device)
        allocated[stage] = torch.cuda.memory_allocated(device)
        reserved[stage] = torch.cuda.memory_reserved(device)
    allocated['peak'] = torch.cuda.max_memory_allocated(device)
    reserved['peak'] = torch.cuda.max_memory_reserved(device)
    return allocated, reserved


def measure_memory(model, run, device):
    """Print allocated and reserved bytes of a step beside the plan's."""
    if device.type == 'cuda':
        allocated, reserved = cuda_step(model, run, device)
        how = torch.cuda.get_device_name(device)
    else:
        allocated, reserved, how = tracked_step(model, run), {}, "torch's memory tracker"
    plan = predict(model, run)
    print(f'{how}, {run.dtype}, batch {run.batch_size} × {run.micro_steps}, '
          f'{run.activation_checkpointing} checkpointing, loss in chunks of '
          f'{run.loss_chunk_tokens}')
    print(f'{"after":<12}{"allocated":>14}{"reserved":>14}{"planned":>14}')
    for stage in ('forward', 'backward', 'optimizer', 'peak'):
        planned = plan.peak if stage == 'peak' else plan.after.get(stage)
        print(f'{stage:<12}{gib(allocated[stage]):>14}'
              f'{gib(reserved[stage]) if reserved else "n/a":>14}{gib(planned):>14}')
    print(f'the plan is {plan.peak / allocated["peak"] - 1:+.1%} off the measured peak')
