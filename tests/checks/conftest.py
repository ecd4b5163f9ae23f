import pytest
import torch
from processes import options
from runs import CHECKED
from sample_data import prepare_documents

import train
from configurator import load_config
from plaingpt.checks.preflight import preflight
from plaingpt.core.settings import TrainConfig
from plaingpt.core.start import StartingPoint
from plaingpt.system.distributed import World
from plaingpt.system.errors import UserError


@pytest.fixture
def failed(char_data, tmp_path, capsys):
    """failed(config file, …, setting=value, …) → the names of the checks that fail for a small run
    of these settings. It is set up in this process, and nothing of it is written."""
    def failed(*files, **settings):
        settings = {**CHECKED, 'dataset': char_data, 'out_dir': tmp_path / 'out', **settings}
        start = StartingPoint()
        config = load_config(TrainConfig, [*map(str, files), *options(**settings)],
                             read_saved=start.read)
        capsys.readouterr()
        try:
            preflight(train.setup(config, start, World(), torch.device('cpu'), ''))
        except UserError as problem:
            assert '--skip_checks=' in str(problem), problem
        return [line.removeprefix('FAILED ') for line in capsys.readouterr().out.splitlines()
                if line.startswith('FAILED ')]
    return failed


@pytest.fixture(scope='session')
def documents(text_file, tmp_path_factory):
    """A dataset in which each line of the text is a document."""
    return prepare_documents(tmp_path_factory.mktemp('checks') / 'documents',
                             text_file.read_text().splitlines())


@pytest.fixture
def fails_with():
    """fails_with(word, …) → the error of a command train.py with these words."""
    def fails_with(*words):
        with pytest.raises(UserError) as problem:
            train.main([*words])
        return str(problem.value)
    return fails_with


@pytest.fixture
def patch(monkeypatch):
    """patch(owner, name, change): owner.name becomes change(what it was) until the test ends."""
    # a changed F.scaled_dot_product_attention is called in bfloat16 too
    monkeypatch.setattr('plaingpt.core.attention.MAX_LENGTH', 0)
    return lambda owner, name, change: monkeypatch.setattr(
        owner, name, change(getattr(owner, name)))
