"""Installation: the core needs eight packages, and the extras are those that are tested."""

import ast
import json
import subprocess
import sys
import tomllib
from functools import partial
from importlib import metadata

import pytest
from helpers import ROOT, fails, options, run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import plaingpt
import prepare
import sample
import train
from plaingpt import __main__

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
VERSION = plaingpt.__version__
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
    pins = dict(line.split('==') for name in ('requirements.txt', 'requirements-dev.txt')
                for line in (ROOT / name).read_text().splitlines() if '==' in line)
    ranges = [Requirement(text) for group in (
        PROJECT['dependencies'], *PROJECT['optional-dependencies'].values()) for text in group]
    assert {wanted.name for wanted in ranges} == set(pins)
    for wanted in ranges:
        assert wanted.specifier.contains(pins[wanted.name]), wanted


# -----------------------------------------------------------------------------
# the command `plaingpt`


def folder_of_somebody_else(folder):
    """A new folder whose files have the names of ours, and must not be imported."""
    folder.mkdir()
    for name in ('model', 'configurator', 'train', 'prepare'):
        (folder / f'{name}.py').write_text(f'raise SystemExit("the folder\'s own {name}.py")\n')
    return folder


def test_the_command_lists_each_script_and_runs_it_from_any_folder(tmp_path):
    folder = folder_of_somebody_else(tmp_path / 'elsewhere')
    command = partial(run, sys.executable, ROOT / 'plaingpt/__main__.py', cwd=folder)
    listed = command()
    for path in ROOT.glob('*.py'):
        text = path.read_text(encoding='utf-8')
        if "if __name__ == '__main__'" in text:
            first_line = ast.get_docstring(ast.parse(text)).split('\n')[0]
            assert f'  {path.stem:<10}{first_line}\n' in listed
    assert command('--version') == f'plaingpt {VERSION}\n'
    assert command('plot', '--help').startswith('Draw the curves')


def test_an_unknown_command_is_one_line(capsys, monkeypatch):
    said = fails(capsys, monkeypatch, lambda _: __main__.main(), 'trian', 'config/tiny.py')
    assert "'trian'" in said and 'did you mean train?' in said


@pytest.mark.parametrize('script', ['prepare', 'plot'])
def test_scripts_that_need_no_torch_start_without_it(script):
    code = f'import sys, {script}; print("torch" in sys.modules)'
    assert run(sys.executable, '-c', code, cwd=ROOT) == 'False\n'


def test_the_wheel_names_its_own_modules_and_commands():
    from build_hook import for_wheel
    assert for_wheel('from model import GPT\n    from configurator import x\n') == \
        'from plaingpt.model import GPT\n    from plaingpt.configurator import x\n'
    assert for_wheel('run python train.py a.py\ntorchrun --nproc_per_node=2 train.py a.py') == \
        'run plaingpt train a.py\ntorchrun --nproc_per_node=2 -m plaingpt train a.py'
    for same in ('from models import model', 'import model', 'train.py config/x.py', 'a_model'):
        assert for_wheel(same) == same


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


@pytest.mark.slow
def test_the_wheel_works_in_a_folder_with_a_model_of_its_own(tmp_path):
    run(sys.executable, '-m', 'hatchling', 'build', '-t', 'wheel', '-d', tmp_path, cwd=ROOT)
    wheel, = tmp_path.glob('*.whl')
    python = make_venv(tmp_path / 'venv', [*CORE, 'pip'])
    run(python, '-m', 'pip', 'install', '-q', '--no-deps', '--no-index',
         '--disable-pip-version-check', wheel, cwd=tmp_path)
    command = python.with_name('plaingpt')
    folder = folder_of_somebody_else(tmp_path / 'elsewhere')
    few = options(max_iters=2, eval_iters=1, batch_size=4, device='cpu', dtype='float32',
                  compile=False, gradient_accumulation_steps=2)
    quickstart = ('train', 'config/quickstart.py', *few)

    printed = run(command, *quickstart, cwd=folder)  # which prepares its data first
    assert 'plaingpt sample --out_dir=out-quickstart' in printed and 'python ' not in printed
    assert run(command, 'sample', 'config/quickstart_sample.py', '--max_new_tokens=8',
                '--device=cpu', cwd=folder).strip()
    out = run(python, '-c', 'import plaingpt, sys\n'
               'print(len(plaingpt.load("out-quickstart").generate("def", max_new_tokens=9)) > 0)\n'
               'print("model" in sys.modules, plaingpt.__version__)', cwd=folder)
    assert out.splitlines() == ['True', f'False {VERSION}']
    lists = run(python, '-c', 'from plaingpt.experiments.runs import read_variants\n'
                 'print([len(read_variants(name, None)) for name in ("ablation", "ladder")])',
                 cwd=folder)
    assert lists == '[7, 3]\n'
    run(python, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
         '-m', 'plaingpt', *quickstart, '--out_dir=out-two', cwd=folder)
    state, = (folder / 'out-two/checkpoints').glob('*/state.json')
    assert json.loads(state.read_text())['iter_num'] == 2
    run(command, 'bench', 'config/quickstart.py', *few, '--sweep=learning_rate=1e-3,2e-3',
         '--seeds=1', cwd=folder)
