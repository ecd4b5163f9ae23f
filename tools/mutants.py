"""Break one place at a time in a copy of the project, and list what the tests do not notice.

    python tools/mutants.py model.py train.py plaingpt/data > mutants.txt

In each file or folder that is named, 50 places are drawn: a comparison is turned, a constant
changed, a statement left out, two arguments are swapped. Then those tests of `make test` run that
reach the lines, also in forks: all of the same subject, and 30 quick ones of others. A mutant
survives where all pass; some that do change no result.
"""

import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, '-m', 'pytest']
COUNT, SEED, OTHER_TESTS, LIMIT_S = 50, 1, 30, 600
COPIES = 2  # of the project: as many mutants are tried at a time
TURNED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq,
          ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
          ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
          ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And}


def broken(node):
    """A broken form of a node of a syntax tree, as code; None if there is none."""
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
    (folder / '.coveragerc').write_text('[run]\npatch = _exit\nparallel = true\n')  # forks too
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


def tests_of(mutant, reached, sizes):
    """The tests to run for a mutant, in order."""
    file, lines, *_ = mutant
    reaching = [reached[file][n] for n in lines if n in reached[file]]
    tests = set().union(*reaching)
    if reaching and not tests:  # at the import alone
        tests = set().union(*reached[file].values())

    def is_related(test):
        path = Path(test.partition('::')[0])
        return path.parent.name == Path(file).parent.name or any(
            name.removeprefix('test_').startswith(Path(file).stem)  # train.py: tests/training
            for name in (path.stem, path.parent.name))
    ordered = sorted(tests, key=sizes.get)
    related = [test for test in ordered if is_related(test)]
    return related + [test for test in ordered if not is_related(test)][:OTHER_TESTS]


def is_noticed(folder, mutant, tests):
    """Whether tests fail, or hang, in a copy of the project with this mutant."""
    file, _, place, _, code = mutant
    source = (folder / file).read_bytes()
    (folder / file).write_bytes(source[:place.start] + code.encode() + source[place.stop:])
    try:
        return bool(tests) and subprocess.run(
            [*PYTEST, '-x', '-n', '0', *tests], cwd=folder, capture_output=True,
            timeout=LIMIT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        (folder / file).write_bytes(source)


def main(names):
    os.environ.setdefault('PLAINGPT_SHARED', str(ROOT.parent / 'shared'))
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(COPIES) as pool:
        folders = [Path(temporary, f'copy{n}') for n in range(COPIES)]
        for folder in folders:
            subprocess.run(['git', 'clone', '-q', ROOT, folder], check=True)
        reached, sizes = map_tests(folders[0])
        idle = SimpleQueue()
        for folder in folders:
            idle.put(folder)

        def try_mutant(mutant):
            folder = idle.get()
            noticed = is_noticed(folder, mutant, tests_of(mutant, reached, sizes))
            idle.put(folder)
            return noticed

        for name in names:
            files = [name] if name.endswith('.py') else sorted(
                str(path.relative_to(folders[0])) for path in (folders[0] / name).rglob('*.py'))
            places = [mutant for file in files for mutant in mutants(folders[0], file)]
            drawn = random.Random(SEED).sample(places, min(COUNT, len(places)))
            noticed = list(pool.map(try_mutant, drawn))
            for (file, lines, _, code, new), was_noticed in zip(drawn, noticed, strict=True):
                if not was_noticed:
                    print(f'    {file}:{lines.start}: {code}  →  {new}')
            print(f'{name}: {sum(noticed)} of {len(drawn)} noticed', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
