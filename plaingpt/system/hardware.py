"""What is known of hardware: peak speed and memory of GPUs, the name of this machine."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class GPU(NamedTuple):
    peak_flops: float  # dense bfloat16 or float16 on tensor cores, float32 accumulation
    memory_gb: int  # of the smallest version


# From NVIDIA's data sheets. Looked up in order by a part of the name that CUDA reports.
GPUS = {
    'B200': GPU(2250e12, 180),
    'H200': GPU(989e12, 141),
    'H100 PCIe': GPU(756e12, 80),
    'H100 NVL': GPU(835e12, 94),
    'H100': GPU(989e12, 80),
    'A100': GPU(312e12, 40),
    'L40S': GPU(362e12, 48),
    'L4': GPU(121e12, 24),
    'A10G': GPU(70e12, 24),
    'A10': GPU(125e12, 24),
    'A6000': GPU(155e12, 48),
    'RTX 4090': GPU(165e12, 24),
    'RTX 3090': GPU(71e12, 24),
    'V100': GPU(125e12, 16),
    'T4': GPU(65e12, 15),  # 16, of which error correction takes one
}


def peak_flops(device_name, dtype):
    """Peak FLOP/s of a device in the training dtype, or None where it is not known."""
    if dtype == 'float32':
        return None
    return next((gpu.peak_flops for name, gpu in GPUS.items() if name in device_name), None)


def mfu(flops_per_s, device_name, dtype):
    """Model FLOPs utilisation: the share of the device's peak that is used, None if unknown."""
    peak = peak_flops(device_name, dtype)
    return flops_per_s / peak if peak else None


def cpu_name():
    """'AMD EPYC 7B13', where the system tells."""
    with suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()  # elsewhere only the architecture


def machine_name(device):
    """'NVIDIA H100 80GB HBM3', or 'AMD EPYC, 2 of 8 cores'."""
    import torch  # here, so that what needs no torch starts without it
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return f'{cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} cores'
