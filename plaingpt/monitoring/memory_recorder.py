"""Who holds memory, as a model trains: tensors by the module that made them, stage by stage."""

import re
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock
from weakref import finalize

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

OF_BLOCKS = ' of blocks'  # the end of owners' names: parameters of blocks, and what is made of them


class MemoryRecorder(TorchDispatchMode):
    """Follows the storage of each tensor: who made it, and what all hold when a stage is highest.

    torch's own MemTracker knows neither the module of an activation nor the peak of a part of the
    backward pass. tests/training/tracked_memory.py compares the two.
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
            if source and source[0].startswith('parameters'):
                return source[0].replace('parameters', 'copies of parameters for autocast')
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
            owner = self.entries[p.untyped_storage()][0].replace('parameters', 'gradients')
            self.give(self.entries[p.grad.untyped_storage()], owner)

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
        for name, p in gpt.named_parameters():
            if name.startswith('transformer.h.'):
                self.give(self.entries[p.untyped_storage()], f'parameters{OF_BLOCKS}')
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


@contextmanager
def kernels_of(device, eager=False):
    """Let tensors on a CPU take the kernels that they would take on this type of device, as far as
    memory tells them apart. What a kernel takes inside, such as cuBLAS's workspace, nobody sees.

    eager: with float32 copies of what norms take, which no compiled step keeps"""
    with ExitStack() as stack:
        if device != 'cpu':
            stack.enter_context(fused_kernels())
            if eager:
                stack.enter_context(cuda_autocast_rules())
        yield


# What CUDA's autocast computes in float32 and a CPU's does not, as far as models have it.
IN_FLOAT32 = ('layer_norm', 'rms_norm', 'pow.Tensor_Scalar', 'softmax.int', 'log_softmax.int',
              'logsumexp', 'exp', 'log', 'rsqrt', 'reciprocal', 'sum', 'sum.dim_IntList')


@contextmanager
def cuda_autocast_rules():
    """Let autocast cast tensors on a CPU as it would cast those on a GPU."""
    library = torch.library.Library('aten', 'IMPL')
    for name in IN_FLOAT32:
        packet, _, overload = name.partition('.')
        operator = getattr(getattr(torch.ops.aten, packet), overload or 'default')
        library.impl(name, partial(in_float32, operator), 'AutocastCPU')
    try:
        yield
    finally:
        library._destroy()


def in_float32(operator, *args, **kwargs):
    def wide(x):
        low = isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if low else x

    with torch.autocast('cpu', enabled=False):
        return operator(*tree_map(wide, args), **kwargs)


@contextmanager
def fused_kernels():
    """A GPU's attention keeps no weights, also with dropout; its dropout keeps a mask of bytes;
    its RMSNorm is one kernel. A CPU's are made of parts, each of which is kept."""
    attention = F.scaled_dot_product_attention

    def without_dropout(*args, **kwargs):
        return attention(*args, **{**kwargs, 'dropout_p': 0.0})

    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, True)[0] if p and training else x

    def rms_norm(*args, **kwargs):
        return torch._fused_rms_norm(*args, **kwargs)[0]

    # Not a TorchFunctionMode: it would be off in the backward pass, which recomputes layers.
    with mock.patch.multiple(F, scaled_dot_product_attention=without_dropout, dropout=dropout,
                             rms_norm=rms_norm):
        yield
