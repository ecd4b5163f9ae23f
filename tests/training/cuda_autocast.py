"""The casts that CUDA's autocast makes, on tensors of a CPU."""

from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._pytree import tree_map

# What CUDA's autocast computes in float32 and a CPU's does not, as far as models have it.
IN_FLOAT32 = ('layer_norm', 'rms_norm', 'pow.Tensor_Scalar', 'softmax.int', 'log_softmax.int',
              'logsumexp', 'exp', 'log', 'rsqrt', 'reciprocal', 'sum', 'sum.dim_IntList')


def operator_of(name):
    packet, _, overload = name.partition('.')
    return getattr(getattr(torch.ops.aten, packet), overload or 'default')


@contextmanager
def cuda_autocast_rules():
    library = torch.library.Library('aten', 'IMPL')
    for name in IN_FLOAT32:
        library.impl(name, partial(in_float32, operator_of(name)), 'AutocastCPU')
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
