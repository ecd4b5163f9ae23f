"""The processes of a job: who this one is, how they talk, when they stop.

One process is a world of size 1, and every helper here is then a no-op.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from plaingpt.system.errors import UserError
from plaingpt.system.streams import discard_stalled_output, print_line

JOIN_S = 300  # how long the processes of a job wait for those that have not come
BEAT_S = 5  # between two signs of life of a process
# How long a process may give none: far longer than a call that holds the interpreter's lock, such
# as one that reads a network disk whose server restarts.
HANG_S = 120
NO_JOB = ': the job cannot go on; see what was written there last, and start all processes again ' \
         '(training with --init_from=auto goes on from its last checkpoint)'
# What gloo says where a peer's process or host is gone.
GONE = ('Connection closed by peer', 'Connection reset by peer', 'Broken pipe',
        'Connection refused', 'Timed out waiting')


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
        number_of, ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'))
    if rank >= size:
        raise UserError(f'RANK={rank} is no rank of WORLD_SIZE={size}: they count from 0')
    return World(rank, local_rank, size, local_size, launched=True)


def number_of(name):
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
    """Join the job's process group (nccl on CUDA, gloo elsewhere) and leave it at the end."""
    if not world.launched:
        yield
        return
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    if backend == 'nccl' and device.type != 'cuda':
        raise UserError(f'backend=nccl needs a CUDA device, not {device.type}: leave it at auto')
    store, beats, peers = join(world)
    with naming_the_lost(store, peers), Heartbeat(beats, peers, world):
        # Binding the device lets NCCL set its communicators up at once instead of guessing later.
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size,
                                device_id=device if device.type == 'cuda' else None)
        yield
        barrier()  # one that left earlier would look lost to those that still work
        # Not in a `finally`: a rank that fails must exit at once, so that torchrun stops the
        # others, and NCCL's teardown would first wait for collectives that never come.
        dist.destroy_process_group()


def join(world):
    """Meet the job's processes → (the key-value store that they share, the same over a connection
    of its own for the Heartbeat, [(host, process id, start)] by rank). Raises UserError that names
    those who have not come after JOIN_S.

    The store outlives a restart (--max-restarts), and a process that reads the address which an
    earlier attempt left there never finds its peer. So rank 0 invents a prefix that no earlier
    attempt has used, and tells it to those who say hello until all of this attempt are here.
    """
    env = os.environ
    if missing := [key for key in ('MASTER_ADDR', 'MASTER_PORT') if not env.get(key)]:
        raise UserError(f'{" and ".join(missing)}: not set, though RANK is: give every process the '
                        'address of rank 0 and a free port there, or start them with torchrun')
    if not 0 < number_of('MASTER_PORT') < 2**16:
        raise UserError(f'MASTER_PORT={env["MASTER_PORT"]}: a port is at most 65535')
    address = f'{env["MASTER_ADDR"]}:{env["MASTER_PORT"]}'
    hosting = hosts_store(world)
    me = [socket.gethostname(), os.getpid(), started(os.getpid())]
    deadline = time.monotonic() + JOIN_S
    try:
        store = dist.TCPStore(env['MASTER_ADDR'], int(env['MASTER_PORT']), world.size, hosting,
                              timedelta(seconds=JOIN_S), wait_for_workers=False,
                              multi_tenant=hosting,
                              use_libuv=env.get('USE_LIBUV', str(int(os.name != 'nt'))) == '1')
        beats = store.clone()  # now: where rank 0 is lost later, it would wait for a new one
        prefix, peers = gather(store, world, me) if world.is_main else say_hello(store, world, me)
        for connection in (store, beats):
            connection.set_timeout(dist.constants.default_pg_timeout)
    except dist.DistError as e:
        if hosting:
            raise UserError(f'rank 0 cannot listen at {address}: choose another MASTER_PORT '
                            f'({str(e).splitlines()[0]})') from None
        if time.monotonic() < deadline:
            raise UserError(f'lost rank 0 of {world.size} at {address}{NO_JOB}') from None
        raise UserError(f'waited {JOIN_S} s for rank 0 of {world.size} at {address}: see what it '
                        'wrote last, and start all processes again') from None
    lost = [rank for rank, peer in enumerate(peers) if peer is None]
    if lost:
        raise UserError(f'waited {JOIN_S} s for {ranks(lost)} of {world.size}: see what it wrote '
                        'last, and start all processes again')
    return dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, beats), peers


def hosts_store(world):
    """Whether this process holds the job's store: rank 0 does where torchrun does not."""
    return world.is_main and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'


def gather(store, world, me):
    """Rank 0: wait for the others → (prefix of this attempt, who each is, by rank)."""
    prefix, deadline = uuid.uuid4().hex, time.monotonic() + JOIN_S
    peers = [me] + [None] * (world.size - 1)
    while None in peers and time.monotonic() < deadline:
        for rank in [rank for rank, peer in enumerate(peers) if peer is None]:
            if store.check([f'hello/{rank}']):
                store.set(f'welcome/{store.get(f"hello/{rank}").decode()}', prefix)
            if store.check([f'here/{prefix}/{rank}']):
                peers[rank] = json.loads(store.get(f'here/{prefix}/{rank}'))
        time.sleep(0.01)
    store.set(f'peers/{prefix}', json.dumps(peers))
    return prefix, peers


def say_hello(store, world, me):
    """The other ranks: find rank 0, and hear who has come → as gather."""
    name = uuid.uuid4().hex
    store.set(f'hello/{world.rank}', name)
    prefix = store.get(f'welcome/{name}').decode()  # waits until rank 0 has set it
    store.set(f'here/{prefix}/{world.rank}', json.dumps(me))
    store.set_timeout(timedelta(seconds=JOIN_S + 10))  # rank 0 waits for the others, and then tells
    return prefix, json.loads(store.get(f'peers/{prefix}'))


@contextmanager
def naming_the_lost(store, peers):
    """Turn the error of a collective in here whose peer is gone into a UserError that names it."""
    try:
        yield
    except RuntimeError as e:
        if not isinstance(e, dist.DistNetworkError | dist.DistStoreError) \
                and not ('gloo' in str(e) and any(words in str(e) for words in GONE)):
            raise
        raise UserError(f'lost {find_lost(store, peers)}{NO_JOB}') from None


def find_lost(store, peers):
    """'rank 1', by the processes of this host, or by what another rank found out before."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        lost = find_dead(peers)
        try:
            if lost:  # those who see their neighbours leave because of it come later
                return store.compare_set('lost', '', ranks(lost)).decode()
            if store.check(['lost']):
                return store.get('lost').decode()
        except dist.DistError:  # rank 0 had the store
            return ranks(sorted({0, *lost}))
        time.sleep(0.1)
    here = socket.gethostname()
    hosts = sorted({host for host, _, _ in peers} - {here})
    return f'a process on {" or ".join(hosts) or here}'


def find_dead(peers):
    """The ranks of this host whose processes are gone."""
    here = socket.gethostname()
    return [rank for rank, (host, pid, start) in enumerate(peers)
            if host == here and os.name != 'nt' and not is_running(pid, start)]


def ranks(numbers):
    """[1, 3] → 'ranks 1, 3'"""
    return f'rank{"s" if len(numbers) > 1 else ""} {", ".join(map(str, numbers))}'


def started(pid):
    """When a process started, as text: two with the same number differ in it. '-': not known."""
    try:
        state, *rest = Path(f'/proc/{pid}/stat').read_bytes().rpartition(b')')[2].decode().split()
    except OSError:
        return '-'  # no Linux, or another user's
    return 'never' if state in 'ZX' else rest[18]  # dead, and not waited for; field 22


def is_running(pid, start):
    """False where the process of this host that `started` at `start` is gone. (No Windows: kill
    would end it there.)"""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    return '-' in (start, now := started(pid)) or start == now


class Heartbeat:
    """A context in which this process shows the others that it runs, and ends where one of them has
    not done so for HANG_S. A process that hangs closes no connection, and the others would wait for
    it in a collective, which nothing can interrupt.

    Each process counts its beats in the job's store. A thread also follows the count of the next
    rank, so a beat takes three short requests whatever the number of processes. Where that rank is
    silent, it looks who else is, and leaves a line in the store that ends all processes. A second
    thread sees that the store answers. Time is counted in this process's own beats: one that was
    itself suspended blames nobody.
    """

    def __init__(self, store, peers, world):
        self.store = store  # nobody else's connection: on the other a call may wait long
        self.peers, self.world = peers, world
        self.unanswered = 0  # beats since the store answered last
        self.over = threading.Event()
        self.threads = [threading.Thread(target=work, name='heartbeat', daemon=True)
                        for work in (self.follow_next, self.watch_store) if world.size > 1]

    def __enter__(self):
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_):
        with suppress(dist.DistError):
            self.obey()  # the others' end may be what made this process fail
        self.over.set()
        for thread in self.threads:
            thread.join(BEAT_S)  # none may be in a call of the store when the interpreter ends

    def follow_next(self):
        rank, count, silent, dead = (self.world.rank + 1) % self.world.size, -1, 0, []
        with suppress(dist.DistError):  # watch_store counts how long the store has been gone
            while not self.over.wait(BEAT_S):
                before, count = count, self.beat(rank)[0]
                # Where a collective waits for one that is gone, it says so itself, before the next
                # beat; where processes connect to each other it does not.
                if dead:
                    self.store.compare_set('end', '', f'lost {ranks(dead)}')
                dead = find_dead(self.peers)
                silent = silent + 1 if count == before else 0
                if (silent + 3) * BEAT_S >= HANG_S and (hung := self.find_hung()):
                    self.store.compare_set('end', '', f'no sign of life from {hung} for {HANG_S} '
                                           's: the process, its host or the network hangs')
        if not self.over.wait(2 * BEAT_S) and (dead := find_dead(self.peers)):
            give_up(f'lost {ranks(dead)}')  # one of them had the store

    def find_hung(self):
        """'rank 1 on HOST': those of whom the next three beats bring nothing. '' for none."""
        everyone = range(self.world.size)
        before = self.beat(*everyone)
        for _ in range(3):
            time.sleep(BEAT_S)
            after = self.beat(*everyone)
        hung = [rank for rank in everyone if before[rank] == after[rank]]
        by_host = {}
        for rank in hung:
            by_host.setdefault(self.peers[rank][0], []).append(rank)
        return ' and '.join(f'{ranks(hung)} on {host}' for host, hung in by_host.items())

    def beat(self, *others):
        """Count a beat, and end where the job was given up → the counts of others."""
        self.store.add(f'beats/{self.world.rank}', 1)
        self.obey()
        counts = [self.store.add(f'beats/{rank}', 0) for rank in others]
        self.unanswered = 0
        return counts

    def watch_store(self):
        while not self.over.wait(BEAT_S):
            self.unanswered += 1
            if self.unanswered * BEAT_S > HANG_S:
                give_up('the store of the job, which rank 0 or torchrun has at '
                        f'{os.environ["MASTER_ADDR"]}, has not answered for {HANG_S} s')

    def obey(self):
        """End where the job was given up. One process of each host says why."""
        if self.store.check(['end']):
            line, told = self.store.get('end').decode(), f'told/{socket.gethostname()}'
            give_up(line if self.store.add(told, 1) == 1 else '',
                    wait_s=2 * BEAT_S if hosts_store(self.world) else 0)


def give_up(line, wait_s=0):
    """End this process whatever its main thread does. wait_s: so long the others need its store."""
    if line:
        print(f'error: {line}{NO_JOB}', file=sys.stderr, flush=True)
    time.sleep(wait_s)
    os._exit(1)


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


def gradient_sync(model, last):
    """The context of a micro-batch: a DDP model's gradients travel between processes with the last
    one only. Those of a sharded one always do, since no process has room for all of them."""
    return model.no_sync() if isinstance(model, DDP) and not last else nullcontext()


# -----------------------------------------------------------------------------
# tensors of which each process has some rows (DTensors, of FSDP2); all else is whole everywhere


def is_sharded(tensor):
    return hasattr(tensor, 'full_tensor')  # torch takes a second to import its DTensor


def whole(tensor):
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
    mesh, axis = tensor.device_mesh, share_axis(tensor.device_mesh)
    return tensor.to_local(), held_rows(len(tensor), mesh.get_local_rank(axis), mesh.size(axis))[0]


def share_axis(mesh):
    """Along which axis of its mesh a sharded tensor is shared out; one before it has copies."""
    return mesh.ndim - 1


def is_first_copy(tensor):
    """Whether this process is one of those that share the first copy of a sharded tensor."""
    return tensor.device_mesh.ndim == 1 or tensor.device_mesh.get_local_rank(0) == 0


def all_reduce_norms(norms, mesh):
    """Norms of what each process has of some tensors (n,) → the norms of the whole tensors.
    mesh: of the tensors"""
    squares = norms.square()
    dist.all_reduce(squares, group=mesh.get_group(share_axis(mesh)))
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
        self.group = host_group()
        self.signal = None  # that this process received
        self.received_at = 0.0

    def __enter__(self):
        self.previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS
                         if signal.getsignal(number) not in (signal.SIG_IGN, None)}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number, _):
        # Ctrl-C under torchrun arrives twice, from the terminal and from torchrun: that is one.
        again = self.signal == signal.SIGINT and time.monotonic() - self.received_at > 1
        if number == signal.SIGINT and again:
            os._exit(130)
        is_new = number != self.signal
        self.signal, self.received_at = number, time.monotonic()
        discard_stalled_output()
        if is_new:
            with suppress(RuntimeError):  # in the middle of a print
                print0(f'{signal.Signals(number).name}: stopping after this step'
                       + ', again to leave at once' * (number == signal.SIGINT))

    def wanted(self):
        """The name of the signal that any of the processes received, or None; the same on all.
        They must all ask at the same points, as for any collective."""
        number = self.signal or 0
        if self.group is not None:
            received = torch.tensor(int(number))
            dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group)
            number = received.item()
        return signal.Signals(number).name if number else None

    @contextmanager
    def may_cut_short(self):
        """A context which `check` leaves; it ends there."""
        with suppress(Stopped):
            yield

    def check(self):
        """Raise Stopped where a stop is wanted, on all processes alike."""
        if self.wanted():
            raise Stopped
