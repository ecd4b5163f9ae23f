"""A layout of weights that makes generation faster, since each new token reads all of them."""

from contextlib import nullcontext

import torch
import torch.nn as nn

from plaingpt.system.devices import DTYPES, autocast, cpu_has_bfloat16

WIDE = 768  # channels; narrower float32 models are slower with packed weights


def prepare_for_generation(model, device, dtype, pack=True):
    """Convert a model's matrices to `dtype`, in place; everything else stays float32.

    pack: on a CPU, reorder them as oneDNN reads them; torch.compile cannot trace those
    → the context (autocast or none) to generate in. The model cannot be trained or saved after.
    """
    packed = pack and device.type == 'cpu' and torch.backends.mkldnn.is_available() \
        and hasattr(torch.ops.mkldnn, '_linear_pointwise') \
        and ((dtype == 'float32' and model.config.n_embd >= WIDE)
             or (dtype == 'bfloat16' and cpu_has_bfloat16()))
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                # A new parameter: a tied embedding keeps the old one, and its precision.
                child.weight = nn.Parameter(child.weight.detach().to(DTYPES[dtype]),
                                            requires_grad=False)
                if packed:
                    setattr(parent, name, PackedLinear(child))
    return nullcontext() if packed else autocast(device, dtype)


class PackedLinear(nn.Module):
    """A Linear whose weight is stored in oneDNN's own layout. For a few tokens at a time it is
    faster on a CPU than torch's Linear, which reorders the weight at each call."""

    def __init__(self, linear):
        super().__init__()
        weight, bias = linear.weight.detach(), linear.bias
        self.linear = torch.ops.mkldnn._linear_pointwise.default  # looked up once, not each time
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = None if bias is None else bias.detach().to(weight.dtype)

    def forward(self, x):
        return self.linear(x.to(self.weight.dtype), self.weight, self.bias, 'none', [], '')
