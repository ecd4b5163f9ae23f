"""Tell what a run will take, in memory, disk space and time, before it starts.

    python plan.py config/gpt2_124m.py                               on this machine
    python plan.py config/gpt2_124m.py --gpu_memory_gb=40            on a GPU
    python plan.py config/gpt2_124m.py --gpu_memory_gb=24 --batch_size=auto --processes=8
    python plan.py config/gpt2_124m.py --gpu=H100 --processes=8      hours, too
"""

import sys
from dataclasses import dataclass, field, replace

import torch

from configurator import load_config
from model import GPT
from plaingpt.experiments.speed import estimate_step, planned_shape
from plaingpt.parallel.blocks import CHECKPOINT_MODES
from plaingpt.system import devices
from plaingpt.system.devices import MEASURED, peak_flops
from plaingpt.system.errors import run_script
from plaingpt.system.formatting import GIB, count_of, duration, gib, short
from plaingpt.training import memory
from plaingpt.training.checkpoint import KEEP_NEWEST
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import StartingPoint

COUNTED_DEPTHS = (100, 102)  # parameters of a deeper model follow from these


@dataclass
class PlanConfig(TrainConfig):
    """The settings of a plan. Those that are without repr do not change a trace of a step."""
    # plan
    gpu_memory_gb: float = 0.0  # memory of each GPU; 0: this machine
    gpu: str = ''  # H100: its memory, and the hours by the speed that was measured
    processes: int = field(default=1, repr=False)  # that share a step, one on each GPU

    above_0 = (*TrainConfig.above_0, 'processes')
    at_least_0 = (*TrainConfig.at_least_0, 'gpu_memory_gb')

    def __post_init__(self):
        super().__post_init__()
        if self.gpu in MEASURED and not self.gpu_memory_gb:
            _, self.gpu_memory_gb = MEASURED[self.gpu]

    def conflicts(self):
        problems = super().conflicts()
        if self.gpu and self.gpu not in MEASURED:
            problems.append(f'gpu={self.gpu}: only the {", ".join(MEASURED)} was measured; for the '
                            'memory of another GPU give --gpu_memory_gb')
        return problems

    def world_size(self):
        return self.processes


def find_machine(config, shape):
    """→ (device, dtype, bytes of memory for each process), as train.py chooses them there."""
    if config.gpu_memory_gb:
        dtype = 'bfloat16' if config.dtype == 'auto' else config.dtype
        return torch.device('cuda'), dtype, int(config.gpu_memory_gb * GIB)
    device, _ = devices.choose_device(config.device)
    dtype, _ = choose_training_dtype(config, shape, device)
    return device, dtype, devices.device_memory(device, config.processes)


def resolve(config, shape, dtype, device_type, available):
    """The config with a value for parallel=auto and batch_size=auto, as train.py chooses them."""
    where = dtype, device_type, available
    config = replace(config, parallel=memory.choose_parallel(config, shape, *where))
    if config.batch_size != 'auto':
        return config
    return replace(config, batch_size=memory.largest_batch(shape, config, *where) or 1)


def options_that_fit(shape, config, dtype, device_type, available):
    """→ the options of the largest batch_size that fits and keeps the tokens of a step, or ''. If
    not even 1 fits, activation checkpointing is added, and then up to 1,024 times as many GPUs."""
    changes = [{}, {'activation_checkpointing': 'selective'}, {'activation_checkpointing': 'full'}]
    if device_type == 'cuda':
        changes += [{'processes': config.processes * 2**n, 'parallel': 'fsdp', **changes[-1]}
                    for n in range(11)]
    for change in changes:
        processes = change.get('processes', config.processes)
        sequences = -(-config.step_sequences() // processes) * processes
        tokens = {'total_batch_size': sequences * config.block_size}
        n = memory.largest_batch(shape, replace(config, **change, **tokens), dtype, device_type,
                                 available)
        if n:
            change |= {'batch_size': n, 'gradient_accumulation_steps': sequences // n}
            change |= tokens if config.total_batch_size else {}
            return ' '.join(f'--{name}={value}' for name, value in change.items())
    return ''


def print_memory(shape, config, dtype, device_type, available):
    """Print the plan of a step → it."""
    plan = memory.predict(shape, config, dtype, device_type)
    shared = f', {config.parallel}' if config.processes > 1 else ''
    print(f'memory of each process: {config.accumulation() // config.processes} × '
          f'{config.batch_size} sequences a step, {dtype}{shared}; most in "{plan.peak_phase}"')
    for owner, size in plan.phases[plan.peak_phase].items():
        print(f'  {gib(size):>12}  {owner}')
    if plan.overhead:
        print(f'  {gib(plan.overhead):>12}  CUDA context and fragmentation, an allowance')
    print(f'  {gib(plan.total):>12}  in all: '
          f'{"fits" if plan.total <= available else "does NOT fit"} in {gib(available)}')
    if device_type == 'cpu':
        print('on a CPU a plan cannot know all: it counts tensors; Python and torch take some 0.3 '
              'GiB more, freed blocks that malloc keeps often half as much again (bench.py tells)')
    if plan.total > available:
        print('what fits:', options_that_fit(shape, config, dtype, device_type, available)
              or 'nothing, not even batch_size=1 with activation_checkpointing=full: choose a '
                 'smaller model or block_size')
    print('by phase: ' + ', '.join(f'{phase} {gib(size)}' for phase, size in plan.totals.items()))
    kinds = {kind: memory.predict(shape, replace(config, activation_checkpointing=kind), dtype,
                                  device_type).total for kind in CHECKPOINT_MODES}
    print('by activation_checkpointing: '
          + ', '.join(f'{kind} {gib(size)}' for kind, size in kinds.items()))
    return plan


def print_run(shape, config, tokens, source, seconds):
    """Print how many tokens the run reads, and its time. seconds: of a step, or None"""
    parameters = flops = 0
    for n_layer, share in memory.interpolation_weights(shape.n_layer, *COUNTED_DEPTHS).items():
        with torch.device('meta'):
            gpt = GPT(replace(shape, n_layer=n_layer))
        parameters += share * gpt.num_parameters()
        flops += share * gpt.flops_per_token()
    parameters, total = round(parameters), config.max_iters * config.step_tokens()
    print(f'tokens: {config.step_tokens():,} a step, {short(total)} in all, '
          f'{total / parameters:.3g} for each of {parameters:,} parameters')
    print(f'  {source}: ' + (f'{short(tokens)} tokens, {total / tokens:.3g} epochs' if tokens else
                             f'a vocabulary of {shape.vocab_size:,} is assumed'))
    took = f', {duration(config.max_iters * seconds)} as a step takes here' if seconds else ''
    print(f'time: {count_of(config.max_iters, "iteration")}, '
          f'{float(flops * total):.3g} FLOPs{took}')
    shares, _ = MEASURED.get(config.gpu, ({}, 0))
    if share := shares.get(config.optimizer):
        seconds = flops * total / (share * peak_flops(config.gpu, 'bfloat16') * config.processes)
        print(f'  {duration(seconds)} on {count_of(config.processes, config.gpu)}, without '
              f'evaluations: computed from the {share:.0%} of its peak that one was measured to '
              'reach with GPT-2 124M')


def main(argv):
    start = StartingPoint(verifies=False)
    config = load_config(PlanConfig, argv, __doc__, read_saved=start.read)
    shape, tokens, source = planned_shape(config, start)
    device, dtype, available = find_machine(config, shape)
    print('simulating a step on tensors without data …', file=sys.stderr, flush=True)
    config = resolve(config, shape, dtype, device.type, available)
    plan = print_memory(shape, config, dtype, device.type, available)
    measures = not config.gpu_memory_gb and config.processes == 1 and plan.total <= available
    print_run(shape, config, tokens, source,
              estimate_step(shape, config, device, dtype) if measures else None)
    between = plan.phases['between steps']
    checkpoint = between['weights'] + between['optimizer']
    if config.parallel == 'fsdp':  # each process has a part
        checkpoint *= config.processes
    most = checkpoint * (KEEP_NEWEST + 2)
    print(f'disk: {gib(checkpoint)} a checkpoint, up to {gib(most)} in all')


if __name__ == '__main__':
    run_script(main)
