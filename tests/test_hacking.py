"""docs/hacking.md stays true: every diff applies, and in a copy of the project its commands run."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from processes import ROOT, copy_project, run_copy

PAGE = (ROOT / 'docs' / 'hacking.md').read_text(encoding='utf-8')
INTRODUCTION, *SECTIONS = re.split(r'^## ', PAGE, flags=re.M)
SECTIONS = [section for section in SECTIONS if '```diff' in section]  # the rest is about changes
BLOCK = re.compile(r'^```(\w+)\n(.*?)^```$', re.M | re.S)


def title(section):
    return section.partition('\n')[0]


def blocks(text, kind):
    return [body for language, body in BLOCK.findall(text) if language == kind]


def run_commands(text, folder):
    """Run the `$ ` lines of its console blocks in `folder`; each must succeed."""
    for body in blocks(text, 'console'):
        for command in re.findall(r'^\$ (.*)$', body, re.M):
            words = shlex.split(command)
            if words[0] == 'python' and words[1].endswith('.py'):
                code, output = run_copy(folder, *words[1:])
            else:
                command = re.sub(r'^python ', f'{sys.executable} ', command)
                done = subprocess.run(command, shell=True, cwd=folder, text=True,
                                      capture_output=True)
                code, output = done.returncode, done.stderr
            assert code == 0, f'{command}\n{output}'


@pytest.fixture(scope='module')
def before(tmp_path_factory):
    """A copy of the project as it is, with the run that the page starts with."""
    folder = copy_project(tmp_path_factory.mktemp('before') / 'plaingpt')
    run_commands(INTRODUCTION, folder)
    return folder


@pytest.mark.parametrize('section', SECTIONS, ids=title)
def test_a_change_is_to_one_file(section):
    diff, = blocks(section, 'diff')
    assert len(re.findall(r'^\+\+\+ ', diff, re.M)) == 1


@pytest.mark.parametrize('section', SECTIONS, ids=title)
def test_a_change_applies(section):
    diff, = blocks(section, 'diff')
    done = subprocess.run(['git', 'apply', '--check', '-'], input=diff, text=True, cwd=ROOT)
    assert done.returncode == 0


@pytest.mark.parametrize('section', [
    pytest.param(section, marks=[] if title(section) == 'An activation' else pytest.mark.slow)
    for section in SECTIONS], ids=title)
def test_a_change_works(before, section, tmp_path):
    folder = tmp_path / 'copy'
    shutil.copytree(before, folder)
    diff, = blocks(section, 'diff')
    subprocess.run(['git', 'apply', '-'], input=diff, text=True, cwd=folder, check=True)
    run_commands(section, folder)  # asserts
