"""List the files of this project that a command imports, with their numbers of lines.

    python tools/imported_lines.py train.py config/quickstart.py
"""

import runpy
import sys
from pathlib import Path

root = Path(__file__).resolve().parents[1]
sys.path[0] = str(root)
sys.argv = sys.argv[1:]
try:
    runpy.run_path(str(root / sys.argv[0]), run_name='__main__')
finally:
    files = [getattr(module, '__file__', None) or '' for module in list(sys.modules.values())]
    files = {Path(file) for file in files if file.startswith(f'{root}/')} | {root / sys.argv[0]}
    files -= {Path(__file__)}
    lines = {file: len(file.read_text().splitlines()) for file in sorted(files)
             if '.venv' not in file.parts}
    for file, n in lines.items():
        print(f'{n:6} {file.relative_to(root)}')
    print(f'{sum(lines.values()):6} lines in {len(lines)} files')
