"""Installation: the core needs eight packages, and the extras are those that are tested."""

import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import ROOT, fails, options, run

import prepare
import sample
import train
from plaingpt import __main__
from plaingpt.system.formatting import command_for

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
    pins = dict(line.split('==') for name in ('requirements.txt', 'requirements-dev.txt')
                for line in (ROOT / name).read_text().splitlines() if '==' in line)
    ranges = [Requirement(text) for group in (
        PROJECT['dependencies'], *PROJECT['optional-dependencies'].values()) for text in group]
    assert {wanted.name for wanted in ranges} == set(pins)
    for wanted in ranges:
        assert wanted.specifier.contains(pins[wanted.name]), wanted


# -----------------------------------------------------------------------------
# the command `plaingpt`


def test_the_command_runs_each_script_from_any_folder(tmp_path, capsys, monkeypatch):
    for name in ('model', 'configurator', 'train', 'prepare'):  # of somebody else
        (tmp_path / f'{name}.py').write_text('raise SystemExit("this must not be imported")\n')
    assert run(sys.executable, ROOT / 'plaingpt/__main__.py', 'plan', '--help', cwd=tmp_path)
    assert {*__main__.COMMANDS} == {path.stem for path in ROOT.glob('*.py')
                                    if "if __name__ == '__main__'" in path.read_text()}
    said = fails(capsys, monkeypatch, lambda _: __main__.main(), 'trian', 'config/tiny.py')
    assert 'plaingpt trian: expected one of prepare, train' in said
    monkeypatch.setattr(__main__, 'ROOT', tmp_path / 'site-packages')
    assert 'pip install -e' in fails(capsys, monkeypatch, lambda _: __main__.main(), 'train')


@pytest.mark.parametrize('script', ['prepare', 'plot'])
def test_scripts_that_need_no_torch_start_without_it(script):
    code = f'import sys, {script}; print("torch" in sys.modules)'
    assert run(sys.executable, '-c', code, cwd=ROOT) == 'False\n'


def test_hints_name_a_command_as_this_one_was_started(tmp_path, monkeypatch):
    monkeypatch.delenv('PLAINGPT_STARTED_AS', raising=False)
    for argv0, said in (
            ('train.py', 'python sample.py'), (f'{ROOT}/train.py', f'python {ROOT}/sample.py'),
            ('/usr/bin/plaingpt', 'plaingpt sample'), ('plaingpt.exe', 'plaingpt sample'),
            (f'{ROOT}/plaingpt/__main__.py', 'python -m plaingpt sample'),
            ('/lib/pytest/__main__.py', 'python sample.py'), ('', 'python sample.py')):
        monkeypatch.setattr(sys, 'argv', [argv0])
        assert command_for('sample') == said, argv0
    monkeypatch.setattr(sys, 'argv', [f'{ROOT}/train.py'])
    monkeypatch.chdir(ROOT)
    assert command_for('sample') == 'python sample.py'


def test_from_another_folder_a_hint_can_be_typed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv('PLAINGPT_STARTED_AS', raising=False)
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    for start in ('-m', 'plaingpt', 'plot'), (ROOT / 'plot.py',):
        done = subprocess.run([sys.executable, *start], cwd=tmp_path, text=True,
                              capture_output=True)
        assert f'python {" ".join(map(str, start))} out' in done.stderr
