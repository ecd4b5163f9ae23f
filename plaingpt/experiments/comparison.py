"""Compare runs: differences between variants, paired by seed, their significance, and tables."""

import csv
import statistics
from math import sqrt

from plaingpt.monitoring.references import p_value, t_quantile


def compare(runs):
    """Runs → a dict per variant. loss, loss_error: mean over seeds and its standard error; change,
    change_error: the same for the differences from the first variant, paired by seed; half_width:
    of the 95% interval of this change alone; p_value: of a paired t-test; significant: whether the
    change is significant after Holm's correction for all variants; step_ms, iterations: medians.
    None stands for unknown, and `problem` says why."""
    groups = {}
    for run in runs:
        groups.setdefault(run['variant'], []).append(run)
    base_losses = [run['final_loss'] for run in next(iter(groups.values()))]
    keys = ('loss', 'loss_error', 'change', 'change_error', 'half_width', 'p_value', 'significant',
            'step_ms', 'iterations')
    rows = []
    for name, group in groups.items():
        row = {'variant': name, **dict.fromkeys(keys), 'problem': ''}
        losses = [run['final_loss'] for run in group]
        if None in losses:
            failed = group[losses.index(None)]
            problem = failed.get('problem') or 'the loss is not finite'
            row['problem'] = f'seed {failed["seed"]}: {problem}'
        else:
            row['loss'], row['loss_error'] = mean_and_error(losses)
            for key in ('step_ms', 'iterations'):
                row[key] = statistics.median(run[key] for run in group)
        if rows and None not in losses + base_losses:
            differences = [a - b for a, b in zip(losses, base_losses, strict=True)]
            row['change'], row['change_error'] = mean_and_error(differences)
            if len(losses) > 1:
                row['half_width'] = t_quantile(len(losses) - 1) * row['change_error']
                row['p_value'] = p_value(row['change'], row['change_error'], len(losses) - 1)
        rows.append(row)
    correct_for_comparisons(rows)
    return rows


def correct_for_comparisons(rows):
    """Set `significant` of the rows with a p-value (Holm 1979): the smallest of n p-values must be
    below 0.05 / n, the next one below 0.05 / (n - 1), and so on. If no variant differs from the
    first one, this calls any of them significant in at most 5% of experiments."""
    tested = sorted((row for row in rows if row['p_value'] is not None),
                    key=lambda row: row['p_value'])
    significant = True
    for i, row in enumerate(tested):
        significant = significant and row['p_value'] < 0.05 / (len(tested) - i)
        row['significant'] = significant


def mean_and_error(values):
    """→ (mean, standard error of the mean or None for a single value)"""
    error = statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def format_comparison(rows):
    """→ a Markdown table with a line per variant, and what it means"""
    note = 'change: mean difference from the first line, paired by seed, ± its standard error\n' \
           'significant (95%): paired t-test, p < 0.05'
    comparisons = sum(row['p_value'] is not None for row in rows)
    if comparisons > 1:
        note += f' after Holm\'s correction for {comparisons} comparisons'
    header = ['', 'final validation loss', 'change', 'significant (95%)', 'ms per step']
    significance = {None: '–', True: 'yes', False: 'no'}
    table = []
    for row in rows:
        loss = row['problem'] or with_error('.4f', row['loss'], row['loss_error'])
        table.append([row['variant'], loss, with_error('+.4f', row['change'], row['change_error']),
                      significance[row['significant']], format_number('.1f', row['step_ms'])])
    return f'{note}\n\n{markdown(header, table)}'


def with_error(spec, value, error):
    return format_number(spec, value) + ('' if error is None else f' ± {error:.4f}')


# -----------------------------------------------------------------------------
# tables


def markdown(header, rows):
    """A Markdown table from header and rows of text; the first column is left-aligned, the others
    are right-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    specs = [f'<{widths[0]}', *(f'>{width}' for width in widths[1:])]

    def line(row):
        return f'| {" | ".join(map(format, row, specs))} |'

    rule = ['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])]
    return '\n'.join(line(row) for row in (header, rule, *rows))


def format_number(spec, value):
    """format(value, spec), or a dash for None."""
    return '–' if value is None else format(value, spec)


def save_csv(path, rows):
    """Write a list of dicts with the same keys."""
    with open(path, 'w', newline='', encoding='utf-8') as table:
        writer = csv.DictWriter(table, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
