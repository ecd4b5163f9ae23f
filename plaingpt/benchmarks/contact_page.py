"""What tools/first_contact.py measured → tables in results/ and a section of docs/benchmarks.md."""

import re
from pathlib import Path
from statistics import median

from plaingpt.benchmarks.result_tables import markdown, named_path, save
from plaingpt.system.errors import UserError
from plaingpt.system.files import (
    ROOT,
    check_keys,
    is_bool,
    is_count,
    is_number,
    is_positive,
    is_text,
    make_writable,
    open_regular,
    parse_json,
    write_atomically,
)
from plaingpt.system.formatting import gib, short
from plaingpt.system.streams import warn

REHEARSAL = 'This is a rehearsal with tiny shapes: the figures mean nothing.'


# -----------------------------------------------------------------------------
# reading


def is_size(x):
    return is_number(x) and x > 0


def may_lack(x):
    return x is None or is_number(x)


# What a line has, the result of a machine, and a row of a result of each kind: what tables need.
LINE = {'part': is_positive, 'step': is_text, 'kind': is_text, 'tiny': is_bool, 'ended': is_text}
MACHINE = dict.fromkeys(('device', 'machine', 'date', 'torch'), is_text)
ROW = {'speed': {'batch_size': is_positive, 'micro_steps': is_positive, 'dtype': is_text,
                 'compile': is_bool, 'step_ms': is_size, 'min_ms': is_size, 'max_ms': is_size,
                 'tokens_per_s': is_size, 'matmul_flops': is_size, 'matmul_share': is_number,
                 'mfu': may_lack, 'peak_memory_bytes': may_lack},
       'nanogpt': {'batch_size': is_positive, 'step_ms': is_size, 'tokens_per_s': is_size},
       'memory': {'stage': is_text, 'allocated': is_size, 'planned': is_number},
       'ablate': {'variant': is_text, 'final_loss': may_lack},
       'training': {'iter': is_count, 'tokens': is_count, 'elapsed_s': is_number}}


def parse_line(line):
    """A line of part-N.jsonl → dict. Raises ValueError where no part can have written it."""
    row = parse_json(line)
    check_keys(row, LINE)
    result = row.setdefault('result', None)
    if row['kind'] == 'machine' and result is not None:
        check_keys(result, MACHINE)
    elif row['kind'] != 'text' and result is not None:
        check_keys(result, {'rows': lambda rows: isinstance(rows, list) and rows})
        if not is_text(result.get('table', '')):
            raise ValueError('table is no text')
        for measured in result['rows']:
            check_keys(measured, ROW.get(row['kind'], {}))
    return row


def read_lines(folder):
    """Yield the rows of all parts in a folder. A line that is none, such as one that a kill cut, is
    skipped with a warning."""
    for path in sorted(Path(folder).rglob('part-*.jsonl')):
        with open_regular(path) as f:
            for number, line in enumerate(f, 1):
                try:
                    yield parse_line(line)
                except ValueError as problem:
                    warn(f'{path}:{number}: the line is skipped: {problem}')


def read_parts(folder):
    """→ (facts of the machine, rows of steps); of steps made twice the last that was measured.
    Where a folder has more than a rehearsal, the rehearsal does not count."""
    lines = list(read_lines(folder))
    if not all(row['tiny'] for row in lines):
        lines = [row for row in lines if not row['tiny']]
    steps, machines = {}, {}
    for row in lines:
        if row['kind'] == 'machine' and row['result']:
            machines[row['result']['device']] = row['result']
        key = row['part'], row['step']
        if row['result'] or not steps.get(key, row)['result']:
            steps[key] = row
    if len(machines) != 1:
        raise UserError(f'{folder}: ' + (
            f'measured on {" and ".join(machines)}: render a folder of each' if machines
            else 'no part-*.jsonl in there that says on which machine it was measured'))
    facts, = machines.values()
    return facts, list(steps.values())


# -----------------------------------------------------------------------------
# tables: steps of a kind → (rows, Markdown)


def own_tables(steps):
    """What each step printed, with its name above."""
    rows = [{'step': step['step'], **row} for step in steps for row in step['result']['rows']]
    return rows, '\n\n'.join(f'**{step["step"]}**: {step["result"]["table"]}'
                             if 'table' in step['result'] else
                             f'**{step["step"]}**\n\n{plain_table(step["result"]["rows"])}'
                             for step in steps)


def plain_table(rows):
    return markdown([key.replace('_', ' ') for key in rows[0]],
                    [[f'{value:.4g}' if isinstance(value, float) else str(value)
                      for value in map(row.get, rows[0])] for row in rows])


def speed_table(steps):
    """With each batch's ratio to nanoGPT's median at the same batch, where that was measured."""
    rows = [{'step': step['step'], **step['result']['rows'][0]}
            for step in sorted(steps, key=lambda step: step['kind'] == 'nanogpt')]
    theirs = {}
    for step in steps:
        if step['kind'] == 'nanogpt':
            row = step['result']['rows'][0]
            theirs.setdefault(row['batch_size'], []).append(row['tokens_per_s'])
    table = []
    for row in rows:
        base = theirs.get(row['batch_size'])
        row['times_nanogpt'] = row['tokens_per_s'] / median(base) if base else None
        compiled = {True: 'compiled', False: 'eager'}.get(row.get('compile'), '–')
        spread = f'{row["min_ms"]:.1f}–{row["max_ms"]:.1f}' if 'min_ms' in row else '–'
        table.append([row['step'], f'{row.get("micro_steps", 1)} × {row["batch_size"]}',
                      row.get('dtype', '–'), compiled, f'{row["step_ms"]:.1f}', spread,
                      short(row['tokens_per_s']),
                      *(as_text(form, row.get(key)) for key, form in (
                          ('times_nanogpt', '{:.2f}'), ('matmul_share', '{:.1%}'),
                          ('mfu', '{:.1%}'))),
                      gib(row['peak_memory_bytes']) if row.get('peak_memory_bytes') else '–'])
    return rows, markdown(['', 'batches a step', 'precision', 'compiled', 'ms a step', 'min–max',
                           'tokens/s', '× nanoGPT, same batch', "share of a bare matmul's rate",
                           'MFU', 'peak memory'], table)


def as_text(form, value):
    return '–' if value is None else form.format(value)


def memory_table(steps):
    rows = [{'step': step['step'], **row} for step in steps for row in step['result']['rows']]
    return rows, markdown(
        ['peak of a step', 'allocated', 'reserved', 'planned', 'plan beside allocated'],
        [[row['step'].removeprefix('memory, '), gib(row['allocated']),
          gib(row['reserved']) if row.get('reserved') else '–', gib(row['planned']),
          f'{row["planned"] / row["allocated"] - 1:+.1%}']
         for row in rows if row['stage'] == 'peak'])


def modes_table(steps):
    """With how far the seeds lie apart, to compare the modes with."""
    rows, text = own_tables(steps)
    losses = [row['final_loss'] for row in rows if row['variant'] == rows[0]['variant']
              and row['final_loss'] is not None]
    if len(losses) > 1:
        text += f"\n\nThe base's seeds end {max(losses) - min(losses):.4f} apart."
    return rows, text


def profile_table(steps):
    """Without where the trace lies, which stays in the folder of the part."""
    rows, text = own_tables(steps)
    return rows, re.sub(r'\n\n\S*trace\.json: .*', '', text)


def curve_table(steps):
    """Evaluations; the recipe's source reports 3.28 after all its steps."""
    step = steps[-1]
    rows = [row for row in step['result']['rows'] if 'val_loss' in row]
    return rows or step['result']['rows'], markdown(
        ['iteration', 'tokens', 'seconds', 'validation loss'],
        [[str(row['iter']), short(row['tokens']), f'{row["elapsed_s"]:.0f}',
          as_text('{:.4f}', row['val_loss'])] for row in rows]) + \
        '\n\nmodded-nanogpt reports 3.28 after 3,250 steps of this recipe.'


# What goes into results/KIND-GPU: its title, its table, whether docs/benchmarks.md shows it too.
TABLES = {
    'speed': ('Speed of a step', speed_table, True),
    'beside-nanogpt': ('Beside nanoGPT', own_tables, True),
    'profile': ('Where the time of a step goes', profile_table, False),
    'memory': ('Memory of a step', memory_table, True),
    'checkpoints': ('Checkpoints', own_tables, True),
    'ablate': ('The quickstart in each mode', modes_table, True),
    'ladder': ('Ladder', own_tables, True),
    'resuming': ('Resuming', own_tables, True),
    'generation': ('Generation', own_tables, True),
    'grid': ('Grid', own_tables, False),
    'training': ('GPT-2 124M, the fast recipe', curve_table, True)}


# -----------------------------------------------------------------------------
# the page


def render(folder, to, planned):
    """Write results/ and the section of docs/benchmarks.md, in `to` or the project, from what parts
    measured. planned: whether it is a rehearsal → {part: names of its steps}"""
    machine, steps = read_parts(folder)
    tiny = steps[0]['tiny']
    if tiny and not to:
        raise UserError(f'{folder} is a rehearsal with tiny shapes: write its tables elsewhere, '
                        'with --to=FOLDER')
    to = Path(to or ROOT)
    for name in ('results', 'docs'):
        make_writable(to / name, 'to')
    facts = {key: machine[key] for key in ('date', 'machine', 'torch')}
    facts['command'] = 'python tools/first_contact.py'
    parts = [REHEARSAL] if tiny else []
    parts.append(measured_where(machine, steps))
    for kind, (title, table, shown) in TABLES.items():
        found = [step for step in steps if step['result'] and (
            step['kind'] == kind or (step['kind'], kind) == ('nanogpt', 'speed'))]
        if found:
            rows, text = table(found)
            path = named_path(to / 'results', kind, machine['device'])
            save(path, facts, rows, f'{REHEARSAL}\n\n{text}' if tiny else text)
            parts.append(f'**[{title}](../results/{path.name}.md)**'
                         + (f'\n\n{text}' if shown else ''))
    if missing := not_measured(steps, planned(tiny)):
        parts.append(f'Not measured: {"; ".join(missing)}.')
    page = to / 'docs' / 'benchmarks.md'
    before = page.read_text(encoding='utf-8') if page.exists() else '# Benchmarks\n'
    write_atomically(page, with_section(before, f'On {machine["machine"]}', '\n\n'.join(parts)))
    print(f'{page}, {to / "results"}: written')


def measured_where(machine, steps):
    versions = [f'{name} {machine[key]}' for name, key in
                (('torch', 'torch'), ('CUDA', 'cuda'), ('cuDNN', 'cudnn')) if machine.get(key)]
    text = f'Measured by `tools/first_contact.sh` on {machine["date"]} with {", ".join(versions)}.'
    flops = [row['matmul_flops'] for step in steps if step['result'] and step['kind'] == 'speed'
             for row in step['result']['rows']]
    return text + (f' A large matrix product reached {median(flops) / 1e12:.3g} TFLOP/s.'
                   if flops else '')


def not_measured(steps, planned):
    """→ what has no result, and why; parts that never ran are named with their steps."""
    found = [f'{step["step"]} ({step["ended"].removeprefix("not run: ")})' for step in steps
             if not step['result'] and (step['kind'], step['ended']) != ('text', 'measured')]
    for part, names in planned.items():
        noted = {step['step'] for step in steps if step['part'] == part}
        missing = '; '.join(name for name in names if name not in noted)
        if missing and noted:
            found.append(f'what part {part} did not come to ({missing})')
        elif missing:
            found.append(f'part {part}, which was never run ({missing})')
    return found


def with_section(page, heading, text):
    """A page with a section of that heading, in place of an earlier one or at its end."""
    found = re.search(rf'^## {re.escape(heading)}\n.*?(?=^## |\Z)', page, re.M | re.S)
    before, after = (page[:found.start()], page[found.end():]) if found else (page, '')
    return f'{before.rstrip()}\n\n## {heading}\n\n{text}\n' + (after and f'\n{after}')
