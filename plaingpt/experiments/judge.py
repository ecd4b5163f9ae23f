"""Judge a code change: train a commit and the working tree with the same seeds, and compare them.
"""

import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from plaingpt.core.dataset import open_data
from plaingpt.experiments.comparison import compare, format_comparison
from plaingpt.experiments.runs import RunFailed, make_variant, run_python, train_all
from plaingpt.system.distributed import launched_world
from plaingpt.system.errors import UserError, print_line, warn
from plaingpt.system.files import ROOT, append_text

EXIT_STATUS = {'BETTER': 0, 'INCONCLUSIVE': 3, 'WORSE': 4}
# Options of a short run of each side before the judged runs. A mistake or a broken change fails
# there, and the compiler's caches are filled, which would otherwise take part of a timed run.
WARM_UP = ['--max_iters=2', '--warmup_iters=0', '--minutes=0']
# Options of judged runs. They turn off what takes time and does not change the loss of a step.
JUDGED = ['--film=False', '--report=False', '--log_to=', '--wandb_log=False', '--eval_tasks=',
          '--always_save_checkpoint=False', '--checkpoint_interval=1000000000', '--clock=training']
MAX_STEP_RATIO = 1.03  # if one side trained for more steps than the other, the verdict says so
# A program that prints which of its arguments train.py accepts as options, as JSON.
ACCEPTED = """
import json, sys
from configurator import options_of
from train import TrainConfig
options = {arg: options_of(TrainConfig, [arg]) for arg in sys.argv[1:]}
print(json.dumps([arg for arg, values in options.items()
                  if values and not TrainConfig(**values).out_of_range()]))
"""


def judge(config, argv, results):
    """Train the code of a commit and of the working tree with the arguments `argv` of train.py, and
    append the verdict to the file `results` → (a row per run, table and verdict, exit status).
    Raises UserError."""
    judgment = {'date (UTC)': datetime.datetime.now(datetime.UTC)}
    with tempfile.TemporaryDirectory(prefix='plaingpt-judge-') as folder:
        trees, commit, changed = copy_sides(config.against, Path(folder))
        judgment |= {'base commit': commit, 'change': changed, 'settings': shlex.join(argv),
                     'seeds': f'{config.seed} to {config.seed + config.seeds - 1}'}
        sides = make_sides(trees, argv, config.minutes, config.seeds)
        open_data(config, launched_world())  # prepares a small corpus once for both sides
        try:
            warm_up(sides, f'{folder}/warm-up')
            runs = train_all(sides, f'{folder}/runs', is_judge=True)
        except RunFailed as failure:
            if failure.variant == 'change':  # else the command, the recipe or the base is wrong
                append_result(results, judgment, problem=failure)
            raise
    comparison = compare(runs)
    verdict, explanation = find_verdict(comparison, config.minutes)
    append_result(results, judgment, comparison, verdict)
    return runs, f'{format_comparison(comparison)}\n\n{verdict}: {explanation}', \
        EXIT_STATUS[verdict]


# -----------------------------------------------------------------------------
# two sides


def copy_sides(commit, folder):
    """Copy the code of the commit and of the working tree into `folder`, since this clone may be
    edited meanwhile → ({side: its folder}, short hash of the commit, the files that differ). The
    working tree is all tracked files, and new .py files. Raises UserError."""
    index = folder / 'index'  # leaves the user's own as it is

    def git(*args):
        done = subprocess.run(['git', *args], cwd=ROOT, capture_output=True,
                              env={**os.environ, 'GIT_INDEX_FILE': str(index)})
        if done.returncode:
            raise UserError(f'against={commit}: {os.fsdecode(done.stderr).strip()}')
        return os.fsdecode(done.stdout).strip()

    base = git('rev-parse', '--verify', f'{commit}^{{commit}}')
    shutil.copy(git('rev-parse', '--path-format=absolute', '--git-dir') + '/index', index)
    git('add', '--update')
    git('add', '*.py')
    change = git('write-tree')
    trees = {'base': folder / 'base', 'change': folder / 'change'}
    for side, tree in ('base', base), ('change', change):
        git('archive', f'--output={trees[side]}.zip', tree)
        shutil.unpack_archive(f'{trees[side]}.zip', trees[side])
    changed = []
    for line in git('diff', '--numstat', '--no-renames', base, change).splitlines():
        added, removed, name = line.split('\t')
        changed.append(f'{name} +{added} -{removed}')
    return trees, base[:8], ', '.join(changed) or 'nothing'


def make_sides(trees, argv, minutes, seeds):
    """→ the two Variants of a judgment. An option that the base does not accept, such as a new
    setting, goes to the change alone; those of JUDGED go to both sides or to none. argv: of
    train.py; minutes: of each run, or 0. Raises UserError."""
    length = {'minutes': minutes} if minutes else {}
    both = make_variant('change', length, [*argv, *JUDGED], seeds)
    accepted = {}
    for side, tree in trees.items():
        lines = run_python(['-c', ACCEPTED, *both.argv], tree).splitlines()
        accepted[side] = json.loads(lines[-1])  # the code may print more
    sides = []
    for side, tree in trees.items():
        args = []
        for arg in both.argv:
            needed = accepted if arg in JUDGED else [side]
            if not arg.startswith('--') or all(arg in accepted[name] for name in needed):
                args.append(in_tree(tree, arg))
        sides.append(replace(both, name=side, argv=args, tree=tree))
    for option in argv:
        if option.startswith('--') and option not in accepted['base']:
            print_line(f'{option}: passed to the change only: the base does not accept it',
                       sys.stderr)
    if minutes and '--clock=training' not in accepted['base']:
        warn('the base is from before --clock: the minutes of both sides include setup, '
             'evaluations and saves')
    return sides


def in_tree(tree, arg):
    """Replace a config file in an argument by the one in `tree`: each side reads its own."""
    path = Path(arg if os.path.exists(arg) else ROOT / arg).resolve()
    if not arg.endswith('.py') or not path.is_relative_to(ROOT):
        return arg
    in_tree = tree / path.relative_to(ROOT)
    if not in_tree.is_file():
        raise UserError(f'{arg}: the {tree.name} has no such file: commit it, or use a config file '
                        'outside of this repository')
    return str(in_tree)


def warm_up(sides, folder):
    """Train each side for two steps. Raises UserError if they train on different datasets."""
    short = [replace(side, argv=[*side.argv, *WARM_UP], seeds=side.seeds[:1]) for side in sides]
    datasets = {run['dataset'] for run in train_all(short, folder, is_judge=True)}
    if len(datasets) > 1:
        raise UserError(f'the sides train on {" and ".join(sorted(datasets))}: losses on '
                        'different datasets cannot be compared; set --dataset in the command')


# -----------------------------------------------------------------------------
# the verdict


def find_verdict(comparison, minutes):
    """From compare(runs of both sides) → (verdict, its explanation). minutes: of each run, or 0"""
    base, change = comparison
    if not change['significant']:
        verdict = 'INCONCLUSIVE'
    elif change['change'] < 0:
        verdict = 'BETTER'
    else:
        verdict = 'WORSE'
    explanation = f'{base["iterations"]:,.0f} steps of the base and ' \
                  f'{change["iterations"]:,.0f} of the change (medians)'
    if verdict == 'INCONCLUSIVE':
        explanation = f'no significant difference; {explanation}'
    if minutes:
        explanation += f' in {minutes:g} min each'
        remedy = 'leave out --minutes'
    else:
        explanation += f'; a step of the change took {change["step_ms"] / base["step_ms"]:.2f} ' \
                       'times as long'
        remedy = 'set --max_iters, and --patience=0'
    ratio = change['iterations'] / base['iterations']
    if not 1 / MAX_STEP_RATIO < ratio < MAX_STEP_RATIO:
        explanation += f'\nThe change trained for {ratio:.2f} times as many steps, which is ' \
                       f'part of the difference: to compare equal steps, {remedy}.'
    return verdict, explanation


def append_result(path, judgment, comparison=None, verdict='FAILED', problem=''):
    """Append a row to results.tsv. judgment: its first columns, including when it began;
    comparison: from compare, or None if a side failed to train"""
    start_time = judgment['date (UTC)']
    elapsed = datetime.datetime.now(datetime.UTC) - start_time
    base, change = comparison or ({}, {})
    losses = {'base loss': base.get('loss'), 'change loss': change.get('loss'),
              'difference': change.get('change'),
              '95% interval: difference ±': change.get('half_width')}
    append_tsv(path, {
        **judgment, 'date (UTC)': f'{start_time:%Y-%m-%dT%H:%M:%SZ}',
        **{f'{name} (nats per token)': '' if loss is None else f'{loss:.5f}'
           for name, loss in losses.items()},
        'base steps': base.get('iterations', ''), 'change steps': change.get('iterations', ''),
        'verdict': verdict, 'minutes': f'{elapsed.total_seconds() / 60:.1f}', 'problem': problem})


def append_tsv(path, row):
    """Append the values of a dict to a .tsv file, each in the column of its key. A file that an
    earlier version began may lack columns; their values are left out."""
    header = tsv_line(row)
    with suppress(FileNotFoundError):
        header = Path(path).read_text('utf-8-sig', 'replace').partition('\n')[0] or header
    append_text(path, tsv_line(row.get(name, '') for name in header.split('\t')), header=header)


def tsv_line(cells):
    """White space within a cell becomes a space."""
    return '\t'.join(' '.join(str(cell).split()) for cell in cells)
