"""Memory and CPU cores available to this process, also in a container. Does not import torch."""

import math
import os
import re
import sys
from contextlib import suppress
from pathlib import Path


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
