"""The sides of a judgement: copies of the repository, each with processes of its own."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plaingpt.data.dataset import open_named
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.streams import warn
from plaingpt.training.checkpoint import find

# What each run is told last, so that nothing in it is chosen by the validation loss
FORCED = {'minutes': 0, 'patience': 0, 'always_save_checkpoint': True, 'keep_checkpoints': 1,
          'check': 'auto', 'sample_tokens': 0, 'health_interval': 0, 'report': False,
          'wandb_log': False, 'log_to': ''}


def git(*words, cwd=ROOT):
    """Run git → its stdout. Raises UserError."""
    env = {**os.environ, 'GIT_CEILING_DIRECTORIES': str(Path(cwd).parent)}  # a copy is on its own
    command = ['git', '-C', *map(str, (cwd, *words))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f'{" ".join(command)}: {done.stderr.strip()}')
    return done.stdout


def copy_tree(source, folder):
    """Copy what git does not ignore of a clone, as it is now → the folder."""
    for name in git('ls-files', '-zco', '--exclude-standard', cwd=source).split('\0'):
        if Path(source, name).is_file():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(source, name), Path(folder, name))
    return folder


def changed_files(base, change):
    """The Python files that differ between two folders → {name: bytes in the second}"""
    before, after = ({str(path.relative_to(tree)): path.read_bytes()
                      for path in tree.rglob('*.py')} for tree in (base, change))
    return {name: after.get(name, b'') for name in sorted({*before, *after})
            if before.get(name) != after.get(name)}


def open_text(name):
    """What the setting `dataset` says → Dataset. Raises UserError."""
    data = open_named(name)
    if not data.is_ours() or data.has_mask():
        raise UserError(f'dataset={name}: the referee judges what is trained on one dataset of '
                        'text that prepare.py wrote')
    return data


@dataclass
class Side:
    """The base or the change: a copy of the code, and the words that its train.py is given."""

    name: str
    tree: Path
    words: list

    def __post_init__(self):
        """A config file of this repository becomes that of the side."""
        for i, word in enumerate(self.words):
            path = (Path(word) if Path(word).exists() else ROOT / word).resolve()
            if word.endswith('.py') and path.is_relative_to(ROOT):
                self.words[i] = str(self.tree / path.relative_to(ROOT))

    def run(self, script, *words):
        """Run a Python script → its stdout. Raises UserError with what it said of its failure."""
        done = subprocess.run([sys.executable, *map(str, (script, *words))], capture_output=True,
                              text=True)
        if done.returncode:
            errors = re.findall('^error: (.*)', done.stderr, re.M) \
                or [f'exit code {done.returncode}: {done.stderr.strip()[-200:]}']
            raise UserError(f'the {self.name}: {"; ".join(errors)}')
        return done.stdout

    def train(self, out_dir, seed, max_iters, **settings):
        """Train → what the run says, and its checkpoint. Raises UserError."""
        settings = {**FORCED, **settings, 'out_dir': out_dir, 'seed': seed, 'max_iters': max_iters,
                    'eval_interval': max_iters, 'log_interval': max(1, max_iters // 10)}
        said = self.run(self.tree / 'train.py', *self.words,
                        *(f'--{key}={value}' for key, value in settings.items()))
        if not re.search(r'^preflight: \d+ checks passed', said, re.M):
            raise UserError(f'the {self.name}: its preflight was left out')
        state, rows = find(out_dir, 'latest').state, read_rows(Path(out_dir, 'metrics.jsonl'), warn)
        trained = state['iter_num'], state['config']['seed']
        if trained != (max_iters, seed):
            raise UserError('the {}: it trained {:,} steps with seed {}, and was told {:,} with '
                            'seed {}'.format(self.name, *trained, max_iters, seed))
        weights = [chunk for chunk in state['chunks'] if chunk['kind'] == 'model']
        tokens = state['sequences'] * state['model']['block_size'] / max_iters
        rates = [row['tokens_per_s'] for row in rows if 'tokens_per_s' in row]
        fastest = max(rates)  # other programs only slow a step down
        return {'dtype': state['dtype'], 'data': open_text(state['config']['dataset']),
                'weights': tuple(chunk['sha256'] for chunk in weights),
                'bytes': sum(chunk['bytes'] for chunk in weights), 'tokens': tokens,
                'step_s': tokens / fastest, 'noise': fastest / np.median(rates) - 1,
                'reported': rows[-1].get('val_loss') or 0.0}

    def loss(self, out_dir, ids, device):
        """The loss of what was trained, on a text, in nats a token. Raises UserError."""
        ids.astype('<u4').tofile(Path(out_dir, 'text.bin'))
        script = Path(__file__).with_name('measure_loss.py')
        return float(self.run(script, self.tree, out_dir, device).splitlines()[-1])
