"""Estimate the memory, disk space and time that a run needs, before it starts.

    python plan.py config/gpt2_124m.py                               on this machine
    python plan.py config/gpt2_124m.py --gpu_memory_gb=40            on a GPU with 40 GiB
    python plan.py config/gpt2_124m.py --gpu_memory_gb=24 --batch_size=auto --processes=8
    python plan.py config/gpt2_124m.py --gpu=H100 --processes=8      with an estimate of the hours
"""

import math
import sys
from dataclasses import dataclass, field, replace

import torch

from configurator import load_config
from model import GPT
from plaingpt.experiments.speed import estimate_step, planned_gpt_config
from plaingpt.parallel.blocks import CHECKPOINT_MODES
from plaingpt.system import devices
from plaingpt.system.errors import run_script
from plaingpt.system.formatting import GIB, count_of, duration, gib, short
from plaingpt.training import memory
from plaingpt.training.checkpoint import KEEP_NEWEST
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import StartingPoint

COUNTED_DEPTHS = (100, 102)  # the parameters of deeper models are extrapolated from these


@dataclass
class PlanConfig(TrainConfig):
    """The settings of a plan. Fields with repr=False do not affect the simulated step."""
    # plan
    gpu_memory_gb: float = 0.0  # memory of each GPU in GiB; 0: plan for this machine
    gpu: str = ''  # GPU model (H100 only): sets gpu_memory_gb, estimates hours from measured MFU
    processes: int = field(default=1, repr=False)  # number of processes, one per GPU

    above_0 = (*TrainConfig.above_0, 'processes')
    at_least_0 = (*TrainConfig.at_least_0, 'gpu_memory_gb')

    def __post_init__(self):
        super().__post_init__()
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
    dtype, _ = choose_training_dtype(config, gpt_config, device)
    return device, dtype, devices.device_memory(device, config.processes)


def resolve(config, gpt_config, dtype, device_type, available):
    """→ the config with parallel=auto and batch_size=auto resolved as in train.py"""
    parallel = memory.choose_parallel(config, gpt_config, dtype, device_type, available)
    config = replace(config, parallel=parallel)
    if config.batch_size != 'auto':
        return config
    batch_size = memory.largest_batch(gpt_config, config, dtype, device_type, available)
    return replace(config, batch_size=batch_size or 1)


def options_that_fit(gpt_config, config, dtype, device_type, available):
    """→ options with the largest batch_size that fits at the same tokens per step, or ''. If not
    even 1 fits, adds activation checkpointing, and then up to 1,024 times as many GPUs."""
    candidates = [{}, {'activation_checkpointing': 'selective'},
                  {'activation_checkpointing': 'full'}]
    if device_type == 'cuda':
        for n in range(11):
            candidates.append({'processes': config.processes * 2**n, 'parallel': 'fsdp',
                               'activation_checkpointing': 'full'})
    for options in candidates:
        processes = options.get('processes', config.processes)
        sequences = math.ceil(config.step_sequences() / processes) * processes
        step_tokens = sequences * config.block_size
        candidate = replace(config, **options, total_batch_size=step_tokens)
        n = memory.largest_batch(gpt_config, candidate, dtype, device_type, available)
        if n:
            options |= {'batch_size': n, 'gradient_accumulation_steps': sequences // n}
            if config.total_batch_size:
                options['total_batch_size'] = step_tokens
            return ' '.join(f'--{name}={value}' for name, value in options.items())
    return ''


def print_memory(gpt_config, config, dtype, device_type, available):
    """Print the memory of a step → the plan (memory.predict)."""
    plan = memory.predict(gpt_config, config, dtype, device_type)
    parallel = f', {config.parallel}' if config.processes > 1 else ''
    print(f'memory per process: {config.accumulation() // config.processes} × '
          f'{count_of(config.batch_size, "sequence")} per step, {dtype}{parallel}; peak in '
          f'"{plan.peak_phase}"')
    for category, size in plan.phases[plan.peak_phase].items():
        print(f'  {gib(size):>12}  {category}')
    if plan.overhead:
        print(f'  {gib(plan.overhead):>12}  CUDA context and fragmentation (allowance)')
    verdict = 'fits' if plan.total <= available else 'does NOT fit'
    print(f'  {gib(plan.total):>12}  total: {verdict} in {gib(available)}')
    if device_type == 'cpu':
        print('note: on a CPU this counts tensors only; Python and torch add about 0.3 GiB, and '
              'freed blocks that malloc keeps often add half as much again (bench.py measures it)')
    if plan.total > available:
        options = options_that_fit(gpt_config, config, dtype, device_type, available)
        if options:
            print('fits with:', options)
        else:
            print('does not fit even with batch_size=1 and activation_checkpointing=full; choose a '
                  'smaller model or block_size')
    print('by phase: ' + ', '.join(f'{phase} {gib(size)}' for phase, size in plan.totals.items()))
    totals = []
    for mode in CHECKPOINT_MODES:
        candidate = replace(config, activation_checkpointing=mode)
        total = memory.predict(gpt_config, candidate, dtype, device_type).total
        totals.append(f'{mode} {gib(total)}')
    print(f'by activation_checkpointing: {", ".join(totals)}')
    return plan


def print_run(gpt_config, config, tokens, source, step_s):
    """Print the tokens that the run reads, and its time. step_s: seconds per step, or None"""
    parameters = flops_per_token = 0
    depths = memory.interpolation_weights(gpt_config.n_layer, *COUNTED_DEPTHS)
    for n_layer, weight in depths.items():
        with torch.device('meta'):
            gpt = GPT(replace(gpt_config, n_layer=n_layer))
        parameters += weight * gpt.num_parameters()
        flops_per_token += weight * gpt.flops_per_token()
    parameters = round(parameters)
    total_tokens = config.max_iters * config.step_tokens()
    print(f'tokens: {config.step_tokens():,} per step, {short(total_tokens)} in total, '
          f'{count_of(f"{total_tokens / parameters:.3g}", "token")} per parameter '
          f'({parameters:,} parameters)')
    if tokens:
        epochs = count_of(f'{total_tokens / tokens:.3g}', 'epoch')
        print(f'  {source}: {short(tokens)} tokens, {epochs}')
    else:
        print(f'  {source}: assuming a vocabulary of {gpt_config.vocab_size:,}')
    flops = flops_per_token * total_tokens
    estimate = ''
    if step_s:
        estimate = f', about {duration(config.max_iters * step_s)} at the step time measured here'
    print(f'time: {count_of(config.max_iters, "iteration")}, {float(flops):.3g} FLOPs{estimate}')
    mfu_by_optimizer, _ = devices.MEASURED.get(config.gpu, ({}, 0))
    mfu = mfu_by_optimizer.get(config.optimizer)
    if mfu:
        seconds = flops / (mfu * devices.peak_flops(config.gpu, 'bfloat16') * config.processes)
        print(f'  {duration(seconds)} on {count_of(config.processes, config.gpu)} without '
              f'evaluations, at an MFU of {mfu:.0%} (measured with GPT-2 124M)')


def main(argv):
    start = StartingPoint(verifies=False)
    config = load_config(PlanConfig, argv, __doc__, read_saved=start.read)
    gpt_config, tokens, source = planned_gpt_config(config, start)
    device, dtype, available = find_machine(config, gpt_config)
    print('simulating one step on meta tensors …', file=sys.stderr, flush=True)
    config = resolve(config, gpt_config, dtype, device.type, available)
    plan = print_memory(gpt_config, config, dtype, device.type, available)
    step_s = None
    if not config.gpu_memory_gb and config.processes == 1 and plan.total <= available:
        step_s = estimate_step(gpt_config, config, device, dtype)
    print_run(gpt_config, config, tokens, source, step_s)
    between_steps = plan.phases['between steps']
    checkpoint = between_steps['weights'] + between_steps['optimizer']
    if config.parallel == 'fsdp':  # each process has a shard
        checkpoint *= config.processes
    most = checkpoint * (KEEP_NEWEST + 2)  # the best, and one that is being written
    print(f'disk: {gib(checkpoint)} per checkpoint, up to {gib(most)} in total')


if __name__ == '__main__':
    run_script(main)
