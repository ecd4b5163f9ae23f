"""Tell what a run will take, in memory, tokens and time, before anything runs.

    python plan.py config/gpt2_124m.py                          for this machine
    python plan.py config/gpt2_124m.py --gpu_memory_gb=40
    python plan.py config/gpt2_124m.py --gpu=H100 --processes=8 --gpu_hour_price=2.5
    python plan.py config/gpt2_124m.py --gpu_memory_gb=24 --batch_size=auto --json
"""

import json as json_format
import sys
from dataclasses import asdict, dataclass, replace
from typing import Annotated, NamedTuple

import torch

from configurator import load_config
from model import GPT, RECOMPUTED
from plaingpt.data.corpora import find_dataset_size
from plaingpt.data.dataset import has_token_files, open_named
from plaingpt.experiments.speed import estimate_speed
from plaingpt.system import devices
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import GIB, count_of, duration, gib, setting, short
from plaingpt.system.gpus import GPUS, find_gpu, peak_flops
from plaingpt.training import memory
from plaingpt.training.checkpoint import KEPT
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import Start, start_shape
from plaingpt.training.stopwatch import SHARE


@dataclass
class PlanConfig(TrainConfig):
    # plan: the machine; this one if no GPU is named
    gpu: str = ''  # such as A100 or 4090: its memory and its peak
    gpu_memory_gb: Annotated[float, 'at least 0'] = 0.0  # memory of a GPU; 0 for that of --gpu
    processes: Annotated[int, 'at least 1'] = 1  # that share a step, one on each GPU
    gpu_hour_price: Annotated[float, 'at least 0'] = 0.0  # of one GPU
    # plan: the run
    tokens_per_s: Annotated[float, 'at least 0'] = 0.0  # of all GPUs; 0: measure or estimate it
    utilisation: Annotated[float, 'above 0 and at most 1'] = 0.4  # of the peak of a named GPU
    json: bool = False  # print JSON

    def out_of_range(self):
        found = super().out_of_range()
        if self.gpu:
            try:
                find_gpu(self.gpu)
            except UserError as problem:
                found.append(str(problem))
        return found

    def world_size(self):
        return self.processes

    def takes_minutes(self):
        return True


class Machine(NamedTuple):
    """The machine that a run is planned for."""

    device: torch.device
    name: str  # of a GPU in GPUS, '' for any, or of this machine
    dtype: str  # what train.py chooses there
    free: int  # bytes of memory of one process
    here: bool  # this machine, so that its speed can be measured


def find_machine(config, shape):
    """The GPU that config names, or this machine, with what train.py chooses there for a model."""
    if config.gpu or config.gpu_memory_gb:
        gpu = config.gpu and find_gpu(config.gpu)
        size = int((config.gpu_memory_gb or GPUS[gpu].memory_gb) * GIB)
        # as train.py chooses: these two have no bfloat16 in hardware
        auto = 'float16' if gpu in ('T4', 'V100') else 'bfloat16'
        dtype = auto if config.dtype == 'auto' else config.dtype
        return Machine(torch.device('cuda'), gpu, dtype, size, here=False)
    device, _ = devices.choose_device(config.device)
    dtype, _ = choose_training_dtype(config, shape, device)
    free = devices.device_memory(device, config.processes)
    return Machine(device, devices.machine_name(device), dtype, free, here=True)


def find_shape(config, start):
    """→ (GPTConfig, tokens of the dataset or None, where they are known from). The shape is that of
    the model that config.init_from names. Raises UserError where it cannot start this run."""
    vocab_size, tokens, source = find_dataset_size(config.dataset, config.vocab_size)
    if start.from_scratch:
        return config.gpt_config(vocab_size), tokens, source
    dataset = open_named(config.dataset) if has_token_files(config.dataset) else None
    shape = start_shape(config, start.weights, dataset)
    return replace(shape, block_size=config.block_size), tokens, source


# -----------------------------------------------------------------------------
# the parts of a plan, each a dict that --json prints


def plan_memory(shape, config, machine):
    """→ (the config as train.py resolves it, what a step of it takes and what fits: the same under
    each kind of checkpointing and of parallelism too)"""
    free, where = machine.free, (machine.dtype, machine.device.type)
    parallel, why = memory.choose_parallel(config, shape, *where, free)
    config = replace(config, parallel=parallel)
    if config.batch_size == 'auto':
        fitting = memory.batch_that_divides(shape, config, *where, free)
        config = memory.with_batch(config, fitting or 1, memory.sequences_of(config))
    plan = memory.predict(shape, config, *where)

    def under(**changes):
        changed = replace(config, **changes)
        return {'total': memory.predict(shape, changed, *where).total,
                'largest_batch': memory.largest_batch(shape, changed, *where, free)}

    fits = plan.total <= free
    return config, {
        'batch_size': config.batch_size, 'micro_steps': config.accumulation() // config.processes,
        'dtype': machine.dtype, 'available': free, 'fits': fits, 'phases': plan.phases,
        'peak_phase': plan.peak_phase, 'peak': plan.peak, 'overhead': plan.overhead,
        'total': plan.total, 'kept': plan.kept, 'parallel': parallel, 'parallel_why': why,
        'checkpointing': {kind: under(activation_checkpointing=kind) for kind in RECOMPUTED},
        'parallels': {kind: under(parallel=kind) for kind in ('ddp', 'fsdp')
                      if config.processes > 1},
        'savings': {} if fits else dict(memory.savings(shape, config, *where)[:3])}


def find_speed(gpt, config, machine, fits):
    """→ (tokens/s of all processes or None, how it was found or why not)."""
    if config.tokens_per_s:
        return config.tokens_per_s, 'as given'
    if not machine.here:
        peak = machine.name and peak_flops(machine.name, machine.dtype)
        if not peak:
            return None, 'say --tokens_per_s, or name a --gpu for a dtype whose peak is known'
        return peak * config.utilisation / gpt.flops_per_token() * config.processes, \
            f'estimated from {config.utilisation:.0%} of the peak of {machine.name}'
    if not fits:
        return None, 'not measured, since it does not fit'
    print('measuring the speed of a step here, for some seconds …', file=sys.stderr, flush=True)
    speed, how = estimate_speed(gpt.config, config, machine.device, machine.dtype)
    if machine.device.type == 'cuda':
        return speed * config.processes, f'{how}, not compiled'
    return speed, how


def plan_run(gpt, config, dataset_tokens, speed, how):
    """Iterations, tokens, FLOPs, hours and price of the run, and how the corpus matches it."""
    iters, step = config.max_iters, config.step_tokens()
    if config.minutes:
        if not speed:
            raise UserError(f'minutes={setting(config.minutes)}: the speed is not known: {how}')
        iters = max(1, int((1 - SHARE) * 60 * config.minutes * speed / step))
    total, parameters = step * iters, gpt.num_parameters()
    hours = total / speed / 3600 if speed else None
    return {'iterations': iters, 'tokens_per_step': step, 'tokens': total, 'parameters': parameters,
            'dataset': dataset_tokens, 'epochs': total / dataset_tokens if dataset_tokens else None,
            # Hoffmann et al. 2022, table 3: about 20 tokens for each parameter
            'chinchilla': 20 * parameters if config.init_from in ('scratch', 'auto') else None,
            'flops': gpt.flops_per_token() * total, 'tokens_per_s': speed, 'how': how,
            'hours': hours, 'gpu_hours': hours and hours * config.processes,
            'price': hours and hours * config.processes * config.gpu_hour_price}


def plan_disk(shape, config, held, dataset_tokens):
    """Bytes of a checkpoint, of all that are kept, and of the tokens."""
    between = held['phases']['between steps']
    checkpoint = (between['weights'] + between['optimizer']) \
        * (config.processes if held['parallel'] == 'fsdp' else 1)  # each process has a part
    width = 2 if shape.vocab_size <= 2**16 else 4
    return {'checkpoint': checkpoint,
            'checkpoints': checkpoint * (KEPT + 2),  # the best, and one written
            'dataset': dataset_tokens * width if dataset_tokens else None}


# -----------------------------------------------------------------------------
# for people


def print_memory(held, machine):
    of = f'{machine.device.type}, {machine.name}' if machine.here else \
        f'one {machine.name or "GPU"} with {gib(machine.free)}'
    print(f'memory of {of}: micro-batch {held["batch_size"]}, {held["micro_steps"]} a step, '
          f'{held["dtype"]}; highest in "{held["peak_phase"]}"')
    for owner, size in held['phases'][held['peak_phase']].items():
        print(f'  {gib(size):>12}  {owner}')
    if held['overhead']:
        print(f'  {gib(held["overhead"]):>12}  CUDA context and fragmentation, an allowance')
    print(f'  {gib(held["total"]):>12}  in all: {"fits" if held["fits"] else "does NOT fit"} in '
          f'{gib(held["available"])}')
    if held['kept'] > held['available']:
        print(f'  weights, gradients and optimizer states alone take {gib(held["kept"])}')
    elif not held['fits']:
        print('  most is saved by ' + ', '.join(
            f'{change} ({gib(size)})' for change, size in held['savings'].items()))
    print('by phase: ' + ', '.join(f'{phase} {gib(sum(of_owners.values()))}'
                                   for phase, of_owners in held['phases'].items()))
    why = f'parallel: train.py takes {held["parallel"]} ({held["parallel_why"]})'
    for head, kinds in (('activation_checkpointing:', held['checkpointing']),
                        (why, held['parallels'])):
        if kinds:
            print(head)
        for kind, under in kinds.items():
            print(f'  {kind:<10} {gib(under["total"]):>12}, largest micro-batch '
                  f'{under["largest_batch"]}')


def print_run(run, source, shape):
    print(f'tokens: {run["tokens_per_step"]:,} a step, {short(run["tokens"])} in all, '
          f'{run["tokens"] / run["parameters"]:.3g} for each of {run["parameters"]:,} parameters')
    print(f'  {source}: ' + (
        f'{short(run["dataset"])} tokens, {run["epochs"]:.3g} epochs' if run['dataset'] else
        f'its tokens are unknown, a vocabulary of {shape.vocab_size:,} is assumed'))
    if run['chinchilla']:  # not for weights that were trained before
        print(f'  Chinchilla (Hoffmann et al. 2022): this model is best trained on '
              f'{short(run["chinchilla"])} tokens')
    took = f'{short(run["tokens_per_s"])} tokens/s ({run["how"]}), ' \
           f'{duration(run["hours"] * 3600)}' if run['hours'] else run['how']
    price = f', price {run["price"]:.2f}' if run['price'] else ''
    print(f'time: {count_of(run["iterations"], "iteration")}, {run["flops"]:.3g} FLOPs, '
          f'{took}{price}')


def main(argv):
    start = Start(verifies=False)
    config = load_config(PlanConfig, argv, __doc__, read_saved=start.read)
    shape, dataset_tokens, source = find_shape(config, start)
    machine = find_machine(config, shape)
    with torch.device('meta'):
        gpt = GPT(shape)
    print('following a step on tensors without data …', file=sys.stderr, flush=True)
    config, held = plan_memory(shape, config, machine)
    run = plan_run(gpt, config, dataset_tokens, *find_speed(gpt, config, machine, held['fits']))
    disk = plan_disk(shape, config, held, dataset_tokens)
    if config.json:
        planned_for = machine._replace(device=machine.device.type)._asdict()
        print(json_format.dumps({'machine': planned_for, 'model': asdict(shape), 'source': source,
                                 'memory': held, 'run': run, 'disk': disk}, indent=1))
        return
    print_memory(held, machine)
    print_run(run, source, shape)
    print(f'disk: {gib(disk["checkpoint"])} a checkpoint, up to {gib(disk["checkpoints"])} in all'
          + (f', tokens {gib(disk["dataset"])}' if disk['dataset'] else ''))


if __name__ == '__main__':
    run_script(main)
