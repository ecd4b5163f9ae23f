"""The processes of a job: who this one is, how they talk, when they stop.

One process is a world of size 1, and every helper here is then a no-op.
"""

import os
import signal
import socket
import time
import uuid
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from plaingpt.system.errors import UserError


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


def print0(line):
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


def check_shared(folder, world, group):
    """See that all processes write into one folder. Raises UserError where a host has its own."""
    mark = folder / f'.shared-{os.getpid()}'
    if world.is_main and world.size > 1:
        mark.touch()
    mark = Path(all_gather(str(mark), group)[0])
    deadline = time.monotonic() + 10  # network file systems show new files with a delay
    while world.size > 1 and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts = all_gather((socket.gethostname(), world.size == 1 or mark.exists()), group)
    if world.is_main and world.size > 1:
        mark.unlink()
    blind = sorted({host for host, sees in hosts if not sees})
    if blind:
        raise UserError(f'out_dir={folder} is not the same folder on {", ".join(blind)} as on '
                        f'{hosts[0][0]}: every host writes its share of the checkpoints, so it '
                        'must be on a disk that all of them share')


def wrap_model(model, device, compile, world):
    """→ (model to evaluate with, model to train with): compiled, then under DDP."""
    compiled = torch.compile(model) if compile else model
    if world.size == 1:
        return compiled, compiled
    return compiled, DDP(compiled, device_ids=[device.index] if device.type == 'cuda' else None)


def gradient_sync(model, last):
    """The context of a micro-batch: gradients travel between processes with the last one only."""
    return model.no_sync() if isinstance(model, DDP) and not last else nullcontext()


class StopRequest:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a wish to stop after this step, which all processes
    learn of at the same step. A second SIGINT leaves at once."""

    SIGNALS = tuple(getattr(signal, name) for name in ('SIGTERM', 'SIGINT', 'SIGUSR1')
                    if hasattr(signal, name))

    NAMES = tuple(number.name for number in SIGNALS)

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
