import pytest
from sample_data import ask, conversations, prepare_corpora, prepare_documents, write_chat

import prepare
import train
from plaingpt.monitoring import run_folder


@pytest.fixture
def tiny(tiny):
    """Without the checks before the first step, which tests/checks has."""
    return [*tiny, '--check=False']


@pytest.fixture
def all_checkpoints(monkeypatch):
    """No checkpoint is removed."""
    monkeypatch.setattr(train, 'KEEP_NEWEST', 1000)


@pytest.fixture
def no_plots(monkeypatch):
    """A run with --report=True spends no second on its plots."""
    monkeypatch.setattr(run_folder, 'write_report', lambda *_: None)


@pytest.fixture(scope='session')
def corpora(text_file, tmp_path_factory):
    """A folder with the datasets data/char, data/byte, data/documents, data/code, data/prose and
    data/chat. Some questions of data/chat fill a sequence: with one in a micro-batch, nothing of it
    is learned."""
    folder, text = tmp_path_factory.mktemp('corpora'), text_file.read_text()
    prepare_corpora(folder, {'byte': text, 'code': text[:6000], 'prose': text[6000:60_000]})
    prepare.main(['text', f'--input={text_file}', '--tokenizer=char',
                  f'--data_dir={folder}/data/char'])
    prepare_documents(folder / 'data/documents', text.splitlines())
    write_chat(folder / 'data/chat', conversations(150) + [ask('?' * 150, 'ab')] * 20,
               conversations(20, seed=1))
    return folder


@pytest.fixture
def data(corpora, tmp_path):
    """These datasets are in the working directory."""
    (tmp_path / 'data').symlink_to(corpora / 'data')
