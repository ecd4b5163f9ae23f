"""Tell what a run will take, in memory, tokens and time, before anything runs.

    python plan.py config/gpt2_124m.py                          for this machine
    python plan.py config/gpt2_124m.py --gpu_memory_gb=40
    python plan.py config/gpt2_124m.py --gpu=H100 --processes=8 --gpu_hour_price=2.5
    python plan.py config/gpt2_124m.py --gpu_memory_gb=24 --batch_size=auto --json
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import json as json_format
import sys
from dataclasses import asdict, dataclass, replace
from typing import Annotated, NamedTuple

import torch

from configurator import load_config
from model import GPT, RECOMPUTED
from plaingpt.data.corpora import find_dataset_size, find_sizes
from plaingpt.data.dataset import has_token_files, open_named, read_names
from plaingpt.experiments.step_speed import Workload, estimate_speed
from plaingpt.system import devices
from plaingpt.system.devices import GPUS
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import GIB, count_of, duration, gib, setting, short
from plaingpt.system.machine import crowded_cores
from plaingpt.system.streams import require_stdout, status
from plaingpt.training.checkpoint_writer import KEPT
from plaingpt.training.dtype_choice import choose_training_dtype
from plaingpt.training.memory_planner import (
    batch_that_divides,
    choose_parallel,
    largest_batch,
    predict,
    savings,
    step_settings,
)
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import Start, check_start, start_shape
from plaingpt.training.time_budget import SHARE


@dataclass
class PlanConfig(TrainConfig):
    # plan: the machine; this one where no GPU is named
    gpu: str = ''  # such as A100 or 4090: its memory and its peak
    gpu_memory_gb: Annotated[float, 'at least 0'] = 0.0  # memory of a GPU; 0 for that of --gpu
    processes: Annotated[int, 'at least 1'] = 1  # that share a step, one a GPU
    gpu_hour_price: Annotated[float, 'at least 0'] = 0.0  # of one GPU
    # plan: the run
    tokens_per_s: Annotated[float, 'at least 0'] = 0.0  # of all GPUs; 0 to measure, or estimate
    utilisation: Annotated[float, 'above 0 and at most 1'] = 0.4  # of the peak of a named GPU
    json: bool = False  # print JSON

    def out_of_range(self):
        found = super().out_of_range()
        if self.gpu:
            try:
                devices.find_gpu(self.gpu)
            except UserError as problem:
                found.append(str(problem))
        return found

    def world_size(self):
        return self.processes

    def takes_minutes(self):
        return True


class Machine(NamedTuple):
    """What a run is planned for."""

    device: torch.device
    name: str  # of a GPU in GPUS, '' for any, or of this machine
    dtype: str  # what train.py chooses there
    total: int  # bytes of memory of one process
    free: int
    here: bool  # this machine, so that its speed can be measured


def find_machine(config, shape):
    """The GPU that config names, or this machine, with what train.py chooses there.

    shape: the GPTConfig of the model"""
    if config.gpu or config.gpu_memory_gb:
        gpu = config.gpu and devices.find_gpu(config.gpu)
        size = int((config.gpu_memory_gb or GPUS[gpu].memory_gb) * GIB)
        # as train.py chooses: these two have no bfloat16 in hardware
        auto = 'float16' if gpu in ('T4', 'V100') else 'bfloat16'
        dtype = auto if config.dtype == 'auto' else config.dtype
        return Machine(torch.device('cuda'), gpu, dtype, size, size, here=False)
    device, _ = devices.choose_device(config.device)
    dtype, _ = choose_training_dtype(config, shape, device)
    sizes = devices.device_memory(device)
    if device.type != 'cuda':  # the processes share it
        sizes = [size // config.processes for size in sizes]
    return Machine(device, devices.machine_name(device), dtype, *sizes, here=True)


def find_shape(config, start):
    """→ (GPTConfig, tokens of the dataset or None, where they are known from). The shape is that of
    the model that config.init_from names. Raises UserError where it cannot start this run."""
    vocab_size, tokens, source = find_dataset_size(config.dataset, config.vocab_size)
    if start.from_scratch:
        return config.gpt_config(vocab_size), tokens, source
    dataset = open_named(config.dataset) if has_token_files(config.dataset) else None
    shape = start_shape(config, start.weights, dataset)
    known = tokens or config.vocab_size  # else the vocabulary is an assumption
    check_start(config, shape, config.dataset, vocab_size if known else shape.vocab_size)
    return replace(shape, block_size=config.block_size), tokens, source


# -----------------------------------------------------------------------------
# the parts of a plan, each a dict that --json prints


def memory_plan(shape, config, machine):
    """Peak by owner, what fits, and the same under each kind of checkpointing and parallelism."""
    available, dtype = machine.free, machine.dtype
    sequences = config.total_batch_size // config.block_size or \
        config.gradient_accumulation_steps * config.batch_size
    mine = sequences // config.processes
    auto = config.batch_size == 'auto'
    step = step_settings(replace(config, batch_size=1) if auto else config, dtype,
                         machine.device.type)
    chosen, why = choose_parallel(config, shape, dtype, machine.device.type, machine.free)
    step = replace(step, parallel=chosen)
    if auto:
        batch_size, micro_steps = batch_that_divides(shape, step, available, mine)
        step = replace(step, batch_size=batch_size or 1, micro_steps=micro_steps or mine)
    plan = predict(shape, step)
    fits = plan.total <= available

    def under(step, what):
        with status.doing(f'with {what}'):
            batch_size, micro_steps = batch_that_divides(shape, step, available, mine)
            return {'total': predict(shape, step).total,
                    'largest_batch': largest_batch(shape, step, available),
                    'batch_size': batch_size, 'accumulation': micro_steps * config.processes}

    return {'batch_size': step.batch_size, 'micro_steps': step.micro_steps, 'dtype': dtype,
            'activation_checkpointing': config.activation_checkpointing,
            'available': available,
            'memory': machine.total,
            'fits': fits,
            'peak_stage': plan.peak_stage, 'items': plan.items, 'peak': plan.peak,
            'overhead': plan.overhead, 'total': plan.total,
            'sequences_per_step': sequences,
            'stages': plan.totals,
            'checkpointing': {
                kind: under(step.change(activation_checkpointing=kind),
                            f'activation_checkpointing={kind}') for kind in RECOMPUTED},
            'parallel': chosen, 'parallel_why': why,
            'parallels': {} if config.processes == 1 else
                {kind: under(replace(step, parallel=kind), f'parallel={kind}')
                 for kind in ('ddp', 'fsdp')},
            'savings': {} if fits is not False else dict(savings(shape, step)[:3])}


def token_plan(shape, iters, config, sequences, parameters, dataset_tokens):
    """Tokens of a run of so many iterations, and how they and the corpus match the model."""
    step = sequences * shape.block_size
    total = step * iters
    weights, sizes = read_names(config.dataset), find_sizes(config.dataset)
    corpora = [{'name': name, 'source': source, 'weight': weights[name], 'tokens': size,
                'epochs': total * weights[name] / size if size else None}
               for name, (_, size, source) in sizes.items()]
    blocks = 12 * shape.n_layer * shape.n_embd**2
    return {'parameters': parameters, 'iterations': iters, 'per_step': step, 'total': total,
            'dataset': dataset_tokens,
            'epochs': total / dataset_tokens if dataset_tokens else None,
            'steps_per_epoch': dataset_tokens / step if dataset_tokens else None,
            'corpora': corpora,
            'per_parameter': total / parameters,
            # Hoffmann et al. 2022, table 3: about 20 tokens for each parameter
            'chinchilla': 20 * parameters if config.init_from in ('scratch', 'auto') else None,
            'chinchilla_parameters': dataset_tokens / 20 if dataset_tokens else None,
            # Kaplan et al. 2020, equation 4.4: fewer overfit; N without embeddings
            'kaplan': 5e3 * blocks**0.74}


def iterations_in(minutes, speed, how, step_tokens):
    """How many fit, about, at so many tokens a second. Raises UserError where that is not known."""
    if not speed:
        raise UserError(f'minutes={setting(minutes)}: the speed is not known: {how}')
    return max(1, int((1 - SHARE) * 60 * minutes * speed / step_tokens))


def time_plan(gpt, config, speed, how, total_tokens):
    """FLOPs, hours and price; None where the speed is not known."""
    flops = gpt.flops_per_token()
    hours = total_tokens / speed / 3600 if speed else None
    gpu_hours = hours * config.processes if hours else None
    return {'flops_per_token': flops, 'flops': flops * total_tokens, 'tokens_per_s': speed,
            'how': how, 'hours': hours, 'gpu_hours': gpu_hours,
            'price': gpu_hours * config.gpu_hour_price if hours else None}


def find_speed(gpt, config, machine, memory):
    """→ (tokens/s of all processes or None, how it was found or why not)."""
    if config.tokens_per_s:
        return config.tokens_per_s, 'as given'
    if not machine.here:
        peak = machine.name and devices.peak_flops(machine.name, machine.dtype)
        if not peak:
            return None, 'say --tokens_per_s, or name a --gpu for a dtype whose peak is known'
        return peak * config.utilisation / gpt.flops_per_token() * config.processes, \
            f'estimated from {config.utilisation:.0%} of the peak of {machine.name}'
    if memory['fits'] is not True:
        return None, 'not measured, since it does not fit'
    note('measuring the speed of a step here, for some seconds')
    devices.use_fast_matmul()
    config = replace(config, batch_size=memory['batch_size'])
    speed, how = estimate_speed(Workload(config, gpt.config, machine.device, machine.dtype, False))
    if machine.device.type != 'cuda':
        busy = crowded_cores.describe()
        return speed, how + (f'; {busy}, so it may be several times as fast' if busy else '')
    return speed * config.processes, f'{how}, not compiled'


def disk_plan(shape, config, memory, dataset_tokens):
    """Bytes of a checkpoint, of all that are kept, and of the tokens."""
    checkpoint = memory['items']['parameters'] + memory['items'].get('optimizer states', 0)
    if memory['parallel'] == 'fsdp':  # each process has a part
        checkpoint *= config.processes
    width = 2 if shape.vocab_size <= 2**16 else 4
    return {'checkpoint': checkpoint,
            'checkpoints': checkpoint * (KEPT + 2),  # the best, and one written
            'dataset': dataset_tokens * width if dataset_tokens else None}


# -----------------------------------------------------------------------------
# for people


def verdict(memory):
    """Does it fit, and what does."""
    best = memory['checkpointing'][memory['activation_checkpointing']]
    free = f' free, of {gib(memory["memory"])}' if memory['memory'] != memory['available'] else ''
    words = [f'{"fits" if memory["fits"] else "does NOT fit"} in {gib(memory["available"])}{free}']
    if best['batch_size']:
        words.append(f'largest micro-batch {best["largest_batch"]}; of those that keep '
                     f'{memory["sequences_per_step"]} sequences a step, {best["batch_size"]} with '
                     f'gradient_accumulation_steps={best["accumulation"]}')
    elif best['largest_batch'] == 0:
        words.append('not even batch_size=1 does')
    kept = memory['stages']['optimizer']  # when no activation is left
    if kept > memory['available']:
        words.append(f'weights, gradients and optimizer states alone take {gib(kept)}')
    elif not memory['fits']:
        words.append('most is saved by ' + ', '.join(
            f'{change} ({gib(size)})' for change, size in memory['savings'].items()))
    return '; '.join(words)


def note(what):
    """For who waits; standard output has the plan."""
    print(f'{what} …', file=sys.stderr, flush=True)


def print_memory(memory, machine):
    of = f'{machine.device.type}, {machine.name}' if machine.here else \
        f'one {machine.name} with {gib(machine.total)}' if machine.name else 'one GPU'
    print(f'memory of {of}: micro-batch {memory["batch_size"]}, {memory["micro_steps"]} a step, '
          f'{memory["dtype"]}; highest in "{memory["peak_stage"]}"')
    for name, size in sorted(memory['items'].items(), key=lambda item: -item[1]):
        if size:
            print(f'  {gib(size):>12}  {name}')
    if memory['overhead']:
        print(f'  {gib(memory["overhead"]):>12}  CUDA context and fragmentation, an allowance')
    print(f'  {gib(memory["total"]):>12}  in all: {verdict(memory)}')
    print('by stage: ' + ', '.join(f'{stage} {gib(size)}' for stage, size in
                                   memory['stages'].items() if not stage.startswith('after')))
    print_kinds('activation_checkpointing:', memory['checkpointing'])
    if memory['parallels']:
        print_kinds(f'parallel: train.py takes {memory["parallel"]} ({memory["parallel_why"]})',
                    memory['parallels'])


def print_kinds(head, kinds):
    print(head)
    for kind, under in kinds.items():
        print(f'  {kind:<10} {gib(under["total"]):>12}, largest micro-batch '
              f'{under["largest_batch"]}')


def print_tokens(tokens, source, vocab_size):
    known = tokens['dataset']
    print(f'tokens: {tokens["per_step"]:,} a step, {short(tokens["total"])} in all, '
          f'{tokens["per_parameter"]:.3g} for each of {tokens["parameters"]:,} parameters')
    if known and len(tokens['corpora']) == 1:
        print(f'  {source}: {short(known)} tokens, {tokens["steps_per_epoch"]:.4g} steps an epoch, '
              f'{tokens["epochs"]:.3g} epochs')
    elif known:
        for corpus in tokens['corpora']:
            print(f'  {corpus["source"]}: {short(corpus["tokens"])} tokens, {corpus["weight"]:.1%} '
                  f'of the run, {corpus["epochs"]:.3g} epochs')
    else:
        print(f'  {source}: its tokens are unknown, a vocabulary of {vocab_size:,} is assumed')
    if not tokens['chinchilla']:  # the weights have learned from other text before
        return
    data = f', the corpus {short(known)}' if known else ''
    print(f'  Chinchilla (Hoffmann et al. 2022): this model is best trained on '
          f'{short(tokens["chinchilla"])} tokens{data}')
    if known:
        print(f'    and one pass over this corpus trains {short(known / 20)} parameters best; '
              'up to 4 epochs are nearly as good as new text (Muennighoff et al. 2023)')
    enough = '' if not known else ': enough' if known >= tokens['kaplan'] else ': it will overfit'
    print(f'  Kaplan et al. 2020, eq. 4.4: below {short(tokens["kaplan"])} tokens of text this '
          f'model overfits{data}{enough}')


def print_time_and_disk(time, disk, machine):
    speed = time['how']
    if time['hours']:
        gpu_hours = f', {time["gpu_hours"]:.3g} GPU hours' * (machine.device.type == 'cuda')
        speed = f'{short(time["tokens_per_s"])} tokens/s ({time["how"]}), ' \
                f'{duration(time["hours"] * 3600)}{gpu_hours}'
    price = f', price {time["price"]:.2f}' if time['price'] else ''
    print(f'time: {time["flops"]:.3g} FLOPs, {speed}{price}')
    print(f'disk: {gib(disk["checkpoint"])} a checkpoint, up to {gib(disk["checkpoints"])} in all'
          + (f', tokens {gib(disk["dataset"])}' if disk['dataset'] else ''))


def main(argv):
    start = Start(verifies=False)
    config = load_config(PlanConfig, argv, __doc__, read_saved=start.read)
    require_stdout()
    shape, dataset_tokens, source = find_shape(config, start)
    machine = find_machine(config, shape)
    with torch.device('meta'):
        gpt = GPT(shape)
    note('following a step on tensors without data')
    memory = memory_plan(shape, config, machine)
    speed, how = find_speed(gpt, config, machine, memory)
    iters = config.max_iters if not config.minutes else iterations_in(
        config.minutes, speed, how, memory['sequences_per_step'] * shape.block_size)
    tokens = token_plan(shape, iters, config, memory['sequences_per_step'], gpt.num_parameters(),
                        dataset_tokens)
    time = time_plan(gpt, config, speed, how, tokens['total'])
    disk = disk_plan(shape, config, memory, dataset_tokens)
    if config.json:
        planned_for = machine._replace(device=machine.device.type)._asdict()
        print(json_format.dumps({'machine': planned_for, 'model': asdict(shape),
                                 'vocab_size': shape.vocab_size, 'source': source,
                                 'memory': memory, 'tokens': tokens, 'time': time, 'disk': disk},
                                indent=1))
        return
    if config.init_from != 'scratch':
        print(f'model of {config.init_from}: {shape.n_layer} layers, {shape.n_head} heads, '
              f'{shape.n_embd} channels')
    print_memory(memory, machine)
    if config.minutes:
        print(f'{duration(60 * config.minutes)}: about {count_of(iters, "iteration")}, with a '
              f'share of {SHARE:.0%} for evaluations')
    print_tokens(tokens, source, shape.vocab_size)
    print_time_and_disk(time, disk, machine)


if __name__ == '__main__':
    run_script(main)
