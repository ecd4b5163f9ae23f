"""Tell what a run will take, in memory, tokens and time, before anything runs.

    python plan.py config/gpt2_124m.py --gpu_memory_gb=40
    python plan.py config/gpt2_124m.py --gpu=H100 --processes=8 --gpu_hour_price=2.5
    python plan.py config/gpt2_124m.py --gpu_memory_gb=24 --batch_size=auto --json
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import json as json_format
from dataclasses import dataclass, replace

import torch

from configurator import load_config
from model import GPT
from plaingpt.corpus.corpora import find_dataset_size
from plaingpt.system.devices import GPUS, peak_flops
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import GIB, duration, gib, short
from plaingpt.system.recompute import KINDS
from plaingpt.system.streams import require_stdout
from plaingpt.training.memory_planner import (
    batch_that_divides,
    largest_batch,
    predict,
    savings,
    step_settings,
)
from plaingpt.training.settings import TrainConfig


@dataclass
class PlanConfig(TrainConfig):
    # plan: the machine
    gpu: str = ''  # such as A100 or RTX 4090: its memory and its peak
    gpu_memory_gb: float = 0.0  # memory of a GPU; 0 for that of --gpu
    processes: int = 1  # GPUs that share a step
    gpu_hour_price: float = 0.0  # of one GPU
    # plan: the run
    tokens_per_s: float = 0.0  # measured, of all GPUs together; 0 to estimate from utilisation
    utilisation: float = 0.4  # share of the GPU's peak, where tokens_per_s is not known
    json: bool = False  # print JSON

    def out_of_range(self):
        found = super().out_of_range()
        if self.processes < 1:
            found.append(f'processes={self.processes}: must be at least 1')
        found += [f'{key}={getattr(self, key)}: must not be negative'
                  for key in ('gpu_memory_gb', 'gpu_hour_price', 'tokens_per_s')
                  if getattr(self, key) < 0]
        if not 0 < self.utilisation <= 1:
            found.append(f'utilisation={self.utilisation}: must be above 0 and at most 1')
        if self.gpu and self.gpu not in GPUS:
            found.append(f'gpu={self.gpu!r} is unknown: use one of {", ".join(GPUS)}, or '
                         '--gpu_memory_gb')
        return found

    def world_size(self):
        return self.processes


# -----------------------------------------------------------------------------
# the parts of a plan, each a dict that --json prints


def memory_plan(shape, config, dtype):
    """Peak by owner, what fits, and the same under each kind of checkpointing."""
    gpu_memory_gb = GPUS[config.gpu].memory_gb if config.gpu else 0
    available = int((config.gpu_memory_gb or gpu_memory_gb) * GIB)
    sequences = config.total_batch_size // config.block_size or \
        config.gradient_accumulation_steps * config.batch_size
    mine = sequences // config.processes
    auto = config.batch_size == 'auto'
    step = step_settings(replace(config, batch_size=1) if auto else config, dtype)
    if auto:
        batch_size, micro_steps = batch_that_divides(shape, step, available, mine)
        step = replace(step, batch_size=batch_size or 1, micro_steps=micro_steps or mine)
    plan = predict(shape, step)
    fits = plan.total <= available if available else None
    kinds = {}
    for kind in KINDS:
        under = step.change(activation_checkpointing=kind)
        # Without a size to fit, nothing does.
        batch_size, micro_steps = batch_that_divides(shape, under, available, mine) \
            if available else (0, 0)
        kinds[kind] = {'total': predict(shape, under).total,
                       'largest_batch': largest_batch(shape, under, available) if available else 0,
                       'batch_size': batch_size, 'accumulation': micro_steps * config.processes}
    numbers = step.batch_size * shape.block_size * shape.vocab_size
    return {'batch_size': step.batch_size, 'micro_steps': step.micro_steps, 'dtype': dtype,
            'activation_checkpointing': config.activation_checkpointing,
            'loss_chunk_tokens': config.loss_chunk_tokens, 'available': available,
            'fits': fits,
            'peak_stage': plan.peak_stage, 'items': plan.items, 'peak': plan.peak,
            'overhead': plan.overhead, 'total': plan.total,
            'logits': numbers * (4 if dtype == 'float32' else 2), 'sequences_per_step': sequences,
            'stages': plan.totals, 'checkpointing': kinds,
            'savings': {} if fits is not False else dict(savings(shape, step)[:3])}


def token_plan(shape, config, sequences, parameters, dataset_tokens):
    """Tokens of the run, and how they and the corpus match the model."""
    step = sequences * shape.block_size
    total = step * config.max_iters
    blocks = 12 * shape.n_layer * shape.n_embd**2
    return {'parameters': parameters, 'per_step': step, 'total': total,
            'dataset': dataset_tokens,
            'epochs': total / dataset_tokens if dataset_tokens else None,
            'steps_per_epoch': dataset_tokens / step if dataset_tokens else None,
            'per_parameter': total / parameters,
            # Hoffmann et al. 2022, table 3: about 20 tokens for each parameter
            'chinchilla': 20 * parameters,
            'chinchilla_parameters': dataset_tokens / 20 if dataset_tokens else None,
            # Kaplan et al. 2020, equation 4.4: fewer overfit; N without embeddings
            'kaplan': 5e3 * blocks**0.74}


def time_plan(gpt, config, dtype, total_tokens):
    """FLOPs, hours and price; None where the speed is not known."""
    flops = gpt.flops_per_token()
    peak = peak_flops(config.gpu, dtype) if config.gpu else None
    speed = config.tokens_per_s or (peak or 0) * config.utilisation / flops * config.processes
    hours = total_tokens / speed / 3600 if speed else None
    return {'flops_per_token': flops, 'flops': flops * total_tokens, 'tokens_per_s': speed or None,
            'hours': hours, 'gpu_hours': hours * config.processes if hours else None,
            'price': hours * config.processes * config.gpu_hour_price if hours else None}


def disk_plan(shape, config, memory, dataset_tokens):
    """Bytes of a checkpoint, of all that are kept, and of the tokens."""
    checkpoint = memory['items']['parameters'] + memory['items']['optimizer states']
    width = 2 if shape.vocab_size <= 2**16 else 4
    return {'checkpoint': checkpoint,
            'checkpoints': checkpoint * (config.keep_checkpoints + 2),  # the best, and one written
            'dataset': dataset_tokens * width if dataset_tokens else None}


# -----------------------------------------------------------------------------
# for people


def verdict(memory):
    """Does it fit, and what does."""
    if not memory['available']:
        return 'say --gpu_memory_gb or --gpu to learn what fits'
    best = memory['checkpointing'][memory['activation_checkpointing']]
    words = [f'{"fits" if memory["fits"] else "does NOT fit"} in {gib(memory["available"])}']
    if best['batch_size']:
        words.append(f'largest micro-batch {best["largest_batch"]}; of those that keep '
                     f'{memory["sequences_per_step"]} sequences a step, {best["batch_size"]} with '
                     f'gradient_accumulation_steps={best["accumulation"]}')
    elif best['largest_batch'] == 0:
        words.append('not even batch_size=1 does')
    if not memory['fits']:
        words.append('most is saved by ' + ', '.join(
            f'{change} ({gib(size)})' for change, size in memory['savings'].items()))
    return '; '.join(words)


def print_memory(memory):
    print(f'memory of one GPU: micro-batch {memory["batch_size"]}, {memory["micro_steps"]} a step, '
          f'{memory["dtype"]}; highest in "{memory["peak_stage"]}"')
    for name, size in sorted(memory['items'].items(), key=lambda item: -item[1]):
        if size:
            print(f'  {gib(size):>12}  {name}')
    if not memory['loss_chunk_tokens']:
        print(f'  logits of this batch are {gib(memory["logits"])} each copy; '
              '--loss_chunk_tokens=2048 never makes them')
    print(f'  {gib(memory["overhead"]):>12}  CUDA context and fragmentation, an allowance')
    print(f'  {gib(memory["total"]):>12}  in all: {verdict(memory)}')
    print('by stage: ' + ', '.join(f'{stage} {gib(size)}' for stage, size in
                                   memory['stages'].items() if not stage.startswith('after')))
    print('activation_checkpointing:')
    for kind, under in memory['checkpointing'].items():
        fits = f', largest micro-batch {under["largest_batch"]}' if memory['available'] else ''
        print(f'  {kind:<10} {gib(under["total"]):>12}{fits}')


def print_tokens(tokens, source, vocab_size):
    known = tokens['dataset']
    print(f'tokens: {tokens["per_step"]:,} a step, {short(tokens["total"])} in all, '
          f'{tokens["per_parameter"]:.3g} for each of {tokens["parameters"]:,} parameters')
    if known:
        print(f'  {source}: {short(known)} tokens, {tokens["steps_per_epoch"]:.4g} steps an epoch, '
              f'{tokens["epochs"]:.3g} epochs')
    else:
        print(f'  {source}: its tokens are unknown, a vocabulary of {vocab_size:,} is assumed')
    data = f', the corpus {short(known)}' if known else ''
    print(f'  Chinchilla (Hoffmann et al. 2022): this model is best trained on '
          f'{short(tokens["chinchilla"])} tokens{data}')
    if known:
        print(f'    and one pass over this corpus trains {short(known / 20)} parameters best; '
              'up to 4 epochs are nearly as good as new text (Muennighoff et al. 2023)')
    enough = '' if not known else ': enough' if known >= tokens['kaplan'] else ': it will overfit'
    print(f'  Kaplan et al. 2020, eq. 4.4: below {short(tokens["kaplan"])} tokens of text this '
          f'model overfits{data}{enough}')


def print_time_and_disk(time, disk):
    speed = f'{short(time["tokens_per_s"])} tokens/s, {duration(time["hours"] * 3600)}, ' \
        f'{time["gpu_hours"]:.3g} GPU hours' if time['hours'] else \
        'say --tokens_per_s or --gpu for the time'
    price = f', price {time["price"]:.2f}' if time['price'] else ''
    print(f'time: {time["flops"]:.3g} FLOPs, {speed}{price}')
    print(f'disk: {gib(disk["checkpoint"])} a checkpoint, up to {gib(disk["checkpoints"])} in all'
          + (f', tokens {gib(disk["dataset"])}' if disk['dataset'] else ''))


def main(argv):
    config = load_config(PlanConfig, argv, __doc__)
    require_stdout()
    vocab_size, dataset_tokens, source = find_dataset_size(config.dataset, config.vocab_size)
    shape = config.gpt_config(vocab_size)
    if config.batch_size == 'auto' and not (config.gpu_memory_gb or config.gpu):
        raise UserError('batch_size=auto: say --gpu_memory_gb or --gpu')
    with torch.device('meta'):
        gpt = GPT(shape)
    # as train.py chooses: these two have no bfloat16 in hardware
    auto = 'float16' if config.gpu in ('T4', 'V100') else 'bfloat16'
    dtype = auto if config.dtype == 'auto' else config.dtype
    memory = memory_plan(shape, config, dtype)
    tokens = token_plan(shape, config, memory['sequences_per_step'], gpt.num_parameters(),
                        dataset_tokens)
    time = time_plan(gpt, config, dtype, tokens['total'])
    disk = disk_plan(shape, config, memory, dataset_tokens)
    if config.json:
        print(json_format.dumps({'vocab_size': vocab_size, 'source': source, 'memory': memory,
                                 'tokens': tokens, 'time': time, 'disk': disk}, indent=1))
        return
    print_memory(memory)
    print_tokens(tokens, source, vocab_size)
    print_time_and_disk(time, disk)


if __name__ == '__main__':
    run_script(main)
