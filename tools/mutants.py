"""Break one place at a time in a copy of the project, and list what the tests do not notice.

    python tools/mutants.py model.py train.py plaingpt/data > mutants.txt

In each file or folder that is named, 50 places are drawn: a comparison is turned, a constant
changed, a statement left out, two arguments are swapped. Then at most 30 tests of `make test` run
that reach the lines. A mutant survives where all pass; some that do change no result.
"""

import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, '-m', 'pytest']
COUNT, SEED, TESTS, LIMIT_S = 50, 1, 30, 300
TURNED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq,
          ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
          ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
          ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And}


def broken(node):
    """A broken form of a node of a syntax tree, as code; None where there is none."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]) if type(op) in TURNED:
            new.ops[0] = TURNED[type(op)]()
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in TURNED:
            new.op = TURNED[type(op)]()
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value += 1
        case ast.Call(args=[first, second, *_]):
            new.args[:2] = second, first
        case ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Return() | ast.Expr(ast.Call()):
            return 'pass'
        case _:
            return None
    return f'({ast.unparse(new)})'


def mutants(folder, file):
    """All mutants of a file: (file, its lines, its bytes, the code there, the broken code)."""
    source = (folder / file).read_bytes()
    begins = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    for node in ast.walk(ast.parse(source)):
        if code := broken(node):
            yield (file, range(node.lineno, node.end_lineno + 1),
                   slice(begins[node.lineno - 1] + node.col_offset,
                         begins[node.end_lineno - 1] + node.end_col_offset),
                   ast.unparse(node), code)


def map_tests(folder):
    """Run the tests of a copy, which have to pass → {file: {line: the tests that run it}}, and how
    many lines each test runs."""
    subprocess.run([*PYTEST, '-n', '2', f'--cov={folder}', '--cov-report=', '--cov-context=test'],
                   cwd=folder, stdout=sys.stderr, check=True)
    data, reached, sizes = CoverageData(folder / '.coverage'), defaultdict(dict), Counter()
    data.read()
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {context.rpartition('|')[0] for context in contexts} - {''}
            reached[os.path.relpath(file, folder)][line] = tests
            sizes.update(tests)
    return reached, sizes


def is_noticed(folder, mutant, reached, sizes):
    """Whether tests fail, or hang, in a copy of the project with this mutant."""
    file, lines, place, _, code = mutant
    ran = [reached[file][n] for n in lines if n in reached[file]]
    tests = set().union(*ran)
    if ran and not tests:  # at the import alone
        tests = set().union(*reached[file].values())
    source = (folder / file).read_bytes()
    (folder / file).write_bytes(source[:place.start] + code.encode() + source[place.stop:])
    try:
        return bool(tests) and subprocess.run(
            [*PYTEST, '-x', '-n', '0', *sorted(tests, key=sizes.get)[:TESTS]], cwd=folder,
            capture_output=True, timeout=LIMIT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        (folder / file).write_bytes(source)


def main(names):
    os.environ.setdefault('PLAINGPT_SHARED', str(ROOT.parent / 'shared'))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, 'copy')
        subprocess.run(['git', 'clone', '-q', ROOT, folder], check=True)
        reached, sizes = map_tests(folder)
        for name in names:
            files = [name] if name.endswith('.py') else sorted(
                str(path.relative_to(folder)) for path in (folder / name).rglob('*.py'))
            found = [mutant for file in files for mutant in mutants(folder, file)]
            noticed, drawn = 0, random.Random(SEED).sample(found, min(COUNT, len(found)))
            for mutant in drawn:
                if is_noticed(folder, mutant, reached, sizes):
                    noticed += 1
                else:
                    file, lines, _, code, new = mutant
                    print(f'    {file}:{lines.start}: {code}  →  {new}', flush=True)
            print(f'{name}: {noticed} of {len(drawn)} noticed', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
