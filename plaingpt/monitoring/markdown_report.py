"""report.md and its pictures: what a run was and what came of it, from run.json and metrics.jsonl.
"""

import math
import textwrap
from contextlib import contextmanager
from pathlib import Path
from statistics import median_high

from plaingpt.monitoring.diagnosis import THRESHOLDS, diagnose, late_losses, warmup_iters
from plaingpt.monitoring.metrics_file import column, read_rows, rows_with
from plaingpt.monitoring.references import reference_of
from plaingpt.monitoring.run_record import epochs, read_run, where_it_stands
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import duration, one_line, printable, quote_epochs, short
from plaingpt.system.streams import status

SAMPLES = 5  # texts by the model in a report, evenly spread over the run


@status.doing('writing the report')
def write_report(out_dir, print_line):
    """Write out_dir/report.md and its pictures. What cannot be written is said in a line."""
    out_dir = Path(out_dir)
    with attempt('report.md', print_line):
        rows, run = read_rows(out_dir / 'metrics.jsonl', print_line), read_run(out_dir)
        if not rows or not run:
            return
        with attempt('loss.png', print_line):
            from plaingpt.monitoring.figures import draw_curves
            draw_curves([(out_dir.name, rows)], out_dir / 'loss.png', reference_of(run))
        if verdict := overfit_check(rows, run):
            print_line(verdict)
        text = format_report(out_dir, rows, run)
        write_atomically(out_dir / 'report.md', printable(text))
        print_line(f'{out_dir}/report.md says what the run was and what came of it')


@contextmanager
def attempt(name, print_line):
    """What is raised in here costs the file of that name, and not the run that came to its end."""
    try:
        yield
    except Exception as e:
        print_line(f'warning: no {name}: {one_line(e)}')


def format_report(out_dir, rows, run):
    """The text of report.md."""
    found = diagnose(rows, run)
    parts = [f'# {out_dir.name}', format_outcome(rows, run),
             '## Diagnosis', '\n'.join(f'- {each}' for each in found)
             or too_early(rows, run) or 'Nothing looks wrong.']
    if verdict := overfit_check(rows, run):
        parts.append(verdict)
    if reference := reference_of(run):
        parts.append(f'{reference.compare("It", rows)}.')
    if (out_dir / 'loss.png').exists():
        parts += ['## Curves', '![loss](loss.png)']
    if (out_dir / 'loss-details.png').exists():
        parts.append('![learning rate, gradients, speed and layers](loss-details.png)')
    parts += ['## What was run', f'```\n{run["command"]}\n```', format_facts(run)]
    if run['changed']:
        lines = '\n'.join(f'{key} = {value!r}' for key, value in sorted(run['changed'].items()))
        parts += ['Settings that are not the defaults:', f'```python\n{lines}\n```']
    samples = list({row['iter']: row for row in rows if row.get('sample')}.values())
    if samples:
        parts.append('## What it wrote')
        chosen = {round(i * (len(samples) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)}
        for row in (samples[i] for i in sorted(chosen)):
            parts += [f'After {row["iter"]:,} iterations:', code_block(row['sample'])]
    return '\n\n'.join(parts) + '\n'


def too_early(rows, run):
    """Why most checks could not judge a run yet, in a sentence, or None."""
    evaluations = [row for row in rows_with(rows, 'val_loss') if row['iter']]
    if len(late_losses(rows, run)) >= 5 and len(evaluations) >= 2:
        return None
    return ('Too early to judge: most checks take two evaluations after the first step, and five '
            f'logged losses, the last at iteration {warmup_iters(run) + THRESHOLDS["early_steps"]} '
            f'({THRESHOLDS["early_steps"]} after warmup) or later.')


def overfit_check(rows, run):
    """What a run with overfit_batches shows, in a sentence, or None."""
    seen, n = rows_with(rows, 'train_loss'), run['config']['overfit_batches']
    if not n or len(seen) < 2:
        return None
    limit = THRESHOLDS['overfit_check'] * math.log(run['vocab_size'])
    first, last = seen[0]['train_loss'], seen[-1]['train_loss']
    what = f'overfit_batches={n}: the loss went from {first:.3f} to {last:.3f} in ' \
           f'{seen[-1]["iter"]} iterations'
    if last < limit:
        return f'{what}, near zero as it should: model, loss and optimizer can learn'
    return (f'{what}, and should come under {limit:.2f}: train longer, with dropout=0 and a higher '
            'learning_rate; if it still does not, something is broken')


def code_block(text):
    """Markdown of a text, indented: it may hold fences itself."""
    return textwrap.indent(text, '    ', lambda line: True)


def format_outcome(rows, run):
    """Losses, amounts, speed and memory, as a table."""
    last, steps = where_it_stands(rows, run), rows_with(rows, 'loss')
    table = [('ended', run['ending'])] if run.get('ending') else []
    table += format_losses(rows_with(rows, 'val_loss'), run['config'].get('also_evaluate'))
    table += [('iterations', f'{last["iter"]:,}'),
              ('tokens', f'{last["tokens"]:,}, {quote_epochs(epochs(run, last["tokens"]))}, '
                         f'{last["tokens"] / run["parameters"]:.3g} a parameter (about 20 are '
                         'compute-optimal: Hoffmann et al. 2022)'),
              ('time', duration(last['elapsed_s']))]
    if speeds := column(steps, 'tokens_per_s'):
        mfus = column(steps, 'mfu')
        mfu = f', MFU {median_high(mfus):.1%}' if mfus else ''
        table += [('speed, median', f'{short(median_high(speeds))} tokens/s{mfu}')]
    if peaks := column(steps, 'peak_memory_bytes'):
        table += [('memory, peak', f'{max(peaks) / 2**20:,.0f} MiB')]
    return '\n'.join(['| | |', '|---|---|', *(f'| {name} | {value} |' for name, value in table)])


def format_losses(evaluations, beside):
    """Lines of the table on losses, [(name, value)]. evaluations: rows; beside: also_evaluate"""
    if not evaluations:
        return []
    table, last = [], evaluations[-1]
    best = min(evaluations, key=lambda row: row['val_loss'])
    for name, row in (('best', best), ('last', last)):
        bits = f', {row["val_bpb"]:.3f} bits a byte' if row.get('val_bpb') else ''
        table.append((f'validation loss, {name}',
                      f'{row["val_loss"]:.4f}{bits}, iteration {row["iter"]:,}'))
        table += [(f'of {key.removeprefix("val_loss/")}', f'{loss:.4f}')
                  for key, loss in row.items() if key.startswith('val_loss/')
                  and key != f'val_loss/{beside}' and loss is not None]
    if losses := column(evaluations, f'val_loss/{beside}'):
        table.append((f'loss on {beside}', f'{losses[-1]:.4f}, at the start {losses[0]:.4f}'))
    if last.get('train_loss') is not None:
        table.append(('training loss, last', f'{last["train_loss"]:.4f}'))
    return table


def format_facts(run):
    """Data, model, code and machine, a line each."""
    data, machine = run['data'], run['machine']
    device = machine['device'] if machine['device'] != 'cpu' else machine['cpu']
    versions = ', '.join(f'{name} {version}' for name, version in run['versions'].items())
    return '\n'.join([
        f'- data: {data["folder"]}, {run["train_tokens"]:,} training tokens ({data["tokenizer"]}, '
        f'vocabulary {run["vocab_size"]:,})',
        f'- model: {run["parameters"]:,} parameters',
        f'- code: {run["code"] or "unknown"}',
        f'- machine: {device}, {machine["cores"]} cores, {machine["processes"]} process(es), '
        f'{run["dtype"]}, compile {run["compile"]}, {machine["system"]}',
        f'- versions: {versions}',
        f'- started: {run["started"]}'])
