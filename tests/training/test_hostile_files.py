import pytest
from helpers import run


@pytest.mark.slow
def test_a_short_torture_with_files_finds_nothing():
    # In a process of its own: forks of this one would lack the threads of earlier tests.
    out = run('tools/torture_files.py', '--corruptions=5', '--json=5', '--models=5', '--seed=1')
    assert 'nothing went wrong' in out and 'hostile models: 5 (5 refused): 0 wrong' in out
