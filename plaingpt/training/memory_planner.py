"""What a training step takes of memory before it runs, what fits, and what would save most.

The real step runs on tensors without data. At each stage of it, what each owner holds is affine in
the number of layers and in the batch, so traces of two small depths and two small batches give
every other. A changed model or optimizer needs no change here, as long as its layers are alike.
"""

from bisect import bisect_right
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import product

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT, chunk_size
from plaingpt.monitoring.memory_recorder import OF_BLOCKS, MemoryRecorder, kernels_of
from plaingpt.system.devices import autocast, peak_memory_bytes
from plaingpt.system.errors import UserError, is_out_of_memory
from plaingpt.system.formatting import GIB, gib
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig

CUDA_OVERHEAD = GIB  # for CUDA's context and fragmentation: an allowance, not a measurement
DEPTHS = (2, 4)  # even, so that layers of two kinds in turn are planned too
# For a look at the model between steps, a sharded one is made whole. Settings without such looks:
QUIET = {'report': False, 'sample_interval': 0, 'eval_tasks': ''}
TRACES = {}  # those made in this process


@dataclass(frozen=True)
class StepSettings:
    """What decides a step's memory, beside the model's shape."""

    batch_size: int  # sequences in a micro-batch
    micro_steps: int = 1  # micro-batches of one process in a step
    dtype: str = 'bfloat16'
    device: str = 'cuda'
    processes: int = 1
    parallel: str = 'ddp'  # or 'fsdp'
    config: TrainConfig = field(default_factory=TrainConfig)  # all else, such as the optimizer
    loss_chunk_tokens: int | str = 'auto'  # that have logits at once

    @property
    def is_eager(self):
        return self.config.compile is False

    def change(self, **settings):
        """The same with other settings in its config."""
        return replace(self, config=replace(self.config, **settings))


def step_settings(config, dtype, device='cuda'):
    """The StepSettings of a TrainConfig whose batch_size is a number."""
    steps = max(1, config.accumulation() // config.world_size())
    # One value for what changes no memory or stands beside it, so that one trace serves all.
    alike = {'batch_size': 1, 'gradient_accumulation_steps': 1, 'total_batch_size': 0, 'seed': 0,
             'parallel': 'auto'}
    plain = TrainConfig(**{f.name: getattr(config, f.name) for f in fields(TrainConfig)
                           if f.init} | alike)
    parallel = 'fsdp' if config.parallel == 'fsdp' else 'ddp'
    return StepSettings(config.batch_size, steps, dtype, device, config.world_size(), parallel,
                        plain)


def one_step(shape, step, device, compile=False):
    """The last micro-batch of a step of a new GPT, and the update, as training makes them → yields
    (what is done, model, optimizer) after 'parameters', 'optimizer states', 'backward' and
    'optimizer'. Gradients of micro-batches before it are there, as zeros."""
    with device:
        gpt = GPT(shape)
    gpt.loss_chunk_tokens = step.loss_chunk_tokens
    gpt.activation_checkpointing = step.config.activation_checkpointing
    optimizer = build_optimizer(gpt, step.config, device.type)
    yield 'parameters', gpt, optimizer
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()  # an optimizer makes its states in its first step
    if step.micro_steps == 1:
        optimizer.zero_grad(set_to_none=True)
    yield 'optimizer states', gpt, optimizer
    idx = torch.randint(shape.vocab_size, (step.batch_size, shape.block_size), device=device)
    with autocast(device, step.dtype):
        loss = (torch.compile(gpt) if compile else gpt)(idx, idx.clone())[1]
    loss.backward()
    del loss
    yield 'backward', gpt, optimizer
    optimizer.step()
    yield 'optimizer', gpt, optimizer


def trace_step(shape, step):
    """GPTConfig, StepSettings → {stage: {owner: bytes}}: each stage at its highest, and 'after …'
    what then stays. A step is traced once in a process."""
    key = GPT, repr((shape, step))
    if key in TRACES:
        return TRACES[key]
    recorder = MemoryRecorder()
    with FakeTensorMode(), kernels_of(step.device, step.is_eager), recorder:
        steps = one_step(shape, step, torch.device('cpu'))
        next(steps)
        recorder.begin('', 'optimizer states')
        _, gpt, _ = next(steps)
        recorder.stages.clear()
        recorder.watch_modules(gpt)
        recorder.begin('forward', 'token ids')
        next(steps)
        recorder.keep('after backward')
        recorder.begin('optimizer', 'temporary')
        next(steps)
        recorder.keep('after optimizer')
    return TRACES.setdefault(key, recorder.stages)


class Prediction:
    """Bytes by owner at each stage of a step; the peak is the largest stage's sum."""

    def __init__(self, stages, overhead):
        self.stages, self.overhead = stages, overhead  # stage → {owner: bytes}; bytes
        self.totals = {stage: sum(items.values()) for stage, items in stages.items()}
        self.peak_stage = max(self.totals, key=self.totals.get)
        self.items = stages[self.peak_stage]
        self.peak = self.totals[self.peak_stage]  # what torch.cuda.max_memory_allocated tells
        self.total = self.peak + overhead


def predict(shape, step):
    """GPTConfig, StepSettings → Prediction, of one process. Raises UserError."""
    sharding = step.parallel == 'fsdp'
    alone = replace(step.change(**QUIET), processes=1, parallel='ddp',
                    micro_steps=1 if sharding else min(2, step.micro_steps))
    depths = interpolation_weights(shape.n_layer, *DEPTHS)
    # Up to a chunk of the loss its logits grow with the batch; from there on they do not.
    tokens = chunk_size(step.loss_chunk_tokens, step.batch_size * shape.block_size,
                        shape.vocab_size, step.device)
    alone = replace(alone, loss_chunk_tokens=tokens)
    full, rest = divmod(tokens, shape.block_size)
    chunk = max(1, full + bool(rest))
    batches = interpolation_weights(step.batch_size, *((1, full) if step.batch_size < chunk else
                                         (chunk, chunk + 1)))
    with explain_overflow(shape):
        traces = [(depths[n_layer] * batches[batch_size],
                   trace_step(replace(shape, n_layer=n_layer),
                              replace(alone, batch_size=batch_size)))
                  for n_layer, batch_size in product(depths, batches)]
    stages = {}
    for stage in traces[0][1]:  # of the shallower; more layers only have more stages
        owners = dict.fromkeys(owner for _, trace in traces for owner in trace[stage])
        stages[stage] = {owner: round(sum(share * trace[stage].get(owner, 0)
                                          for share, trace in traces)) for owner in owners}
    if sharding:
        stages = sharded(stages, shape, step)
    stages = {stage: without_blocks(items) for stage, items in stages.items()}
    if step.processes > 1 and not sharding:  # DDP's gradients stay in buckets, which travel
        buckets = {'gradients': stages['after backward']['gradients']}
        stages = {stage: items | buckets for stage, items in stages.items()}
    return Prediction(stages, CUDA_OVERHEAD if step.device == 'cuda' else 0)


@contextmanager
def explain_overflow(shape):
    """A tensor in here whose bytes no number of 64 bits can count is a UserError."""
    try:
        yield
    except RuntimeError as e:
        if 'overflowed' not in str(e):
            raise
        raise UserError(f'n_layer={shape.n_layer}, n_embd={shape.n_embd}, '
                        f'block_size={shape.block_size}: no memory holds a matrix of '
                        f'{str(e).partition("sizes=")[2]}: choose smaller sizes') from None


def without_blocks(items):
    """{owner: bytes}, those of blocks and of all else added up."""
    found = Counter()
    for owner, size in items.items():
        found[owner.removesuffix(OF_BLOCKS)] += size
    return dict(found)


def sharded(stages, shape, step):
    """Stages of a step of one micro-batch that a process makes alone → those of a process that
    shares the model as FSDP2 does (Zhao et al. 2023, "PyTorch FSDP"), with a group of parameters
    for each block and one, the root, for all else.

    A process keeps its part of parameters, gradients and optimizer states. The root group is whole
    in float32 from the forward pass to the end of the backward pass. Of the blocks two are whole in
    autocast's dtype, the one at work and the next; in the backward pass so is the gradient of one,
    and that of the one before is in float32, on its way to the processes.
    """
    kept = {owner: size for owner, size in stages['after optimizer'].items()
            if owner.startswith(('parameters', 'gradients', 'optimizer states'))}
    blocks, root = kept[f'parameters{OF_BLOCKS}'], kept['parameters']
    gathered = blocks if step.dtype == 'float32' else blocks // 2

    def part(items):
        return {owner: size // step.processes for owner, size in without_blocks(items).items()}

    found = {}
    for stage, items in stages.items():
        if stage in ('after backward', 'optimizer', 'after optimizer'):
            found[stage] = part(items)
            continue
        mine = dict(kept)
        if step.micro_steps == 1:  # no gradient before those of this micro-batch's blocks
            mine |= {'gradients': 0, f'gradients{OF_BLOCKS}': items.get(f'gradients{OF_BLOCKS}', 0)}
        others = {owner: size for owner, size in items.items()
                  if owner not in kept and not owner.endswith(OF_BLOCKS)}
        of_block = (gathered + blocks) // shape.n_layer if 'block' in stage else 0
        found[stage] = {**part(mine), **others,
                        'gathered parameters': root + 2 * gathered // shape.n_layer,
                        'whole gradients': items.get('gradients', 0) + of_block}
    mine = part(kept)
    found['reduction of the root'] = {**mine, 'gathered parameters': root,
                                      'whole gradients': 2 * root}
    if any(getattr(step.config, key) for key in QUIET):
        found['health, samples, benchmarks'] = {**mine, 'gradients': 0,
                                                'gathered parameters': root + gathered}
    return found


def choose_parallel(config, shape, dtype, device_type, available):
    """→ ('ddp' or 'fsdp', why): how the processes share a step of a TrainConfig and a GPTConfig, so
    that it fits the `available` bytes of each. All processes must give the same. With
    batch_size=auto a micro-batch of 1 decides."""
    if config.parallel != 'auto':
        return config.parallel, 'as asked'
    if config.world_size() == 1:
        return 'ddp', 'one process'
    step = step_settings(replace(config, batch_size=1) if config.batch_size == 'auto' else config,
                         dtype, device_type)
    if 4 * rough_bytes(shape, step) + CUDA_OVERHEAD < available:
        return 'ddp', 'it fits'
    planned = predict(shape, step).total
    if planned <= available:
        return 'ddp', f'a step is planned to take {gib(planned)} of {gib(available)} free'
    return 'fsdp', f'ddp is planned to take {gib(planned)}, {gib(available)} are free'


def rough_bytes(shape, step):
    """Bytes that a step takes in float32, at once and so within a factor of 4 only: a plan, which
    takes seconds, is made where these may not fit."""
    tables = 2 + shape.value_embeddings * shape.n_layer
    weights = shape.n_embd * (12 * shape.n_layer * shape.n_embd + tables * shape.padded_vocab_size)
    tokens = step.batch_size * shape.block_size
    # a block keeps some 16 numbers for each channel of a token
    numbers = tokens * shape.n_embd * (16 * shape.n_layer + 4)
    chunk = chunk_size(step.loss_chunk_tokens, tokens, shape.vocab_size, step.device)
    numbers += min(tokens, chunk or tokens) * shape.padded_vocab_size
    return 4 * numbers + 16 * weights  # with a gradient and two states


def interpolation_weights(n, low, high):
    """The linear-interpolation weights of two points for a value at n: {low: weight, high: weight}.
    An n that is one of them, or below, is taken as it is."""
    if n <= low or n == high:
        return {n: 1}
    return {low: (high - n) / (high - low), high: (n - low) / (high - low)}


def largest_batch(shape, step, available):
    """The most sequences in a micro-batch whose prediction fits `available` bytes; 0 if none do."""
    return bisect_right(range(1, 2**20), available, key=lambda batch_size: predict(
        shape, replace(step, batch_size=batch_size)).total)


def batch_that_divides(shape, step, available, sequences):
    """→ (batch_size, micro_steps) of one process that takes `sequences` in a step: the largest
    batch that fits `available` bytes and divides them, or (0, 0) where not even 1 fits."""
    for n in range(1, sequences + 1):
        if sequences % n == 0:
            divided = replace(step, batch_size=sequences // n, micro_steps=n)
            if predict(shape, divided).total <= available:
                return divided.batch_size, n
    return 0, 0


def savings(shape, step):
    """What would save memory, the best first, but what changes the model last: [(words, bytes)]."""
    half = step.batch_size // 2
    changes = [(f'--batch_size={half}', shape,
                replace(step, batch_size=half, micro_steps=2 * step.micro_steps)),
               ('--activation_checkpointing=full', shape,
                step.change(activation_checkpointing='full')),
               ('--dtype=bfloat16', shape, replace(step, dtype='bfloat16'))]
    for key in ('block_size', 'n_layer'):
        smaller = getattr(shape, key) // 2
        changes.append((f'--{key}={smaller}', replace(shape, **{key: smaller}), step))
    if step.processes > 1:
        changes += [('--parallel=fsdp', shape, replace(step, parallel='fsdp')),
                    (' '.join(f'--{key}={x}' for key, x in QUIET.items()
                              if getattr(step.config, key)), shape,
                     step.change(**QUIET))]
    now = predict(shape, step).peak
    saved = [(other is not shape, predict(other, changed).peak - now, words)
             for words, other, changed in changes
             if words not in ('--batch_size=0', '--block_size=0', '--n_layer=0')]
    return [(words, -more) for _, more, words in sorted(saved) if more < 0]


def advice(shape, step):
    """The three best changes, in words."""
    return ', '.join(f'{words} saves {gib(size)}' for words, size in savings(shape, step)[:3])


@contextmanager
def explain_out_of_memory(shape, config, dtype, device):
    """Out of memory in here is a UserError: what was planned and held, and what would save most."""
    try:
        yield
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        step = step_settings(config, dtype, device.type)
        plan = predict(shape, step)
        raise UserError(
            f'out of memory on {device} with batch_size={step.batch_size}: planned '
            f'{gib(plan.total)}, highest in "{plan.peak_stage}"; held at most '
            f'{gib(peak_memory_bytes(device))}; {advice(shape, step)}') from None
