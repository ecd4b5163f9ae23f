"""Measure what training takes, beside what the plan says.

    python bench.py --memory config/shakespeare_char.py
    python bench.py --memory config/gpt2_124m.py --batch_size=8 --dtype=bfloat16
    python bench.py --checkpoints config/gpt2_124m.py --batch_size=1 --out_dir=/tmp/bench

--memory: on CUDA a real step runs. Elsewhere torch's memory tracker follows a step on tensors
without data, which takes no memory and seconds at any size.
--checkpoints: two real steps, then a save that training waits for and one in the background, in a
folder inside out_dir that is removed again.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import Saver, checkpoint_paths, open_checkpoint, rng_state
from configurator import load_config
from dataset import size_of_dataset
from errors import UserError, run_script
from memory import gib, one_step, predict, run_of
from runtime import choose_device, choose_dtype, use_expandable_segments, use_fast_matmul
from settings import TrainConfig


@dataclass
class BenchConfig(TrainConfig):
    # benchmark
    memory: bool = False  # what a step holds after forward, backward and optimizer, and at most
    checkpoints: bool = False  # how long training stands still for a save
    vocab_size: int = 0  # where the dataset is not prepared; 0 for the dataset's

    def problems(self):
        found = super().problems()
        if self.batch_size == 'auto':
            found.append('batch_size=auto: a benchmark needs a number')
        return found


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


def measure_checkpoints(model, run, config, device):
    """Print how long a save stops training, and which share that is of the time between saves."""
    stages = [(time.perf_counter(), gpt, optimizer)
              for _, gpt, optimizer in one_step(model, run, device)]
    ended, gpt, optimizer = stages[-1]
    step_s = ended - stages[run.micro_steps + 1][0]  # the second: the first makes the states
    print(f'{gpt.num_parameters():,} parameters, {device}: {step_s:.2f} s a step of '
          f'{run.batch_size * run.micro_steps} windows, a save every '
          f'{config.checkpoint_interval} steps')
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
    for background in (False, True):
        with tempfile.TemporaryDirectory(dir=config.out_dir) as folder:
            saver = Saver(folder, chunk_mb=config.checkpoint_chunk_mb, background=background)
            began = time.perf_counter()
            saver.save(gpt, optimizer, {'iter_num': 1}, rng_state(device))
            stall_s = time.perf_counter() - began
            saver.wait()
            written_s = time.perf_counter() - began
            chunks = open_checkpoint(checkpoint_paths(folder)[0]).state['chunks']
        size = sum(chunk['bytes'] for chunk in chunks)
        share = stall_s / (config.checkpoint_interval * step_s + stall_s)
        print(f'checkpoint_async={background!s:<6} stands still {stall_s:.2f} s ({share:.3%} of '
              f'the time), written after {written_s:.2f} s: {size / 1e9:.2f} GB in {len(chunks)} '
              'files')


def main(argv):
    config = load_config(BenchConfig, argv, __doc__)
    if not (config.memory or config.checkpoints):
        raise UserError('say what to measure: --memory or --checkpoints')
    device, _ = choose_device(config.device)
    dtype, _ = choose_dtype(config.dtype, device, config.n_embd)
    use_fast_matmul()
    use_expandable_segments(device)
    vocab_size, _, _ = size_of_dataset(config.dataset, config.vocab_size)
    model = config.gpt_config(vocab_size)
    run = run_of(config, dtype, device.type)
    if config.memory:
        measure_memory(model, run, device)
    if config.checkpoints:
        measure_checkpoints(model, run, config, device)


if __name__ == '__main__':
    run_script(main)
