"""Memory and cores that a process may use, programs that it shares them with, and other systems."""

import os
import signal
import sys
import threading

import pytest
import torch
from processes import exit_code, fork, wait_until
from runs import TINY

import prepare
import sample
import train
from plaingpt.system import machine
from plaingpt.system.machine import cores_shared, free_memory, limit_threads


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def group(tmp_path):
    """The folder of a cgroup that holds this process, within another."""
    write(tmp_path / 'proc/self/cgroup', '1:name=systemd:/\n0::/a.slice/b.scope\n')
    return tmp_path / 'sys/fs/cgroup/a.slice/b.scope'


def test_memory_is_that_of_the_machine_or_of_the_narrowest_cgroup(tmp_path, group):
    assert free_memory(tmp_path) > 2**20
    for folder, limit, used in ((group, 'max', 10), (group.parent, 2**20, 2**19)):
        write(folder / 'memory.max', f'{limit}\n')
        write(folder / 'memory.current', f'{used}\n')
        write(folder / 'memory.stat', 'anon 7\ninactive_file 1024\n')
    assert free_memory(tmp_path) == 2**19 + 1024


def test_threads_are_as_many_as_cores_are_allowed_unless_the_user_says(tmp_path, group,
                                                                       monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 64)
    monkeypatch.setattr(torch, 'set_num_threads', chosen.append)
    monkeypatch.delenv('OMP_NUM_THREADS')
    write(group / 'cpu.max', 'max 100000\n')
    limit_threads(tmp_path)
    for quota in (350_000, 50_000):
        write(group.parent / 'cpu.max', f'{quota} 100000\n')
        limit_threads(tmp_path)
    monkeypatch.setenv('OMP_NUM_THREADS', '8')
    limit_threads(tmp_path)
    assert chosen == [3, 1]


@pytest.mark.skipif(sys.platform != 'linux', reason='nothing is watched there')
def test_torch_has_a_second_team_while_cores_are_wanted_by_others_and_none_afterwards(monkeypatch):
    others, threads, looks = 0.0, 4, 0

    def cores_of_others(_):
        nonlocal looks
        looks += 1
        return others

    def teams():
        return [thread for thread in threading.enumerate() if 'second team' in thread.name]

    monkeypatch.setattr(machine, 'allowed_cpus', lambda: set(range(4)))
    monkeypatch.setattr(machine, 'torch_threads', lambda: threads)
    monkeypatch.setattr(machine, 'cores_of_others', cores_of_others)
    before = set(threading.enumerate())
    with cores_shared(look_s=0.01):
        wait_until(lambda: looks > 3)
        assert not teams()
        others = 1.0
        wait_until(lambda: len(teams()) == 1)
        threads = 1  # one thread waits for nobody
        wait_until(lambda: not teams())
        threads = 4
        wait_until(lambda: len(teams()) == 1)
    assert set(threading.enumerate()) <= before


def take_away():
    """As on Windows: what os and signal lack there, and the modules that are not there."""
    for name in ('pread', 'pwrite', 'sched_getaffinity', 'getuid', 'geteuid', 'getloadavg'):
        delattr(os, name)
    for name in ('SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGALRM', 'SIGKILL'):
        delattr(signal, name)
    import psutil  # noqa: F401  which is another one there
    for name in ('fcntl', 'resource', 'pwd', 'termios'):
        sys.modules[name] = None


def test_without_what_linux_alone_has_it_prepares_trains_resumes_and_samples(text_file, tmp_path):
    data, out = f'{tmp_path}/d', f'--out_dir={tmp_path}/out'
    run = [*TINY, f'--dataset={data}', out]
    for main, argv in (
            (prepare.main, ['text', text_file, '--tokenizer=char', f'--data_dir={data}']),
            (train.main, [*run, '--max_iters=3']),
            (train.main, [*run, '--init_from=resume']),
            (sample.main, [out, '--num_samples=1', '--max_new_tokens=5', '--device=cpu'])):
        code = exit_code(fork(main, *argv, log=tmp_path / 'log', before=take_away))
        assert code == 0, (tmp_path / 'log').read_text()
