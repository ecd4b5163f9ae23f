import pytest


@pytest.fixture
def tiny(tiny):
    """Without the checks before the first step, which tests/preflight has."""
    return [*tiny, '--check=False']
