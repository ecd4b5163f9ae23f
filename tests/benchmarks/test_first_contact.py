import json
import os
import subprocess
import sys
import time

import first_contact
import pytest
from first_contact import ContactConfig, Part, Step, read_nanogpt, with_section
from helpers import ROOT, fails, wait_until

FAST = {'batch_size': 16, 'step_ms': 20.0, 'tokens_per_s': 300e3, 'matmul_flops': 700e12,
        'matmul_share': 0.5, 'mfu': 0.4, 'peak_memory_bytes': 2**31}
MACHINE = {'device': 'NVIDIA H100', 'machine': 'NVIDIA H100', 'date': '2030-01-01',
           'torch': '2.11.0', 'cuda': '13.0', 'cudnn': 91900}


def record(folder, *steps, tiny=False):
    """Write what a part would: steps are (name, kind, result, why there is none)."""
    folder.mkdir(exist_ok=True)
    lines = [{'part': 1, 'step': name, 'kind': kind, 'tiny': tiny, 'command': 'c', 'result': result,
              'ended': ended, 'seconds': 1.0} for name, kind, result, ended in
             (('machine', 'machine', MACHINE, 'measured'), *steps)]
    (folder / 'part-1.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


def render(tmp_path):
    first_contact.main([f'--render={tmp_path}/in', f'--to={tmp_path}/out'])
    return (tmp_path / 'out' / 'docs' / 'benchmarks.md').read_text()


def test_speeds_stand_beside_nanogpts_at_the_same_batch_and_what_is_missing_is_told(tmp_path):
    nanogpt = read_nanogpt('compiled\ntime per iteration: 81.92ms, MFU: 40.00%\n', 16)  # 200k/s
    record(tmp_path / 'in', ('batch 16', 'speed', {'rows': [FAST]}, 'measured'),
           ('batch 64', 'speed', {'rows': [{**FAST, 'batch_size': 64}]}, 'measured'),
           ('nanoGPT, batch 16', 'nanogpt', nanogpt, 'measured'),
           ('nanoGPT, batch 64', 'nanogpt', None, 'out of time'),
           ('ladder', 'ladder', None, 'not run: no text'))
    page = render(tmp_path)
    lines = {line.split('|')[1].strip(): [cell.strip() for cell in line.split('|')[2:-1]]
             for line in page.splitlines() if line.startswith('|')}
    assert lines['batch 16'] == ['20.0', '300k', '1.50', '50.0%', '40.0%', '2.00 GiB']
    assert lines['batch 64'][2] == '–'
    assert lines['nanoGPT, batch 16'] == ['81.9', '200k', '1.00', '–', '–', '–']
    assert 'Not measured: nanoGPT, batch 64 (out of time); ladder (no text).' in page
    assert '700 TFLOP/s' in page and page.count('## On NVIDIA H100') == 1
    assert sorted(path.name for path in (tmp_path / 'out' / 'results').iterdir()) == [
        'speed-nvidia-h100.csv', 'speed-nvidia-h100.md']
    assert render(tmp_path) == page  # a second time changes nothing


def test_the_plan_stands_beside_the_allocator_at_the_peak(tmp_path):
    stages = [{'stage': 'forward', 'allocated': 10, 'reserved': 11, 'planned': 12},
              {'stage': 'peak', 'allocated': 2**30, 'reserved': 2**31, 'planned': 1.05 * 2**30}]
    record(tmp_path / 'in', ('memory, batch 16', 'memory', {'rows': stages}, 'measured'))
    page = render(tmp_path)
    assert '| batch 16 ' in page and ' +5.0% |' in page and 'forward' not in page


def test_modes_stand_beside_what_seeds_differ(tmp_path):
    rows = [{'variant': variant, 'seed': seed, 'final_loss': loss} for variant, seed, loss in
            (('base', 1, 3.0), ('compile', 1, 4.0), ('base', 2, 3.25), ('compile', 2, 4.25))]
    record(tmp_path / 'in', ('quickstart', 'ablate', {'rows': rows, 'table': 'as it came'},
                             'measured'))
    page = render(tmp_path)
    assert 'as it came' in page and "The base's seeds end 0.2500 apart." in page


def test_other_sections_of_the_page_stay():
    page = '# B\n\n## On a GPU\n\nold\n\n## Last\n\nhere\n'
    assert with_section(page, 'On a GPU', 'new') == \
        '# B\n\n## On a GPU\n\nnew\n\n## Last\n\nhere\n'
    assert with_section('# B\n', 'On a GPU', 'new') == '# B\n\n## On a GPU\n\nnew\n'


def test_a_rehearsal_is_not_written_into_the_projects_results(tmp_path, capsys, monkeypatch):
    record(tmp_path / 'in', ('batch 16', 'speed', {'rows': [FAST]}, 'measured'), tiny=True)
    assert 'rehearsal' in fails(capsys, monkeypatch, first_contact.main,
                                f'--render={tmp_path}/in')
    (tmp_path / 'empty').mkdir()
    assert 'part-*.jsonl' in fails(capsys, monkeypatch, first_contact.main,
                                   f'--render={tmp_path}/empty')
    assert 'input=/nowhere' in fails(capsys, monkeypatch, first_contact.main, '--part=1',
                                     '--out=o', '--input=/nowhere')


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


def test_what_came_of_each_step_is_noted(tmp_path):
    running, last = part(tmp_path)
    print_json = [sys.executable, '-c', 'print("{\\"rows\\": [1]}")']
    assert running.run(Step('good', 'speed', 9, print_json))
    assert last()['result'] == {'rows': [1]} and last()['command'].startswith('python -c')
    assert not running.run(Step('bad', 'speed', 9, [sys.executable, '-c', 'print(1); 1 / 0']))
    assert last()['ended'] == 'failed' and 'ZeroDivisionError' in (
        tmp_path / 'part-1.log').read_text()
    assert not running.run(Step('silent', 'speed', 9, [sys.executable, '-c', '']))
    assert last()['ended'].startswith('failed: ')
    assert not running.run(Step('a GPU', 'speed', 9, print_json, needs=('cuda',)))
    assert last()['ended'] == 'not run: it needs CUDA' and last()['seconds'] is None
    late, last = part(tmp_path, minutes=0.1)
    assert not late.run(Step('late', 'speed', 9, print_json))
    assert last()['ended'] == "not run: the part's time was over"


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
    _, steps = first_contact.read_parts(tmp_path / 'out')
    assert {step['ended'] for step in steps} == {
        'measured', 'not run: nanoGPT was not given (--nanogpt)'}
    assert str(tmp_path) not in ''.join(
        path.read_text() for path in (tmp_path / 'out').glob('part-*.jsonl'))
    first_contact.main([f'--render={tmp_path}/out', f'--to={tmp_path}/to'])
    page = (tmp_path / 'to' / 'docs' / 'benchmarks.md').read_text()
    kinds = {step['kind'] for step in steps} - {'nanogpt', 'beside-nanogpt'}
    assert kinds == {path.stem.removesuffix('-cpu') for path in
                     (tmp_path / 'to' / 'results').glob('*.md')}
    assert page.count('nanoGPT was not given') == 5
