"""The processes of a job: where one is lost, hangs or never comes, the others end and say so."""

import os
import re
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import repeat
from pathlib import Path

import pytest
import torch
from processes import exit_code, fork_job, launch, ranks, wait_until

import train
from model import GPT, GPTConfig
from plaingpt.parallel.job import process_group
from plaingpt.system import distributed
from plaingpt.system.distributed import launched_world
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.settings import TrainConfig
from plaingpt.training.step import Step

CPU = torch.device('cpu')


def error_in(log):
    """The line of an error. torch may print lines of its own before; no traceback follows."""
    text = log.read_text()
    [line] = re.findall(r'^error: .*', text, re.M)
    assert 'Traceback' not in text
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
    (2, 1, signal.SIGSTOP, 3)])
def test_a_process_that_is_killed_or_hangs_ends_the_others(tmp_path, size, lost, how, timeout_s):
    pids, logs = fork_job(work, size, tmp_path, timeout_s)
    wait_until(lambda: working(logs))
    os.kill(pids[lost], how)
    for rank in pids.keys() - {lost}:
        assert exit_code(pids[rank]) == 2 and 'or lost it' in error_in(logs[rank])
    os.kill(pids[lost], signal.SIGKILL)
    assert exit_code(pids[lost]) == -signal.SIGKILL


@pytest.mark.parametrize('missing', [[1, 2], pytest.param([0], marks=pytest.mark.slow)])
def test_where_processes_never_come_the_others_end_after_a_while(tmp_path, missing):
    pids, logs = fork_job(work, 3, tmp_path, 2, missing=missing)
    for rank, pid in pids.items():
        assert exit_code(pid) == 2
        assert f'error: rank {rank} of 3 did not meet another' in error_in(logs[rank])
        assert missing != [1, 2] or '1/3 clients joined' in error_in(logs[rank])


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


def test_a_process_that_is_done_early_waits_for_those_that_are_not(tmp_path):
    launch(leave_early, 2, tmp_path, tmp_path)


# -----------------------------------------------------------------------------
# a step


def test_a_step_of_several_processes_sends_gradients_alone_which_take_no_memory_beside(
        monkeypatch):
    for key, value in ranks(1)[0].items():
        monkeypatch.setenv(key, value)
    model = GPT(GPTConfig(16, 65, 2, 2, 32, rotary=True))
    assert [name for name, _ in model.named_buffers()]  # tables of constants, which do not travel
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    optimizer = build_optimizer(model, TrainConfig())
    idx = torch.zeros(2, 16, dtype=torch.int64)
    with process_group(launched_world(), CPU):
        ddp = train.replicate(model, CPU)
        with torch.profiler.profile() as profile:
            ddp(idx, idx)[1].backward()
        step, places = Step(ddp, optimizer, scaler, nullcontext(), 1.0, micro_steps=3), []
        for _ in range(3):
            step.forward_backward(repeat((idx, idx)))
            step.update(1e-3)
            places.append([p.grad.data_ptr() for p in model.parameters()])
    sent = {event.key for event in profile.key_averages()}
    assert 'gloo:all_reduce' in sent and 'gloo:broadcast' not in sent
    assert places[1] == places[2]  # DDP arranges its buckets in the first step
    buckets = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
               for p in model.parameters()}
    assert sum(buckets.values()) == sum(p.nbytes for p in model.parameters())
    assert len(buckets) < len(places[2])  # gradients are parts of what travels
    assert not any(p.grad.any() for p in model.parameters())
