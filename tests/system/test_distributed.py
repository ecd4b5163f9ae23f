"""The processes of a job: who is lost, hangs or never comes is named, and the job ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, exit_code, fails, fork, ranks, wait_until

import train
from model import GPT, GPTConfig
from plaingpt.parallel.sharding import Replicated
from plaingpt.system import distributed
from plaingpt.system.distributed import (
    Heartbeat,
    World,
    launched_world,
    process_group,
    started,
)
from plaingpt.system.errors import UserError

CPU = torch.device('cpu')


def start(tmp_path, size, main, *argv, missing=(), before=None):
    """Fork a job's processes, without torchrun → {rank: process id}, {rank: its log}"""
    here = {rank: env for rank, env in enumerate(ranks(size)) if rank not in missing}
    logs = {rank: tmp_path / f'log{rank}' for rank in here}
    return {rank: fork(main, *argv, log=logs[rank], before=before, **env)
            for rank, env in here.items()}, logs


def last_line(log):
    """The line of an error, which must be all that was printed of it."""
    lines = [line for line in log.read_text().splitlines() if not line.startswith('[W')]
    assert 'Traceback' not in '\n'.join(lines) and lines, lines
    return lines[-1]


def work(argv):
    """Collectives until another process is gone."""
    with process_group(launched_world(), CPU):
        for n in range(10**6):
            distributed.barrier()
            print(n)
            time.sleep(0.01)


@pytest.mark.parametrize(('size', 'lost'), [(2, 0), (3, 2)])
def test_a_process_that_is_killed_ends_the_others_which_name_it(tmp_path, size, lost):
    pids, logs = start(tmp_path, size, work)
    wait_until(lambda: all(log.exists() and '2\n' in log.read_text() for log in logs.values()))
    os.kill(pids[lost], signal.SIGKILL)
    for rank, pid in pids.items():
        assert exit_code(pid) == (2 if rank != lost else -signal.SIGKILL)
        # one that has ended for that reason may be named as well
        assert rank == lost or re.match(rf'error: lost ranks? (\d, )*{lost}\b',
                                        last_line(logs[rank]))


def run_out_of_memory():
    """In a process of a job: the third step finds no memory, on rank 1."""
    original, steps = train.forward_backward, []

    def without_memory(*arguments):
        steps.append(1)
        if len(steps) == 3 and os.environ['RANK'] == '1':
            raise torch.OutOfMemoryError('CUDA out of memory')
        return original(*arguments)
    train.forward_backward = without_memory


def test_out_of_memory_is_explained_by_the_process_that_has_none(tiny, tmp_path):
    pids, logs = start(tmp_path, 2, train.main, *tiny, '--check=False', before=run_out_of_memory)
    assert [exit_code(pid) for pid in pids.values()] == [2, 2]
    assert 'error: out of memory on cpu' in last_line(logs[1])
    assert 'error: lost rank 1' in last_line(logs[0])


def wait_briefly():
    distributed.JOIN_S = 1


@pytest.mark.parametrize('missing', [[1, 2], pytest.param([0], marks=pytest.mark.slow)])
def test_processes_that_never_come_are_named_after_a_while(tmp_path, missing):
    pids, logs = start(tmp_path, 3, work, missing=missing, before=wait_briefly)
    name = f'rank{"s" if len(missing) > 1 else ""} {", ".join(map(str, missing))} of 3'
    for rank, pid in pids.items():
        assert exit_code(pid) == 2
        assert f'error: waited 1 s for {name}' in last_line(logs[rank])


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
    pids, _ = start(tmp_path, 2, leave_early, tmp_path)
    assert [exit_code(pid) for pid in pids.values()] == [0, 0]


def test_an_address_that_cannot_be_had_is_a_mistake(tiny, capsys, monkeypatch):
    env = ranks(1)[0]
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', int(env['MASTER_PORT'])))
        taken.listen()
        assert 'another MASTER_PORT' in fails(capsys, monkeypatch, train.main, *tiny)
    monkeypatch.delenv('MASTER_PORT')
    assert 'MASTER_PORT: not set' in fails(capsys, monkeypatch, train.main, *tiny)


def test_an_environment_that_names_no_job_is_a_mistake(monkeypatch):
    job = dict(RANK='0', LOCAL_RANK='0', WORLD_SIZE='2', LOCAL_WORLD_SIZE='2',
               MASTER_ADDR='127.0.0.1', MASTER_PORT='29500')
    for name, value in (('WORLD_SIZE', 'abc'), ('RANK', ''), ('RANK', '7'),
                        ('MASTER_PORT', 'abc'), ('MASTER_PORT', '99999')):
        for key, each in {**job, name: value}.items():
            monkeypatch.setenv(key, each)
        with pytest.raises(UserError, match=f'{name}='), process_group(launched_world(), CPU):
            pass


# -----------------------------------------------------------------------------
# the heartbeat, with a clock that goes from beat to beat


class Clock:
    """In place of an Event: `wait` passes the time and calls `tick`; over after so many beats."""

    def __init__(self, tick=lambda: None, beats=1000):
        self.tick, self.left = tick, beats

    def wait(self, seconds=None):
        self.tick()
        self.left -= 1
        return self.left < 0


@pytest.fixture
def heartbeat(monkeypatch):
    """That of rank 0 of two processes, whose end is a SystemExit with its line. pid: rank 1's"""
    def give_up(line, wait_s=0):
        raise SystemExit(line)

    def heartbeat(clock, pid=None):
        me = os.getpid()
        peers = [(socket.gethostname(), peer, started(me)) for peer in (me, pid or me)]
        made = Heartbeat(dist.HashStore(), peers, World(rank=0, size=2))
        made.over = clock
        monkeypatch.setattr(time, 'sleep', clock.wait)
        return made

    monkeypatch.setattr(distributed, 'give_up', give_up)
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    return heartbeat


def test_a_process_that_hangs_is_named_and_the_job_ends(heartbeat):
    with pytest.raises(SystemExit, match=r'no sign of life from rank 1 on .* for 120 s'):
        heartbeat(Clock()).follow_next()


def test_a_process_that_is_slow_does_not_end_the_job(heartbeat):
    def tick():
        if clock.left % 20 == 0:  # of 5 s each; 24 of them are allowed
            slow.store.add('beats/1', 1)

    clock = Clock(tick)
    slow = heartbeat(clock)
    slow.follow_next()


def test_a_process_that_dies_unnoticed_by_a_collective_is_named(heartbeat):
    with pytest.raises(SystemExit, match='lost rank 1'):
        heartbeat(Clock(), pid=999_999_999).follow_next()


def test_a_store_that_does_not_answer_ends_the_job(heartbeat):
    with pytest.raises(SystemExit, match='has not answered for 120 s'):
        heartbeat(Clock()).watch_store()


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


@pytest.mark.slow
def test_under_torchrun_a_process_that_hangs_is_named_and_the_job_restarted(tiny, tmp_path):
    script, log = tmp_path / 'fast.py', tmp_path / 'log'
    script.write_text(FAST)
    options = ['--max_iters=600', '--lr_decay_iters=600', '--eval_interval=600',
               '--checkpoint_interval=100', '--init_from=auto', '--log_interval=1']
    with open(log, 'w') as output, subprocess.Popen(
            [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
             '--max-restarts=3', script, *tiny, *options], stdout=output, stderr=output) as job:
        wait_until(lambda: 'iter 150' in log.read_text())
        workers = subprocess.run(['pgrep', '-P', str(job.pid)], capture_output=True, text=True)
        os.kill(int(workers.stdout.split()[-1]), signal.SIGSTOP)
        assert job.wait(300) == 0
    rows = map(json.loads, (tmp_path / 'out/metrics.jsonl').read_text().splitlines())
    assert [row['iter'] for row in rows if 'loss' in row] == list(range(1, 601))
    [line] = re.findall(r'^error: .*', log.read_text(), re.M)
    assert 'no sign of life from rank ' in line and 'resumed from' in log.read_text()


# -----------------------------------------------------------------------------
# a step


def test_a_step_of_several_processes_sends_gradients_and_no_tables_of_constants(monkeypatch):
    for key, value in ranks(1)[0].items():
        monkeypatch.setenv(key, value)
    model = GPT(GPTConfig(16, 65, 1, 2, 32, rotary=True))
    assert [name for name, _ in model.named_buffers()]
    idx = torch.zeros(2, 16, dtype=torch.int64)
    with process_group(launched_world(), CPU):
        ddp = Replicated(model, CPU, False, World(size=2)).train
        with torch.profiler.profile() as profile:
            ddp(idx, idx)[1].backward()
    sent = {event.key for event in profile.key_averages()}
    assert 'gloo:all_reduce' in sent and 'gloo:broadcast' not in sent
