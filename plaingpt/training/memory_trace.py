"""A training step on tensors without data: what they would hold, by owner, at each stage."""

import re
from collections import Counter
from contextlib import contextmanager, nullcontext
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
from plaingpt.training.training_step import forward_backward


TRACES = {}  # of this process


def random_batches(shape, step, device):
    """Endless (idx, targets), each (batch_size, block_size) int64."""
    while True:
        idx = torch.randint(shape.vocab_size, (step.batch_size, shape.block_size), device=device)
        yield idx, idx.clone()


def one_step(shape, step, device, batches):
    """A step of a new GPT as training makes it → yields (what is done, model, optimizer) after
    'parameters', 'optimizer states', 'backward' and 'optimizer'."""
    config = step.config
    with device:
        gpt = GPT(shape)
    gpt.loss_chunk_tokens = config.loss_chunk_tokens
    gpt.activation_checkpointing = config.activation_checkpointing
    optimizer = gpt.configure_optimizers(
        config.weight_decay, config.learning_rate, (config.beta1, config.beta2), device.type,
        config.optimizer, config.momentum)
    yield 'parameters', gpt, optimizer
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()  # an optimizer makes its states in its first step
    optimizer.zero_grad(set_to_none=True)
    yield 'optimizer states', gpt, optimizer
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    forward_backward(gpt, batches, step.micro_steps, scaler, autocast(device, step.dtype))
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
        elif func is F.dropout and args[1] and args[2]:  # probability, training
            return torch.native_dropout(*args[:3])[0]
        elif func is F.rms_norm:
            return torch._fused_rms_norm(*args)[0]
        return func(*args, **kwargs)


def trace_step(shape, step):
    """GPTConfig, StepSettings → {stage: {owner: bytes}}: each stage at its highest, and 'after …'
    what then stays. A step is traced once in a process."""
    key = GPT, repr((shape, step))
    if key not in TRACES:
        TRACES[key] = new_trace(shape, step)
    return TRACES[key]


def new_trace(shape, step):
    from torch._subclasses.fake_tensor import FakeTensorMode  # here: its import takes a second
    cpu = torch.device('cpu')
    recorder = MemoryRecorder()
    with FakeTensorMode(), kernels_of(step.device), recorder:
        for made, gpt, _ in one_step(shape, step, cpu, random_batches(shape, step, cpu)):
            if made == 'parameters':
                recorder.begin('', 'optimizer states')
            elif made == 'optimizer states':
                recorder.stages.clear()
                recorder.watch_modules(gpt)
                recorder.begin('forward', 'token ids')
            elif made == 'backward':
                recorder.keep('after backward')
                recorder.begin('optimizer', 'temporary')
    recorder.keep('after optimizer')
    return recorder.stages


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

    def release(self, entry):
        self.held[entry[0]] -= entry[1]

    def own_gradient(self, parameter):
        entry = self.entries[parameter.grad.untyped_storage()]
        self.release(entry)
        entry[0] = 'gradients'
        self.held['gradients'] += entry[1]

    def watch_modules(self, gpt):
        """Learn from hooks which module runs, and whose backward pass."""
        last = gpt.config.n_layer - 1
        for name, module in gpt.named_modules():
            block = re.search(r'\.(\d+)', name)
            part = name.removeprefix('transformer.') or 'the loss'
            if block:
                number = int(block[1])
                part = 'the last block' if number == last else f'block {number}'
            module.register_forward_pre_hook(lambda *_, name=name: self.enter(name))
            module.register_forward_hook(
                lambda m, i, outputs, part=part: self.leave(outputs, f'backward of {part}'))
        for p in gpt.parameters():
            p.register_post_accumulate_grad_hook(self.own_gradient)

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
