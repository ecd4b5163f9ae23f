"""The command `plaingpt`: `plaingpt train config/quickstart.py` runs train.py with that argument.

    python -m plaingpt train …                       the same if the command is not on PATH
    torchrun --nproc_per_node=2 -m plaingpt train …  with two processes
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ('prepare', 'train', 'sample', 'evaluate', 'export', 'serve', 'plan', 'bench', 'plot')


def main():
    """Run the script named by the first argument with the remaining arguments."""
    name, *argv = sys.argv[1:] or ['']
    script = ROOT / f'{name}.py'
    if name not in COMMANDS:
        fail(f'plaingpt {name}: expected one of {", ".join(COMMANDS)}')
    if not script.exists():
        fail(f'{script} not found: plainGPT runs from its clone; install it with pip install '
             '-e CLONE')
    os.environ['PLAINGPT_STARTED_AS'] = sys.argv[0]  # for the commands in messages
    sys.argv = [str(script), *argv]
    sys.path.insert(0, str(ROOT))  # before folders that may have another model.py
    runpy.run_path(str(script), run_name='__main__')


def fail(message):
    print(f'error: {message}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
    main()
