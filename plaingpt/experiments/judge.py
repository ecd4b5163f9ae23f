"""Is a change better? The code of a commit and the code as it is here are trained as two variants.

Both have the same seeds, so they see the same data in the same order. A loss is what a run itself
reports of the validation split.
"""

import os
import shutil
import statistics
import subprocess
from functools import partial
from pathlib import Path

from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT

EXIT_STATUS = {'BETTER': 0, 'NOT SHOWN': 3, 'WORSE': 4}


def copy_sides(commit, folder):
    """Copy both into `folder`, since this clone may be edited meanwhile: all files that git tracks,
    and new ones of code → {name of a side: its folder}. Raises UserError."""
    base, change = folder / 'base', folder / 'change'
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    done = git(['git', 'archive', f'--output={base}.zip', commit])
    if done.returncode:
        raise UserError(f'against={commit}: {done.stderr.strip()}')
    shutil.unpack_archive(f'{base}.zip', base)
    tracked, new = ['git', 'ls-files', '-z'], ['--others', '--exclude-standard', '*.py']
    for name in (git(tracked).stdout + git(tracked + new).stdout).split('\0'):
        if (ROOT / name).is_file():  # one that was deleted is still tracked
            (change / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, change / name)
    return {'base': base, 'change': change}


def of_side(tree, word):
    """A word of a command line for the code in `tree`, which has its own config files."""
    path = Path(word if os.path.exists(word) else ROOT / word).resolve()
    return str(tree / path.relative_to(ROOT)) \
        if word.endswith('.py') and path.is_relative_to(ROOT) else word


def verdict(rows, compared):
    """The runs of both sides, and what runs.compare makes of them → what they show, and the exit
    status. Raises UserError."""
    datasets = {run['dataset'] for run in rows}
    if len(datasets) > 1:
        raise UserError(f'the sides trained on {" and ".join(sorted(datasets))}: losses on '
                        'different datasets do not compare')
    _, change = compared
    if change['change'] is None:
        raise UserError('the last validation loss of a run is not finite')
    said = 'NOT SHOWN' if not change['clear'] else 'BETTER' if change['change'] < 0 else 'WORSE'
    before, now = (statistics.median(run['seconds'] for run in rows if run['variant'] == side)
                   for side in ('base', 'change'))
    return f'{said}, in {now / before:.2f} times the time', EXIT_STATUS[said]
