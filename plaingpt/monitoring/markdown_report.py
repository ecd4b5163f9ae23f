"""report.md: what came of a run, on a page, from run.json and metrics.jsonl."""

import textwrap
from contextlib import contextmanager
from pathlib import Path

from plaingpt.monitoring.diagnosis import diagnose, overfit_check
from plaingpt.monitoring.metrics_file import read_rows, rows_with
from plaingpt.monitoring.references import compare, recorded
from plaingpt.monitoring.run_record import read_run, run_summary
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import one_line, printable
from plaingpt.system.streams import status


@status.doing('writing the report')
def write_report(out_dir, print_line):
    """Write out_dir/report.md and loss.png. What cannot be written is said in a line."""
    out_dir = Path(out_dir)
    with attempt('report.md', print_line):
        rows, run = read_rows(out_dir / 'metrics.jsonl', print_line), read_run(out_dir)
        if not rows or not run:
            return
        with attempt('loss.png', print_line):
            from plaingpt.monitoring.curves import draw_runs
            draw_runs([(out_dir.name, rows)], out_dir / 'loss.png', recorded(run))
        if verdict := overfit_check(rows, run):
            print_line(verdict)
        write_atomically(out_dir / 'report.md', printable(format_report(out_dir, rows, run)))
        print_line(f'{out_dir}/report.md says what came of the run')


@contextmanager
def attempt(name, print_line):
    """What is raised in here costs the file of that name, and not the run that came to its end."""
    try:
        yield
    except Exception as e:
        print_line(f'warning: no {name}: {one_line(e)}')


def format_report(out_dir, rows, run):
    """The text of report.md."""
    parts = [f'# {out_dir.name}', f'{run_summary(out_dir.name, rows, run)}.']
    for row in rows_with(rows, 'val_loss')[-1:]:
        parts.append(f'The last validation loss is {row["val_loss"]:.4f}.')
    parts.append(f'It {compare(rows, run)}.')
    found = [*diagnose(rows, run), overfit_check(rows, run)]
    parts += [f'- {each}' for each in found if each] or ['No check finds anything wrong.']
    if (out_dir / 'loss.png').exists():
        parts.append('![loss](loss.png)')
    samples = {row['iter']: row['sample'] for row in rows if row.get('sample')}
    for iter_num in sorted({*list(samples)[:1], *list(samples)[-1:]}):
        parts += [f'After {iter_num:,} iterations it wrote:',  # indented: it may hold fences itself
                  textwrap.indent(samples[iter_num], '    ', lambda line: True)]
    return '\n\n'.join(parts) + '\n'
