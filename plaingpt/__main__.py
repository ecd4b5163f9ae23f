"""The command `plaingpt`: `plaingpt train config/quickstart.py` runs train.py with that argument.

    python -m plaingpt train …                       the same without the command
    torchrun --nproc_per_node=2 -m plaingpt train …  on two processes
"""

import ast
import difflib
import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SCRIPTS = PACKAGE if (PACKAGE / 'train.py').exists() else PACKAGE.parent  # in the wheel, in a clone
COMMANDS = ('prepare', 'train', 'sample', 'evaluate', 'export', 'serve', 'plan', 'bench', 'plot')


def main():
    """Run the script that the first argument names with the arguments after it."""
    name, *argv = sys.argv[1:] or ['--help']
    set_import_path()
    if name in ('--help', '-h'):
        print(usage())
    elif name == '--version':
        from plaingpt import __version__
        print(f'plaingpt {__version__}')
    elif name in COMMANDS:
        script = str(SCRIPTS / f'{name}.py')
        sys.argv = [script, *argv]
        runpy.run_path(script, run_name='__main__')
    else:
        nearest = difflib.get_close_matches(name.removesuffix('.py'), COMMANDS, n=1, cutoff=0.5)
        hint = f'did you mean {nearest[0]}?' if nearest else 'plaingpt --help lists the commands'
        print(f'error: unknown command {name!r}: {hint}', file=sys.stderr)
        sys.exit(2)


def set_import_path():
    """Let imports find the packages of the environment and, in a clone, its model.py: nothing of
    the folder that Python put first, which has other things of the same names."""
    if not sys.flags.safe_path:
        del sys.path[0]
    if SCRIPTS != PACKAGE or str(PACKAGE.parent) not in sys.path:
        sys.path.insert(0, str(PACKAGE.parent))


def usage():
    lines = ['plaingpt COMMAND [config/FILE.py …] [--key=value …]', '']
    for name in COMMANDS:
        source = (SCRIPTS / f'{name}.py').read_text(encoding='utf-8')
        lines.append(f'  {name:<10}{ast.get_docstring(ast.parse(source)).splitlines()[0]}')
    recipes = SCRIPTS / 'config'
    return '\n'.join([*lines, '', 'plaingpt COMMAND --help lists the settings of a command.',
                      f'The recipes config/*.py are in {recipes}', ''])


if __name__ == '__main__':
    main()
