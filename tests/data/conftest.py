import shutil

import pytest
from processes import fails

import prepare
from plaingpt.data import encoding, text_files


@pytest.fixture
def own_data(char_data, tmp_path):
    """A prepared folder that the test may damage."""
    return shutil.copytree(char_data, tmp_path / 'data')


@pytest.fixture
def small_batches(monkeypatch):
    """prepare.py reads and encodes little at a time, so that a short text has many batches."""
    monkeypatch.setattr(encoding, 'BATCH_CHARS', 2**13)
    monkeypatch.setattr(text_files, 'BLOCK_CHARS', 1001)


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """refused(*argv) runs prepare.py by bytes, which has to end in one line and to write nothing
    → that line."""
    def run(*argv):
        line = fails(capsys, monkeypatch, prepare.main, argv[0], '--tokenizer=byte',
                     f'--data_dir={tmp_path}/refused', *argv[1:])
        assert not (tmp_path / 'refused').exists(), argv
        return line
    return run
