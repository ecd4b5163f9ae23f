"""Is a change better? The code of a commit and the code as it is here are trained as two variants.

Both have the same seeds, so they see the same data in the same order, for as many steps or with
--minutes for as long. A loss is what a run itself reports of the validation split.
"""

import datetime
import os
import re
import shutil
import statistics
import subprocess
import zipfile
from functools import partial
from pathlib import Path

from plaingpt.experiments.tables import append_tsv
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT

EXIT_STATUS = {'BETTER': 0, 'NOT SHOWN': 3, 'WORSE': 4}
# Settings of a short run of each side, before runs of minutes. It fills the caches of the compiler,
# which the first run would fill in its time, and the others would find filled.
WARM_UP = ['--minutes=0', '--max_iters=2', '--warmup_iters=0']


def copy_sides(commit, folder):
    """Copy both into `folder`, since this clone may be edited meanwhile: all files that git tracks,
    and new ones of code → {name of a side: its folder}, the commit's short hash. Raises UserError.
    """
    base, change = folder / 'base', folder / 'change'
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    done = git(['git', 'archive', f'--output={base}.zip', commit])
    if done.returncode:
        raise UserError(f'against={commit}: {done.stderr.strip()}')
    shutil.unpack_archive(f'{base}.zip', base)
    with zipfile.ZipFile(f'{base}.zip') as archive:
        short_hash = archive.comment.decode()[:8]  # git writes the commit there
    tracked, new = ['git', 'ls-files', '-z'], ['--others', '--exclude-standard', '*.py']
    for name in (git(tracked).stdout + git(tracked + new).stdout).split('\0'):
        if (ROOT / name).is_file():  # one that was deleted is still tracked
            (change / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, change / name)
    return {'base': base, 'change': change}, short_hash


def changed_files(trees):
    """What differs between the trees of both sides, by lines: 'model.py +3 -1', or 'nothing'."""
    base, change = trees.values()
    numbers = subprocess.run(
        ['git', 'diff', '--no-index', '--numstat', '--no-renames', '-z', base.name, change.name],
        cwd=base.parent, capture_output=True, text=True).stdout
    changed = []
    for added, removed, *names in re.findall('(\\S+)\t(\\S+)\t\0(.+?)\0(.+?)\0', numbers):
        name = names[0] if names[1] == '/dev/null' else names[1]
        if (added, removed) != ('0', '0'):  # the mode alone: a zip file has none
            changed.append(f'{name.partition("/")[2]} +{added} -{removed}')
    return ', '.join(changed) or 'nothing'


def of_side(tree, word):
    """A word of a command line for the code in `tree`, which has its own config files."""
    path = Path(word if os.path.exists(word) else ROOT / word).resolve()
    return str(tree / path.relative_to(ROOT)) \
        if word.endswith('.py') and path.is_relative_to(ROOT) else word


def verdict(rows, compared):
    """The runs of both sides, and what runs.compare makes of them → what they show, and after
    which time. Raises UserError."""
    datasets = {run['dataset'] for run in rows}
    if len(datasets) > 1:
        raise UserError(f'the sides trained on {" and ".join(sorted(datasets))}: losses on '
                        'different datasets do not compare')
    minutes = {run['minutes'] for run in rows}
    if len(minutes) > 1:
        raise UserError(f'the sides trained with minutes={" and ".join(map(str, sorted(minutes)))}:'
                        ' give --minutes in the command')
    _, change = compared
    if change['change'] is None:
        raise UserError('the last validation loss of a run is not finite')
    said = 'NOT SHOWN' if not change['clear'] else 'BETTER' if change['change'] < 0 else 'WORSE'

    def median(side, key):
        return statistics.median(run[key] for run in rows if run['variant'] == side)

    if minutes == {0}:
        ratio = median('change', 'seconds') / median('base', 'seconds')
        return said, f'in {ratio:.2f} times the time'
    return said, f'after the same time: {minutes.pop():g} min, ' \
                 f'{median("base", "iterations"):,.0f} steps of base and ' \
                 f'{median("change", "iterations"):,.0f} of change (medians)'


def append_result(path, judged, compared=None, said='FAILED', problem=''):
    """Append a judgement to results.tsv. judged: {column: what was judged}, and when that began;
    compared: what runs.compare returned, or None where a side does not train"""
    began = judged['date (UTC)']
    took = datetime.datetime.now(datetime.UTC) - began
    base, change = compared or 2 * [dict.fromkeys(('loss', 'change', 'half_width'))]
    losses = {'base loss': base['loss'], 'change loss': change['loss'],
              'difference': change['change'], '95% interval: difference ±': change['half_width']}
    append_tsv(path, {
        **judged, 'date (UTC)': f'{began:%Y-%m-%dT%H:%M:%SZ}',
        **{f'{name} (nats per token)': '' if loss is None else f'{loss:.5f}'
           for name, loss in losses.items()},
        'verdict': said, 'minutes': f'{took.total_seconds() / 60:.1f}', 'problem': problem})
