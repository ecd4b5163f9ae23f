"""Peak speed of GPUs, from their data sheets."""

import re

# From NVIDIA's data sheets. For B200 and B300 they give eight GPUs with sparsity (HGX: 36 PFLOPS).
# For RTX 50 they give AI TOPS, which count sparse FP4 and are 16 times as many (5090: 3352; its
# whitepaper has both). A GPU is the first whose words are all in the name that CUDA reports.
# FLOP/s of dense bfloat16 or float16 on tensor cores, with float32 accumulation.
PEAKS = {
    'B300': 2250e12,
    'B200': 2250e12,
    'GH200': 989e12,
    'H200 NVL': 835e12,
    'H200': 989e12,
    'H100 PCIe': 756e12,
    'H100 NVL': 835e12,
    'H100': 989e12,
    'A100': 312e12,
    'L40S': 362e12,
    'L40': 181e12,
    'L4': 121e12,
    'A10G': 70e12,
    'A10': 125e12,
    'A6000': 155e12,
    'RTX 6000 Ada': 364e12,
    '5090': 209.5e12,
    '5080': 112.6e12,
    '5070 Ti': 87.9e12,
    '5070': 61.7e12,
    '5060 Ti': 47.4e12,
    '5060': 38.4e12,
    '4090': 165e12,
    '3090': 71e12,
    'V100 PCIe': 112e12,
    'V100': 125e12,
    'T4': 65e12,
}

# Further words of a name that change no peak. A name with any other word, such as Ti, Laptop, D or
# MIG, is that of another GPU, or of a part of one.
PLAIN_WORDS = re.compile(r'NVIDIA|Tesla|GeForce|RTX|SXM\d*|PCIe|HBM\d\w*|\d+GB|Generation|AC',
                         re.IGNORECASE)


def mfu(flops_per_s, device_name, dtype):
    """Model FLOPs utilisation: the share of the device's peak that is used, None if unknown."""
    peak = peak_flops(device_name, dtype)
    return flops_per_s / peak if peak else None


def peak_flops(device_name, dtype):
    """Peak FLOP/s of a device in the training dtype, or None where it is not known."""
    words = set(re.split(r'[\s-]+', device_name.lower()))
    for name, peak in PEAKS.items():
        others = words - set(name.lower().split())
        named = len(words) - len(others) == len(name.split())
        if named and all(map(PLAIN_WORDS.fullmatch, others)):
            return None if dtype == 'float32' else peak
    return None
