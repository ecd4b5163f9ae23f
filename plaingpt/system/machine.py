"""Memory and CPU cores available to this process, also in a container. Does not import torch."""

import ctypes
import gc
import math
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def free_memory(root='/'):
    """Bytes of memory available to this process, within the limits of its cgroups. root: of /proc
    and /sys"""
    import psutil
    free = psutil.virtual_memory().available
    for group in cgroups(root):
        with suppress(OSError, ValueError):  # 'max': no limit
            limit = int((group / 'memory.max').read_text())
            used = int((group / 'memory.current').read_text())
            # The kernel reclaims file caches if memory is short.
            inactive = re.search(r'inactive_file (\d+)', (group / 'memory.stat').read_text())
            free = max(0, min(free, limit - used + int(inactive[1])))
    return free


def cgroups(root):
    """The folders of this process's cgroups (version 2), innermost first."""
    try:
        path = re.search('^0::/(.*)', os.fsdecode(Path(root, 'proc/self/cgroup').read_bytes()),
                         re.M)
    except OSError:  # not Linux
        return []
    if not path:
        return []
    top = Path(root, 'sys/fs/cgroup')
    group = top / path[1]  # may not exist in a container, whose own cgroup is mounted at the top
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]


def allowed_cpus():
    """The indices of the CPUs that this process may run on."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def limit_threads(root='/'):
    """Limit torch's threads to the CPU quota of the cgroup. torch counts CPUs; it ignores that the
    quota may be, say, 1.5 of them."""
    limit = math.inf
    for group in cgroups(root):
        with suppress(OSError, ValueError):  # 'max 100000': no limit
            quota, period = map(int, (group / 'cpu.max').read_text().split())
            limit = min(limit, quota / period)
    torch = sys.modules.get('torch')
    if torch and torch.get_num_threads() > limit and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max(1, int(limit)))


def use_huge_pages():
    """Make torch ask Linux for huge pages (2 MiB) for tensors of at least this size, and glibc keep
    freed blocks of up to 32 MiB. The kernel clears the pages of each new tensor: at 4 KiB each,
    that took a quarter of the step of a small float32 model with GPT-2's vocabulary. Call this
    before the first tensor exists."""
    os.environ.setdefault('THP_MEM_ALLOC_ENABLE', '1')
    has_own_settings = any(name.startswith('MALLOC_') for name in os.environ)
    if sys.platform == 'linux' and not has_own_settings:
        mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)  # musl does not have it
        if mallopt:
            mallopt(M_MMAP_THRESHOLD, 2**25)
            mallopt(M_TRIM_THRESHOLD, 2**30)


@contextmanager
def cores_shared(interval_s=1.0):
    """A context in which torch's idle threads sleep, not spin, if other programs need cores. It
    does nothing if torch is not imported.

    At the end of a parallel loop, libgomp's threads spin until the last one arrives. If another
    program occupies the last one's core, spinning delays it further. libgomp's threads sleep
    instead if a process has more threads than cores. So this starts a second team of threads,
    which does nothing, and keeps it for as long as cores are short.
    Quickstart's step on 2 cores, alone / beside one busy program: 110 / 250 ms with this;
    110 / 3,800 ms without; 175 / 230 ms with OMP_WAIT_POLICY=passive.
    """
    stop = threading.Event()
    watcher = threading.Thread(target=watch_cores, args=(stop, interval_s), daemon=True)
    if sys.platform == 'linux' and 'torch' in sys.modules:
        watcher.start()
    try:
        yield
    finally:
        stop.set()
        if watcher.is_alive():
            watcher.join(timeout=1.0)  # a thread inside torch would abort Python's shutdown


def watch_cores(stop, interval_s):
    """Check every interval_s whether other programs need cores. While they do, keep a second team:
    a thread that has run a parallel loop of torch keeps its team until it ends."""
    import psutil
    torch, process = sys.modules['torch'], psutil.Process()
    team = None
    process.cpu_percent()  # percentages are since the last call
    while not stop.wait(interval_s):
        allowed, threads = allowed_cpus(), torch.get_num_threads()
        percents = psutil.cpu_percent(percpu=True)
        busy = sum(percent for n, percent in enumerate(percents) if n in allowed)
        used_by_others = (busy - process.cpu_percent()) / 100
        is_crowded = threads > 1 and used_by_others + threads - len(allowed) > 0.4
        if is_crowded and not team:
            team = ThreadPoolExecutor(1, thread_name_prefix='second team')
            team.submit(lambda: torch.ones(2**20).add_(1))  # large enough to be parallelized
        elif team and not is_crowded:
            team.shutdown()
            team = None
    if team:
        team.shutdown()


def freeze_existing_objects():
    """Exempt what exists now from garbage collection: a full collection takes 0.1 s and stalls all
    ranks."""
    gc.unfreeze()  # undo the freeze of an earlier run in this process
    gc.collect()
    gc.freeze()
