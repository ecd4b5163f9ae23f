"""One training run at a time in a folder."""

import os
import signal

from helpers import exit_code, fails, fork, wait_until

import train
from plaingpt.system.files import lock_output_dir, locked


def test_a_folder_in_use_is_refused_and_may_be_evaluated(tiny, trained, capsys, monkeypatch):
    tiny = [*tiny, f'--out_dir={trained}', '--init_from=resume']
    before = (trained / 'metrics.jsonl').read_bytes()
    with lock_output_dir(trained):
        assert 'a run is writing there' in fails(capsys, monkeypatch, train.main, *tiny)
        train.main([*tiny, '--eval_only'])
    assert (trained / 'metrics.jsonl').read_bytes() == before
    train.main(tiny)  # and is free again


def test_a_killed_run_does_not_block_its_folder(tiny, tmp_path):
    log = tmp_path / 'log'
    run = fork(train.main, *tiny, '--max_iters=100000', log=log)
    wait_until(lambda: log.exists() and 'iter      2' in log.read_text())
    os.kill(run, signal.SIGKILL)
    exit_code(run)
    train.main([*tiny, '--max_iters=1'])
    assert not (tmp_path / 'out/.lock').exists()


def test_of_many_processes_one_gets_the_lock(tmp_path):
    def take(_):
        with locked(tmp_path, 'in use'):
            wait_until(lambda: (tmp_path / 'end').exists())
    logs = [tmp_path / f'log-{i}' for i in range(4)]
    pids = [fork(take, log=log) for log in logs]
    wait_until(lambda: sum('in use' in log.read_text() for log in logs if log.exists()) == 3)
    (tmp_path / 'end').touch()
    assert sorted(map(exit_code, pids)) == [0, 2, 2, 2]
