"""Does a run fit in memory? Chooses ddp or fsdp and the batch size, or refuses the run."""

import gc
from dataclasses import replace

import torch

from plaingpt.system.devices import check_memory, device_memory
from plaingpt.system.distributed import all_reduce_min, launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import gib
from plaingpt.system.machine import free_memory
from plaingpt.training.memory_planner import (
    DEPTHS,
    advice,
    batch_that_divides,
    choose_parallel,
    explain_overflow,
    interpolation_weights,
    one_step,
    predict,
    rough_bytes,
    step_settings,
)


def fit_to_memory(config, shape, dtype, device, compile, is_new):
    """The TrainConfig of a run of a GPTConfig, with the answer where it says parallel=auto or
    batch_size=auto. is_new: no checkpoint of it is there. Raises UserError where the model or a
    step takes more memory than is free."""
    with torch.random.fork_rng([]):  # a plan takes no random number from the run
        config = with_parallel(config, shape, dtype, device)
        if is_new:
            check_size(shape, config, device)
        config = with_batch_size(config, shape, dtype, device, compile)
        check_batch(config, shape, dtype, device)
    return config


def with_parallel(config, shape, dtype, device):
    """The TrainConfig, with 'ddp' or 'fsdp' where it says parallel=auto and there are several
    processes. Raises UserError."""
    world = launched_world()
    if config.parallel == 'fsdp' and not world.launched:
        raise UserError('parallel=fsdp shares a model among processes: start them with torchrun')
    if world.size == 1 and config.parallel != 'fsdp':
        return config
    available = all_reduce_min(available_memory(device), device)
    kind, why = choose_parallel(config, shape, dtype, device.type, available)
    print0(f'parallel {kind} ({why})')
    return replace(config, parallel=kind)


def check_size(shape, config, device):
    """Raise UserError where a new run keeps more than the memory that is free: parameters and, to
    train, gradients and what the optimizer remembers. With fsdp each process keeps its share of
    them. The sizes come from models without data."""
    size = f'n_layer={shape.n_layer}, n_embd={shape.n_embd}: '
    try:
        step = step_settings(replace(config, batch_size=1), 'float32', device.type)
        with explain_overflow(shape):
            parameters, states = kept_bytes(shape, step)
    except RuntimeError:
        return  # a model or an optimizer of your own, which needs data to be made
    words = f'{size}its parameters'
    if config.parallel == 'fsdp':  # rank 0 makes it whole on the host
        check_memory(parameters, free_memory(), f'{words} take')
        parameters, states = parameters / step.processes, states / step.processes
    elif device.type == 'cuda':  # where it moves when it is made
        check_memory(parameters, host_memory(), f'{words} take')
    needed = parameters
    if not config.eval_only:
        words, needed = f'{words}, gradients and optimizer states', 2 * parameters + states
    check_memory(needed, available_memory(device), f'{words} take')


def kept_bytes(shape, step):
    """→ (bytes of the parameters, bytes of the optimizer's states), extrapolated in n_layer from
    two small depths on meta tensors: no size is too large to be asked about."""
    kept = torch.zeros(2, dtype=torch.float64)
    for n_layer, share in interpolation_weights(shape.n_layer, *DEPTHS).items():
        steps = one_step(replace(shape, n_layer=n_layer), step, torch.device('meta'))
        _, gpt, optimizer = next(steps)
        next(steps)  # the optimizer makes its states
        states = [t for state in optimizer.state.values() for t in state.values()
                  if isinstance(t, torch.Tensor)]
        kept += share * torch.tensor([sum(t.nbytes for t in tensors)
                                      for tensors in (gpt.parameters(), states)])
    return kept.tolist()


def host_memory():
    """This process's share of the bytes that are free on the machine."""
    return free_memory() // launched_world().local_size


def available_memory(device):
    """Bytes that this process may take now, on its GPU or else on the machine."""
    return device_memory(device)[1] if device.type == 'cuda' else host_memory()


def with_batch_size(config, shape, dtype, device, compile):
    """The TrainConfig, with a number where it says batch_size=auto. Raises UserError."""
    if config.batch_size != 'auto':
        return config
    batch_size, why = choose_batch_size(shape, config, dtype, device, compile)
    config = replace(config, batch_size=batch_size)
    print0(f'batch_size {batch_size} ({why}) | accumulation {config.accumulation()}')
    return config


def choose_batch_size(shape, config, dtype, device, compile):
    """→ (batch_size, why) that keeps the TrainConfig's total_batch_size: the plan's answer, tried
    on CUDA and stepped down until it fits, the same on all processes. Raises UserError."""
    sequences = config.total_batch_size // config.block_size // config.world_size()
    step = step_settings(replace(config, batch_size=1), dtype, device.type)
    available = available_memory(device)
    planned, _ = batch_that_divides(shape, step, available, sequences)
    batch_size = planned = all_reduce_min(planned, device)
    trying = device.type == 'cuda' and step.parallel == 'ddp'  # the trial holds the whole model
    while batch_size and trying:
        trial = replace(step, batch_size=batch_size, micro_steps=sequences // batch_size)
        if all_reduce_min(int(step_fits(shape, trial, device, compile)), device):
            break
        batch_size = next((b for b in range(batch_size - 1, 0, -1) if sequences % b == 0), 0)
    if not batch_size:
        need = predict(shape, step).total
        raise UserError(f'batch_size=auto: not even 1 fits: it takes {gib(need)}, {gib(available)} '
                        f'are free on {device}; {advice(shape, step)}')
    tried = ', tried for a step' if trying else ''
    stepped = f', {planned} did not fit' if batch_size < planned else ''
    return batch_size, f'of {gib(available)} free{tried}{stepped}'


def step_fits(shape, step, device, compile):
    """True where a whole step runs on this CUDA device, compiled as in training."""
    with torch.random.fork_rng([device]):
        try:
            for _ in one_step(shape, step, device, compile):
                pass
            fit = True
        except torch.OutOfMemoryError:
            fit = False
    torch.compiler.reset()  # or the next would be compiled for batches of any size, and slower
    gc.collect()  # a graph that an error cut short holds itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return fit


def check_batch(config, shape, dtype, device):
    """Raise UserError where a step is planned to take more memory than is free. A GPU is not asked:
    it says so itself, and at once."""
    free = available_memory(device)
    if device.type == 'cuda' or config.eval_only:
        return
    step = step_settings(config, dtype, device.type)
    if rough_bytes(shape, step) < free / 4:
        return
    planned = predict(shape, step).total
    check_memory(planned, free, f'batch_size={config.batch_size}: a step takes',
                 f'choose a smaller one, or another change: {advice(shape, step)}')
