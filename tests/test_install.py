"""Installation: the core needs six packages, and the extras are those that are tested."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata

import pytest
from helpers import ROOT, exit_code, fork, options
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import prepare
import sample
import train

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


TRAIN = options(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=4,
                gradient_accumulation_steps=1, eval_interval=2, eval_iters=1, warmup_iters=1,
                lr_decay_iters=4, device='cpu', dtype='float32')
SAMPLE = options(num_samples=1, max_new_tokens=8, device='cpu')


def hide_optional_packages():
    """Let no package be imported that the core does not need."""
    core = required(CORE)
    hidden = {module for module, dists in metadata.packages_distributions().items()
              if not core & set(map(canonicalize_name, dists))}
    for name in hidden | {name for name in sys.modules if name.partition('.')[0] in hidden}:
        sys.modules[name] = None  # from now on a ModuleNotFoundError


def test_the_core_of_six_packages_prepares_trains_and_samples(text_file, tmp_path):
    assert len(CORE) == 6
    for main, *argv in ((prepare.main, 'text', f'--input={text_file}', '--tokenizer=bpe:300',
                         f'--data_dir={tmp_path}/text'),
                        (train.main, *TRAIN, f'--dataset={tmp_path}/text'),
                        (sample.main, *SAMPLE)):
        log = tmp_path / main.__module__

        def before():
            os.chdir(tmp_path)
            hide_optional_packages()

        assert exit_code(fork(main, *argv, log=log, before=before)) == 0, log.read_text()
    assert 'pip install matplotlib' in (tmp_path / 'train').read_text()
    assert (tmp_path / 'out/report.md').exists() and not (tmp_path / 'out/loss.png').exists()


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


# -----------------------------------------------------------------------------
# in environments of their own


@pytest.mark.slow
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


def core_python(folder):
    """Python of an environment that has the core's packages, those that they need, and no other."""
    packages = folder / 'packages'
    packages.mkdir(parents=True)
    for dist in map(metadata.distribution, required(CORE)):
        for entry in {file.parts[0] for file in dist.files} - {'..', '__pycache__'}:
            if not (packages / entry).exists():  # two packages may share a namespace
                (packages / entry).symlink_to(dist.locate_file(entry))
    return make_venv(folder / 'venv', packages)


@pytest.mark.slow
def test_the_core_prepares_trains_and_samples_where_there_are_no_other_packages(
        text_file, tmp_path):
    python = core_python(tmp_path / 'core')
    for name in ('matplotlib', 'wandb', 'pyarrow', 'pytest'):
        done = subprocess.run([python, '-c', f'import {name}'], capture_output=True, text=True)
        assert 'ModuleNotFoundError' in done.stderr
    call(python, ROOT / 'prepare.py', 'text', f'--input={text_file}', '--tokenizer=bpe:300',
         f'--data_dir={tmp_path}/text', cwd=tmp_path)
    call(python, ROOT / 'train.py', *TRAIN, f'--dataset={tmp_path}/text', cwd=tmp_path)
    assert (tmp_path / 'out/report.md').exists()
    assert call(python, ROOT / 'sample.py', *SAMPLE, cwd=tmp_path).strip()
