"""tools/first_contact.py: measuring a machine in parts, and the page of what was measured."""

import json
import os
import signal
import subprocess
import sys

import first_contact
import pytest
from first_contact import ContactConfig, Part, Step, read_nanogpt
from helpers import ROOT, exit_code, fails, fork, wait_until

from plaingpt.benchmarks.contact_page import REHEARSAL, read_parts

# -----------------------------------------------------------------------------
# the page

FAST = {'batch_size': 16, 'micro_steps': 32, 'dtype': 'bfloat16', 'compile': True, 'step_ms': 20.0,
        'min_ms': 19.0, 'max_ms': 23.0, 'tokens_per_s': 300e3, 'matmul_flops': 700e12,
        'matmul_share': 0.5, 'mfu': 0.4, 'peak_memory_bytes': 2**31}
MACHINE = {'device': 'NVIDIA H100', 'machine': 'NVIDIA H100', 'date': '2030-01-01',
           'torch': '2.11.0', 'cuda': '13.0', 'cudnn': 91900}


def record(folder, *steps, tiny=False, part=1):
    """Write what a part would: steps are (name, kind, result, why there is none)."""
    folder.mkdir(exist_ok=True)
    lines = [{'part': part, 'step': name, 'kind': kind, 'tiny': tiny, 'command': 'c',
              'result': result, 'ended': ended, 'seconds': 1.0} for name, kind, result, ended in
             (('machine', 'machine', MACHINE, 'measured'), *steps)]
    path = folder / f'part-{part}.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return path


def render(tmp_path):
    first_contact.main([f'--render={tmp_path}/in', f'--to={tmp_path}/out'])
    return (tmp_path / 'out' / 'docs' / 'benchmarks.md').read_text()


def test_speeds_stand_beside_nanogpts_and_what_is_missing_is_named(tmp_path):
    printed = 'compiled\ntime per iteration: 81.92ms, MFU: 40.00%\n'  # 200k tokens/s
    record(tmp_path / 'in', ('batch 16', 'speed', {'rows': [FAST]}, 'measured'),
           ('nanoGPT, batch 16', 'nanogpt', read_nanogpt(printed, 16, 'bfloat16'), 'measured'),
           ('ladder', 'ladder', None, 'not run: no text'),
           ('eager', 'speed', None, 'failed: CUDA out of memory'))
    page = render(tmp_path)
    cells = {line.split('|')[1].strip(): line for line in page.splitlines() if line[:1] == '|'}
    for cell in ('32 × 16', 'bfloat16', 'compiled', '20.0', '300k', '1.50', '50.0%', '2.00 GiB'):
        assert cell in cells['batch 16'], cell
    assert '200k' in cells['nanoGPT, batch 16'] and '1.00' in cells['nanoGPT, batch 16']
    assert 'Not measured: ladder (no text); eager (failed: CUDA out of memory); ' in page
    assert 'part 3, which was never run' in page and page.count('## On NVIDIA H100') == 1
    assert render(tmp_path) == page  # a second time changes nothing


def test_lines_that_are_damaged_are_named_and_skipped(tmp_path, capsys):
    path = record(tmp_path / 'in', ('batch 16', 'speed', {'rows': [FAST]}, 'measured'))
    whole, good = render(tmp_path), path.read_bytes().splitlines()[1]
    damaged = [b'\xff' + good, b'[1]', b'{"part": 1}', good[:100]]
    with path.open('ab') as f:
        f.write(b'\n'.join(damaged))
    capsys.readouterr()
    assert render(tmp_path) == whole
    assert [line.split(': ')[1] for line in capsys.readouterr().err.splitlines()] == [
        f'{path}:{number}' for number in range(3, 3 + len(damaged))]


def test_a_rehearsal_says_so_and_is_not_written_into_the_projects_results(tmp_path, capsys,
                                                                          monkeypatch):
    record(tmp_path / 'in', ('batch 16', 'speed', {'rows': [FAST]}, 'measured'), tiny=True)
    assert 'rehearsal' in fails(capsys, monkeypatch, first_contact.main,
                                f'--render={tmp_path}/in')
    assert REHEARSAL in render(tmp_path)


# -----------------------------------------------------------------------------
# measuring


def python(code):
    return [sys.executable, '-c', code]


def test_what_came_of_each_step_is_noted(tmp_path):
    part = Part(ContactConfig(out=str(tmp_path), part=1, device='cpu', minutes=9.0), tmp_path)
    print_json = python('print("{\\"rows\\": [1]}")')
    for step, ended in (
            (Step('good', 'speed', 9, print_json), 'measured'),
            (Step('silent', 'speed', 9, python('')), 'failed: what it printed cannot be read: '),
            (Step('a GPU', 'speed', 9, print_json, needs=('cuda',)), 'not run: it needs CUDA'),
            (Step('error', 'speed', 9, python('print("error: disk full\\nmore"); exit(2)')),
             'failed: disk full'),
            (Step('killed', 'speed', 9, python('import os; os.kill(os.getpid(), 9)')),
             'failed: signal 9 (Killed)')):
        assert bool(part.run(step)) == (ended == 'measured')
        last = json.loads((tmp_path / 'part-1.jsonl').read_text().splitlines()[-1])
        assert last['ended'].startswith(ended), step.name


def test_a_part_that_is_interrupted_notes_its_step_and_says_how_it_goes_on(tmp_path):
    console, record = tmp_path / 'console', tmp_path / 'out' / 'part-4.jsonl'
    pid = fork(first_contact.main, f'--out={tmp_path}/out', '--part=4', '--device=cpu', log=console)
    wait_until(lambda: console.exists() and 'at most' in console.read_text())
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 143
    assert 'The same command begins part 4 again; its grid goes on' in console.read_text()
    last = json.loads(record.read_text().splitlines()[-1])
    assert last['step'] == 'machine' and last['ended'] == 'interrupted'


# In every process that starts: the packages cannot be found, as if they were not installed.
WITHOUT_THEM = '''
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
absent = {'datasets', 'wandb', 'matplotlib', 'rustbpe', 'pyarrow', 'gigatoken', 'tensorboard'}
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
