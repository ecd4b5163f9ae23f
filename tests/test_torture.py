"""A short run of tools/torture.py, which kills, stops and starves runs and damages their files."""

import sys

import pytest
from processes import ROOT, run


@pytest.mark.slow
def test_nothing_is_lost_in_two_minutes_of_torture():
    rounds = '--kills=6', '--signals=8', '--lost=2', '--disks=4', '--files=30'
    assert 'nothing was lost' in run(sys.executable, ROOT / 'tools/torture.py', *rounds)
