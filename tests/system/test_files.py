import errno
import fcntl
import os

import pytest

from plaingpt.system.files import locked


@pytest.mark.parametrize('code', [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_a_folder_that_cannot_be_locked_is_used_with_one_warning_also_after_a_kill(
        code, tmp_path, monkeypatch, capsys, recwarn):
    def flock(fd, operation):
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(fcntl, 'flock', flock)
    for left in ('', f'{os.getpid()}\nanother-host\n'):  # as filelock's soft locks are
        (tmp_path / '.lock').write_text(left)
        with locked(tmp_path, 'in use'):
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == 1 and str(tmp_path) in lines[0] and os.strerror(code) in lines[0]
        assert not os.listdir(tmp_path)
    assert not recwarn.list


def test_a_lock_that_cannot_be_released_does_not_fail_what_was_done(tmp_path, monkeypatch):
    lock = fcntl.flock

    def flock(fd, operation):
        if operation == fcntl.LOCK_UN:
            raise OSError(errno.EIO, 'Input/output error')
        lock(fd, operation)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, 'flock', flock)
        with locked(tmp_path, 'in use'):
            pass
    with locked(tmp_path, 'in use'):
        pass


def test_a_lock_file_that_may_not_be_opened_is_an_error_that_names_it(tmp_path):
    (tmp_path / '.lock').mkdir()
    with pytest.raises(OSError) as error, locked(tmp_path, 'in use'):
        pass
    assert error.value.filename.endswith('.lock')
