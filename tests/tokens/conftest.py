import shutil

import pytest


@pytest.fixture
def own_data(char_data, tmp_path):
    """A prepared folder that the test may damage."""
    return shutil.copytree(char_data, tmp_path / 'data')
