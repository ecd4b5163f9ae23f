import resource
import signal

import pytest
from helpers import ROOT, exit_code, fork, run

from plaingpt.system import files
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line


def test_a_line_does_not_continue_half_of_another(tmp_path):
    path = tmp_path / 'x.jsonl'
    path.write_bytes(b'{"a": 1}\n{"a": \xc3')  # killed in the middle of a character
    append_line(path, {'a': 2})
    append_line(path, {'a': 3})
    assert path.read_bytes() == b'{"a": 1}\n{"a": \xc3\n{"a": 2}\n{"a": 3}\n'


def test_a_line_that_the_disk_refuses_is_told_and_leaves_no_half_of_itself(tmp_path):
    def main(argv):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
        for number in (1, 2, 33333333333333333333333333333333333, 4):
            append_line(tmp_path / 'rows', {'number': number})

    assert exit_code(fork(main, log=tmp_path / 'log')) == 0
    assert (tmp_path / 'rows').read_text() == ''.join(f'{{"number": {n}}}\n' for n in (1, 2, 4))
    assert 'a line of ' in (tmp_path / 'log').read_text()


@pytest.mark.slow
def test_a_disk_that_fills_up_loses_nothing():
    out = run(ROOT / 'tools/torture.py', 'disks', '--disks=1', '--seed=3')
    assert 'nothing was lost' in out and 'disks: 1 rounds' in out


def test_a_file_in_the_place_of_a_folder_is_named_so(tmp_path):
    (tmp_path / 'README.md').touch()
    with pytest.raises(UserError, match=r'out_dir=\S*README\.md is a file: name a folder'):
        files.make_writable(tmp_path / 'README.md')
