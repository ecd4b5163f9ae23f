"""The processes of a job: who this one is, how they talk, when they stop.

One process is a world of size 1: collectives then return what they are given.
"""

import os
import re
import signal
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from plaingpt.system.errors import UserError, print_line

TIMEOUT = timedelta(seconds=600)  # how long a process waits for the others
host_group = None  # of gloo_group; process_group makes it
NETWORK_ERRORS = dist.DistNetworkError, dist.DistStoreError  # gloo's have no type of their own


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
    rank, local_rank, size, local_size = map(
        env_int, ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'))
    if rank >= size:
        raise UserError(f'RANK={rank} is no rank of WORLD_SIZE={size}: they count from 0')
    return World(rank, local_rank, size, local_size, launched=True)


def env_int(name):
    """An environment variable that is a whole number. Raises UserError."""
    if not os.environ[name].isdecimal():
        raise UserError(f'{name}={os.environ[name]!r} in the environment: expected a whole number')
    return int(os.environ[name])


def print0(line):
    """Print a line, from rank 0 only."""
    if launched_world().is_main:
        print_line(line)


@contextmanager
def process_group(world, device, backend='auto'):
    """Join the job's process group (nccl on CUDA, gloo elsewhere) and leave it at the end. Raises
    UserError where another process does not come, is lost, or is silent for TIMEOUT."""
    global host_group
    if not world.launched:
        yield
        return
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    if backend == 'nccl' and device.type != 'cuda':
        raise UserError(f'backend=nccl needs a CUDA device, not {device.type}: leave it at auto')
    with explain_lost_processes():
        meet(world, device, backend)
        host_group = dist.group.WORLD if backend == 'gloo' else gloo_group(own=True)
        yield
        barrier()  # one that left earlier would look lost to those that still work
        # Not in a `finally`: a rank that fails must exit at once, so that torchrun stops the
        # others, and NCCL's teardown would first wait for collectives that never come.
        dist.destroy_process_group()
        host_group = None


def meet(world, device, backend):
    """Find the other processes and set up the process group, as torch does by the environment."""
    try:
        store, rank, size = next(dist.rendezvous('env://', timeout=TIMEOUT))
        if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
            # torchrun's store outlives a restart, and torch 2.13 would find in it the addresses of
            # processes that have ended, and wait for them (pytorch/pytorch#135712).
            store = dist.PrefixStore(os.environ['TORCHELASTIC_RESTART_COUNT'], store)
        # Binding the device lets NCCL set its communicators up at once instead of guessing later.
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT,
                                device_id=device if device.type == 'cuda' else None)
    except (ValueError, *NETWORK_ERRORS) as e:
        address, port = (os.environ.get(key) for key in ('MASTER_ADDR', 'MASTER_PORT'))
        raise UserError(f'rank {world.rank} of {world.size} did not meet the others at MASTER_ADDR='
                        f'{address}, MASTER_PORT={port} ({first_line(e)}): start all processes, '
                        'with the address of rank 0 and a port that is free there, or let torchrun '
                        'do so') from None


@contextmanager
def explain_lost_processes():
    """Turn the error of a collective in here whose peer is gone or silent into a UserError."""
    try:
        yield
    except RuntimeError as e:
        if not isinstance(e, NETWORK_ERRORS) and 'gloo/transport' not in str(e):
            raise
        raise UserError(f'lost another process, or it did not answer in time ({first_line(e)}): '
                        'see what it printed; torchrun --max-restarts=3 with --init_from=auto goes '
                        'on from the last checkpoint') from None


def first_line(error):
    """What torch says, without the place in its source, its advice and the stack."""
    return re.split(r'\n|\. This is', re.sub(r'^\[\S+\] ', '', str(error)))[0]


def gloo_group(own=False):
    """The group in which the processes talk without their devices, or None when alone. It connects
    each process with each. own: a new one, for a thread beside the main one; all must ask alike."""
    if own and dist.is_initialized():
        return dist.new_group(backend='gloo', timeout=TIMEOUT)
    return host_group


def all_gather(value, group):
    """The `value` (any Python object) of every process of a gloo_group, by rank."""
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
    if world.size == 1:
        return
    mark = folder / f'.shared-{os.getpid()}'
    if world.is_main:
        mark.touch()
    mark = Path(all_gather(str(mark), group)[0])
    deadline = time.monotonic() + 10  # network file systems show new files with a delay
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts = all_gather((socket.gethostname(), mark.exists()), group)
    if world.is_main:
        mark.unlink()
    blind = sorted({host for host, sees in hosts if not sees})
    if blind:
        raise UserError(f'out_dir={folder} is not the same folder on {", ".join(blind)} as on '
                        f'{hosts[0][0]}: every host writes its share of the checkpoints, so it '
                        'must be on a disk that all of them share')


# -----------------------------------------------------------------------------
# tensors of which each process has some rows (DTensors, of FSDP2); all else is whole everywhere


def is_sharded(tensor):
    return hasattr(tensor, 'full_tensor')  # torch takes a second to import its DTensor


def full_tensor(tensor):
    """All of a tensor. Where it is sharded, all processes must ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def held_rows(n, rank, size):
    """→ (first, count): which of a tensor's n rows a process holds, as torch.chunk divides them"""
    share = -(-n // size)
    first = min(rank * share, n)
    return first, min(share, n - first)


def local_rows(tensor):
    """→ (the rows of a tensor that this process has, the number of the first of them)"""
    if not is_sharded(tensor):
        return tensor, 0
    mesh = tensor.device_mesh
    return tensor.to_local(), held_rows(len(tensor), mesh.get_local_rank(), mesh.size())[0]


def all_reduce_norms(norms, mesh):
    """Norms of what each process has of some tensors (n,) → the norms of the whole tensors.
    mesh: of the tensors"""
    squares = norms.square()
    dist.all_reduce(squares, group=mesh.get_group())
    return squares.sqrt()


# -----------------------------------------------------------------------------
# signals


class Stopped(Exception):
    """Work was left because the run is to stop."""


class StopRequest:
    """Turns SIGTERM, SIGHUP, SIGINT and SIGUSR1 into a wish to stop, which all processes learn of
    at the same point. A second SIGINT leaves at once. What is ignored (nohup) stays ignored."""

    SIGNALS = tuple(getattr(signal, name) for name in ('SIGTERM', 'SIGHUP', 'SIGINT', 'SIGUSR1')
                    if hasattr(signal, name))

    NAMES = tuple(number.name for number in SIGNALS)

    def __init__(self):
        self.group = gloo_group()
        self.signal = None  # that this process received
        self.received_at = 0.0
        self.agreed = None  # the name of the one that all know of
        self.asked_at = time.monotonic()
        self.steps = self.steps_left = 1  # between two questions in training; until the next

    def __enter__(self):
        self.previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS
                         if signal.getsignal(number) not in (signal.SIG_IGN, None)}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number, _):
        # Ctrl-C under torchrun arrives twice, from the terminal and from torchrun: that is one.
        second = self.signal == signal.SIGINT and time.monotonic() - self.received_at > 1
        if number == signal.SIGINT and second:
            os._exit(130)
        is_new = number != self.signal
        self.signal, self.received_at = number, time.monotonic()
        if is_new:
            with suppress(RuntimeError):  # in the middle of a print
                print0(f'{signal.Signals(number).name}: stopping after '
                       + ('this step' if self.group is None else 'a few steps')
                       + ', again to leave at once' * (number == signal.SIGINT))

    def agreed_signal(self):
        """The name of the signal that any of the processes received, or None; the same on all.
        They must all ask at the same points, as for any collective."""
        number = self.signal or 0
        if self.group is not None:
            received = torch.tensor(int(number))
            dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group)
            number = received.item()
        self.agreed = signal.Signals(number).name if number else None
        return self.agreed

    def signal_at_step(self):
        """As agreed_signal, for each step of training. Several processes ask about once a second;
        between, the answer is None."""
        if self.group is None or self.agreed:
            return self.agreed_signal()
        self.steps_left -= 1
        if self.steps_left > 0:
            return None
        now = time.monotonic()
        in_a_second = int(self.steps / max(now - self.asked_at, 1e-3))
        self.steps = self.steps_left = max(1, min(all_gather(in_a_second, self.group)))
        self.asked_at = now
        return self.agreed_signal()

    @contextmanager
    def until_stopped(self):
        """A context that ends, without an error, where raise_if_stopped raises Stopped in it."""
        with suppress(Stopped):
            yield

    def raise_if_stopped(self):
        """Raise Stopped where a stop is wanted, on all processes alike."""
        if self.agreed_signal():
            raise Stopped
