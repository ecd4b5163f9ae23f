"""Installation: the core needs eight packages, and the extras are those that are tested."""

import shutil
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from helpers import ROOT, options
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import prepare
import sample
import train

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
CORE = [Requirement(text).name for text in PROJECT['dependencies']]
TRAIN = options(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=4,
                gradient_accumulation_steps=1, eval_interval=2, eval_iters=1, warmup_iters=1,
                lr_decay_iters=4, device='cpu', dtype='float32', dataset='text')
SAMPLE = options(num_samples=1, max_new_tokens=8, device='cpu')


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


def test_the_eight_packages_of_the_core_prepare_train_and_sample(
        text_file, tmp_path, monkeypatch, capsys):
    assert len(CORE) == 8
    needed = required([*CORE, 'pytest', 'hypothesis'])
    hidden = {module for module, packages in metadata.packages_distributions().items()
              if not needed & set(map(canonicalize_name, packages))}
    for name in hidden | {name for name in sys.modules if name.partition('.')[0] in hidden}:
        monkeypatch.setitem(sys.modules, name, None)  # importing it is a ModuleNotFoundError
    monkeypatch.chdir(tmp_path)
    for main, *argv in ((prepare.main, 'text', f'--input={text_file}', '--tokenizer=bpe:300'),
                        (train.main, *TRAIN), (sample.main, *SAMPLE)):
        monkeypatch.setattr(sys, 'argv', ['script.py', *argv])
        main(argv)
    assert 'pip install matplotlib' in capsys.readouterr().out
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
# in an environment of its own


def make_venv(folder, packages):
    """A virtual environment that has these packages, those that they need, and no other → its
    Python."""
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    site_packages, = folder.glob('lib/**/site-packages')
    for dist in map(metadata.distribution, required(packages)):
        for entry in {file.parts[0] for file in dist.files} - {'..', '__pycache__'}:
            if not (site_packages / entry).exists():  # two packages may share a namespace
                (site_packages / entry).symlink_to(dist.locate_file(entry))
    return folder / 'bin/python'


def call(*command, cwd):
    """Run a command without this process's PYTHONPATH → its stdout. Fails the test if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, text=True, capture_output=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_editable_install_of_the_core_works_from_another_folder(text_file, tmp_path):
    tree = tmp_path / 'tree'
    shutil.copytree(ROOT / 'plaingpt', tree / 'plaingpt')
    for name in ('pyproject.toml', 'README.md', 'LICENSE', 'model.py', 'configurator.py'):
        shutil.copy(ROOT / name, tree)
    before = sorted(tree.iterdir())
    python = make_venv(tmp_path / 'venv', [*CORE, 'pip', 'hatchling'])
    call(python, '-m', 'pip', 'install', '-q', '--no-build-isolation', '--no-deps', '--no-index',
         '--disable-pip-version-check', '-e', tree, cwd=tmp_path)
    assert sorted(tree.iterdir()) == before  # it leaves nothing in the tree
    (elsewhere := tmp_path / 'elsewhere').mkdir()
    call(python, ROOT / 'prepare.py', 'text', f'--input={text_file}', '--tokenizer=bpe:300',
         cwd=elsewhere)
    assert 'pip install matplotlib' in call(python, ROOT / 'train.py', *TRAIN, cwd=elsewhere)
    assert call(python, ROOT / 'sample.py', *SAMPLE, cwd=elsewhere).strip()
    out = call(python, '-c', 'import plaingpt, torch, model\n'
               'print(len(plaingpt.load("out").generate("def", max_new_tokens=9)) > 0)\n'
               'gpt = model.GPT(model.GPTConfig(8, 65, n_layer=1, n_head=2, n_embd=8))\n'
               'print(gpt.generate(torch.zeros(1, 1, dtype=torch.long), 5).shape)\n'
               'print(model.__file__)', cwd=elsewhere)
    assert out.splitlines() == ['True', 'torch.Size([1, 6])', str(tree / 'model.py')]
