"""torchrun restarts a job that lost a process or a host. A host is a torchrun with its processes;
the hosts of a job are all on this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from helpers import ROOT, free_port, lines, wait_until

ITERS = 600
# train.py with a heartbeat that a test can wait for
FAST = f'''
import sys
sys.path.insert(0, {str(ROOT)!r})
from plaingpt.system import distributed
distributed.BEAT_S, distributed.HANG_S = 0.5, 6
import train
from plaingpt.system.errors import run_script
run_script(train.main)
'''


class Host:
    """torchrun with one process, or with those that `options` ask for."""

    def __init__(self, tiny, tmp_path, name, *options):
        script, self.log = tmp_path / 'fast.py', tmp_path / f'log-{name}'
        script.write_text(FAST)
        with open(self.log, 'w') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'torch.distributed.run', '--max-restarts=3', *options,
                 script, *tiny, '--init_from=auto', '--checkpoint_interval=100',
                 *(f'--{key}={ITERS}' for key in ('max_iters', 'lr_decay_iters', 'eval_interval'))],
                stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'})

    def workers(self):
        found = subprocess.run(['pgrep', '-P', str(self.process.pid)], capture_output=True,
                               text=True)
        return [int(pid) for pid in found.stdout.split()]

    def signal(self, number):
        """Send a signal to all processes of the host."""
        for pid in (self.process.pid, *self.workers()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def said(self):
        return re.findall(r'^error: .*', self.log.read_text(), re.M)


@pytest.fixture
def host(tiny, tmp_path):
    """Starts hosts, and ends what is left of them."""
    hosts = []

    def start(*options):
        hosts.append(Host(tiny, tmp_path, len(hosts), *options))
        return hosts[-1]

    yield start
    for each in hosts:
        each.signal(signal.SIGKILL)
        each.process.wait()


def two_hosts(host, nnodes):
    """The options of a job, and its two hosts, the first of which has torchrun's store."""
    options = ['--nproc_per_node=1', f'--nnodes={nnodes}', '--rdzv-backend=c10d', '--rdzv-id=job',
               f'--rdzv-endpoint=127.0.0.1:{free_port()}']
    first = host(*options, '--rdzv-conf=is_host=1')
    time.sleep(5)
    second = host(*options, '--rdzv-conf=is_host=0')
    return options, first, second


def trains(*hosts):
    wait_until(lambda: any('iter 150' in host.log.read_text() for host in hosts), 120)


def ended_whole(tmp_path):
    iters = [line['iter'] for line in lines(tmp_path / 'out', 'loss')]
    return iters == list(range(1, ITERS + 1))


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_and_the_job_restarted(host, tmp_path):
    job = host('--standalone', '--nproc_per_node=2')
    trains(job)
    os.kill(job.workers()[1], signal.SIGSTOP)
    wait_until(job.said, 20)
    assert job.process.wait(200) == 0 and ended_whole(tmp_path)
    (line,) = job.said()
    assert 'no sign of life from rank ' in line and 'resumed from' in job.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_goes_on_without_a_host_that_is_lost_or_frozen(host, tmp_path, number):
    _, first, second = two_hosts(host, '1:2')
    trains(first, second)
    second.signal(number)
    assert first.process.wait(250) == 0 and ended_whole(tmp_path)
    assert len(first.said()) == 1
    assert re.search('processes 1\nresumed from', first.log.read_text())


@pytest.mark.slow
def test_a_host_that_is_replaced_takes_its_part_again(host, tmp_path):
    options, first, second = two_hosts(host, '2')
    trains(first, second)
    second.signal(signal.SIGKILL)
    third = host(*options, '--rdzv-conf=is_host=0')
    assert first.process.wait(250) == third.process.wait(60) == 0 and ended_whole(tmp_path)
    assert len(first.said()) == 1


@pytest.mark.slow
def test_a_job_whose_store_is_lost_ends_with_one_line(host):
    _, first, second = two_hosts(host, '2')
    trains(first, second)
    first.signal(signal.SIGKILL)
    assert second.process.wait(60) == 1
    (line,) = second.said()
    assert 'lost rank' in line and '--init_from=auto' in line
