"""The fingerprint of model.py, and the line about a checkpoint that was written with other code."""

import ast
import re
import shutil

import pytest
from processes import ROOT

import plaingpt
import train
from plaingpt.core import weights

CODE = (ROOT / 'model.py').read_text(encoding='utf-8')


@pytest.fixture
def fingerprint_of(tmp_path, monkeypatch):
    """fingerprint_of(code) → the fingerprint of a model.py that has this code."""
    def fingerprint_of(code):
        path = tmp_path / 'model.py'
        path.write_bytes(code.encode() if isinstance(code, str) else code)
        monkeypatch.setattr(weights.inspect, 'getfile', lambda _: path)
        return weights.model_code.__wrapped__()
    return fingerprint_of


def test_the_fingerprint_of_this_releases_model_is_known():
    assert weights.model_code() == weights.RELEASED_MODEL_CODE, (
        'model.py has changed: set RELEASED_MODEL_CODE in plaingpt/core/weights.py to '
        f'{weights.model_code()!r}, and look whether the tables of '
        'plaingpt/inference/hf_architectures.py still hold')


@pytest.mark.parametrize('edited', [
    CODE + '\n\n# a comment\n', re.sub(r'(\n +)"""', r'\1"""Also: ', CODE),
    ast.unparse(ast.parse(CODE)), CODE.replace('\n', '\r\n'), '\ufeff' + CODE], ids=[
    'comment', 'docstring', 'formatting', 'line endings', 'byte order mark'])
def test_the_fingerprint_does_not_see_what_changes_no_code(edited, fingerprint_of):
    assert fingerprint_of(edited) == fingerprint_of(CODE) == weights.model_code()


@pytest.mark.parametrize('old, new', [
    ('x + self.attn', 'x - self.attn'), ('else 0.02)', 'else 0.03)'), ("'gelu'", "'relu2'"),
    ('return self.transformer.ln_f(x)', 'return x')])
def test_the_fingerprint_sees_an_edit_of_the_code(old, new, fingerprint_of):
    assert old in CODE
    assert fingerprint_of(CODE.replace(old, new)) != fingerprint_of(CODE)


def test_the_fingerprint_is_the_same_in_each_version_of_python(fingerprint_of):
    code = '''x: int = f"{a!r:>{w}} {{b}} {c=}" u"d" 'e'
def f(): return 1e-5, None, ..., "é", -1
'''
    assert fingerprint_of(code)[:8] == '15d32fcc'  # from Python 3.11, 3.12 and 3.13


@pytest.mark.parametrize('code', ['def', b'\0', b'\xff'])
def test_a_model_that_is_not_source_code_has_no_fingerprint(code, fingerprint_of):
    assert fingerprint_of(code) is None


@pytest.fixture
def edited(trained, tmp_path, monkeypatch):
    """A run whose model.py was edited after it."""
    out = shutil.copytree(trained, tmp_path / 'edited')
    monkeypatch.setattr(weights, 'model_code', lambda: 'edited')
    return out


def test_a_command_says_once_that_model_py_was_edited(edited, capsys):
    plaingpt.load(edited)
    line, = capsys.readouterr().err.splitlines()
    assert 'model.py' in line and str(edited) in line


def test_a_resumed_run_says_once_that_model_py_was_edited(edited, capsys):
    train.main([f'--out_dir={edited}', '--init_from=resume', '--max_iters=1000', '--eval_only'])
    line, = capsys.readouterr().err.splitlines()
    assert 'model.py' in line
