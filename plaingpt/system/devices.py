"""What this machine is: device, precision, random numbers, speed and memory."""

import base64
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import one_line
from plaingpt.system.machine import free_memory

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}

# -----------------------------------------------------------------------------
# device and precision: each choice comes with the reason that is printed beside it


def choose_device(wanted, local_rank=0):
    """'auto', 'cpu', 'cuda', 'cuda:N' or 'mps' → (torch.device, why). Raises UserError."""
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    why = 'as asked'
    if wanted == 'auto':
        wanted, why = 'cpu', 'no GPU found'
        if has_cuda or has_mps:
            wanted, why = 'cuda' if has_cuda else 'mps', 'an Apple GPU'
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', wanted):
        raise UserError(f'device={wanted!r} is unknown: use auto, cpu, cuda, cuda:0 or mps')
    device = torch.device(wanted)
    if not {'cpu': True, 'cuda': has_cuda, 'mps': has_mps}[device.type]:
        raise UserError(f'device={wanted}: there is none here: use --device=cpu or --device=auto')
    if device.type == 'cuda':
        device = torch.device('cuda', local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise UserError(f'device=cuda:{device.index}: this machine has '
                            f'{torch.cuda.device_count()} GPUs; start no more processes than that')
        torch.cuda.set_device(device)
        why = device_name(device)
    return device, why


def cpu_has_bfloat16():
    """True where the processor multiplies bfloat16 in hardware (x86 AVX-512/AMX, Arm)."""
    # Where torch is too old to know, float32 is the safe answer.
    capabilities = getattr(torch.cpu, 'get_capabilities', dict)()
    return any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))


def choose_dtype(wanted, device, n_embd):
    """'auto' or a name in `DTYPES` → (name, why): the precision that autocast computes in.

    Training measures instead where it can: choose_training_dtype. Sampling is done in about the
    time that a measurement takes, and a score must not depend on one."""
    if wanted == 'bfloat16' and device.type == 'cpu' and not cpu_has_bfloat16():
        return wanted, 'as asked, but this CPU has none in hardware: float32 is many times as fast'
    if wanted != 'auto':
        return wanted, 'as asked'
    if device.type == 'cuda':
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return 'bfloat16', 'in hardware'
        return 'float16', 'no bfloat16 in hardware; gradients are scaled'
    if device.type == 'cpu' and cpu_has_bfloat16():
        # Below this width casting costs about what the faster matmuls save.
        if n_embd >= 192:
            return 'bfloat16', 'in hardware'
        return 'float32', 'the model is too narrow for bfloat16 to gain much'
    return 'float32', 'no bfloat16 in hardware' if device.type == 'cpu' else 'the safe choice here'


def choose_compile(wanted, device):
    """'auto', True, False or 'blocks' → (what it becomes, why). Raises UserError where it cannot
    work."""
    if wanted in (True, 'blocks') and (problem := build_problem(device)):
        raise UserError(f'compile={wanted}: {problem}; or give --compile=False')
    if wanted != 'auto':
        return wanted, 'as asked'
    if device.type != 'cuda':
        return False, f'gains nothing on {device.type}'
    from torch.utils._triton import has_triton
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:  # "Supported Hardware" of https://github.com/triton-lang/triton
        return False, 'Triton, which compiles for GPUs, supports compute capability 8.0 and ' \
                      f'newer, and this is {major}.{minor}'
    if not has_triton():
        return False, 'Triton, which compiles for GPUs, is not installed here'
    if problem := build_problem(device):
        return False, problem
    return True, 'CUDA; the first evaluation and step wait for it'


def build_problem(device):
    """Why torch.compile cannot build code for a device here, with the fix; None if it can. For a
    CPU it writes C++, and on a GPU Triton starts its kernels from C. So this builds and loads an
    empty extension of Python, in the folder that torch.compile uses."""
    if device.type == 'mps' or sys.platform == 'win32':
        return None  # they build in other ways
    language, variable, usual = 'C', 'CC', next(filter(shutil.which, ('gcc', 'clang')), 'gcc')
    if device.type == 'cpu':
        language, variable, usual = 'C++', 'CXX', 'g++'
    compiler = os.environ.get(variable) or usual
    fix = f'install {usual} and the headers of Python, or set {variable} to a compiler'
    if not shutil.which(compiler):
        return f'no {language} compiler found ({compiler}): {fix}'
    command = [compiler, '-x', language.lower(), '-', '-shared', '-fPIC',
               f'-I{sysconfig.get_path("include", "posix_prefix")}', '-o']
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir  # makes the folder
        with TemporaryDirectory(dir=cache_dir()) as folder:
            subprocess.run([*command, f'{folder}/empty.so'], input='#include <Python.h>\n',
                           errors='replace', capture_output=True, check=True)
            ctypes.CDLL(f'{folder}/empty.so')
    except subprocess.CalledProcessError as e:
        message = re.search('.*error.*|$', e.stderr)[0] or 'no message'
        return f'{compiler} failed ({message}): {fix}'
    except OSError as e:
        return f'{one_line(e)}: set TORCHINDUCTOR_CACHE_DIR to a folder where programs may run'
    return None


def eager(compile):
    """A context in which compiled modules run eagerly. compile: whether there are any"""
    return torch.compiler.set_stance('force_eager') if compile else nullcontext()


def keep_compiled_graphs():
    """Let torch.compile keep its graphs on disk for the next start, also those with an
    autograd.Function, as the chunked loss is one."""
    from torch._functorch import config
    config.autograd_cache_allow_custom_autograd_functions = True


def autocast(device, dtype):
    """The context in which forward passes run, with matmuls in `dtype` and the rest in float32."""
    if dtype == 'float32':
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])


def prepare_device(device):
    """Set the switches of torch that make a GPU faster and its memory last longer."""
    if device.type == 'cuda':  # TF32 makes a step on a CPU a fifth slower, also with bfloat16
        torch.set_float32_matmul_precision('high')
        is_own = os.environ.keys() & {'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'}
        # WSL2's driver fails at the first allocation with it, and Windows has no such thing.
        if not is_own and sys.platform == 'linux' and 'microsoft' not in platform.release().lower():
            # Memory grows in place, which avoids most fragmentation.
            torch._C._accelerator_setAllocatorSettings('expandable_segments:True')


@contextmanager
def exact_matmul():
    """A context in which float32 matmuls are exact, even if prepare_device allowed TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_name(device):
    """As the driver calls a GPU, such as 'NVIDIA H100 80GB HBM3'; else the device's type."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


def synchronize(device):
    """Wait until the device has done all the work that it was given."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    elif device.type == 'mps':
        torch.mps.synchronize()


def device_memory(device, processes):
    """Bytes that each of the `processes` on this machine may take now: what is free on its GPU, or
    its share of what is free on the machine."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    return free_memory() // processes


def peak_memory_bytes(device):
    """Most memory held so far: by tensors on a CUDA device, by the process elsewhere; None where
    the system does not tell."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024  # macOS counts bytes, Linux KiB


def rng_state(device):
    """The state of torch's generators, as JSON."""
    state = {'cpu': torch.get_rng_state()}
    if device.type == 'cuda':
        state['cuda'] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(t.numpy().tobytes()).decode() for name, t in state.items()}


def set_rng_state(states, rank, device):
    """Continue the random numbers of `rank` from where `rng_state` was taken; a rank that the
    saved run did not have keeps those it was seeded with."""
    if rank < len(states):
        state = {name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
                 for name, text in states[rank].items()}
        torch.set_rng_state(state['cpu'])
        if device.type == 'cuda' and 'cuda' in state:
            torch.cuda.set_rng_state(state['cuda'], device)


def cpu_name():
    """'AMD EPYC 7B13', where the system tells."""
    with suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()  # elsewhere only the architecture


def machine_name(device):
    """'NVIDIA H100 80GB HBM3', or 'AMD EPYC, 2 of 8 cores'."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return f'{cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} cores'


# -----------------------------------------------------------------------------
# peak speed of GPUs


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
