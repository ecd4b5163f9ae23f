"""Memory and cores that a process may use, and programs that it shares them with."""

import subprocess
import sys
import threading

import pytest
import torch
from helpers import wait_until

from plaingpt.system import machine
from plaingpt.system.machine import CrowdedCores, core_limit, limit_threads, machine_memory


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_is_that_of_the_machine_or_of_the_narrowest_cgroup(tmp_path):
    total, free = machine_memory(tmp_path)
    assert total > free > 0
    write(tmp_path / 'proc/self/cgroup', '1:name=systemd:/\n0::/a.slice/b.scope\n')
    group = tmp_path / 'sys/fs/cgroup/a.slice/b.scope'
    for folder, limit, used in ((group, 'max', 10), (group.parent, 2**20, 2**19)):
        write(folder / 'memory.max', f'{limit}\n')
        write(folder / 'memory.current', f'{used}\n')
        write(folder / 'memory.stat', 'anon 7\ninactive_file 1024\n')
    assert machine_memory(tmp_path) == (2**20, 2**19 + 1024)
    write(tmp_path / 'proc/self/cgroup', '4:memory:/of/the/host\n')
    inside = tmp_path / 'sys/fs/cgroup/memory'
    write(inside / 'memory.limit_in_bytes', str(2**21))
    write(inside / 'memory.usage_in_bytes', str(2**20))
    write(inside / 'memory.stat', 'inactive_file 5\ntotal_inactive_file 20\n')
    assert machine_memory(tmp_path) == (2**21, 2**20 + 20)


def test_the_cores_are_those_of_the_narrowest_cgroup(tmp_path):
    assert core_limit(tmp_path) == float('inf')
    write(tmp_path / 'proc/self/cgroup', '0::/a.slice/b.scope\n')
    group = tmp_path / 'sys/fs/cgroup/a.slice/b.scope'
    write(group / 'cpu.max', 'max 100000\n')
    assert core_limit(tmp_path) == float('inf')
    write(group.parent / 'cpu.max', '150000 100000\n')
    assert core_limit(tmp_path) == 1.5


def test_threads_are_as_many_as_cores_are_allowed_unless_the_user_says(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 64)
    monkeypatch.setattr(torch, 'set_num_threads', chosen.append)
    monkeypatch.delenv('OMP_NUM_THREADS')
    for limit in (float('inf'), 3.5, 0.5):
        monkeypatch.setattr(machine, 'core_limit', lambda limit=limit: limit)
        limit_threads()
    monkeypatch.setenv('OMP_NUM_THREADS', '8')
    limit_threads()
    assert chosen == [3, 1]


@pytest.mark.skipif(sys.platform != 'linux', reason='nothing is watched there')
def test_what_another_program_takes_is_seen():
    cores = CrowdedCores(look_s=0.1)
    spin = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
    try:
        cores.start()
        wait_until(lambda: cores.others > 0.5)
    finally:
        cores.stop()
        spin.kill()
        spin.wait()


@pytest.mark.skipif(sys.platform != 'linux', reason='nothing is watched there')
def test_no_thread_of_it_is_left_when_it_stops(monkeypatch):
    monkeypatch.setattr(machine, 'torch_threads', lambda: 10**6)  # more than there are cores
    cores, before = CrowdedCores(look_s=0.01), set(threading.enumerate())
    cores.start()
    wait_until(lambda: len(set(threading.enumerate()) - before) == 2)
    cores.stop()
    assert set(threading.enumerate()) <= before


def test_torch_has_a_second_team_while_cores_are_wanted_by_others(monkeypatch):
    # cores that others take in each second, threads of this process → whether there is one
    seconds = [(0.0, 4, False), (1.0, 4, True), (1.0, 4, True), (0.0, 4, False), (1.0, 4, True),
               (1.0, 1, False)]  # one thread waits for nobody
    cores, now, taken, teams, seen = CrowdedCores(), 0, 0.0, [], []

    class Ended:
        def wait(self, _):
            nonlocal now, taken
            if now:
                seen.append(any(not team.is_set() for team in teams))
                assert bool(cores.describe()) == (seconds[now - 1][0] > 0 and seen[-1])
            now += 1
            taken += seconds[min(now, len(seconds)) - 1][0]
            return now > len(seconds)

    cores.ended = Ended()
    monkeypatch.setattr(machine, 'allowed_cpus', lambda: set(range(4)))
    monkeypatch.setattr(machine, 'torch_threads', lambda: seconds[now - 1][1])
    monkeypatch.setattr(machine, 'hold_threads', teams.append)
    monkeypatch.setattr(machine, 'cpu_seconds', lambda: (float(now), taken, 0.0))
    monkeypatch.setattr(machine.threading, 'Thread', RunsAtOnce)
    cores.watch()
    assert seen == [there for *_, there in seconds] and len(teams) == 2


class RunsAtOnce:
    def __init__(self, target, args, daemon):
        self.start = lambda: target(*args)

    def join(self, timeout):
        pass
