"""One training run at a time in a folder."""

import errno
import os
import signal
import socket

import pytest
from helpers import exit_code, fails, fork, wait_until

import train
from plaingpt.system import files
from plaingpt.system.errors import UserError
from plaingpt.system.files import in_use, lock_output_dir, locked


def test_a_folder_in_use_is_refused_and_may_be_evaluated(tiny, trained, capsys, monkeypatch):
    tiny = [*tiny, f'--out_dir={trained}', '--init_from=resume']
    before = (trained / 'metrics.jsonl').read_bytes()
    with lock_output_dir(trained):
        assert 'a run is writing there' in fails(capsys, monkeypatch, train.main, *tiny)
        train.main([*tiny, '--eval_only'])
    assert (trained / 'metrics.jsonl').read_bytes() == before
    train.main(tiny)  # and is free again


# -----------------------------------------------------------------------------
# where the file system has no locks


def no_locks():
    def refuse(*_):
        raise OSError(errno.ENOLCK, 'No locks available')
    files.fcntl.flock = refuse


@pytest.fixture
def without_locks(monkeypatch):
    monkeypatch.setattr(files.fcntl, 'flock', files.fcntl.flock)  # put back at the end
    no_locks()


def test_two_runs_do_not_share_an_out_dir_and_a_dead_one_does_not_block_it(
        tiny, tmp_path, capsys, monkeypatch, without_locks):
    log = tmp_path / 'log'
    run = fork(train.main, *tiny, '--max_iters=100000', log=log)
    wait_until(lambda: log.exists() and 'iter      2' in log.read_text())
    message = fails(capsys, monkeypatch, train.main, *tiny)
    assert f'process {run} on {socket.gethostname()} holds it' in message
    assert f'delete {tmp_path}/out/.lock' in message and in_use(tmp_path / 'out')
    os.kill(run, signal.SIGKILL)
    exit_code(run)
    assert not in_use(tmp_path / 'out') and (tmp_path / 'out/.lock').exists()
    train.main([*tiny, '--max_iters=1'])
    assert not (tmp_path / 'out/.lock').exists()


@pytest.mark.parametrize(('text', 'holds'), [
    ('elsewhere 1 123', 'process 1 on elsewhere'),
    ('HOST PID 1', None),  # the number is another process's now
    ('HOST PID START', 'process'),
    ('HOST 999999999 1', None),
    ('', 'somebody'), ('what is this file', 'somebody')])
def test_the_holder_of_a_lock_file(tmp_path, without_locks, text, holds):
    pid = os.getpid()
    text = text.replace('HOST', socket.gethostname()).replace('PID', str(pid))
    (tmp_path / '.lock').write_text(text.replace('START', files.started(pid)))
    assert in_use(tmp_path) == bool(holds)
    if holds:
        with pytest.raises(UserError, match=f'busy; {holds}'), locked(tmp_path, 'busy'):
            pass
    else:
        with locked(tmp_path):
            assert in_use(tmp_path)
    assert os.listdir(tmp_path) == ['.lock'] * bool(holds)


def test_of_many_processes_that_find_a_dead_lock_one_gets_it(tmp_path, without_locks):
    folder = tmp_path / 'out'
    folder.mkdir()

    def take(_):
        with locked(folder):
            (tmp_path / f'held-{os.getpid()}').touch()
            wait_until(lambda: (tmp_path / 'end').exists())
    for turn in range(3):
        (folder / '.lock').write_text(f'{socket.gethostname()} 999999999 1')
        logs = [tmp_path / f'log-{turn}-{i}' for i in range(4)]
        pids = [fork(take, log=log) for log in logs]
        wait_until(lambda logs=logs: sum('in use' in log.read_text() for log in logs
                                         if log.exists()) == 3)
        (tmp_path / 'end').touch()
        assert sorted(map(exit_code, pids)) == [0, 2, 2, 2]
        assert len(list(tmp_path.glob('held-*'))) == turn + 1 and not os.listdir(folder)
        (tmp_path / 'end').unlink()
