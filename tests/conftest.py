import os

# Tiny models gain nothing from a second thread, and lose a lot where the machine is busy.
os.environ['OMP_NUM_THREADS'] = '1'
# Tests are of CPUs. Where torch sees a GPU, a fork of a process that has trained cannot train.
os.environ['CUDA_VISIBLE_DEVICES'] = ''
# What whoever runs the tests has set for their own work: tokens, offline modes, caches, a job.
for name in [*os.environ]:
    if name.startswith(('HF_', 'HUGGING', 'TRANSFORMERS_', 'PLAINGPT_', 'TORCHELASTIC_')) \
            or name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'):
        del os.environ[name]

import difflib
import inspect
import optparse
import signal

import pytest
import tiktoken.load
import torch
from chat_model import train_chat_model
from hub import HUB
from hypothesis import HealthCheck, settings
from processes import ROOT
from runs import TINY
from sample_data import openai_gpt2

import prepare
import train
from plaingpt.core import optimizers

# The first example pays for imports, and other programs may use the cores.
settings.register_profile('busy', deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile('busy')


def pytest_addoption(parser):
    parser.addoption('--bfloat16', choices=('on', 'off'), help='take this CPU for one with, or '
                     'without, bfloat16 in hardware')


def pytest_configure(config):
    if chosen := config.getoption('bfloat16'):
        torch.cpu.get_capabilities = lambda: {'avx512_bf16': chosen == 'on'}


@pytest.fixture(scope='session', autouse=True)
def working_directory(tmp_path_factory):
    """No test meets data/ and out*/ of who runs it, nor does a fixture of many tests."""
    os.chdir(tmp_path_factory.mktemp('cwd'))
    os.environ['HF_MODULES_CACHE'] = str(tmp_path_factory.mktemp('modules'))  # of transformers
    pytest.MonkeyPatch().setenv('PYTHONPATH', str(ROOT / 'tests/stand_in'), prepend=os.pathsep)


@pytest.fixture(autouse=True)
def own_working_directory(tmp_path, monkeypatch):
    """Nor those of another test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def signals():
    """A script takes signals until its process ends, which a test in this process outlives."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope='session')
def text_file(tmp_path_factory):
    """Real text that every machine has: 100 KB of Python, the same in each version."""
    path = tmp_path_factory.mktemp('text') / 'code.txt'
    text = inspect.getsource(difflib) + inspect.getsource(optparse)
    path.write_text(text[:100_000], encoding='utf-8')
    return path


@pytest.fixture(scope='session')
def char_data(text_file, tmp_path_factory):
    """A prepared folder of that text, by characters."""
    folder = tmp_path_factory.mktemp('data') / 'code_char'
    prepare.main(['text', f'--input={text_file}', '--tokenizer=char', f'--data_dir={folder}'])
    return folder


@pytest.fixture
def tiny(char_data, tmp_path):
    """The command line of a run that takes a second; out_dir is tmp_path/out."""
    return [*TINY, f'--dataset={char_data}', f'--out_dir={tmp_path}/out']


@pytest.fixture(scope='session')
def trained(char_data, tmp_path_factory):
    """An out_dir with a tiny model trained for 6 iterations."""
    out_dir = tmp_path_factory.mktemp('trained') / 'out'
    train.main([*TINY, f'--dataset={char_data}', f'--out_dir={out_dir}'])
    return out_dir


@pytest.fixture(scope='session')
def chat_model(tmp_path_factory):
    """An out_dir with a tiny model that knows the answers of chat_model.py."""
    return train_chat_model(tmp_path_factory.mktemp('tuned') / 'tuned')


@pytest.fixture
def real_gpt2(monkeypatch):
    """GPT-2's tokenizer has its real vocabulary, if tiktoken has downloaded that before."""
    monkeypatch.setattr(tiktoken.load, 'read_file', lambda url: pytest.skip(
        f"{url} is not in tiktoken's cache"))
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, 'gpt2', tiktoken.Encoding(**openai_gpt2()))


@pytest.fixture
def muon_in_float32(monkeypatch):
    """Muon rounds nothing to bfloat16."""
    monkeypatch.setattr(optimizers, 'cpu_has_bfloat16', lambda: False)


@pytest.fixture
def hub():
    """A stand-in of the Hugging Face hub, without a repository: see hub.py."""
    with HUB.emptied():
        yield HUB
