import errno
import fcntl
import os

import pytest

from plaingpt.system.files import locked


@pytest.mark.parametrize('code', [errno.ENOSYS, errno.EIO])  # filelock treats the first specially
def test_a_folder_on_a_file_system_without_locks_is_used_after_one_warning(
        code, tmp_path, monkeypatch, capsys, recwarn):
    def flock(fd, operation):
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(fcntl, 'flock', flock)
    for left_by_a_kill in ('', f'{os.getpid()}\nanother-host\n'):
        (tmp_path / '.lock').write_text(left_by_a_kill)
        with locked(tmp_path, 'in use'):
            [line] = capsys.readouterr().err.splitlines()
            assert str(tmp_path) in line
            assert os.strerror(code) in line
        assert not os.listdir(tmp_path)
    assert not recwarn.list
