"""The processes of a job that is started without torchrun: those that never come, and that die."""

import os
import signal
import socket

import pytest
import torch
from helpers import exit_code, fails, fork, ranks, wait_until

import train
from model import GPT, GPTConfig
from plaingpt.parallel.sharding import Replicated
from plaingpt.system import distributed


def wait_briefly():
    distributed.JOIN_S = 1


def last_line(log):
    """The line of an error, which must be all that was printed of it."""
    lines = [line for line in log.read_text().splitlines() if not line.startswith('[W')]
    assert 'Traceback' not in '\n'.join(lines) and lines, lines
    return lines[-1]


@pytest.mark.parametrize('missing', [[0], [1, 2]])
def test_ranks_that_never_come_are_named_after_a_while(tiny, tmp_path, missing):
    tiny = [*tiny, '--gradient_accumulation_steps=3']
    here = {rank: env for rank, env in enumerate(ranks(3)) if rank not in missing}
    logs = {rank: tmp_path / f'log{rank}' for rank in here}
    pids = [fork(train.main, *tiny, log=logs[rank], before=wait_briefly, **env)
            for rank, env in here.items()]
    assert [exit_code(pid) for pid in pids] == [2] * len(pids)
    name = f'rank{"s" if len(missing) > 1 else ""} {", ".join(map(str, missing))} of 3'
    for log in logs.values():
        assert f'error: waited 1 s for {name}' in last_line(log)


def test_a_rank_0_that_dies_while_others_wait_for_more_is_named(tiny, tmp_path):
    first, second, _ = ranks(3)
    logs = [tmp_path / 'log0', tmp_path / 'log1']
    pids = [fork(train.main, *tiny, '--gradient_accumulation_steps=3', log=log, before=before,
                 **env)
            for log, env, before in zip(logs, (first, second), (die_in_gather, None), strict=True)]
    assert [exit_code(pid) for pid in pids] == [-signal.SIGKILL, 2]
    assert 'error: lost rank 0 of 3 at 127.0.0.1:' in last_line(logs[1])


def die_in_gather():
    def gather(store, world, me):
        store.get('hello/1')  # waits for rank 1
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.gather = gather


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


@pytest.mark.parametrize(('size', 'lost'), [(2, 0), (4, 2)])
def test_a_process_that_dies_ends_the_others_which_name_it(tiny, tmp_path, size, lost):
    logs = [tmp_path / f'log{rank}' for rank in range(size)]
    pids = [fork(train.main, *tiny, '--gradient_accumulation_steps=4', '--max_iters=100000',
                 '--checkpoint_interval=5', '--checkpoint_async', log=log, **env)
            for log, env in zip(logs, ranks(size), strict=True)]
    wait_until(lambda: logs[0].exists() and 'iter     10' in logs[0].read_text())
    os.kill(pids[lost], signal.SIGKILL)
    assert [exit_code(pid) for pid in pids] == [2 if rank != lost else -signal.SIGKILL
                                                for rank in range(size)]
    for rank, log in enumerate(logs):
        if rank != lost:
            line = last_line(log)
            assert line.startswith('error: lost rank') and f' {lost}' in line


@pytest.mark.parametrize(('name', 'value'), [
    ('WORLD_SIZE', 'abc'), ('RANK', ''), ('RANK', '7'), ('MASTER_PORT', 'abc'),
    ('MASTER_PORT', '99999')])
def test_an_environment_that_names_no_job_is_a_mistake(tiny, capsys, monkeypatch, name, value):
    job = dict(RANK='0', LOCAL_RANK='0', WORLD_SIZE='2', LOCAL_WORLD_SIZE='2',
               MASTER_ADDR='127.0.0.1', MASTER_PORT='29500')
    for key, each in {**job, name: value}.items():
        monkeypatch.setenv(key, each)
    monkeypatch.setattr('time.sleep', lambda _: None)
    assert f'{name}=' in fails(capsys, monkeypatch, train.main, *tiny)


def test_a_step_of_several_processes_sends_gradients_and_no_tables_of_constants(monkeypatch):
    for key, value in ranks(1)[0].items():
        monkeypatch.setenv(key, value)
    model = GPT(GPTConfig(16, 65, 1, 2, 32, rotary=True))
    assert [name for name, _ in model.named_buffers()]
    idx, cpu = torch.zeros(2, 16, dtype=torch.int64), torch.device('cpu')
    with distributed.process_group(distributed.launched_world(), cpu):
        ddp = Replicated(model, cpu, False, distributed.World(size=2)).train
        with torch.profiler.profile() as profile:
            ddp(idx, idx)[1].backward()
    sent = {event.key for event in profile.key_averages()}
    assert 'gloo:all_reduce' in sent and 'gloo:broadcast' not in sent
