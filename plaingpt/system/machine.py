"""Memory and cores available to this process, in a container too. It works without torch."""

import math
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path


def free_memory(root='/'):
    """Bytes of memory that are free for this process: of the machine, or of the cgroups that hold
    the process. root: where /proc and /sys are"""
    import psutil
    free = psutil.virtual_memory().available
    for group in cgroups(root):
        with suppress(OSError, ValueError):  # 'max' is no number: no limit
            limit = int((group / 'memory.max').read_text())
            used = int((group / 'memory.current').read_text())
            # The kernel takes file caches back where memory is short.
            caches = re.search(r'inactive_file (\d+)', (group / 'memory.stat').read_text())
            free = max(0, min(free, limit - used + int(caches[1])))
    return free


def cgroups(root):
    """The folders of the cgroups (version 2) that hold this process, the innermost first."""
    with suppress(OSError):  # no Linux
        place = re.search('^0::/(.*)', Path(root, 'proc/self/cgroup').read_text(), re.M)
        top = Path(root, 'sys/fs/cgroup')
        if place:  # in a container, its own group is the top, and this may be the host's path
            group = top / place[1]
            return [up for up in (group, *group.parents) if up.is_relative_to(top)]
    return []


def allowed_cpus():
    """The numbers of the CPUs that this process may run on."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def limit_threads(root='/'):
    """Give torch no more threads than a cgroup allows cores. torch counts the CPUs of a process; it
    does not see that a cgroup may allow the time of 1.5 of them only."""
    limit = math.inf
    for group in cgroups(root):
        with suppress(OSError, ValueError):  # 'max 100000': no limit
            quota, period = map(int, (group / 'cpu.max').read_text().split())
            limit = min(limit, quota / period)
    if torch_threads() > limit and 'OMP_NUM_THREADS' not in os.environ:
        sys.modules['torch'].set_num_threads(max(1, int(limit)))


def torch_threads():
    """How many threads torch computes with; 0 where it is not imported."""
    torch = sys.modules.get('torch')
    return torch.get_num_threads() if hasattr(torch, 'get_num_threads') else 0


@contextmanager
def cores_shared(look_s=1.0):
    """While other programs need cores, torch's threads sleep in here when they wait for each other.

    At the end of a parallel loop libgomp's threads spin until the last one arrives. If another
    program uses the core of the last one, the spinning keeps it from running. libgomp's threads
    sleep instead when a process has more threads than cores. So this starts a second team of
    threads, which does nothing, and keeps it as long as cores are missing.
    Quickstart's step on 2 cores, alone / beside one busy program: 115 / 215 ms with this;
    110 / 470 ms without; 175 / 214 ms with OMP_WAIT_POLICY=passive.
    """
    ended = threading.Event()
    watcher = threading.Thread(target=watch_cores, args=(ended, look_s), daemon=True)
    if sys.platform == 'linux':
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if watcher.is_alive():
            watcher.join(timeout=1.0)  # within torch when Python ends, it would abort the process


def watch_cores(ended, look_s):
    """Look every look_s whether other programs need cores. While they do, keep a second team: a
    thread that torch has used keeps its team until it ends."""
    import psutil
    this, team = psutil.Process(), None
    cores_of_others(this)  # begins to count
    while not ended.wait(look_s):
        missing = cores_of_others(this) + torch_threads() - len(allowed_cpus())
        is_crowded = missing > 0.4 and torch_threads() > 1
        if is_crowded and not team:
            team = ThreadPoolExecutor(1, thread_name_prefix='second team')
            team.submit(lambda: sys.modules['torch'].ones(2**20).add_(1))  # enough to be shared out
        elif team and not is_crowded:
            team.shutdown()
            team = None
    if team:
        team.shutdown()


def cores_of_others(this):
    """How many of the allowed CPUs other programs than `this` used since the last call."""
    import psutil
    allowed = allowed_cpus()
    busy = [percent for n, percent in enumerate(psutil.cpu_percent(percpu=True)) if n in allowed]
    return (sum(busy) - this.cpu_percent()) / 100
