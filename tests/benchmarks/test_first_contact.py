import json
import os
import shutil
import signal
import subprocess
import sys
import time

import first_contact
import pytest
from first_contact import ContactConfig, Part, Step
from helpers import ROOT, exit_code, fails, fork, wait_until

from plaingpt.benchmarks.contact_page import REHEARSAL, read_parts


@pytest.mark.parametrize(('option', 'said'), [
    ('--input=/nowhere', 'input=/nowhere: No such file'),
    ('--input={bin}', 'not UTF-8 at byte 3'), ('--input={empty}', 'there is no text in it'),
    ('--tokens={tmp}', 'no .bin files there'), ('--nanogpt={tmp}', 'no bench.py there'),
    ('--device=gpu', "device='gpu' is unknown"), ('--minutes=0.5', 'minutes=0.5: a part takes 1'),
    ('--to={tmp}', 'it is for --render=FOLDER')])
def test_mistakes_are_a_line_at_the_start_and_leave_no_folder(tmp_path, capsys, monkeypatch, option,
                                                              said):
    (tmp_path / 'bin').write_bytes(b'abc\xff')
    (tmp_path / 'empty').touch()
    option = option.format(bin=tmp_path / 'bin', empty=tmp_path / 'empty', tmp=tmp_path)
    assert said in fails(capsys, monkeypatch, first_contact.main, f'--out={tmp_path}/out',
                         '--part=1', option)
    assert not (tmp_path / 'out').exists()


def part(tmp_path, minutes=9.0):
    config = ContactConfig(out=str(tmp_path), part=1, device='cpu', minutes=minutes)
    return Part(config, tmp_path), lambda: json.loads(
        (tmp_path / 'part-1.jsonl').read_text().splitlines()[-1])


def test_a_step_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    code = ('import subprocess, sys\n'
            'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])\n'
            'print(child.pid, flush=True)\n'
            'child.wait()')
    running, last = part(tmp_path)
    began = time.monotonic()
    assert not running.run(Step('slow', 'speed', 1, [sys.executable, '-c', code]))
    assert time.monotonic() - began < 10 and last()['ended'] == 'out of time'
    child = int((tmp_path / 'part-1.log').read_text().split()[-1])

    def is_gone():
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return True
        with open(f'/proc/{child}/stat') as f:  # dead, and nobody waits for it here
            return f.read().split()[2] == 'Z'
    wait_until(is_gone, 10)


def python(code):
    return [sys.executable, '-c', code]


def test_what_came_of_each_step_is_noted(tmp_path):
    running, last = part(tmp_path)
    print_json = python('print("{\\"rows\\": [1]}")')
    assert running.run(Step('good', 'speed', 9, print_json)) == {'rows': [1]}
    assert last()['result'] == {'rows': [1]} and last()['command'].startswith('python -c')
    assert not running.run(Step('silent', 'speed', 9, python('')))
    assert last()['ended'].startswith('failed: what it printed cannot be read: ')
    assert not running.run(Step('a GPU', 'speed', 9, print_json, needs=('cuda',)))
    assert last()['ended'] == 'not run: it needs CUDA'
    assert last()['seconds'] is last()['command'] is None  # which could not be given
    late, last = part(tmp_path, minutes=0.1)
    assert not late.run(Step('late', 'speed', 9, print_json))
    assert last()['ended'] == "not run: the part's time was over" and last()['command']


@pytest.mark.parametrize(('code', 'why'), [
    ('print("error: one\\nerror: disk full\\nand more"); exit(2)', 'disk full'),
    ('try:\n    1 / 0\nfinally:\n    raise ValueError("several\\nlines")', 'ValueError: several'),
    ('exit(3)', 'exit code 3'),
    ('import os; os.kill(os.getpid(), 9)', 'signal 9 (Killed)')])
def test_why_a_step_failed_is_noted_and_told(tmp_path, capsys, code, why):
    running, last = part(tmp_path)
    assert running.run(Step('bad', 'speed', 9, python(code))) is None
    assert last()['ended'] == f'failed: {why}'
    assert f'bad: failed: {why}' in capsys.readouterr().out


def test_a_step_is_told_and_its_output_is_in_the_log_while_it_runs(tmp_path, capfd):
    log = tmp_path / 'part-1.log'
    code = f"""
import pathlib, time
print('{{"rows": [1]}}')
while '"rows": [1]' not in pathlib.Path({str(log)!r}).read_text().partition('#')[2]:
    time.sleep(0.01)
# what the log has of the command ends here"""
    running, _ = part(tmp_path)
    assert running.run(Step('grid', 'grid', 9, python(code))) == {'rows': [1]}
    assert capfd.readouterr().out.splitlines()[0] == 'grid: at most 9 s …'


def measure_part_4(tmp_path, *argv):
    return fork(first_contact.main, f'--out={tmp_path}/out', '--part=4', '--device=cpu', *argv,
                log=tmp_path / 'console')


def test_a_text_that_cannot_be_prepared_is_why_and_a_part_that_measures_nothing_fails(tmp_path):
    (tmp_path / 'text').write_text('a')
    assert exit_code(measure_part_4(tmp_path, f'--input={tmp_path}/text')) == 1
    record = (tmp_path / 'out' / 'part-4.jsonl').read_text()
    rows = {row['step']: row['ended'] for row in map(json.loads, record.splitlines())}
    assert rows.pop('text').startswith('failed: INPUT: the train split would be empty')
    assert rows == {'machine': 'measured', 'grid': 'not run: the text could not be prepared',
                    'gpt2_124m_fast': 'not run: no tokens were given (--tokens)'}
    assert 'nothing was measured' in (tmp_path / 'console').read_text()


@pytest.mark.parametrize(('number', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, 143),
                                              (signal.SIGHUP, 129)])
def test_a_part_that_is_interrupted_notes_its_step_and_says_how_it_goes_on(tmp_path, number, code):
    (tmp_path / 'out').mkdir()
    record = tmp_path / 'out' / 'part-4.jsonl'
    record.write_text('{"part": 4, "st')  # of an earlier start, which was killed
    pid = measure_part_4(tmp_path)
    console = tmp_path / 'console'
    wait_until(lambda: console.exists() and 'at most' in console.read_text())
    os.kill(pid, number)
    assert exit_code(pid) == code
    console = console.read_text()
    assert f'{record}: what was measured; ' in console and 'Traceback' not in console
    assert 'The same command begins part 4 again; its grid goes on' in console
    _, last = record.read_text().splitlines()
    assert json.loads(last)['step'] == 'machine' and json.loads(last)['ended'] == 'interrupted'


@pytest.mark.parametrize(('own', 'other', 'named', 'used'), [
    (0, 0, '', 'own'), (1, 0, '', 'other'), (0, 0, 'named', 'named'), (1, 1, '', None),
    (0, 0, 'nowhere', None)])
def test_the_projects_python_is_used_where_it_has_torch(tmp_path, own, other, named, used):
    """Shell scripts stand for Pythons: asked for torch they exit with 0 or 1."""
    for path, name, code in (('.venv/bin/python', 'own', own), ('path/python3', 'other', other),
                             ('named', 'named', 0)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {code}\necho {name} "$@"')
        (tmp_path / path).chmod(0o755)
    (tmp_path / 'tools').mkdir()
    shutil.copy(ROOT / 'tools' / 'first_contact.sh', tmp_path / 'tools')
    shutil.copy(ROOT / 'Makefile', tmp_path)
    env = {**os.environ, 'PATH': f'{tmp_path}/path:{os.environ["PATH"]}'}
    env.pop('PYTHON', None)
    done = subprocess.run(
        ['make', '-s', 'first-contact', 'OUT=o', 'PART=1', 'OPTIONS=--minutes=2',
         *([f'PYTHON={tmp_path}/{named}'] if named else [])],
        cwd=tmp_path, env=env, text=True, capture_output=True)
    if used:
        assert done.stdout == f'{used} tools/first_contact.py --out=o --part=1 --device=auto ' \
                              '--minutes=2\n'
    else:
        assert done.returncode and done.stderr.splitlines()[0].startswith('error: ')
        assert 'has no torch: name a Python that has it' in done.stderr


def test_a_run_that_was_stopped_counts_as_far_as_it_came(tmp_path):
    running, last = part(tmp_path)
    sleeping = [sys.executable, '-c', 'import time; time.sleep(60)']
    assert running.run(Step('run', 'training', 1, sleeping, read=lambda _: {'rows': [2]},
                            even_if_stopped=True))
    assert last()['ended'] == 'measured' and last()['seconds'] < 10


# In every process that starts: the packages cannot be found, as if they were not installed.
WITHOUT_THEM = '''
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
absent = {'datasets', 'wandb', 'matplotlib', 'rustbpe', 'pyarrow', 'zstandard', 'gigatoken',
          'tensorboard'}
PathFinder.find_spec = staticmethod(
    lambda name, *where: None if name.partition('.')[0] in absent else find_spec(name, *where))
'''


@pytest.mark.slow
def test_the_four_parts_are_rehearsed_without_optional_packages(text_file, char_data, tmp_path):
    (tmp_path / 'sitecustomize.py').write_text(WITHOUT_THEM)
    for number in range(1, 5):
        subprocess.run(
            [ROOT / 'tools' / 'first_contact.sh', tmp_path / 'out', str(number),
             f'--input={text_file}', f'--tokens={char_data}', '--minutes=30'], check=True,
            env={**os.environ, 'PYTHON': sys.executable, 'DEVICE': 'cpu', 'TINY': '1',
                 'PYTHONPATH': str(tmp_path)})
    _, steps = read_parts(tmp_path / 'out')
    assert {step['ended'] for step in steps} == {
        'measured', 'not run: nanoGPT was not given (--nanogpt)'}
    assert str(tmp_path) not in ''.join(
        path.read_text() for path in (tmp_path / 'out').glob('part-*.jsonl'))
    first_contact.main([f'--render={tmp_path}/out', f'--to={tmp_path}/to'])
    page = (tmp_path / 'to' / 'docs' / 'benchmarks.md').read_text()
    assert REHEARSAL in page and 'never run' not in page and 'did not come to' not in page
    assert (tmp_path / 'out' / 'trace.json').exists()
    kinds = {step['kind'] for step in steps} - {
        'machine', 'text', 'nanogpt', 'beside-nanogpt'}
    assert kinds == {path.stem.removesuffix('-cpu') for path in
                     (tmp_path / 'to' / 'results').glob('*.md')}
    assert page.count('nanoGPT was not given') == 5
