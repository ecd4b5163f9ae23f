"""What single settings gain: trainings with some of them changed, over several seeds.

Every combination of the values that --set names is trained; the first value of each is the base.
Seed follows seed, so the combinations take turns, and each is compared with the base's run of the
same seed. Each training is a whole run of train.py.
"""

import statistics
from dataclasses import replace
from math import sqrt
from pathlib import Path

from plaingpt.benchmarks.grid import seconds_to, train_all
from plaingpt.benchmarks.result_tables import markdown, result_path
from plaingpt.system.devices import machine_name
from plaingpt.system.errors import needs


def measure_ablation(work):
    """Train all combinations → (a row for each run, their table). With --save=FOLDER the runs that
    FOLDER's journal has are not made again."""
    config, device = work.config, work.device
    cells = [({'variant': name, 'seed': config.seed + seed},
              replace(variant, seed=config.seed + seed))
             for seed in range(config.seeds) for name, variant in work.variants.items()]
    journal = Path(f'{result_path(config.save, "ablate", device)}.jsonl') if config.save else None
    runs = train_all(cells, journal, machine_name(device))
    return runs, format_table(runs)


def compare(runs):
    """→ a dict for each variant, the base first: 'variant', 'final_loss' (the mean), 'change' (mean
    of the differences to the base's runs of the same seeds), 'error' (its standard error; None for
    one seed), 'steps' (to the final loss of the base's run of the same seed, the mean; None where a
    run does not reach it), 'step_time' (median of the ratios to the base's)."""
    by_variant = {}
    for run in runs:
        by_variant.setdefault(run['variant'], []).append(run)
    (_, base), *_ = by_variant.items()
    return [compare_to(base, name, others) for name, others in by_variant.items()]


def compare_to(base, name, runs):
    pairs = list(zip(runs, base, strict=True))
    if any(run['final_loss'] is None for pair in pairs for run in pair):
        return {'variant': name, 'final_loss': None, 'change': None, 'error': None, 'steps': None,
                'step_time': None}
    changes = [run['final_loss'] - other['final_loss'] for run, other in pairs]
    steps = [steps_to(other['final_loss'], run) for run, other in pairs]
    return {'variant': name,
            'final_loss': statistics.mean(run['final_loss'] for run in runs),
            'change': statistics.mean(changes),
            'error': statistics.stdev(changes) / sqrt(len(changes)) if len(changes) > 1 else None,
            'steps': None if None in steps else statistics.mean(steps),
            'step_time': statistics.median(run['step_ms'] / other['step_ms']
                                           for run, other in pairs)}


def steps_to(loss, run):
    """The step at which a run first reaches `loss`, between two evaluations; None: never."""
    seconds = seconds_to(loss, run['curve'])
    return None if seconds is None else 1e3 * seconds / run['step_ms']


def format_table(runs):
    found, seeds = compare(runs), len({run['seed'] for run in runs})
    rows = [[one['variant'], *(as_text(form, one[key]) for key, form in (
        ('final_loss', '{:.4f}'), ('change', '{:+.4f}'), ('error', '± {:.4f}'),
        ('steps', '{:.0f}'), ('step_time', '{:.2f}')))] for one in found]
    failed = [f'{run["variant"]}, seed {run["seed"]} failed: {run["failed"]}'
              for run in runs if run['failed']]
    return '\n\n'.join([
        f'{len(runs)} runs, {seeds} seeds; the first line is the base. The change is the mean over '
        'seeds of the difference to the base, with its standard error; steps are those to the '
        "base's final loss; step time is in the base's.", *failed,
        markdown(['', 'final validation loss', 'change', 'error', 'steps', 'step time'], rows)])


def as_text(form, value):
    return '–' if value is None else form.format(value)


def draw_ablation(runs, path):
    """Draw the changes into a PNG, with two standard errors. Raises UserError where matplotlib is
    absent."""
    with needs('matplotlib', 'the picture'):
        from matplotlib.figure import Figure
    found = [one for one in compare(runs) if one['change'] is not None]
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(found)), layout='constrained')
    axes = figure.subplots()
    axes.errorbar([one['change'] for one in found], range(len(found)), fmt='o', capsize=3,
                  xerr=[2 * (one['error'] or 0.0) for one in found])
    axes.axvline(0.0, color='gray', linewidth=1)
    axes.set_yticks(range(len(found)), [one['variant'] for one in found])
    axes.invert_yaxis()
    axes.set_xlabel('change of the final validation loss, ± two standard errors (lower is better)')
    axes.spines[['top', 'right']].set_visible(False)
    figure.savefig(path, dpi=110)
