"""The memory of a training step, measured beside what was planned."""

import sys
from dataclasses import replace

import torch

from plaingpt.experiments.tables import markdown
from plaingpt.kernels.chunked_loss import chunk_size
from plaingpt.monitoring.memory_recorder import kernels_of
from plaingpt.system.formatting import gib
from plaingpt.training.memory_planner import one_step, predict, step_settings


def tracked_step(shape, step):
    """{stage: bytes that tensors hold} of a step on tensors without data, 'peak' among them, as
    torch's own memory tracker counts them at full size."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    sizes, tracker = {}, MemTracker()

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


def cuda_step(shape, step, device):
    """→ ({stage: bytes that tensors hold}, {stage: bytes that the allocator reserved})."""
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = {}, {}

    def note(stage):
        torch.cuda.synchronize(device)
        allocated[stage] = torch.cuda.memory_allocated(device)
        reserved[stage] = torch.cuda.memory_reserved(device)

    for stage, gpt, _ in one_step(shape, step, device):
        note(stage)
        if stage == 'optimizer states':
            gpt.register_forward_hook(lambda *_: note('forward'))
    allocated['peak'] = torch.cuda.max_memory_allocated(device)
    reserved['peak'] = torch.cuda.max_memory_reserved(device)
    return allocated, reserved


def measure_memory(work):
    """Measure a step beside its plan → (a row for each stage, their table)."""
    device = work.device
    step = step_settings(replace(work.config, compile=False), work.dtype, device.type)
    if device.type == 'cuda':
        allocated, reserved = cuda_step(work.shape, step, device)
        tool = "CUDA's allocator"
    else:
        print(f"torch's memory tracker follows a step through {work.shape.n_layer} layers: about a "
              'second each, more where there are many …', file=sys.stderr, flush=True)
        allocated, reserved, tool = tracked_step(work.shape, step), {}, "torch's memory tracker"
    plan = predict(work.shape, step)
    chunk = chunk_size(step.loss_chunk_tokens, step.batch_size * work.shape.block_size,
                       work.shape.vocab_size, device.type)
    rows = [{'stage': stage, 'allocated': allocated[stage], 'reserved': reserved.get(stage),
             'planned': plan.peak if stage == 'peak' else plan.totals[f'after {stage}']}
            for stage in ('forward', 'backward', 'optimizer', 'peak')]
    what = f'{tool}: {step.dtype}, batch {step.batch_size} × {step.micro_steps}, ' \
           f'{step.config.activation_checkpointing} checkpointing, loss in chunks of ' \
           f'{chunk}; the plan is ' \
           f'{plan.peak / allocated["peak"] - 1:+.1%} off the measured peak'
    table = markdown(['after', 'allocated', 'reserved', 'planned'], [
        [row['stage'], *(gib(row[key]) if row[key] else 'n/a'
                         for key in ('allocated', 'reserved', 'planned'))] for row in rows])
    return rows, f'{what}\n\n{table}'
