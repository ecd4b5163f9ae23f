"""One training run at a time in a folder."""

import errno
import os
import socket

import pytest
from helpers import fails

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


@pytest.fixture
def without_locks(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(files.fcntl, 'flock', refuse)
    monkeypatch.setattr(files.time, 'sleep', lambda _: None)


def test_a_run_holds_its_out_dir_by_a_file_and_a_dead_one_does_not_block_it(
        tiny, tmp_path, capsys, monkeypatch, without_locks):
    out = tmp_path / 'out'
    out.mkdir()
    with lock_output_dir(out):
        message = fails(capsys, monkeypatch, train.main, *tiny)
    assert f'process {os.getpid()} on {socket.gethostname()} holds it' in message
    assert f'delete {out}/.lock' in message
    (out / '.lock').write_text(f'{socket.gethostname()} 999999999 1')
    train.main([*tiny, '--max_iters=1'])
    assert not (out / '.lock').exists()


def test_the_holder_of_a_lock_file(tmp_path, without_locks):
    host, me = socket.gethostname(), os.getpid()
    for text, holds in (('elsewhere 1 123', 'process 1 on elsewhere'),
                        (f'{host} {me} 1', None),  # the number is another process's now
                        (f'{host} {me} {files.started(me)}', 'process'),
                        ('', 'somebody'), ('what is this file', 'somebody')):
        (tmp_path / '.lock').write_text(text)
        assert in_use(tmp_path) == bool(holds), text
        if holds:
            with pytest.raises(UserError, match=f'busy; {holds}'), locked(tmp_path, 'busy'):
                pass
        else:
            with locked(tmp_path):
                assert in_use(tmp_path)
        assert os.listdir(tmp_path) == ['.lock'] * bool(holds)
