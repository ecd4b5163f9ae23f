"""Estimate the memory, disk space and time that a run needs, before it starts.

    python plan.py config/gpt2_124m.py                               on this machine
    python plan.py config/gpt2_124m.py --gpu_memory_gb=40            on a GPU with 40 GiB
    python plan.py config/gpt2_124m.py --gpu_memory_gb=24 --batch_size=auto --processes=8
    python plan.py config/gpt2_124m.py --gpu=H100 --processes=8      with an estimate of the hours
"""

import math
import sys
import textwrap
from dataclasses import dataclass, field, replace

import torch

from configurator import load_config
from model import GPT
from plaingpt.core.blocks import CHECKPOINT_MODES
from plaingpt.core.checkpoint import KEEP_NEWEST
from plaingpt.core.dataset import (
    describe_batches,
    describe_epochs,
    has_token_files,
    open_dataset_spec,
)
from plaingpt.core.progress import make_clock
from plaingpt.core.settings import TrainConfig
from plaingpt.core.start import StartingPoint, resolve_minutes
from plaingpt.experiments.memory import Planner
from plaingpt.experiments.runs import option_names
from plaingpt.experiments.speed import estimate_step, planned_gpt_config
from plaingpt.system import devices
from plaingpt.system.distributed import World
from plaingpt.system.errors import run_script
from plaingpt.system.formatting import GIB, count_of, duration, gib, short
from train import build, open_batches


@dataclass
class PlanConfig(TrainConfig):
    """The settings of a plan. Planner.predict() compares settings by their repr, to reuse a trace:
    fields with repr=False do not affect it."""
    # plan
    gpu_memory_gb: float = 0.0  # memory of each GPU in GiB; 0: plan for this machine
    gpu: str = ''  # GPU model (H100 only): sets gpu_memory_gb, estimates hours from measured MFU
    processes: int = field(default=1, repr=False)  # number of processes, one per GPU

    above_0 = (*TrainConfig.above_0, 'processes')
    at_least_0 = (*TrainConfig.at_least_0, 'gpu_memory_gb')

    def __post_init__(self):
        if self.gpu in devices.MEASURED and not self.gpu_memory_gb:
            _, self.gpu_memory_gb = devices.MEASURED[self.gpu]

    def conflicts(self):
        problems = super().conflicts()
        if self.gpu and self.gpu not in devices.MEASURED:
            measured = ', '.join(devices.MEASURED)
            problems.append(f'gpu={self.gpu}: only {measured} has been measured; to plan memory '
                            'for another GPU, set --gpu_memory_gb')
        return problems

    def world_size(self):
        return self.processes


def find_machine(config, gpt_config):
    """→ (device, dtype, bytes of memory per process), as train.py would choose them."""
    if config.gpu_memory_gb:
        dtype = 'bfloat16' if config.dtype == 'auto' else config.dtype
        return torch.device('cuda'), dtype, int(config.gpu_memory_gb * GIB)
    device, _ = devices.choose_device(config.device)
    dtype, _ = devices.choose_dtype(config.dtype, device, gpt_config.n_embd, training=True)
    return device, dtype, devices.device_memory(device, config.processes)


def options_that_fit(planner, config, available):
    """→ options with the largest batch_size that fits at the same tokens per step, or ''. If not
    even 1 fits, adds activation checkpointing, and then up to 1,024 times as many GPUs."""
    candidates = [{}, {'activation_checkpointing': 'selective'},
                  {'activation_checkpointing': 'full'}]
    if planner.device_type == 'cuda':
        doublings = range(11) if config.processes > 1 else range(1, 11)  # FSDP needs two
        for n in doublings:
            candidates.append({'processes': config.processes * 2**n, 'parallel': 'fsdp',
                               'activation_checkpointing': 'full'})
    for options in candidates:
        processes = options.get('processes', config.processes)
        sequences = math.ceil(config.step_sequences() / processes) * processes
        step_tokens = sequences * config.block_size
        candidate = replace(config, **options, total_batch_size=step_tokens)
        n = planner.largest_batch(candidate, available)
        if n:
            options |= {'batch_size': n, 'gradient_accumulation_steps': sequences // n}
            if config.total_batch_size:
                options['total_batch_size'] = step_tokens
            return ' '.join(f'--{name}={value}' for name, value in options.items())
    return ''


def print_memory(planner, config, available):
    """Print the memory of a step → its Plan."""
    plan = planner.predict(config)
    parallel = f', {config.parallel}' if config.processes > 1 else ''
    print(f'memory per process: {config.accumulation() // config.processes} × '
          f'{config.batch_size} sequences per step, {planner.dtype}{parallel}; peak in '
          f'"{plan.peak_phase}"')
    for category, size in plan.phases[plan.peak_phase].items():
        print(f'  {gib(size):>12}  {category}')
    if plan.overhead:
        print(f'  {gib(plan.overhead):>12}  CUDA context and fragmentation (allowance)')
    verdict = 'fits' if plan.total <= available else 'does NOT fit'
    print(f'  {gib(plan.total):>12}  total: {verdict} in {gib(available)}')
    if planner.device_type == 'cpu':
        print('note: on a CPU this counts tensors only; Python and torch add about 0.3 GiB, and '
              'freed blocks that malloc keeps often add half as much again (bench.py measures it)')
    if plan.total > available:
        options = options_that_fit(planner, config, available)
        if options:
            print('fits with:', options)
        else:
            print('does not fit even with batch_size=1 and activation_checkpointing=full; choose a '
                  'smaller model or block_size')
    print('by phase: ' + ', '.join(f'{phase} {gib(size)}'
                                   for phase, size in plan.summary().items()))
    totals = []
    for mode in CHECKPOINT_MODES:
        candidate = replace(config, activation_checkpointing=mode)
        totals.append(f'{mode} {gib(planner.predict(candidate).total)}')
    print(f'by activation_checkpointing: {", ".join(totals)}')
    return plan


def print_run(gpt_config, config, start, size, step_s):
    """Print the tokens that the run reads, and the time until it ends. size: (training tokens or
    None, their source); step_s: seconds per step as measured here, or None"""
    with torch.device('meta'):
        gpt = GPT(gpt_config)
    parameters, flops_per_token = gpt.num_parameters(), gpt.flops_per_token()
    basis = 'at the step time measured here'
    mfu_by_optimizer, _ = devices.MEASURED.get(config.gpu, ({}, 0))
    mfu = mfu_by_optimizer.get(config.optimizer)
    if mfu:
        flops_per_s = mfu * devices.peak_flops(config.gpu, 'bfloat16') * config.processes
        step_s = flops_per_token * config.step_tokens() / flops_per_s
        basis = f'on {count_of(config.processes, config.gpu)} without evaluations, at an MFU of ' \
                f'{mfu:.0%} (measured with GPT-2 124M)'
    done = start.checkpoint.iter_num if start.resumed else 0
    if config.minutes:
        clock = make_clock(config, start.started_at)
        if start.resumed:
            clock.load_state_dict(start.checkpoint.state)
        seconds = clock.total_s - clock.used_s
        time, last_iter = duration(seconds), None
        if step_s:
            last_iter = done + round(seconds / step_s)
            time += f', about {count_of(last_iter - done, "iteration")} {basis}'
    else:
        last_iter = max(done, config.max_iters)
        flops = (last_iter - done) * config.step_tokens() * flops_per_token
        time = f'{count_of(last_iter - done, "iteration")}, {flops:.3g} FLOPs'
        if step_s:
            time += f', about {duration((last_iter - done) * step_s)} {basis}'
    print_tokens(config, start, size, parameters, last_iter)
    print(f'time{" left" if start.resumed else ""}: {time}')


def print_tokens(config, start, size, parameters, last_iter):
    """Print what the run reads until `last_iter` (None: unknown), as train.py does if the data is
    prepared."""
    tokens, data = size
    total = last_iter * config.step_tokens() if last_iter else None
    if has_token_files(config.dataset):
        dataset = open_dataset_spec(config.dataset, config.vocab_size)
        train_data, val_data = open_batches(config, dataset, World(size=config.processes),
                                            torch.device('cpu'))
        if start.resumed:
            state = start.checkpoint.state
            train_data.resume_at(state['iter_num'], state['sequences'])
        data = describe_batches(config, dataset, train_data, val_data)
        if last_iter:
            total = train_data.tokens_before(last_iter)
        if last_iter and config.minutes:
            data += f'\nabout {", ".join(describe_epochs(dataset, train_data, last_iter))}'
    elif tokens:
        data += f': {short(tokens)} tokens'
        if total:
            data += f', {total / tokens:.3g} epochs'
    line = f'tokens: {config.step_tokens():,} per step'
    if total:
        line += f', {short(total)} in total, {total / parameters:.3g} tokens per parameter'
    print(f'{line} ({parameters:,} parameters)\n{textwrap.indent(data, "  ")}')


def main(argv):
    start = StartingPoint(verifies=False)
    config = load_config(PlanConfig, argv, __doc__, read_saved=start.read)
    config = resolve_minutes(config, start, option_names(argv))
    gpt_config, tokens, source = planned_gpt_config(config, start)
    if not tokens:
        source += f': assuming a vocabulary of {gpt_config.vocab_size:,}'
    device, dtype, available = find_machine(config, gpt_config)
    print('simulating training steps on fake tensors …', file=sys.stderr, flush=True)
    planner = Planner(build, gpt_config, dtype, device.type)
    config = planner.resolve(config, available)
    plan = print_memory(planner, config, available)
    step_s = None
    if not config.gpu_memory_gb and config.processes == 1 and plan.total <= available:
        step_s = estimate_step(build, gpt_config, config, device, dtype)
    print_run(gpt_config, config, start, (tokens, source), step_s)
    between_steps = plan.phases['between steps']
    checkpoint = between_steps['weights'] + between_steps['optimizer']
    if config.parallel == 'fsdp':  # each process has a shard
        checkpoint *= config.processes
    most = checkpoint * (KEEP_NEWEST + 2)  # the best, and one that is being written
    print(f'disk: {gib(checkpoint)} per checkpoint, up to {gib(most)} in total')


if __name__ == '__main__':
    run_script(main)
