"""Memory and cores that a process may use, programs that it shares them with, and other systems."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, exit_code, fork, run
from runs import TINY

import prepare
import sample
import train
from plaingpt.system.machine import free_memory, limit_threads


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def group(tmp_path):
    """The folder of a cgroup that holds this process, within another."""
    write(tmp_path / 'proc/self/cgroup', '1:name=systemd:/\n0::/a.slice/b.scope\n')
    return tmp_path / 'sys/fs/cgroup/a.slice/b.scope'


def test_free_memory_is_that_of_the_narrowest_cgroup(tmp_path, group):
    assert free_memory(tmp_path) > 2**20  # of the machine
    for folder, limit, used in ((group, 'max', 10), (group.parent, 2**20, 2**19)):
        write(folder / 'memory.max', f'{limit}\n')
        write(folder / 'memory.current', f'{used}\n')
        write(folder / 'memory.stat', 'anon 7\ninactive_file 1024\n')
    assert free_memory(tmp_path) == 2**19 + 1024


@pytest.fixture
def four_threads():
    """torch may use four threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize('quota, set_by_user, expected', [
    ('max', False, 4), (350_000, False, 3), (50_000, False, 1), (50_000, True, 4)])
def test_torch_uses_as_many_threads_as_a_cgroup_allows_cores_unless_the_user_sets_them(
        quota, set_by_user, expected, tmp_path, group, four_threads, monkeypatch):
    if set_by_user:
        monkeypatch.setenv('OMP_NUM_THREADS', '4')
    else:
        monkeypatch.delenv('OMP_NUM_THREADS')
    write(group / 'cpu.max', 'max 100000\n')
    write(group.parent / 'cpu.max', f'{quota} 100000\n')
    limit_threads(tmp_path)
    assert torch.get_num_threads() == expected


def take_away():
    """As on Windows: what os and signal lack there, and the modules that are not there."""
    for name in ('pread', 'pwrite', 'sched_getaffinity', 'getuid', 'geteuid', 'getloadavg'):
        delattr(os, name)
    for name in ('SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGALRM', 'SIGKILL'):
        delattr(signal, name)
    import psutil  # noqa: F401  which is another one there
    for name in ('fcntl', 'resource', 'pwd', 'termios'):
        sys.modules[name] = None


def test_commands_work_without_what_windows_lacks(text_file, tmp_path):
    data, out = f'{tmp_path}/d', f'--out_dir={tmp_path}/out'
    run = [*TINY, f'--dataset={data}', out]
    for main, argv in (
            (prepare.main, ['text', text_file, '--tokenizer=char', f'--data_dir={data}']),
            (train.main, [*run, '--max_iters=3']),
            (train.main, [*run, '--init_from=resume']),
            (sample.main, [out, '--num_samples=1', '--max_new_tokens=5', '--device=cpu'])):
        code = exit_code(fork(main, *argv, log=tmp_path / 'log', before=take_away))
        assert code == 0, (tmp_path / 'log').read_text()


HUGE_PAGES = Path('/sys/kernel/mm/transparent_hugepage/enabled')
PAGES_OF_A_TENSOR = """
import resource
import torch
import train
from plaingpt.system.errors import run_script

def main(argv):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

run_script(main)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HUGE_PAGES.exists() or '[never]' in HUGE_PAGES.read_text(),
                    reason='the kernel has no huge pages for tensors')
def test_the_tensors_of_a_script_are_on_huge_pages(monkeypatch):
    monkeypatch.delenv('THP_MEM_ALLOC_ENABLE', raising=False)
    page_faults = run(sys.executable, '-c', PAGES_OF_A_TENSOR, cwd=ROOT)
    assert int(page_faults) < 2**26 / 4096 / 4
