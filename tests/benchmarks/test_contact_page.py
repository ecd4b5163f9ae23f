import json

import first_contact
from first_contact import read_nanogpt
from helpers import fails

from plaingpt.benchmarks.contact_page import REHEARSAL, with_section

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


def table_of(page):
    return {line.split('|')[1].strip(): [cell.strip() for cell in line.split('|')[2:-1]]
            for line in page.splitlines() if line.startswith('|')}


def test_speeds_stand_beside_nanogpts_at_the_same_batch_and_what_is_missing_is_told(tmp_path):
    printed = 'compiled\ntime per iteration: 81.92ms, MFU: 40.00%\n'  # 200k tokens/s
    eager = {**FAST, 'batch_size': 64, 'compile': False, 'dtype': 'float32'}
    record(tmp_path / 'in', ('batch 16', 'speed', {'rows': [FAST]}, 'measured'),
           ('batch 64', 'speed', {'rows': [eager]}, 'measured'),
           ('nanoGPT, batch 16', 'nanogpt', read_nanogpt(printed, 16, 'bfloat16'), 'measured'),
           ('nanoGPT, batch 64', 'nanogpt', None, 'out of time'),
           ('ladder', 'ladder', None, 'not run: no text'),
           ('eager', 'speed', None, 'failed: CUDA out of memory'))
    page = render(tmp_path)
    lines = table_of(page)
    assert lines['batch 16'] == ['32 × 16', 'bfloat16', 'compiled', '20.0', '19.0–23.0', '300k',
                                 '1.50', '50.0%', '40.0%', '2.00 GiB']
    assert lines['batch 64'][:3] == ['32 × 64', 'float32', 'eager'] and lines['batch 64'][6] == '–'
    assert lines['nanoGPT, batch 16'] == ['1 × 16', 'bfloat16', 'compiled', '81.9', '–', '200k',
                                          '1.00', '–', '–', '–']
    assert 'Not measured: nanoGPT, batch 64 (out of time); ladder (no text); eager (failed: ' \
           'CUDA out of memory); ' in page
    assert '700 TFLOP/s' in page and page.count('## On NVIDIA H100') == 1
    assert sorted(path.name for path in (tmp_path / 'out' / 'results').iterdir()) == [
        'speed-nvidia-h100.csv', 'speed-nvidia-h100.md']
    assert render(tmp_path) == page  # a second time changes nothing


def test_parts_that_never_ran_and_steps_that_a_part_did_not_come_to_are_named(tmp_path):
    record(tmp_path / 'in', ('grid', 'grid', None, 'interrupted'), part=4)
    page = render(tmp_path)
    assert 'grid (interrupted); ' in page
    assert 'what part 4 did not come to (gpt2_124m_fast)' in page
    assert 'part 3, which was never run (ladder; resuming, eager; ' in page


def test_lines_that_are_damaged_are_named_and_skipped(tmp_path, capsys):
    path = record(tmp_path / 'in', ('batch 16', 'speed', {'rows': [FAST]}, 'measured'))
    whole = render(tmp_path)
    good = path.read_bytes().splitlines()[1]
    row = json.loads(good)
    damaged = [good[:200], b'\xff' + good, b'', b'[1]', b'{"part": 1}',
               *(json.dumps({**row, **change}).encode() for change in (
                   {'part': 'x'}, {'ended': None}, {'result': []}, {'result': {'rows': []}},
                   {'result': {'rows': [{**FAST, 'step_ms': 0}]}}, {'result': {'rows': [{}]}},
                   {'result': {'rows': [[1]]}},
                   {'kind': 'memory'}, {'kind': 'training'}, {'kind': 'machine'}))]
    with path.open('ab') as f:
        f.write(b'\n'.join([*damaged, good[:100]]))
    capsys.readouterr()
    assert render(tmp_path) == whole
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split(': ')[1] for line in warnings] == [
        f'{path}:{number}' for number in range(3, 3 + len(damaged) + 1)]


def test_the_plan_stands_beside_the_allocator_at_the_peak(tmp_path):
    stages = [{'stage': 'forward', 'allocated': 10, 'reserved': 11, 'planned': 12},
              {'stage': 'peak', 'allocated': 2**30, 'reserved': 2**31, 'planned': 1.05 * 2**30}]
    record(tmp_path / 'in', ('memory, batch 16', 'memory', {'rows': stages}, 'measured'))
    page = render(tmp_path)
    assert '| batch 16 ' in page and ' +5.0% |' in page and 'forward' not in page


def test_a_profile_does_not_name_a_trace_that_is_elsewhere(tmp_path):
    table = 'above\n\n| operator |\n\nOUT/trace.json: open it in a browser'
    record(tmp_path / 'in', ('profile', 'profile', {'rows': [FAST], 'table': table}, 'measured'))
    render(tmp_path)
    text = (tmp_path / 'out' / 'results' / 'profile-nvidia-h100.md').read_text()
    assert '| operator |' in text and 'trace' not in text


def test_modes_stand_beside_what_seeds_differ(tmp_path):
    rows = [{'variant': variant, 'seed': seed, 'final_loss': loss} for variant, seed, loss in
            (('base', 1, 3.0), ('compile', 1, None), ('base', 2, 3.25), ('compile', 2, 4.25))]
    record(tmp_path / 'in', ('quickstart', 'ablate', {'rows': rows, 'table': 'as it came'},
                             'measured'))
    page = render(tmp_path)
    assert 'as it came' in page and "The base's seeds end 0.2500 apart." in page


def test_losses_of_a_run_that_are_not_finite_are_left_open(tmp_path):
    rows = [{'iter': 0, 'tokens': 0, 'elapsed_s': 1.0, 'val_loss': 4.0},
            {'iter': 25, 'tokens': 5000, 'elapsed_s': 9.0, 'val_loss': None}]
    record(tmp_path / 'in', ('run', 'training', {'rows': rows}, 'measured'))
    assert table_of(render(tmp_path))['25'] == ['5.00k', '9', '–']


def test_other_sections_of_the_page_stay():
    page = '# B\n\n## On a GPU\n\nold\n\n## Last\n\nhere\n'
    assert with_section(page, 'On a GPU', 'new') == \
        '# B\n\n## On a GPU\n\nnew\n\n## Last\n\nhere\n'
    assert with_section('# B\n', 'On a GPU', 'new') == '# B\n\n## On a GPU\n\nnew\n'


def test_a_rehearsal_says_so_and_is_not_written_into_the_projects_results(tmp_path, capsys,
                                                                          monkeypatch):
    record(tmp_path / 'in', ('batch 16', 'speed', {'rows': [FAST]}, 'measured'), tiny=True)
    assert 'rehearsal' in fails(capsys, monkeypatch, first_contact.main,
                                f'--render={tmp_path}/in')
    page = render(tmp_path)
    assert page.index('## On ') < page.index(REHEARSAL) < page.index('Measured by')
    table = (tmp_path / 'out' / 'results' / 'speed-nvidia-h100.md').read_text()
    assert table.index(REHEARSAL) < table.index('| ')
    # Once something is measured in the same folder, the rehearsal does not count.
    record(tmp_path / 'in', ('grid', 'grid', {'rows': [{'a': 1}]}, 'measured'), part=4)
    page = render(tmp_path)
    assert REHEARSAL not in page and 'batch 16' in page.split('Not measured: ')[1]


def test_a_folder_without_measurements_is_a_line(tmp_path, capsys, monkeypatch):
    assert 'no such folder' in fails(capsys, monkeypatch, first_contact.main,
                                     f'--render={tmp_path}/nope')
    (tmp_path / 'empty').mkdir()
    assert 'part-*.jsonl' in fails(capsys, monkeypatch, first_contact.main,
                                   f'--render={tmp_path}/empty')
