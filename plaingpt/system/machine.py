"""What this process may use of its machine, memory and cores, and what others leave of it.

Without torch: what limits its threads has to be said before it is loaded.
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
    """→ (bytes of memory that a process may have here, bytes of it that are free), of the machine
    or of the cgroups it runs in; None where nothing tells. root: where /proc and /sys are"""
    def pages(key):
        try:
            return os.sysconf(key) * os.sysconf('SC_PAGE_SIZE')
        except (ValueError, OSError, AttributeError):
            return None

    total, free = pages('SC_PHYS_PAGES'), pages('SC_AVPHYS_PAGES')
    with suppress(OSError, TypeError):  # counts what the system would give back, such as caches
        free = 1024 * int(re.search(r'MemAvailable:\s*(\d+)', read(root, 'proc/meminfo'))[1])
    for limit, used in cgroup_memory(root):
        total = min(limit, limit if total is None else total)
        free = max(0, min(limit - used, limit if free is None else free))
    return total, free


def free_memory():
    """Bytes of memory that are free for this process, or None where the system does not tell."""
    return machine_memory()[1]


def cgroup_memory(root):
    """Yield (limit, what is used but for caches), in bytes, of the cgroups that hold this one."""
    for folder, limit, used in cgroup_files(root, 'memory', ('memory.max', 'memory.current'),
                                            ('memory.limit_in_bytes', 'memory.usage_in_bytes')):
        with suppress(OSError, ValueError):  # 'max' is no number: no limit
            caches = re.findall(r'^(?:total_)?inactive_file (\d+)$',
                                read(root, folder / 'memory.stat'), re.M)
            yield int(limit), int(used) - max(map(int, caches), default=0)


def cgroup_files(root, controller, names, names_of_v1):
    """Yield (folder, text of its files …) of each cgroup that holds this process, where it has
    such files: those of version 2, or of version 1's controller."""
    with suppress(OSError):
        for line in read(root, 'proc/self/cgroup').splitlines():
            _, controllers, place = line.split(':', 2)
            if controllers and controller not in controllers.split(','):
                continue
            top = Path('sys/fs/cgroup', controllers)
            group = top / place.strip('/')
            # Seen from within a container, its group is the top; the path may be the host's.
            for folder in [group, *(up for up in group.parents if up.is_relative_to(top))]:
                with suppress(OSError):
                    yield folder, *(read(root, folder / name)
                                    for name in (names_of_v1 if controllers else names))


def read(root, path):
    return Path(root, path).read_text(encoding='utf-8', errors='replace')


# -----------------------------------------------------------------------------
# cores


def allowed_cpus():
    """The numbers of the CPUs that this process may run on."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def core_limit(root='/'):
    """How many cores' time the cgroups allow, such as 1.5; infinity where nothing limits it."""
    limits = [math.inf]
    for _, *texts in cgroup_files(root, 'cpu', ('cpu.max',),
                                  ('cpu.cfs_quota_us', 'cpu.cfs_period_us')):
        with suppress(ValueError):  # 'max 100000': no limit; in version 1 that is -1
            quota, period = map(int, ' '.join(texts).split())
            limits.append(quota / period if quota > 0 else math.inf)
    return min(limits)


def limit_threads():
    """Let torch start no more threads than there are cores for this process: it heeds the CPUs that
    are allowed, and not how much of their time. Call this before torch is imported."""
    limit = core_limit()
    if limit < len(allowed_cpus()):
        os.environ.setdefault('OMP_NUM_THREADS', str(max(1, int(limit))))


class Neighbours:
    """Watches what other programs take of the cores, and lets torch's threads wait accordingly.

    At the end of a parallel loop libgomp's threads spin until the last of them arrives, which is
    fastest where each has a core. Where another program takes a core, they spin for a thread that
    does not run, and keep it from running: a step takes 3 to 20 times as long. libgomp lets
    threads sleep nearly at once while the process has more of them than cores. So a second team,
    which does nothing, is started then, and ended when the cores are free. Results do not depend
    on it.
    """

    LOOK_S = 1.0  # between two looks
    CROWDED, FREE = 0.4, 0.2  # cores that are wanted beyond those that there are
    QUIET_LOOKS = 3  # before threads spin again

    def __init__(self):
        self.others = 0.0  # cores that other programs took at the last look
        self.stop = self.crowd = None  # threading.Event that ends the watch, the waiting team

    def start(self):
        if self.stop is None and busy_seconds() is not None:
            self.stop = threading.Event()
            threading.Thread(target=self.watch, args=(self.stop,), name='neighbours',
                             daemon=True).start()

    def end(self):
        for event in filter(None, (self.stop, self.crowd)):
            event.set()
        self.stop = self.crowd = None

    def watch(self, stop):
        quiet, before = 0, (time.perf_counter(), busy_seconds(), time.process_time())
        while not stop.wait(self.LOOK_S):
            now = (time.perf_counter(), busy_seconds(), time.process_time())
            wall_s, all_s, own_s = (b - a for a, b in zip(before, now, strict=True))
            before, self.others = now, max(0.0, (all_s - own_s) / wall_s)
            threads = spinning_threads()
            wanted = self.others + threads - len(allowed_cpus())
            quiet = quiet + 1 if wanted < self.FREE else 0
            if threads > 1 and wanted > self.CROWDED and not self.crowd:
                self.crowd = threading.Event()
                threading.Thread(target=wait_with_a_team, args=(self.crowd,), name='crowd',
                                 daemon=True).start()
            if self.crowd and quiet >= self.QUIET_LOOKS:
                self.crowd.set()
                self.crowd = None

    def describe(self):
        """'other programs take 1.0 of 2 cores', or '' where they leave enough."""
        cores = len(allowed_cpus())
        if self.others < self.CROWDED or self.others + spinning_threads() - cores < self.CROWDED:
            return ''
        return f'other programs take {self.others:.1f} of {cores} cores'


neighbours = Neighbours()


def spinning_threads():
    """How many threads torch computes with, by libgomp; 0 where it is not loaded yet."""
    torch = sys.modules.get('torch')
    return torch.get_num_threads() if hasattr(torch, 'get_num_threads') else 0


def wait_with_a_team(until):
    import torch
    torch.ones(2**20).add_(1)  # large enough to be shared out: this starts the team
    until.wait()


def busy_seconds():
    """The seconds that the allowed CPUs were busy since the machine started, in all; None where the
    system does not tell."""
    with suppress(OSError, ValueError, AttributeError):
        allowed, ticks = allowed_cpus(), 0
        for line in read('/', 'proc/stat').splitlines():
            if found := re.match(r'cpu(\d+) ', line):
                # without `steal`: no thread of this machine can leave those seconds to another
                user, nice, system, _, _, irq, softirq = map(int, line.split()[1:8])
                ticks += int(found[1]) in allowed and user + nice + system + irq + softirq
        return ticks / os.sysconf('SC_CLK_TCK')
    return None
