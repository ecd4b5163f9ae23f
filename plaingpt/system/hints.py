"""What a user may have meant by a word of the command line that is none."""

import difflib
from pathlib import Path

from plaingpt.system.files import ROOT
from plaingpt.system.formatting import quoted

HABITS = {  # a name in other programs → our key
    'lr': 'learning_rate', 'wd': 'weight_decay', 'epochs': 'max_iters', 'steps': 'max_iters',
    'max_steps': 'max_iters', 'bs': 'batch_size', 'seq_len': 'block_size', 'context': 'block_size',
    'layers': 'n_layer', 'heads': 'n_head', 'gpu': 'gpu_memory_gb', 'output': 'out_dir',
    'resume': 'init_from', 'prompt': 'start'}


def key_hint(name, keys):
    """The key that is nearest to an unknown one."""
    nearest = [HABITS[name]] if HABITS.get(name) in keys \
        else difflib.get_close_matches(name, keys, n=1, cutoff=0.6)
    return f'did you mean {nearest[0]}?' if nearest else 'see --help for all keys'


def describe_no_config(path):
    """What the user may have meant by a file or folder that is no config file."""
    if Path(path, 'run.json').exists() or Path(path, 'checkpoints').is_dir():
        return f'{path} is a run, no config file: continue it with --out_dir={quoted(path)} ' \
               '--init_from=resume'
    return f'{path} is no config file, whose names end with .py: write options as --key=value; ' \
           f'python prepare.py text {quoted(path)} makes data of a text'


def file_hint(path):
    """What the user may have meant by a config file that is not there."""
    if '=' in path:
        return f': write options as --{quoted(path)}'
    recipes = {file.stem for folder in (Path(), ROOT) for file in folder.glob('config/*.py')}
    name = Path(path).stem.removeprefix('train_')  # as nanoGPT's are
    nearest = difflib.get_close_matches(name, recipes, n=3, cutoff=0.6)
    if not nearest:
        return ''
    return ': did you mean ' + ', '.join(f'config/{n}.py' for n in sorted(nearest))
