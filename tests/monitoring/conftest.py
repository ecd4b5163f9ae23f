import pytest


@pytest.fixture
def tiny(tiny):
    """Without the checks before the first step, which tests/checks has."""
    return [*tiny, '--check=False']
