"""tools/first_contact.py: measuring a machine part by part, and the pages of what was measured."""

import os
import signal
import subprocess
import sys
from typing import get_args, get_type_hints

import first_contact
import pytest
from first_contact import ContactConfig
from helpers import ROOT, exit_code, fails, fork, wait_until


def test_a_page_has_what_each_command_printed_and_how_it_ended(tmp_path, monkeypatch, capsys):
    scripts = {'good': 'print("20 ms")', 'error': 'import sys; sys.exit("error: disk full")',
               'long': 'import time; print("began", flush=True); time.sleep(99)'}
    for name, code in scripts.items():
        (tmp_path / f'{name}.py').write_text(code)
    monkeypatch.setattr(first_contact, 'commands', lambda config: [
        [f'{tmp_path}/{name}.py'] for name in scripts])
    monkeypatch.setattr(first_contact, 'GRACE_S', 0.5)
    with pytest.raises(SystemExit, match='1'):
        first_contact.main(['speed', f'--out={tmp_path}/out', '--minutes=0.06'])
    good, error, long = (tmp_path / 'out/speed.md').read_text().split('## ')[1:]
    assert '20 ms' in good and 'measured, ' in good and 'good.py' in good
    assert 'error: disk full' in error and 'exit code 1, ' in error
    assert 'began' in long and 'its time was over, ' in long
    assert 'exit code 1, ' in capsys.readouterr().out


def test_a_part_that_lacks_what_it_works_on_says_so(tmp_path, capsys, monkeypatch):
    for part, option in (('grid', '--input'), ('fast', '--dataset')):
        assert option in fails(capsys, monkeypatch, first_contact.main, part,
                               f'--out={tmp_path}/out')
        assert f'{option[2:]}=nowhere: not there' in fails(
            capsys, monkeypatch, first_contact.main, part, f'--out={tmp_path}/out',
            f'{option}=nowhere')


def test_a_call_that_is_stopped_ends_its_command_too(tmp_path):
    page = tmp_path / 'out/generation.md'
    pid = fork(first_contact.main, 'generation', f'--out={tmp_path}/out', '--tiny', '--device=cpu',
               log=tmp_path / 'console')
    wait_until(lambda: page.exists() and 'compare.py' in page.read_text())
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 143


# In every process that starts: the packages cannot be found, as if they were not installed.
WITHOUT_THEM = '''
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
absent = {'datasets', 'wandb', 'matplotlib', 'rustbpe', 'pyarrow', 'gigatoken', 'tensorboard'}
PathFinder.find_spec = staticmethod(
    lambda name, *where: None if name.partition('.')[0] in absent else find_spec(name, *where))
'''


@pytest.mark.slow
@pytest.mark.parametrize('part', get_args(get_type_hints(ContactConfig)['part']))
def test_a_part_is_rehearsed_without_optional_packages(part, text_file, char_data, tmp_path):
    (tmp_path / 'sitecustomize.py').write_text(WITHOUT_THEM)
    subprocess.run([sys.executable, ROOT / 'tools' / 'first_contact.py', part, '--tiny',
                    f'--out={tmp_path}/out', f'--input={text_file}', f'--dataset={char_data}',
                    '--device=cpu'], check=True,
                   env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert 'measured, ' in (tmp_path / f'out/{part}.md').read_text()
