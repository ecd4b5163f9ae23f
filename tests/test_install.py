"""Installation: what pyproject.toml promises holds in a virtual environment of its own."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata

import pytest
from helpers import ROOT, options
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
CORE = [Requirement(text).name for text in PROJECT['dependencies']]


def make_venv(folder, packages):
    """A virtual environment that also imports from the folder `packages` → its Python."""
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    [site_packages] = folder.glob('[Ll]ib/**/site-packages')
    (site_packages / 'packages.pth').write_text(f'{packages}\n')
    return next(path for path in (folder / 'bin/python', folder / 'Scripts/python.exe')
                if path.exists())


def call(*command, cwd):
    """Run a command without this process's PYTHONPATH → its stdout. Fails the test if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, text=True, capture_output=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def required(names):
    """Names of packages → the set of them and of all packages that they need."""
    found, waiting = set(), [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [canonicalize_name(need.name)
                        for need in map(Requirement, metadata.requires(name) or [])
                        if not need.marker or need.marker.evaluate({'extra': ''})]
    return found


def test_an_editable_install_is_imported_from_another_folder(tmp_path, trained):
    tree = tmp_path / 'tree'
    shutil.copytree(ROOT / 'plaingpt', tree / 'plaingpt')
    for name in ('pyproject.toml', 'README.md', 'LICENSE', 'model.py', 'configurator.py'):
        shutil.copy(ROOT / name, tree)
    before = sorted(tree.iterdir())
    python = make_venv(tmp_path / 'venv', sysconfig.get_paths()['purelib'])
    call(python, '-m', 'pip', 'install', '-q', '--no-build-isolation', '--no-deps', '--no-index',
         '--disable-pip-version-check', '-e', tree, cwd=tmp_path)
    assert sorted(tree.iterdir()) == before  # it leaves nothing in the tree
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    out = call(python, '-c', 'import plaingpt\n'
               f'print(len(plaingpt.load({str(trained)!r}).generate("def", max_new_tokens=9)))\n'
               'import torch\n'
               'from model import GPT, GPTConfig\n'
               'from plaingpt.training.checkpoint import load\n'
               'model = GPT(GPTConfig(8, 65, n_layer=1, n_head=2, n_embd=8))\n'
               'print(model.generate(torch.zeros(1, 1, dtype=torch.long), 5).shape)\n'
               'print(load.__module__, __import__("model").__file__)', cwd=elsewhere)
    assert out.splitlines() == ['9', 'torch.Size([1, 6])',
                                f'plaingpt.training.checkpoint {tree / "model.py"}']


@pytest.fixture(scope='module')
def core_python(tmp_path_factory):
    """Python of an environment that has the core's packages, those that they need, and no other."""
    folder = tmp_path_factory.mktemp('core')
    packages = folder / 'packages'
    packages.mkdir()
    for dist in map(metadata.distribution, required(CORE)):
        for entry in {file.parts[0] for file in dist.files} - {'..', '__pycache__'}:
            if not (packages / entry).exists():  # two packages may share a namespace
                (packages / entry).symlink_to(dist.locate_file(entry))
    return make_venv(folder / 'venv', packages)


def test_the_core_is_at_most_six_packages(core_python):
    assert len(CORE) <= 6
    for name in ('matplotlib', 'wandb', 'pyarrow', 'pytest'):
        done = subprocess.run([core_python, '-c', f'import {name}'], capture_output=True, text=True)
        assert 'ModuleNotFoundError' in done.stderr


@pytest.mark.parametrize('tokenizer', ['char', 'byte', 'bpe:300'])
def test_the_core_prepares_trains_and_samples(core_python, tokenizer, text_file, tmp_path):
    call(core_python, ROOT / 'prepare.py', 'text', f'--input={text_file}',
         f'--tokenizer={tokenizer}', f'--data_dir={tmp_path}/text', cwd=tmp_path)
    out = call(core_python, ROOT / 'train.py', *options(
        dataset=tmp_path / 'text', n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4,
        gradient_accumulation_steps=1, max_iters=4, eval_interval=2, eval_iters=1, warmup_iters=1,
        lr_decay_iters=4, device='cpu', dtype='float32'), cwd=tmp_path)
    assert [line for line in out.splitlines() if 'pip install matplotlib' in line]
    assert (tmp_path / 'out/report.md').exists() and not (tmp_path / 'out/loss.png').exists()
    assert call(core_python, ROOT / 'sample.py', '--num_samples=1', '--max_new_tokens=8',
                '--device=cpu', cwd=tmp_path).strip()


def test_the_ranges_admit_the_pins_that_are_tested():
    pins = {}
    for name in ('requirements.txt', 'requirements-dev.txt'):
        for line in (ROOT / name).read_text().splitlines():
            if '==' in line:
                package, version = line.split('==')
                pins[package] = version
    groups = [PROJECT['dependencies'], *PROJECT['optional-dependencies'].values()]
    ranges = [Requirement(text) for group in groups for text in group]
    assert {wanted.name for wanted in ranges} == set(pins)
    for wanted in ranges:
        assert wanted.specifier.contains(pins[wanted.name]), wanted
