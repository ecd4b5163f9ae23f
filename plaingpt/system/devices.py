"""The device: selection, precision, compilation, random state, peak FLOP/s and memory."""

import base64
import os
import platform
import re
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import one_line
from plaingpt.system.machine import free_memory

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}

# -----------------------------------------------------------------------------
# device, precision, compilation: each choice is returned with the reason, which is printed


def choose_device(requested, local_rank=0):
    """'auto', 'cpu', 'cuda', 'cuda:N' or 'mps' → (torch.device, reason). Raises UserError."""
    # With a driver that is too old for this torch, device_count() may not be 0.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_mps = torch.backends.mps.is_available()
    name, reason = requested, 'as requested'
    if requested == 'auto' and gpus:
        name = 'cuda'
    elif requested == 'auto' and has_mps:
        name, reason = 'mps', 'an Apple GPU'
    elif requested == 'auto':
        name, reason = 'cpu', 'no GPU found'
    if name == 'cuda':
        name = f'cuda:{local_rank}'  # one process per GPU
    available = ['cpu', *(f'cuda:{index}' for index in range(gpus)), *(['mps'] if has_mps else [])]
    if name not in available:
        raise UserError(f'device={name}: not available; this machine has {", ".join(available)}: '
                        'use one of these, or auto')
    device = torch.device(name)
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        reason = device_name(device)
    return device, reason


def cpu_has_bfloat16():
    """Whether the CPU multiplies bfloat16 in hardware (x86 AVX-512/AMX, Arm)."""
    # An old torch does not report this; then float32 is the safe choice.
    capabilities = getattr(torch.cpu, 'get_capabilities', dict)()
    return any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))


def choose_dtype(requested, device, n_embd, training=False):
    """'auto' or a name in `DTYPES` → (name, reason): the autocast dtype."""
    if requested == 'bfloat16' and device.type == 'cpu' and not cpu_has_bfloat16():
        return requested, 'as requested; this CPU has no bfloat16 hardware: float32 is much faster'
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
    compilation was requested and does not work."""
    if requested is False:
        return False, 'as requested'
    if requested == 'auto' and device.type != 'cuda':
        return False, f'no speedup on {device.type}'
    if requested == 'auto':
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:  # "Supported Hardware" of https://github.com/triton-lang/triton
            return False, 'Triton needs compute capability 8.0 or newer; this GPU has ' \
                          f'{major}.{minor}'
    problem = compile_problem(device)
    if requested == 'auto':
        return not problem, problem or 'CUDA; compiles during the first evaluation and step'
    if problem:
        raise UserError(f'compile={requested}: {problem}; or use --compile=False')
    return requested, 'as requested'


def compile_problem(device):
    """Why torch.compile does not work here, with the fix, or None: it compiles a small function."""
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as e:
        return f'{one_line(e)}: torch.compile needs a C++ compiler (CXX), on a GPU a C compiler ' \
               '(CC), the Python headers, and a writable cache folder that is not mounted noexec ' \
               '(TORCHINDUCTOR_CACHE_DIR)'
    return None


def eager(compile):
    """A context in which compiled modules run eagerly. compile: whether any are compiled"""
    return torch.compiler.set_stance('force_eager') if compile else nullcontext()


def autocast(device, dtype):
    """The autocast context of forward passes: matmuls in `dtype`, reductions in float32."""
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
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


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


def machine_name(device):
    """'NVIDIA H100 80GB HBM3', or 'AMD EPYC 7B13, 2 of 8 cores'."""
    if device.type == 'cuda':
        return device_name(device)
    cpu = platform.processor() or platform.machine()  # on Linux only the architecture
    with suppress(OSError):
        cpuinfo = Path('/proc/cpuinfo').read_text(errors='replace')
        cpu = re.search('model name.*: (.*)|$', cpuinfo)[1] or cpu
    return f'{cpu}, {torch.get_num_threads()} of {os.cpu_count()} cores'


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
