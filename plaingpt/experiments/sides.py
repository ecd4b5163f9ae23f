"""The sides of a judgement: copies of the repository, each with processes of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

import numpy as np
import torch

from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.system.errors import UserError
from plaingpt.system.files import ROOT
from plaingpt.system.streams import warn
from plaingpt.training.checkpoint import find

# What each run is told last, so that nothing in it is chosen by the validation loss
FORCED = {'minutes': 0, 'patience': 0, 'always_save_checkpoint': True, 'keep_checkpoints': 1,
          'check': 'auto', 'sample_tokens': 0, 'health_interval': 0, 'report': False,
          'wandb_log': False, 'log_to': ''}
READ_SETTINGS = '''
import json, sys
sys.path[0] = sys.argv[1]
from configurator import load_config
from plaingpt.system.errors import run_script
from plaingpt.training.settings import TrainConfig
run_script(lambda argv: print(json.dumps(vars(load_config(TrainConfig, argv[1:])))))
'''


class Unsound(Exception):
    """What a change does that no loss makes up for."""


def git(*words, cwd=ROOT):
    """Run git → its stdout. Raises UserError."""
    if not shutil.which('git'):
        raise UserError('a judgement needs git, which is not installed here: install it')
    env = {**os.environ, 'GIT_CEILING_DIRECTORIES': str(Path(cwd).parent)}  # a copy is its own
    done = subprocess.run(['git', *words], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        fix = ': take a clone that git made' * ('not a git repository' in done.stderr)
        raise UserError(f'{cwd}: git {words[0]}: {done.stderr.strip()}{fix}'.replace('\n', '; '))
    return done.stdout


def copy_tree(source, folder):
    """Copy what git does not ignore of a clone, as it is now → the folder."""
    for name in git('ls-files', '-zco', '--exclude-standard', cwd=source).split('\0'):
        if Path(source, name).is_file():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(source, name), Path(folder, name))
    return folder


def changed_files(base, change):
    """Names of the Python files that differ between two folders."""
    names = {str(path.relative_to(tree)) for tree in (base, change) for path in tree.rglob('*.py')}
    return sorted(name for name in names if not (base / name).exists()
                  or not (change / name).exists() or not cmp(base / name, change / name, False))


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

    def run(self, *words):
        """Run Python → its stdout. Raises UserError with what it said of its failure."""
        done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.splitlines() or [f'exit code {done.returncode}']
            errors = [line.removeprefix('error: ') for line in said if line.startswith('error: ')]
            raise UserError(f'the {self.name}: {"; ".join(errors or said[-1:])}')
        return done.stdout

    def settings(self):
        """All settings that its words make → {name: value}. Raises UserError."""
        return json.loads(self.run('-c', READ_SETTINGS, self.tree, *self.words).splitlines()[-1])

    def train(self, out_dir, max_iters, **settings):
        """Train → {what the run says, what its checkpoint holds}. Raises UserError."""
        settings = {**FORCED, **settings, 'out_dir': out_dir, 'max_iters': max_iters,
                    'eval_interval': max_iters, 'log_interval': max(1, max_iters // 10)}
        said = self.run(self.tree / 'plaingpt' / '__main__.py', 'train', *self.words,
                        *(f'--{key}={value}' for key, value in settings.items()))
        if not re.search(r'^preflight: \d+ checks passed', said, re.M):
            raise UserError(f'the {self.name}: its preflight was left out')
        state, rows = find(out_dir, 'latest').state, read_rows(Path(out_dir, 'metrics.jsonl'), warn)
        weights = [chunk for chunk in state['chunks'] if chunk['kind'] == 'model']
        tokens = state['sequences'] * state['config']['block_size'] / max_iters
        rates = [row['tokens_per_s'] for row in rows if 'tokens_per_s' in row]
        fastest = max(rates)  # other programs only slow a step down
        return {'told': (state['iter_num'], state['config']['seed']), 'dtype': state['dtype'],
                'weights': tuple(chunk['sha256'] for chunk in weights),
                'bytes': sum(chunk['bytes'] for chunk in weights), 'tokens': tokens,
                'step_s': tokens / fastest, 'noise': fastest / np.median(rates) - 1,
                'reported': rows[-1].get('val_loss') or 0.0}

    @contextmanager
    def answers(self, out_dir, device):
        """→ ask(idx), the logits (B, T, V) of the model in out_dir, and ask(idx, targets), its own
        loss. Raises Unsound where it cannot answer."""
        script = Path(__file__).with_name('model_process.py')
        with tempfile.TemporaryFile('w+') as errors, subprocess.Popen(
                [sys.executable, *map(str, (script, self.tree, out_dir, device))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process:

            def ask(*tensors):
                try:
                    process.stdin.write(json.dumps([len(tensors), *tensors[0].shape]).encode())
                    process.stdin.write(b'\n' + torch.stack(tensors).numpy().tobytes())
                    process.stdin.flush()
                    shape = json.loads(process.stdout.readline())
                    data = process.stdout.read(4 * torch.Size(shape).numel())
                    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
                except (OSError, ValueError):
                    errors.seek(0)
                    said = errors.read().strip().splitlines() or ['nothing']
                    raise Unsound(f'its model does not answer: {said[-1]}') from None
            yield ask
