"""Memory and cores available to this process, in a container too.

Without torch: the number of its threads has to be set before it is imported.
"""

import math
import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

# -----------------------------------------------------------------------------
# memory


def machine_memory(root='/'):
    """→ (bytes of memory that this process may have, bytes of it that are free): of the machine or
    of the cgroups that hold the process. root: where /proc and /sys are"""
    import psutil
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for group in cgroups(root, 'memory'):
        with suppress(OSError, ValueError):  # 'max' is no number: no limit
            limit = int(read_either(group, 'memory.max', 'memory.limit_in_bytes'))
            used = int(read_either(group, 'memory.current', 'memory.usage_in_bytes'))
            # The kernel takes file caches back where memory is short.
            caches = re.findall(r'^(?:total_)?inactive_file (\d+)$',
                                (group / 'memory.stat').read_text(), re.M)
            total = min(total, limit)
            free = max(0, min(free, limit - used + max(map(int, caches), default=0)))
    return total, free


def free_memory():
    """Bytes of memory that are free for this process."""
    return machine_memory()[1]


def cgroups(root, controller):
    """Yield the folders of the cgroups that hold this process, the innermost first: those of
    version 2, or of version 1's controller."""
    with suppress(OSError):  # no Linux
        for line in Path(root, 'proc/self/cgroup').read_text().splitlines():
            _, controllers, place = line.split(':', 2)
            if not controllers or controller in controllers.split(','):
                # In a container, its own group is the top, and the path may be the host's.
                top = Path(root, 'sys/fs/cgroup', controllers)
                group = top / place.strip('/')
                yield from (up for up in (group, *group.parents) if up.is_relative_to(top))


def read_either(folder, name, name_of_v1):
    path = folder / name
    return (path if path.exists() else folder / name_of_v1).read_text()


# -----------------------------------------------------------------------------
# cores


def allowed_cpus():
    """The numbers of the CPUs that this process may run on."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def core_limit(root='/'):
    """How many cores' time the cgroups allow, such as 1.5; infinity where nothing limits it."""
    limit = math.inf
    for group in cgroups(root, 'cpu'):
        with suppress(OSError, ValueError):  # 'max 100000': no limit
            quota, period = map(int, (group / 'cpu.max').read_text().split())
            limit = min(limit, quota / period)
    return limit


def limit_threads():
    """Let torch compute with no more threads than this process has cores: torch counts the CPUs
    that are allowed, and not how much of their time."""
    if torch_threads() > core_limit() and 'OMP_NUM_THREADS' not in os.environ:
        sys.modules['torch'].set_num_threads(max(1, int(core_limit())))


class CrowdedCores:
    """Lets torch's threads sleep where they wait for each other, while other programs need cores.

    At the end of a parallel loop libgomp's threads spin until the last one arrives. Where another
    program has the core of that one, the spinning keeps it from running. libgomp's threads sleep
    instead while the process has more threads than cores, so a second team of threads, which does
    nothing, is held meanwhile. Quickstart's step on 2 cores, alone / beside one busy program:
    115 / 215 ms so; 110 / 470 ms without; 175 / 214 ms with OMP_WAIT_POLICY=passive.
    """

    def __init__(self, look_s=1.0):
        self.look_s, self.ended, self.watcher = look_s, threading.Event(), None
        self.others = self.missing = 0.0  # cores: that other programs take, and that are too few

    def start(self):
        if sys.platform == 'linux':
            self.ended.clear()
            self.watcher = threading.Thread(target=self.watch, daemon=True)
            self.watcher.start()

    def stop(self):
        """End both threads: one that is within torch when Python ends aborts the process. They end
        at once, but for a fork of a process that had threads, in which OpenMP may hang."""
        self.ended.set()
        if self.watcher:
            self.watcher.join(timeout=1.0)

    def watch(self):
        second_team, holder, before = None, None, cpu_seconds()
        while not self.ended.wait(self.look_s):
            now = cpu_seconds()
            wall_s, all_s, own_s = (b - a for a, b in zip(before, now, strict=True))
            before, self.others = now, max(0.0, all_s - own_s) / wall_s
            self.missing = self.others + torch_threads() - len(allowed_cpus())
            is_crowded = self.missing > 0.4 and torch_threads() > 1
            if is_crowded and not second_team:
                second_team = threading.Event()
                holder = threading.Thread(target=hold_threads, args=(second_team,), daemon=True)
                holder.start()
            elif second_team and not is_crowded:
                second_team.set()
                second_team = None
        if second_team:
            second_team.set()
            holder.join(timeout=0.5)

    def describe(self):
        """'other programs take 1.0 of 2 cores', or '' where they leave enough."""
        if min(self.others, self.missing) < 0.4:
            return ''
        return f'other programs take {self.others:.1f} of {len(allowed_cpus())} cores'


crowded_cores = CrowdedCores()


def cpu_seconds():
    """→ (now, seconds that the allowed CPUs have worked, seconds of them for this process)"""
    import psutil
    allowed = allowed_cpus()
    busy_s = sum(cpu.user + cpu.nice + cpu.system
                 for n, cpu in enumerate(psutil.cpu_times(percpu=True)) if n in allowed)
    return time.perf_counter(), busy_s, time.process_time()


def torch_threads():
    """How many threads torch computes with; 0 where it is not imported yet."""
    torch = sys.modules.get('torch')
    return torch.get_num_threads() if hasattr(torch, 'get_num_threads') else 0


def hold_threads(until):
    """Start a team of OpenMP threads, and keep it until the event is set."""
    import torch
    torch.ones(2**20).add_(1)  # large enough to be shared out
    until.wait()
