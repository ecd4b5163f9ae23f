import pytest
from serving_process import serving


@pytest.fixture(scope='session')
def server(trained, tmp_path_factory):
    """It serves a model of characters, which knows no end of text."""
    with serving(tmp_path_factory.mktemp('server'), trained) as running:
        yield running


@pytest.fixture(scope='session')
def chat_server(chat_model, tmp_path_factory):
    with serving(tmp_path_factory.mktemp('server'), chat_model) as running:
        yield running
