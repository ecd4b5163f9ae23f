"""Installation: the core needs eight packages, and the extras are those that are tested."""

import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import ROOT, fails, run
from runs import TINY

import prepare
import sample
import train
from plaingpt import __main__
from plaingpt.system.formatting import command_for

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
CORE = [Requirement(text).name for text in PROJECT['dependencies']]


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


def test_the_eight_packages_of_the_core_are_enough_to_train(
        text_file, tmp_path, monkeypatch, capsys):
    assert len(CORE) == 8
    needed = required([*CORE, 'pytest', 'hypothesis'])
    hidden = {module for module, packages in metadata.packages_distributions().items()
              if not needed & set(map(canonicalize_name, packages))}
    for name in hidden | {name for name in sys.modules if name.partition('.')[0] in hidden}:
        monkeypatch.setitem(sys.modules, name, None)  # importing it is a ModuleNotFoundError
    prepare.main(['text', f'--input={text_file}', '--tokenizer=bpe:300'])
    train.main([*TINY, '--dataset=text', '--report=True'])
    sample.main(['--num_samples=1', '--max_new_tokens=8', '--device=cpu'])
    assert 'pip install matplotlib' in capsys.readouterr().out
    assert (tmp_path / 'out/report.md').exists()
    assert not (tmp_path / 'out/loss.png').exists()


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


def test_the_command_has_each_script():
    assert {*__main__.COMMANDS} == {path.stem for path in ROOT.glob('*.py')
                                    if "if __name__ == '__main__'" in path.read_text()}


def test_the_command_runs_beside_files_of_the_same_names(tmp_path):
    for name in ('model', 'configurator', 'train', 'prepare'):  # of somebody else
        (tmp_path / f'{name}.py').write_text('raise SystemExit("this must not be imported")\n')
    assert '--gpu_memory_gb' in run(sys.executable, ROOT / 'plaingpt/__main__.py',
                                  'plan', '--help', cwd=tmp_path)


def test_the_error_for_an_unknown_command_lists_the_commands(capsys, monkeypatch):
    message = fails(capsys, monkeypatch, lambda _: __main__.main(), 'trian', 'config/tiny.py')
    assert 'trian' in message
    assert 'train' in message


def test_scripts_that_need_no_torch_start_without_it():
    code = 'import sys, prepare, plot; print("torch" in sys.modules)'
    assert run(sys.executable, '-c', code, cwd=ROOT) == 'False\n'


@pytest.mark.parametrize(('started', 'hint'), [
    ('train.py', 'python sample.py'), (f'{ROOT}/train.py', f'python {ROOT}/sample.py'),
    ('/usr/bin/plaingpt', 'plaingpt sample'), ('plaingpt.exe', 'plaingpt sample'),
    (f'{ROOT}/plaingpt/__main__.py', 'python -m plaingpt sample'), ('', 'python sample.py')])
def test_a_hint_names_a_command_as_this_one_was_started(started, hint, monkeypatch):
    monkeypatch.setenv('PLAINGPT_STARTED_AS', started)
    assert command_for('sample') == hint
