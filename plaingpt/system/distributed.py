"""The processes of a job: who this one is, how they talk, when they stop.

One process is a world of size 1: collectives then return what they are given.
"""

import os
import signal
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from plaingpt.system.errors import UserError, print_line

TIMEOUT = timedelta(seconds=600)  # how long a process waits for the others
host_group = None  # of gloo_group; process_group makes it


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
    names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')
    if not os.environ.keys() >= {*names}:
        return World()  # some clusters set a RANK of their own
    return World(*(int(os.environ[name]) for name in names), launched=True)


def print0(line):
    """Print a line, from rank 0 only."""
    if launched_world().is_main:
        print_line(line)


def gloo_group(own=False):
    """The process group for messages that pass through no GPU; None in a single process. own: make
    a new one, for a thread beside the main one; all processes must call this together."""
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


# -----------------------------------------------------------------------------
# sharded tensors (DTensors, of FSDP2): each process has some rows; other tensors are whole


def is_sharded(tensor):
    return hasattr(tensor, 'full_tensor')  # torch takes a second to import its DTensor


def full_tensor(tensor):
    """The whole tensor. If it is sharded, all processes must call this."""
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
    """The run stops in the middle of an evaluation."""


class StopRequest:
    """Turns SIGTERM, SIGHUP, SIGINT and SIGUSR1 into a request to stop, which all processes see at
    the same point. A second SIGINT exits at once. Signals that are ignored (nohup) stay ignored."""

    SIGNALS = tuple(getattr(signal, name) for name in ('SIGTERM', 'SIGHUP', 'SIGINT', 'SIGUSR1')
                    if hasattr(signal, name))
    NAMES = tuple(number.name for number in SIGNALS)

    def __init__(self):
        self.group = gloo_group()
        self.signal = None  # the one that this process received
        self.received_at = 0.0

    def __enter__(self):
        self.previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS
                         if signal.getsignal(number) not in (signal.SIG_IGN, None)}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number, _):
        # Under torchrun one Ctrl-C arrives twice: from the terminal and from torchrun.
        now, before = time.monotonic(), self.signal
        if number == before == signal.SIGINT and now - self.received_at > 1:
            os._exit(130)
        self.signal, self.received_at = number, now
        if number != before:
            again = ', again to leave at once' if number == signal.SIGINT else ''
            with suppress(RuntimeError):  # in the middle of a print
                print0(f'{signal.Signals(number).name}: stopping after this step{again}')

    def agreed_signal(self):
        """The name of the signal that any of the processes received, or None; the same on all.
        All must call this at the same points."""
        number = int(self.signal or 0)
        if self.group is not None:
            received = torch.tensor(number)
            dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group)
            number = int(received)
        return signal.Signals(number).name if number else None

    def raise_if_stopped(self):
        """Raise Stopped if the run is to stop, on all processes."""
        if self.agreed_signal():
            raise Stopped


# -----------------------------------------------------------------------------
# a job of several processes


@contextmanager
def process_group(world, device, backend='auto'):
    """Join the job's process group (nccl on CUDA, gloo elsewhere) and leave it at the end. Raises
    UserError where another process does not come, is lost, or is silent for TIMEOUT."""
    global host_group
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    try:
        store, rank, size = next(dist.rendezvous('env://', timeout=TIMEOUT))
        if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
            # torchrun's store outlives a restart, and torch 2.13 would find in it the addresses of
            # processes that have ended, and wait for them (pytorch/pytorch#135712).
            store = dist.PrefixStore(os.environ['TORCHELASTIC_RESTART_COUNT'], store)
        # Binding the device lets NCCL set its communicators up at once instead of guessing later.
        dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                                timeout=TIMEOUT,
                                device_id=device if device.type == 'cuda' else None)
        host_group = dist.group.WORLD if backend == 'gloo' \
            else gloo_group(own=True)
        yield
        barrier()  # one that left earlier would look lost to those that still work
    except (RuntimeError, ValueError) as e:
        # gloo's errors have no type of their own
        of_network = isinstance(e, (dist.DistNetworkError, dist.DistStoreError))
        if not of_network and not any(word in str(e) for word in (
                'gloo/transport', 'rendezvous', 'caused pair closure')):
            raise
        what = str(e).partition('\n')[0]
        raise UserError(f'rank {world.rank} of {world.size} did not meet another process, or lost '
                        f'it ({what}): see what it printed; torchrun --max-restarts=3 with '
                        '--init_from=auto goes on from the last checkpoint') from None
    # Not in a `finally`: a rank that fails must exit at once, so that torchrun stops the others,
    # and NCCL's teardown would first wait for collectives that never come.
    dist.destroy_process_group()
    host_group = None


def check_shared(folder, world, group):
    """See that all processes write into one folder: each writes its share of the checkpoints.
    Raises UserError where a host has a folder of its own."""
    mark = folder / f'.shared-{all_gather(os.getpid(), group)[0]}'
    if world.is_main:
        mark.touch()
    barrier()
    deadline = time.monotonic() + 10  # network file systems show new files with a delay
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = all_gather((socket.gethostname(), mark.exists()), group)
    blind = {host for host, sees in seen if not sees}
    if world.is_main:
        mark.unlink()
    if blind:
        raise UserError(f'out_dir={folder} is not the same folder on {", ".join(sorted(blind))} as '
                        'on the host of rank 0: it must be on a disk that all hosts share')
