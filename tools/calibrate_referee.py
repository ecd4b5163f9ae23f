"""How often is the referee wrong? Judgements of changes that are known, with a recipe of a second.

    python tools/calibrate_referee.py --seconds=470 --workers=12 --out=judged.jsonl

No change: other seeds of the weights or of the data's order on one side, a comment, a renamed
variable. A known gain: NorMuon in a recipe with AdamW. Each judgement is a line of --out, which the
same command continues; a table of all is printed. Runs are forks, which do not import torch anew.
"""

import argparse
import json
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import subprocess

import torch
from forked_popen import ForkedPopen

import bench
import prepare
from configurator import load_config
from plaingpt.experiments import referee
from plaingpt.experiments.judgement import BETTER, LEVELS, WORSE, Judgement
from plaingpt.experiments.sides import copy_tree
from plaingpt.experiments.tables import markdown
from plaingpt.system.files import append_line

RECIPE = {
    'n_layer': 1, 'n_head': 2, 'n_embd': 32, 'block_size': 32, 'mlp': 'relu2', 'rotary': True,
    'qk_norm': True, 'tied_head': False, 'zero_init': True, 'batch_size': 8, 'max_iters': 40,
    'gradient_accumulation_steps': 1, 'learning_rate': 9e-3, 'min_lr': 0.0, 'lr_schedule': 'linear',
    'warmup_iters': 5, 'momentum': 0.9, 'beta1': 0.8, 'beta2': 0.95, 'eval_iters': 30,
    'device': 'cpu', 'dtype': 'float32'}
NO_CHANGE = {  # name: (file, regular expression, what takes its place)
    'other weights': ('train.py', r'seed_everything\(config.seed', r'\g<0> + 1'),
    'other data': ('plaingpt/training/run_data.py', r'share, seed=config.seed', r'\g<0> + 1'),
    'a comment': ('model.py', r'import math\n', 'import math  # numbers\n'),
    'a name': ('model.py', r'(?<![.\w])positions\b', 'places')}
GAIN = 'optimizer=normuon'
# In turn: what is judged, and what decides; equal time takes trainings of other lengths
PLAN = [('other weights', 'steps'), ('a comment', 'time'), ('other data', 'time'), (GAIN, 'steps'),
        ('a name', 'steps'), ('other weights', 'time'), ('a comment', 'steps'),
        ('other data', 'steps'), (GAIN, 'steps'), ('a name', 'steps')]


def change_tree(name, folder):
    """A copy of the code with a change → its folder."""
    copy_tree(ROOT, folder)
    file, old, new = NO_CHANGE[name]
    text = (folder / file).read_text(encoding='utf-8')
    changed = re.sub(old, new, text)
    assert changed != text, name
    (folder / file).write_text(changed, encoding='utf-8')
    return folder


def work(number, workers, until, folder, trees, out):
    """Judge every so many of the plan until it is time to stop."""
    signal.alarm(int(until - time.time()) + 10)  # the last one may be too long
    subprocess.Popen = ForkedPopen
    referee.copy_tree = lambda source, _: Path(source)  # nobody edits these
    torch.set_num_threads(1)
    done = len(out.read_text().splitlines()) if out.exists() else 0
    for i in range(done + number, 10**6, workers):
        name, equal = PLAN[i % len(PLAN)]
        change = f'--change={trees[name]}' if name in trees else f'--set={name}'
        words = [*(f'--{key}={value}' for key, value in RECIPE.items()),
                 f'--dataset={folder}/data',
                 f'--optimizer={"adamw" if name == GAIN else "normuon"}']
        config = load_config(bench.BenchConfig, [*words, '--judge', change, f'--equal={equal}'])
        with open(os.devnull, 'w') as nowhere, redirect_stdout(nowhere):
            found = referee.judge(config, words, torch.device('cpu'))
        if time.time() > until:
            return
        append_line(out, {'change': name, 'equal': equal, **vars(found), 'notes': [],
                          'verdict': found.verdict()})


def summarize(rows):
    """Rows of judgements → a table: how often the first clear interval of each kind of change said
    what, also at levels that did not decide."""
    table = []
    for name, equal in sorted({(row['change'], row['equal']) for row in rows}):
        mine = [row for row in rows if (row['change'], row['equal']) == (name, equal)]
        for level in LEVELS:
            said = [first_clear(row, level) for row in mine]
            pairs = sum(len(row['pairs']) for row in mine) / len(mine)
            table.append([name, equal, level, str(len(mine)), str(said.count(BETTER)),
                          str(said.count(WORSE)), f'{pairs:.1f}',
                          str(sum(row['verdict'] == 'UNSOUND' for row in mine))])
    return markdown(['change', 'decided at equal', 'seen at equal', 'judgements', 'better', 'worse',
                     'pairs', 'unsound'], table)


def first_clear(row, level):
    for n in range(1, len(row['pairs']) + 1):
        verdict = Judgement(decided_by=level, pairs=row['pairs'][:n]).verdict()
        if verdict in (BETTER, WORSE):
            return verdict
    return ''


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seconds', type=float, default=470)
    parser.add_argument('--workers', type=int, default=os.cpu_count())
    parser.add_argument('--out', type=Path, default=Path('judged.jsonl'))
    asked = parser.parse_args()
    until = time.time() + asked.seconds
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir, folder = folder, Path(folder)  # a worker that is stopped leaves nothing
        text = ''.join(path.read_text(encoding='utf-8', errors='ignore') for path in sorted(
            Path(sysconfig.get_path('stdlib')).glob('*.py')))
        (folder / 'text.txt').write_text(''.join(c for c in text if c.isascii())[:10**6])
        with open(os.devnull, 'w') as nowhere, redirect_stdout(nowhere):
            prepare.main(['text', f'--input={folder}/text.txt', '--tokenizer=char',
                          f'--data_dir={folder}/data'])
        trees = {name: change_tree(name, folder / f'tree{i}') for i, name in enumerate(NO_CHANGE)}
        for number in range(asked.workers):
            if os.fork() == 0:
                try:
                    work(number, asked.workers, until, folder, trees, asked.out)
                finally:
                    os._exit(0)
        for _ in range(asked.workers):
            os.wait()
    print(summarize(list(map(json.loads, asked.out.open())) if asked.out.exists() else []))


if __name__ == '__main__':
    main()
