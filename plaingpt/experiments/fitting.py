"""Choose what fits into memory: parallel=auto, batch_size=auto, or a refusal before the run."""


from model import GPT
from plaingpt.core import loss
from plaingpt.core.blocks import parameters_on_meta
from plaingpt.core.optimizers import parameter_kind
from plaingpt.system.devices import device_memory
from plaingpt.system.distributed import all_gather, gloo_group, launched_world, print0
from plaingpt.system.errors import UserError, is_out_of_memory
from plaingpt.system.formatting import command_for, gib, one_line


def fit_to_memory(build, config, gpt_config, dtype, device):
    """Resolve parallel=auto and batch_size=auto in the TrainConfig of a run. Raises UserError if a
    step is planned not to fit (see fit_by_plan). build: of train.py"""
    world = launched_world()
    if config.parallel == 'fsdp' and not world.launched:
        raise UserError('parallel=fsdp needs several processes; launch them with torchrun')
    available = min(all_gather(device_memory(device, world.local_size), gloo_group()))
    with parameters_on_meta():
        gpt = GPT(gpt_config)
    shards = 1 if config.parallel == 'ddp' else world.size
    min_bytes = 8 * sum(p.numel() for p in gpt.parameters()) // shards
    if min_bytes > available:
        refuse(config, f'weights and gradients need {gib(min_bytes)}', available)
    has_choice = config.batch_size == 'auto' or config.parallel == 'fsdp'
    if not has_choice and most_bytes(gpt, config.batch_size * config.block_size) < available:
        return config
    from plaingpt.experiments.memory import Planner  # planning imports more than a small run needs
    planner = Planner(build, gpt_config, dtype, device.type)
    try:
        return fit_by_plan(planner, config, device, available)
    except Exception as error:  # the plan is a safeguard: if planning fails, the run still starts
        if has_choice or isinstance(error, UserError) or is_out_of_memory(error):
            raise
        print0(f'warning: could not plan the memory of a step: {one_line(error)}')
        return config


def most_bytes(gpt, tokens):
    """More bytes than a step takes, to skip the plan of a small model. gpt: on the meta device

    12 numbers per parameter, for Muon's temporary ones; per token, 8 for each row of a matmul in
    the blocks: its output, its input, their gradients, activation functions, attention; 4 per logit
    of a chunk."""
    rows = sum(len(p) for name, p in gpt.named_parameters()
               if parameter_kind(name, p) == 'matrices')
    logits = min(tokens, max(loss.CHUNK_SIZES)) * gpt.config.padded_vocab_size
    parameters = sum(p.numel() for p in gpt.parameters())
    return 4 * (12 * parameters + 8 * rows * tokens + 4 * logits)


def refuse(config, need, available):
    """Raise a UserError, unless the run only evaluates."""
    if not config.eval_only:
        raise UserError(
            f'batch_size={config.batch_size}, n_layer={config.n_layer}, n_embd={config.n_embd}: '
            f'{need}, but only {gib(available)} is free; choose smaller sizes, or run '
            f'{command_for("plan")} with the same settings to see what fits')


def fit_by_plan(planner, config, device, available):
    """Resolve parallel=auto and batch_size=auto in a TrainConfig. available: bytes per process.

    Raises UserError if a step does not fit. On CUDA, only weights, gradients and optimizer states
    are counted, because the GPU reports itself if the activations do not fit."""
    is_auto = config.batch_size == 'auto'
    config = planner.resolve(config, available)
    if config.world_size() > 1:
        print0(f'parallel {config.parallel}')
    plan = planner.predict(config)
    static = plan.totals['optimizer'] - plan.phases['optimizer']['activations']
    if (static if device.type == 'cuda' else plan.total) > available:
        refuse(config, f'a step needs {gib(plan.total)} ({gib(static)} of it for weights, '
                       'gradients and optimizer states)', available)
    if is_auto:
        print0(f'batch_size {config.batch_size} (a step needs {gib(plan.total)}, and '
               f'{gib(available)} is free) | gradient accumulation {config.accumulation()}')
    return config
