"""report.md: what came of a run, on a page, from run.json and metrics.jsonl."""

import textwrap
from pathlib import Path

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.references import compare, read_band
from plaingpt.monitoring.run_record import read_rows, rows_with, run_summary
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import one_line, printable


def write_report(out_dir, run, print_line):
    """Write out_dir/loss.png and report.md. What fails is said in a line: the run came to its end.
    run: the facts of run.json"""
    from plaingpt.monitoring.curves import draw_runs
    out_dir = Path(out_dir)
    rows = read_rows(out_dir / 'metrics.jsonl')
    for name, write in (
            ('loss.png', lambda path: draw_runs([(out_dir.name, rows)], path, read_band(run))),
            ('report.md', lambda path: write_atomically(path, printable(
                format_report(out_dir, rows, run))))):
        try:
            write(out_dir / name)
        except Exception as e:
            print_line(f'warning: no {name}: {one_line(e)}')
    if (out_dir / 'report.md').exists():
        print_line(f'{out_dir}/report.md says what came of the run')


def format_report(out_dir, rows, run):
    """The text of report.md."""
    parts = [f'# {out_dir.name}', f'{run_summary(out_dir.name, rows, run)}.']
    for row in rows_with(rows, 'val_loss')[-1:]:
        parts.append(f'The last validation loss is {row["val_loss"]:.4f}.')
    parts.append(f'It {compare(rows, run)}.')
    found = diagnose(rows, run).values()
    parts += [f'- {each}' for each in found] or ['No check finds anything wrong.']
    if (out_dir / 'loss.png').exists():
        parts.append('![loss](loss.png)')
    samples = {row['iter']: row['sample'] for row in rows if row.get('sample')}
    for iter_num in sorted({*list(samples)[:1], *list(samples)[-1:]}):
        parts += [f'After {iter_num:,} iterations it wrote:',  # indented: it may hold fences itself
                  textwrap.indent(samples[iter_num], '    ', lambda line: True)]
    return '\n\n'.join(parts) + '\n'
