"""A job of several processes, which torchrun started: they meet, and write into one folder."""

import os
import socket
import time
from contextlib import contextmanager

import torch.distributed as dist

from plaingpt.system import distributed
from plaingpt.system.errors import UserError


@contextmanager
def process_group(world, device, backend='auto'):
    """Join the job's process group (nccl on CUDA, gloo elsewhere) and leave it at the end. Raises
    UserError where another process does not come, is lost, or is silent for TIMEOUT."""
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    try:
        store, rank, size = next(dist.rendezvous('env://', timeout=distributed.TIMEOUT))
        if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
            # torchrun's store outlives a restart, and torch 2.13 would find in it the addresses of
            # processes that have ended, and wait for them (pytorch/pytorch#135712).
            store = dist.PrefixStore(os.environ['TORCHELASTIC_RESTART_COUNT'], store)
        # Binding the device lets NCCL set its communicators up at once instead of guessing later.
        dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                                timeout=distributed.TIMEOUT,
                                device_id=device if device.type == 'cuda' else None)
        distributed.host_group = dist.group.WORLD if backend == 'gloo' \
            else distributed.gloo_group(own=True)
        yield
        distributed.barrier()  # one that left earlier would look lost to those that still work
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
    distributed.host_group = None


def check_shared(folder, world, group):
    """See that all processes write into one folder: each writes its share of the checkpoints.
    Raises UserError where a host has a folder of its own."""
    mark = folder / f'.shared-{distributed.all_gather(os.getpid(), group)[0]}'
    if world.is_main:
        mark.touch()
    distributed.barrier()
    deadline = time.monotonic() + 10  # network file systems show new files with a delay
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = distributed.all_gather((socket.gethostname(), mark.exists()), group)
    blind = {host for host, sees in seen if not sees}
    if world.is_main:
        mark.unlink()
    if blind:
        raise UserError(f'out_dir={folder} is not the same folder on {", ".join(sorted(blind))} as '
                        'on the host of rank 0: it must be on a disk that all hosts share')
