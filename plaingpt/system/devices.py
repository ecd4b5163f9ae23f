"""The device: selection, precision, compilation, random state, peak FLOP/s and memory."""

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
from plaingpt.system.formatting import count_of, one_line
from plaingpt.system.machine import free_memory

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}

# -----------------------------------------------------------------------------
# device, precision, compilation: each choice is returned with the reason, which is printed


def choose_device(requested, local_rank=0):
    """'auto', 'cpu', 'cuda', 'cuda:N' or 'mps' → (torch.device, reason). Raises UserError."""
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    name, reason = requested, 'as requested'
    if requested == 'auto':
        if has_cuda:
            name = 'cuda'
        elif has_mps:
            name, reason = 'mps', 'an Apple GPU'
        else:
            name, reason = 'cpu', 'no GPU found'
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', name):
        raise UserError(f'device={name!r}: unknown device: use auto, cpu, cuda, cuda:0 or mps')
    device = torch.device(name)
    if (device.type == 'cuda' and not has_cuda) or (device.type == 'mps' and not has_mps):
        raise UserError(f'device={name}: not available here: use --device=cpu or --device=auto')
    if device.type == 'cuda':
        device = torch.device('cuda', local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            gpus = count_of(torch.cuda.device_count(), 'GPU')
            raise UserError(f'device=cuda:{device.index}: this machine has {gpus}: start at most '
                            'that many processes')
        torch.cuda.set_device(device)
        reason = device_name(device)
    return device, reason


def cpu_has_bfloat16():
    """Whether the CPU multiplies bfloat16 in hardware (x86 AVX-512/AMX, Arm)."""
    # An old torch does not report this; float32 is the safe choice then.
    capabilities = getattr(torch.cpu, 'get_capabilities', dict)()
    return any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))


def choose_dtype(requested, device, n_embd, training=False):
    """'auto' or a name in `DTYPES` → (name, reason): the autocast dtype."""
    if requested == 'bfloat16' and device.type == 'cpu' and not cpu_has_bfloat16():
        return requested, 'as requested, but not in hardware on this CPU: float32 is much faster'
    if requested != 'auto':
        return requested, 'as requested'
    if device.type == 'cuda':
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return 'bfloat16', 'in hardware'
        return 'float16', 'no bfloat16 in hardware; with loss scaling'
    if device.type == 'cpu' and cpu_has_bfloat16():
        # In a narrower model, casting costs about as much as faster matmuls save.
        if n_embd >= (64 if training else 192):
            return 'bfloat16', 'in hardware'
        return 'float32', 'model too narrow to benefit from bfloat16'
    if device.type == 'cpu':
        return 'float32', 'no bfloat16 in hardware'
    return 'float32', f'the safe choice on {device.type}'


def choose_compile(requested, device):
    """'auto', True, False or 'blocks' → (value for this device, reason). Raises UserError if
    compilation was requested and cannot work."""
    if requested in (True, 'blocks'):
        problem = build_problem(device)
        if problem:
            raise UserError(f'compile={requested}: {problem}; or use --compile=False')
    if requested != 'auto':
        return requested, 'as requested'
    if device.type != 'cuda':
        return False, f'no speedup on {device.type}'
    from torch.utils._triton import has_triton
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:  # "Supported Hardware" of https://github.com/triton-lang/triton
        return False, f'Triton needs compute capability 8.0 or newer; this GPU has {major}.{minor}'
    if not has_triton():
        return False, 'Triton is not installed'
    problem = build_problem(device)
    if problem:
        return False, problem
    return True, 'CUDA; compiles during the first evaluation and step'


def build_problem(device):
    """Why torch.compile cannot build code for a device here, with the fix, or None if it can. On a
    CPU it generates C++; on a GPU Triton launches kernels from C. So this builds and loads an empty
    Python extension in the cache folder of torch.compile."""
    if device.type == 'mps' or sys.platform == 'win32':
        return None  # these use other compilers
    if device.type == 'cpu':
        language, variable, default = 'C++', 'CXX', 'g++'
    else:
        language, variable = 'C', 'CC'
        default = next(filter(shutil.which, ('gcc', 'clang')), 'gcc')
    compiler = os.environ.get(variable) or default
    fix = f'install {default} and the Python headers, or set {variable} to a compiler'
    if not shutil.which(compiler):
        return f'no {language} compiler found ({compiler}): {fix}'
    command = [compiler, '-x', language.lower(), '-', '-shared', '-fPIC',
               f'-I{sysconfig.get_path("include", "posix_prefix")}', '-o']
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir  # creates the folder
        with TemporaryDirectory(dir=cache_dir()) as folder:
            subprocess.run([*command, f'{folder}/empty.so'], input='#include <Python.h>\n',
                           errors='replace', capture_output=True, check=True)
            ctypes.CDLL(f'{folder}/empty.so')
    except subprocess.CalledProcessError as e:
        message = re.search('.*error.*|$', e.stderr)[0] or 'no message'
        return f'{compiler} failed ({message}): {fix}'
    except OSError as e:
        return f'{one_line(e)}: set TORCHINDUCTOR_CACHE_DIR to a writable folder that is not ' \
               'mounted noexec'
    return None


def eager(compile):
    """A context in which compiled modules run eagerly. compile: whether any are compiled"""
    return torch.compiler.set_stance('force_eager') if compile else nullcontext()


def autocast(device, dtype):
    """The autocast context of forward passes: matmuls in `dtype`, the rest in float32."""
    if dtype == 'float32':
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])


def prepare_device(device):
    """On CUDA, allow TF32 and reduce memory fragmentation."""
    if device.type == 'cuda':  # on a CPU, TF32 makes a step a fifth slower, also with bfloat16
        torch.set_float32_matmul_precision('high')
        set_by_user = os.environ.keys() & {'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'}
        # Windows does not support expandable segments, and the driver of WSL2 fails with them.
        is_wsl = 'microsoft' in platform.release().lower()
        if not set_by_user and sys.platform == 'linux' and not is_wsl:
            torch._C._accelerator_setAllocatorSettings('expandable_segments:True')


@contextmanager
def exact_matmul():
    """A context without TF32, even if prepare_device allowed it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_name(device):
    """The driver's name of a GPU, such as 'NVIDIA H100 80GB HBM3', else the device's type."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


def synchronize(device):
    """Wait until the device has finished all queued work."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    elif device.type == 'mps':
        torch.mps.synchronize()


def device_memory(device, processes):
    """Bytes available to each of the `processes` on this machine: the free memory of its GPU, or
    its share of the machine's free memory."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    return free_memory() // processes


def peak_memory_bytes(device):
    """Peak memory so far: of tensors on a CUDA device, else of the process; None if unknown."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024  # macOS counts bytes, Linux KiB


class RandomState:
    """torch's random number generators of a process, for checkpoints."""

    def __init__(self, device, rank):
        self.device, self.rank = device, rank

    def state_dict(self):
        """{'rng': the state of this process's generators}, as JSON"""
        state = {'cpu': torch.get_rng_state()}
        if self.device.type == 'cuda':
            state['cuda'] = torch.cuda.get_rng_state(self.device)
        return {'rng': {name: base64.b64encode(t.numpy().tobytes()).decode()
                        for name, t in state.items()}}

    def load_state_dict(self, state):
        """Restore this rank's state from those of all ranks. A rank that the saved run did not have
        keeps its seed."""
        if self.rank >= len(state['rng']):
            return
        rng = {name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
               for name, text in state['rng'][self.rank].items()}
        torch.set_rng_state(rng['cpu'])
        if self.device.type == 'cuda' and 'cuda' in rng:
            torch.cuda.set_rng_state(rng['cuda'], self.device)


def cpu_name():
    """'AMD EPYC 7B13', if the system reports it."""
    with suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text(errors='replace').splitlines():
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


# Dense bfloat16/float16 FLOP/s of the tensor cores with float32 accumulation, from NVIDIA's data
# sheets. For B200 and B300 those list eight GPUs with sparsity (HGX: 36 PFLOPS). For RTX 50 they
# list AI TOPS, which count sparse FP4 and are 16 times as many (5090: 3352; its whitepaper has
# both). Names are CUDA's, in capitals, without IGNORED_WORDS.
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

# MFU of GPT-2 124M by optimizer, measured over whole steps of 64 sequences of 1,024 tokens in
# bfloat16, and memory in GiB. docs/benchmarks.md has the commands and the date.
MEASURED = {'H100': ({'adamw': 0.453, 'normuon': 0.398}, 79.2)}

# Words of a name that do not affect the peak. Any other word, such as Ti, Laptop, D or MIG, names
# another GPU, or a part of one.
IGNORED_WORDS = re.compile(r'NVIDIA|TESLA|GEFORCE|RTX|SXM\d*|HBM\d\w*|\d+GB|GENERATION|AC')


def mfu(flops_per_s, device_name, dtype):
    """Model FLOPs utilization: the achieved share of the device's peak, or None if unknown."""
    peak = peak_flops(device_name, dtype)
    return flops_per_s / peak if peak else None


def peak_flops(device_name, dtype):
    """Peak FLOP/s of a device in the training dtype, or None if unknown."""
    words = [word for word in re.split(r'[\s-]+', device_name.upper())
             if not IGNORED_WORDS.fullmatch(word)]
    return None if dtype == 'float32' else PEAKS.get(' '.join(words))
