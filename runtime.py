"""What this machine is: device, precision, processes, seed."""

import os
import signal
import socket
import sys
import time
import uuid
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from errors import UserError
from locks import locked

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}

# -----------------------------------------------------------------------------
# processes: one process is a world of size 1, and every helper is then a no-op


@dataclass(frozen=True)
class World:
    """Who this process is among those that torchrun started."""

    rank: int = 0  # among all processes of the job
    local_rank: int = 0  # among those of this machine; also the number of its GPU
    size: int = 1  # processes in the job
    local_size: int = 1  # processes on this machine
    launched: bool = False  # True under torchrun, also when it started a single process

    @property
    def is_main(self):
        return self.rank == 0


def launched_world():
    """The `World` that torchrun's environment variables describe."""
    env = os.environ
    if not {'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'} <= set(env):
        return World()  # some clusters set a RANK of their own
    return World(
        rank=int(env['RANK']),
        local_rank=int(env['LOCAL_RANK']),
        size=int(env['WORLD_SIZE']),
        local_size=int(env['LOCAL_WORLD_SIZE']),
        launched=True,
    )


def say(line):
    """Print a line, from rank 0 only."""
    if launched_world().is_main:
        print(line, flush=True)


@contextmanager
def process_group(world, device, backend='auto'):
    """Join the job's process group (nccl on CUDA, gloo elsewhere) and leave it at the end."""
    if not world.launched:
        yield
        return
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    if backend == 'nccl' and device.type != 'cuda':
        raise UserError(f'backend=nccl needs a CUDA device, not {device.type}: leave it at auto')
    # Binding the device lets NCCL set its communicators up at once instead of guessing later.
    dist.init_process_group(backend, store=fresh_store(world), rank=world.rank,
                            world_size=world.size,
                            device_id=device if device.type == 'cuda' else None)
    yield
    # Not in a `finally`: a rank that fails must exit at once, so that torchrun stops the others,
    # and NCCL's teardown would first wait for collectives that never come.
    dist.destroy_process_group()


def fresh_store(world):
    """torchrun's key-value store, under a prefix that no earlier attempt of the job has used.

    The store outlives a restart (--max-restarts), and a process that reads the address which an
    earlier attempt left there never finds its peer. So rank 0 invents a prefix, and tells it to
    those who say hello until all of this attempt are here.
    """
    store, _, _ = next(dist.rendezvous('env://'))
    name = uuid.uuid4().hex
    if world.is_main:
        prefix = name
        while store.add(f'here/{prefix}', 0) < world.size - 1:
            for rank in range(1, world.size):
                if store.check([f'hello/{rank}']):
                    store.set(f'welcome/{store.get(f"hello/{rank}").decode()}', prefix)
            time.sleep(0.01)
    else:
        store.set(f'hello/{world.rank}', name)
        prefix = store.get(f'welcome/{name}').decode()  # waits until rank 0 has set it
        store.add(f'here/{prefix}', 1)
    return dist.PrefixStore(prefix, store)


def host_group():
    """A new group in which the processes talk without their devices, or None when alone. All
    processes must ask for their groups in the same order."""
    return dist.new_group(backend='gloo') if dist.is_initialized() else None


def all_gather(value, group):
    """The `value` (any Python object) of every process of a host_group, by rank."""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def barrier():
    """Wait for all processes."""
    if dist.is_initialized():
        dist.barrier()


def all_reduce_mean(tensor):
    """Replace `tensor` by its mean over all processes, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return tensor


def all_reduce_min(number, device):
    """The smallest of all processes' whole numbers, on each of them."""
    if not dist.is_initialized():
        return number
    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor)


def make_writable(folder):
    """Make out_dir, and see that files can be made in it. Raises UserError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder, '.writable')
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise UserError(f'out_dir={folder}: cannot write there: {e.strerror}') from None


@contextmanager
def alone_in(folder, wanted=True):
    """Make out_dir, see that files can be made in it, and keep other runs out while in here.

    Raises UserError.
    """
    if not wanted:
        yield
        return
    make_writable(folder)
    with locked(folder, f'out_dir={folder}: a run is writing there: wait until it is done, stop '
                        'it, or choose another --out_dir'):
        yield


def check_shared(folder, world, group):
    """See that all processes write into one folder. Raises UserError where a host has its own."""
    mark = folder / f'.shared-{os.getpid()}'
    if world.is_main and world.size > 1:
        mark.touch()
    mark = Path(all_gather(str(mark), group)[0])
    patience = time.monotonic() + 10  # network file systems show new files with a delay
    while world.size > 1 and not mark.exists() and time.monotonic() < patience:
        time.sleep(0.1)
    hosts = all_gather((socket.gethostname(), world.size == 1 or mark.exists()), group)
    if world.is_main and world.size > 1:
        mark.unlink()
    blind = sorted({host for host, sees in hosts if not sees})
    if blind:
        raise UserError(f'out_dir={folder} is not the same folder on {", ".join(blind)} as on '
                        f'{hosts[0][0]}: every host writes its share of the checkpoints, so it '
                        'must be on a disk that all of them share')


class StopRequest:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a wish to stop after this step, which all processes
    learn of at the same step. A second SIGINT leaves at once."""

    SIGNALS = tuple(getattr(signal, name) for name in ('SIGTERM', 'SIGINT', 'SIGUSR1')
                    if hasattr(signal, name))

    def __init__(self):
        self.group = host_group()
        self.signal = None
        self.received_at = 0.0

    def __enter__(self):
        self.previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number, _):
        # Ctrl-C under torchrun arrives twice, from the terminal and from torchrun: that is one.
        again = self.signal == signal.SIGINT and time.monotonic() - self.received_at > 1
        if number == signal.SIGINT and again:
            os._exit(130)
        self.signal, self.received_at = number, time.monotonic()

    def wanted(self):
        """The name of the signal that any of the processes received, or None; the same on all."""
        number = self.signal or 0
        if self.group is not None:
            received = torch.tensor(int(number))
            dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group)
            number = received.item()
        return signal.Signals(number).name if number else None


# -----------------------------------------------------------------------------
# device and precision: each choice comes with the reason that is printed beside it


def choose_device(wanted, local_rank=0):
    """'auto', 'cpu', 'cuda', 'cuda:N' or 'mps' → (torch.device, why). Raises UserError."""
    if wanted == 'auto':
        if torch.cuda.is_available():
            wanted, why = 'cuda', 'CUDA is available'
        elif torch.backends.mps.is_available():
            wanted, why = 'mps', 'no CUDA, but an Apple GPU'
        else:
            wanted, why = 'cpu', 'no GPU found'
    else:
        why = 'as asked'
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f'device={wanted!r} is unknown: use auto, cpu, cuda, cuda:0 or mps') \
            from None
    if device.type == 'cuda':
        if not torch.cuda.is_available():
            raise UserError(f'device={wanted}: no CUDA device here; use --device=cpu or '
                            '--device=auto')
        device = torch.device('cuda', local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise UserError(f'device=cuda:{device.index}: this machine has '
                            f'{torch.cuda.device_count()} GPUs; start no more processes than that')
        torch.cuda.set_device(device)
        why = device_name(device)
    elif device.type == 'mps' and not torch.backends.mps.is_available():
        raise UserError('device=mps: no Apple GPU here; use --device=cpu or --device=auto')
    elif device.type not in ('cpu', 'mps'):
        raise UserError(f'device={wanted!r} is not supported: use auto, cpu, cuda, cuda:0 or mps')
    return device, why


def cpu_has_bfloat16():
    """True where the processor multiplies bfloat16 in hardware (x86 AVX-512/AMX, Arm)."""
    # Where torch is too old to know, float32 is the safe answer.
    capabilities = getattr(torch.cpu, 'get_capabilities', dict)()
    return any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))


def choose_dtype(wanted, device, n_embd):
    """'auto' or a name in `DTYPES` → (name, why): the precision that autocast computes in."""
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
    """'auto', True or False → (bool, why)."""
    if wanted != 'auto':
        return wanted, 'as asked'
    if device.type == 'cuda':
        return True, 'CUDA'
    return False, f'gains nothing on {device.type}'


def autocast(device, dtype):
    """The context in which forward passes run: matmuls in `dtype`, the rest in float32."""
    if dtype == 'float32':
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])


def seed_everything(seed, rank=0):
    """Seed torch, a different stream for each rank (they must not share dropout masks)."""
    torch.manual_seed(seed + rank)


def use_fast_matmul():
    """Let float32 matmuls use TF32 tensor cores, where there are any. On a CPU the same setting
    costs a fifth of a step, also with bfloat16."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision('high')


def use_expandable_segments(device):
    """Let CUDA's memory grow in place, which avoids most fragmentation, unless the user's
    environment says how to allocate."""
    asked = os.environ.keys() & {'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'}
    if device.type == 'cuda' and not asked:
        torch._C._accelerator_setAllocatorSettings('expandable_segments:True')


def device_name(device):
    """As the driver calls a GPU, such as 'NVIDIA H100 80GB HBM3'; else the device's type."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


def free_memory():
    """Bytes of memory that are free on this machine, or None where the system does not tell."""
    try:
        return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (ValueError, OSError, AttributeError):
        return None


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
