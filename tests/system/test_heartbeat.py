"""Processes that hang: the others end and name them. Those that are only slow, or done: they do not
end."""

import os
import signal
import socket
import time
from functools import partial

import pytest
import torch
from helpers import exit_code, fork, ranks, wait_until

import train
from plaingpt.system import distributed


def beat_fast():
    distributed.BEAT_S, distributed.HANG_S = 0.2, 3


def said(log):
    return [line for line in log.read_text().splitlines() if line.startswith('error: ')]


def start(tiny, tmp_path, size):
    """A job that trains, and its log files."""
    logs = [tmp_path / f'log{rank}' for rank in range(size)]
    pids = [fork(train.main, *tiny, f'--gradient_accumulation_steps={size}', '--max_iters=1000000',
                 '--eval_interval=1000000', '--check=False', log=log, before=beat_fast, **env)
            for log, env in zip(logs, ranks(size), strict=True)]
    wait_until(lambda: logs[0].exists() and 'iter      5' in logs[0].read_text())
    return pids, logs


def goes_on(log):
    printed = len(log.read_text())
    wait_until(lambda: len(log.read_text()) > printed + 500)


def test_a_process_that_hangs_is_named_once_and_all_end(tiny, tmp_path):
    pids, logs = start(tiny, tmp_path, 3)
    os.kill(pids[1], signal.SIGSTOP)
    stopped = time.monotonic()
    assert exit_code(pids[0]) == exit_code(pids[2]) == 1
    assert time.monotonic() - stopped < 10  # 3 s on a machine that is not busy
    (line,) = [line for log in logs for line in said(log)]
    assert f'no sign of life from rank 1 on {socket.gethostname()} for 3 s' in line
    assert '--init_from=auto' in line
    os.kill(pids[1], signal.SIGCONT)
    assert exit_code(pids[1]) in (1, 2)  # it finds that the job is over


def test_a_store_that_hangs_ends_the_others(tiny, tmp_path):
    pids, logs = start(tiny, tmp_path, 2)
    os.kill(pids[0], signal.SIGSTOP)
    assert exit_code(pids[1]) == 1
    (line,) = said(logs[1])
    assert 'rank 0' in line and 'has not answered for 3 s' in line
    os.kill(pids[0], signal.SIGCONT)
    assert exit_code(pids[0]) in (1, 2)


def test_a_process_that_is_slow_and_a_job_that_is_suspended_do_not_end(tiny, tmp_path):
    pids, logs = start(tiny, tmp_path, 2)
    for stopped, seconds in ((pids[:1], 1), (pids[1:], 1), (pids, 4)):
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        goes_on(logs[0])
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert [exit_code(pid) for pid in pids] == [0, 0] and not any(map(said, logs))


def die_before_connecting(rank, others_wait_s):
    def init_process_group(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def join_slowly(world, join=distributed.join):
        joined = join(world)
        time.sleep(others_wait_s)
        return joined
    if os.environ['RANK'] == rank:
        distributed.dist.init_process_group = init_process_group
    else:
        distributed.join = join_slowly
    beat_fast()


@pytest.mark.parametrize('lost, others_wait_s', [('0', 0), ('2', 0), ('0', 1)])
def test_a_process_that_dies_before_all_are_connected_is_named(tiny, tmp_path, lost, others_wait_s):
    logs = [tmp_path / f'log{rank}' for rank in range(3)]
    pids = [fork(train.main, *tiny, '--gradient_accumulation_steps=3', log=log,
                 before=partial(die_before_connecting, lost, others_wait_s), **env)
            for log, env in zip(logs, ranks(3), strict=True)]
    codes = [exit_code(pid) for pid in pids]
    assert codes.pop(int(lost)) == -signal.SIGKILL and set(codes) <= {1, 2}
    lines = [line for log in logs for line in said(log)]
    assert lines and all(line.startswith(f'error: lost rank {lost}') for line in lines)


def work_and_leave(argv):
    """Work alone for argv[rank] seconds after the last collective."""
    world = distributed.launched_world()
    with distributed.process_group(world, torch.device('cpu')):
        distributed.barrier()
        time.sleep(float(argv[world.rank]))


def test_a_process_that_is_done_early_waits_for_those_that_are_not(tmp_path):
    logs = [tmp_path / f'log{rank}' for rank in range(2)]
    pids = [fork(work_and_leave, 0, 4, log=log, before=beat_fast, **env)
            for log, env in zip(logs, ranks(2), strict=True)]
    assert [exit_code(pid) for pid in pids] == [0, 0] and not any(map(said, logs))
