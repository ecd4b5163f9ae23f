"""A training step on tensors without data: what they would hold, by owner, at each stage."""

import re
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from weakref import finalize

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from model import GPT
from plaingpt.system import cpu_kernels
from plaingpt.system.devices import autocast
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig
from plaingpt.training.training_step import forward_backward

TRACES = {}  # those made in this process


@dataclass(frozen=True)
class StepSettings:
    """What decides a step's memory, beside the model's shape."""

    batch_size: int  # sequences in a micro-batch
    micro_steps: int = 1  # micro-batches of one process in a step
    dtype: str = 'bfloat16'
    device: str = 'cuda'
    processes: int = 1
    config: TrainConfig = field(default_factory=TrainConfig)  # all else, such as the optimizer

    def change(self, **settings):
        """The same with other settings in its config."""
        return replace(self, config=replace(self.config, **settings))


def step_settings(config, dtype, device='cuda'):
    """The StepSettings of a TrainConfig whose batch_size is a number."""
    steps = max(1, config.accumulation() // config.world_size())
    # What stands beside it, or changes no memory, is set alike, so that one trace serves all.
    alike = {'batch_size': 1, 'gradient_accumulation_steps': 1, 'total_batch_size': 0, 'seed': 0}
    plain = TrainConfig(**{f.name: getattr(config, f.name) for f in fields(TrainConfig)} | alike)
    return StepSettings(config.batch_size, steps, dtype, device, config.world_size(), plain)


def one_step(shape, step, device):
    """The last micro-batch of a step of a new GPT, and the update, as training makes them → yields
    (what is done, model, optimizer) after 'parameters', 'optimizer states', 'backward' and
    'optimizer'. Gradients of micro-batches before it are there, as zeros."""
    config = step.config
    with device:
        gpt = GPT(shape)
    gpt.loss_chunk_tokens = config.loss_chunk_tokens
    gpt.activation_checkpointing = config.activation_checkpointing
    optimizer = build_optimizer(gpt, config, device.type)
    yield 'parameters', gpt, optimizer
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()  # an optimizer makes its states in its first step
    if step.micro_steps == 1:
        optimizer.zero_grad(set_to_none=True)
    yield 'optimizer states', gpt, optimizer
    idx = torch.randint(shape.vocab_size, (step.batch_size, shape.block_size), device=device)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    forward_backward(gpt, iter([(idx, idx.clone())]), 1, scaler, autocast(device, step.dtype))
    yield 'backward', gpt, optimizer
    optimizer.step()
    yield 'optimizer', gpt, optimizer


@contextmanager
def kernels_of(device):
    """Let tensors on a CPU take the kernels that they would take on this type of device, as far as
    memory tells them apart."""
    cpu_kernels.enabled = device == 'cpu'
    try:
        with nullcontext() if device == 'cpu' else FusedKernels():
            yield
    finally:
        cpu_kernels.enabled = True


class FusedKernels(TorchFunctionMode):
    """A GPU's attention keeps no weights, also with dropout; its dropout keeps a mask of bytes;
    its RMSNorm is one kernel. A CPU's are made of parts, each of which is kept."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, 'dropout_p': 0.0}
        elif func is F.dropout and kwargs['p'] and kwargs['training']:
            return torch.native_dropout(*args, kwargs['p'], True)[0]
        elif func is F.rms_norm:
            return torch._fused_rms_norm(*args, **kwargs)[0]
        return func(*args, **kwargs)


def trace_step(shape, step):
    """GPTConfig, StepSettings → {stage: {owner: bytes}}: each stage at its highest, and 'after …'
    what then stays. A step is traced once in a process."""
    key = GPT, repr((shape, step))
    if key in TRACES:
        return TRACES[key]
    from torch._subclasses.fake_tensor import FakeTensorMode  # here: its import takes a second
    recorder = MemoryRecorder()
    with FakeTensorMode(), kernels_of(step.device), recorder:
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


class MemoryRecorder(TorchDispatchMode):
    """Follows the storage of each tensor: who made it, and what all hold when a stage is highest.

    torch's own MemTracker knows neither the module of an activation nor the peak of a part of the
    backward pass. benchmarks/memory_check.py holds its numbers beside these.
    """

    def __init__(self):
        super().__init__()
        self.entries = WeakIdKeyDictionary()  # storage → [owner, bytes]
        self.held = Counter()  # owner → bytes, now
        self.stages = {}  # stage → {owner: bytes}
        self.modules = []  # names of those whose forward pass runs, the innermost last
        self.begin('', 'parameters')

    def begin(self, stage, maker):
        """What comes belongs to this stage; what no module makes is by this maker."""
        self.stage, self.maker = stage, maker

    def keep(self, stage):
        self.stages[stage] = {owner: size for owner, size in self.held.items() if size}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.entries:
                    entry = self.entries[storage] = [self.owner(func, args), storage.nbytes()]
                    self.held[entry[0]] += entry[1]
                    finalize(storage, self.release, entry)
        if self.held.total() > sum(self.stages.get(self.stage, {}).values()):
            self.keep(self.stage)
        return result

    def owner(self, func, args):
        if func is torch.ops.aten._to_copy.default:
            source = self.entries.get(args[0].untyped_storage())
            if source and source[0] == 'parameters':
                return 'copies of parameters for autocast'
        if not self.modules:
            return self.maker
        parts = re.sub(r'\.\d+', '', self.modules[-1]).removeprefix('transformer.').split('.')
        return 'activations: ' + '.'.join(parts[:2]) if parts[0] else 'loss'

    def give(self, entry, owner):
        """Count a storage as this owner's, no longer as another's."""
        self.held[entry[0]] -= entry[1]
        self.held[owner] += entry[1]
        entry[0] = owner

    def release(self, entry):
        self.held[entry[0]] -= entry[1]

    def take_gradient(self, p):
        if p.grad is not None:
            self.give(self.entries[p.grad.untyped_storage()], 'gradients')

    def watch_modules(self, gpt):
        """Learn from hooks which module runs, and whose backward pass."""
        last = gpt.config.n_layer - 1
        for name, module in gpt.named_modules():
            part = name.removeprefix('transformer.') or 'the loss'
            if block := re.search(r'\.(\d+)', name):
                part = 'the last block' if int(block[1]) == last else f'block {block[1]}'
            module.register_forward_pre_hook(lambda *_, name=name: self.enter(name))
            module.register_forward_hook(
                lambda m, i, outputs, part=part: self.leave(outputs, f'backward of {part}'))
        for p in gpt.parameters():
            p.register_post_accumulate_grad_hook(self.take_gradient)
            self.take_gradient(p)

    def enter(self, name):
        self.modules.append(name)
        if not name or not self.stage.startswith('backward'):  # else it is computed again
            self.stage = 'forward' if name else 'loss'

    def leave(self, outputs, stage):
        self.modules.pop()
        if self.stage.startswith('backward'):
            return
        if self.modules:
            self.stage = 'forward' if self.modules[-1] else 'loss'
        else:
            self.keep('after forward')
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self.begin(stage, 'temporary'))
