"""Peak speed and memory of GPUs, from their data sheets."""

import re
from typing import NamedTuple

from plaingpt.system.errors import UserError


class GPU(NamedTuple):
    peak_flops: float  # dense bfloat16 or float16 on tensor cores, float32 accumulation
    memory_gb: int  # of the smallest version


# From NVIDIA's data sheets. For B200 and B300 they give eight GPUs with sparsity (HGX: 36 PFLOPS).
# For RTX 50 they give AI TOPS, which count sparse FP4 and are 16 times as many (5090: 3352; its
# whitepaper has both). A GPU is the first whose words are all in the name that CUDA reports.
GPUS = {
    'B300': GPU(2250e12, 270),
    'B200': GPU(2250e12, 180),
    'GH200': GPU(989e12, 96),
    'H200 NVL': GPU(835e12, 141),
    'H200': GPU(989e12, 141),
    'H100 PCIe': GPU(756e12, 80),
    'H100 NVL': GPU(835e12, 94),
    'H100': GPU(989e12, 80),
    'A100': GPU(312e12, 40),
    'L40S': GPU(362e12, 48),
    'L40': GPU(181e12, 48),
    'L4': GPU(121e12, 24),
    'A10G': GPU(70e12, 24),
    'A10': GPU(125e12, 24),
    'A6000': GPU(155e12, 48),
    'RTX 6000 Ada': GPU(364e12, 48),
    '5090': GPU(209.5e12, 32),
    '5080': GPU(112.6e12, 16),
    '5070 Ti': GPU(87.9e12, 16),
    '5070': GPU(61.7e12, 12),
    '5060 Ti': GPU(47.4e12, 8),
    '5060': GPU(38.4e12, 8),
    '4090': GPU(165e12, 24),
    '3090': GPU(71e12, 24),
    'V100 PCIe': GPU(112e12, 16),
    'V100': GPU(125e12, 16),
    'T4': GPU(65e12, 15),  # 16, and error correction takes one
}


# Further words of a name that change no peak. A name with any other word, such as Ti, Laptop, D or
# MIG, is that of another GPU, or of a part of one.
PLAIN_WORDS = re.compile(r'NVIDIA|Tesla|GeForce|RTX|SXM\d*|PCIe|HBM\d\w*|\d+GB|Generation|AC',
                         re.IGNORECASE)


def find_gpu(name):
    """'a100' or 'h100-pcie' → the key of GPUS that is this. Raises UserError."""
    found = {gpu.lower(): gpu for gpu in GPUS}.get(re.sub(r'[-_]', ' ', name.lower()))
    if not found:
        raise UserError(f'gpu={name!r} is unknown: use one of {", ".join(GPUS)}, or '
                        '--gpu_memory_gb')
    return found


def peak_flops(device_name, dtype):
    """Peak FLOP/s of a device in the training dtype, or None where it is not known."""
    words = set(re.split(r'[\s-]+', device_name.lower()))
    for name, gpu in GPUS.items():
        others = words - set(name.lower().split())
        named = len(words) - len(others) == len(name.split())
        if named and all(map(PLAIN_WORDS.fullmatch, others)):
            return None if dtype == 'float32' else gpu.peak_flops
    return None
