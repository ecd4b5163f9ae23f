"""How far a run that was stopped and resumed ends from one that was not.

On a CPU they end with the same bits. On a GPU some sums are made in any order, so two whole runs
differ too: what resuming adds is seen beside their difference.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from plaingpt.benchmarks.grid import train_in
from plaingpt.benchmarks.result_tables import markdown
from plaingpt.system.errors import UserError
from plaingpt.training.checkpoint import find


def measure_resuming(work):
    """Train to max_iters twice, and once with a stop half-way → (a row for each pair, their table).
    Each is a run of train.py."""
    config = replace(work.config, compile=work.compile, init_from='scratch')
    if config.max_iters < 2:
        raise UserError(f'max_iters={config.max_iters}: a run takes two steps to be resumed')
    with tempfile.TemporaryDirectory() as folder:
        whole, again, stopped = (Path(folder, name) for name in ('whole', 'again', 'stopped'))
        lines = train_in(whole, config)
        train_in(again, config)
        train_in(stopped, replace(config, max_iters=config.max_iters // 2))
        train_in(stopped, replace(config, init_from='resume'))
        rows = [{'runs': name, 'compile': work.compile, 'dtype': work.dtype,
                 'iters': config.max_iters, **differences(whole, other)}
                for name, other in (('both whole', again), ('one of them resumed', stopped))]
    loss = [line['val_loss'] for line in lines if 'val_loss' in line][-1]
    what = f'{config.max_iters} steps, {work.dtype}, ' \
           f'{"compiled" if work.compile else "eager"}; the first run ends at a validation loss ' \
           f'of {loss:.4f}'
    return rows, f'{what}\n\n' + markdown(
        ['last weights of two runs', 'largest difference', 'weights that differ', 'largest weight'],
        [[row['runs'], f'{row["largest_difference"]:.3g}', f'{row["differing"]:.2%}',
          f'{row["largest_weight"]:.3g}'] for row in rows])


def differences(one, other):
    """Compare the last weights of two runs, given their folders → dict."""
    first, second = (find(folder).load_model().state_dict() for folder in (one, other))
    apart = {name: (weight - second[name]).abs() for name, weight in first.items()}
    return {'largest_difference': max(x.max().item() for x in apart.values()),
            'differing': sum((x > 0).sum().item() for x in apart.values())
            / sum(x.numel() for x in apart.values()),
            'largest_weight': max(weight.abs().max().item() for weight in first.values())}
