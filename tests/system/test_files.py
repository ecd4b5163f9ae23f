"""Files that are whole or absent, and one run at a time in a folder."""

from pathlib import Path

import pytest
from helpers import fails

import train
from plaingpt.system.files import append_line, lock_output_dir


def test_a_line_does_not_continue_half_of_another(tmp_path):
    path = tmp_path / 'x.jsonl'
    path.write_bytes(b'{"a": 1}\n{"a": \xc3')  # killed in the middle of a character
    append_line(path, {'a': 2})
    append_line(path, {'a': 3})
    assert path.read_bytes() == b'{"a": 1}\n{"a": \xc3\n{"a": 2}\n{"a": 3}\n'


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no full disk here')
def test_a_line_that_the_disk_refuses_is_told(capsys):
    append_line('/dev/full', {'a': 1})
    assert 'a line of /dev/full is lost: No space left on device' in capsys.readouterr().err


# -----------------------------------------------------------------------------
# one run at a time in a folder


def test_a_folder_in_use_is_refused_and_may_be_evaluated(tiny, trained, capsys, monkeypatch):
    tiny = [*tiny, f'--out_dir={trained}', '--init_from=resume']
    before = (trained / 'metrics.jsonl').read_bytes()
    with lock_output_dir(trained):
        assert 'a run is writing there' in fails(capsys, monkeypatch, train.main, *tiny)
        train.main([*tiny, '--eval_only'])
    assert (trained / 'metrics.jsonl').read_bytes() == before
    train.main(tiny)  # and is free again
