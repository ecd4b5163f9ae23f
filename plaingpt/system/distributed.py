"""Processes of a job: ranks, process groups, collectives, and signals to stop.

A single process is a world of size 1, in which collectives return their input.
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

TIMEOUT = timedelta(seconds=600)  # of collectives and of the rendezvous
host_group = None  # returned by gloo_group; created by process_group


@dataclass(frozen=True)
class World:
    """The rank of this process and the size of the job, as set by torchrun."""

    rank: int = 0  # among all processes of the job
    local_rank: int = 0  # among the processes on this machine; also the index of its GPU
    size: int = 1  # processes in the job
    local_size: int = 1  # processes on this machine
    launched: bool = False  # whether torchrun started it, even as a single process

    @property
    def is_main(self):
        return self.rank == 0


def launched_world():
    """The `World` in torchrun's environment variables."""
    names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')
    if not os.environ.keys() >= {*names}:
        return World()  # some clusters set just RANK
    return World(*(int(os.environ[name]) for name in names), launched=True)


def print0(line):
    """Print a line, from rank 0 only."""
    if launched_world().is_main:
        print_line(line)


def gloo_group(own=False):
    """The process group for CPU objects, or None in a single process. own: create a new group, for
    use from another thread; all processes must call this together."""
    if own and dist.is_initialized():
        return dist.new_group(backend='gloo', timeout=TIMEOUT)
    return host_group


def all_gather(value, group):
    """[value] of all processes of a gloo_group, by rank; any Python object."""
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
# sharded tensors (DTensors of FSDP2): each process has some of the rows


def is_sharded(tensor):
    return hasattr(tensor, 'full_tensor')  # importing DTensor to compare types takes a second


def full_tensor(tensor):
    """The unsharded tensor. If it is sharded, all processes must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def held_rows(n, rank, size):
    """→ (first, count): the rows of an n-row tensor on a rank, split as by torch.chunk"""
    share = -(-n // size)
    first = min(rank * share, n)
    return first, min(share, n - first)


def local_rows(tensor):
    """→ (this process's rows of a tensor, index of the first one)"""
    if not is_sharded(tensor):
        return tensor, 0
    mesh = tensor.device_mesh
    return tensor.to_local(), held_rows(len(tensor), mesh.get_local_rank(), mesh.size())[0]


def all_reduce_norms(norms, mesh):
    """Norms (n,) of this process's shards of n tensors → the norms of the full tensors. mesh: of
    the tensors"""
    squares = norms.square()
    dist.all_reduce(squares, group=mesh.get_group())
    return squares.sqrt()


# -----------------------------------------------------------------------------
# signals


class Stopped(Exception):
    """Raised when the run stops during an evaluation."""


class StopRequest:
    """Turns SIGTERM, SIGHUP, SIGINT and SIGUSR1 into a request to stop, which all processes see at
    the same step. A second SIGINT exits immediately. Ignored signals (nohup) stay ignored."""

    SIGNALS = tuple(getattr(signal, name) for name in ('SIGTERM', 'SIGHUP', 'SIGINT', 'SIGUSR1')
                    if hasattr(signal, name))
    NAMES = tuple(number.name for number in SIGNALS)

    def __init__(self):
        self.group = gloo_group()
        self.signal = None  # the one that this process received
        self.received_at = 0.0

    def __enter__(self):
        self.handlers = {}  # the previous ones
        for number in self.SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self.handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _receive(self, number, _):
        # Under torchrun one Ctrl-C arrives twice: from the terminal and from torchrun.
        now = time.monotonic()
        previous = self.signal
        if number == previous == signal.SIGINT and now - self.received_at > 1:
            os._exit(130)
        self.signal = number
        self.received_at = now
        if number != previous:
            hint = ' (Ctrl-C again to exit immediately)' if number == signal.SIGINT else ''
            with suppress(RuntimeError):  # a print was interrupted
                print0(f'{signal.Signals(number).name}: stopping after this step{hint}')

    def agreed_signal(self):
        """The name of a signal that any process received, or None. Collective: all processes must
        call this at the same points."""
        number = int(self.signal or 0)
        if self.group is not None:
            received = torch.tensor(number)
            dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group)
            number = int(received)
        return signal.Signals(number).name if number else None

    def raise_if_stopped(self):
        """Raise Stopped on all processes if any received a signal."""
        if self.agreed_signal():
            raise Stopped


# -----------------------------------------------------------------------------
# jobs of several processes


@contextmanager
def process_group(world, device, backend='auto'):
    """Initialize the process group (nccl on CUDA, gloo elsewhere), and destroy it at the end.
    Raises UserError if another process does not join, ends, or hangs for TIMEOUT."""
    global host_group
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    try:
        store, rank, size = next(dist.rendezvous('env://', timeout=TIMEOUT))
        if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
            # torchrun's store survives a restart. It still has the addresses of the previous
            # processes, and torch 2.13 would wait for them (pytorch/pytorch#135712).
            store = dist.PrefixStore(os.environ['TORCHELASTIC_RESTART_COUNT'], store)
        # With device_id, NCCL initializes its communicators now, on the right device.
        dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                                timeout=TIMEOUT,
                                device_id=device if device.type == 'cuda' else None)
        host_group = dist.group.WORLD if backend == 'gloo' else gloo_group(own=True)
        yield
        barrier()  # a process that leaves early would look lost to the others
    except (RuntimeError, ValueError) as e:
        is_network_error = isinstance(e, (dist.DistNetworkError, dist.DistStoreError)) or any(
            text in str(e)  # errors of gloo have no type of their own
            for text in ('gloo/transport', 'rendezvous', 'caused pair closure'))
        if not is_network_error:
            raise
        reason = str(e).partition('\n')[0]
        raise UserError(f'rank {world.rank} of {world.size} could not reach another process, or '
                        f'lost it ({reason}): see the output of that process; torchrun '
                        '--max-restarts=3 with --init_from=auto resumes from the last checkpoint'
                        ) from None
    # Not in a `finally`: a failed rank must exit immediately, so that torchrun stops the others;
    # NCCL's teardown would first wait for collectives that never come.
    dist.destroy_process_group()
    host_group = None


def check_shared(folder, world, group):
    """Check that all processes see the same folder, since each writes its shards of a checkpoint.
    Raises UserError if a host does not."""
    marker = folder / f'.shared-{all_gather(os.getpid(), group)[0]}'
    if world.is_main:
        marker.touch()
    barrier()
    deadline = time.monotonic() + 10  # network file systems show new files with a delay
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    visibility = all_gather((socket.gethostname(), marker.exists()), group)
    hosts = sorted({host for host, is_visible in visibility if not is_visible})
    if world.is_main:
        marker.unlink()
    if hosts:
        raise UserError(f'out_dir={folder}: not the same folder on {", ".join(hosts)} as on the '
                        'host of rank 0: use a disk that all hosts share')
