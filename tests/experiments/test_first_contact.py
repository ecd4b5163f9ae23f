"""tools/first_contact.py: measuring a machine step by step, and the page of what was measured."""

import json
import os
import signal
import subprocess
import sys

import first_contact
import pytest
from first_contact import ContactConfig, Step, format_measured, measure, read_record, read_result
from helpers import ROOT, exit_code, fork, wait_until

FAST = {'batch_size': 16, 'step_ms': 20.0, 'tokens_per_s': 300e3, 'mfu': 0.4}
FACTS = {'machine': 'NVIDIA H100', 'torch': '2.11.0', 'date': '2030-01-01'}


def test_speeds_stand_beside_nanogpts_and_what_is_missing_is_named():
    theirs = Step('nanoGPT, batch 16', 9, [])
    steps = [Step('batch 16', 9, ['bench.py']), theirs, Step('ladder', 9, ['bench.py'])]
    known = {step.name: {'result': result, 'ended': ended} for step, result, ended in zip(steps, (
        {'rows': [FAST], 'table': 'its own'},
        read_result(theirs._replace(command=['nanoGPT/bench.py']),
                    'compiled\ntime per iteration: 81.92ms, MFU: 40.00%\n'),  # 200k tokens/s
        None), ('measured', 'measured', 'exit code 2: error: no text'), strict=True)}
    page = format_measured(FACTS, steps, known, tiny=False)
    cells = {line.split('|')[1].strip(): line for line in page.splitlines() if line[:1] == '|'}
    for cell in ('20.0', '300k', '1.50', '40.0%'):
        assert cell in cells['batch 16'], cell
    assert '200k' in cells['nanoGPT, batch 16'] and '1.00' in cells['nanoGPT, batch 16']
    assert 'Not measured: ladder (exit code 2: error: no text).' in page
    assert 'rehearsal' in format_measured(FACTS, steps, known, tiny=True)


def test_what_came_of_each_step_is_noted_and_what_was_measured_is_not_measured_again(
        tmp_path, monkeypatch):
    def step(name, code, seconds=9, needs=()):
        return Step(name, seconds, ['-c', code], needs)

    monkeypatch.setattr(first_contact, 'LEAST_S', 0)
    config = ContactConfig(out=str(tmp_path), device='cpu')
    steps = [step('good', 'print("{\\"rows\\": [1], \\"table\\": \\"t\\"}")'),
             step('silent', ''), step('a GPU', '', needs=('cuda',)),
             step('error', 'import sys; sys.exit("error: disk full")'),
             step('long', 'import time; time.sleep(9)', seconds=0.5)]
    record = tmp_path / 'measured.jsonl'
    measure(steps, config, {}, record)
    with record.open('ab') as f:
        f.write(b'\xff{"step": 1}\n[1]\n{"tiny": false, "step": "cut')
    known = read_record(record, tiny=False)
    assert {name: row['ended'] for name, row in known.items()} == {
        'good': 'measured', 'silent': 'what it printed cannot be read',
        'a GPU': 'not run: it needs cuda', 'error': 'exit code 1: error: disk full',
        'long': 'its time was over'}
    assert read_record(record, tiny=True) == {}
    lines = len(record.read_bytes().splitlines())
    measure(steps[:2], config, known, record)
    assert len(record.read_bytes().splitlines()) <= lines + 1


def test_a_call_that_is_stopped_ends_its_step_too(tmp_path):
    console = tmp_path / 'console'
    pid = fork(first_contact.main, f'--out={tmp_path}/out', '--tiny', '--device=cpu', log=console)
    wait_until(lambda: console.exists() and 'at most' in console.read_text())
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
def test_all_steps_are_rehearsed_without_optional_packages(text_file, char_data, tmp_path):
    (tmp_path / 'sitecustomize.py').write_text(WITHOUT_THEM)
    subprocess.run([sys.executable, ROOT / 'tools' / 'first_contact.py', f'--out={tmp_path}/out',
                    f'--input={text_file}', f'--tokens={char_data}', '--minutes=30', '--tiny',
                    '--device=cpu'], check=True,
                   env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    rows = [json.loads(line) for line in (tmp_path / 'out/measured.jsonl').read_text().splitlines()]
    assert {row['ended'] for row in rows} == {
        'measured', 'not run: it needs nanogpt, cuda'}
    page = (tmp_path / 'out' / 'page.md').read_text()
    assert 'rehearsal' in page and '## grid' in page and '## gpt2_124m_fast' in page
