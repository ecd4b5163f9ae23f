"""The processes of a job: where one is lost, hangs or never comes, the others end and say so."""

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from processes import exit_code, fork_job, launch, ranks, wait_until

import train
from model import GPT, GPTConfig
from plaingpt.system import distributed
from plaingpt.system.distributed import launched_world, process_group

CPU = torch.device('cpu')


def error_in(log):
    """The line of an error. torch may print lines of its own before; no traceback follows."""
    text = log.read_text()
    assert 'Traceback' not in text
    [line] = re.findall(r'^error: .*', text, re.M)
    return line


def work(argv):
    """Collectives until another process is gone or silent. argv: how many seconds to wait"""
    distributed.TIMEOUT = timedelta(seconds=int(argv[0]))
    with process_group(launched_world(), CPU):
        for n in range(10**6):
            distributed.barrier()
            print(n)
            time.sleep(0.01)


def working(logs):
    return all(log.exists() and '2\n' in log.read_text() for log in logs.values())


@pytest.mark.parametrize(('size', 'lost', 'how', 'timeout_s'), [
    pytest.param(2, 0, signal.SIGKILL, 60, marks=pytest.mark.slow), (3, 2, signal.SIGKILL, 60),
    pytest.param(2, 1, signal.SIGSTOP, 3, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_or_hangs_ends_the_others(tmp_path, size, lost, how, timeout_s):
    pids, logs = fork_job(work, size, tmp_path, timeout_s)
    wait_until(lambda: working(logs))
    os.kill(pids[lost], how)
    for rank in pids.keys() - {lost}:
        assert exit_code(pids[rank]) == 2
        assert f'rank {rank} of {size}' in error_in(logs[rank])
    os.kill(pids[lost], signal.SIGKILL)
    assert exit_code(pids[lost]) == -signal.SIGKILL


@pytest.mark.parametrize('missing', [[1, 2], pytest.param([0], marks=pytest.mark.slow)])
def test_a_process_ends_if_the_others_never_come(tmp_path, missing):
    pids, logs = fork_job(work, 3, tmp_path, 2, missing=missing)
    for rank, pid in pids.items():
        assert exit_code(pid) == 2
        assert f'rank {rank} of 3' in error_in(logs[rank])


def leave_early(argv):
    """Rank 0 has nothing left to do before rank 1 ends its work."""
    idle, worked = (Path(argv[0], name) for name in ('idle', 'worked'))
    with process_group(launched_world(), CPU):
        if launched_world().is_main:
            idle.touch()
        else:
            wait_until(idle.exists)
            worked.touch()
    assert worked.exists()


def test_a_process_that_is_done_early_waits_for_the_others(tmp_path):
    launch(leave_early, 2, tmp_path, tmp_path)


# -----------------------------------------------------------------------------
# a step


@pytest.fixture
def ddp(monkeypatch):
    """A model as a process of a job trains it."""
    for key, value in ranks(1)[0].items():
        monkeypatch.setenv(key, value)
    with process_group(launched_world(), CPU):
        yield train.replicate(GPT(GPTConfig(16, 65, 2, 2, 32, rotary=True)), CPU)


IDX = torch.zeros(2, 16, dtype=torch.int64)


def test_processes_send_each_other_only_gradients(ddp):
    assert [*ddp.module.named_buffers()]  # tables of constants
    with torch.profiler.profile() as profile:
        ddp(IDX, IDX)[1].backward()
    sent = {event.key for event in profile.key_averages()}
    assert 'gloo:all_reduce' in sent
    assert 'gloo:broadcast' not in sent
