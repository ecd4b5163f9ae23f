"""Peak speed of GPUs, from their data sheets."""

import re

# From NVIDIA's data sheets. For B200 and B300 they give eight GPUs with sparsity (HGX: 36 PFLOPS).
# For RTX 50 they give AI TOPS, which count sparse FP4 and are 16 times as many (5090: 3352; its
# whitepaper has both). FLOP/s of dense bfloat16 or float16 on tensor cores, with float32
# accumulation. A name is what CUDA reports, in capitals, without PLAIN_WORDS.
PEAKS = {
    'B300': 2250e12,
    'B200': 2250e12,
    'GH200': 989e12,
    'H200 NVL': 835e12,
    'H200': 989e12,
    'H100 PCIE': 756e12,
    'H100 NVL': 835e12,
    'H100': 989e12,
    'A100': 312e12,
    'A100 PCIE': 312e12,
    'L40S': 362e12,
    'L40': 181e12,
    'L4': 121e12,
    'A10G': 70e12,
    'A10': 125e12,
    'A6000': 155e12,
    '6000 ADA': 364e12,
    '5090': 209.5e12,
    '5080': 112.6e12,
    '5070 TI': 87.9e12,
    '5070': 61.7e12,
    '5060 TI': 47.4e12,
    '5060': 38.4e12,
    '4090': 165e12,
    '3090': 71e12,
    'V100 PCIE': 112e12,
    'V100': 125e12,
    'T4': 65e12,
}

# Share of the peak that whole steps of GPT-2 124M reached, with 64 sequences of 1,024 tokens in
# bfloat16, by optimizer, and GiB of memory: docs/benchmarks.md has the commands and the date.
MEASURED = {'H100': ({'adamw': 0.453, 'normuon': 0.398}, 79.2)}

# Words of a name that change no peak. A name with any other word, such as Ti, Laptop, D or MIG, is
# that of another GPU, or of a part of one.
PLAIN_WORDS = re.compile(r'NVIDIA|TESLA|GEFORCE|RTX|SXM\d*|HBM\d\w*|\d+GB|GENERATION|AC')


def mfu(flops_per_s, device_name, dtype):
    """Model FLOPs utilisation: the share of the device's peak that is used, None if unknown."""
    peak = peak_flops(device_name, dtype)
    return flops_per_s / peak if peak else None


def peak_flops(device_name, dtype):
    """Peak FLOP/s of a device in the training dtype, or None where it is not known."""
    words = [word for word in re.split(r'[\s-]+', device_name.upper())
             if not PLAIN_WORDS.fullmatch(word)]
    return None if dtype == 'float32' else PEAKS.get(' '.join(words))
